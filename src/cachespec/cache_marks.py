"""From the marks that a caller wrote and a policy chose to a legal set on the wire (contracts P1 and P2).

The caller's marks are law: none is moved, dropped or given another lifetime. What a policy chose is fitted around them, within
the slots of the final body; lifetimes never rise in wire order; and where something readable is cached, one mark reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import overload

from cachespec.caching import CacheTerms, Prefix
from cachespec.decision import Reason
from cachespec.values import quick


@quick
@dataclass(frozen=True, slots=True)
class Spot:
    """A mark on the wire: at the end of segment `index`, after `tokens` tokens and `position` blocks.

    `place` is its index among the prefixes that a policy sees; None where the caller marked what is none of them.
    """

    index: int
    at: str
    key: bytes
    tokens: int
    position: int
    ttl: str
    place: int | None = None
    callers: bool = False


@quick
@dataclass(frozen=True, slots=True)
class Places:
    """The prefixes of a prompt, and the segment at whose end each stands. `readable` is the deepest one that can be read,
    `anchor` the one at the end of tools and system (None: none)."""

    prefixes: Sequence[Prefix]
    at: Sequence[int]
    readable: int | None = None
    anchor: int | None = None

    def spot(self, place: int, ttl: str) -> Spot:
        prefix = self.prefixes[place]
        key = prefix.key
        assert isinstance(key, bytes)  # noqa: S101 - a prompt's digest
        return Spot(self.at[place], prefix.at, key, prefix.tokens, prefix.position, ttl, place)


_INDEX = attrgetter("index")


class Kept(Sequence[Spot]):
    """The spots at some places of a model that caches by itself: made when they are looked at, which is when a request is
    sent, not when it is decided on."""

    __slots__ = ("_at", "_places", "_ttl")

    def __init__(self, places: Places, at: Sequence[int], ttl: str) -> None:
        self._places, self._at, self._ttl = places, at, ttl

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, index: int) -> Spot: ...
    @overload
    def __getitem__(self, index: slice) -> Kept: ...
    def __getitem__(self, index: int | slice) -> Spot | Kept:
        if isinstance(index, slice):
            return Kept(self._places, self._at[index], self._ttl)
        return self._places.spot(self._at[index], self._ttl)


def legal_marks(
    callers: Sequence[Spot], chosen: Sequence[Spot], places: Places, terms: CacheTerms, *, taken: int = 0
) -> tuple[list[Spot], list[Reason]]:
    """All marks in wire order, and why some were left out or added. `taken` slots are used up by what is no mark."""
    reasons: list[Reason] = []
    mine: list[Spot] = []
    theirs = {spot.index for spot in callers}
    short: list[Spot] = []
    for spot in chosen:
        if spot.tokens < terms.minimum:
            short.append(spot)
        elif spot.index not in theirs:
            mine.append(spot)
    short += [spot for spot in callers if spot.tokens < terms.minimum]
    if short:
        names = ", ".join(f"{spot.at} (about {spot.tokens} tokens)" for spot in short)
        reasons.append(Reason("below_minimum", f"this model caches from {terms.minimum} tokens on; no use at {names}"))
    room = max(terms.slots - taken - len(callers), 0)
    if len(mine) > room:
        reasons.append(Reason("mark_limit", f"{len(mine)} marks were chosen, {room} of {terms.slots} slots are free"))
        mine = [] if room == 0 else mine[-1:] if room == 1 else [mine[0], *mine[1 - room :]]
    if mine:
        mine = _reaching(mine, callers, places, terms, room)
        mine = _anchored(mine, callers, places, terms, room)
    return _falling(sorted([*callers, *mine], key=_INDEX) if callers else mine, terms), reasons


def reads(spot: Spot, index: int, position: int, terms: CacheTerms) -> bool:
    """Whether a lookup that starts at `spot` finds an entry at the end of segment `index`, after `position` blocks."""
    if spot.index <= index or terms.lookback == 1:
        return spot.index == index
    return terms.lookback is None or spot.position - position < terms.lookback


def _reaching(mine: list[Spot], callers: Sequence[Spot], places: Places, terms: CacheTerms, room: int) -> list[Spot]:
    """With a mark that reaches the deepest readable entry: an added one, or where no slot is left, one that gives way.

    The mark stands on the entry itself, where it writes nothing that is not there. A shallower mark gives way first, since what
    it would keep is part of the entry; else the deepest is drawn back as far as it must.
    """
    place = places.readable
    if place is None:
        return mine
    index, prefix = places.at[place], places.prefixes[place]
    reached = any(reads(spot, index, prefix.position, terms) for spot in (*callers, *mine))
    if reached or prefix.tokens < terms.minimum or mine[-1].index < index:
        return mine
    warm = prefix.warm
    added = places.spot(place, mine[-1].ttl if warm is None else warm.ttl)
    if len(mine) < room:
        return sorted([*mine, added], key=lambda spot: spot.index)
    shallow = [i for i, spot in enumerate(mine) if spot.index < index]
    if shallow:
        return [*mine[: shallow[-1]], added, *mine[shallow[-1] + 1 :]]
    for deeper in range(len(places.prefixes) - 1, place, -1):
        back = places.spot(deeper, mine[-1].ttl)
        if back.index < mine[-1].index and reads(back, index, prefix.position, terms):
            return [*mine[:-1], back]
    return [*mine[:-1], added]


def _anchored(mine: list[Spot], callers: Sequence[Spot], places: Places, terms: CacheTerms, room: int) -> list[Spot]:
    """With a mark at the end of tools and system where a slot is free: it costs nothing, for a deeper mark has them written, or
    they are cached, and it is read should the deeper entry be gone, or the messages be cached for other parameters."""
    place = places.anchor
    if place is None or len(mine) >= room:
        return mine
    added = places.spot(place, mine[0].ttl)
    if added.tokens < terms.minimum or any(spot.index <= added.index for spot in (*callers, *mine)):
        return mine
    return [added, *mine]


def _falling(spots: list[Spot], terms: CacheTerms) -> list[Spot]:
    """With lifetimes that never rise: a planned mark is cut to the shortest of the caller's before it, and lifted to the
    longest after it, which costs nothing, since up to there everything is written for that long anyway."""
    if len(spots) < 2:
        return spots
    seconds = {lifetime.name: lifetime.seconds for lifetime in terms.lifetimes}

    def length(spot: Spot) -> float:
        return seconds.get(spot.ttl, 0.0)

    cap: Spot | None = None
    for i, spot in enumerate(spots):
        if spot.ttl not in seconds:
            continue  # a lifetime of the caller's whose length is not known orders nothing
        if spot.callers:
            cap = spot if cap is None or length(spot) < length(cap) else cap
        elif cap is not None and length(spot) > length(cap):
            spots[i] = replace(spot, ttl=cap.ttl)
    longest: Spot | None = None
    for i in range(len(spots) - 1, -1, -1):
        spot = spots[i]
        if spot.ttl not in seconds:
            continue
        if longest is not None and not spot.callers and length(spot) < length(longest):
            spots[i] = replace(spot, ttl=longest.ttl)
        elif longest is None or length(spot) > length(longest):
            longest = spot
    return spots
