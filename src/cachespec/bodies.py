"""REQUEST documents: the keyword arguments of `Client.stream`, or a vendor's request body, told apart and mapped.

A body's fields are mapped to the neutral ones where they mean the same; what only that vendor's protocol knows goes to
`Request.passthrough` as it was given; transport (`stream`, `stream_options`, one answer) is the client's own and ignored; any
other field is refused by name. Field names are those of the SDKs' parameter types (openai 3.57, anthropic 2.14).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from cachespec.checks import check_bool, check_int, check_keys, check_mapping, check_name, copy_json, kind_of, needed, refuse
from cachespec.choices import ToolChoice, parse_response_format, parse_tool_choice
from cachespec.errors import InputError
from cachespec.messages_parse import parse_messages, parse_system
from cachespec.parts_parse import Dialect
from cachespec.request import Request, build_request
from cachespec.tools_parse import parse_tools

KEYWORDS: tuple[str, ...] = tuple(name for name in inspect.signature(build_request).parameters if name != "memory")
"""The keyword arguments of `Client.stream`."""

_Fields = dict[str, Any]
"""Keyword arguments of `build_request`, being collected."""

_SAMPLING = ("model", "temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """One vendor's body: `same` fields keep their name, `mapped` ones are read by `read`, `own` ones are passed through."""

    dialect: Dialect
    vendor: Literal["openai", "anthropic"]
    same: tuple[str, ...]
    mapped: tuple[str, ...]
    own: tuple[str, ...]
    read: Callable[[Mapping[str, Any], _Fields, _Fields], None]

    @property
    def known(self) -> tuple[str, ...]:
        return (*self.same, *self.mapped, *self.own, "stream")


def request_from_body(body: Mapping[str, Any]) -> Request:
    """The request that a REQUEST document stands for.

    Raises: `InputError` naming the field, as dotted from the document's root, and the nearest known one.
    """
    if not isinstance(body, Mapping):
        raise InputError(f"a request must be an object, not {kind_of(body)}")
    shape = _shape_of(body)
    check_keys(body, KEYWORDS if shape is None else shape.known, "", meant=KEYWORDS)
    given = {key: value for key, value in body.items() if value is not None}
    if shape is None:
        return build_request(**given)
    if given.get("stream") is not None:
        check_bool(given["stream"], "stream")
    fields: _Fields = {key: given[key] for key in shape.same if key in given}
    own: _Fields = {key: copy_json(given[key], key) for key in shape.own if key in given}
    shape.read(given, fields, own)
    request = build_request(**fields)
    return replace(request, passthrough={shape.vendor: own}) if own else request


def _shape_of(body: Mapping[str, Any]) -> _Shape | None:
    """Which vendor's body this is; None: the keyword arguments of `Client.stream`, or nothing that is known."""
    if body.keys() <= set(KEYWORDS):
        return None
    if "input" in body or "instructions" in body:
        return _RESPONSES
    unknown = {shape.dialect: len(body.keys() - set(shape.known)) for shape in (_CHAT, _MESSAGES)}
    ours = len(body.keys() - set(KEYWORDS))
    if ours <= min(unknown.values()) and body.keys() & _OUR_OWN:
        return None
    if unknown["chat"] != unknown["messages"]:
        return _CHAT if unknown["chat"] < unknown["messages"] else _MESSAGES
    return _MESSAGES if _looks_like_messages(body) else _CHAT


def _looks_like_messages(body: Mapping[str, Any]) -> bool:
    """For a body whose field names fit both Chat and Messages: by its tools, its content blocks, or the model's name."""
    tools, messages, choice = body.get("tools"), body.get("messages"), body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") in ("auto", "any", "tool", "none"):
        return True
    if isinstance(tools, list) and any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools):
        return True
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, Mapping) and part.get("type") in _MESSAGES_BLOCKS:
                return True
    model = body.get("model")
    return isinstance(model, str) and "claude" in model


def _read_chat(body: Mapping[str, Any], fields: _Fields, own: _Fields) -> None:
    hoisted, turns = parse_messages(_needed(body, "messages"), dialect="chat")
    fields |= {"messages": turns, "system": hoisted, "tools": parse_tools(body.get("tools"), dialect="chat")}
    limits = {key: body[key] for key in ("max_completion_tokens", "max_tokens") if key in body}
    for key, limit in limits.items():
        fields["max_output_tokens"] = check_int(limit, key, low=1)
    if len(set(limits.values())) > 1:
        raise InputError("max_tokens and max_completion_tokens differ; give one of them", field="max_tokens")
    if "reasoning_effort" in body:
        fields["reasoning"] = check_name(body["reasoning_effort"], "reasoning_effort")
    if "response_format" in body:
        fields["response_format"] = _format(body["response_format"], "response_format")
    if "n" in body and check_int(body["n"], "n") != 1:
        raise InputError("one answer a request: ask again for another", field="n")
    for key in ("functions", "function_call"):
        if key in body:
            raise InputError("was replaced by tools and tool_choice", field=key)
    _openai_choice(body, fields, own)


def _read_responses(body: Mapping[str, Any], fields: _Fields, own: _Fields) -> None:
    hoisted, turns = parse_messages(_needed(body, "input"), where="input", dialect="responses")
    system = () if "instructions" not in body else parse_system(check_name(body["instructions"], "instructions"))
    fields |= {"messages": turns, "system": system + hoisted, "tools": parse_tools(body.get("tools"), dialect="responses")}
    if "text" in body:
        text = dict(check_mapping(body["text"], "text"))
        check_keys(text, ("format", "verbosity"), "text")
        fields["response_format"] = _format(text.pop("format", None), "text.format")
        if text.get("verbosity") is not None:
            own["text"] = copy_json(text, "text")
    if "reasoning" in body:
        fields["reasoning"], rest = _split(body["reasoning"], "reasoning", ("effort", "summary"), _REASONING_OWN)
        if rest:
            own["reasoning"] = rest
    for key, why in _NOT_STREAMED.items():
        if body.get(key):
            raise InputError(why, field=key)
    _openai_choice(body, fields, own)


