"""The host tier of the prefix index: KV that a runtime exported, kept as bytes under a budget of its own.

A copy is all or nothing: it can be imported and then truncated, but not cut while it lies here. Where a model cannot be
truncated (`whole`), a copy is of use only for prompts that begin with all of it, so shorter ones stay beside longer ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachespec.engine.eviction import least_recent
from cachespec.engine.pages import PageTable


@dataclass(frozen=True, slots=True)
class Copy:
    """Exported KV of the pages of `path`."""

    namespace: bytes
    path: array[int]
    payload: bytes


class HostCopies:
    """Copies by number. `uncover` is called with the path of one that goes."""

    def __init__(self, table: PageTable, budget: int, uncover: Callable[[array[int]], object], *, whole: bool = False) -> None:
        self._table, self._budget, self._uncover, self._whole = table, budget, uncover, whole
        self._made = 0
        self.all: dict[int, Copy] = {}
        self.bytes = 0
        self.evicted = 0

    def add(self, copy: Copy, may_go: Callable[[Copy], bool]) -> bool:
        """Keep a copy, giving up others that may go. False: it is there already, or there is no room."""
        path = copy.path
        if not path or self.has(path):
            return False
        free = {number: other.path for number, other in self.all.items() if may_go(other)}
        # Copies of its own beginning are of no use any more; then goes what was used least recently.
        inside = [n for n, p in free.items() if p[-1] == path[min(len(p), len(path)) - 1] and not self._whole]
        over = self.bytes + len(copy.payload) - self._budget
        if over > sum(len(self.all[number].payload) for number in free):
            return False
        for number in inside:
            self.drop(number)
        for number in least_recent(self._table, {n: p for n, p in free.items() if n not in inside}):
            if self.bytes + len(copy.payload) <= self._budget:
                break
            self.evicted += 1
            self.drop(number)
        self._made += 1
        self.all[self._made] = copy
        self.bytes += len(copy.payload)
        self._table.cover(path, "host")
        return True

    def has(self, path: Sequence[int]) -> bool:
        """Whether a copy of these pages would be of no use."""
        return self.reach(path) == len(path)

    def reach(self, path: Sequence[int]) -> int:
        """How many leading pages of a path can be had from a copy."""
        size = self._table.covered(path, "host")
        if self._whole:
            sizes = (len(c.path) for c in self.all.values() if len(c.path) <= size and path[len(c.path) - 1] == c.path[-1])
            size = max(sizes, default=0)
        return size

    def find(self, path: Sequence[int], size: int) -> int | None:
        """A copy of the first `size` pages of a path, which `reach` said there is."""
        for number, copy in self.all.items():
            known = copy.path
            if len(known) >= size and known[size - 1] == path[size - 1] and (len(known) == size or not self._whole):
                return number
        return None

    def drop(self, number: int) -> None:
        """Forget a copy. Nothing happens when it is gone."""
        copy = self.all.pop(number, None)
        if copy is not None:
            self.bytes -= len(copy.payload)
            self._uncover(copy.path)
