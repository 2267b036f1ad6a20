"""The host tier of the prefix index: KV that a runtime exported, kept as bytes under a budget of its own.

A copy is all or nothing: it can be imported and then truncated, but not cut while it lies here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
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

    def __init__(self, table: PageTable, budget: int, uncover: Callable[[array[int]], object]) -> None:
        self._table, self._budget, self._uncover = table, budget, uncover
        self._made = 0
        self.all: dict[int, Copy] = {}
        self.bytes = 0
        self.evicted = 0

    def add(self, copy: Copy, may_go: Callable[[Copy], bool]) -> bool:
        """Keep a copy, giving up others that may go. False: it is there already, or there is no room."""
        path = copy.path
        if not path or self._table.covered(path, "host") == len(path):
            return False
        free = {number: other.path for number, other in self.all.items() if may_go(other)}
        # Copies of its own beginning are of no use any more; then goes what was used least recently.
        inside = [n for n, other in free.items() if other[-1] == path[min(len(other), len(path)) - 1]]
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

    def find(self, page: int, size: int) -> int | None:
        """A copy whose first `size` pages end with this one."""
        return next((n for n, c in self.all.items() if len(c.path) >= size and c.path[size - 1] == page), None)

    def drop(self, number: int) -> None:
        """Forget a copy. Nothing happens when it is gone."""
        copy = self.all.pop(number, None)
        if copy is not None:
            self.bytes -= len(copy.payload)
            self._uncover(copy.path)
