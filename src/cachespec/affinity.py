"""What a client remembers of sessions: the backend that answered last, and the parameters that are part of what is cached.

Each tenant has sessions of its own, whatever they are called. A tool's results go back to who called it until they are
answered, whatever is said beside or after them. Ids of calls are unique with some servers and counted from 0 with others, so a
call is known by its session and by the conversation it was made in, too. What a vendor keeps (a stored answer, a conversation,
a container) is known by its id.

Thinking, effort, tool choice, speed and betas enter a vendor's cache key: to change one on the way is to pay for the whole
prompt again. So what a session has set stays set where a later request says nothing, and a request that says something else
gets it, and is told (``params_changed``, where it is any of its vendor's key: `cachespec.cache_terms`). A tool choice, whether
calls may be parallel, and the form of an answer are never carried over: what was asked of one turn must not be asked of the
next. Nor is a vendor's own field for what a request says itself: fields of one's own come last in a body, and would win.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

from cachespec.backends.base import Backend
from cachespec.choices import Reasoning, ResponseFormat, ToolChoice
from cachespec.messages import Message, OpaquePart, Part, TextPart, ToolResultPart
from cachespec.request import Request

MOST = 10_000
"""Sessions remembered; the longest unused one is forgotten first."""
FROZEN = (
    *("speed", "betas", "thinking", "output_config", "effort", "reasoning", "reasoning_effort", "verbosity", "text"),
    *("service_tier", "parallel_tool_calls", "context_management", "prompt_cache_key"),
)
"""Fields of a vendor's own body (in `Request.extra` and `passthrough`) that are part of what is cached (guides, 2026-11)."""
_OF_A_TURN = ("parallel_tool_calls", "text.format", "output_config.format")
"""Of these what is said of one turn, and refused (without tools) or wrong in the next."""
_REASONING = ("thinking", "effort", "reasoning", "reasoning_effort", "output_config.effort")
"""Of these what says the same as `Request.reasoning`."""
_SEVERAL = ("text", "output_config")
"""Of these the objects of settings that have nothing to do with each other."""
STATE = ("previous_response_id", "conversation", "thread", "prompt", "container")
"""Fields of a vendor's own body that may name what the vendor keeps."""
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")
_ENOUGH = 1_000  # characters of a message that tell its conversation from others


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
class Change:
    """A parameter that a request changes within its session. `owner` is the backend, or the vendor, whose own field it is;
    None: it is a request's. `before` and `after` are for a person."""

    field: str
    before: str
    after: str
    owner: str | None = None

    def __str__(self) -> str:
        name = self.field if self.owner is None else f"{self.owner}.{self.field}"
        return f"{name}: {self.before} became {self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A request with what its session has set, the backend that answered before, and what it changes nevertheless (`changed`).

    `tool_loop`: it holds results, not answered yet, of tools that `previous_backend` called. `previous_response` is the
    vendor's id of the session's last answer there. `holder` keeps what a body that was given names, where that is known.
    """

    request: Request
    previous_backend: str | None = None
    changed: tuple[Change, ...] = ()
    tool_loop: bool = False
    previous_response: str | None = None
    holder: str | None = None


def state_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """What a body's fields name that its vendor keeps: the id, by field. An object without an id is no name of anything."""
    given = {key: fields[key] for key in STATE if key in fields}
    ids = {key: value.get("id") if isinstance(value, Mapping) else value for key, value in given.items()}
    return {key: str(name) for key, name in ids.items() if name and isinstance(name, str | int) and name is not True}


