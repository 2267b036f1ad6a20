"""`Message`, `Part` and `Tool` values that the caller built, on their way into a request.

They are checked, since dataclasses check nothing by themselves, and the JSON they hold is copied, so that what the caller
changes later does not reach the request. A value that holds none stays the one it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args

from cachespec.checks import check_bool, check_mapping, check_name, check_text, copy_json, kind_of, refuse
from cachespec.errors import InputError
from cachespec.messages import (
    CacheMark,
    ImagePart,
    Message,
    OpaquePart,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)

_V = TypeVar("_V", bound=Part | Tool)
_ROLES: tuple[str, ...] = get_args(Role)


def own_message(message: Message, where: str) -> Message:
    """The message with parts of its own. Raises `InputError` naming the field, as in ``messages[0].parts[2].text``."""
    if message.role not in _ROLES:
        raise InputError(f"unknown role {message.role!r}; known: {', '.join(_ROLES)}", field=f"{where}.role")
    if not isinstance(message.parts, tuple):
        raise InputError(f"must be a tuple of parts, not {kind_of(message.parts)}", field=f"{where}.parts")
    if not message.parts and message.role != "assistant":  # a model may have said nothing
        raise InputError("is empty", field=f"{where}.parts")
    _text(message.name, f"{where}.name")
    parts = tuple(own_part(part, f"{where}.parts[{i}]") for i, part in enumerate(message.parts))
    extra = _json(message.extra, f"{where}.extra")
    if extra is None and all(new is old for new, old in zip(parts, message.parts, strict=True)):
        return message
    return replace(message, parts=parts, extra=extra)


def own_part(part: Any, where: str) -> Part:
    """The part with JSON of its own. Raises `InputError` naming the field."""
    match part:
        case TextPart():
            check_text(part.text, f"{where}.text")
        case ImagePart():
            for name in ("url", "data", "media_type", "detail"):
                _text(getattr(part, name), f"{where}.{name}")
            if (part.url is None) == (part.data is None):
                raise InputError("needs either url or data", field=where)
            if part.data is not None and not part.media_type:
                raise InputError("is missing", field=f"{where}.media_type")
        case ToolCallPart():
            check_name(part.id, f"{where}.id")
            check_name(part.name, f"{where}.name")
            check_text(part.arguments, f"{where}.arguments")
        case ToolResultPart():
            check_name(part.id, f"{where}.id")
            check_bool(part.is_error, f"{where}.is_error")
            return _own(replace(part, content=_plain(part.content, f"{where}.content")), where)
        case ReasoningPart():
            for name in ("text", "provider", "model"):
                _text(getattr(part, name), f"{where}.{name}", needed=name == "text")
        case OpaquePart():
            check_mapping(part.raw, f"{where}.raw")
        case _:
            raise InputError(f"must be a content part, not {kind_of(part)}", field=where)
    known: Part = part
    return _own(known, where)


def own_tool(tool: Tool, where: str) -> Tool:
    """The tool with JSON of its own. Raises `InputError` naming the field."""
    check_name(tool.name, f"{where}.name")
    _text(tool.description, f"{where}.description")
    if tool.strict is not None:
        check_bool(tool.strict, f"{where}.strict")
    if tool.raw is not None and tool.dialect is None:
        raise InputError("is missing: whose tool it is", field=f"{where}.dialect")
    check_mapping(tool.parameters, f"{where}.parameters")
    return _own(tool, where)


def _plain(content: object, where: str) -> tuple[TextPart | ImagePart, ...]:
    if not isinstance(content, list | tuple):
        refuse(where, "a tuple of parts", content)
    parts: list[TextPart | ImagePart] = []
    for i, given in enumerate(content):
        part = own_part(given, f"{where}[{i}]")
        if not isinstance(part, TextPart | ImagePart):
            raise InputError("a tool result holds text and images", field=f"{where}[{i}]")
        parts.append(part)
    return tuple(parts)


def _own(value: _V, where: str) -> _V:
    """The same value with a copy of every JSON object it holds."""
    copies: dict[str, Any] = {}
    for name in ("parameters", "raw", "extra"):
        held = getattr(value, name, None)
        if held is not None:
            copies[name] = _json(held, f"{where}.{name}")
    mark = getattr(value, "mark", None)
    if mark is not None:
        if not isinstance(mark, CacheMark) or mark.dialect not in ("anthropic", "openai"):
            refuse(f"{where}.mark", "a CacheMark of anthropic or openai", mark)
        copies["mark"] = replace(mark, fields=copy_json(check_mapping(mark.fields, f"{where}.mark"), f"{where}.mark"))
    return replace(value, **copies) if copies else value


def _json(value: object, where: str) -> Mapping[str, Any] | None:
    if value is None:
        return None
    copy: Mapping[str, Any] = copy_json(check_mapping(value, where), where)
    return copy


def _text(value: object, where: str, *, needed: bool = False) -> None:
    if value is not None or needed:
        check_text(value, where)
