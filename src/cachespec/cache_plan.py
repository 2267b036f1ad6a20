"""Plans a request's use of a vendor's prompt cache: what is believed warm, what is to be marked, and what that will cost.

The planner looks places up (`cache_layout`), asks the caching policy, and fits its choice to the wire (`cache_marks`). It
learns nothing: that is `cache_learning`'s part, from what was really sent. No I/O, and no body is rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachespec.affinity import Change
from cachespec.backends._marks import wire_marks
from cachespec.backends.base import Backend
from cachespec.cache_keys import CacheKeys
from cachespec.cache_layout import Api, Layout, Layouts, Weights, tokens_of
from cachespec.cache_marks import Kept, Places, Spot, legal_marks
from cachespec.cache_terms import PromptCache
from cachespec.cache_view import SURE, View, given_steering
from cachespec.caching import CacheAsk, CachePlan, CachingPolicy, Lifetime
from cachespec.decision import Ask, Belief, Mark, Plan, Reason, TokenEstimate
from cachespec.errors import ConfigError
from cachespec.messages import TextPart
from cachespec.prompt import Prompt
from cachespec.request import Request
from cachespec.tokens import Sizes, TokenModel
from cachespec.values import quick
from cachespec.warmth import Entry, Warmth

_SETTLED = 0.03
"""How far the latest densities must be off those in use before they take their place."""
_NO_PLACES = Layout((), (), (), 0, 0, Sizes(), 0, 0, 0, "")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it rests on: what `cache_learning` needs once the request is sent.

    `cache` None: nothing is planned or learned for this backend. `spots` are where entries will be: all marks, the caller's
    too, and what the model keeps by itself. `found` are the entries known of this prompt, by place; `read` is the one that will
    be read. `scope` and `later` are what entries before the messages, and in them, are filed under. `route` is the shared
    prefix that the key stands for.
    """

    plan: Plan
    backend: str
    model: str
    tokenizer: str
    prompt: Prompt
    tokens: TokenEstimate | None = None
    belief: Belief | None = None
    cache: PromptCache | None = None
    ask: CacheAsk | None = None
    choice: CachePlan = field(default_factory=CachePlan)
    scope: bytes = b""
    later: bytes = b""
    layout: Layout | None = None
    spots: Sequence[Spot] = ()
    found: tuple[tuple[int, Entry], ...] = ()
    read: Entry | None = None
    route: bytes | None = None

    @property
    def lifetimes(self) -> Sequence[Lifetime]:
        """How long further turns of the conversation may find what they share with this one cached, by choice; empty where
        nothing will be."""
        if self.cache is None or self.prompt.request.cache != "auto" or self.places.tokens < self.cache.terms.minimum:
            return ()
        if self.cache.control != "routing" and not self.spots:
            return ()  # nothing is marked, and nothing is kept that is not
        return self.cache.terms.lifetimes

    def filed(self, key: bytes) -> tuple[bytes, bytes]:
        """What the entry of a prefix is filed under: a request may share tools and system with others, and no message."""
        places = self.places
        return self.scope if key in places.keys[: places.head] else self.later, key

    @property
    def places(self) -> Layout:
        """Where marks may stand; what `spots` and `found` refer to."""
        return _NO_PLACES if self.layout is None else self.layout


