"""From a dictionary to a content part: one reader for each kind of part of every dialect.

The field names are those of the vendors' SDK types. The fields of a part that only its dialect knows go to `extra`; whole
parts that only one dialect knows become `OpaquePart`; everything kept is copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, get_args

from cachespec.built import own_part
from cachespec.checks import (
    check_bool,
    check_keys,
    check_list,
    check_mapping,
    check_name,
    check_text,
    copy_json,
    kind_of,
    nearest,
    needed,
)
from cachespec.errors import InputError
from cachespec.messages import (
    JSON,
    CacheMark,
    ImagePart,
    OpaquePart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)

Dialect: TypeAlias = Literal["chat", "responses", "messages"]

PART_TYPES: tuple[type, ...] = get_args(Part)
MARKS: dict[str, Literal["anthropic", "openai"]] = {"cache_control": "anthropic", "prompt_cache_breakpoint": "openai"}
_CONTENT_KEYS = (
    *("text", "content", "output", "input", "arguments", "source", "image_url", "thinking", "summary", "function"),
    *("role", "call_id", "tool_use_id", "tool_call_id", "tool_calls", "is_error", "detail"),
)
OPAQUE: dict[str, Dialect] = {
    "refusal": "chat",
    "input_audio": "chat",
    "file": "chat",
    "video_url": "chat",
    "audio_url": "chat",
    "input_file": "responses",
    "document": "messages",
    "search_result": "messages",
    "server_tool_use": "messages",
    "mcp_tool_use": "messages",
    "container_upload": "messages",
    "tool_reference": "messages",
    "browser_state": "messages",
    "compaction": "messages",
}


def parse_part(raw: object, where: str, dialect: Dialect | None = None) -> Part:
    """Read one content part (or, in Responses, one item that is no message)."""
    if isinstance(raw, PART_TYPES):
        return own_part(raw, where)
    if not isinstance(raw, Mapping):
        raise InputError(f"must be a content part, not {kind_of(raw)}", field=where)
    kind = needed(raw, "type", where)
    if not isinstance(kind, str):
        raise InputError("is missing" if kind is None else "must be a string", field=f"{where}.type")
    reader = READERS.get(kind)
    if reader is not None:
        return reader(raw, where, dialect)
    owner = OPAQUE.get(kind)
    if owner is None and kind.endswith("_tool_result"):
        owner = "messages"
    if kind == "refusal" and dialect == "responses":
        owner = "responses"
    if owner is None:
        known = [*READERS, *OPAQUE]
        if dialect is None or get_close_matches(kind, known, 1, 0.85):
            raise InputError(f"unknown kind of content {kind!r}{nearest(kind, known)}", field=f"{where}.type")
        owner = dialect
    return _opaque(raw, where, owner)


def read_mark(raw: Mapping[str, Any], where: str) -> CacheMark | None:
    """The caller's cache mark on a part or tool, with unknown keys kept."""
    found: CacheMark | None = None
    for key, dialect in MARKS.items():
        fields = raw.get(key)
        if fields is None:
            continue
        if found is not None:
            raise InputError(f"one mark a part: {' or '.join(MARKS)}", field=f"{where}.{key}")
        field = f"{where}.{key}"
        found = CacheMark(dialect=dialect, fields=copy_json(check_mapping(fields, field), field))
    return found


def read_rest(raw: Mapping[str, Any], known: tuple[str, ...], where: str) -> JSON | None:
    """The fields beside the known ones, copied.

    A near miss of a known name is refused as a slip of the pen, and so is what holds content in another kind of part.
    """
    if raw.keys() <= set(known):
        return None
    rest = {}
    for key, value in raw.items():
        if key in known or key in MARKS or value is None:
            continue
        if key in _CONTENT_KEYS or not isinstance(key, str) or get_close_matches(key, (*known, *MARKS), 1, 0.8):
            check_keys({key: value}, (*known, *MARKS), where)
        rest[key] = copy_json(value, f"{where}.{key}")
    return rest or None


