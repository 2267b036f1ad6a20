"""A prompt as one backend's prompt cache sees it: where marks may stand, what is believed there, what that will cost.

A `View` is of one request at one moment. It decides nothing: `cache_plan` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cachespec.backends._fields import CACHE_FIELDS, LIMITS
from cachespec.backends._marks import last_block, wire_marks
from cachespec.backends._profile import shows_images
from cachespec.backends.base import Backend
from cachespec.cache_keys import CacheKeys
from cachespec.cache_layout import Layout, Weights, tokens_to
from cachespec.cache_marks import Places, Spot, reads
from cachespec.cache_terms import PromptCache
from cachespec.caching import CacheAsk, CacheTerms, Prefix, Warm
from cachespec.decision import Ask, Belief, TokenEstimate
from cachespec.messages import ImagePart, ToolResultPart
from cachespec.prompt import Prompt, canonical_json
from cachespec.request import Request
from cachespec.usage import WRITE_TTLS
from cachespec.warmth import Entry, Warmth, scope_of

SURE = 0.9
"""From here on an entry counts as reported by the vendor."""
_DEEPEST = 8
"""Entries within a conversation that are looked at: the deepest ones; what is shallower is part of them."""
_COVERED = 0.5
_SET_BACK_S = 60.0
_SEGMENT = re.compile(r"tools\[\d+\]|system\[\d+\]|messages\[\d+\]\[\d+\]")
_BARE = {"blocks": "5m", "breakpoints": "30m", "routing": ""}
"""The lifetime of a mark that names none."""


class View:
    """See the module's docstring.

    Attributes:
        given: the caller's own fields that steer a cache, as they will be sent.
        key: the `prompt_cache_key` that says in which cache, or on which machine, to look; None: there is none.
        basis: the digest of the shared prefix that a routing key stands for; None where keys do not route.
        scope, later: what `found`, the entries known of this prompt by place, are filed under: those before the messages, and
            those in them.
        prefixes: the places, with what is live at each; the last is of kind ``end`` where it ends the prompt.
    """

    def __init__(
        self,
        backend: Backend,
        prompt: Prompt,
        ask: Ask,
        cache: PromptCache,
        *,
        layout: Layout,
        weights: Weights,
        warmth: Warmth,
        keys: CacheKeys,
        target: str = "",
    ) -> None:
        self.backend, self.prompt, self.ask, self.cache = backend, prompt, ask, cache
        self.layout, self.weights = layout, weights
        self.request = prompt.request
        vendor = "anthropic" if cache.api == "messages" else "openai"
        # What steers a cache is not sent where the request says that none is to be written.
        self.given = given_steering(self.request, backend.name, vendor) if self.request.cache == "auto" else {}
        routed = cache.keys == "route" and self.request.cache != "off" and "prompt_cache_key" not in self.given
        self.basis = self._shared() if routed else None
        key: object = self.given.get("prompt_cache_key")
        if self.basis is not None:
            key = keys.route(ask.tenant, self.basis, self._conversation(), ask.now)
        elif cache.keys == "partition" and key is None:
            key = keys.partition(ask.tenant)
        self.key = key if isinstance(key, str) else None
        other, late = _entering(self.request, backend.name, vendor, cache)
        names = backend.name, backend.model, self.key or "", other, target
        self.scope = scope_of(*names)
        self.later = scope_of(*names, late) if late else self.scope
        found = warmth.look(self.scope, layout.keys, head=layout.head, most=_DEEPEST, later=self.later)
        # What is ready later than now was made before the clock was set back: nobody knows how old it is.
        self.found = [pair for pair in found if pair[1].ready_at <= ask.now + _SET_BACK_S]
        self.prefixes = self._prefixes()

    def _prefixes(self) -> list[Prefix]:
        layout, now = self.layout, self.ask.now
        prefixes = list(layout.prefixes)
        for i, entry in self.found:
            if entry.expires_at > now:
                prefixes[i] = _with(prefixes[i], as_warm(entry, self.cache.terms))
        if prefixes and layout.at[-1] == layout.segments - 1:
            prefixes[-1] = _with(prefixes[-1], prefixes[-1].warm, "end")
        return prefixes

    @property
    def places(self) -> Places:
        """The places, the deepest one that can be read now, and the end of tools and system."""
        readable = [i for i, entry in self.found if entry.live(self.ask.now)]
        head = self.layout.head
        return Places(self.prefixes, self.layout.at, readable[-1] if readable else None, head - 1 if head else None)

    def policy_ask(self) -> CacheAsk:
        """What a caching policy is told."""
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

    def callers(self) -> list[Spot]:
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
        if isinstance(top, Mapping):
            block, behind = last_block(self.request)
            end = len(segments) - 1 - behind
            if block is not None and not (spots and spots[-1].index >= end):
                spots.append(self._spot(end, segments[end].name, top.get("ttl")))
        return spots

    def _spot(self, index: int, at: str, ttl: object) -> Spot:
        layout = self.layout
        place = layout.at.index(index) if index in layout.at else None
        tokens = tokens_to(self.prompt, self.weights, index) if place is None else self.prefixes[place].tokens
        position = max((p.position for p, i in zip(self.prefixes, layout.at, strict=True) if i <= index), default=0)
        lifetime = ttl if isinstance(ttl, str) else _BARE[self.cache.control]
        return Spot(index, at, self.prompt.segments[index].digest, tokens, position, lifetime, place, callers=True)

    def _shared(self) -> bytes:
        """The digest of what conversations share: tools and system where they are long enough to be cached, else the first
        piece of the first message. It stays the same as a conversation grows."""
        segments, head = self.prompt.segments, 1 + len(self.request.tools) + len(self.request.system)
        if head > 1 and self.layout.before >= self.cache.terms.minimum:
            return segments[head - 1].digest
        return segments[min(head, len(segments) - 1)].digest

    def _conversation(self) -> bytes:
        """What tells this conversation from others."""
        if self.ask.session_id is not None:
            return self.ask.session_id.encode("utf-8", "surrogatepass")
        head = 1 + len(self.request.tools) + len(self.request.system)
        return self.prompt.segments[min(head, len(self.prompt.segments) - 1)].digest

    def last(self, spots: Sequence[Spot]) -> list[Spot]:
        """Where a model that writes by itself does so: at the last place, unless there is a mark."""
        place, ttl = len(self.prefixes) - 1, self.cache.terms.implicit
        if place < 0 or ttl is None or (spots and spots[-1].index >= self.layout.at[place]):
            return []
        return [Places(self.prefixes, self.layout.at).spot(place, ttl)]

    def expected(self, spots: Sequence[Spot], by_itself: bool) -> tuple[Entry | None, TokenEstimate]:
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
        for spot in (*spots, *self.last(spots)) if by_itself else spots if marked else ():
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

    def belief(self) -> Belief:
        """What is believed cached of this prompt, as the decision shows it."""
        now = self.ask.now
        live = [(i, entry) for i, entry in self.found if entry.live(now)]
        if live:
            i, entry = live[-1]
            tokens = entry.tokens if entry.exact else self.prefixes[i].tokens
            whole = tokens >= _COVERED * self.layout.tokens
            told = "the vendor reported it" if entry.sure >= SURE else "sent, not yet reported"
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


def given_steering(request: Request, backend: str, vendor: str) -> Mapping[str, Any]:
    """The caller's own fields that steer a cache."""
    if not request.extra and not request.passthrough:
        return {}
    fields = {**request.passthrough.get(vendor, {}), **request.extra.get(backend, {})}
    return {key: fields[key] for key in CACHE_FIELDS if key in fields}


