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
from cachespec.engine.toolbodies import ARGS, JSON, KEYED, NAMED, Body, Call, Reading, Schemas, Source
from cachespec.engine.toolvalues import SPACE
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

    A call is read as it comes. Once it can be none, its opening tag is text, and what follows is looked at anew.
    """

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self.calls = 0
        self._form, self._schemas = form, schemas
        self._source = Source(form.close)
        self._reading: Reading[Sequence[Call] | None] | None = None  # of the call that has begun
        self._start = 0  # of it, behind the opening tag
        self._gap = ""  # white space before it

    def push(self, text: str) -> list[Piece]:
        self._source.text += text
        return self._take()

    def finish(self) -> list[Piece]:
        self._source.ended = True
        found = self._take()
        rest, self._source.text = self._source.text, ""
        if rest and not (self.calls and not rest.strip(SPACE)):
            found.append(TextDelta(rest))
        return found

    def _take(self) -> list[Piece]:
        found: list[Piece] = []
        source, opening = self._source, self._form.open
        while self._reading is not None or self._opened(found):
            assert self._reading is not None  # noqa: S101 - it has begun
            try:
                next(self._reading)
            except StopIteration as stop:
                calls: Sequence[Call] | None = stop.value
            else:
                return found  # it may go on
            self._reading = None
            if calls is None:
                source.at = self._start
                found.append(TextDelta(self._gap + opening))
                continue
            first, self.calls = self.calls, self.calls + len(calls)
            found += [ToolCallDelta(first + i, f"call_{uuid4().hex[:24]}", *call) for i, call in enumerate(calls)]
        source.text, source.at = source.text[source.at :], 0
        return found

    def _opened(self, found: list[Piece]) -> bool:
        """Show the text up to the next call, and begin to read that; false when there is none yet."""
        source, opening = self._source, self._form.open
        start = source.text.find(opening, source.at)
        end = max(source.at, len(source.text) - overlap(source.text, opening)) if start < 0 else start
        shown = source.text[source.at : end].rstrip(SPACE)
        if shown:
            found.append(TextDelta(shown))
        source.at += len(shown)
        if start < 0:
            return False
        self._gap = source.text[source.at : start]
        source.at = self._start = start + len(opening)
        self._reading = self._form.body.parse(source, self._schemas)
        return True


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
