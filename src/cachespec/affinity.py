"""What a client remembers of sessions: the backend that answered last, and the parameters that are part of what is cached.

Thinking, effort, tool choice, speed and betas enter a vendor's cache key: to change one on the way is to pay for the whole
prompt again. So what a session has set stays set where a later request says nothing, and a request that says something else
gets it, and is told (``params_changed``). A tool choice is never carried over: what was asked of one turn must not be asked of
the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cachespec.choices import Reasoning, ResponseFormat, ToolChoice
from cachespec.messages import ToolResultPart
from cachespec.request import Request

MOST = 10_000
"""Sessions remembered; the longest unused one is forgotten first."""
FROZEN = ("speed", "betas", "thinking", "output_config", "effort", "reasoning", "reasoning_effort", "verbosity", "service_tier")
"""Fields of a vendor's own body (in `Request.extra` and `passthrough`) that are part of what is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A session as its last finished request left it."""

    backend: str
    model: str
    response_id: str | None
    reasoning: Reasoning | None
    tool_choice: ToolChoice | None
    response_format: ResponseFormat | None
    extra: Mapping[str, Mapping[str, Any]]
    passthrough: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A request with what its session has set, the backend that answered before, and what it changes nevertheless.

    `tool_loop`: its newest message holds the results of tools that `previous_backend` called. `previous_response` is the
    vendor's id of the session's last answer there.
    """

    request: Request
    previous_backend: str | None = None
    changed: tuple[str, ...] = ()
    tool_loop: bool = False
    previous_response: str | None = None


class Sessions:
    """See the module's docstring. One event loop uses it."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._calls: OrderedDict[str, str] = OrderedDict()  # id of a tool call: the backend that made it

    def resume(self, request: Request) -> Resumed:
        """The request as it goes on in its session. A tool loop needs none: the ids of its calls say who made them."""
        caller = self._caller(request)
        kept = None if request.session_id is None else self._kept.get(request.session_id)
        if kept is None:
            return Resumed(request=request, previous_backend=caller, tool_loop=caller is not None)
        extra, passthrough = _filled(request.extra, kept.extra), _filled(request.passthrough, kept.passthrough)
        reasoning = kept.reasoning if request.reasoning is None else request.reasoning
        changed = [
            *_change("reasoning", kept.reasoning, reasoning),
            *_change("tool_choice", kept.tool_choice, request.tool_choice),
            *_change("response_format", kept.response_format, request.response_format),
        ]
        for before, after in ((kept.extra, extra), (kept.passthrough, passthrough)):
            for name in after:
                old, new = before.get(name, {}), after[name]
                changed += [text for key in FROZEN for text in _change(f"{name}.{key}", old.get(key), new.get(key))]
        if (reasoning, extra, passthrough) != (request.reasoning, request.extra, request.passthrough):
            request = replace(request, reasoning=reasoning, extra=extra, passthrough=passthrough)
        previous = kept.backend if caller is None else caller
        return Resumed(
            request=request,
            previous_backend=previous,
            changed=tuple(changed),
            tool_loop=caller is not None,
            previous_response=kept.response_id if previous == kept.backend else None,
        )

    def _caller(self, request: Request) -> str | None:
        """The backend whose tool calls are answered by the newest message; None where it answers none that we know."""
        newest = request.messages[-1].parts if request.messages else ()
        results = [part for part in newest if isinstance(part, ToolResultPart)]
        return next((name for part in results if (name := self._calls.get(part.id)) is not None), None)

    def remember(
        self, request: Request, *, backend: str, model: str, calls: Iterable[str] = (), response_id: str | None = None
    ) -> None:
        """A request was answered; `calls` are the ids of the tool calls in the answer, `response_id` the vendor's own."""
        for call in calls:
            self._calls[call] = backend
            self._calls.move_to_end(call)
        while len(self._calls) > self._most:
            self._calls.popitem(last=False)
        if request.session_id is None:
            return
        self._kept[request.session_id] = Kept(
            backend=backend,
            model=model,
            response_id=response_id,
            reasoning=request.reasoning,
            tool_choice=request.tool_choice,
            response_format=request.response_format,
            extra=_frozen(request.extra),
            passthrough=_frozen(request.passthrough),
        )
        self._kept.move_to_end(request.session_id)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


def _frozen(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: own[key] for key in FROZEN if key in own} for name, own in fields.items()}


def _filled(given: Mapping[str, Mapping[str, Any]], kept: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """What is given, and what was kept where nothing is."""
    if not any(kept.values()):
        return given
    return {name: {**kept.get(name, {}), **given.get(name, {})} for name in dict.fromkeys((*given, *kept))}


def _change(name: str, before: object, after: object) -> list[str]:
    return [] if before == after else [f"{name}: {_said(before)} became {_said(after)}; what was cached before is not read"]


def _said(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Reasoning):
        return value.effort or (f"{value.budget_tokens} tokens" if value.budget_tokens is not None else "a summary")
    if isinstance(value, ToolChoice):
        return value.name or value.mode
    if isinstance(value, ResponseFormat):
        return value.kind
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
