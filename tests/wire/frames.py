"""What the wire server says: the bytes of each protocol, as frames that know what they are.

A model's name is a list of directives joined by ``+``, after an optional ``name@`` (``claude-sonnet-5@cut-3``). A number
that belongs to a directive follows a hyphen, a word a colon (``error-mid-5:overloaded_error``). Unknown directives are
ignored, so any model name is a plain answer.

What is said: ``ok-<n>`` (n tokens, 20 when not given), ``echo`` (the last user text, four characters a token), ``tool``,
``tools2`` (two calls), ``reasoning``, ``refusal``, ``incomplete``, ``filtered``, ``nousage``, ``dataonly`` (no event names),
``crlf``, ``comments``. Faults inside a stream: see `tests.wire.server`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from cachespec.usage import Usage

Api: TypeAlias = Literal["chat", "responses", "messages"]
Kind: TypeAlias = Literal["start", "content", "end", "after"]
Frame: TypeAlias = tuple[Kind, bytes]

_SAYS = {"ok", "tool", "tools2", "reasoning", "refusal", "incomplete", "filtered", "nousage", "dataonly", "crlf", "comments"}
_UNDISTURBED = _SAYS | {"slowstart", "slowfirst", "close-idle", "409", "429", "500", "502", "503", "529"}
WORDS = (" the", " naïve", " cache", " 日本", " is", " warm", " 🙂", ' "so"', " to", " speak\n")
INPUT, READ, WRITE_5M, WRITE_1H = 48, 1024, 100, 28
REASONING_TEXT = ("Let me", " think: ", "ça va.")
CALLS = (
    ("call_1", "get_weather", '{"city": "Zürich", "days":  3}'),
    ("call_2", "get_time", '{"zone":"Asia/Tōkyō","at":"12:00 \\"noon\\""}'),
)


def answer(tokens: int) -> str:
    """The text that ``ok-<tokens>`` answers."""
    return "".join(token(i) for i in range(tokens))


def token(i: int) -> str:
    return WORDS[i % len(WORDS)]


@dataclass(frozen=True)
class Spec:
    """The directives of one model name."""

    model: str
    directives: tuple[tuple[str, tuple[float, ...], str], ...]

    @classmethod
    def parse(cls, model: str) -> Spec:
        return _parse(model)

    def has(self, name: str) -> bool:
        return any(n == name for n, _, _ in self.directives)

    def number(self, name: str, default: float | None = None, position: int = 0) -> float | None:
        """The directive's number at `position`, or `default` where it has none; None where the directive is absent."""
        for n, numbers, _ in self.directives:
            if n == name:
                return numbers[position] if len(numbers) > position else default
        return None

    def word(self, name: str, default: str) -> str:
        return next((w for n, _, w in self.directives if n == name and w), default)

    @property
    def disturbed(self) -> bool:
        """Whether the stream has to be made frame by frame: faults, pacing, or a text of the request's own."""
        return any(name not in _UNDISTURBED for name, _, _ in self.directives)

    @property
    def tokens(self) -> int:
        return int(self.number("ok", 20) or 20)

    def pieces(self, echo: str | None = None) -> list[str]:
        """The texts of the answer's tokens."""
        if self.has("tool") or self.has("tools2"):
            return []
        if self.has("echo"):
            text = echo or ""
            return [text[i : i + 4] for i in range(0, len(text), 4)]
        return [token(i) for i in range(self.tokens)]

    @property
    def calls(self) -> Sequence[tuple[str, str, str]]:
        return CALLS if self.has("tools2") else CALLS[:1] if self.has("tool") else ()


@lru_cache(maxsize=4096)
def _parse(model: str) -> Spec:
    found = []
    for directive in model.rpartition("@")[2].split("+"):
        words, _, argument = directive.partition(":")
        name, *rest = words.split("-")
        while rest and not rest[0].replace(".", "", 1).isdigit():
            name += "-" + rest.pop(0)
        numbers = tuple(float(n) for n in rest if n.replace(".", "", 1).isdigit())
        found.append((name, numbers, argument))
    return Spec(model, tuple(found))


def expected_usage(api: Api, output: int) -> Usage:
    """What the server's usage objects mean. Only Messages tells 1h writes apart."""
    writes = {"5m": WRITE_5M, "1h": WRITE_1H} if api == "messages" else {"30m": WRITE_5M + WRITE_1H}
    reasoning = 0 if api == "responses" else None
    return Usage(uncached=INPUT, cache_read=READ, cache_write=writes, output=output, reasoning=reasoning)


