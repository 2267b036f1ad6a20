"""A request as a caching policy sees it, and what is remembered of it once it was sent."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from cachespec.caching import CacheAsk, CachePlan, CacheTerms, Held, KeepAlive
from cachespec.policies._cache_value import Covered
from cachespec.reuse import Chain, Wait

FIXED = ("tools", "system")
"""Kinds of prefixes that come before all messages."""
SURE = 0.5
"""How sure an entry must be to be counted on."""
INNER = (1 / 16, 1 / 4, 1 / 2, 3 / 4)
"""Where within a long new part later prompts are watched to part, as shares of it."""
_LONG = 4
"""New places from which on a new part is long."""
_DOCUMENTS = 2
"""Documents of a new part that are watched, the last ones."""
NEAR = 0.9
"""Share from which one number of tokens is as good as another."""


class View:
    """A request as the policy sees it: what of it was there before, and what of it can be read.

    `known` is the index of the deepest prefix that any prompt had before (`wait` the wait there), `read` that of the deepest
    entry that can be read (-1: none), `turn` how many requests this one goes on from.
    """

    __slots__ = ("ask", "keys", "known", "known_tokens", "like", "live", "origin", "read", "read_tokens")
    __slots__ += ("system", "turn", "turns", "whose")

    def __init__(self, ask: CacheAsk, keys: list[Hashable], known: int, wait: Wait | None) -> None:
        self.ask, self.keys, self.known = ask, keys, known
        now, prefixes = ask.now, ask.prefixes
        self.live = [
            (index, prefix)
            for index, prefix in enumerate(prefixes)
            if (warm := prefix.warm) is not None and warm.ready_at <= now < warm.expires_at and warm.sure >= SURE
        ]
        self.read = self.live[-1][0] if self.live else -1
        self.read_tokens = prefixes[self.read].tokens if self.live else 0
        self.system = -1
        for index, prefix in enumerate(prefixes):
            if prefix.kind not in FIXED:
                break
            self.system = index
        self.known_tokens = prefixes[known].tokens if known >= 0 else 0
        goes_on = wait is not None and wait.role in ("end", "before")
        self.turn = wait.turn + 1 if wait is not None and goes_on else 0
        self.turns = min(self.turn.bit_length(), 6)
        self.origin = "system" if known >= 0 and prefixes[known].kind in FIXED else "end" if goes_on else "middle"
        self.like = (ask.traffic, "+".join(ask.input_types))
        self.whose = (ask.tenant, ask.session)

    def ttl(self, index: int) -> str:
        warm = self.ask.prefixes[index].warm
        assert warm is not None  # noqa: S101 - asked of live entries only
        return warm.ttl


class Line:
    """What is remembered of a request until nothing of it is kept alive any more.

    `alive` are the entries on its path and their lifetimes; `wait` is the one whose end means that its session went on, at
    index `back`: what it continued, where that is most of it, since the very end is often cut a little. `anchor` are the tokens
    cached for the longest lifetime, `carried` those that can only be read if a mark keeps what stands before it.
    """

    __slots__ = ("alive", "anchor", "back", "carried", "kept", "stop", "turn", "wait")

    def __init__(self, view: View, plan: CachePlan, written: dict[int, str], opened: dict[int, Wait]) -> None:
        ask, terms = view.ask, view.ask.terms
        last = plan.marks[-1].index if plan.marks else -1
        self.alive = {index: view.ttl(index) for index, _ in view.live if index <= last} | written
        self.turn = view.turns
        self.stop: Chain | None = None
        self.kept: KeepAlive | None = None
        longest = terms.lifetimes[-1].name if terms.lifetimes else ""
        self.anchor = max((ask.prefixes[i].tokens for i, ttl in self.alive.items() if ttl == longest), default=0)
        most_of_it = 2 * view.known_tokens > ask.prefixes[-1].tokens
        self.back = view.known if view.known in self.alive and most_of_it else max(self.alive, default=-1)
        self.wait = opened.get(self.back)
        self.carried = _carried(view, last)

    def kept_alive(self, held: Held) -> Iterator[tuple[int, str, float]]:
        """What could be kept alive next: index, lifetime, and when it was used last."""
        if held.pings and self.kept is not None:
            index, ttl, used = self.kept.index, self.kept.ttl, self.kept.at
        else:
            index, ttl = held.index, held.warm.ttl
            used = held.warm.expires_at - held.ask.terms.lifetime(ttl).seconds
            prefixes = held.ask.prefixes
            near = 0 <= self.back < index and NEAR * prefixes[index].tokens < prefixes[self.back].tokens
            if near and self.alive.get(self.back) == ttl:
                index = self.back
        yield index, ttl, used
        longest = held.ask.terms.lifetimes[-1].name
        if ttl != longest:
            longer = [i for i, name in self.alive.items() if name == longest and i <= self.back]
            if longer:
                yield max(longer), longest, used


def places(view: View) -> list[tuple[int, str]]:
    """The places of a request that are watched, and may be marked, by index, with their role."""
    prefixes, known = view.ask.prefixes, view.known
    last = len(prefixes) - 1
    found = {last: "end"}
    if last - 1 > known:
        found[last - 1] = "before"
    new = last - 1 - known
    if new >= _LONG:
        documents = [i for i in range(known + 1, last - 1) if prefixes[i].kind == "document"]
        found.update((i, "document") for i in documents[-_DOCUMENTS:])
        for share in INNER:
            index = known + max(1, round(new * share))
            if index < last - 1:
                found.setdefault(index, f"inner:{share}")
    if known >= 0:
        found[known] = f"known:{view.origin}"
    if view.system >= 0:
        found[view.system] = "system"
    return sorted(found.items())


def covered(view: View, terms: CacheTerms) -> list[Covered]:
    """What the entries that will be read, and refreshed, keep for which lifetime."""
    numbers = {lifetime.name: number for number, lifetime in enumerate(terms.lifetimes)}
    depth = [0] * len(numbers)
    for _, prefix in view.live:
        number = numbers.get(prefix.warm.ttl, 0) if prefix.warm is not None else 0
        depth[: number + 1] = [max(tokens, prefix.tokens) for tokens in depth[: number + 1]]
    steps = zip(depth, [*depth[1:], 0], strict=True)
    return [Covered(here - longer, number) for number, (here, longer) in enumerate(steps) if here > longer]


def _carried(view: View, last: int) -> int:
    """Tokens to be read of an entry that outlived what it was written after, if that is what happens here; else 0."""
    if not 0 <= view.read <= last:
        return 0
    terms = view.ask.terms
    seconds = {lifetime.name: lifetime.seconds for lifetime in terms.lifetimes}
    warm = view.ask.prefixes[view.read].warm
    if warm is None or len(seconds) < 2 or warm.ttl == terms.lifetimes[0].name:
        return 0
    idle = view.ask.now - (warm.expires_at - seconds.get(warm.ttl, 0.0))
    alone = all(index == view.read or prefix.warm is None or prefix.warm.ttl != warm.ttl for index, prefix in view.live)
    return view.read_tokens if alone and idle > terms.lifetimes[0].seconds else 0
