"""Plans a request's use of a vendor's prompt cache: what is believed warm, what is to be marked, and what that will cost.

The planner looks places up (`cache_layout`), asks the caching policy, and fits its choice to the wire (`cache_marks`). It
learns nothing: that is `cache_learning`'s part, from what was really sent. No I/O, and no body is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cachespec.backends._fields import CACHE_FIELDS, LIMITS
from cachespec.backends._marks import wire_marks
from cachespec.backends.base import Backend
from cachespec.cache_keys import CacheKeys
from cachespec.cache_layout import Api, Layout, Layouts, Weights, tokens_of, tokens_to
from cachespec.cache_marks import Places, Spot, legal_marks, reads
from cachespec.cache_terms import PromptCache
from cachespec.caching import CacheAsk, CachePlan, CachingPolicy, Prefix, Warm
from cachespec.decision import Ask, Belief, Mark, Plan, Reason, TokenEstimate
from cachespec.errors import ConfigError
from cachespec.messages import ImagePart, TextPart, ToolResultPart
from cachespec.prompt import Prompt, canonical_json
from cachespec.request import Request
from cachespec.tokens import Sizes, TokenModel
from cachespec.usage import WRITE_TTLS
from cachespec.warmth import Entry, Warmth, scope_of

_DEEPEST = 8
"""Entries within a conversation that a policy is told of: the deepest ones; what is shallower is part of them."""
_SURE = 0.9
"""How sure an entry must be for ``cache="no-write"`` to mark it: a mark where nothing is would write."""
_COVERED = 0.5
_SETTLED = 0.03
_SEGMENT = re.compile(r"tools\[\d+\]|system\[\d+\]|messages\[\d+\]\[\d+\]")
_BARE = {"blocks": "5m", "breakpoints": "30m", "routing": ""}


_NO_PLACES = Layout((), (), (), 0, 0, Sizes(), 0, 0, 0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it rests on: what `cache_learning` needs once the request is sent.

    `cache` None: nothing is planned or learned for this backend. `spots` are where entries will be: all marks, the caller's
    too, and what the model keeps by itself. `found` are the entries known of this prompt, by place; `read` is the one that will
    be read. `route` is the shared prefix that the key stands for.
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
    layout: Layout | None = None
    spots: tuple[Spot, ...] = ()
    found: tuple[tuple[int, Entry], ...] = ()
    read: Entry | None = None
    route: bytes | None = None

    @property
    def places(self) -> Layout:
        """Where marks may stand; what `spots` and `found` refer to."""
        return _NO_PLACES if self.layout is None else self.layout


class CachePlanner:
    """Plans with one policy and one belief. `densities` gives what is learned of a model's tokens (``provider:model``)."""

    def __init__(
        self, policy: CachingPolicy | None, warmth: Warmth, keys: CacheKeys, densities: Callable[[str], TokenModel]
    ) -> None:
        self.policy, self.warmth, self.keys = policy, warmth, keys
        self._densities = densities
        self._settled: dict[str, Weights] = {}
        self._layouts = Layouts()

    def plan(
        self, backend: Backend, prompt: Prompt, ask: Ask, *, ignored: tuple[str, ...] = (), changed: tuple[str, ...] = ()
    ) -> Planned:
        """The plan for sending `prompt` to `backend`, what it is expected to read and write, and the belief behind it.

        `changed` names the parameters that a session changed although they are part of what is cached. Raises ConfigError
        where the policy fails or chooses what there is not.
        """
        request, capabilities = prompt.request, backend.capabilities
        reasons = tuple(Reason("params_changed", text) for text in changed)
        if capabilities.caching is None:
            plan = _passed(backend, request, ignored, reasons)
            name = _tokenizer(backend)
            return Planned(plan=plan, backend=backend.name, model=backend.model, tokenizer=name, prompt=prompt)
        return _Planning(self, backend, prompt, ask, capabilities.caching).planned(ignored, reasons)

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
        if self.policy is None:
            return CachePlan()
        where = "policies.caching"
        try:
            choice = self.policy.plan(ask)
            marks = choice.marks
            known = {lifetime.name for lifetime in ask.terms.lifetimes}
            ascending = all(a.index < b.index for a, b in pairwise(marks))
            inside = not marks or (marks[0].index >= 0 and marks[-1].index < len(ask.prefixes))
            fits = ascending and inside and all(mark.ttl in known for mark in marks)
        except Exception as error:
            raise ConfigError(f"{self.policy!r}.plan failed: {type(error).__name__}: {error}", key=where) from error
        if not fits:
            raise ConfigError(f"{self.policy!r}.plan must choose prefixes and lifetimes of the ask, ascending", key=where)
        return choice


