"""What the prefix index costs: a match, an insert, memory a page, and its share of a prefill that finds nothing.

    python benchmarks/prefix_index.py

Prints one line a figure, with its budget. Times are the best of many runs, in one thread.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from time import perf_counter

import numpy as np

from cachespec.engine.pages import PAGE
from cachespec.engine.prefix import PrefixIndex

NAMESPACE = b"n" * 16
PREFILL_PER_S = 50_000
"""Tokens a second of a fast prefill (an accelerator); a CPU does a few hundred, which makes the share smaller."""


def best(action: Callable[[], object], times: int = 300) -> float:
    """Seconds of the fastest run."""
    fastest = float("inf")
    for _ in range(times):
        start = perf_counter()
        action()
        fastest = min(fastest, perf_counter() - start)
    return fastest


def main() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, 4001).astype(np.int32)
    index = PrefixIndex(page_bytes=1)
    index.insert(0, prompt, NAMESPACE)
    index.retire(0)
    assert index.match(prompt, NAMESPACE).tokens == 4000
    hit = best(lambda: index.match(prompt, NAMESPACE))
    as_list = prompt.tolist()
    hit_list = best(lambda: index.match(as_list, NAMESPACE))
    miss = best(lambda: index.match(prompt[::-1].copy(), NAMESPACE))

    def insert() -> None:
        fresh = PrefixIndex(page_bytes=1)
        fresh.insert(0, prompt, NAMESPACE)

    cold = miss + best(insert, 50)

    gc.collect()
    tracemalloc.start()
    big = PrefixIndex(page_bytes=1)
    for slot in range(100):  # a hundred conversations of 10,000 tokens
        big.insert(slot, rng.integers(0, 150_000, 10_000).astype(np.int32), NAMESPACE)
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    pages = 1_000_000 // PAGE
    assert big.stats().pages == pages
    crowded = best(lambda: big.match(prompt, NAMESPACE))
    start = perf_counter()
    cuts = big.room(1_000_000)
    for slot in range(100):
        big.retire(slot)
    cuts = big.room(1_000_000)
    for cut in cuts:
        big.cut(cut.slot, cut.length)
    evict = perf_counter() - start
    assert big.stats().pages == 0

    share = cold / (len(prompt) / PREFILL_PER_S)
    print(f"match of 4,000 tokens in an array   {hit * 1e6:8.1f} us   (budget 100)")
    print(f"the same, in a list                 {hit_list * 1e6:8.1f} us")
    print(f"match that finds nothing            {miss * 1e6:8.1f} us   ({crowded * 1e6:.1f} among 100 holders)")
    print(f"insert of 4,000 new tokens          {(cold - miss) * 1e6:8.1f} us")
    print(f"share of a prefill at zero hits     {share:8.2%}      (budget 1 %, at {PREFILL_PER_S:,} tokens a second)")
    print(f"memory a page, 1,000,000 tokens     {size / pages:8.1f} bytes (budget 300)")
    print(f"eviction                            {evict / pages * 1e6:8.2f} us a page")


if __name__ == "__main__":
    main()
