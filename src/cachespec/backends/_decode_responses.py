"""OpenAI Responses: stream events to events. Terminal: ``response.completed``, ``.incomplete`` or ``.failed``.

Events carry the index of their output item; where a server gives several items one place, each has one of its own (contract
S4). What a server sends only in an item's final form (no deltas before), or only in the finished response, is taken from
there, so nothing is lost and nothing comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import ClassVar

from cachespec.backends._decode import EventDecoder, Object, billing_facts, name_of_call, string, text_or_none
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

_REASONS: Mapping[str, str] = {"max_output_tokens": "length", "max_messages": "length", "content_filter": "content_filter"}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}


class ResponsesDecoder(EventDecoder):
    """Unknown events and items are passed over. A failed response is raised as what its error code means."""

    api = "responses"

    def __init__(self, *, backend: str, model: str, provider: str | None = "openai") -> None:
        super().__init__(backend=backend, model=model, provider=provider)
        self._noted = False
        self._facts: tuple[str | None, dict[str, str] | None] = (None, None)
        self._items: dict[tuple[int | None, str], int] = {}
        self._places: dict[int, int] = {}
        self._taken: set[int] = set()
        self._top = -1
        self._streamed: set[int] = set()
        self._arguments: dict[int, int] = {}
        self._call_ids: set[int] = set()
        self._nameless: set[int] = set()
        self._summaries: dict[int, int] = {}
        self._added_items: set[int] = set()
        self._done_items: set[int] = set()
        self._refused = False

    def payload(self, payload: Object, name: str | None, out: list[Event]) -> None:
        kind = payload.get("type") or name or ("error" if payload.get("error") else "")
        handler = self._HANDLERS.get(kind)
        if handler is not None:
            handler(self, payload, out)

    def whole(self, payload: Object, out: list[Event]) -> bool:
        handler = self._HANDLERS.get(f"response.{payload.get('status')}")
        if payload.get("object") != "response" or handler is None or payload["status"] == "in_progress":
            return False
        handler(self, {"response": payload}, out)
        return True

    def _index(self, event: Object, *, over: Collection[int] = ()) -> int:
        """The index of the item that an event is about: of the place that it names, and of the ids known there.

        An event whose ids are new there is about the latest item of its place, as some servers give an item another id in
        every event; not so where that item is one of those that are `over`, or where both are calls with ids of their own.
        """
        said, item = event.get("output_index"), event.get("item") or {}
        place = said if isinstance(said, int) else None
        keys = _keys(place, item, event.get("item_id")) or [(place, "")]
        index = next((self._items[key] for key in keys if key in self._items), None)
        if index is None and place is not None:
            index = self._places.get(place)
            if index in over or (index in self._call_ids and item.get("call_id")):
                index = None
        if index is None:
            index = self._top + 1 if place is None or place in self._taken else place
            self._items.update(dict.fromkeys(keys, index))
        return self._take(index, place)

    def _take(self, index: int, place: int | None) -> int:
        self._taken.add(index)
        self._top = max(self._top, index)
        if place is not None:
            self._places[place] = index
        return index

    def _started(self, event: Object, out: list[Event]) -> None:
        self._note(event["response"], out)
        self.usage(event["response"].get("usage"), out, begun=False)

    def _note(self, response: Object, out: list[Event]) -> None:
        """Report the response's id, model and tier: at the start, and again where the end says more or otherwise."""
        self.request_id = self.request_id or text_or_none(response.get("id"))
        billing = billing_facts(response, items=response.get("output"))
        facts = text_or_none(response.get("model")) or self._facts[0], billing or self._facts[1]
        if not self._noted or facts != self._facts:
            self._noted, self._facts = True, facts
            response_id = text_or_none(response.get("id"))
            started = ResponseStarted(request_id=self.request_id, model=facts[0], billing=facts[1], response_id=response_id)
            out.append(started)

    def _text(self, event: Object, out: list[Event]) -> None:
        text = string(event["delta"])
        if text:
            self._said(self._index(event), text, out)

    def _said(self, index: int, text: str, out: list[Event]) -> None:
        self._streamed.add(index)
        out.append(TextDelta(text, index))

    def _refusal(self, event: Object, out: list[Event]) -> None:
        self._refused = True
        self._text(event, out)

    def _thought(self, event: Object, out: list[Event]) -> None:
        text = string(event["delta"])
        if not text:
            return
        index, part = self._index(event), event.get("summary_index", 0)
        self._streamed.add(index)
        if part != self._summaries.setdefault(index, part):
            self._summaries[index] = part
            text = "\n\n" + text
        out.append(ReasoningDelta(text, index))

    def _item_added(self, event: Object, out: list[Event]) -> None:
        item, index = event["item"], self._index(event, over=self._added_items)
        self._know(item, index, event)
        if item.get("type") in _CALLS:
            self._call(index, item, out)

    def _know(self, item: Object, index: int, event: Object) -> None:
        """Remember an item by its ids, in its place and wherever the finished response has it."""
        self._added_items.add(index)
        place = event.get("output_index")
        for key in (*_keys(place if isinstance(place, int) else None, item), *_keys(None, item)):
            self._items.setdefault(key, index)

    def _call(self, index: int, item: Object, out: list[Event]) -> None:
        name = name_of_call(item["name"])
        self._arguments[index] = 0
        self._nameless.discard(index)
        if item.get("call_id"):
            self._call_ids.add(index)
        call_id = item.get("call_id") or item.get("id") or ""
        out.append(ToolCallDelta(index, str(call_id), name, ""))

    def _call_delta(self, event: Object, out: list[Event]) -> None:
        self._more(self._index(event), string(event["delta"]), out)

    def _more(self, index: int, text: str, out: list[Event]) -> None:
        if index not in self._arguments:
            self._nameless.add(index)  # its finished item has the name, and all of this text
        elif text:
            self._arguments[index] += len(text)
            out.append(ToolCallDelta(index, "", "", text))

    def _item_done(self, event: Object, out: list[Event]) -> None:
        item, index = event["item"], self._index(event, over=self._done_items)
        self._know(item, index, event)
        self._whole_item(item, index, out)

    def _whole_item(self, item: Object, index: int, out: list[Event]) -> None:
        kind = item.get("type")
        self._done_items.add(index)
        if kind in _CALLS:
            if index not in self._arguments:
                self._call(index, item, out)
            rest = (item.get(_CALLS[kind]) or "")[self._arguments[index] :]
            if rest:
                self._more(index, rest, out)
        elif kind == "message":
            self._message_done(item, index, out)
        elif kind == "reasoning":
            texts = [part["text"] for part in item.get("summary") or item.get("content") or ()]
            text = "\n\n".join(texts)
            if text and index not in self._streamed:
                out.append(ReasoningDelta(text, index))
            part = ReasoningPart(text=text, raw=item, provider=self.provider, model=self.model)
            out.append(ReasoningFinished(index=index, part=part))

    def _message_done(self, item: Object, index: int, out: list[Event]) -> None:
        new = index not in self._streamed
        for part in item.get("content") or ():
            self._refused = self._refused or part["type"] == "refusal"
            text = part.get("text") or part.get("refusal")
            if new and text:
                self._said(index, text, out)

    def _end(self, event: Object, out: list[Event]) -> Object:
        response: Object = event["response"]
        self._note(response, out)
        for position, item in enumerate(response.get("output") or ()):
            known = (self._items[key] for key in _keys(None, item) if key in self._items)
            index = self._take(next(known, self._places.get(position, position)), position)
            if index not in self._done_items:
                self._whole_item(item, index, out)
        if self._nameless:
            raise self.malformed("a tool call without a name")
        self.usage(_counts(response), out)
        self._diagnosed(response.get("prompt_cache_diagnostics"), out)
        return response

    @staticmethod
    def _diagnosed(diagnostics: Object | None, out: list[Event]) -> None:
        """Why the prompt missed, as OpenAI has it, beside an earlier response that was named."""
        if diagnostics is None:
            return
        kind = text_or_none(diagnostics.get("type")) or "unavailable"
        missed = diagnostics.get("cache_missed_tokens")
        reason = {"cache_hit": "hit", "cache_miss": text_or_none(diagnostics.get("reason")) or "unavailable"}.get(kind, kind)
        out.append(CacheDiagnosed(reason=reason, missed_tokens=missed if isinstance(missed, int) else None))

    def _completed(self, event: Object, out: list[Event]) -> None:
        self._end(event, out)
        out.append(Finished(reason="tool_calls" if self._arguments else "content_filter" if self._refused else "stop"))
        self.done = True

    def _incomplete(self, event: Object, out: list[Event]) -> None:
        response = self._end(event, out)
        reason = (response.get("incomplete_details") or {}).get("reason") or "incomplete"
        out.append(Finished(reason=_REASONS.get(reason, str(reason))))
        self.done = True

    def _failed(self, event: Object, out: list[Event]) -> None:
        response = event["response"]
        self._note(response, out)
        self.usage(_counts(response), out)
        raise self.fault(response.get("error") or {"message": "the response failed, the server did not say why"})

    def _error(self, event: Object, out: list[Event]) -> None:
        raise self.fault(event)

    _HANDLERS: ClassVar[Mapping[str, Callable[[ResponsesDecoder, Object, list[Event]], None]]] = {
        "response.created": _started,
        "response.in_progress": _started,
        "response.output_item.added": _item_added,
        "response.output_text.delta": _text,
        "response.refusal.delta": _refusal,
        "response.reasoning_summary_text.delta": _thought,
        "response.reasoning_text.delta": _thought,
        "response.function_call_arguments.delta": _call_delta,
        "response.custom_tool_call_input.delta": _call_delta,
        "response.output_item.done": _item_done,
        "response.completed": _completed,
        "response.incomplete": _incomplete,
        "response.failed": _failed,
        "error": _error,
    }


def _counts(response: Object) -> object:
    """The response's usage, and what it says beside it of the tools that it ran."""
    usage, tools = response.get("usage"), response.get("tool_usage")
    return {**usage, "tool_usage": tools} if isinstance(usage, dict) and isinstance(tools, dict) else usage


def _keys(place: int | None, item: Object, item_id: object = None) -> list[tuple[int | None, str]]:
    """What an item is known by in a place, None being anywhere."""
    return [(place, text) for text in (item_id, item.get("id"), item.get("call_id")) if isinstance(text, str) and text]
