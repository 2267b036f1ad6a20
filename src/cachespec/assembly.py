"""Puts one answer together from its events: constant work per event, one join at the end (contract S6).

Parts keep the order in which they first appeared. Which tool call a delta belongs to is `cachespec.call_deltas`' to say
(contract S4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cachespec.call_deltas import Calls, CallSoFar
from cachespec.events import (
    CacheDiagnosed,
    Event,
    Finished,
    LogprobsReported,
    ReasoningDelta,
    ReasoningFinished,
    ResponseStarted,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    UsageReported,
)
from cachespec.messages import Message, Part, ReasoningPart, TextPart, ToolCallPart
from cachespec.usage import Usage


@dataclass(slots=True)
class _Pieces:
    texts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Reasoning(_Pieces):
    part: ReasoningPart | None = None


class Assembly:
    """Absorbs events of one attempt; `message()` is what they add up to so far. `begun` is called at the first one.

    Attributes:
        deltas: how many content events came. With `size` it is what is known of the output when no usage ever arrives.
    """

    def __init__(self, *, provider: str | None, model: str, begun: Callable[[], None] | None = None) -> None:
        self._provider, self._model, self._begun = provider, model, begun
        self._parts: list[_Pieces | CallSoFar] = []
        self._texts: dict[int, _Pieces] = {}
        self._reasoning: dict[int, _Reasoning] = {}
        self._calls = Calls()
        self._last: _Pieces | None = None
        self._last_index = -1
        self.deltas = 0
        self.started: ResponseStarted | None = None
        self.finished: Finished | None = None
        self.usage: Usage | None = None
        self.diagnosed: CacheDiagnosed | None = None
        self.busy_s: float | None = None
        self.billing: Mapping[str, str] | None = None
        self._scores: list[TokenLogprob] | None = None

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Of the answer's tokens so far; None where none were reported."""
        return None if self._scores is None else tuple(self._scores)

    @property
    def begun(self) -> bool:
        """Whether the backend took the request up, as far as it said anything."""
        return self.started is not None or self.usage is not None

    @property
    def committed(self) -> bool:
        """True from the first content on: from here there is no second attempt."""
        return self.deltas > 0

    @property
    def size(self) -> int:
        """UTF-8 length in bytes of all content so far."""
        names = sum(len(p.name.encode("utf-8", "surrogatepass")) for p in self._calls.all)
        return names + sum(len(text.encode("utf-8", "surrogatepass")) for p in self._parts for text in p.texts)

    def absorb(self, event: Event) -> Event | None:
        """Take one event in; return it as the reader shall see it, None where there is nothing to see.

        Tool deltas get their id and name. A start that comes twice is one, and the end waits until nothing follows it.
        """
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun()
        kind = type(event)
        if kind is TextDelta:
            self._text(event)  # type: ignore[arg-type]
        elif kind is ToolCallDelta:
            return self._tool(event)  # type: ignore[arg-type]
        elif kind is ReasoningDelta:
            self._think(event)  # type: ignore[arg-type]
        elif isinstance(event, UsageReported):
            self.usage = event.usage
        elif isinstance(event, LogprobsReported):
            self._scores = [] if self._scores is None else self._scores
            self._scores += event.tokens
        elif isinstance(event, CacheDiagnosed):
            self.diagnosed = event
        elif isinstance(event, ReasoningFinished):
            self._reasoning_block(event.index).part = event.part
        elif isinstance(event, ResponseStarted):
            first = self.started is None
            self._start(event)
            return self.started if first else None
        elif isinstance(event, Finished):
            self.finished = event
            self.busy_s = event.busy_s
            return None
        return event

    def _text(self, event: TextDelta) -> None:
        self.deltas += 1
        index = event.index
        if index == self._last_index and self._last is not None:
            self._last.texts.append(event.text)
            return
        block = self._texts.get(index)
        if block is None:
            block = self._texts[index] = _Pieces()
            self._parts.append(block)
        self._last, self._last_index = block, index
        block.texts.append(event.text)

    def _think(self, event: ReasoningDelta) -> None:
        self.deltas += 1
        self._reasoning_block(event.index).texts.append(event.text)

    def _reasoning_block(self, index: int) -> _Reasoning:
        block = self._reasoning.get(index)
        if block is None:
            block = self._reasoning[index] = _Reasoning()
            self._parts.append(block)
        return block

    def _tool(self, event: ToolCallDelta) -> ToolCallDelta:
        self.deltas += 1
        call = self._calls.take(event.index, event.id, event.name, event.arguments)
        if len(call.texts) == 1:
            self._parts.append(call)
        if event.id == call.id and event.name == call.name:
            return event
        return ToolCallDelta(event.index, call.id, call.name, event.arguments)

    def _start(self, event: ResponseStarted) -> None:
        old = self.started
        self.billing = {**(self.billing or {}), **(event.billing or {})} or None
        if old is not None:
            event = ResponseStarted(
                request_id=old.request_id or event.request_id,
                model=event.model or old.model,
                billing=self.billing,
                response_id=old.response_id or event.response_id,
            )
        self.started = event

    def message(self) -> Message:
        """The assistant's message, appendable to `messages` as it is; empty blocks are left out."""
        parts: list[Part] = []
        calls = 0
        for block in self._parts:
            text = "".join(block.texts)
            if isinstance(block, CallSoFar):
                parts.append(ToolCallPart(id=block.id or f"call_{calls}", name=block.name, arguments=text))
                calls += 1
            elif isinstance(block, _Reasoning):
                part = block.part or ReasoningPart(text=text, provider=self._provider, model=self._model)
                parts.append(part)
            elif text:
                parts.append(TextPart(text=text))
        return Message(role="assistant", parts=tuple(parts))