class _Planning:
    """One plan on its way."""

    def __init__(self, planner: CachePlanner, backend: Backend, prompt: Prompt, ask: Ask, cache: PromptCache) -> None:
        self.planner, self.backend, self.prompt, self.ask, self.cache = planner, backend, prompt, ask, cache
        self.request = prompt.request
        vendor = "anthropic" if cache.api == "messages" else "openai"
        # What steers a cache is not sent where the request says that none is to be written.
        self.given = _given(self.request, backend.name, vendor) if self.request.cache == "auto" else {}
        self.layout, self.weights = planner.layout(backend, prompt, cache)
        key = self.given.get("prompt_cache_key")
        partition = key if key is not None else planner.keys.partition(ask.tenant) if cache.keys == "partition" else None
        self.key = partition if isinstance(partition, str) else None
        self.scope = scope_of(backend.name, backend.model, self.key or "", _other_fields(self.request, backend.name))
        self.found = planner.warmth.look(self.scope, self.layout.keys, head=self.layout.head, most=_DEEPEST)
        self.prefixes = self._prefixes()

    def _prefixes(self) -> list[Prefix]:
        layout, now = self.layout, self.ask.now
        prefixes = list(layout.prefixes)
        for i, entry in self.found:
            if entry.expires_at > now:
                prefixes[i] = _with(prefixes[i], _warm(entry))
        if prefixes and layout.at[-1] == layout.segments - 1:
            prefixes[-1] = _with(prefixes[-1], prefixes[-1].warm, "end")
        return prefixes

    def planned(self, ignored: tuple[str, ...], reasons: tuple[Reason, ...]) -> Planned:
        request, terms = self.request, self.cache.terms
        readable = [i for i, entry in self.found if entry.live(self.ask.now)]
        head = self.layout.head
        places = Places(self.prefixes, self.layout.at, readable[-1] if readable else None, head - 1 if head else None)
        ask, choice, found = None, CachePlan(), list(reasons)
        spots: list[Spot]
        options: dict[str, Any]
        if request.cache != "auto":
            spots, options, why = self._without_writes(places)
            found.append(why)
        else:
            callers = self._callers()
            if callers:
                found.append(Reason("caller_marks", f"{len(callers)} marks of the caller, as they are"))
            if self.prefixes and self.prefixes[-1].tokens >= terms.minimum:
                ask = self._ask()
                choice = self.planner.choose(ask)
                found += choice.reasons
            elif not callers:
                count = self.layout.tokens
                found.append(Reason("below_minimum", f"about {count} tokens; this model caches from {terms.minimum} on"))
            spots, options, more = self._marked(callers, choice, places)
            found += more
            if self.ask.tenant is not None and self.cache.isolation:
                found.append(Reason("isolation", self.cache.isolation))
        # A key of its own tells where to read as well.
        route = self._route(options, spots) if request.cache == "auto" or (request.cache == "no-write" and spots) else None
        marks = () if self.cache.control == "routing" else tuple(Mark(at=s.at, tokens=s.tokens, ttl=s.ttl) for s in spots)
        by_itself = self._by_itself(options)
        read, tokens = self._expected(spots, by_itself)
        if read is not None:
            found.append(Reason("warm_prefix", f"about {tokens.cache_read} tokens are believed cached"))
        return Planned(
            plan=Plan(
                backend=self.backend.name,
                marks=marks,
                options=options,
                drop_marks=request.cache != "auto",
                ignore=ignored,
                reasons=tuple(found),
            ),
            backend=self.backend.name,
            model=self.backend.model,
            tokenizer=_tokenizer(self.backend),
            prompt=self.prompt,
            tokens=tokens,
            belief=self._belief(),
            cache=self.cache,
            ask=ask,
            choice=choice,
            scope=self.scope,
            layout=self.layout,
            spots=(*spots, *self._last(spots)) if by_itself else tuple(spots),
            found=tuple(self.found),
            read=read,
            route=route,
        )

    def _ask(self) -> CacheAsk:
        ask = self.ask
        return CacheAsk(
            now=ask.now,
            prefixes=tuple(self.prefixes),
            input_tokens=self.layout.tokens,
            terms=self.cache.terms,
            tenant=ask.tenant,
            session=ask.session_id,
            traffic=(ask.alias, *ask.tags),
            input_types=_input_types(self.request),
        )

    # -- marks and options

    def _callers(self) -> list[Spot]:
        """The caller's marks as they will stand on the wire, the body's own automatic one included."""
        dialect = self.backend.capabilities.marks
        if dialect is None:
            return []
        marks = [(at, fields.get("ttl")) for at, fields, _ in wire_marks(self.request, self.cache.api, dialect)]
        top = self.given.get("cache_control") if dialect == "anthropic" else None
        if not marks and top is None:
            return []
        segments = self.prompt.segments
        index = {segment.name: i for i, segment in enumerate(segments)}
        spots = []
        for at, ttl in marks:
            name = _SEGMENT.match(at)
            if name is not None and name.group() in index:
                spots.append(self._spot(index[name.group()], at, ttl))
        if isinstance(top, Mapping) and not (spots and spots[-1].index == len(segments) - 1):
            spots.append(self._spot(len(segments) - 1, segments[-1].name, top.get("ttl")))
        return spots

    def _spot(self, index: int, at: str, ttl: object) -> Spot:
        layout = self.layout
        place = layout.at.index(index) if index in layout.at else None
        tokens = tokens_to(self.prompt, self.weights, index) if place is None else self.prefixes[place].tokens
        position = max((p.position for p, i in zip(self.prefixes, layout.at, strict=True) if i <= index), default=0)
        lifetime = ttl if isinstance(ttl, str) else _BARE[self.cache.control]
        return Spot(index, at, self.prompt.segments[index].digest, tokens, position, lifetime, place, callers=True)

    def _marked(
        self, callers: list[Spot], choice: CachePlan, places: Places
    ) -> tuple[list[Spot], dict[str, Any], list[Reason]]:
        terms, options, control = self.cache.terms, {}, self.cache.control
        chosen = [places.spot(mark.index, mark.ttl) for mark in choice.marks]
        if control == "routing":
            return self._automatic(chosen)
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
            elif not implicit and choice.opt_out and not spots and self.backend.capabilities.opt_out is not None:
                options |= self.backend.capabilities.opt_out
        elif spots and self._at_the_top(spots):
            options["cache_control"] = {"type": "ephemeral", "ttl": spots[-1].ttl}
        return spots, options, reasons

    def _at_the_top(self, spots: list[Spot]) -> bool:
        """Whether the last mark is better said at the top of the body (Anthropic's automatic mark): where the last message is
        a plain text, which a mark of its own would have to wrap."""
        message, last = self.request.messages[-1], spots[-1]
        part = message.parts[-1] if message.parts else None
        plain = len(message.parts) == 1 and isinstance(part, TextPart) and part.extra is None and part.mark is None
        return plain and not last.callers and last.index == len(self.prompt.segments) - 1 and "cache_control" not in self.given

    def _automatic(self, chosen: list[Spot]) -> tuple[list[Spot], dict[str, Any], list[Reason]]:
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
        places = Places(self.prefixes, self.layout.at)
        minimum = self.cache.terms.minimum
        kept = {*range(self.layout.head), self.layout.head, len(self.prefixes) - 1}
        spots = [places.spot(i, ttl) for i in sorted(kept) if 0 <= i < len(self.prefixes)]
        return [spot for spot in spots if spot.tokens >= minimum], options, []

    def _without_writes(self, places: Places) -> tuple[list[Spot], dict[str, Any], Reason]:
        """``cache="off"`` and ``"no-write"``: a mark only on what is there for certain, which it then reads."""
        opt_out = dict(self.backend.capabilities.opt_out or {})
        mode = self.request.cache
        detail = "nothing is read or written" if mode == "off" else "nothing is written"
        if self.cache.control == "routing":
            spots = [] if places.readable is None else [places.spot(places.readable, self.cache.terms.lifetimes[0].name)]
            return spots, {}, Reason("cache_off", f'cache="{mode}": this model caches by itself and cannot be told not to')
        place = places.readable
        entry = None if place is None else dict(self.found)[place]
        if mode == "no-write" and place is not None and entry is not None and entry.sure >= _SURE:
            return (
                [places.spot(place, entry.ttl)],
                opt_out,
                Reason("cache_off", f'cache="{mode}": {detail}; what is warm is read'),
            )
        if opt_out:
            detail += "; the model is told not to cache"
        return [], opt_out, Reason("cache_off", f'cache="{mode}": {detail}')

    def _route(self, options: dict[str, Any], spots: list[Spot]) -> bytes | None:
        """Add the key to `options`; return the prefix that it stands for where keys route."""
        if "prompt_cache_key" in self.given or self.cache.keys is None:
            return None
        if self.cache.keys == "partition":
            if spots or options != (self.backend.capabilities.opt_out or {}):  # nothing cached needs no key
                _first(options, "prompt_cache_key", self.key)
            return None
        basis = self._shared()
        key = self.planner.keys.route(self.ask.tenant, basis, self._conversation(), self.ask.now)
        _first(options, "prompt_cache_key", key)
        return basis

    def _shared(self) -> bytes:
        """The digest of what conversations share: tools and system where they are long enough to be cached, else the first
        piece of the first message. It stays the same as a conversation grows."""
        segments, head = self.prompt.segments, 1 + len(self.request.tools) + len(self.request.system)
        if head > 1 and self.layout.before >= self.cache.terms.minimum:
            return segments[head - 1].digest
        return segments[min(head, len(segments) - 1)].digest

    def _conversation(self) -> bytes:
        if self.ask.session_id is not None:
            return self.ask.session_id.encode("utf-8", "surrogatepass")
        head = 1 + len(self.request.tools) + len(self.request.system)
        return self.prompt.segments[min(head, len(self.prompt.segments) - 1)].digest

    # -- what it will cost

    def _by_itself(self, options: Mapping[str, Any]) -> bool:
        """Whether the model writes at the end of the last message although nothing says so."""
        explicit = "prompt_cache_options" in options
        own = self.given.get("prompt_cache_options")
        explicit = explicit or (isinstance(own, Mapping) and own.get("mode") == "explicit")
        return self.cache.control == "breakpoints" and self.cache.terms.implicit is not None and not explicit

    def _last(self, spots: list[Spot]) -> list[Spot]:
        """Where a model that writes by itself does so: at the last place, unless there is a mark."""
        place, ttl = len(self.prefixes) - 1, self.cache.terms.implicit
        if place < 0 or ttl is None or (spots and spots[-1].index >= self.layout.at[place]):
            return []
        return [Places(self.prefixes, self.layout.at).spot(place, ttl)]

    def _expected(self, spots: list[Spot], by_itself: bool) -> tuple[Entry | None, TokenEstimate]:
        """The entry that will be read, and how many tokens go at which price."""
        terms, total = self.cache.terms, self.layout.tokens
        marked = self.cache.control != "routing"
        read, base, shift = None, 0, 0
        for i, entry in reversed(self.found):
            prefix, index = self.prefixes[i], self.layout.at[i]
            reached = by_itself or not marked or any(reads(s, index, prefix.position, terms) for s in spots)
            if reached and entry.live(self.ask.now):
                read, base = entry, entry.tokens if entry.exact else prefix.tokens
                shift = base - prefix.tokens
                break
        total = max(total + shift, base)
        writes: dict[str, int] = {}
        upto = base
        for spot in (*spots, *self._last(spots)) if by_itself else spots if marked else ():
            end = min(spot.tokens + shift, total)
            if end > upto and spot.tokens >= terms.minimum:
                _add(writes, spot.ttl, end - upto)
                upto = end
        tokens = TokenEstimate(
            input=total,
            cache_read=base,
            cache_write=upto - base,
            uncached=total - upto,
            output_expected=None,
            output_max=None,
            writes=writes,
        )
        return read, tokens

    def _belief(self) -> Belief:
        now = self.ask.now
        live = [(i, entry) for i, entry in self.found if entry.live(now)]
        if live:
            i, entry = live[-1]
            tokens = entry.tokens if entry.exact else self.prefixes[i].tokens
            whole = tokens >= _COVERED * self.layout.tokens
            told = "the vendor reported it" if entry.sure >= _SURE else "sent, not yet reported"
            left = entry.expires_at - now
            evidence = f"{told}; kept for {entry.ttl}"
            return Belief(state="warm" if whole else "partial", tokens=tokens, expires_in_s=left, evidence=evidence)
        if self.found:
            i, entry = self.found[-1]
            if entry.expires_at > now:
                return Belief(state="stale", tokens=entry.tokens, expires_in_s=entry.expires_at - now, evidence="being written")
            ago = now - entry.expires_at
            return Belief(state="stale", tokens=entry.tokens, expires_in_s=0.0, evidence=f"ran out {ago:.0f} s ago")
        return Belief(state="cold", tokens=0, evidence="nothing of this prompt was cached from here")