def _entering(request: Request, backend: str, vendor: str, cache: PromptCache) -> tuple[str, str]:
    """What enters a cache's key beside the prompt's own chain: from the beginning, and only from the messages on.

    Of the caller's other fields of the body some are part of what is cached (speed, verbosity), so all tell entries apart but
    those that are known to do nothing of the kind.
    """
    choice = request.tool_choice
    late: dict[str, Any] = {"images": True} if "images" in cache.late and shows_images(request) else {}
    if choice is None and not request.extra and not request.passthrough:
        return "", canonical_json(late) if late else ""
    given = {**request.passthrough.get(vendor, {}), **request.extra.get(backend, {})}
    if choice is not None:
        said = {"tool_choice": [choice.mode, choice.name, choice.parallel]}
        given = {**({"parallel_tool_calls": choice.parallel} if "tool_choice" in cache.never else said), **given}
    early = {key: value for key, value in given.items() if value is not None and key not in _APART | cache.late | cache.never}
    late |= {key: value for key, value in given.items() if key in cache.late}
    return canonical_json(early) if early else "", canonical_json(late) if late else ""


_APART = frozenset(
    {
        *(*CACHE_FIELDS, *LIMITS),
        *("metadata", "user", "safety_identifier", "store", "diagnostics", "include", "logprobs", "top_logprobs", "n"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "random_seed", "stop", "stop_sequences"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "prediction", "max_tool_calls", "truncation"),
    }
)
"""Fields that no model reads: what is reported, how it is drawn, where it ends, whose it is."""


def _input_types(request: Request) -> tuple[str, ...]:
    """What the newest message holds."""
    kinds: dict[str, None] = {}
    for part in request.messages[-1].parts if request.messages else ():
        kinds["image" if isinstance(part, ImagePart) else "tool_result" if isinstance(part, ToolResultPart) else "text"] = None
    return tuple(kinds)


def as_warm(entry: Entry, terms: CacheTerms) -> Warm:
    """An entry as a policy sees it. A lifetime that is none of the terms' (a caller's own, other prices) is the shortest."""
    known = any(lifetime.name == entry.ttl for lifetime in terms.lifetimes)
    ttl = entry.ttl if known or not terms.lifetimes else terms.lifetimes[0].name
    return Warm(ttl=ttl, ready_at=entry.ready_at, expires_at=entry.expires_at, sure=entry.sure)


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