def _read_messages(body: Mapping[str, Any], fields: _Fields, own: _Fields) -> None:
    hoisted, turns = parse_messages(_needed(body, "messages"), dialect="messages")
    system = parse_system(body.get("system")) + hoisted
    fields |= {"messages": turns, "system": system, "tools": parse_tools(body.get("tools"), dialect="messages")}
    if "max_tokens" in body:
        fields["max_output_tokens"] = check_int(body["max_tokens"], "max_tokens", low=1)
    if "stop_sequences" in body:
        stops = body["stop_sequences"]
        if not isinstance(stops, list | tuple):
            refuse("stop_sequences", "a list", stops)
        fields["stop"] = tuple(check_name(stop, f"stop_sequences[{i}]") for i, stop in enumerate(stops))
    fields["tool_choice"] = parse_tool_choice(body.get("tool_choice"))
    reasoning: dict[str, Any] = {}
    if "output_config" in body:
        config = check_mapping(body["output_config"], "output_config")
        check_keys(config, ("effort", "format"), "output_config")
        if config.get("effort") is not None:
            reasoning["effort"] = check_name(config["effort"], "output_config.effort")
        fields["response_format"] = _format(config.get("format"), "output_config.format")
    if "thinking" in body:
        _thinking(check_mapping(body["thinking"], "thinking"), reasoning, own)
    if reasoning:
        fields["reasoning"] = reasoning


def _thinking(thinking: Mapping[str, Any], reasoning: dict[str, Any], own: _Fields) -> None:
    """A budget is neutral; every other way to think (adaptive, between tools...) is this vendor's own."""
    kind = check_name(thinking.get("type"), "thinking.type")
    if kind == "enabled":
        check_keys(thinking, ("type", "budget_tokens", "display"), "thinking")
        reasoning["budget_tokens"] = check_int(thinking.get("budget_tokens"), "thinking.budget_tokens", low=1)
        if thinking.get("display") is None:
            return
    own["thinking"] = copy_json(thinking, "thinking")


def _openai_choice(body: Mapping[str, Any], fields: _Fields, own: _Fields) -> None:
    """Chat's and Responses' tool choice; one that only they know (allowed tools, a hosted tool) is passed through."""
    parallel = None
    if "parallel_tool_calls" in body:
        parallel = check_bool(body["parallel_tool_calls"], "parallel_tool_calls")
    given = body.get("tool_choice")
    if isinstance(given, Mapping) and given.get("type") not in ("function", None):
        own["tool_choice"] = copy_json(given, "tool_choice")
        given = None
    choice = parse_tool_choice(given)
    if parallel is not None:
        choice = replace(choice or ToolChoice(mode="auto"), parallel=parallel)
    fields["tool_choice"] = choice


def _format(value: object, where: str) -> Any:
    """A vendor's format object; a bare JSON schema, which `Client.stream` takes, is none."""
    if value is None:
        return None
    kind = check_mapping(value, where).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InputError(f"must be text, json_object or json_schema, not {kind!r}", field=f"{where}.type")
    return parse_response_format(value, where=where)


def _split(value: object, where: str, neutral: tuple[str, ...], own: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    fields = check_mapping(value, where)
    check_keys(fields, (*neutral, *own), where)
    kept = {key: copy_json(fields[key], f"{where}.{key}") for key in own if fields.get(key) is not None}
    return {key: fields[key] for key in neutral if fields.get(key) is not None}, kept


def _needed(body: Mapping[str, Any], key: str) -> Any:
    if needed(body, key, "") is None:
        raise InputError("is missing", field=key)
    return body[key]


_OPENAI = (
    *("metadata", "user", "service_tier", "safety_identifier", "store", "top_logprobs", "moderation"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
_CHAT = _Shape(
    dialect="chat",
    vendor="openai",
    same=(*_SAMPLING, "min_p", "stop", "seed"),
    mapped=(
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens"),
        *("reasoning_effort", "response_format", "n", "stream_options", "functions", "function_call"),
    ),
    own=(
        *_OPENAI,
        *("audio", "frequency_penalty", "logit_bias", "logprobs", "modalities", "prediction", "presence_penalty"),
        *("verbosity", "web_search_options"),
    ),
    read=_read_chat,
)
_REASONING_OWN = ("context", "generate_summary", "mode")
_NOT_STREAMED = {
    "background": "an answer in the background is not a stream",
    "prompt": "a stored prompt cannot be read here; write it out as instructions and input",
}
_RESPONSES = _Shape(
    dialect="responses",
    vendor="openai",
    same=("model", "temperature", "top_p", "max_output_tokens"),
    mapped=(
        *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning"),
        *("stream_options", *_NOT_STREAMED),
    ),
    own=(
        *_OPENAI,
        *("access_programs", "background_options", "context_management", "conversation", "image", "include", "max_tool_calls"),
        *("previous_response_id", "truncation"),
    ),
    read=_read_responses,
)
_MESSAGES = _Shape(
    dialect="messages",
    vendor="anthropic",
    same=_SAMPLING,
    mapped=("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "thinking", "output_config"),
    own=(
        *("cache_control", "container", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"),
        *("user_profile_id", "workspace_id"),
    ),
    read=_read_messages,
)
_OUR_OWN = frozenset(KEYWORDS).difference(_CHAT.known, _MESSAGES.known)
_MESSAGES_BLOCKS = frozenset(
    ["image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use", "search_result"]
)