class CachePlanner:
    """Plans with one policy and one belief. `densities` gives what is learned of a model's tokens (``provider:model``)."""

    def __init__(self, policy: CachingPolicy, warmth: Warmth, keys: CacheKeys, densities: Callable[[str], TokenModel]) -> None:
        self.policy, self.warmth, self.keys = policy, warmth, keys
        self._densities = densities
        self._settled: dict[str, Weights] = {}
        self._layouts = Layouts()

    def plan(
        self,
        backend: Backend,
        prompt: Prompt,
        ask: Ask,
        *,
        target: str = "",
        ignored: tuple[str, ...] = (),
        changed: tuple[Change, ...] = (),
    ) -> Planned:
        """The plan for sending `prompt` to `backend`, what it is expected to read and write, and the belief behind it.

        `target` is what the backend's name stands for (`generations.target_of`): what another server, account or model cached
        is no part of the belief. `changed` names the parameters that a session changed although they are in what is cached.
        Raises ConfigError where the policy fails or chooses what there is not.
        """
        request, capabilities = prompt.request, backend.capabilities
        if capabilities.caching is None:
            reasons = _changes(changed, "nothing is read that was cached before")
            plan = _passed(backend, request, ignored, reasons, key=self.keys.partition(ask.tenant))
            name = _tokenizer(backend)
            return Planned(plan=plan, backend=backend.name, model=backend.model, tokenizer=name, prompt=prompt)
        layout, weights = self.layout(backend, prompt, capabilities.caching)
        view = View(
            backend,
            prompt,
            ask,
            capabilities.caching,
            layout=layout,
            weights=weights,
            warmth=self.warmth,
            keys=self.keys,
            target=target,
        )
        return _Planning(self, view).planned(ignored, [one for one in changed if one.field not in capabilities.caching.never])

    def layout(self, backend: Backend, prompt: Prompt, cache: PromptCache) -> tuple[Layout, Weights]:
        """The places of a prompt. What is learned of a model's tokens moves with every answer; the densities used here follow
        once it makes a difference, so that what was worked out for a prefix holds for a while."""
        name = _tokenizer(backend)
        latest = tuple(self._densities(name).weights)
        weights = self._settled.setdefault(name, latest)
        layout = self._layouts.of(prompt, cache.api, weights)
        if weights != latest and abs(tokens_of(layout.sizes, latest) - layout.tokens) > _SETTLED * layout.tokens:
            weights = self._settled[name] = latest
            layout = self._layouts.of(prompt, cache.api, weights)
        return layout, weights

    def choose(self, ask: CacheAsk) -> CachePlan:
        """What the policy chooses, which is somebody else's code: what it does wrong is an error that names it."""
        where, name = "policies.caching", f"{type(self.policy).__qualname__}.plan"
        try:
            choice = self.policy.plan(ask)
            known, last, fits = [lifetime.name for lifetime in ask.terms.lifetimes], -1, True
            for mark in choice.marks:
                fits = fits and last < mark.index < len(ask.prefixes) and mark.ttl in known
                last = mark.index
        except Exception as error:
            raise ConfigError(f"{name} failed: {type(error).__name__}: {error}", key=where) from error
        if not fits:
            raise ConfigError(f"{name} must choose prefixes and lifetimes of the ask, ascending", key=where)
        return choice