def parse_content(value: object, where: str, dialect: Dialect | None) -> list[Part]:
    if value is None:
        return []
    if isinstance(value, str):
        return [TextPart(text=check_text(value, where))]
    items = check_list(value, where, wanted="a string or a list")
    return [parse_part(part, f"{where}[{i}]", dialect) for i, part in enumerate(items)]


def plain_parts(parts: list[Part], where: str) -> tuple[TextPart | ImagePart, ...]:
    for i, part in enumerate(parts):
        if not isinstance(part, TextPart | ImagePart):
            raise InputError("a tool result holds text and images", field=f"{where}[{i}]")
    return tuple(part for part in parts if isinstance(part, TextPart | ImagePart))


def _text(raw: Mapping[str, Any], where: str, _: Dialect | None) -> TextPart:
    return TextPart(
        text=check_text(needed(raw, "text", where), f"{where}.text"),
        mark=read_mark(raw, where),
        extra=read_rest(raw, ("type", "text"), where),
    )


def _image_url(raw: Mapping[str, Any], where: str, _: Dialect | None) -> ImagePart:
    field = f"{where}.image_url"
    image = check_mapping(needed(raw, "image_url", where), field)
    check_keys(image, ("url", "detail"), field)
    known = ("type", "image_url")
    return _image(image.get("url"), f"{field}.url", image.get("detail"), f"{field}.detail", raw, known, where)


def _input_image(raw: Mapping[str, Any], where: str, _: Dialect | None) -> Part:
    if raw.get("file_id") is not None:
        return _opaque(raw, where, "responses")
    known = ("type", "image_url", "detail", "file_id")
    return _image(raw.get("image_url"), f"{where}.image_url", raw.get("detail"), f"{where}.detail", raw, known, where)


def _image(
    url: object, url_field: str, detail: object, detail_field: str, raw: Mapping[str, Any], known: tuple[str, ...], where: str
) -> ImagePart:
    """An image by URL. A base64 ``data:`` URL is taken apart, so that dialects without such URLs can send it too."""
    link: str | None = check_name(url, url_field)
    data = media_type = None
    head, comma, body = url.partition(",") if isinstance(url, str) and url.startswith("data:") else ("", "", "")
    if comma and head.endswith(";base64") and head.count(";") == 1:
        link, data, media_type = None, body, head[len("data:") : -len(";base64")]
    return ImagePart(
        url=link,
        data=data,
        media_type=media_type or None,
        detail=None if detail is None else check_text(detail, detail_field),
        mark=read_mark(raw, where),
        extra=read_rest(raw, known, where),
    )


def _anthropic_image(raw: Mapping[str, Any], where: str, _: Dialect | None) -> Part:
    field = f"{where}.source"
    source = check_mapping(needed(raw, "source", where), field)
    kind = source.get("type")
    url = data = media_type = None
    if kind == "url":
        check_keys(source, ("type", "url"), field)
        url = check_name(source.get("url"), f"{field}.url")
    elif kind == "base64":
        check_keys(source, ("type", "data", "media_type"), field)
        data = check_name(source.get("data"), f"{field}.data")
        media_type = check_name(source.get("media_type"), f"{field}.media_type")
    elif kind == "file":
        return _opaque(raw, where, "messages")
    else:
        raise InputError(f"must be 'base64', 'url' or 'file', not {kind!r}", field=f"{field}.type")
    extra = read_rest(raw, ("type", "source"), where)
    return ImagePart(url=url, data=data, media_type=media_type, mark=read_mark(raw, where), extra=extra)


def parse_tool_call(raw: object, where: str) -> Part:
    """One entry of a Chat message's ``tool_calls``."""
    call = check_mapping(raw, where)
    kind = call.get("type", "function")
    if kind != "function":
        if kind != "custom":
            raise InputError(f"must be 'function' or 'custom', not {kind!r}", field=f"{where}.type")
        return OpaquePart(dialect="chat", raw=copy_json(call, where))
    field = f"{where}.function"
    function = check_mapping(needed(call, "function", where), field)
    check_keys(function, ("name", "arguments"), field)
    return ToolCallPart(
        id=check_name(needed(call, "id", where), f"{where}.id"),
        name=check_name(needed(function, "name", field), f"{field}.name"),
        arguments=check_text(needed(function, "arguments", field), f"{field}.arguments"),
        mark=read_mark(call, where),
        extra=read_rest(call, ("type", "id", "function"), where),
    )


