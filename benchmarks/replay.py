"""Caching policies on recorded traffic: what they cost, how close to the bound, and how long that took.

    python benchmarks/replay.py TRACE... [--policy expected-cost] [--vendor anthropic] [--variants]

With ``--variants`` each trace is also run with its sessions in other orders and with all gaps divided by 2 and by 10. A policy
holds where it costs at most 1% and 500,000 tokens more than the best fixed one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from cachespec.replay.bound import bounds
from cachespec.replay.compare import policies
from cachespec.replay.fixed import fixed_policies
from cachespec.replay.simulate import simulate
from cachespec.replay.traces import Trace, read_trace
from cachespec.replay.vendor import VENDORS


def faster(trace: Trace, by: int) -> Trace:
    """All gaps divided by `by`; requests take as long as they did."""
    sessions = tuple(
        replace(
            session,
            requests=tuple(replace(r, t=r.t / by, ended=r.t / by + r.ended - r.t) for r in session.requests),
        )
        for session in trace.sessions
    )
    return replace(trace, sessions=sessions)


def variants(trace: Trace) -> Iterator[tuple[str, Trace]]:
    """The trace, and what it could have been."""
    yield "as it is", trace
    if len(trace.sessions) > 1:
        yield "sessions reversed", replace(trace, sessions=trace.sessions[::-1])
        shuffled = list(trace.sessions)
        Random(1).shuffle(shuffled)
        yield "sessions shuffled", replace(trace, sessions=tuple(shuffled))
    for by in (2, 10):
        yield f"gaps / {by}", faster(trace, by)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--vendor", choices=sorted(VENDORS), default="anthropic")
    parser.add_argument("--variants", action="store_true")
    asked = parser.parse_args()
    terms = VENDORS[asked.vendor]
    print("| trace | variant | policy | cost | best fixed | bound | with keep-alives | us a request | holds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for path in asked.traces:
        whole = read_trace(path)
        for variant, trace in variants(whole) if asked.variants else [("as it is", whole)]:
            fixed = {n: simulate(trace, policy, terms, name=n) for n, policy in fixed_policies(terms).items()}
            best = min(fixed.values(), key=lambda result: result.cost)
            least = bounds(trace, terms)
            for name, policy in policies(asked.policy or ["expected-cost"], terms).items():
                start = time.process_time()
                result = simulate(trace, policy, terms, name=name)
                spent = (time.process_time() - start) / trace.requests * 1e6
                holds = "yes" if result.cost <= best.cost * 1.01 + 500_000 else "no"
                shown = [path.rsplit("/", 1)[-1].split(".")[0], variant, name, f"{result.relative:.4f}"]
                shown += [f"{best.relative:.4f} ({best.policy})", f"{least.without_pings:.4f}", f"{least.with_pings:.4f}"]
                print(f"| {' | '.join([*shown, f'{spent:.0f}', holds])} |", flush=True)


if __name__ == "__main__":
    main()
