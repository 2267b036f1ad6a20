"""How models write a call between its markers: as JSON, as pairs of keys and values, as parameters with names.

JSON keeps its text, byte for byte. The others write strings without quotes, so what is a string and what is a number, a
list or an object is told by the tool's own schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Call: TypeAlias = tuple[str, str]
"""Name and argument text."""
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Of the parameters of the tools that may be called, by name."""

SPACE: Final = " \t\r\n"
_BLANK = re.compile(f"[{SPACE}]*")


@dataclass(frozen=True, slots=True)
class Body:
    """One way of writing.

    Attributes:
        read: the calls in a text without white space around it; None when they are not all there is.
        begins, ends: of a value, whose text may spell out the marker that closes the call. An `ends` that starts with a
            backslash is none.
        markers: that it has inside.
    """

    read: Callable[[str, Schemas], Sequence[Call] | None]
    begins: re.Pattern[str]
    ends: re.Pattern[str]
    markers: tuple[str, ...] = ()


def _json(text: str, schemas: Schemas) -> Sequence[Call] | None:
    """An object, several in a row, or a list of them."""
    if text.startswith("["):
        if not text.endswith("]"):
            return None
        text = text[1:-1].strip(SPACE)
    calls: list[Call] = []
    at = 0
    while at < len(text):
        members = split_object(text, at)
        call = None if members is None else _member_call(members[0])
        if members is None or call is None:
            return None
        calls.append(call)
        at = members[1]
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1
    return calls or None


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


_ARGS = re.compile(r"(?:\[TOOL_CALLS\])?\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]*)?\[ARGS\]\s*")


def _args(text: str, schemas: Schemas) -> Sequence[Call] | None:
    """Name, marker, object; the next likewise."""
    calls: list[Call] = []
    at = 0
    while at < len(text):
        head = _ARGS.match(text, at)
        found = None if head is None else split_object(text, head.end())
        if head is None or found is None:
            return None
        calls.append((head[1], text[head.end() : found[1]]))
        blank: Any = _BLANK.match(text, found[1])
        at = blank.end()
    return calls or None


_KEYED_NAME = re.compile(r"([^\s<>]+)\s*")
_KEYED = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _keyed(text: str, schemas: Schemas) -> Sequence[Call] | None:
    """The name, then each argument's key and value. A name alone is a call only if there is such a tool."""
    name = _KEYED_NAME.match(text)
    if name is None or (name.end() == len(text) and name[1] not in schemas):
        return None
    return _pairs(name[1], _KEYED, text[name.end() :], schemas)


_NAMED_HEAD, _NAMED_TAIL = re.compile(r"<function=([^>\n]+)>\s*"), "</function>"
_NAMED = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)


def _named(text: str, schemas: Schemas) -> Sequence[Call] | None:
    """A function with its name, and in it parameters with theirs; their values may stand on lines of their own."""
    head = _NAMED_HEAD.match(text)
    if head is None or not text.endswith(_NAMED_TAIL):
        return None
    return _pairs(head[1], _NAMED, text[head.end() : -len(_NAMED_TAIL)], schemas)


def _pairs(name: str, pair: re.Pattern[str], text: str, schemas: Schemas) -> Sequence[Call] | None:
    properties = schemas.get(name, {}).get("properties")
    members: list[str] = []
    at = 0
    while at < len(text):
        found = pair.match(text, at)
        if found is None:
            return None
        key, value = found[1], found[2]
        if pair is _NAMED and value[:1] == "\n" == value[-1:]:
            value = value[1:-1]
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        members.append(f"{_string(key)}: {_value(value, _types(schema))}")
        at = found.end()
    return [(name, f"{{{', '.join(members)}}}")]


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _value(text: str, types: frozenset[str]) -> str:
    """The JSON that a value without quotes stands for, of one of these types if it can be; no types: any."""
    bare = text.strip(SPACE)
    word = {"true": "true", "false": "false", "none": "null", "null": "null"}.get(bare.lower())
    if word is not None and ("null" if word == "null" else "boolean") in types:
        return word  # some templates write them as Python does
    try:
        kind = _kind(json.loads(bare, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return _string(text)
    fits = not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return bare if fits and kind != "string" else _string(text)  # a string's quotes are its own


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN is no JSON


def _types(schema: Any) -> frozenset[str]:
    """The types that a schema allows; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list | tuple):
        return frozenset(map(str, named))
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(schema.get("enum"), list | tuple):
        return frozenset(map(_kind, schema["enum"]))
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(several, list | tuple):
            each = [_types(one) for one in several]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()


def _kind(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")


_QUOTE, _QUOTED = re.compile('"'), re.compile(r'\\.|"', re.DOTALL)
JSON: Final = Body(_json, _QUOTE, _QUOTED)
ARGS: Final = Body(_args, _QUOTE, _QUOTED, ("[CALL_ID]", "[ARGS]"))
KEYED: Final = Body(
    _keyed,
    re.compile("<arg_value>"),
    re.compile("</arg_value>"),
    ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
NAMED: Final = Body(_named, re.compile(r"<parameter=[^>\n]+>"), re.compile("</parameter>"), ("</function>", "</parameter>"))
