"""The default caching policy by itself: microseconds of each call, and memory for what it remembers.

    python benchmarks/caching_policy.py [--rounds 600] [--prefixes 100000]

A request has 117 tools, 3 parts of a system prompt and up to 100 messages, each of them a place, of which all but the last two
were there before; "first" is a conversation nobody had before. Times are medians (and the 99th percentile) of processor
time, so that others on the machine disturb little. `update` is `sent` and `ended` of a prompt with one place, new each time.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable

from cachespec.caching import CacheAsk, CachePlan, CacheTerms, Held, Lifetime, Outcome, Prefix, PrefixKind, Warm
from cachespec.policies.caching import ExpectedCost

TERMS = CacheTerms(
    lifetimes=(Lifetime(name="5m", seconds=300.0, write=1.25), Lifetime(name="1h", seconds=3600.0, write=2.0)),
    read=0.1,
    minimum=512,
    lookback=20,
)
START = 1_000_000_000.0


def ask(session: int, messages: int, now: float) -> CacheAsk:
    """A request whose last two messages are new; made of new objects each time."""
    prefixes: list[Prefix] = []
    tokens = 0

    def add(key: str, kind: PrefixKind, size: int, warm: Warm | None = None) -> None:
        nonlocal tokens
        tokens += size
        place = len(prefixes) + 1
        prefixes.append(Prefix(key=key.encode().ljust(16, b"."), at=key, kind=kind, tokens=tokens, position=place, warm=warm))

    for i in range(117):
        add(f"tool {i}", "tools", 200)
    for i in range(3):
        add(f"system {i}", "system", 300)
    for i in range(messages):
        warm = Warm(ttl="5m", ready_at=now - 50, expires_at=now + 200) if messages - 10 < i < messages - 2 else None
        add(f"{session}.{i}", "end" if i == messages - 1 else "turn", 250, warm)
    return CacheAsk(now=now, prefixes=tuple(prefixes), input_tokens=tokens, terms=TERMS, tenant="a", session=str(session))


def timed(times: list[float], call: Callable[[], object]) -> None:
    start = time.process_time()
    call()
    times.append(1e6 * (time.process_time() - start))


def shown(times: list[float]) -> str:
    return f"{statistics.median(times):.0f} ({sorted(times)[int(0.99 * len(times))]:.0f})"


def calls(rounds: int) -> None:
    policy, now = ExpectedCost(), START
    later: dict[str, list[float]] = {name: [] for name in ("plan", "sent", "ended", "held")}
    first: list[float] = []
    gc.disable()
    for session in range(rounds // 10):
        for messages in range(2, 102, 2):
            request = ask(session, messages, now)
            plan = policy.plan(request)
            if messages == 2:
                timed(first, lambda request=request: policy.plan(request))  # type: ignore[misc]
            timing = later if messages > 80 else {name: [] for name in later}
            timed(timing["plan"], lambda request=request: policy.plan(request))  # type: ignore[misc]
            timed(timing["sent"], lambda request=request, plan=plan: policy.sent(request, plan))  # type: ignore[misc]
            outcome = Outcome(ended_at=now + 5, stop="stop", read=0)
            timed(timing["ended"], lambda request=request, outcome=outcome: policy.ended(request, outcome))  # type: ignore[misc]
            warm = Warm(ttl="5m", ready_at=now + 2, expires_at=now + 300)
            held = Held(ask=request, outcome=outcome, index=len(request.prefixes) - 1, warm=warm)
            timed(timing["held"], lambda held=held: policy.held(held, held.outcome.ended_at))  # type: ignore[misc]
            now += 20
        gc.collect()
    gc.enable()
    print("us of a request with some 220 places, median (p99):")
    print(f"  plan, a new conversation {shown(first)}")
    for name, times in later.items():
        print(f"  {name} {shown(times)}")


def memory(count: int) -> None:
    keys = [os.urandom(16) for _ in range(count)]
    asks = [
        CacheAsk(
            now=START + i * 0.1,
            prefixes=(Prefix(key=key, at="messages[0][0]", kind="end", tokens=2000),),
            input_tokens=2000,
            terms=TERMS,
            session=str(i // 20),
        )
        for i, key in enumerate(keys)
    ]
    policy, nothing, times = ExpectedCost(places=count), CachePlan(), []
    for request in asks:
        start = time.process_time()
        policy.sent(request, nothing)
        policy.ended(request, Outcome(ended_at=request.now + 0.05, stop="stop"))
        times.append(1e6 * (time.process_time() - start))
    print(f"us of an update: mean {statistics.fmean(times):.1f}, median {shown(times)}")
    start = time.process_time()
    data = policy.dump()
    saved = time.process_time()
    ExpectedCost().load(data)
    done = time.process_time()
    print(f"saving: {1e3 * (saved - start):.0f} ms, {len(data) / 1e6:.2f} MB; taking up: {1e3 * (done - saved):.0f} ms")
    del policy
    gc.collect()
    tracemalloc.start()
    policy = ExpectedCost(places=count)
    for request in asks:
        policy.sent(request, nothing)
    used, _ = tracemalloc.get_traced_memory()
    print(f"memory for {count} prefixes: {used / 1e6:.1f} MB, and {49 * count / 1e6:.1f} MB of keys")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600, help="requests timed")
    parser.add_argument("--prefixes", type=int, default=100_000)
    asked = parser.parse_args()
    calls(max(asked.rounds, 100))
    memory(asked.prefixes)


if __name__ == "__main__":
    main()