class Sessions:
    """See the module's docstring. One event loop uses it."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self.changes = 0
        """How often anything was remembered: what was resumed at one count need not be resumed again at the same."""
        self._kept: OrderedDict[tuple[str | None, str], Kept] = OrderedDict()
        self._calls: OrderedDict[tuple[str | None, str, str | None, bytes | None], str]
        self._calls = OrderedDict()  # who made a tool call: by tenant, its id, and `_places`
        self._held: OrderedDict[tuple[str | None, str], str] = OrderedDict()  # who keeps what goes by this id, by tenant

    def resume(self, request: Request, *, among: Collection[str] | None = None) -> Resumed:
        """The request as it goes on in its session. A tool loop needs none: its calls and their conversation say who made
        them. `among`: the backends that there are; what the session had for one that is gone is left out."""
        kept = None if request.session_id is None else self._kept.get((request.tenant, request.session_id))
        caller = self._caller(request, known=kept is not None)
        ids = [name for fields in request.passthrough.values() for name in state_of(fields).values()]
        holder = next((held for name in ids if (held := self._held.get((request.tenant, name))) is not None), None)
        if kept is None:
            return Resumed(request=request, previous_backend=caller, tool_loop=caller is not None, holder=holder)
        had = {name: fields for name, fields in kept.extra.items() if among is None or name in among}
        left_out = _OF_A_TURN if request.reasoning is None else (*_OF_A_TURN, *_REASONING)
        extra = _filled(request.extra, _without(had, left_out))
        passthrough = _filled(request.passthrough, _without(kept.passthrough, left_out))
        reasoning = kept.reasoning if request.reasoning is None else request.reasoning
        changed = [
            *_change("reasoning", kept.reasoning, reasoning),
            *_change("tool_choice", _chosen(kept.tool_choice), _chosen(request.tool_choice)),
            *_change("parallel_tool_calls", _parallel(kept.tool_choice), _parallel(request.tool_choice)),
            *_change("response_format", kept.response_format, request.response_format),
        ]
        for before, after in ((had, extra), (kept.passthrough, passthrough)):
            for name in dict.fromkeys((*before, *after)):
                old, new = before.get(name, {}), after.get(name, {})
                changed += [found for key in FROZEN for found in _change(key, old.get(key), new.get(key), owner=name)]
        if (reasoning, extra, passthrough) != (request.reasoning, request.extra, request.passthrough):
            request = replace(request, reasoning=reasoning, extra=extra, passthrough=passthrough)
        previous = kept.backend if caller is None else caller
        return Resumed(
            request=request,
            previous_backend=previous,
            changed=tuple(changed),
            tool_loop=caller is not None,
            previous_response=kept.response_id if previous == kept.backend else None,
            holder=holder,
        )

    def _caller(self, request: Request, *, known: bool) -> str | None:
        """The backend whose tool calls are answered by what was said since; None where that answers none that we know.

        `known`: its session is, and then only what was called in it counts.
        """
        messages = request.messages
        end = _run(messages, len(messages), answers=True)  # the beginning of an answer, where the caller wrote one
        begin = _run(messages, end, answers=False)
        results = [call for message in messages[begin:end] for part in message.parts if (call := _answered(part))]
        if not results:
            return None
        asked = _run(messages, begin, answers=True)
        conversation = _digest(messages[:asked])
        for surest in _places(request.session_id, conversation, known=known):
            for call in results:
                if backend := self._calls.get((request.tenant, call, *surest)):
                    return backend
        return None

    def remember(
        self, request: Request, *, backend: str, model: str, calls: Iterable[str] = (), response_id: str | None = None
    ) -> None:
        """A request was answered; `calls` are the ids of the tool calls in the answer, `response_id` the vendor's own."""
        self.changes += 1
        session, made = request.session_id, list(calls)
        asked = _run(request.messages, len(request.messages), answers=True) if made else 0
        places = list(_places(session, _digest(request.messages[:asked]), known=False)) if made else []
        for call in made:
            for place in places:
                key = (request.tenant, call, *place)
                # Without a session an id that several backends use says nothing by itself.
                told = place == (None, None) and self._calls.get(key, backend) != backend
                self._put(self._calls, key, "" if told else backend, most=3 * self._most)
        given = (*request.passthrough.values(), request.extra.get(backend, {}))
        named = [name for fields in given for name in state_of(fields).values()]
        for name in (*named, *(() if response_id is None else (response_id,))):
            self._put(self._held, (request.tenant, name), backend, most=self._most)
        if request.session_id is None:
            return
        kept = Kept(
            backend=backend,
            model=model,
            response_id=response_id,
            reasoning=request.reasoning,
            tool_choice=request.tool_choice,
            response_format=request.response_format,
            extra=_frozen(request.extra),
            passthrough=_frozen(request.passthrough),
        )
        self._put(self._kept, (request.tenant, request.session_id), kept, most=self._most)

    @staticmethod
    def _put(known: OrderedDict[_K, _V], key: _K, value: _V, *, most: int) -> None:
        known[key] = value
        known.move_to_end(key)
        while len(known) > most:
            known.popitem(last=False)

    def forget_answers(self, backend: str) -> None:
        """What answers by this name is another account, server or model now: it does not know the last answers."""
        for session, kept in self._kept.items():
            if kept.backend == backend and kept.response_id is not None:
                self._kept[session] = replace(kept, response_id=None)


def _run(messages: Sequence[Message], end: int, *, answers: bool) -> int:
    """Where the messages before `end` begin that are all a model's, or all a caller's: an answer may be several items."""
    while end and (messages[end - 1].role == "assistant") is answers:
        end -= 1
    return end


