"""What goes first: pure functions over the page table and holders' paths. Least recently used leaf first."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Collection, Mapping

from cachespec.engine.pages import PageTable


def leaves_first(
    table: PageTable, paths: Mapping[int, array[int]], need: int, *, kept: Collection[int], shared: bool
) -> dict[int, int]:
    """New lengths, in pages, of some of these device holders, which give `need` pages back, or as many as there are.

    A holder loses its last page at a time, so a tail goes before its head. One whose rest another holder covers too goes
    whole, where pages are shared. The last cover of a page in `kept`, and so everything before it, stays.
    """
    lengths = {slot: len(path) for slot, path in paths.items()}
    queue = [(table.used(path[-1]) if path else -1, slot) for slot, path in paths.items()]
    heapq.heapify(queue)
    fewer: Counter[int] = Counter()  # covers that the cuts so far take from a page
    cut: dict[int, int] = {}
    while queue and need > 0:
        used, slot = heapq.heappop(queue)
        path, size = paths[slot], lengths[slot]
        if size:
            page = path[size - 1]
            only = table.covers(page, "device") - fewer[page] == 1
            if only and page in kept:
                continue
            need -= only or not shared
            fewer[page] += 1
            size -= 1
        if size and shared and table.covers(path[size - 1], "device") - fewer[path[size - 1]] > 1:
            fewer.update(path[:size])
            size = 0
        cut[slot] = lengths[slot] = size
        if size:
            heapq.heappush(queue, (max(used, table.used(path[size - 1])), slot))
    return cut


def least_recent(table: PageTable, paths: Mapping[int, array[int]]) -> list[int]:
    """The holders in the order in which whole ones should go."""
    return sorted(paths, key=lambda number: table.used(paths[number][-1]) if paths[number] else -1)