def usage_object(api: Api, output: int) -> dict[str, Any]:
    total, written = INPUT + READ + WRITE_5M + WRITE_1H, WRITE_5M + WRITE_1H
    cached = {"cached_tokens": READ, "cache_write_tokens": written}
    if api == "chat":
        counts = {"prompt_tokens": total, "completion_tokens": output, "total_tokens": total + output}
        return counts | {"prompt_tokens_details": cached}
    if api == "responses":
        counts = {"input_tokens": total, "output_tokens": output, "total_tokens": total + output}
        return counts | {"input_tokens_details": cached, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "input_tokens": INPUT,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": READ,
        "cache_creation": {"ephemeral_5m_input_tokens": WRITE_5M, "ephemeral_1h_input_tokens": WRITE_1H},
        "output_tokens": output,
        "service_tier": "standard",
    }


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def sse(spec: Spec, payload: Any, event: str | None = None) -> bytes:
    """One server-sent event in the framing that the model's name asks for."""
    text = payload if isinstance(payload, str) else dumps(payload)
    if event is None and isinstance(payload, dict) and "object" not in payload:
        event = payload.get("type")
    lines = [f"data: {text}", "", ""]
    if event and not spec.has("dataonly"):
        lines.insert(0, f"event: {event}")
    if spec.has("comments"):
        lines[:0] = [": keep-alive", ""]
    return ("\r\n" if spec.has("crlf") else "\n").join(lines).encode()


def frames(api: Api, spec: Spec, *, usage: bool, echo: str | None = None) -> list[Frame]:
    """The whole answer as a stream. `usage`: whether the request asked for the usage chunk (Chat only)."""
    if spec.has("echo"):
        return list(_STREAMS[api](spec, usage, echo))
    return _cached(api, spec, usage)


def counted(
    api: Api, spec: Spec, told: Sequence[Frame], counts: Callable[[int], dict[str, Any]], *, echo: str | None = None
) -> list[Frame]:
    """The same stream with other usage objects: `counts` gives the one for an answer of so many tokens."""
    output = _output_tokens(spec, spec.pieces(echo))
    swaps = [(usage_object(api, output), counts(output))]
    if api == "messages":
        at_start = (usage_object(api, 1), counts(1))
        swaps = [at_start, (_without_split(swaps[0][0]), _without_split(swaps[0][1]))]
    pairs = [(f'"usage":{dumps(old)}'.encode(), f'"usage":{dumps(new)}'.encode()) for old, new in swaps]
    return [(kind, _swapped(data, pairs)) for kind, data in told]


def _swapped(data: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    for old, new in pairs:
        data = data.replace(old, new)
    return data


def _without_split(usage: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in usage.items() if k not in ("cache_creation", "service_tier")}


@lru_cache(maxsize=256)
def _cached(api: Api, spec: Spec, usage: bool) -> list[Frame]:
    return list(_STREAMS[api](spec, usage, None))


def _argument_pieces(text: str) -> list[str]:
    return [text[i : i + 7] for i in range(0, len(text), 7)]


def _output_tokens(spec: Spec, pieces: Sequence[str]) -> int:
    return len(pieces) + 7 * len(spec.calls)


# -- Chat Completions -------------------------------------------------------------------------------------------------


def _chat(spec: Spec, usage: bool, echo: str | None) -> Iterator[Frame]:
    head = {
        "id": "chatcmpl-wire",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": spec.model,
        "service_tier": "default",
    }

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        return sse(spec, head | {"choices": choices} | ({"usage": None} if usage else {}))

    pieces = spec.pieces(echo)
    yield "start", chunk({"role": "assistant", "content": "", "refusal": None})
    for text in REASONING_TEXT if spec.has("reasoning") else ():
        yield "content", chunk({"reasoning_content": text})
    for text in pieces:
        yield "content", chunk({"refusal" if spec.has("refusal") else "content": text})
    for index, (call_id, name, arguments) in enumerate(spec.calls):
        function = {"name": name, "arguments": ""}
        yield "content", chunk({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})
        for text in _argument_pieces(arguments):
            yield "content", chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    yield "end", chunk({}, _chat_reason(spec))
    if usage and not spec.has("nousage"):
        yield "after", sse(spec, head | {"choices": [], "usage": usage_object("chat", _output_tokens(spec, pieces))})
    yield "after", sse(spec, "[DONE]")


def _chat_reason(spec: Spec) -> str:
    if spec.has("incomplete"):
        return "length"
    return "content_filter" if spec.has("filtered") else "tool_calls" if spec.calls else "stop"


def _chat_object(spec: Spec, echo: str | None) -> dict[str, Any]:
    pieces = spec.pieces(echo)
    text = "".join(pieces)
    refused = spec.has("refusal")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if refused else text or None,
        "refusal": text if refused else None,
    }
    if spec.has("reasoning"):
        message["reasoning_content"] = "".join(REASONING_TEXT)
    if spec.calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in spec.calls
        ]
    result = {
        "id": "chatcmpl-wire",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": spec.model,
        "service_tier": "default",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": _chat_reason(spec)}],
    }
    return result if spec.has("nousage") else result | {"usage": usage_object("chat", _output_tokens(spec, pieces))}


