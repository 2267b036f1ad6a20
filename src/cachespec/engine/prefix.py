"""The prefix index: which KV is there already, who holds it, and what goes first when room is needed (contract E5).

Pages and holders. A page is sixteen tokens after everything before them (`engine.pages`). KV does not live in pages but in
*holders*, each of which covers the pages of one path from the start. A device holder is a sequence of the runtime, its
`slot`; a host holder is the bytes that a runtime exported. Both kinds of runtime fit:

- llama.cpp: slots are sequence ids of one unified context, and forking shares cells (``shared=True``). Room is counted in
  pages, each once however many slots cover it, and cutting a slot gives its last pages back.
- torch: a slot is a static slab, and forking copies (``shared=False``). Room is a matter of slots: `victim` names one.

The life of a request, all on the engine's thread (only `peek` may be called from others):

1. ``match`` finds the longest whole pages, at most all but one of the prompt's tokens, so that there is a row to draw from.
   ``acquire`` keeps them from being evicted until ``release``: hold them until the fork is done.
2. The engine takes over ``match.slot`` where ``match.adopt``, or forks it into a free slot, or imports ``payload(match)``
   and truncates to ``match.stored``. An import may fail for lack of room: then ``lost(match)``, and the prompt is computed.
3. ``insert(slot, tokens)`` says what committed tokens the slot's KV holds: after the fork, after prefill (so that the next
   request shares while this one runs) and at the end. Never drafts, never what an aborted request generated.
4. ``retire(slot)`` when the request is over. The slot stays as a holder until it is cut.

Every `Cut` that `retire`, `room` and `victim` return is a proposal: the engine may ``stash`` the slot's exported bytes,
then truncates or frees the sequence, then calls ``cut``. Where a runtime cannot truncate it frees, and says ``cut(slot, 0)``.

What goes first: the least recently used leaf, so a tail before its head, never what is acquired or pinned. Pins have an
owner (a session) and a deadline.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from cachespec.engine.copies import Copy, HostCopies
from cachespec.engine.eviction import least_recent, leaves_first
from cachespec.engine.pages import PAGE, PAGE_BYTES, PageTable, Tier, Tokens, agreement, packed
from cachespec.errors import InputError


@dataclass(frozen=True, slots=True)
class NearMiss:
    """Where a prompt left what is kept: the first token that differs, and both sides of it."""

    position: int
    kept: int
    given: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What is there of a prompt. Valid until the next `insert`, `cut` or `stash`, or while acquired.

    Attributes:
        tokens: in whole pages, at most ``queried - 1``, held by `slot` (None when there are none).
        adopt: the slot is idle and holds nothing beyond `tokens`: it may be used as it is, without a fork.
        stored: tokens that a host copy holds, when those are more than `tokens`; else 0.
        near: where the prompt left what is kept; None when it simply goes on, or has nothing in common.
        ends: the last page matched in each tier, which `acquire` guards; `copy` the host copy's number. Pages are guarded, not
            the slot: when another covers them too it may go, so `find` again after making room.
    """

    queried: int
    tokens: int = 0
    slot: int | None = None
    adopt: bool = False
    stored: int = 0
    near: NearMiss | None = None
    ends: tuple[int, ...] = ()
    copy: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """The runtime should forget this slot's KV from `length` on; at 0 it should free the sequence."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """Counts since the start, in queries, tokens and pages as named; then what is there now.

    Hit tokens count what was found, in either tier; `failed_restores` says how often a host copy was then of no use.
    """

    queries: int = 0
    hits: int = 0
    misses: int = 0
    near_misses: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    evicted_copies: int = 0
    restores: int = 0
    failed_restores: int = 0
    last_near_miss: NearMiss | None = None
    pages: int = 0
    device_pages: int = 0
    device_slots: int = 0
    host_pages: int = 0
    host_bytes: int = 0
    pins: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Holder:
    namespace: bytes
    path: array[int] = field(default_factory=lambda: array("i"))
    busy: bool = True

    def passes(self, page: int, size: int) -> bool:
        """Whether the path's first `size` pages end with this page."""
        return len(self.path) >= size and self.path[size - 1] == page


