"""Chat Completions: chunks to events, for OpenAI and the many servers that speak its protocol.

The terminal event is the chunk with a `finish_reason`; usage may be beside it, after it, or on every chunk. What servers
add or leave out is taken as it comes: reasoning as `reasoning_content` or `reasoning`, content as a list of parts, tool
calls without an index, the old `function_call`, a chunk whose `choices` is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachespec.backends._decode import EventDecoder, Object, billing_facts, text_or_none
from cachespec.backends._json import text_of
from cachespec.call_deltas import Calls, CallSoFar
from cachespec.events import (
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
    "function_call": "tool_calls",
    "model_length": "length",
    "max_tokens": "length",
    "end_turn": "stop",
    "eos": "stop",
}


class ChatDecoder(EventDecoder):
    """Only the first choice is read: a request asks for one.

    A reasoning block ends where other content begins; its raw object is the message field it came in, e.g.
    ``{"reasoning_content": "..."}``.
    """

    api = "chat"

    def __init__(self, *, backend: str, model: str, provider: str | None = None) -> None:
        super().__init__(backend=backend, model=model, provider=provider)
        self._started = False
        self._finished = False
        self._refused = False
        self._tier: object = None
        self._reasoning: list[str] = []
        self._reasoning_field = ""
        self._block = 0
        self._indexes: dict[str, int] = {}
        self._moved: dict[int, int] = {}  # what a server's index stands for, where it gave two calls the same
        self._calls = Calls()
        self._held_call: CallSoFar | None = None
        self._top = self._last = -1

    def payload(self, payload: Object, name: str | None, out: list[Event]) -> None:
        get = payload.get
        error = get("error")
        if error or name == "error" or get("object") == "error":  # some servers send the error object itself
            raise self.fault(payload)
        choices = get("choices")
        tier = get("service_tier")
        if not self._started or (tier is not None and tier != self._tier):
            self._start(payload, out)
        if choices:
            for choice in choices:
                if choice.get("index"):
                    continue
                delta = choice.get("delta") or choice.get("message")
                if delta:
                    self._delta(delta, out)
                if choice.get("finish_reason"):
                    self._finish(choice, payload, out)
        usage = get("usage")
        if usage:
            self.usage(usage, out)

    def whole(self, payload: Object, out: list[Event]) -> bool:
        if not payload.get("choices") or "message" not in payload["choices"][0]:
            return False
        self.payload(payload, None, out)
        return True

    def _start(self, payload: Object, out: list[Event]) -> None:
        request_id, model = text_or_none(payload.get("id")), text_or_none(payload.get("model"))
        if not self._started and not (request_id or model or payload.get("choices")):
            return
        self._started = True
        self.request_id = self.request_id or request_id
        self._tier = payload.get("service_tier")
        out.append(ResponseStarted(request_id=self.request_id, model=model, billing=billing_facts(payload)))

    def _delta(self, delta: Object, out: list[Event]) -> None:
        get = delta.get
        if self.held is not None and (get("content") or not get("tool_calls")):
            self.release(out)
        for field in ("reasoning_content", "reasoning") if len(delta) > 1 or "content" not in delta else ():
            thought = get(field)
            if thought and isinstance(thought, str):
                self._think(thought, field, out)
                break
        content = get("content")
        if content:
            if isinstance(content, str):
                if self._reasoning:
                    self._end_reasoning(out)
                out.append(TextDelta(content))
            else:
                self._parts(content, out)
        if len(delta) == 1 and content is not None:
            return
        refusal = get("refusal")
        if refusal and isinstance(refusal, str):
            self._refused = True
            out.append(TextDelta(refusal))
        calls = get("tool_calls")
        if calls:
            for call in calls:
                self._call(call, call.get("function") or {}, out)
        elif get("function_call"):
            self._call({"index": 0}, delta["function_call"], out)

    def _parts(self, parts: list[Object], out: list[Event]) -> None:
        """Content as a list (Mistral): text, and thinking that is a list of texts itself."""
        for part in parts:
            if part.get("type") == "thinking":
                thought = part["thinking"]
                text = thought if isinstance(thought, str) else "".join(t["text"] for t in thought)
                if text:
                    self._think(text, "reasoning_content", out)
            elif text_or_none(part.get("text")):
                self._end_reasoning(out)
                out.append(TextDelta(part["text"]))

    def _think(self, text: str, field: str, out: list[Event]) -> None:
        self._reasoning.append(text)
        self._reasoning_field = field
        out.append(ReasoningDelta(text, self._block))

    def _end_reasoning(self, out: list[Event]) -> None:
        if not self._reasoning:
            return
        text = "".join(self._reasoning)
        part = ReasoningPart(text=text, raw={self._reasoning_field: text}, provider=self.provider, model=self.model)
        out.append(ReasoningFinished(index=self._block, part=part))
        self._reasoning = []
        self._block += 1

    def _call(self, call: Object, function: Object, out: list[Event]) -> None:
        self._end_reasoning(out)
        call_id, name = text_or_none(call.get("id")) or "", text_or_none(function.get("name")) or ""
        arguments: Any = function.get("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = text_of(arguments)
        index = call.get("index")
        if not isinstance(index, int):
            index = self._derived_index(call_id, name)
        given = index
        if given in self._moved:
            index = self._indexes.get(call_id, self._moved[given])
        if self._calls.another(index, call_id, name, self.tools):
            index = self._moved[given] = self._top + 1
        self._last, self._top = index, max(index, self._top)
        if call_id:
            self._indexes[call_id] = index
        so_far = self._calls.take(index, call_id, name, arguments)
        event = ToolCallDelta(index, call_id, name, arguments)
        if self.held is not None and self._held_call is so_far:
            event = ToolCallDelta(index, call_id, so_far.name, self.held.arguments + arguments)
            self.held = None
        self.release(out)
        if len(so_far.texts) == 1 and not call_id:
            self.held, self._held_call = event, so_far  # its id may come with the next piece: a call has one from its first on
        else:
            out.append(event)

    def _derived_index(self, call_id: str, name: str) -> int:
        """The index of a call that came without one: a new id, or a name without an id, begins a new call. An id without a
        name may still be that of the call before, where that had none."""
        if call_id in self._indexes:
            return self._indexes[call_id]
        begins = name or (call_id and all(call.said for call in self._calls.all[-1:]))
        return self._top + 1 if begins else max(self._last, 0)

    def _finish(self, choice: Object, payload: Object, out: list[Event]) -> None:
        self.release(out)
        self._end_reasoning(out)
        reason = choice["finish_reason"]
        if reason == "error":
            raise self.fault(choice)
        if not all(call.name for call in self._calls.all):
            raise self.malformed("a tool call without a name")
        if not self._finished and isinstance(reason, str):
            self._finished = True
            reason = _REASONS.get(reason, reason)
            if reason == "stop":  # what a forced tool call and a refusal also end with
                reason = "content_filter" if self._refused else "tool_calls" if self._top >= 0 else reason
            out.append(Finished(reason=reason))
        if not payload.get("usage"):  # where Moonshot and Groq put it
            self.usage(choice.get("usage") or (payload.get("x_groq") or {}).get("usage"), out)
