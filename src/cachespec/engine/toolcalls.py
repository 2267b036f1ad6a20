"""Tool calls in the text of an answer: found while it streams, their argument text byte for byte.

Three ways of writing calls are understood; which one a model uses is read off its chat template:

- ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen 2.5 and 3, and many more)
- ``llama``: an answer that is nothing but ``{"name": ..., "parameters": {...}}``, several separated by ``;`` (Llama 3.1)
- ``mistral``: ``[TOOL_CALLS]`` and a list of such objects

What looks like a call and turns out to be none comes out as the text it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias
from uuid import uuid4

from cachespec.engine.text import overlap
from cachespec.events import TextDelta, ToolCallDelta

Piece: TypeAlias = TextDelta | ToolCallDelta
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. `markers` are control tokens whose text the parser needs to see."""

    kind: Literal["hermes", "llama", "mistral"]
    markers: tuple[str, ...] = ()

    def parser(self, names: frozenset[str]) -> ToolParser:
        """A parser for one answer; `names` are the tools it may call."""
        if self.kind == "hermes":
            return _Tagged()
        return _Trailing(self.markers[0], names, bare=self.kind == "llama")


class ToolParser(Protocol):
    """Splits an answer into text and calls. `calls` is how many were found."""

    calls: int

    def push(self, text: str) -> list[Piece]:
        """Take more text in; what is certain now comes out."""

    def finish(self) -> list[Piece]:
        """What was withheld, now that the answer ended."""


def tool_format(template: str) -> ToolFormat | None:
    """The format that a template with tools writes; None when it is not one of ours."""
    if "<function=" in template or "[ARGS]" in template:
        return None
    if "<tool_call>" in template:
        return ToolFormat("hermes")
    if "[TOOL_CALLS]" in template:
        return ToolFormat("mistral", ("[TOOL_CALLS]",))
    if "<|python_tag|>" in template or ('"parameters"' in template and '"name"' in template):
        return ToolFormat("llama", ("<|python_tag|>",))
    return None


class PlainText:
    """The parser of a request without tools."""

    calls = 0

    def push(self, text: str) -> list[Piece]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class _Tagged:
    """Calls between tags. White space around a call belongs to the format: templates write it back themselves.

    A closing tag inside a string of the call is text of that string, unless there is no call with it so.
    """

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self.calls = 0
        self._buffer = ""
        self._inside = False
        self._begin()

    def _begin(self) -> None:
        self._searched = 0  # no closing tag begins before here that was not looked at
        self._strings = _Strings()
        self._doubtful: int | None = None  # the first closing tag that is in a string

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._take(ended=False)

    def finish(self) -> list[Piece]:
        found = self._take(ended=True)
        rest, self._buffer = self._buffer, ""
        if self.calls and not rest.strip(_SPACE):
            return found
        return found + self._text(rest)

    def _take(self, *, ended: bool) -> list[Piece]:
        found: list[Piece] = []
        while True:
            if self._inside:
                piece = self._call(ended)
                if piece is None:
                    return found
                found.append(piece)
                continue
            start = self._buffer.find(self._OPEN)
            if start >= 0:
                found += self._text(self._buffer[:start].rstrip(_SPACE))
                self._buffer = self._buffer[start + len(self._OPEN) :]
                self._inside = True
                self._begin()
                continue
            shown = self._buffer[: len(self._buffer) - overlap(self._buffer, self._OPEN)].rstrip(_SPACE)
            found += self._text(shown)
            self._buffer = self._buffer[len(shown) :]
            return found

    def _text(self, text: str) -> list[Piece]:
        return [TextDelta(text)] if text else []

    def _call(self, ended: bool) -> Piece | None:
        """The call that the buffer begins with, or what is none as the text it is; None: it may go on."""
        while True:
            end = self._buffer.find(self._CLOSE, self._searched)
            if end < 0 and not ended:
                self._searched = max(self._searched, len(self._buffer) - len(self._CLOSE) + 1)
                return None
            if end < 0 or not self._strings.open_at(self._buffer, end):
                break
            self._doubtful = end if self._doubtful is None else self._doubtful
            self._searched = end + len(self._CLOSE)
        end = len(self._buffer) if end < 0 else end  # the closing tag may have been cut off
        call = read_call(self._buffer[:end].strip(_SPACE))
        if call is None and self._doubtful is not None:
            end = self._doubtful
        body, self._buffer = self._buffer[:end], self._buffer[end:]
        close = self._CLOSE if self._buffer else ""
        self._buffer, self._inside = self._buffer[len(close) :], False
        if call is None:
            return TextDelta(self._OPEN + body + close)
        self.calls += 1
        return ToolCallDelta(self.calls - 1, f"call_{uuid4().hex[:24]}", *call)


