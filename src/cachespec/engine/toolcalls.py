"""Tool calls in the text of an answer: found while it streams, their argument text byte for byte.

A model writes calls in the way it was trained on, and its chat template writes earlier ones back in the same way. So a
`ToolFormat` is a model's own exactly if it finds the calls that the template writes; `ChatTemplate` tries that.

What looks like a call and turns out to be none comes out as the text it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias
from uuid import uuid4

from cachespec.engine.text import overlap
from cachespec.engine.toolbodies import ARGS, JSON, KEYED, NAMED, SPACE, Body, Call, Schemas
from cachespec.events import TextDelta, ToolCallDelta
from cachespec.messages import Tool

Piece: TypeAlias = TextDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: `body` after `open`, up to `close`, or without one to the end of the answer.

    `bare`: `open` may be missing; then an answer is calls from its first brace on, or has none.
    """

    open: str
    close: str = ""
    body: Body = JSON
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What the parser needs to see where it is a control token."""
        return tuple(filter(None, (self.open, self.close, *self.body.markers)))

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """A parser for one answer, which may call these tools."""
        schemas = {tool.name: tool.parameters for tool in tools}
        return _Tagged(self, schemas) if self.close else _Trailing(self, schemas)

    def reads(self, text: str, call: Call, tools: Sequence[Tool]) -> bool:
        """Whether it finds in a text this call, and nothing else."""
        parser = self.parser(tools)
        found = parser.push(text) + parser.finish()
        calls = [piece for piece in found if isinstance(piece, ToolCallDelta)]
        if len(calls) != 1 or calls[0].name != call[0] or any(p.text.strip(SPACE) for p in found if isinstance(p, TextDelta)):
            return False
        try:
            return bool(json.loads(calls[0].arguments) == json.loads(call[1]))
        except ValueError:
            return False


HERMES: Final = ToolFormat("<tool_call>", "</tool_call>")
FORMATS: Final = (
    HERMES,  # Hermes, Qwen 2.5 and 3, Granite 4, and many more
    ToolFormat("<tool_call>", "</tool_call>", KEYED),  # GLM 4.5 to 4.7
    ToolFormat("<tool_call>", "</tool_call>", NAMED),  # Qwen 3 Coder, Qwen 3.5, Nemotron 3
    ToolFormat("<tool_calls>", "</tool_calls>"),  # Apriel, MiniMax M1
    ToolFormat("<|START_ACTION|>", "<|END_ACTION|>"),  # Command R7B and later
    ToolFormat("[TOOL_CALLS]"),  # Mistral: a list
    ToolFormat("[TOOL_CALLS]", body=ARGS),  # Mistral, from 2025 on
    ToolFormat("<|function_call|>"),  # GigaChat
    ToolFormat("<|python_tag|>", bare=True),  # Llama 3.1: several are separated by semicolons
)


class ToolParser(Protocol):
    """Splits an answer into text and calls. `calls` is how many were found."""

    calls: int

    def push(self, text: str) -> list[Piece]:
        """Take more text in; what is certain now comes out."""

    def finish(self) -> list[Piece]:
        """What was withheld, now that the answer ended."""


class PlainText:
    """The parser of a request without tools."""

    calls = 0

    def push(self, text: str) -> list[Piece]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class _Tagged:
    """Calls between tags. White space around a call belongs to the format: templates write it back themselves.

    A closing tag inside a value of the call is text of that value, unless there is no call with it so.
    """

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self.calls = 0
        self._form, self._schemas = form, schemas
        self._buffer = ""
        self._inside = False
        self._gap = ""  # white space before it
        self._begin()

    def _begin(self) -> None:
        self._searched = 0  # no closing tag begins before here that was not looked at
        self._values = _Values(self._form.body)
        self._doubtful: int | None = None  # the first closing tag that is in a value

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._take(ended=False)

    def finish(self) -> list[Piece]:
        found = self._take(ended=True)
        rest, self._buffer = self._buffer, ""
        if self.calls and not rest.strip(SPACE):
            return found
        return found + self._text(rest)

    def _take(self, *, ended: bool) -> list[Piece]:
        found: list[Piece] = []
        opening = self._form.open
        while True:
            if self._inside:
                pieces = self._call(ended)
                if not pieces:
                    return found
                found += pieces
                continue
            start = self._buffer.find(opening)
            if start >= 0:
                shown = self._buffer[:start].rstrip(SPACE)
                found += self._text(shown)
                self._gap = self._buffer[len(shown) : start]
                self._buffer = self._buffer[start + len(opening) :]
                self._inside = True
                self._begin()
                continue
            shown = self._buffer[: len(self._buffer) - overlap(self._buffer, opening)].rstrip(SPACE)
            found += self._text(shown)
            self._buffer = self._buffer[len(shown) :]
            return found

    def _text(self, text: str) -> list[Piece]:
        return [TextDelta(text)] if text else []

    def _call(self, ended: bool) -> list[Piece]:
        """The calls that the buffer begins with, or what are none as the text it is; nothing: it may go on."""
        closing = self._form.close
        while True:
            end = self._buffer.find(closing, self._searched)
            if end < 0 and not ended:
                self._searched = max(self._searched, len(self._buffer) - len(closing) + 1)
                return []
            if end < 0 or not self._values.open_at(self._buffer, end):
                break
            self._doubtful = end if self._doubtful is None else self._doubtful
            self._searched = end + len(closing)
        end = len(self._buffer) if end < 0 else end  # the closing tag may have been cut off
        calls = self._form.body.read(self._buffer[:end].strip(SPACE), self._schemas)
        if calls is None and self._doubtful is not None:
            end = self._doubtful
        body, self._buffer = self._buffer[:end], self._buffer[end:]
        close = closing if self._buffer else ""
        self._buffer, self._inside = self._buffer[len(close) :], False
        if calls is None:
            return [TextDelta(self._gap + self._form.open + body + close)]
        first, self.calls = self.calls, self.calls + len(calls)
        return [ToolCallDelta(first + i, f"call_{uuid4().hex[:24]}", *call) for i, call in enumerate(calls)]


class _Values:
    """Where values begin and end in the body of a call that is still growing."""

    def __init__(self, body: Body) -> None:
        self._begins, self._ends = body.begins, body.ends
        self._at, self._open = 0, False

    def open_at(self, text: str, at: int) -> bool:
        """Whether a value is open there: never before where this was asked last."""
        while match := (self._ends if self._open else self._begins).search(text, self._at, at):
            self._at = match.end()
            if not match[0].startswith("\\"):
                self._open = not self._open
        self._at = max(self._at, at - 1)  # the last may be half an escape
        return self._open


class _Trailing:
    """Calls that run to the end of the answer: after a marker, or (`bare`) an answer that is one from its first brace."""

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self.calls = 0
        self._marker, self._form, self._schemas = form.open, form, schemas
        self._buffer = ""
        self._parts: list[str] = []  # of the calls, once they have begun
        self._began: Literal["no", "marker", "brace"] = "no"
        self._plain = False  # text came first, so a brace begins no call any more

    def push(self, text: str) -> list[Piece]:
        if self._began != "no":
            self._parts.append(text)
            return []
        self._buffer += text
        start = self._buffer.find(self._marker)
        if start >= 0:
            self._parts.append(self._buffer[start + len(self._marker) :])
            shown, self._buffer, self._began = self._buffer[:start], "", "marker"
            return [TextDelta(shown)] if self._plain or shown.strip(SPACE) else []
        if self._form.bare and not self._plain and self._buffer.lstrip(SPACE).startswith("{"):
            self._parts.append(self._buffer)
            self._buffer, self._began = "", "brace"
            return []
        cut = len(self._buffer) - overlap(self._buffer, self._marker)
        shown = self._buffer[:cut]
        self._plain = self._plain or bool(shown.strip(SPACE))
        if not self._plain:
            return []  # white space at the beginning: belongs to a call, if one follows
        self._buffer = self._buffer[cut:]
        return [TextDelta(shown)] if shown else []

    def finish(self) -> list[Piece]:
        body = "".join(self._parts)
        if self._began == "no":
            rest, self._buffer = self._buffer, ""
            return [TextDelta(rest)] if rest else []
        calls = self._form.body.read(body.strip(SPACE), self._schemas)
        if calls is None or (self._began == "brace" and any(name not in self._schemas for name, _ in calls)):
            text = body if self._began == "brace" else self._marker + body
            return [TextDelta(text)]
        self.calls = len(calls)
        # Mistral's templates insist on ids of nine letters and digits; others take any.
        return [ToolCallDelta(i, uuid4().hex[:9], *call) for i, call in enumerate(calls)]
