"""Where KV is: the sequences of a runtime, what the prefix index keeps in them, and room for what runs (contract E5).

A slot is a sequence of the runtime. It is free, leased to a running request, or idle: kept because of what it holds. The
index says what goes first; here it is done, with the way out for runtimes that cannot do it: what cannot be cut is freed,
what cannot be forked or restored is computed.

All methods belong to the engine's thread. Those that read for a forecast may be called from any: they take the lock, which
is held for every change of the index and never while the runtime works, so nobody waits for it long.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from cachespec.engine.pages import PAGE, namespace
from cachespec.engine.prefix import Cut, Match, NearMiss, PrefixIndex, PrefixStats
from cachespec.engine.runtimes.base import Runtime

EVICTED: Final = 256
"""Tokens given up at once, at least: looking for what goes first is not for every token."""


@dataclass(slots=True, eq=False)
class Lease:
    """A slot that a request runs in. `held`: tokens its KV holds; `known`: how many of those the index knows, in whole pages.

    `namespace` None: what is computed here is nobody else's.
    """

    slot: int
    namespace: bytes | None
    held: int = 0
    known: int = 0


class Slots:
    """See the module's docstring. `host_bytes` bounds the copies in host memory, `seats` is how many requests run at once."""

    def __init__(self, runtime: Runtime, *, seats: int, host_bytes: int = 0) -> None:
        info = runtime.info
        self._runtime, self._seats, self._host_bytes = runtime, seats, host_bytes
        self._page_bytes = PAGE * max(1, info.kv_bytes)
        self._index = PrefixIndex(page_bytes=self._page_bytes, host_budget=host_bytes, shared=info.shares, rewinds=info.rewinds)
        self._free = list(range(runtime.sequences))
        self._leases: set[Lease] = set()
        self._pins: OrderedDict[Hashable, int] = OrderedDict()
        self._lock = threading.Lock()
        self.changes = 0
        """Grows whenever room was given back, so that what found none may look again."""

    # What is there: from any thread.

    def namespace(self, tenant: str | None) -> bytes | None:
        """Within what KV is shared; None when the runtime cannot tell its model from others."""
        salt = None if tenant is None else tenant.encode("utf-8", "surrogatepass")
        return namespace(model=self._runtime.info.fingerprint, dtype="", salt=salt)

    def peek(self, tokens: Sequence[int], tenant: str | None) -> tuple[int, int, NearMiss | None]:
        """Tokens of a prompt that are there in slots, those in host memory, and where it leaves what is kept."""
        space = self.namespace(tenant)
        with self._lock:
            return (*self._index.peek(tokens, space), self._index.near(tokens, space))

    def stats(self) -> PrefixStats:
        """Counts for reports."""
        with self._lock:
            return self._index.stats()

    def check(self) -> None:
        """Hold index, slots and runtime against each other; RuntimeError. For tests."""
        self._index.check()
        leased = {lease.slot for lease in self._leases}
        if len(self._free) != len(set(self._free)) or leased & set(self._free):
            raise RuntimeError("a slot is free twice, or free and leased")
        filled = [slot for slot in self._free if self._runtime.length(slot)]
        wrong = [lease.slot for lease in self._leases if self._runtime.length(lease.slot) != lease.held]
        if filled or wrong:
            raise RuntimeError(f"slots {filled} are free and hold something, or {wrong} hold something else")
        if self._runtime.sequences != len(self._free) + len(self._leases) + self.idle:
            raise RuntimeError("a slot is lost")

    @property
    def idle(self) -> int:
        """Slots that are kept for what they hold."""
        return self._index.stats().device_slots - sum(lease.known > 0 for lease in self._leases)

    @property
    def room(self) -> float:
        """Tokens there is room for without giving anything up; infinite where every slot has its own."""
        room = self._runtime.info.room
        if room is None:
            return float("inf")
        kept = self._index.used_bytes // self._page_bytes * PAGE
        return room - kept - sum(lease.held - lease.known for lease in self._leases)

    # Leases.

    def admit(self, tokens: Sequence[int], space: bytes | None, *, spare: int = 0) -> Lease | None:
        """A slot with as much of these tokens as there is, at most all but the last. None: not now.

        `spare` is the room wanted beside the tokens themselves, for what runs already.
        """
        index = self._index
        with self._lock:
            match = index.find(tokens, space)
            index.acquire(match)
        try:
            if not self.make_room(len(tokens) - match.tokens + spare):
                return None
            with self._lock:
                found = index.find(tokens, space)
                adopted = self._adopts(found)
                cut = index.victim(found) if adopted is None and not self._free else None
            if cut is not None:
                self._evict(cut)
                with self._lock:
                    adopted = self._adopts(index.find(tokens, space))
            if adopted is None and not self._free:
                return None
            lease = Lease(self._free.pop() if adopted is None else adopted, space)
            self._leases.add(lease)
            with self._lock:
                final = index.match(tokens, space)  # once more: what it was found in may be what had to go
            lease.held = self._fill(lease.slot, final) if adopted is None else final.tokens
        finally:
            with self._lock:
                index.release(match)
        if lease.held and self._runtime.info.rewinds:
            with self._lock:
                lease.known = index.insert(lease.slot, tokens[: lease.held], space)
        return lease

    def _adopts(self, match: Match) -> int | None:
        """The slot that can be used as it is, unless there is more in host memory and a slot to put it into."""
        return match.slot if match.adopt and not (match.stored and self._free) else None

    def _fill(self, slot: int, match: Match) -> int:
        """Put what was matched into an empty slot; how many tokens that is in the end."""
        runtime = self._runtime
        if match.stored:
            with self._lock:
                payload = self._index.payload(match)
            if payload and runtime.import_state(slot, payload):
                if runtime.truncate(slot, match.stored):
                    return match.stored
                runtime.free(slot)
            with self._lock:
                self._index.lost(match)
        if match.slot is not None and runtime.fork(match.slot, slot, match.tokens):
            return match.tokens
        runtime.free(slot)
        return 0

    def keep(self, lease: Lease, tokens: Sequence[int]) -> int:
        """The KV holds these committed tokens: others may share them from now on. How many are known now.

        None where the model cannot rewind: nobody could take a part of it.
        """
        sharable = lease.namespace is not None and self._runtime.info.rewinds
        if sharable and len(tokens) // PAGE * PAGE > lease.known:
            with self._lock:
                lease.known = self._index.insert(lease.slot, tokens[: lease.held], lease.namespace)
        return lease.known

    def cut(self, lease: Lease, length: int) -> None:
        """Forget the KV from `length` on; where the model cannot, all of it."""
        if length < lease.held:
            if not length or not self._runtime.truncate(lease.slot, length):
                self._runtime.free(lease.slot)
                length = 0
            self._lost(lease, length)

    def sync(self, lease: Lease) -> None:
        """After a call that failed: hold to what the runtime has left."""
        left = self._runtime.length(lease.slot)
        if left < lease.held:
            self._lost(lease, left)

    def _lost(self, lease: Lease, length: int) -> None:
        lease.held = length
        if length < lease.known:
            lease.known = length // PAGE * PAGE
            with self._lock:
                self._index.cut(lease.slot, lease.known)
        self.changes += 1

    def checkpoint(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Copy the slot, which holds just these tokens in whole pages, to host memory; how many can be had there now.

        For models that cannot rewind: theirs is the only way to go on from a beginning.
        """
        with self._lock:
            self._index.insert(lease.slot, tokens, lease.namespace)
        kept = self._stash(lease.slot)
        with self._lock:
            self._index.cut(lease.slot, 0)
        return len(tokens) if kept else 0

    def release(self, lease: Lease, tokens: Sequence[int]) -> int:
        """The request is over: keep what the KV holds of these tokens, in whole pages. How many stay."""
        self.cut(lease, min(lease.held, len(tokens)))
        self.keep(lease, tokens)
        stays = lease.known
        self._leases.discard(lease)
        with self._lock:
            cuts = self._index.retire(lease.slot)
        for cut in cuts:
            left = self._apply(cut)
            if cut.slot == lease.slot and left < cut.length:
                stays = left
        return stays

    def drop(self, lease: Lease) -> None:
        """The request is over, and what its KV holds is of no use to anybody."""
        self.cut(lease, 0)
        self.release(lease, ())

    # Room.

    def make_room(self, tokens: int) -> bool:
        """Give up what is kept until so many tokens fit; whether they do."""
        lack = tokens - self.room
        if lack > 0:
            self.evict(max(int(lack), EVICTED))
        return tokens <= self.room

    def evict(self, tokens: int) -> bool:
        """Give up so many tokens whatever the count of room says; whether there was anything to give."""
        with self._lock:
            cuts = self._index.room(tokens)
        for cut in cuts:
            self._evict(cut)
        return bool(cuts)

    def _evict(self, cut: Cut) -> None:
        if self._host_bytes:
            self._stash(cut.slot)
        self._apply(cut)

    def _stash(self, slot: int) -> bool:
        """Copy a slot to host memory, unless it is there; whether it is there then."""
        with self._lock:
            there = self._index.stashed(slot)
        if there:
            return True
        payload = self._runtime.export_state(slot)
        with self._lock:
            return self._index.stash(slot, payload)

    def _apply(self, cut: Cut) -> int:
        length = cut.length
        if not length or not self._runtime.truncate(cut.slot, length):
            self._runtime.free(cut.slot)
            length = 0
        with self._lock:
            self._index.cut(cut.slot, length)
        if not length:
            self._free.append(cut.slot)
        self.changes += 1
        return length

    # Pins.

    def pin(self, owner: Hashable, tokens: Sequence[int], space: bytes | None, deadline: float) -> None:
        """Keep what is there of these tokens until `deadline` (`time.monotonic`), as far as others have room beside it.

        Pins never take the slots that requests run in, nor the room that the longest one needs: the oldest go first.
        """
        info = self._runtime.info
        with self._lock:
            self._unpin(owner)
            kept = self._index.pin(owner, tokens, space, deadline)
            if kept:
                self._pins[owner] = kept
            allowed = float("inf") if info.room is None else info.room - info.context
            while self._pins and (
                len(self._pins) > self._runtime.sequences - self._seats or sum(self._pins.values()) > allowed
            ):
                self._unpin(next(iter(self._pins)))

    def _unpin(self, owner: Hashable) -> None:
        self._pins.pop(owner, None)
        self._index.unpin(owner)
