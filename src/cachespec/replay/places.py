"""Where a trace's requests may be marked, as the vendor finds them and as a caching policy sees them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cachespec.caching import Prefix, Warm
from cachespec.replay.traces import TraceRequest
from cachespec.replay.vendor import Entry, Place


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's places: `path` for the vendor's lookup; `legal` may be marked, and `prefixes` shows them to a policy."""

    path: tuple[Place, ...]
    legal: tuple[Place, ...]
    prefixes: tuple[Prefix, ...]


@dataclass(slots=True, kw_only=True)
class Places:
    """The places of one session's requests, asked for in the order of time.

    With `any_block` every whole block may be marked, and the own end. Else: the end of tools and system, the ends of earlier
    requests of the session (as lengths, in whole blocks), and the own end. `offset` keeps the ids of sessions apart; `base` is
    the session's start on the policy's clock.
    """

    block_size: int
    any_block: bool
    offset: int
    base: float
    _cuts: list[int] = field(default_factory=list)
    """Lengths where an entry may be: of earlier requests, and of their tools and system."""
    _ends: set[int] = field(default_factory=set)
    _seen: dict[int, tuple[Place, Prefix]] = field(default_factory=dict)
    _warm: Warm | None = None

    def of(self, request: TraceRequest, t: float, entries: Mapping[int, Entry]) -> Asked:
        """The places of the next request, with what is cached at each at time `t`."""
        whole = request.block_count
        fixed = -1 if request.fixed_tokens is None else request.fixed_tokens // self.block_size
        own, shown = self._own_end(request, whole)
        path: list[Place] = []
        legal: list[Place] = []
        prefixes: list[Prefix] = []
        for blocks, key in _keys(request, self._lengths(fixed, whole)):
            known = self._seen.get(key + self.offset) or self._meet(key + self.offset, blocks)
            place, prefix = known
            path.append(place)
            if (blocks == whole and shown == own.key) or not (self.any_block or blocks == fixed or blocks in self._ends):
                continue
            legal.append(place)
            prefixes.append(self._shown(place, prefix, blocks == fixed, entries.get(place.key), t))
        entry = entries.get(own.key) if shown == own.key else None
        legal.append(own)
        prefixes.append(
            Prefix(key=shown, at="end", kind="end", tokens=own.tokens, position=own.blocks + 1, warm=self._warmth(entry, t))
        )
        if not self.any_block:
            self._ends.add(whole)
            self._remember(whole)
        return Asked(tuple(path), tuple(legal), tuple(prefixes))

    def _lengths(self, fixed: int, whole: int) -> Iterable[int]:
        if self.any_block:
            return range(1, whole + 1)
        if fixed > 0:
            self._remember(fixed)
        return self._cuts[: bisect_left(self._cuts, whole + 1)]

    def _remember(self, blocks: int) -> None:
        if blocks and (not self._cuts or blocks > self._cuts[-1]):
            self._cuts.append(blocks)
        elif blocks and self._cuts[bisect_left(self._cuts, blocks)] != blocks:
            insort(self._cuts, blocks)

    def _own_end(self, request: TraceRequest, whole: int) -> tuple[Place, int]:
        """The own end, and the key that a policy knows it by: with `any_block`, its partial block makes it another prefix."""
        key = self.offset - 1 - request.i
        if request.blocks:
            first, count = request.blocks[-1]
            key = self.offset + first + count - 1
        shown = key if request.rest is None else self.offset + request.rest
        return Place(key, whole, request.input_tokens), shown

    def _meet(self, key: int, blocks: int) -> tuple[Place, Prefix]:
        place = Place(key, blocks, blocks * self.block_size)
        prefix = Prefix(key=key, at=f"blocks[{blocks - 1}]", kind="turn", tokens=place.tokens, position=blocks)
        self._seen[key] = place, prefix
        return place, prefix

    def _shown(self, place: Place, prefix: Prefix, fixed: bool, entry: Entry | None, t: float) -> Prefix:
        warm = self._warmth(entry, t)
        if fixed:
            return Prefix(key=place.key, at="system[0]", kind="system", tokens=place.tokens, position=place.blocks, warm=warm)
        if warm is not prefix.warm:
            prefix = Prefix(key=place.key, at=prefix.at, kind="turn", tokens=place.tokens, position=place.blocks, warm=warm)
            self._seen[place.key] = place, prefix
        return prefix

    def _warmth(self, entry: Entry | None, t: float) -> Warm | None:
        """An entry as a policy sees it. Entries refreshed together look alike and share one value."""
        if entry is None or t > entry.expires_at:
            return None
        ready, dies, last = self.base + entry.ready_at, self.base + entry.expires_at, self._warm
        if last is None or last.expires_at != dies or last.ready_at != ready or last.ttl != entry.lifetime.name:
            last = self._warm = Warm(ttl=entry.lifetime.name, ready_at=ready, expires_at=dies)
        return last


def _keys(request: TraceRequest, lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The id of the block that ends each of these ascending lengths (in blocks)."""
    runs = iter(request.blocks)
    before = upto = first = 0
    for blocks in lengths:
        while blocks > upto:
            first, count = next(runs)
            before, upto = upto, upto + count
        yield blocks, first + blocks - before - 1
