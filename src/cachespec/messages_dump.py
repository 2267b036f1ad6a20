"""From `Message` and `Tool` back to plain dictionaries: Chat Completions' shape, JSON-able, readable by `parse_messages`.

What Chat has no place for (a thinking block, several tool results in one message, a call between two texts) stays a
content part in the shape of the dialect that has one, so that reading it again gives the same value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachespec.messages import (
    CacheMark,
    ImagePart,
    Message,
    OpaquePart,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)

_RESPONSES_CONTENT = ("input_image", "input_file", "refusal")
_MARK_KEYS = {"anthropic": "cache_control", "openai": "prompt_cache_breakpoint"}


def message_to_dict(message: Message) -> dict[str, Any]:
    """The message as one dictionary. Its values are the message's own, not copies."""
    match message.parts:
        case [OpaquePart(dialect="responses", raw=raw) as item] if raw.get("type") not in _RESPONSES_CONTENT:
            return _part(item)  # an item of its own, which has no place inside a message
    out: dict[str, Any] = {"role": message.role}
    if message.name is not None:
        out["name"] = message.name
    parts = list(message.parts)
    match message.parts:
        case [ToolResultPart(mark=None, extra=None) as result] if message.role == "tool":
            out["tool_call_id"] = result.id
            out["content"] = _content(result.content)
            if result.is_error:
                out["is_error"] = True
            return {**out, **(message.extra or {})}
    match parts:
        case [ReasoningPart(raw=None) as thought, *_] if message.role == "assistant":
            out["reasoning_content"] = thought.text
            parts = parts[1:]
        case [ReasoningPart(raw=Mapping() as raw), *_] if message.role == "assistant" and "type" not in raw:
            out |= raw
            parts = parts[1:]
    calls: list[dict[str, Any]] = []
    while parts and message.role == "assistant" and (call := _chat_call(parts[-1])) is not None:
        calls.insert(0, call)
        parts.pop()
    out["content"] = _content(tuple(parts)) if parts else None
    if calls:
        out["tool_calls"] = calls
    return {**out, **(message.extra or {})}


def tool_to_dict(tool: Tool) -> dict[str, Any]:
    """The tool in Chat Completions' shape, or a vendor's own tool as it was given."""
    if tool.raw is not None:
        return {**tool.raw, **_mark(tool.mark)}
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function, **(tool.extra or {}), **_mark(tool.mark)}


def _content(parts: tuple[Part, ...]) -> str | list[dict[str, Any]]:
    match parts:
        case (TextPart(mark=None, extra=None) as part,):
            return part.text
        case _:
            return [_part(part) for part in parts]


def _chat_call(part: Part) -> dict[str, Any] | None:
    """An entry of ``tool_calls``, where the part fits there."""
    match part:
        case ToolCallPart() if not (part.extra and part.extra.keys() & {"id", "type", "function"}):
            function = {"name": part.name, "arguments": part.arguments}
            return {"id": part.id, "type": "function", "function": function, **(part.extra or {}), **_mark(part.mark)}
        case OpaquePart(dialect="chat") if part.raw.get("type") == "custom":
            return dict(part.raw)
        case _:
            return None


def _part(part: Part) -> dict[str, Any]:
    match part:
        case TextPart():
            out: dict[str, Any] = {"type": "text", "text": part.text}
        case ImagePart():
            image = {"url": part.url if part.data is None else f"data:{part.media_type};base64,{part.data}"}
            out = {"type": "image_url", "image_url": image if part.detail is None else {**image, "detail": part.detail}}
        case ToolCallPart():
            out = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": part.arguments}
        case ToolResultPart():
            out = {"type": "tool_result", "tool_use_id": part.id, "content": _content(part.content)}
            if part.is_error:
                out["is_error"] = True
        case ReasoningPart():
            if part.raw is not None and "type" in part.raw:
                return dict(part.raw)
            return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": part.text}]}
        case OpaquePart():
            return {**part.raw, **_mark(part.mark)}
    return {**out, **(part.extra or {}), **_mark(part.mark)}


def _mark(mark: CacheMark | None) -> dict[str, Any]:
    return {} if mark is None else {_MARK_KEYS[mark.dialect]: mark.fields}