# -- Responses --------------------------------------------------------------------------------------------------------


def _response_items(spec: Spec, pieces: Sequence[str]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if spec.has("reasoning"):
        summary = [{"type": "summary_text", "text": "".join(REASONING_TEXT)}]
        items.append({"id": "rs_wire", "type": "reasoning", "summary": summary, "encrypted_content": "gAAAAABwire=="})
    if pieces:
        text = "".join(pieces)
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        if spec.has("refusal"):
            part = {"type": "refusal", "refusal": text}
        items.append({"id": "msg_wire", "type": "message", "status": "completed", "role": "assistant", "content": [part]})
    for call_id, name, arguments in spec.calls:
        ids = {"id": f"fc_{call_id}", "type": "function_call", "status": "completed", "call_id": call_id}
        items.append(ids | {"name": name, "arguments": arguments})
    return items


def _response_object(spec: Spec, echo: str | None, *, status: str | None = None) -> dict[str, Any]:
    pieces = spec.pieces(echo)
    reason = "max_output_tokens" if spec.has("incomplete") else "content_filter" if spec.has("filtered") else None
    if status is None:
        status = "incomplete" if reason else "completed"
    over = status in ("completed", "incomplete")
    return {
        "id": "resp_wire",
        "object": "response",
        "created_at": 1_790_000_000,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if over and reason else None,
        "instructions": None,
        "metadata": {},
        "model": spec.model,
        "output": _response_items(spec, pieces) if over else [],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "service_tier": "default" if over else "auto",
        "usage": usage_object("responses", _output_tokens(spec, pieces)) if over and not spec.has("nousage") else None,
    }


def _responses(spec: Spec, usage: bool, echo: str | None) -> Iterator[Frame]:
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return sse(spec, {"type": f"response.{kind}", "sequence_number": number, **fields})

    pieces = spec.pieces(echo)
    yield "start", event("created", response=_response_object(spec, echo, status="in_progress"))
    yield "start", event("in_progress", response=_response_object(spec, echo, status="in_progress"))
    for index, item in enumerate(_response_items(spec, pieces)):
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "reasoning":
            yield (
                "start",
                event("output_item.added", output_index=index, item=item | {"summary": [], "encrypted_content": None}),
            )
            part = {"type": "summary_text", "text": ""}
            yield "start", event("reasoning_summary_part.added", **at, summary_index=0, part=part)
            for text in REASONING_TEXT:
                yield "content", event("reasoning_summary_text.delta", **at, summary_index=0, delta=text)
            yield "start", event("reasoning_summary_text.done", **at, summary_index=0, text=item["summary"][0]["text"])
            yield "start", event("reasoning_summary_part.done", **at, summary_index=0, part=item["summary"][0])
        elif item["type"] == "message":
            part = item["content"][0]
            kind = "refusal" if part["type"] == "refusal" else "output_text"
            key = "refusal" if part["type"] == "refusal" else "text"
            added = item | {"status": "in_progress", "content": []}
            yield "start", event("output_item.added", output_index=index, item=added)
            yield "start", event("content_part.added", **at, content_index=0, part=part | {key: ""})
            extra: dict[str, Any] = {} if key == "refusal" else {"logprobs": []}
            for text in pieces:
                yield "content", event(f"{kind}.delta", **at, content_index=0, delta=text, **extra)
            yield "start", event(f"{kind}.done", **at, content_index=0, **{key: part[key]}, **extra)
            yield "start", event("content_part.done", **at, content_index=0, part=part)
        else:
            added = item | {"status": "in_progress", "arguments": ""}
            yield "content", event("output_item.added", output_index=index, item=added)
            for text in _argument_pieces(item["arguments"]):
                yield "content", event("function_call_arguments.delta", **at, delta=text)
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "start", event("function_call_arguments.done", **at, **done)
        yield "start", event("output_item.done", output_index=index, item=item)
    response = _response_object(spec, echo)
    yield "end", event(response["status"], response=response)


# -- Messages ---------------------------------------------------------------------------------------------------------


def _message_blocks(spec: Spec, pieces: Sequence[str]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if spec.has("reasoning"):
        blocks.append({"type": "thinking", "thinking": "".join(REASONING_TEXT), "signature": "c2lnbmVk"})
        blocks.append({"type": "redacted_thinking", "data": "cmVkYWN0ZWQ="})
    if pieces:
        blocks.append({"type": "text", "text": "".join(pieces), "citations": None})
    for call_id, name, arguments in spec.calls:
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)})
    return blocks