class PrefixIndex:
    """See the module's docstring. Budgets are bytes: `budget` of device KV (None: no bound of its own), `host_budget` of
    exported bytes. `page_bytes` is the KV of one page. `clock` is the one that deadlines of pins are read on. `rewinds`: what
    is imported can be truncated; else only whole copies are of use.
    """

    def __init__(
        self,
        *,
        page_bytes: int,
        budget: int | None = None,
        host_budget: int = 0,
        shared: bool = True,
        rewinds: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_bytes < 1 or host_budget < 0 or (budget is not None and budget < 0):
            raise InputError("budgets and the size of a page are counts of bytes", field="prefix")
        self._page_bytes, self._budget = page_bytes, budget
        self._shared, self._clock = shared, clock
        self._table = PageTable()
        self._slots: dict[int, _Holder] = {}
        uncover = partial(self._gone, keep=0, tier="host")
        self._copies = HostCopies(self._table, host_budget, uncover, whole=not rewinds)
        self._tick = 0
        self._guards: Counter[int] = Counter()  # page -> how many acquired it
        self._pins: dict[Hashable, tuple[int, float]] = {}  # owner -> page, deadline
        self._counts: Counter[str] = Counter()
        self._last_near: NearMiss | None = None

    # Looking.

    def match(self, tokens: Tokens, namespace: bytes | None) -> Match:
        """The longest known beginning of a prompt, counted in the statistics and noted as used."""
        found, counts = self.find(tokens, namespace), self._counts
        queried, reach = found.queried, max(found.tokens, found.stored)
        counts.update(queries=1, queried_tokens=queried, hit_tokens=reach, hits=int(reach > 0), misses=int(reach == 0))
        if found.near is not None:
            counts["near_misses"] += 1
            self._last_near = found.near
        return found

    def find(self, tokens: Tokens, namespace: bytes | None) -> Match:
        """The same, noted as used and not counted: for asking again after something had to go."""
        if namespace is None or len(tokens) < 2:
            return Match(queried=len(tokens))
        return self._look(packed(tokens), len(tokens), namespace)

    def peek(self, tokens: Tokens, namespace: bytes | None) -> tuple[int, int]:
        """Tokens that are there on the device, and on the host. Changes nothing; from any thread, roughly right.

        Where nothing can be truncated, as `near`: under the engine's lock.
        """
        if namespace is None or len(tokens) < 2:
            return 0, 0
        path = self._table.walk(namespace, packed(tokens), (len(tokens) - 1) // PAGE)
        return self._table.covered(path, "device") * PAGE, self._copies.reach(path) * PAGE

    def near(self, tokens: Tokens, namespace: bytes | None) -> NearMiss | None:
        """Where a prompt leaves what is kept, as `Match.near`. Changes nothing; on the engine's thread, or under its lock."""
        if namespace is None or len(tokens) < 2:
            return None
        data = packed(tokens)
        return self._near(self._table.walk(namespace, data, (len(tokens) - 1) // PAGE), data, namespace)

    def _look(self, data: bytes, queried: int, namespace: bytes) -> Match:
        table = self._table
        path = table.walk(namespace, data, (queried - 1) // PAGE)
        device, host = table.covered(path, "device"), self._copies.reach(path)
        self._tick += 1
        ends = tuple({path[size - 1] for size in (device, host) if size})
        for page in ends:
            table.touch(page, self._tick)
        slot, adopt = self._holder_of(path[device - 1], device) if device else (None, False)
        copy = self._copies.find(path, host) if host > device else None
        return Match(
            queried=queried,
            tokens=device * PAGE,
            slot=slot,
            adopt=adopt,
            stored=host * PAGE if copy is not None else 0,
            near=self._near(path, data, namespace),
            ends=ends,
            copy=copy,
        )

    def _holder_of(self, page: int, size: int) -> tuple[int | None, bool]:
        """A slot that covers `size` pages ending with this one: one that can be adopted, else an idle one, else any."""
        best, rank = None, -1
        for slot, holder in self._slots.items():
            if holder.passes(page, size):
                mine = 0 if holder.busy else 1 + (len(holder.path) == size)
                if mine > rank:
                    best, rank = slot, mine
        return best, rank == 2

    def _near(self, path: list[int], data: bytes, namespace: bytes) -> NearMiss | None:
        depth, best, page = len(path), -1, b""
        rest = data[depth * PAGE_BYTES : (depth + 1) * PAGE_BYTES]
        holders: Iterable[_Holder | Copy] = chain(self._slots.values(), self._copies.all.values())
        for holder in holders:
            known = holder.path
            if len(known) > depth and holder.namespace == namespace and (not depth or known[depth - 1] == path[-1]):
                tokens = self._table.tokens(known[depth])
                alike = agreement(tokens, rest)
                if alike * 4 == len(rest):
                    return None
                if alike > best:
                    best, page = alike, tokens
        if best < 0 or depth + best == 0:
            return None
        return NearMiss(depth * PAGE + best, array("i", page)[best], array("i", rest)[best])

    def acquire(self, match: Match) -> None:
        """Keep what was matched from being evicted, until `release` is called as often."""
        self._guards.update(match.ends)

    def release(self, match: Match) -> None:
        """Undo one `acquire`: after the fork or import is done, or was given up."""
        for page in match.ends:
            if self._guards[page] > 1:
                self._guards[page] -= 1
            else:
                self._guards.pop(page, None)

    # The host tier.

    def stashed(self, slot: int) -> bool:
        """Whether `stash` would be of no use: everything of this slot is in host memory, or there is nothing."""
        holder = self._slots.get(slot)
        return holder is None or self._copies.has(holder.path)

    def stash(self, slot: int, payload: bytes) -> bool:
        """Keep a slot's exported KV (all of its sequence) in host memory. False: no room, or it is there already."""
        holder, kept = self._slots[slot], self._kept()
        copy = Copy(holder.namespace, holder.path[:], payload)
        return self._copies.add(copy, lambda other: not self._stays(other.path, "host", kept))

    def payload(self, match: Match) -> bytes:
        """The bytes to import for `match.stored`; empty when there are none any more."""
        copy = None if match.copy is None else self._copies.all.get(match.copy)
        self._counts["restores"] += copy is not None
        return b"" if copy is None else copy.payload

    def lost(self, match: Match) -> None:
        """The import failed: the copy is dropped, and the prompt has to be computed."""
        self._counts["failed_restores"] += 1
        if match.copy is not None:
            self._copies.drop(match.copy)

    # What the runtime holds.

    def insert(self, slot: int, tokens: Tokens, namespace: bytes | None) -> int:
        """The slot's KV holds these committed tokens, and its request runs. How many of them are kept for reuse.

        What was inserted for a slot can only grow: InputError for tokens that do not begin with it.
        """
        if namespace is None:
            return 0
        data, pages = packed(tokens), len(tokens) // PAGE
        holder = self._slots.get(slot)
        known = [] if holder is None else holder.path.tolist()
        if holder is not None and (holder.namespace != namespace or self._table.walk(namespace, data, len(known)) != known):
            raise InputError(f"slot {slot} holds other tokens than these", field="tokens")
        path = self._table.grow(namespace, data, pages)
        if holder is None:
            holder = self._slots[slot] = _Holder(namespace)
        holder.busy = True
        holder.path.extend(path[len(known) :])
        self._table.cover(path[len(known) :], "device")
        self._tick += 1
        if path:
            self._table.touch(path[-1], self._tick)
        return len(path) * PAGE

    def retire(self, slot: int) -> list[Cut]:
        """The slot's request is over. What the runtime should forget: parts of a page, and slots that add nothing."""
        holder = self._slots.get(slot)
        if holder is None:
            return [Cut(slot, 0)]
        holder.busy = False
        size = len(holder.path)
        if any(self._within(holder, other) for s, other in self._slots.items() if s != slot):
            return [Cut(slot, 0)]
        inside = [Cut(s, 0) for s, other in self._slots.items() if s != slot and self._within(other, holder)]
        return [*inside, Cut(slot, size * PAGE)]

    def _within(self, inner: _Holder, outer: _Holder) -> bool:
        """Whether an idle holder keeps nothing that another idle one does not."""
        size = len(inner.path)
        return not (inner.busy or outer.busy) and (not size or outer.passes(inner.path[-1], size))

    def cut(self, slot: int, length: int) -> None:
        """The runtime forgot the slot's KV from `length` on (0: freed the sequence). Pages nobody else has are gone."""
        holder = self._slots.get(slot)
        if holder is None:
            return
        keep = min(length // PAGE, len(holder.path))
        self._counts["evicted_pages"] += self._gone(holder.path, keep, "device")
        del holder.path[keep:]
        if not length:
            del self._slots[slot]

    def _gone(self, path: array[int], keep: int, tier: Tier) -> int:
        """A holder covers only the first `keep` pages now; how many are gone. What is left inherits their last use."""
        table = self._table
        last = max((table.used(page) for page in path[keep:]), default=0)
        gone = set(table.uncover(path[keep:], tier))
        for page in gone & self._guards.keys():
            del self._guards[page]
        for owner in [o for o, (page, _) in self._pins.items() if page in gone]:
            del self._pins[owner]
        if len(gone) < len(path):
            table.touch(path[len(path) - len(gone) - 1], last)
        return len(gone)

    # What goes first.

    @property
    def used_bytes(self) -> int:
        """Bytes of device KV that the index keeps: a page once where forks share, once a slot where they copy."""
        pages = self._table.on["device"] if self._shared else sum(len(h.path) for h in self._slots.values())
        return pages * self._page_bytes

    def excess(self) -> int:
        """Tokens by which what is kept is over the budget: what to ask `room` for."""
        over = 0 if self._budget is None else self.used_bytes - self._budget
        return max(0, -(-over // self._page_bytes) * PAGE)

    def room(self, tokens: int) -> list[Cut]:
        """Cuts of idle slots, least recently used leaf first, that give at least so many tokens of device KV back.

        Fewer when there is no more to give. Slots that add nothing afterwards are freed with them.
        """
        idle = {slot: holder.path for slot, holder in self._slots.items() if not holder.busy}
        lengths = leaves_first(self._table, idle, -(-tokens // PAGE), kept=self._kept(), shared=self._shared)
        return [Cut(slot, pages * PAGE) for slot, pages in lengths.items()]

    def victim(self, match: Match | None = None) -> Cut | None:
        """The idle slot to give up when a free one is needed: the least recently used. None: all run, or are kept.

        When the only one is kept for `match` alone, it is what that has beyond the match: then the slot can be adopted.
        """
        kept = self._kept()
        free = {s: h.path for s, h in self._slots.items() if not h.busy and not self._stays(h.path, "device", kept)}
        order = least_recent(self._table, free)
        if order or match is None or match.slot is None:
            return Cut(order[0], 0) if order else None
        holder = self._slots[match.slot]
        beyond = holder.path[match.tokens // PAGE :]
        return None if holder.busy or self._stays(beyond, "device", kept) else Cut(match.slot, match.tokens)

    def _stays(self, path: array[int], tier: Tier, kept: set[int]) -> bool:
        """Whether this path's holder is the only one of its tier that covers something kept."""
        return bool(kept) and any(page in kept and self._table.covers(page, tier) == 1 for page in path)

    def _kept(self) -> set[int]:
        """The pages acquired or pinned, with all before them."""
        now = self._clock()
        for owner in [o for o, (_, deadline) in self._pins.items() if deadline <= now]:
            del self._pins[owner]
        return {*self._guards, *(page for page, _ in self._pins.values())}

    def pin(self, owner: Hashable, tokens: Tokens, namespace: bytes | None, deadline: float) -> int:
        """Keep what is there of these tokens until `deadline` (on `clock`), instead of what the owner pinned before.

        How many tokens that is. Pins are a wish: eviction respects them, `cut` does not.
        """
        self._pins.pop(owner, None)
        path = [] if namespace is None else self._table.walk(namespace, packed(tokens), len(tokens) // PAGE)
        if path:
            self._pins[owner] = path[-1], deadline
        return len(path) * PAGE

    def unpin(self, owner: Hashable) -> None:
        """Take a pin back. Nothing happens when there is none."""
        self._pins.pop(owner, None)

    def stats(self) -> PrefixStats:
        """The statistics, for reports and metrics."""
        return PrefixStats(
            **self._counts,
            evicted_copies=self._copies.evicted,
            last_near_miss=self._last_near,
            pages=self._table.count,
            device_pages=self._table.on["device"],
            device_slots=len(self._slots),
            host_pages=self._table.on["host"],
            host_bytes=self._copies.bytes,
            pins=len(self._pins),
        )

    def check(self) -> None:
        """Hold everything against everything else; RuntimeError with what does not agree. For tests: it is slow."""
        slots = [(h.namespace, h.path) for h in self._slots.values()]
        copies = [(c.namespace, c.path) for c in self._copies.all.values()]
        found = self._table.problems({"device": slots, "host": copies})
        if self._copies.bytes != sum(len(copy.payload) for copy in self._copies.all.values()):
            found.append("bytes of the host tier do not add up")
        live = {page for _, path in (*slots, *copies) for page in path}
        if any(count < 1 or page not in live for page, count in self._guards.items()):
            found.append("something acquired is not there")
        if any(page not in live for page, _ in self._pins.values()):
            found.append("something pinned is not there")
        if found:
            raise RuntimeError("; ".join(found))
