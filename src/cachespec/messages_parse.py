"""From what a user writes to `Message` values: one reader for every dialect, chosen part by part.

Shapes: OpenAI Chat Completions and Responses, Anthropic Messages (the field names are those of the vendors' SDK types).
Nothing is rewritten, moved or dropped: the fields of a part that only its dialect knows go to `extra`, whole parts that only
one dialect knows become `OpaquePart`, and anything else unknown is an `InputError` naming the exact field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from cachespec.built import own_message
from cachespec.checks import check_bool, check_keys, check_list, check_name, check_text, copy_json, kind_of, needed
from cachespec.errors import InputError
from cachespec.messages import Message, OpaquePart, Part, ReasoningPart, Role, TextPart, ToolResultPart
from cachespec.parts_parse import (
    OPAQUE,
    READERS,
    Dialect,
    parse_content,
    parse_part,
    parse_tool_call,
    plain_parts,
)
from cachespec.recall import Recall

ROLES: tuple[str, ...] = get_args(Role)
SYSTEM_ROLES = ("system", "developer")

_MESSAGE_EXTRA = ("id", "status", "phase", "annotations", "audio", "reasoning_details")
_ASSISTANT_KEYS = ("tool_calls", "reasoning_content", "reasoning", "refusal", "function_call")
_MESSAGE_KEYS = ("role", "content", "name", "type", "tool_call_id", "is_error", *_ASSISTANT_KEYS, *_MESSAGE_EXTRA)


def parse_messages(
    value: object, *, where: str = "messages", dialect: Dialect | None = None, recall: Recall[Message] | None = None
) -> tuple[tuple[TextPart, ...], tuple[Message, ...]]:
    """Read a prompt or a list of messages: the leading system text, and the messages.

    Leading system and developer messages that hold nothing but text are hoisted; later ones stay where they are. `dialect`
    says which vendor's body this is, where that is known; it decides for shapes that several dialects share. What `recall`
    knows is not read again.

    Raises: `InputError` with the exact field, such as ``messages[2].content[0].text``.
    """
    if isinstance(value, str):
        return (), (Message(role="user", parts=(TextPart(text=check_name(value, where)),)),)
    if isinstance(value, Mapping | Message):
        raise InputError("must be a list of messages, not one message", field=where)
    items = check_list(value, where, wanted="a string or a list")
    if not items:
        raise InputError("is empty", field=where)

    def read(i: int) -> Message:
        return _message(items[i], f"{where}[{i}]", dialect)

    def leading(messages: Sequence[Message]) -> int:
        for i, message in enumerate(messages):
            plain = all(isinstance(part, TextPart) for part in message.parts)
            if message.role not in SYSTEM_ROLES or message.name or message.extra or not plain:
                return i
        raise InputError("holds nothing but system messages", field=where)

    if recall is None:
        messages = tuple(read(i) for i in range(len(items)))
        start = leading(messages)
        hoisted, turns = messages[:start], messages[start:]
    else:
        hoisted, turns = recall.read(items, read, leading, salt=dialect)
    return tuple(part for message in hoisted for part in message.parts if isinstance(part, TextPart)), turns


def parse_system(value: object, *, where: str = "system") -> tuple[TextPart, ...]:
    """Read a system prompt: text, or a list of text, `TextPart`s or text blocks. None and an empty list are no prompt."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (TextPart(text=check_text(value, where)),)
    if isinstance(value, TextPart | Mapping):
        value = [value]
    parts: list[TextPart] = []
    for i, item in enumerate(check_list(value, where, wanted="a string or a list")):
        field = f"{where}[{i}]"
        part = TextPart(text=check_text(item, field)) if isinstance(item, str) else parse_part(item, field)
        if not isinstance(part, TextPart):
            raise InputError("a system prompt holds text only", field=field)
        parts.append(part)
    return tuple(parts)