def _tokenizer(backend: Backend) -> str:
    return f"{backend.provider}:{backend.model}"


def _passed(backend: Backend, request: Request, ignored: tuple[str, ...], reasons: tuple[Reason, ...]) -> Plan:
    """The plan where nothing is known of a cache: the caller's own marks, or none."""
    dialect = backend.capabilities.marks
    if request.cache == "auto":
        marks: tuple[Mark, ...] = ()
        if dialect is not None:
            api: Api = "messages" if dialect == "anthropic" else "chat"
            marks = tuple(Mark(at=at, tokens=None, ttl=f.get("ttl")) for at, f, _ in wire_marks(request, api, dialect))
        if marks:
            reasons = (*reasons, Reason("caller_marks", f"{len(marks)} marks of the caller, as they are"))
        return Plan(backend=backend.name, marks=marks, ignore=ignored, reasons=reasons)
    options = {} if backend.capabilities.opt_out is None else backend.capabilities.opt_out
    detail = "nothing is read or written" if request.cache == "off" else "nothing is written"
    if options:
        detail += "; the model is told not to cache"
    reasons = (*reasons, Reason("cache_off", f'cache="{request.cache}": {detail}'))
    return Plan(backend=backend.name, options=options, drop_marks=True, ignore=ignored, reasons=reasons)