def _message_object(spec: Spec, echo: str | None) -> dict[str, Any]:
    pieces = spec.pieces(echo)
    return {
        "id": "msg_wire",
        "type": "message",
        "role": "assistant",
        "model": spec.model,
        "content": _message_blocks(spec, pieces),
        "stop_reason": _message_reason(spec),
        "stop_sequence": None,
        "usage": usage_object("messages", _output_tokens(spec, pieces)),
    }


def _message_reason(spec: Spec) -> str:
    if spec.has("incomplete"):
        return "max_tokens"
    refused = spec.has("filtered") or spec.has("refusal")
    return "refusal" if refused else "tool_use" if spec.calls else "end_turn"


_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def _messages(spec: Spec, usage: bool, echo: str | None) -> Iterator[Frame]:
    def event(kind: str, **fields: Any) -> bytes:
        return sse(spec, {"type": kind, **fields})

    pieces = spec.pieces(echo)
    whole = _message_object(spec, echo)
    first = usage_object("messages", 1)
    start = whole | {"content": [], "stop_reason": None, "usage": first}
    yield "start", event("message_start", message=start)
    yield "start", event("ping")
    for index, block in enumerate(whole["content"]):
        kind = block["type"]
        opening = block | _EMPTY.get(kind, {})
        yield ("content" if kind == "tool_use" else "start"), event("content_block_start", index=index, content_block=opening)
        if kind == "thinking":
            for text in REASONING_TEXT:
                yield "content", event("content_block_delta", index=index, delta={"type": "thinking_delta", "thinking": text})
            signature = {"type": "signature_delta", "signature": block["signature"]}
            yield "start", event("content_block_delta", index=index, delta=signature)
        elif kind == "text":
            for text in pieces:
                yield "content", event("content_block_delta", index=index, delta={"type": "text_delta", "text": text})
        elif kind == "tool_use":
            arguments = next(a for i, _, a in spec.calls if i == block["id"])
            for text in ["", *_argument_pieces(arguments)]:
                delta = {"type": "input_json_delta", "partial_json": text}
                yield ("content" if text else "start"), event("content_block_delta", index=index, delta=delta)
        yield "start", event("content_block_stop", index=index)
    closing = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    last = {} if spec.has("nousage") else {"usage": _without_split(whole["usage"])}
    yield "start", event("message_delta", delta=closing, **last)
    yield "end", event("message_stop")


_STREAMS = {"chat": _chat, "responses": _responses, "messages": _messages}


def whole_object(api: Api, spec: Spec, echo: str | None = None) -> dict[str, Any]:
    """The whole answer as one object: what a request without ``stream`` gets."""
    return {"chat": _chat_object, "responses": _response_object, "messages": _message_object}[api](spec, echo)


# -- errors -----------------------------------------------------------------------------------------------------------

_ERRORS: dict[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("not_found_error", "model_not_found"),
    409: ("conflict_error", "conflict"),
    413: ("request_too_large", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("api_error", "server_error"),
    502: ("api_error", "bad_gateway"),
    503: ("overloaded_error", "service_unavailable"),
    529: ("overloaded_error", "overloaded"),
}


def error_object(
    api: Api, status: int, *, code: str | None = None, kind: str | None = None, text: str | None = None
) -> dict[str, Any]:
    """The error body of `status` in the vendor's own form."""
    default_kind, default_code = _ERRORS.get(status, ("invalid_request_error", "invalid_request"))
    kind, text = kind or default_kind, text or f"the wire server answers {status}"
    if api == "messages":
        return {"type": "error", "error": {"type": kind, "message": text}, "request_id": "req_wire"}
    return {"error": {"message": text, "type": kind, "param": None, "code": code or default_code}}


def error_event(api: Api, spec: Spec, word: str) -> bytes:
    """An error in the middle of a stream. `word` is its type (Messages) or code; Responses has a flat form."""
    text = "the wire server fails in mid-stream"
    if api == "messages":
        return sse(spec, {"type": "error", "error": {"type": word, "message": text}})
    if api == "responses":
        return sse(spec, {"type": "error", "code": word, "message": text, "param": None, "sequence_number": 99})
    return sse(spec, {"error": {"message": text, "type": word, "param": None, "code": word}})


def failed_event(spec: Spec, code: str) -> bytes:
    """Responses: the response failed after it was accepted."""
    error = {"code": code, "message": "the wire server fails the response"}
    response = _response_object(spec, None, status="failed") | {"error": error}
    return sse(spec, {"type": "response.failed", "sequence_number": 99, "response": response})
