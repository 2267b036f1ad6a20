"""A request as a caching policy sees it, and what is remembered of it once it was sent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from cachespec.caching import CacheAsk, CachePlan, CacheTerms, Held, KeepAlive, Prefix, Warm
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
_MOST = 0.9
"""Share of a prompt that is as good as the whole of it to keep alive: the very end is often cut a little."""
_APART = 0.97
"""Share up to which two numbers of tokens can be told apart: they are estimates until a vendor counts."""


class View:
    """A request as the policy sees it: what of it was there before, and what of it can be read.

    `known` is the index of the deepest prefix that any prompt had before (`wait` the wait there), `live` are the entries that
    can be read, deepest first, down to the deepest one of the longest lifetime: what is shallower adds nothing. `read` is
    the first of them (-1: there is none), `coming` are deeper ones that another request is just writing. `system` is the
    end of tools and system, `turn` how many requests this one goes on from.
    """

    __slots__ = (
        "ask",
        "coming",
        "known",
        "known_tokens",
        "like",
        "live",
        "origin",
        "read",
        "read_tokens",
        "system",
        "turn",
        "whose",
    )

    def __init__(self, ask: CacheAsk, known: int = -1, wait: Wait | None = None) -> None:
        self.ask, self.known = ask, known
        prefixes = ask.prefixes
        self.live, self.coming = _entries(ask)
        self.read, self.read_tokens = -1, 0
        if self.live:
            self.read = self.live[0][0]
            self.read_tokens = prefixes[self.read].tokens
        self.system = bisect_left(prefixes, True, key=_in_conversation) - 1
        self.known_tokens = prefixes[known].tokens if known >= 0 else 0
        goes_on = wait is not None and wait.role in ("end", "before")
        self.turn = wait.turn + 1 if wait is not None and goes_on else 0
        self.origin = "system" if 0 <= known <= self.system else "end" if goes_on else "middle"
        self.like = (ask.traffic, "+".join(ask.input_types), min(self.turn.bit_length(), 6))
        self.whose = (ask.tenant, ask.session)


Entries = list[tuple[int, Warm]]
"""Entries on a request's path with the index of each one's prefix, deepest first."""


def _entries(ask: CacheAsk) -> tuple[Entries, Entries]:
    """What can be read, and what is deeper than that and can be read soon."""
    now, prefixes = ask.now, ask.prefixes
    longest = ask.terms.lifetimes[-1].name if ask.terms.lifetimes else ""
    live: Entries = []
    coming: Entries = []
    kept = [(index, prefix.warm) for index, prefix in enumerate(prefixes) if prefix.warm is not None]
    for index, warm in reversed(kept):
        if now >= warm.expires_at or warm.sure < SURE:
            continue
        if warm.ready_at <= now:
            live.append((index, warm))
            if warm.ttl == longest:
                break
        elif not live:
            coming.append((index, warm))
    return live, coming


def _in_conversation(prefix: Prefix) -> bool:
    return prefix.kind not in FIXED


class Line:
    """What is remembered of a request until nothing of it is kept alive any more.

    `alive` are the entries on its path and their lifetimes; `wait` is the one whose end means that its session went on, at
    index `back`: what it continued, where that is most of it, since the very end is often cut a little. `anchor` are the tokens
    cached for the longest lifetime, `carried` is what `carried` says.
    """

    __slots__ = ("alive", "anchor", "back", "carried", "kept", "stop", "turn", "wait")

    def __init__(self, view: View, plan: CachePlan, written: dict[int, str], opened: dict[int, Wait]) -> None:
        ask, lifetimes = view.ask, view.ask.terms.lifetimes
        last = plan.marks[-1].index if plan.marks else -1
        self.alive = {index: warm.ttl for index, warm in view.live if index <= last} | written
        self.turn = view.like[2]
        self.stop: Chain | None = None
        self.kept: KeepAlive | None = None
        longest = lifetimes[-1].name if lifetimes else ""
        self.anchor = max((ask.prefixes[i].tokens for i, ttl in self.alive.items() if ttl == longest), default=0)
        most_of_it = 2 * view.known_tokens > ask.prefixes[-1].tokens
        goes_on = view.known > view.system and view.known in self.alive and most_of_it
        self.back = view.known if goes_on else max(self.alive, default=-1)
        self.wait = opened.get(self.back)
        self.carried = 0

    def kept_alive(self, held: Held) -> Iterator[tuple[int, str, float]]:
        """What could be kept alive next: index, lifetime, and when it was used last."""
        if held.pings and self.kept is not None:
            index, ttl, used = self.kept.index, self.kept.ttl, self.kept.at
        else:
            index, ttl = held.index, held.warm.ttl
            used = held.warm.expires_at - held.ask.terms.lifetime(ttl).seconds
            prefixes = held.ask.prefixes
            near = 0 <= self.back < index and _MOST * prefixes[index].tokens < prefixes[self.back].tokens
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
    """What the entries on a request's path keep for which lifetime."""
    found: list[Covered] = []
    deepest: dict[str, int] = {}
    for index, warm in view.coming + view.live:
        deepest.setdefault(warm.ttl, view.ask.prefixes[index].tokens)
    upto = 0
    for number in range(len(terms.lifetimes) - 1, -1, -1):
        tokens = deepest.get(terms.lifetimes[number].name, 0)
        if tokens > upto:
            found.append(Covered(tokens - upto, number))
            upto = tokens
    return found


def carried(view: View, wait: Wait | None) -> int:
    """From how many tokens read on it is shown that a mark keeps what stands before it, where this request can tell; else 0.

    It can where the deepest entry was written for longer than the one before it, and that one would be dead by now: without it,
    no more than the next shallower entry is there. `wait` is the one at the deepest entry.
    """
    if wait is None or not wait.carries:
        return 0
    now, lifetimes, warm = view.ask.now, view.ask.terms.lifetimes, view.live[0][1]
    used = warm.expires_at - next((lifetime.seconds for lifetime in lifetimes if lifetime.name == warm.ttl), 0.0)
    if now - used <= lifetimes[0].seconds:
        return 0
    shallower = (p.tokens for p in reversed(view.ask.prefixes[: view.read]) if p.warm is not None and p.warm.expires_at > now)
    middle = (view.read_tokens + next(shallower, 0)) // 2
    return middle if middle < _APART * view.read_tokens else 0