class _Planning:
    """One plan on its way."""

    def __init__(self, planner: CachePlanner, view: View) -> None:
        self.planner, self.view = planner, view
        self.request, self.cache, self.given = view.request, view.cache, view.given
        self.opt_out = view.backend.capabilities.opt_out or {}

    def planned(self, ignored: tuple[str, ...], changed: Sequence[Change]) -> Planned:
        request, terms, view = self.request, self.cache.terms, self.view
        places = view.places
        ask, choice = None, CachePlan()
        found: list[Reason] = []
        spots: Sequence[Spot]
        options: dict[str, Any]
        if request.cache != "auto":
            spots, options, why = self._without_writes(places)
            found.append(why)
        else:
            callers = view.callers()
            if callers:
                found.append(Reason("caller_marks", f"{len(callers)} marks of the caller, as they are"))
            if view.prefixes and view.prefixes[-1].tokens >= terms.minimum:
                ask = view.policy_ask()
                choice = self.planner.choose(ask)
                found += choice.reasons
            elif not callers:
                count = view.layout.tokens
                found.append(Reason("below_minimum", f"about {count} tokens; this model caches from {terms.minimum} on"))
            spots, options, more = self._marked(callers, choice, places)
            found += more
            if view.ask.tenant is not None and self.cache.isolation:
                found.append(Reason("isolation", self.cache.isolation))
        if request.cache == "auto" or (request.cache == "no-write" and spots):  # a key tells where to read as well
            self._add_key(options, spots)
        marks = () if self.cache.control == "routing" else tuple(Mark(at=s.at, tokens=s.tokens, ttl=s.ttl) for s in spots)
        by_itself = self._by_itself(options)
        read, tokens = view.expected(spots, by_itself)
        if read is not None and not any(reason.code == "warm_prefix" for reason in found):  # the policy may have said it
            found.append(Reason("warm_prefix", f"about {tokens.cache_read} tokens are believed cached"))
        return Planned(
            plan=Plan(
                backend=view.backend.name,
                marks=marks,
                options=options,
                drop_marks=request.cache != "auto",
                ignore=ignored,
                reasons=(*_changes(changed, self._read_all_the_same(read, tokens)), *found),
            ),
            backend=view.backend.name,
            model=view.backend.model,
            tokenizer=_tokenizer(view.backend),
            prompt=view.prompt,
            tokens=tokens,
            belief=view.belief(),
            cache=self.cache,
            ask=ask,
            choice=choice,
            scope=view.scope,
            later=view.later,
            layout=view.layout,
            spots=(*spots, *view.last(spots)) if by_itself else spots,
            found=tuple(view.found),
            read=read,
            route=view.basis if "prompt_cache_key" in options else None,
        )

    # -- marks and options

    def _marked(
        self, callers: list[Spot], choice: CachePlan, places: Places
    ) -> tuple[Sequence[Spot], dict[str, Any], list[Reason]]:
        terms, options, control = self.cache.terms, {}, self.cache.control
        chosen = [places.spot(mark.index, mark.ttl) for mark in choice.marks]
        if control == "routing":
            return self._automatic(chosen, places)
        own = self.given.get("prompt_cache_options")
        mode = own.get("mode") if isinstance(own, Mapping) else None
        # The caller's own steering is law: an explicit mode without a mark means that nothing is to be cached.
        if mode == "explicit" and not callers:
            return [], {}, []
        implicit = control == "breakpoints" and (bool(callers) or own is not None or "prompt_cache_retention" in self.given)
        spots, reasons = legal_marks(callers, chosen, places, terms, taken=int(implicit and mode != "explicit"))
        if control == "breakpoints":
            if not implicit and any(not spot.callers for spot in spots):
                options["prompt_cache_options"] = {"mode": "explicit", "ttl": "30m"}
            elif not implicit and choice.opt_out and not spots:
                options |= self.opt_out
        elif spots and self._at_the_top(spots):
            options["cache_control"] = {"type": "ephemeral", "ttl": spots[-1].ttl}
        return spots, options, reasons

    def _at_the_top(self, spots: list[Spot]) -> bool:
        """Whether the last mark is better said at the top of the body (Anthropic's automatic mark): where the last message is
        a plain text, which a mark of its own would have to wrap."""
        message, last = self.request.messages[-1], spots[-1]
        part = message.parts[-1] if message.parts else None
        plain = len(message.parts) == 1 and isinstance(part, TextPart) and part.extra is None and part.mark is None
        return (
            plain
            and not last.callers
            and last.index == len(self.view.prompt.segments) - 1
            and "cache_control" not in self.given
        )

    def _automatic(self, chosen: list[Spot], places: Places) -> tuple[Sequence[Spot], dict[str, Any], list[Reason]]:
        """For a model that caches by itself: the retention that pays, and the places where entries will be."""
        names = [lifetime.name for lifetime in self.cache.terms.lifetimes]
        ttl, options = self.cache.terms.implicit or names[0], {}
        steered = {"prompt_cache_retention", "prompt_cache_options"} & self.given.keys()
        if chosen and not steered:
            ttl = chosen[-1].ttl
            if len(names) > 1 and ttl != names[0]:
                options["prompt_cache_retention"] = ttl
        elif isinstance(own := self.given.get("prompt_cache_retention"), str) and own in names:
            ttl = own
        head, count = self.view.layout.head, len(self.view.prefixes)
        known = -1 if places.readable is None else places.readable
        kept = [*range(min(head + 1, count)), *range(max(head, known) + 1, count)]
        if known >= count - 1 > head:
            kept.append(count - 1)
        minimum, prefixes = self.cache.terms.minimum, self.view.prefixes
        return Kept(places, [i for i in kept if prefixes[i].tokens >= minimum], ttl), options, []

    def _without_writes(self, places: Places) -> tuple[list[Spot], dict[str, Any], Reason]:
        """``cache="off"`` and ``"no-write"``: a mark only on what is there for certain, which it then reads."""
        opt_out = dict(self.opt_out)
        mode = self.request.cache
        detail = "nothing is read or written" if mode == "off" else "nothing is written"
        if self.cache.control == "routing":
            spots = [] if places.readable is None else [places.spot(places.readable, self.cache.terms.lifetimes[0].name)]
            return spots, {}, Reason("cache_off", f'cache="{mode}": this model caches by itself and cannot be told not to')
        place = places.readable
        entry = None if place is None else dict(self.view.found)[place]
        if mode == "no-write" and place is not None and entry is not None and entry.sure >= SURE:
            why = Reason("cache_off", f'cache="{mode}": {detail}; what is warm is read')
            return [places.spot(place, entry.ttl)], opt_out, why
        if opt_out:
            detail += "; the model is told not to cache"
        return [], opt_out, Reason("cache_off", f'cache="{mode}": {detail}')

    def _add_key(self, options: dict[str, Any], spots: Sequence[Spot]) -> None:
        """Add our key to `options`, in front. What caches nothing needs none."""
        if "prompt_cache_key" in self.given or self.cache.keys is None:
            return
        if self.cache.keys == "route" or spots or options != self.opt_out:
            _first(options, "prompt_cache_key", self.view.key)

    # -- what it will cost

    def _read_all_the_same(self, read: Entry | None, tokens: TokenEstimate) -> str:
        """What is read although parameters changed: what was cached before with all of them as they are now."""
        if read is None:
            return "nothing is read that was cached before"
        if any(entry is read for place, entry in self.view.found if place < self.view.layout.head):
            return "only tools and system are read of what was cached before"
        return f"about {tokens.cache_read} tokens are read of what was cached with it as it is now"

    def _by_itself(self, options: Mapping[str, Any]) -> bool:
        """Whether the model writes at the end of the last message although nothing says so."""
        explicit = "prompt_cache_options" in options
        own = self.given.get("prompt_cache_options")
        explicit = explicit or (isinstance(own, Mapping) and own.get("mode") == "explicit")
        return self.cache.control == "breakpoints" and self.cache.terms.implicit is not None and not explicit