def _message(raw: object, where: str, dialect: Dialect | None) -> Message:
    if isinstance(raw, Message):
        return own_message(raw, where)
    if not isinstance(raw, Mapping):
        raise InputError(f"must be a Message or an object, not {kind_of(raw)}", field=where)
    kind = raw.get("type")
    if (kind is not None and kind != "message") or raw.keys() == {"id"}:
        return _item(raw, where)
    if kind == "message":
        dialect = "responses"
    role = needed(raw, "role", where)
    if role not in ROLES:
        if role is None:
            raise InputError("is missing", field=f"{where}.role")
        raise InputError(f"unknown role {role!r}; known: {', '.join(ROLES)}", field=f"{where}.role")
    content = raw.get("content")
    if len(raw) == 2 and isinstance(content, str) and role != "tool":
        # Most of a long history is this; reading it must not be felt beside the decision.
        return Message(role=role, parts=(TextPart(text=check_text(content, f"{where}.content")),))
    check_keys(raw, _MESSAGE_KEYS, where)
    name = raw.get("name")
    extra = {key: copy_json(raw[key], f"{where}.{key}") for key in _MESSAGE_EXTRA if raw.get(key) not in (None, [])}
    return Message(
        role=role,
        parts=_result(raw, where, dialect) if raw.get("tool_call_id") is not None else _parts(raw, role, where, dialect),
        name=None if name is None else check_text(name, f"{where}.name"),
        extra=extra or None,
    )


def _parts(raw: Mapping[str, Any], role: Role, where: str, dialect: Dialect | None) -> tuple[Part, ...]:
    """The parts of one message in the order the model reads them: reasoning, content, tool calls."""
    parts: list[Part] = []
    if role != "assistant":
        for key in _ASSISTANT_KEYS:
            if raw.get(key) is not None:
                raise InputError("belongs to an assistant message", field=f"{where}.{key}")
    if raw.get("function_call") is not None:
        raise InputError("was replaced by tool_calls", field=f"{where}.function_call")
    if raw.get("is_error") is not None:
        raise InputError("belongs to a tool message with a tool_call_id", field=f"{where}.is_error")
    thoughts = {
        key: check_text(raw[key], f"{where}.{key}") for key in ("reasoning_content", "reasoning") if raw.get(key) is not None
    }
    if thoughts:
        plain = thoughts.keys() == {"reasoning_content"}
        parts.append(ReasoningPart(text=next(iter(thoughts.values())), raw=None if plain else thoughts))
    parts += parse_content(raw.get("content"), f"{where}.content", dialect)
    if raw.get("refusal") is not None:
        refusal = {"type": "refusal", "refusal": check_text(raw["refusal"], f"{where}.refusal")}
        parts.append(OpaquePart(dialect="chat", raw=refusal))
    if raw.get("tool_calls") is not None:
        field = f"{where}.tool_calls"
        parts += [parse_tool_call(call, f"{field}[{i}]") for i, call in enumerate(check_list(raw["tool_calls"], field))]
    if not parts and role != "assistant":
        raise InputError("is empty" if "content" in raw else "is missing", field=f"{where}.content")
    if role == "tool" and not all(isinstance(part, ToolResultPart) for part in parts):
        raise InputError("is missing", field=f"{where}.tool_call_id")
    return tuple(parts)


def _result(raw: Mapping[str, Any], where: str, dialect: Dialect | None) -> tuple[ToolResultPart]:
    """A Chat message of role ``tool``."""
    if raw["role"] != "tool":
        raise InputError("belongs to a tool message", field=f"{where}.tool_call_id")
    for key in _ASSISTANT_KEYS:
        if raw.get(key) is not None:
            raise InputError("belongs to an assistant message", field=f"{where}.{key}")
    result = ToolResultPart(
        id=check_name(raw["tool_call_id"], f"{where}.tool_call_id"),
        content=plain_parts(parse_content(raw.get("content"), f"{where}.content", dialect), f"{where}.content"),
        is_error=raw.get("is_error") is not None and check_bool(raw["is_error"], f"{where}.is_error"),
    )
    return (result,)


def _item(raw: Mapping[str, Any], where: str) -> Message:
    """A Responses item that is no message. Each stays a message of its own, as it was given."""
    kind = raw.get("type")
    if kind not in (None, "function_call", "function_call_output", "reasoning"):
        if not isinstance(kind, str):
            raise InputError("must be a string", field=f"{where}.type")
        if kind in READERS or kind in OPAQUE:
            raise InputError(f"{kind!r} is a content part; wrap it in a message with a role", field=f"{where}.type")
        part: Part = OpaquePart(dialect="responses", raw=copy_json(raw, where))
    elif kind is None:
        part = OpaquePart(dialect="responses", raw=copy_json(raw, where))
    else:
        part = parse_part(raw, where, "responses")
    role: Role = "tool" if isinstance(kind, str) and kind.endswith("_output") else "assistant"
    if raw.get("role") in SYSTEM_ROLES:
        role = raw["role"]
    return Message(role=role, parts=(part,))
