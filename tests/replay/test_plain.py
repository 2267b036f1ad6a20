"""The simulator and a plain second one agree, line by line: on generated traces, and on pieces of the public ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachespec.replay.compare import policies
from cachespec.replay.vendor import VENDORS

from .plain import ANTHROPIC, OPENAI, IllegalDecision, Plain
from .support import Whim, run, traces

TERMS = VENDORS["anthropic"]
EXPECTED_COST = "cachespec.policies.caching:ExpectedCost"
NAMES = tuple(dict.fromkeys((*policies((), TERMS), EXPECTED_COST)))
some = settings(max_examples=100, deadline=None)


@some
@given(lines=traces(), seed=st.integers(0, 1000), pings=st.integers(0, 3))
def test_anything_legal_is_counted_alike(lines: list[str], seed: int, pings: int) -> None:
    _, result, decisions = run(lines, Whim(seed=seed, pings=pings), TERMS)
    assert Plain(lines).cost(decisions) == pytest.approx(result.cost)


@some
@given(lines=traces(requests=6), name=st.sampled_from(NAMES))
def test_every_policy_is_counted_alike(lines: list[str], name: str) -> None:
    _, result, decisions = run(lines, policies((name,), TERMS)[name], TERMS)
    assert Plain(lines).cost(decisions) == pytest.approx(result.cost)


@some
@given(lines=traces(requests=6), seed=st.integers(0, 1000))
def test_explicit_breakpoints_of_openai(lines: list[str], seed: int) -> None:
    _, result, decisions = run(lines, Whim(seed=seed, pings=1, explicit=True), VENDORS["openai-5.6"])
    assert Plain(lines, lifetimes=OPENAI, exact=True).cost(decisions) == pytest.approx(result.cost)


@some
@given(lines=traces(requests=6))
def test_the_implicit_breakpoint_of_openai(lines: list[str]) -> None:
    terms = VENDORS["openai-5.6"]
    _, result, decisions = run(lines, policies(("caller",), terms)["caller"], terms)
    assert Plain(lines, lifetimes=OPENAI).cost(decisions) == pytest.approx(result.cost)


@some
@given(lines=traces(), seed=st.none() | st.integers(0, 1000), data=st.data())
def test_cutting_a_trace_short_changes_no_request_before(lines: list[str], seed: int | None, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(lines)))

    def requests(part: list[str]) -> list[dict[str, object]]:
        policy = policies((EXPECTED_COST,), TERMS)[EXPECTED_COST] if seed is None else Whim(seed=seed, pings=2)
        return [line for line in map(json.loads, run(part, policy, TERMS)[2]) if "i" in line]

    assert requests(lines)[:cut] == requests(lines[:cut])


@some
@given(lines=traces(), seed=st.integers(0, 1000))
def test_a_tampered_decision_is_seen(lines: list[str], seed: int) -> None:
    _, _, decisions = run(lines, Whim(seed=seed), TERMS)
    line = json.loads(decisions[-1])
    decisions[-1] = json.dumps(line | {"read": line["read"] + 1})
    with pytest.raises(IllegalDecision):
        Plain(lines).cost(decisions)


@pytest.fixture(scope="module")
def pieces(shared_data: Path) -> dict[str, list[str]]:
    """Some whole sessions of the coding agent, and the start of the conversations."""
    found = {}
    for name, count in (("coding_agent", 700), ("conversation", 1_500)):
        with gzip.open(shared_data / "traces" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            found[name] = [line for line, _ in zip(file, range(count), strict=False)]
    return found


def faster(line: str, by: float) -> str:
    row = json.loads(line)
    name = "t" if "t" in row else "timestamp"
    return json.dumps(row | {name: row[name] / by})


@pytest.mark.shared
@pytest.mark.parametrize("trace", ["coding_agent", "conversation"])
@pytest.mark.parametrize("name", [*NAMES, "whim"])
def test_public_traces_are_counted_alike(pieces: dict[str, list[str]], trace: str, name: str) -> None:
    policy = Whim(seed=1, pings=2) if name == "whim" else policies((name,), TERMS)[name]
    _, result, decisions = run(pieces[trace], policy, TERMS)
    assert Plain(pieces[trace], lifetimes=ANTHROPIC).cost(decisions) == pytest.approx(result.cost)


@pytest.mark.shared
@pytest.mark.parametrize("trace", ["coding_agent", "conversation"])
@pytest.mark.parametrize("by", [2, 10])
def test_public_traces_with_shorter_gaps(pieces: dict[str, list[str]], trace: str, by: int) -> None:
    lines = [faster(line, by) for line in pieces[trace]]
    for policy in (Whim(seed=by, pings=1), policies((EXPECTED_COST,), TERMS)[EXPECTED_COST]):
        _, result, decisions = run(lines, policy, TERMS)
        assert Plain(lines).cost(decisions) == pytest.approx(result.cost)


@pytest.mark.shared
def test_sessions_in_another_order(pieces: dict[str, list[str]]) -> None:
    lines = pieces["coding_agent"]
    names = list(dict.fromkeys(json.loads(line)["trace"] for line in lines))
    turned = [line for name in reversed(names) for line in lines if json.loads(line)["trace"] == name]
    assert len(names) > 2
    costs: dict[str, list[float]] = {}
    for order in (lines, turned):
        for name, policy in policies(("previous:1h", EXPECTED_COST), TERMS).items():
            _, result, decisions = run(order, policy, TERMS)
            costs.setdefault(name, []).append(result.cost)
            assert Plain(order).cost(decisions) == pytest.approx(result.cost)
    fixed = costs["previous:1h"]
    assert fixed[0] == pytest.approx(fixed[1])  # one that learns may differ