def _function_call(raw: Mapping[str, Any], where: str, _: Dialect | None) -> ToolCallPart:
    return ToolCallPart(
        id=check_name(needed(raw, "call_id", where), f"{where}.call_id"),
        name=check_name(needed(raw, "name", where), f"{where}.name"),
        arguments=check_text(needed(raw, "arguments", where), f"{where}.arguments"),
        mark=read_mark(raw, where),
        extra=read_rest(raw, ("type", "call_id", "name", "arguments"), where),
    )


def _tool_use(raw: Mapping[str, Any], where: str, _: Dialect | None) -> ToolCallPart:
    """The input object becomes text in its own key order: that is the order the model wrote."""
    arguments = copy_json(check_mapping(needed(raw, "input", where), f"{where}.input"), f"{where}.input")
    return ToolCallPart(
        id=check_name(needed(raw, "id", where), f"{where}.id"),
        name=check_name(needed(raw, "name", where), f"{where}.name"),
        arguments=json.dumps(arguments, separators=(",", ":"), ensure_ascii=False),
        mark=read_mark(raw, where),
        extra=read_rest(raw, ("type", "id", "name", "input"), where),
    )


def _tool_result(raw: Mapping[str, Any], where: str, _: Dialect | None) -> Part:
    return _any_result(raw, where, "messages", "tool_use_id", "content")


def _function_call_output(raw: Mapping[str, Any], where: str, _: Dialect | None) -> Part:
    return _any_result(raw, where, "responses", "call_id", "output")


def _any_result(raw: Mapping[str, Any], where: str, dialect: Dialect, id_key: str, content_key: str) -> Part:
    content = parse_content(raw.get(content_key), f"{where}.{content_key}", dialect)
    result_id = check_name(needed(raw, id_key, where), f"{where}.{id_key}")
    if any(isinstance(part, OpaquePart) for part in content):
        return _opaque(raw, where, dialect)
    is_error = raw.get("is_error")
    return ToolResultPart(
        id=result_id,
        content=plain_parts(content, f"{where}.{content_key}"),
        is_error=is_error is not None and check_bool(is_error, f"{where}.is_error"),
        mark=read_mark(raw, where),
        extra=read_rest(raw, ("type", id_key, content_key, "is_error"), where),
    )


def _thinking(raw: Mapping[str, Any], where: str, _: Dialect | None) -> ReasoningPart:
    text = check_text(needed(raw, "thinking", where), f"{where}.thinking") if raw["type"] == "thinking" else ""
    return ReasoningPart(text=text, raw=copy_json(raw, where), provider="anthropic")


def _reasoning(raw: Mapping[str, Any], where: str, _: Dialect | None) -> ReasoningPart:
    """A Responses reasoning item: its text is the full reasoning where the vendor gives it, else the summary."""
    item = copy_json(raw, where)
    texts: list[str] = []
    for key in ("content", "summary"):
        for i, part in enumerate([] if texts or not item.get(key) else check_list(item[key], f"{where}.{key}")):
            field = f"{where}.{key}[{i}]"
            texts.append(check_text(check_mapping(part, field).get("text"), f"{field}.text"))
    text = "".join(texts)
    return ReasoningPart(text=text, raw=item, provider="openai")


def _opaque(raw: Mapping[str, Any], where: str, dialect: Dialect) -> OpaquePart:
    mark = read_mark(raw, where)
    return OpaquePart(dialect=dialect, raw=copy_json({k: v for k, v in raw.items() if k not in MARKS}, where), mark=mark)


READERS: dict[str, Callable[[Mapping[str, Any], str, Dialect | None], Part]] = {
    "text": _text,
    "input_text": _text,
    "output_text": _text,
    "image_url": _image_url,
    "input_image": _input_image,
    "image": _anthropic_image,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "thinking": _thinking,
    "redacted_thinking": _thinking,
    "reasoning": _reasoning,
}