def _changes(changed: Sequence[Change], read: str) -> tuple[Reason, ...]:
    """What a session changes, and how much is `read` all the same."""
    return tuple(Reason("params_changed", f"{one}; {read}") for one in changed)


def _tokenizer(backend: Backend) -> str:
    return f"{backend.provider}:{backend.model}"


def _passed(
    backend: Backend, request: Request, ignored: tuple[str, ...], reasons: tuple[Reason, ...], *, key: str | None
) -> Plan:
    """The plan where nothing is known of a cache: the caller's own marks, or none. `key` is the tenant's own (None: it has
    none), for a server of OpenAI's dialect: whatever model is behind a name that is not known, it takes one."""
    able = backend.capabilities
    marks: tuple[Mark, ...] = ()
    options: dict[str, Any] = {}
    if request.cache == "auto":
        if able.marks is not None:
            api: Api = "messages" if able.marks == "anthropic" else "chat"
            marks = tuple(Mark(at=at, tokens=None, ttl=f.get("ttl")) for at, f, _ in wire_marks(request, api, able.marks))
        if marks:
            reasons = (*reasons, Reason("caller_marks", f"{len(marks)} marks of the caller, as they are"))
    else:
        options = dict(able.opt_out or {})
        if options or able.isolates:
            detail = "nothing is read or written" if request.cache == "off" else "nothing is written"
            detail += "; the model is told not to cache" if options else ""
        else:
            detail = "nothing is marked; whether it caches by itself is not known, and it is not told not to"
        reasons = (*reasons, Reason("cache_off", f'cache="{request.cache}": {detail}'))
    if request.tenant is not None and not able.isolates and request.cache != "off":
        detail = "it is not known whether tenants share what this server caches"
        own = given_steering(request, backend.name, "openai")
        if able.marks == "openai" and key is not None and "prompt_cache_key" not in own:
            options = {"prompt_cache_key": key, **options}
            detail = "the tenant has a key of its own; it is not known whether that parts the cache of this model"
        reasons = (*reasons, Reason("isolation", detail))
    return Plan(
        backend=backend.name,
        marks=marks,
        options=options,
        drop_marks=request.cache != "auto",
        ignore=ignored,
        reasons=reasons,
    )


def _first(options: dict[str, Any], key: str, value: str | None) -> None:
    """Put a field before the others: bodies of one conversation then differ in as few bytes as possible."""
    if value is not None:
        rest = dict(options)
        options.clear()
        options[key] = value
        options.update(rest)
