"""The default caching policy on recorded traffic, from a cold start: what it has to reach, and what it may not lose."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from cachespec.policies.caching import ExpectedCost
from cachespec.replay.fixed import fixed_policies
from cachespec.replay.simulate import simulate
from cachespec.replay.traces import Trace, read_trace
from cachespec.replay.vendor import VENDORS

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
CODING, CONVERSATION = "coding_agent.jsonl.gz", "conversation.jsonl.gz"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is absent"),
    pytest.mark.timeout(900),
]


@cache
def trace(name: str) -> Trace:
    return read_trace(str(TRACES / name))


def every(whole: Trace, step: int) -> Trace:
    """Every so manieth session."""
    return replace(whole, sessions=whole.sessions[::step])


def first(whole: Trace, count: int) -> Trace:
    """The first requests of a trace that is one session."""
    (session,) = whole.sessions
    return replace(whole, sessions=(replace(session, requests=session.requests[:count]),))


def faster(whole: Trace, by: float) -> Trace:
    sessions = tuple(
        replace(s, requests=tuple(replace(r, t=r.t / by, ended=r.t / by + r.ended - r.t) for r in s.requests))
        for s in whole.sessions
    )
    return replace(whole, sessions=sessions)


def test_a_coding_agent_costs_less_than_was_asked_for() -> None:
    assert simulate(every(trace(CODING), 3), ExpectedCost(), VENDORS["anthropic"], name="x").relative <= 0.172


def test_conversations_cost_less_than_was_asked_for() -> None:
    assert simulate(trace(CONVERSATION), ExpectedCost(), VENDORS["anthropic"], name="x").relative <= 0.885


@pytest.mark.parametrize(
    ("name", "vendor", "by", "fixed"),
    [
        (CODING, "anthropic", 1, ("previous:1h", "previous:5m")),
        (CODING, "openai-5.6", 1, ("previous:30m", "caller")),
        (CONVERSATION, "anthropic", 1, ("quarters:5m",)),
        (CONVERSATION, "anthropic", 10, ("quarters:5m",)),
        (CONVERSATION, "openai-5.6", 1, ("quarters:30m", "caller")),
    ],
)
def test_no_fixed_choice_is_much_better(name: str, vendor: str, by: int, fixed: tuple[str, ...]) -> None:
    whole = every(trace(name), 5) if name == CODING else first(trace(name), 5000)
    asked = faster(whole, by) if by > 1 else whole
    terms = VENDORS[vendor]
    ours = simulate(asked, ExpectedCost(), terms, name="x").relative
    for one in fixed:
        theirs = simulate(asked, fixed_policies(terms)[one], terms, name=one).relative
        assert ours <= 1.01 * theirs + 500_000 / asked.input_tokens
        assert ours < theirs or by > 1
