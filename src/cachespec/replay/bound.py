"""What no policy can beat: each block's best choice, knowing when it comes again.

Blocks are relaxed to be cached one by one. At each of its requests a block that is still cached pays a read, and may then go
on with any lifetime: a deeper mark can keep the whole prefix before it for longer than was paid for it. Else it pays the plain
price, or a write. That leaves out that marks are few, that lifetimes do not increase along a prompt, that only a prefix can
be written, and that an entry is not readable at once; all of these only cost more. Two things are kept, since they bind every
policy: a block is read only up to a place that an earlier request could have marked, and tokens outside whole blocks never.

With keep-alives a cached block may also outlive its lifetime at the price of a read each time, and a dead one may be written
between two requests.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from cachespec.caching import CacheTerms
from cachespec.replay.places import Places
from cachespec.replay.traces import Run, Session, Trace, TraceRequest

Costs: TypeAlias = tuple[float, ...]
"""What a token has cost beyond the least, by how it is held after its last request: not at all, or with each lifetime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of the cost relative to no caching, without and with keep-alives."""

    without_pings: float
    with_pings: float


def bounds(trace: Trace, terms: CacheTerms, progress: Callable[[int], None] | None = None) -> Bounds:
    """The bounds for a trace under a vendor's terms. `progress` is told the number of requests done."""
    without = pinged = 0.0
    done = 0
    for session in trace.sessions:
        blocks = _Blocks(terms=terms)
        for request, readable in _reach(session, trace):
            outside = request.input_tokens - request.block_count * trace.block_size
            without, pinged = without + outside, pinged + outside
            for run, can_read in _cut(request.blocks, readable):
                blocks.ask(run, request.t, can_read)
        without += blocks.without * trace.block_size
        pinged += blocks.pinged * trace.block_size
        done += len(session.requests)
        if progress is not None:
            progress(done)
    total = trace.input_tokens
    return Bounds(without_pings=without / total, with_pings=pinged / total) if total else Bounds(without_pings=1, with_pings=1)


def _reach(session: Session, trace: Trace) -> Iterator[tuple[TraceRequest, int]]:
    """Each request, and how many of its blocks lie before a place that an earlier request could have marked."""
    places = Places(block_size=trace.block_size, any_block=trace.any_block, offset=0, base=0.0)
    could: set[int] = set()
    for request in session.requests:
        asked = places.of(request, request.t, {})
        yield request, next((place.blocks for place in reversed(asked.path) if place.key in could), 0)
        could.update(place.key for place in asked.legal if place.blocks)


def _cut(blocks: tuple[Run, ...], at: int) -> Iterator[tuple[Run, bool]]:
    """The runs, cut after `at` blocks: which may be read, and which not."""
    for first, count in blocks:
        inside = max(0, min(count, at))
        at -= count
        if inside:
            yield (first, inside), True
        if inside < count:
            yield (first + inside, count - inside), False


@dataclass(slots=True)
class _Piece:
    """Blocks up to (not with) `end` that came last at `t` and are alike from there on."""

    end: int
    t: float
    without: Costs
    pinged: Costs

    def tail(self, at: int) -> _Piece:
        """Split: this one ends at `at`; what it loses is returned."""
        rest = _Piece(self.end, self.t, self.without, self.pinged)
        self.end = at
        return rest


@dataclass(slots=True, kw_only=True)
class _Blocks:
    """All blocks of a session, in pieces by first id, and the least they cost so far, per token of a block."""

    terms: CacheTerms
    without: float = 0.0
    pinged: float = 0.0
    starts: list[int] = field(default_factory=list)
    pieces: dict[int, _Piece] = field(default_factory=dict)

    def ask(self, run: Run, t: float, can_read: bool) -> None:
        """The blocks of a run come in a request at time `t`."""
        at, end = run[0], run[0] + run[1]
        index = bisect_right(self.starts, at) - 1
        if index >= 0 and self.starts[index] < at < self.pieces[self.starts[index]].end:
            self._insert(index + 1, at, self.pieces[self.starts[index]].tail(at))
        if index < 0 or self.starts[index] < at:
            index += 1
        while at < end:
            start = self.starts[index] if index < len(self.starts) else end
            if start > at:
                self._insert(index, at, _Piece(min(start, end), t, *self._first(min(start, end) - at)))
            else:
                piece = self.pieces[at]
                if piece.end > end:
                    self._insert(index + 1, end, piece.tail(end))
                self._again(piece, t, piece.end - at, can_read)
            at = self.pieces[at].end
            index = self._join(index)

    def _insert(self, index: int, start: int, piece: _Piece) -> None:
        self.starts.insert(index, start)
        self.pieces[start] = piece

    def _join(self, index: int) -> int:
        """Make one of this piece and the one before it where they are alike. Returns the index of the next one."""
        if index:
            before, piece = self.pieces[self.starts[index - 1]], self.pieces[self.starts[index]]
            alike = before.t == piece.t and before.without == piece.without and before.pinged == piece.pinged
            if alike and before.end == self.starts[index]:
                before.end = piece.end
                del self.pieces[self.starts.pop(index)]
                return index
        return index + 1

    def _first(self, count: int) -> tuple[Costs, Costs]:
        self.without += count
        self.pinged += count
        costs = (0.0, *(lifetime.write - 1 for lifetime in self.terms.lifetimes))
        return costs, costs

    def _again(self, piece: _Piece, t: float, count: int, can_read: bool) -> None:
        gap, piece.t = t - piece.t, t
        without = self._next(piece.without, gap, can_read, pings=False)
        pinged = self._next(piece.pinged, gap, can_read, pings=True)
        self.without += (least := min(without)) * count
        piece.without = tuple(cost - least for cost in without)
        self.pinged += (least := min(pinged)) * count
        piece.pinged = tuple(cost - least for cost in pinged)

    def _next(self, costs: Costs, gap: float, can_read: bool, *, pings: bool) -> Costs:
        """The costs after one more request, `gap` seconds after the one before."""
        terms, least = self.terms, min(costs)
        held = math.inf
        kept: list[float] = []
        for cost, lifetime in zip(costs[1:], terms.lifetimes, strict=True):
            if gap > lifetime.seconds:
                cost += (math.ceil(gap / lifetime.seconds) - 1) * terms.read if pings else math.inf
            held = min(held, cost)
            kept.append(cost)
        if not can_read:  # what is held may serve a later request, past this one
            return (least + 1, *(min(k + 1, least + life.write) for k, life in zip(kept, terms.lifetimes, strict=True)))
        read = held + terms.read
        if pings:
            read = min(read, least + min(lifetime.write for lifetime in terms.lifetimes) + terms.read)
        return (min(least + 1, read), *(min(read, least + lifetime.write) for lifetime in terms.lifetimes))
