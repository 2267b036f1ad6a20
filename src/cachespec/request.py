"""One normalised request: what `Client.stream`, `complete` and `plan` take, validated once.

`Request` is neutral: no backend's field names, nothing rendered. Each attempt renders it anew for its backend, so
nothing vendor-specific crosses from one attempt to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from cachespec.checks import (
    check_int,
    check_list,
    check_mapping,
    check_name,
    check_number,
    check_seconds,
    copy_json,
    nearest,
)
from cachespec.choices import (
    Reasoning,
    ResponseFormat,
    ToolChoice,
    check_tool_choice,
    parse_reasoning,
    parse_response_format,
    parse_tool_choice,
)
from cachespec.errors import InputError
from cachespec.messages import Message, MessageInput, SystemInput, TextPart, Tool, ToolInput
from cachespec.messages_parse import parse_messages, parse_system
from cachespec.recall import Recall
from cachespec.tools_parse import parse_tools
from cachespec.values import quick

__all__ = ["CacheMode", "Reasoning", "Request", "ResponseFormat", "ToolChoice", "build_request"]

CacheMode: TypeAlias = Literal["auto", "off", "no-write"]

_SEED_LOW, _SEED_HIGH = -(2**63), 2**63 - 1


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request. None means the caller did not say. `timeout` is seconds for all attempts together.

    `system` holds the `system` argument and the system messages that stood before the first other message; later ones
    stay where they are in `messages`. `max_output_tokens` None takes the client's default. `extra` is
    ``{backend name: {field: value}}``, merged into that backend's body. `passthrough` is ``{"openai" | "anthropic": {field:
    value}}``: fields of a given vendor body that only that vendor's protocol knows (its cache options, metadata).
    """

    messages: tuple[Message, ...]
    system: tuple[TextPart, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    reasoning: Reasoning | None = None
    model: str | None = None
    tenant: str | None = None
    session_id: str | None = None
    tags: tuple[str, ...] = ()
    timeout: float | None = None
    cache: CacheMode = "auto"
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    passthrough: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Memory:
    """What a client remembers of the requests it read, so that equal tools, system prompts and histories are read once.

    Some 100 MB at most. It changes how fast a request is read and decided, and nothing else.
    """

    def __init__(self) -> None:
        self.tools: Recall[Tool] = Recall(most_bytes=32_000_000, weight=12)
        self.system: Recall[TextPart] = Recall(most_bytes=8_000_000, weight=2)
        self.messages: Recall[Message] = Recall(most_bytes=64_000_000, weight=3)

    def known(self, request: Request) -> Request:
        """The same request, made of what is remembered: for requests that were not read from JSON, as a session's."""
        tools = self.tools.known(request.tools, lambda i: deepcopy(request.tools[i]))
        system = self.system.known(request.system, lambda i: deepcopy(request.system[i]))
        messages = self.messages.known(request.messages, lambda i: deepcopy(request.messages[i]))
        if tools is request.tools and system is request.system and messages is request.messages:
            return request
        return replace(request, tools=tools, system=system, messages=messages)


def build_request(
    prompt: str | Sequence[MessageInput] | None = None,
    *,
    messages: str | Sequence[MessageInput] | None = None,
    system: SystemInput | None = None,
    tools: Sequence[ToolInput] | None = None,
    tool_choice: str | Mapping[str, Any] | ToolChoice | None = None,
    response_format: str | Mapping[str, Any] | type | ResponseFormat | None = None,
    max_output_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    stop: str | Sequence[str] | None = None,
    seed: int | None = None,
    reasoning: str | Mapping[str, Any] | Reasoning | None = None,
    model: str | None = None,
    tenant: str | None = None,
    session_id: str | None = None,
    tags: str | Sequence[str] | None = None,
    timeout: float | str | None = None,
    cache: CacheMode = "auto",
    extra: Mapping[str, Mapping[str, Any]] | None = None,
    memory: Memory | None = None,
) -> Request:
    """Validate what a user passes to `Client.stream` and freeze it.

    Exactly one of `prompt` (text, or messages) and `messages`. `timeout` is seconds or text such as ``"30s"``. Bounds are
    those that every vendor shares; a model's own narrower ones are its backend's to tell. What `memory` knows is not read
    again.

    Raises: `InputError` naming the field.
    """
    if (prompt is None) == (messages is None):
        raise InputError("give either a prompt or messages" + ("" if prompt is None else ", not both"), field="messages")
    given = messages if prompt is None else prompt
    where = "messages" if prompt is None or isinstance(prompt, list | tuple) else "prompt"
    hoisted, turns = parse_messages(given, where=where, recall=None if memory is None else memory.messages)
    parsed_tools = parse_tools(tools, recall=None if memory is None else memory.tools)
    choice = parse_tool_choice(tool_choice)
    check_tool_choice(choice, parsed_tools)
    if cache not in get_args(CacheMode):
        hint = nearest(cache, get_args(CacheMode)) if isinstance(cache, str) else ""
        raise InputError(f"must be one of {', '.join(get_args(CacheMode))}, not {cache!r}{hint}", field="cache")
    texts = parse_system(system) + hoisted
    if memory is not None:
        texts = memory.system.known(texts, texts.__getitem__)
    return Request(
        messages=turns,
        system=texts,
        tools=parsed_tools,
        tool_choice=choice,
        response_format=parse_response_format(response_format),
        max_output_tokens=None if max_output_tokens is None else check_int(max_output_tokens, "max_output_tokens", low=1),
        temperature=None if temperature is None else check_number(temperature, "temperature", low=0),
        top_p=None if top_p is None else check_number(top_p, "top_p", low=0, high=1),
        top_k=None if top_k is None else check_int(top_k, "top_k", low=0),
        min_p=None if min_p is None else check_number(min_p, "min_p", low=0, high=1),
        stop=_names(stop, "stop"),
        seed=None if seed is None else check_int(seed, "seed", low=_SEED_LOW, high=_SEED_HIGH),
        reasoning=parse_reasoning(reasoning),
        model=None if model is None else check_name(model, "model"),
        tenant=None if tenant is None else check_name(tenant, "tenant"),
        session_id=None if session_id is None else check_name(session_id, "session_id"),
        tags=tuple(dict.fromkeys(_names(tags, "tags"))),
        timeout=None if timeout is None else check_seconds(timeout, "timeout"),
        cache=cache,
        extra={} if extra is None else {name: _fields(fields, name) for name, fields in check_mapping(extra, "extra").items()},
    )


def _names(value: str | Sequence[str] | None, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (check_name(value, where),)
    return tuple(
        check_name(item, f"{where}[{i}]") for i, item in enumerate(check_list(value, where, wanted="a string or a list"))
    )


def _fields(value: Mapping[str, Any], name: object) -> Mapping[str, Any]:
    where = f"extra.{check_name(name, 'extra')}"
    fields: Mapping[str, Any] = copy_json(check_mapping(value, where), where)
    return fields
