"""Generated traces, and policies without sense: they try everything that is legal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from cachespec.caching import CacheAsk, CachePlan, CacheTerms, CachingPolicy, Choice, Held, KeepAlive, Outcome
from cachespec.replay.result import Result
from cachespec.replay.simulate import simulate
from cachespec.replay.traces import Trace, parse_trace

GAPS = (0, 1, 2, 3, 40, 299, 300, 301, 590, 590, 1500, 3599, 3600, 3601, 9000)
TOOK = (None, None, 0.5, 30, 400)


class _Tree:
    """Paths of ids where equal ids are equal prefixes."""

    def __init__(self) -> None:
        self.paths: list[list[int]] = []
        self.last = 0

    def path(self, draw: st.DrawFn) -> list[int]:
        kept: list[int] = []
        if self.paths:
            base = draw(st.sampled_from(self.paths[-3:]))
            kept = base[: draw(st.sampled_from((len(base), len(base), len(base) // 2, max(0, len(base) - 1))))]
        new = draw(st.integers(0, 4))
        found = [*kept, *range(self.last + 1, self.last + 1 + new)]
        self.last += new
        self.paths.append(found)
        return found


def _runs(ids: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for one in ids:
        if runs and runs[-1][0] + runs[-1][1] == one:
            runs[-1][1] += 1
        else:
            runs.append([one, 1])
    return runs


@st.composite
def agent_lines(draw: st.DrawFn, *, requests: int = 8, sessions: int = 2) -> list[str]:
    """A coding-agent trace with blocks of 4 tokens."""
    lines: list[str] = []
    for session in range(draw(st.integers(1, sessions))):
        tree, t = _Tree(), 0.0
        fixed = draw(st.integers(0, 3))
        for _ in range(draw(st.integers(1, requests))):
            ids = tree.path(draw)
            row: dict[str, Any] = {"trace": f"s{session}", "agent": draw(st.sampled_from(("main", "helper"))), "t": t}
            row |= {"model": "m", "input": 4 * len(ids) + draw(st.integers(0, 3)), "output": 7, "blocks": _runs(ids)}
            row |= {"block_size": 4, "tool_tokens": 3 * fixed, "system_tokens": 2 * fixed, "input_types": ["text"]}
            row |= {"output_types": ["text"], "stop": draw(st.sampled_from(("tool_use", "end_turn", "")))}
            lines.append(json.dumps(row | {"api_time": draw(st.sampled_from(TOOK)), "think_time": 0.0, "ttft": None}))
            t += draw(st.sampled_from(GAPS))
    return lines


@st.composite
def mooncake_lines(draw: st.DrawFn, *, requests: int = 10) -> list[str]:
    """A Mooncake trace."""
    tree, t, lines = _Tree(), 0, []
    for _ in range(draw(st.integers(1, requests))):
        ids = tree.path(draw)
        rest = draw(st.sampled_from((0, 0, 1, 511)))
        partial = [draw(st.integers(10_000, 10_002))] if rest else []
        row = {"timestamp": t, "input_length": 512 * len(ids) + rest, "output_length": 3, "hash_ids": [*ids, *partial]}
        lines.append(json.dumps(row))
        t += 1000 * draw(st.sampled_from(GAPS))
    return lines


def traces(requests: int = 8) -> st.SearchStrategy[list[str]]:
    return st.one_of(agent_lines(requests=requests), mooncake_lines(requests=requests))


@dataclass
class Whim(CachingPolicy):
    """Marks and keeps alive at random, by what it sees of the request alone."""

    seed: int = 0
    pings: int = 0
    explicit: bool = False
    seen: list[tuple[str, float]] = field(default_factory=list)

    def plan(self, ask: CacheAsk) -> CachePlan:
        rng = Random(f"{self.seed} {ask.now} {ask.input_tokens} {len(ask.prefixes)}")
        names = [lifetime.name for lifetime in ask.terms.lifetimes]
        count = rng.randint(0, min(ask.terms.slots, len(ask.prefixes)))
        indices = sorted(rng.sample(range(len(ask.prefixes)), count))
        ttls = sorted((rng.choice(names) for _ in indices), key=names.index, reverse=True)
        if not indices:
            return CachePlan(opt_out=ask.terms.opt_out and (self.explicit or rng.random() < 0.5))
        return CachePlan(marks=tuple(Choice(index=index, ttl=ttl) for index, ttl in zip(indices, ttls, strict=True)))

    def sent(self, ask: CacheAsk, plan: CachePlan) -> None:
        self.seen.append(("sent", ask.now))

    def ended(self, ask: CacheAsk, outcome: Outcome) -> None:
        self.seen.append(("ended", outcome.ended_at))

    def held(self, held: Held, now: float) -> KeepAlive | None:
        rng = Random(f"{self.seed} {held.ask.now} {held.pings}")
        if held.pings >= self.pings or rng.random() < 0.2:
            return None
        soon = held.warm.expires_at - 5
        at = rng.choice((soon, soon, soon, now, held.warm.expires_at, now + 7000))
        index = rng.choice((held.index, held.index, rng.randint(0, held.index)))
        return KeepAlive(at=max(now, at), index=index, ttl=rng.choice(held.ask.terms.lifetimes).name)

    def dump(self) -> bytes:
        return b""

    def load(self, data: bytes) -> None: ...


def run(lines: list[str], policy: CachingPolicy, terms: CacheTerms) -> tuple[Trace, Result, list[str]]:
    """The trace, what it cost, and the decisions as JSON lines."""
    trace = parse_trace(lines)
    decisions: list[str] = []
    return trace, simulate(trace, policy, terms, decided=lambda line: decisions.append(json.dumps(line))), decisions
