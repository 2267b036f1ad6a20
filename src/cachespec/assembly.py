"""Puts one answer together from its events: constant work per event, one join at the end (contract S6).

Parts keep the order in which they first appeared. Tool calls are keyed by (index, id): a new id on an index in use is a
new call, a missing id continues the call of that index (contract S4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cachespec.events import (
    Event,
    Finished,
    ReasoningDelta,
    ReasoningFinished,
    ResponseStarted,
    TextDelta,
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


@dataclass(slots=True)
class _Call(_Pieces):
    id: str = ""
    name: str = ""


class Assembly:
    """Absorbs events of one attempt; `message()` is what they add up to so far.

    Attributes:
        deltas, size: how many content events came, and their UTF-8 length in bytes: what is known of the output when
            no usage ever arrives.
    """

    def __init__(self, *, provider: str | None, model: str) -> None:
        self._provider, self._model = provider, model
        self._parts: list[_Pieces] = []
        self._texts: dict[int, _Pieces] = {}
        self._reasoning: dict[int, _Reasoning] = {}
        self._calls: dict[int, _Call] = {}
        self._last: _Pieces | None = None
        self._last_index = -1
        self.deltas = 0
        self.size = 0
        self.started: ResponseStarted | None = None
        self.finished: Finished | None = None
        self.usage: Usage | None = None
        self.busy_s: float | None = None
        self.billing: Mapping[str, str] | None = None

    @property
    def committed(self) -> bool:
        """True from the first content on: from here there is no second attempt."""
        return self.deltas > 0

    def absorb(self, event: Event) -> Event:
        """Take one event in; return it as the reader shall see it (tool deltas with their id and name filled in)."""
        kind = type(event)
        if kind is TextDelta:
            self._text(event)  # type: ignore[arg-type]
        elif kind is ToolCallDelta:
            return self._tool(event)  # type: ignore[arg-type]
        elif kind is ReasoningDelta:
            self._think(event)  # type: ignore[arg-type]
        elif isinstance(event, UsageReported):
            self.usage = event.usage
        elif isinstance(event, ReasoningFinished):
            self._reasoning_block(event.index).part = event.part
        elif isinstance(event, ResponseStarted):
            self._start(event)
        elif isinstance(event, Finished):
            self.finished = event
            self.busy_s = event.busy_s
        return event

    def _text(self, event: TextDelta) -> None:
        self.deltas += 1
        self.size += len(event.text)
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
        self.size += len(event.text)
        self._reasoning_block(event.index).texts.append(event.text)

    def _reasoning_block(self, index: int) -> _Reasoning:
        block = self._reasoning.get(index)
        if block is None:
            block = self._reasoning[index] = _Reasoning()
            self._parts.append(block)
        return block

    def _tool(self, event: ToolCallDelta) -> ToolCallDelta:
        self.deltas += 1
        self.size += len(event.arguments) + len(event.name)
        call = self._calls.get(event.index)
        if call is None or (event.id and call.id and event.id != call.id):
            call = self._calls[event.index] = _Call()
            self._parts.append(call)
            # A server that never names its calls still gets ids that are the same in every run.
            call.id = event.id or ("" if event.name == "" else f"call_{sum(isinstance(p, _Call) for p in self._parts) - 1}")
        elif event.id and not call.id:
            call.id = event.id
        if event.name and not call.name:
            call.name = event.name
        call.texts.append(event.arguments)
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
            )
        self.started = event

    def message(self) -> Message:
        """The assistant's message, appendable to `messages` as it is; empty blocks are left out."""
        parts: list[Part] = []
        calls = 0
        for block in self._parts:
            text = "".join(block.texts)
            if isinstance(block, _Call):
                parts.append(ToolCallPart(id=block.id or f"call_{calls}", name=block.name, arguments=text))
                calls += 1
            elif isinstance(block, _Reasoning):
                part = block.part or ReasoningPart(text=text, provider=self._provider, model=self._model)
                parts.append(part)
            elif text:
                parts.append(TextPart(text=text))
        return Message(role="assistant", parts=tuple(parts))