def _answered(part: Part) -> str | None:
    """The id of the tool call that a part answers. A result with more in it than text and images is its vendor's own part."""
    if isinstance(part, ToolResultPart):
        return part.id
    if isinstance(part, OpaquePart) and str(part.raw.get("type")).endswith(("_result", "_output")):
        call = part.raw.get("call_id" if part.dialect == "responses" else "tool_use_id")
        return call if isinstance(call, str) else None
    return None


def named_state(request: Request) -> list[tuple[str, str]]:
    """What a given body names that its vendor keeps: vendor and field."""
    return [(vendor, field) for vendor, fields in request.passthrough.items() for field in state_of(fields)]


def can_be_told(backend: Backend, vendor: str, field: str) -> bool:
    """Whether a field of that vendor's body says something to this backend."""
    keeps = backend.capabilities.keeps
    return backend.provider == vendor if keeps is None else field in keeps


def holder_of(
    request: Request, backends: Mapping[str, Backend], candidates: Sequence[str], *, seen: str | None, session: str | None
) -> str | None:
    """The backend that keeps what this request names: such state never moves (contract D2).

    `extra` says whose it is. A body belongs to its vendor: to the backend that answered by that name before (`seen`), else to
    the one that answered the `session`, where nobody knows to the vendor's first candidate. None: it names nothing, or nobody
    can be told it.
    """
    own = [name for name, fields in request.extra.items() if state_of(fields)]
    if own:
        return next((name for name in own if name in candidates), own[0])
    state = named_state(request)
    if not state or seen is not None:
        return seen if state else None
    able = [name for name in candidates if all(can_be_told(backends[name], vendor, field) for vendor, field in state)]
    if session in able:
        return session
    # Of several that speak a vendor's protocol, the vendor itself comes first.
    return min(able, key=lambda name: backends[name].provider not in request.passthrough, default=None)


def _places(session: str | None, conversation: bytes, *, known: bool) -> list[tuple[str | None, bytes | None]]:
    """What tool calls of one id are told apart by, the surest first: session and conversation; the session, whose history may
    have been cut; the conversation, where the session is not known. Two names for one conversation are one."""
    places: list[tuple[str | None, bytes | None]] = [(session, conversation), (session, None)]
    if not known and session is not None:
        places.append((None, conversation))
    return places


def _digest(messages: Sequence[Message]) -> bytes:
    """What tells a conversation from others: how long it is, how it begins and how it ends, as far as a glance shows. The
    whole of it would have to be read anew for every request."""
    digest = blake2b(b"%d" % len(messages), digest_size=16)
    for message in (*messages[:1], *messages[-1:]):
        for part in message.parts:
            text = part.text if isinstance(part, TextPart) else getattr(part, "id", "")
            digest.update(
                f"\0{message.role}\0{type(part).__name__}\0{len(text)}\0{text[:_ENOUGH]}".encode("utf-8", "surrogatepass")
            )
    return digest.digest()


def _frozen(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: own[key] for key in FROZEN if key in own} for name, own in fields.items()}


def _without(fields: Mapping[str, Mapping[str, Any]], left_out: Collection[str]) -> dict[str, dict[str, Any]]:
    """Fields without some of them, or of what is in one (``field.name``); what that leaves empty goes, too."""
    found: dict[str, dict[str, Any]] = {}
    for name, own in fields.items():
        for key, value in own.items():
            if key in left_out:
                continue
            if key in _SEVERAL and isinstance(value, Mapping):
                value = {inner: said for inner, said in value.items() if f"{key}.{inner}" not in left_out}
                if not value:
                    continue
            found.setdefault(name, {})[key] = value
    return found


def _filled(given: Mapping[str, Mapping[str, Any]], kept: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """What is given, and what was kept where nothing is."""
    if not kept:
        return given
    return {name: _both(kept.get(name, {}), given.get(name, {})) for name in dict.fromkeys((*given, *kept))}


def _both(kept: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    both = {**kept, **given}
    for key in _SEVERAL:
        old, new = kept.get(key), given.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            both[key] = {**old, **new}
    return both


def _chosen(choice: ToolChoice | None) -> str | None:
    return None if choice is None else choice.name or choice.mode


def _parallel(choice: ToolChoice | None) -> bool | None:
    return None if choice is None else choice.parallel


def _change(field: str, before: object, after: object, *, owner: str | None = None) -> list[Change]:
    return [] if before == after else [Change(field=field, before=_said(before), after=_said(after), owner=owner)]


def _said(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Reasoning):
        return value.effort or (f"{value.budget_tokens} tokens" if value.budget_tokens is not None else "a summary")
    if isinstance(value, ResponseFormat):
        return value.kind
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
