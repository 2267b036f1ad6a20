"""How models write a call between its markers: as JSON, as pairs of keys and values, as parameters with names.

JSON keeps its text, byte for byte. The others write strings without quotes, so what is a string and what is a number, a
list or an object is told by the tool's own schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from cachespec.engine.toolvalues import SPACE, string, value_json

Call: TypeAlias = tuple[str, str]
"""Name and argument text."""
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Of the parameters of the tools that may be called, by name."""

_BLANK = re.compile(f"[{SPACE}]*")


class Source:
    """The text of an answer, which grows at its end until it is `ended`; `at` is how far it is read.

    `close` closes a call; empty: the end of the answer does.
    """

    __slots__ = ("at", "close", "ended", "text")

    def __init__(self, close: str = "", text: str = "", *, ended: bool = False) -> None:
        self.close, self.text, self.at, self.ended = close, text, 0, ended


T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Reads on in a `Source`, and yields where it has to grow first; never once it is ended."""
Parse: TypeAlias = Callable[[Source, Schemas], Reading["Sequence[Call] | None"]]


@dataclass(frozen=True, slots=True)
class Body:
    """One way of writing.

    Attributes:
        parse: reads the calls, and behind them what closes them. None as soon as there can be no call: another may
            begin in what was read, and then no more than two readers ever look at the same text.
        markers: that it has inside.
    """

    parse: Parse
    markers: tuple[str, ...] = ()

    def read(self, text: str, schemas: Schemas) -> Sequence[Call] | None:
        """The calls in a text; None when they are not all there is."""
        try:
            next(self.parse(Source(text=text, ended=True), schemas))
        except StopIteration as stop:
            calls: Sequence[Call] | None = stop.value
            return calls
        raise AssertionError  # pragma: no cover - there is nothing to wait for


def _run(source: Source, pattern: re.Pattern[str]) -> Reading[str]:
    """The characters here that are of a kind: the pattern is a class of them, any number of times."""
    start = source.at
    while True:
        found: Any = pattern.match(source.text, source.at)
        source.at = found.end()
        if source.at < len(source.text) or source.ended:
            return source.text[start : source.at]
        yield


def _next(source: Source) -> Reading[str]:
    """The character here; empty at the end."""
    while source.at == len(source.text) and not source.ended:
        yield
    return source.text[source.at : source.at + 1]


def _word(source: Source, *words: str) -> Reading[str]:
    """Which of these stands behind the white space here, and past it; empty: none does."""
    yield from _run(source, _BLANK)
    longest = max(map(len, words))
    while True:
        rest = source.text[source.at : source.at + longest]
        for word in words:
            if rest.startswith(word):
                source.at += len(word)
                return word
        if source.ended or not any(word.startswith(rest) for word in words):
            return ""
        yield


def _over(source: Source, *, whole: bool) -> Reading[bool]:
    """Whether the call is closed here. `whole`: what was read shows its own end, so what closes it may be cut off."""
    yield from _run(source, _BLANK)
    if source.close and (yield from _word(source, source.close)):
        return True
    rest = source.text[source.at : source.at + len(source.close) + 1]
    if not (whole and source.ended and source.close.startswith(rest)):
        return False
    source.at += len(rest)
    return True


_BETWEEN = re.compile(f"[{SPACE};,]*")


def _json(source: Source, schemas: Schemas) -> Reading[Sequence[Call] | None]:
    """An object, several in a row, or a list of them."""
    calls: list[Call] = []
    listed = bool((yield from _word(source, "[")))
    while True:
        yield from _run(source, _BETWEEN if calls else _BLANK)
        if (yield from _next(source)) != "{":
            break
        start = source.at
        members = split_object(source.text, start) if (yield from _object(source)) else None
        call = None if members is None else _member_call(members[0])
        if call is None:
            return None
        calls.append(call)
    if not calls or (listed and not (yield from _word(source, "]"))):
        return None
    return calls if (yield from _over(source, whole=True)) else None


_PLAIN, _BARE, _ESCAPED = re.compile(r'[^"\\\x00-\x1f]*'), re.compile(r"[-+.\w]*"), frozenset('"\\/bfnrtu')


def _object(source: Source) -> Reading[bool]:
    """Past the JSON object here, whose words and numbers are not looked at; false once it can be none."""
    closers: list[str] = []
    expected = "value"
    fresh = False  # a list or an object was just opened
    while True:
        yield from _run(source, _BLANK)
        char = yield from _next(source)
        if closers and char == closers[-1] and (fresh or expected == ","):
            source.at += 1
            closers.pop()
            if not closers:
                return True
            expected, fresh = ",", False
            continue
        opened = False
        if expected in ",:":
            if char != expected:
                return False
            source.at += 1
            expected = "value" if expected == ":" or closers[-1] == "]" else "key"
        elif char == '"':
            if not (yield from _string_end(source)):
                return False
            expected = ":" if expected == "key" else ","
        elif expected == "value" and char and char in "{[":
            source.at += 1
            closers.append("}" if char == "{" else "]")
            expected, opened = "key" if char == "{" else "value", True
        elif expected == "value" and (yield from _run(source, _BARE)):
            expected = ","
        else:
            return False
        fresh = opened


def _string_end(source: Source) -> Reading[bool]:
    """Past the JSON string here; false once it can be none: a line break is written as an escape."""
    source.at += 1
    while True:
        yield from _run(source, _PLAIN)
        char = yield from _next(source)
        source.at += 1
        if char != "\\":
            return char == '"'
        if (yield from _next(source)) not in _ESCAPED:
            return False
        source.at += 1


def _member_call(members: Mapping[str, str]) -> Call | None:
    name = members.get("name", members.get("tool_name"))
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if name is None or not name.startswith('"'):
        return None
    if arguments.startswith('"'):
        arguments = json.loads(arguments)  # some models write the object as a string
    return json.loads(name), arguments


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


_LABEL = re.compile(r"[^\s\[\]{}]*")


def _args(source: Source, schemas: Schemas) -> Reading[Sequence[Call] | None]:
    """Name, marker, object; the next likewise."""
    calls: list[Call] = []
    while True:
        yield from _word(source, "[TOOL_CALLS]")
        yield from _run(source, _BLANK)
        name = yield from _run(source, _LABEL)
        if not name:
            break
        if (yield from _word(source, "[CALL_ID]")):
            yield from _run(source, _LABEL)
        if not (yield from _word(source, "[ARGS]")):
            return None
        yield from _run(source, _BLANK)
        start = source.at
        if (yield from _next(source)) != "{" or not (yield from _object(source)) or split_object(source.text, start) is None:
            return None
        calls.append((name, source.text[start : source.at]))
    return calls if calls and (yield from _over(source, whole=True)) else None


_KEYED_NAME, _KEY = re.compile(r"[^\s<>]*"), re.compile("[^<>]*")
_KEYED_ENDS = re.compile("</arg_value>|<arg_value>")


def _keyed(source: Source, schemas: Schemas) -> Reading[Sequence[Call] | None]:
    """The name, then each argument's key and value. A name alone is a call only if there is such a tool.

    Nothing but the closing marker tells that an argument or a letter of the name is not still to come.
    """
    yield from _run(source, _BLANK)
    name = yield from _run(source, _KEYED_NAME)
    pairs: list[tuple[str, str]] = []
    while name and (yield from _word(source, "<arg_key>")):
        key = yield from _run(source, _KEY)
        if not (yield from _word(source, "</arg_key>")) or not (yield from _word(source, "<arg_value>")):
            return None
        value = yield from _until(source, _KEYED_ENDS, "</arg_value>")
        if value is None:
            return None
        pairs.append((key, value))
    if not name or not (pairs or name in schemas) or not (yield from _over(source, whole=False)):
        return None
    return [_call(name, pairs, schemas)]


_TITLE = re.compile(r"[^>\n]*")
_NAMED_INLINE = re.compile("</parameter>|<parameter=|</function>|<function=")
_NAMED_LINES = re.compile("</parameter>|\n<parameter=|\n</function>|<function=")


def _named(source: Source, schemas: Schemas) -> Reading[Sequence[Call] | None]:
    """A function with its name, and in it parameters with theirs; their values may stand on lines of their own."""
    name = (yield from _title(source)) if (yield from _word(source, "<function=")) else ""
    pairs: list[tuple[str, str]] = []
    while name and (yield from _word(source, "<parameter=")):
        key = yield from _title(source)
        lines = (yield from _next(source)) == "\n"
        value = (yield from _until(source, _NAMED_LINES if lines else _NAMED_INLINE, "</parameter>")) if key else None
        if value is None:
            return None
        pairs.append((key, value[1:-1] if lines and len(value) > 1 and value[-1] == "\n" else value))
    if not name or not (yield from _word(source, "</function>")) or not (yield from _over(source, whole=True)):
        return None
    return [_call(name, pairs, schemas)]


def _title(source: Source) -> Reading[str]:
    """A name and the bracket behind it; empty: there is none."""
    name = yield from _run(source, _TITLE)
    if (yield from _next(source)) != ">":
        return ""
    source.at += 1
    return name


def _until(source: Source, ends: re.Pattern[str], end: str) -> Reading[str | None]:
    """A value up to its end, and past that; None: it was not closed before what cannot be in it.

    Whatever comes before every value is among that, so a value that is not closed does not hide a later call.
    """
    start = source.at
    while True:
        found = ends.search(source.text, source.at)
        if found is not None:
            source.at = found.end()
            return source.text[start : found.start()] if found[0] == end else None
        source.at = max(source.at, len(source.text) - len(end) + 1)
        if source.ended:
            return None
        yield


def _call(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> Call:
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    members = [f"{string(key)}: {value_json(value, known.get(key), schema)}" for key, value in pairs]
    return name, f"{{{', '.join(members)}}}"


JSON: Final = Body(_json)
ARGS: Final = Body(_args, ("[CALL_ID]", "[ARGS]"))
KEYED: Final = Body(_keyed, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
NAMED: Final = Body(_named, ("</function>", "</parameter>"))