def _given(request: Request, backend: str, vendor: str) -> Mapping[str, Any]:
    """The caller's own fields that steer a cache."""
    if not request.extra and not request.passthrough:
        return {}
    fields = {**request.passthrough.get(vendor, {}), **request.extra.get(backend, {})}
    return {key: fields[key] for key in CACHE_FIELDS if key in fields}


def _other_fields(request: Request, backend: str) -> str:
    """The caller's other fields of the body: some are part of what is cached (speed, verbosity), so all tell entries apart."""
    if not request.extra and not request.passthrough:
        return ""
    given = (*request.passthrough.values(), request.extra.get(backend, {}))
    fields = [{key: value for key, value in some.items() if key not in _APART} for some in given]
    return canonical_json(fields) if any(fields) else ""


_APART = frozenset({*CACHE_FIELDS, *LIMITS, "metadata", "user", "safety_identifier"})
"""Fields that no model reads."""


def _input_types(request: Request) -> tuple[str, ...]:
    """What the newest message holds."""
    kinds: dict[str, None] = {}
    for part in request.messages[-1].parts if request.messages else ():
        kinds["image" if isinstance(part, ImagePart) else "tool_result" if isinstance(part, ToolResultPart) else "text"] = None
    return tuple(kinds)


def _warm(entry: Entry) -> Warm:
    return Warm(ttl=entry.ttl, ready_at=entry.ready_at, expires_at=entry.expires_at, sure=entry.sure)


def _with(prefix: Prefix, warm: Warm | None, kind: Any = None) -> Prefix:
    return Prefix(
        key=prefix.key,
        at=prefix.at,
        kind=kind or prefix.kind,
        tokens=prefix.tokens,
        position=prefix.position,
        warm=warm,
    )


def _add(writes: dict[str, int], ttl: str, count: int) -> None:
    if count > 0:
        name = ttl if ttl in WRITE_TTLS else "unspecified"
        writes[name] = writes.get(name, 0) + count


def _first(options: dict[str, Any], key: str, value: str | None) -> None:
    """Put a field before the others: bodies of one conversation then differ in as few bytes as possible."""
    if value is not None:
        rest = dict(options)
        options.clear()
        options[key] = value
        options.update(rest)
