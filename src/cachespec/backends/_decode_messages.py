"""Anthropic Messages: stream events to events. The terminal event is ``message_stop``.

An event is known by the `type` in its data (some servers send no ``event:`` names). Usage comes twice, and cumulative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from cachespec.backends._decode import EventDecoder, Object, billing_facts, name_of_call, string, text_or_none
from cachespec.backends._json import text_of
from cachespec.events import (
    CacheDiagnosed,
    Event,
    Finished,
    ReasoningDelta,
    ReasoningFinished,
    ResponseStarted,
    TextDelta,
    ToolCallDelta,
)
from cachespec.messages import ReasoningPart

_REASONS: Mapping[str, str] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "pause_turn": "pause",
}


class MessagesDecoder(EventDecoder):
    """Events carry the index of their content block. Blocks and deltas of unknown types are passed over."""

    api = "messages"

    def __init__(self, *, backend: str, model: str, provider: str | None = "anthropic") -> None:
        super().__init__(backend=backend, model=model, provider=provider)
        self._blocks: dict[int, Object] = {}
        self._texts: dict[int, list[str]] = {}
        self._signatures: dict[int, list[str]] = {}
        self._model: str | None = None
        self._reason: str | None = None
        self._called = False
        self._response_id: str | None = None

    def payload(self, payload: Object, name: str | None, out: list[Event]) -> None:
        kind = payload.get("type") or name or ("error" if payload.get("error") else "")
        handler = self._HANDLERS.get(kind)
        if handler is not None:
            handler(self, payload, out)

    def whole(self, payload: Object, out: list[Event]) -> bool:
        if payload.get("type") != "message":
            return False
        self.request_id = self.request_id or text_or_none(payload.get("id"))
        self._model = text_or_none(payload.get("model"))
        self._response_id = text_or_none(payload.get("id"))
        self._started(payload.get("usage") or {}, out)
        self._diagnosed(payload.get("diagnostics"), out)
        for index, block in enumerate(payload["content"]):
            self._block_start({"index": index, "content_block": block}, out)
            self._block_stop({"index": index}, out)
        self._message_delta({"delta": payload, "usage": payload.get("usage")}, out)
        self._message_stop(payload, out)
        return True

    def _message_start(self, event: Object, out: list[Event]) -> None:
        message = event["message"]
        self.request_id = self.request_id or text_or_none(message.get("id"))
        self._model = text_or_none(message.get("model"))
        usage = message.get("usage") or {}
        self._response_id = text_or_none(message.get("id"))
        self._started(usage, out)
        self._diagnosed(message.get("diagnostics"), out)
        self.usage(usage, out, begun=False)

    def _started(self, usage: Object, out: list[Event]) -> None:
        facts, response_id = billing_facts(usage), self._response_id
        out.append(ResponseStarted(request_id=self.request_id, model=self._model, billing=facts, response_id=response_id))

    @staticmethod
    def _diagnosed(diagnostics: Object | None, out: list[Event]) -> None:
        """Why the prompt missed, as Anthropic has it; no reason yet means that it cannot say."""
        if diagnostics is None:
            return
        reason = diagnostics.get("cache_miss_reason")
        if reason is None:
            out.append(CacheDiagnosed(reason="pending"))
            return
        missed = reason.get("cache_missed_input_tokens")
        kind = text_or_none(reason.get("type")) or "unavailable"
        out.append(CacheDiagnosed(reason=kind, missed_tokens=missed if isinstance(missed, int) else None))

    def _block_start(self, event: Object, out: list[Event]) -> None:
        index, block = int(event["index"]), event["content_block"]
        kind = block["type"]
        self._block_stop({"index": index}, out)  # of a block in the same place whose own stop did not come
        self._blocks[index] = block
        self._texts[index], self._signatures[index] = [], []
        if kind == "text" and block.get("text"):
            self._text_delta(index, {"text": block["text"]}, out)
        elif kind == "thinking" and block.get("thinking"):
            self._thinking_delta(index, {"thinking": block["thinking"]}, out)
        elif kind == "tool_use":
            self._called = True
            out.append(ToolCallDelta(index, str(block["id"]), name_of_call(block["name"]), ""))

    def _block_delta(self, event: Object, out: list[Event]) -> None:
        delta = event["delta"]
        handler = self._DELTAS.get(delta["type"])
        if handler is not None:
            handler(self, int(event["index"]), delta, out)

    def _text_delta(self, index: int, delta: Object, out: list[Event]) -> None:
        text = string(delta["text"])
        if text:
            out.append(TextDelta(text, index))

    def _thinking_delta(self, index: int, delta: Object, out: list[Event]) -> None:
        text = string(delta["thinking"])
        if text:
            self._texts[index].append(text)
            out.append(ReasoningDelta(text, index))

    def _signature_delta(self, index: int, delta: Object, out: list[Event]) -> None:
        self._signatures[index].append(string(delta["signature"]))

    def _json_delta(self, index: int, delta: Object, out: list[Event]) -> None:
        text = string(delta["partial_json"])
        if text and self._blocks[index]["type"] == "tool_use":
            self._texts[index].append(text)
            out.append(ToolCallDelta(index, "", "", text))

    def _block_stop(self, event: Object, out: list[Event]) -> None:
        index = event["index"]
        block, texts = self._blocks.pop(index, None), self._texts.pop(index, None)
        if block is None or texts is None:
            return
        kind = block["type"]
        if signature := "".join(self._signatures.pop(index, ())):
            block["signature"] = (block.get("signature") or "") + signature
        if kind == "thinking":
            text = "".join(texts)
            self._reasoning(index, text, {**block, "thinking": text}, out)
        elif kind == "redacted_thinking":
            self._reasoning(index, "", block, out)
        elif kind == "tool_use" and not texts:  # no argument text came: the block's own object is all there is
            out.append(ToolCallDelta(index, "", "", text_of(block.get("input") or {})))

    def _reasoning(self, index: int, text: str, raw: Object, out: list[Event]) -> None:
        part = ReasoningPart(text=text, raw=raw, provider=self.provider, model=self.model)
        out.append(ReasoningFinished(index=index, part=part))

    def _message_delta(self, event: Object, out: list[Event]) -> None:
        self._reason = text_or_none((event.get("delta") or {}).get("stop_reason")) or self._reason
        self.usage(event.get("usage"), out)

    def _message_stop(self, event: Object, out: list[Event]) -> None:
        for index in list(self._blocks):  # blocks whose own stop never came
            self._block_stop({"index": index}, out)
        reason = self._reason or ("tool_use" if self._called else "end_turn")
        out.append(Finished(reason=_REASONS.get(reason, reason)))
        self.done = True

    def _error(self, event: Object, out: list[Event]) -> None:
        self.request_id = text_or_none(event.get("request_id")) or self.request_id
        raise self.fault(event)

    _HANDLERS: ClassVar[Mapping[str, Callable[[MessagesDecoder, Object, list[Event]], None]]] = {
        "message_start": _message_start,
        "content_block_start": _block_start,
        "content_block_delta": _block_delta,
        "content_block_stop": _block_stop,
        "message_delta": _message_delta,
        "message_stop": _message_stop,
        "error": _error,
    }
    _DELTAS: ClassVar[Mapping[str, Callable[[MessagesDecoder, int, Object, list[Event]], None]]] = {
        "text_delta": _text_delta,
        "thinking_delta": _thinking_delta,
        "signature_delta": _signature_delta,
        "input_json_delta": _json_delta,
    }
