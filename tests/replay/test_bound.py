"""No policy is below the bound: not any plan of a small trace, nor any policy on a larger one."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachespec.caching import CacheAsk, CachePlan, Choice
from cachespec.replay.bound import bounds
from cachespec.replay.compare import policies
from cachespec.replay.fixed import fixed_policies
from cachespec.replay.simulate import simulate
from cachespec.replay.traces import parse_trace, read_trace
from cachespec.replay.vendor import VENDORS

from .support import Whim, run, traces

TERMS = VENDORS["anthropic"]
EXPECTED_COST = "cachespec.policies.caching:ExpectedCost"
ALMOST = 1e-9
some = settings(max_examples=60, deadline=None)


@some
@given(lines=traces(requests=10), seed=st.integers(0, 10_000), vendor=st.sampled_from(sorted(VENDORS)))
def test_no_policy_is_below(lines: list[str], seed: int, vendor: str) -> None:
    terms = VENDORS[vendor]
    trace, result, _ = run(lines, Whim(seed=seed), terms)
    least = bounds(trace, terms)
    assert least.with_pings <= least.without_pings + ALMOST
    assert least.without_pings <= 1 + ALMOST
    assert result.relative >= least.without_pings - ALMOST
    for name, policy in policies((*fixed_policies(terms), EXPECTED_COST), terms).items():
        found = simulate(trace, policy, terms, name=name)
        assert found.relative >= (least.with_pings if found.pings else least.without_pings) - ALMOST


@some
@given(lines=traces(requests=10), seed=st.integers(0, 10_000), pings=st.integers(1, 4))
def test_no_policy_with_keep_alives_is_below(lines: list[str], seed: int, pings: int) -> None:
    trace, result, _ = run(lines, Whim(seed=seed, pings=pings), TERMS)
    assert result.relative >= bounds(trace, TERMS).with_pings - ALMOST


class Script(Whim):
    """Plans by number: of the plans that are legal for its places, the one that is told."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self.numbers = list(reversed(numbers))

    def plan(self, ask: CacheAsk) -> CachePlan:
        plans = legal_plans(len(ask.prefixes))
        return plans[self.numbers.pop() % len(plans)]


def legal_plans(places: int) -> list[CachePlan]:
    """Every plan with up to two marks."""
    plans = [CachePlan()]
    for index in range(places):
        for ttl in ("1h", "5m"):
            plans.append(CachePlan(marks=(Choice(index=index, ttl=ttl),)))
            plans += [
                CachePlan(marks=(Choice(index=before, ttl=longer), Choice(index=index, ttl=ttl)))
                for before in range(index)
                for longer in ({"1h": ["1h"], "5m": ["1h", "5m"]}[ttl])
            ]
    return plans


@settings(max_examples=15, deadline=None)
@given(lines=traces(requests=3).filter(lambda lines: len(lines) <= 3))
def test_no_plan_of_a_small_trace_is_below(lines: list[str]) -> None:
    trace = parse_trace(lines)
    least = bounds(trace, TERMS).without_pings
    for numbers in product(range(12), repeat=len(lines)):
        assert simulate(trace, Script(numbers), TERMS).relative >= least - ALMOST


def chat(t: float, *ids: int) -> str:
    return f'{{"timestamp": {1000 * t}, "input_length": {512 * len(ids)}, "hash_ids": {list(ids)}}}'


@pytest.mark.parametrize(
    ("lines", "cost", "with_pings"),
    [
        ([chat(0, 1)], 1, 1),
        ([chat(0, 1), chat(100, 1)], 1.25 + 0.1, 1.35),
        ([chat(0, 1), chat(400, 1)], 2.0, 1.25 + 0.1 + 0.1),
        ([chat(0, 1), chat(10, 1, 2), chat(3000, 1, 2)], (1.25 + 0.1 + 0.1) + (2.0), (1.25 + 0.1 + 0.1) + 2.0),
        ([chat(0, 1), chat(9000, 1)], 2.0, 2.0),
    ],
)
def test_counted_by_hand(lines: list[str], cost: float, with_pings: float) -> None:
    trace = parse_trace(lines)
    least, blocks = bounds(trace, TERMS), trace.input_tokens / 512
    assert least.without_pings == pytest.approx(cost / blocks)
    assert least.with_pings == pytest.approx(with_pings / blocks)


def test_a_later_mark_keeps_what_was_written_for_less() -> None:
    """Why a block's lifetime is not the one it was paid for: here a policy reaches what such a bound would forbid."""
    lines = [chat(0, *range(1, 11)), chat(10, *range(1, 11), 20), chat(3000, *range(1, 11), 20, 21)]

    class Late(Whim):
        def plan(self, ask: CacheAsk) -> CachePlan:
            return CachePlan(marks=(Choice(index=len(ask.prefixes) - 1, ttl="1h" if len(ask.prefixes) == 11 else "5m"),))

    trace, result, _ = run(lines, Late(), TERMS)
    paid_for_an_hour = 10 * (2.0 + 0.1 + 0.1)
    reached = 10 * (1.25 + 0.1 + 0.1) + 2.0 + 0.1 + 1.25
    assert result.cost / 512 == pytest.approx(reached)
    assert reached < paid_for_an_hour
    assert bounds(trace, TERMS).without_pings <= result.relative


@pytest.mark.shared
@pytest.mark.parametrize(("name", "bound", "with_pings"), [("coding_agent", 0.1496, 0.1452), ("conversation", 0.7338, 0.7114)])
def test_public_traces(shared_data: Path, name: str, bound: float, with_pings: float) -> None:
    least = bounds(read_trace(str(shared_data / "traces" / f"{name}.jsonl.gz")), TERMS)
    assert least.without_pings == pytest.approx(bound, abs=5e-5)
    assert least.with_pings == pytest.approx(with_pings, abs=5e-5)