class _Strings:
    """Where strings begin and end in a JSON text that is still growing."""

    _BEGIN, _END = re.compile('"'), re.compile(r'\\.|"', re.DOTALL)

    def __init__(self) -> None:
        self._at, self._open = 0, False

    def open_at(self, text: str, at: int) -> bool:
        """Whether a string is open there: never before where this was asked last."""
        while match := (self._END if self._open else self._BEGIN).search(text, self._at, at):
            self._at = match.end()
            if match[0] == '"':
                self._open = not self._open
        self._at = max(self._at, at - 1)  # the last may be half an escape
        return self._open


class _Trailing:
    """Calls that run to the end of the answer: after a marker, or (`bare`) an answer that is one from its first brace."""

    def __init__(self, marker: str, names: frozenset[str], *, bare: bool) -> None:
        self.calls = 0
        self._marker, self._names, self._bare = marker, names, bare
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
            return [TextDelta(shown)] if self._plain or shown.strip(_SPACE) else []
        if self._bare and not self._plain and self._buffer.lstrip(_SPACE).startswith("{"):
            self._parts.append(self._buffer)
            self._buffer, self._began = "", "brace"
            return []
        cut = len(self._buffer) - overlap(self._buffer, self._marker)
        shown = self._buffer[:cut]
        self._plain = self._plain or bool(shown.strip(_SPACE))
        if not self._plain:
            return []  # white space at the beginning: belongs to a call, if one follows
        self._buffer = self._buffer[cut:]
        return [TextDelta(shown)] if shown else []

    def finish(self) -> list[Piece]:
        body = "".join(self._parts)
        if self._began == "no":
            rest, self._buffer = self._buffer, ""
            return [TextDelta(rest)] if rest else []
        calls = read_calls(body)
        if calls is None or (self._began == "brace" and any(name not in self._names for name, _ in calls)):
            text = body if self._began == "brace" else self._marker + body
            return [TextDelta(text)]
        self.calls = len(calls)
        # Mistral's templates insist on ids of nine letters and digits; others take any.
        return [ToolCallDelta(i, uuid4().hex[:9], *call) for i, call in enumerate(calls)]


def read_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, argument text) of each call in a list, or in a row of objects; None when that is not all there is."""
    text = text.strip(_SPACE)
    if text.startswith("["):
        if not text.endswith("]"):
            return None
        text = text[1:-1].strip(_SPACE)
    calls: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        members = split_object(text, at)
        if members is None:
            return None
        call = _call(members[0])
        if call is None:
            return None
        calls.append(call)
        at = members[1]
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1
    return calls or None


def read_call(text: str) -> tuple[str, str] | None:
    """Name and argument text of the one call that `text` is; None when it is none."""
    members = split_object(text, 0)
    return None if members is None or members[1] != len(text) else _call(members[0])


def _call(members: Mapping[str, str]) -> tuple[str, str] | None:
    name, arguments = members.get("name"), members.get("arguments", members.get("parameters", "{}"))
    if name is None or not name.startswith('"'):
        return None
    if arguments.startswith('"'):
        arguments = json.loads(arguments)  # some models write the object as a string
    return json.loads(name), arguments


_BLANK = re.compile(r"[ \t\r\n]*")


def split_object(text: str, at: int) -> tuple[dict[str, str], int] | None:
    """The members of the JSON object at `at`, each value as its own text, and where the object ends; None: no object."""
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}

    def skip(position: int) -> int:
        blank: Any = _BLANK.match(text, position)
        return int(blank.end())

    if text[at : at + 1] != "{":
        return None
    at = skip(at + 1)
    if text[at : at + 1] == "}":
        return members, at + 1
    try:
        while True:
            if text[at : at + 1] != '"':
                return None
            name, at = decoder.raw_decode(text, at)
            at = skip(at)
            if text[at : at + 1] != ":":
                return None
            start = skip(at + 1)
            _, at = decoder.raw_decode(text, start)
            members[name] = text[start:at]
            at = skip(at)
            if text[at : at + 1] == "}":
                return members, at + 1
            if text[at : at + 1] != ",":
                return None
            at = skip(at + 1)
    except (ValueError, RecursionError):
        return None
