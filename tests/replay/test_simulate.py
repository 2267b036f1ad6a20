"""What a policy sees, and when; what it may decide."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cachespec.caching import CacheAsk, CachePlan, Choice, Held, KeepAlive, Outcome
from cachespec.errors import InputError
from cachespec.replay.simulate import SESSIONS_APART_S, simulate
from cachespec.replay.traces import parse_trace
from cachespec.replay.vendor import VENDORS

from .support import Whim, run

TERMS = VENDORS["anthropic"]


def agent(t: float, count: int, *, first: int = 1, trace: str = "a", took: float | None = 5, extra: int = 0) -> str:
    row: dict[str, Any] = {"trace": trace, "t": t, "input": 10 * count + extra, "blocks": [[first, count]], "block_size": 10}
    row |= {"tool_tokens": 8, "system_tokens": 7, "api_time": took, "stop": "tool_use", "output": 3, "model": "m"}
    return json.dumps(row | {"input_types": ["text"]})


class Watched(Whim):
    """Marks the own end for 5m, and writes down all it is told."""

    def __init__(self, keep: int = 0) -> None:
        super().__init__()
        self.keep = keep
        self.asks: list[CacheAsk] = []
        self.told: list[tuple[str, float]] = []
        self.outcomes: list[Outcome] = []

    def plan(self, ask: CacheAsk) -> CachePlan:
        self.asks.append(ask)
        return CachePlan(marks=(Choice(index=len(ask.prefixes) - 1, ttl="5m"),))

    def sent(self, ask: CacheAsk, plan: CachePlan) -> None:
        self.told.append(("sent", ask.now))

    def ended(self, ask: CacheAsk, outcome: Outcome) -> None:
        self.told.append(("ended", outcome.ended_at))
        self.outcomes.append(outcome)

    def held(self, held: Held, now: float) -> KeepAlive | None:
        self.told.append((f"held {held.pings}", now))
        if held.pings >= self.keep:
            return None
        return KeepAlive(at=held.warm.expires_at - 10, index=held.index, ttl=held.warm.ttl)


def test_places_of_a_coding_agent() -> None:
    policy = Watched()
    simulate(parse_trace([agent(0, 3, extra=4), agent(10, 5), agent(20, 4), agent(30, 6, first=40)]), policy, TERMS)
    shown = [[(prefix.kind, prefix.tokens, prefix.warm is not None) for prefix in ask.prefixes] for ask in policy.asks]
    assert shown == [
        [("system", 10, False), ("end", 34, False)],
        [("system", 10, False), ("turn", 30, True), ("end", 50, False)],
        [("system", 10, False), ("turn", 30, True), ("end", 40, False)],
        [("system", 10, False), ("turn", 30, False), ("turn", 40, False), ("turn", 50, False), ("end", 60, False)],
    ]
    keys = [[prefix.key for prefix in ask.prefixes] for ask in policy.asks]
    assert keys[0][-1] == keys[1][1] == keys[2][1]  # an end is the same prefix in the requests that go on from it
    assert not set(keys[3]) & set(keys[2])
    warm = policy.asks[1].prefixes[1].warm
    assert warm is not None
    assert (warm.ttl, warm.ready_at, warm.expires_at) == ("5m", 2.0, 300.0)


def test_places_of_conversations() -> None:
    policy = Watched()
    rows = [
        {"timestamp": 1000 * t, "input_length": n, "hash_ids": ids} for t, n, ids in ((0, 1030, [1, 2, 3]), (5, 1024, [1, 2]))
    ]
    simulate(parse_trace(map(json.dumps, rows)), policy, TERMS)
    first, second = ([(prefix.kind, prefix.tokens) for prefix in ask.prefixes] for ask in policy.asks)
    assert first == [("turn", 512), ("turn", 1024), ("end", 1030)]
    assert second == [("turn", 512), ("end", 1024)]
    assert policy.asks[0].prefixes[1].key == policy.asks[1].prefixes[1].key != policy.asks[0].prefixes[2].key
    assert policy.asks[1].prefixes[1].warm is not None
    assert policy.asks[0].session is None


def test_an_outcome_is_told_at_its_end_and_not_before() -> None:
    policy = Watched()
    simulate(parse_trace([agent(0, 3, took=50), agent(10, 4, took=None), agent(50, 5)]), policy, TERMS)
    assert [told for told in policy.told if "held" not in told[0]] == [
        ("sent", 0), ("sent", 10), ("ended", 12), ("ended", 50), ("sent", 50), ("ended", 55),
    ]  # fmt: skip
    assert policy.outcomes[0] == Outcome(ended_at=12, stop="tool_use", output_tokens=3, read=30, written=10)
    assert policy.asks[0].traffic == ("m",)
    assert (policy.asks[0].input_types, policy.asks[0].session) == (("text",), "a")


def test_keep_alives_follow_each_other_and_stop_for_a_request() -> None:
    policy = Watched(keep=2)
    _, result, decisions = run([agent(0, 3), agent(400, 3), agent(405, 4)], policy, TERMS)
    lines = [json.loads(line) for line in decisions]
    assert [line.get("i", ("ping", line.get("t"))) for line in lines] == [0, ("ping", 290), 1, 2, ("ping", 695), ("ping", 985)]
    assert lines[1] == {"ping": 0, "t": 290, "tokens": 30, "ttl": "5m"}
    assert lines[2]["read"] == 30
    assert (result.pings, result.ping_read) == (3, 30 + 40 + 40)
    held = [told for told in policy.told if "held" in told[0]]
    # The second request ends as the third begins, which reads its entry: what was planned for it is dropped.
    assert held == [("held 0", 5), ("held 1", 290), ("held 0", 405), ("held 0", 410), ("held 1", 695), ("held 2", 985)]


def test_the_next_session_starts_after_all_of_the_one_before() -> None:
    policy = Watched(keep=1)
    simulate(parse_trace([agent(0, 3), agent(7, 3, trace="b")]), policy, TERMS)
    assert [ask.now for ask in policy.asks] == [0, 290 + SESSIONS_APART_S + 7]
    keys = [{prefix.key for prefix in ask.prefixes} for ask in policy.asks]
    assert not keys[0] & keys[1]
    assert policy.asks[1].prefixes[0].warm is None


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (CachePlan(marks=(Choice(index=2, ttl="5m"),)), "mark 2 of 2 after mark -1"),
        (CachePlan(marks=(Choice(index=1, ttl="5m"), Choice(index=0, ttl="5m"))), "mark 0 of 2 after mark 1"),
        (CachePlan(marks=(Choice(index=0, ttl="2m"),)), r"no lifetime '2m' \(there is: 5m, 1h\)"),
        (CachePlan(marks=(Choice(index=0, ttl="5m"), Choice(index=1, ttl="1h"))), "1h after a shorter lifetime"),
        (CachePlan(opt_out=True), "opts out where nothing is written by default"),
    ],
)
def test_an_illegal_plan_is_an_error(plan: CachePlan, message: str) -> None:
    class Wrong(Whim):
        def plan(self, ask: CacheAsk) -> CachePlan:
            return plan

    with pytest.raises(InputError, match=f"policy mine, request 0: {message}"):
        simulate(parse_trace([agent(0, 3)]), Wrong(), TERMS, name="mine")


def test_more_marks_than_there_are_slots() -> None:
    class Greedy(Whim):
        def plan(self, ask: CacheAsk) -> CachePlan:
            return CachePlan(marks=tuple(Choice(index=index, ttl="5m") for index in range(len(ask.prefixes))))

    with pytest.raises(InputError, match="request 3: 5 marks where 4 are allowed"):
        simulate(parse_trace([agent(t, count) for t, count in enumerate((2, 3, 4, 5))]), Greedy(), TERMS)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (KeepAlive(at=1, index=1, ttl="5m"), "at 1 s, decided at 5 s"),
        (KeepAlive(at=float("inf"), index=1, ttl="5m"), "at inf s, decided at 5 s"),
        (KeepAlive(at=9, index=2, ttl="5m"), "index 2"),
        (KeepAlive(at=9, index=1, ttl="x"), "no lifetime 'x'"),
        (KeepAlive(at=9, index=1, ttl="5m"), "10,000 were sent"),
    ],
)
def test_an_illegal_keep_alive_is_an_error(wanted: KeepAlive, message: str) -> None:
    class Wrong(Watched):
        def held(self, held: Held, now: float) -> KeepAlive | None:
            return wanted if now == 5 else KeepAlive(at=now, index=1, ttl="5m")

    with pytest.raises(InputError, match=f"keep-alive of request 0: {message}"):
        simulate(parse_trace([agent(0, 3)]), Wrong(), TERMS)


def test_a_result_adds_up() -> None:
    seen: list[int] = []
    lines = [agent(20 * t, 3 + t, extra=3) for t in range(300)]
    trace = parse_trace(lines)
    result = simulate(trace, Watched(keep=1), TERMS, progress=seen.append)
    assert result.read + result.uncached + sum(result.writes.values()) == result.input_tokens == trace.input_tokens
    assert sum(result.parts.values()) == pytest.approx(result.cost)
    assert result.relative == pytest.approx(result.cost / trace.input_tokens)
    assert sum(tokens for _, tokens, _ in result.curve) == result.input_tokens
    assert sum(read for _, _, read in result.curve) == result.read
    assert seen == sorted(seen)
    assert seen[-1] == 300
