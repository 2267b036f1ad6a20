"""Latency: fitted to what happened, quick to follow a change, back to the prior when nothing was heard for long."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from cachespec.speeds import FORGOTTEN_S, HIGH, MEASURED, STALE_S, SpeedModel, Work

PRIOR = (600.0, 0.03, 0.003, 50.0)


def model() -> SpeedModel:
    return SpeedModel(first=PRIOR, per_token=15.0)


class Server:
    """A backend with a speed of its own and lognormal scatter."""

    def __init__(self, fixed: float, per_input: float, per_output: float, scatter: float = 0.25, seed: int = 1) -> None:
        self.fixed, self.per_input, self.per_output, self.scatter = fixed, per_input, per_output, scatter
        self.draw = random.Random(seed)

    def work(self) -> Work:
        tokens = self.draw.choice([200, 2_000, 20_000])
        return Work(uncached=tokens, cached=self.draw.choice([0, 5_000]), output=self.draw.randint(20, 800))

    def times(self, work: Work) -> tuple[float, float]:
        first = (self.fixed + self.per_input * work.uncached) * self.draw.lognormvariate(0, self.scatter)
        return first, first + self.per_output * work.output * self.draw.lognormvariate(0, self.scatter)


def run(speeds: SpeedModel, server: Server, count: int, now: float = 0.0) -> list[tuple[float, float, float]]:
    """`count` answers one second apart: (actual, expected, high) of each first token."""
    seen = []
    for i in range(count):
        work = server.work()
        ttft, total = server.times(work)
        said = speeds.speed(work, now=now + i)
        seen.append((ttft, said.ttft_ms, said.ttft_high_ms))
        speeds.learn(work, ttft_ms=ttft, total_ms=total, now=now + i)
    return seen


def test_before_anything_happened_it_is_the_prior_and_says_so() -> None:
    said = model().speed(Work(uncached=1000, cached=0, output=100), now=0.0)
    assert math.isclose(said.ttft_ms, 630.0)
    assert math.isclose(said.total_ms, 630.0 + 15.0 * 101)
    assert not said.measured
    assert said.ttft_high_ms == said.ttft_ms  # a prior has no slow answers of its own


def test_speeds_and_their_scatter_are_learned() -> None:
    speeds = model()
    seen = run(speeds, Server(300.0, 0.02, 8.0), 400)
    errors = [math.log(actual / expected) for actual, expected, _ in seen[50:]]
    assert abs(sum(errors) / len(errors)) < 0.1
    late = sum(actual > high for actual, _, high in seen[50:]) / 350
    assert late < 2 * (1 - HIGH)
    assert sum(high / expected for _, expected, high in seen[50:]) / 350 < 2.5
    assert speeds.speed(Work(uncached=1, output=1), now=400.0).measured


def test_a_change_of_speed_is_followed_within_a_dozen_answers() -> None:
    speeds = model()
    run(speeds, Server(300.0, 0.02, 8.0), 200)
    slow = Server(1_500.0, 0.1, 30.0, seed=2)
    seen = run(speeds, slow, 30, now=200.0)
    ratios = [actual / expected for actual, expected, _ in seen[12:]]
    assert 0.5 < sum(ratios) / len(ratios) < 1.6
    fast = Server(300.0, 0.02, 8.0, seed=3)
    seen = run(speeds, fast, 30, now=230.0)
    ratios = [actual / expected for actual, expected, _ in seen[12:]]
    assert 0.5 < sum(ratios) / len(ratios) < 1.6


def test_one_answer_that_hung_does_not_turn_it_over() -> None:
    speeds = model()
    run(speeds, Server(300.0, 0.02, 8.0), 100)
    work = Work(uncached=2_000, output=100)
    before = speeds.speed(work, now=100.0).ttft_ms
    speeds.learn(work, ttft_ms=3_600_000.0, total_ms=3_600_001.0, now=100.0)
    assert speeds.speed(work, now=100.0).ttft_ms < 30 * before
    run(speeds, Server(300.0, 0.02, 8.0, seed=9), 15, now=101.0)
    assert speeds.speed(work, now=116.0).ttft_ms < 3 * before


def test_what_is_known_grows_old() -> None:
    speeds = model()
    run(speeds, Server(30_000.0, 0.02, 8.0), 50)
    work = Work(uncached=100, output=10)
    fresh = speeds.speed(work, now=50.0).ttft_ms
    later = speeds.speed(work, now=50.0 + STALE_S).ttft_ms
    assert fresh > 15_000
    assert later < 0.6 * fresh
    assert speeds.speed(work, now=50.0 + 20 * STALE_S).ttft_ms < 700


def test_of_twenty_answers_one_may_be_any_time_late() -> None:
    """It moves the figures no farther than one does that is just over the 95% figure; a second one is a change."""
    work, figures = Work(uncached=100, output=20), []
    for late in (600.0, 20_000.0, 1e9):
        speeds = model()
        for i in range(10):
            speeds.learn(work, ttft_ms=300.0 + 10 * (i % 3), total_ms=600.0, now=float(i))
        before = speeds.speed(work, now=10.0)
        assert before.ttft_high_ms < 600
        speeds.learn(work, ttft_ms=late, total_ms=late + 300, now=10.0)
        after = speeds.speed(work, now=10.0)
        figures.append((after.ttft_ms, after.ttft_high_ms))
        assert after.ttft_high_ms < 1.5 * before.ttft_high_ms
        assert after.total_high_ms < 1.5 * before.total_high_ms
    assert figures[0] == figures[1] == figures[2]
    speeds.learn(work, ttft_ms=20_000.0, total_ms=20_300.0, now=11.0)
    assert speeds.speed(work, now=11.0).ttft_high_ms > 3_000


def test_a_backend_that_was_slow_is_tried_again_and_believed_again() -> None:
    """As long as it was not heard of, the slow figure leans back as the mean does; then it is measured anew."""
    speeds, work = model(), Work(uncached=100, output=20)
    for i in range(10):
        speeds.learn(work, ttft_ms=20_000.0 * (1 + i % 2), total_ms=41_000.0, now=float(i))
    ages = [speeds.speed(work, now=9.0 + n * STALE_S) for n in range(12)]
    highs = [said.ttft_high_ms for said in ages]
    assert highs == sorted(highs, reverse=True)
    assert highs[0] > 20_000
    assert highs[11] < 800
    assert [said.measured for said in ages] == [n * STALE_S <= FORGOTTEN_S for n in range(12)]
    later = 9.0 + 11 * STALE_S
    speeds.learn(work, ttft_ms=300.0, total_ms=600.0, now=later)
    said = speeds.speed(work, now=later)
    assert said.ttft_high_ms < 1_000
    assert (said.answers, said.measured) == (1, False)


def test_a_backend_that_keeps_a_limit_keeps_it_when_nobody_asked_it_for_long() -> None:
    speeds, work = model(), Work(uncached=100, output=20)
    for i in range(10):
        speeds.learn(work, ttft_ms=300.0, total_ms=600.0, now=float(i))
    for minutes in range(0, 6 * 60, 5):
        said = speeds.speed(work, now=9.0 + 60 * minutes)
        assert said.ttft_ms <= said.ttft_high_ms < 700  # the prior alone says 603


def test_a_clock_that_was_set_back_does_not_keep_it_fresh() -> None:
    speeds = model()
    run(speeds, Server(30_000.0, 0.02, 8.0), 20, now=1e9)
    assert speeds.speed(Work(uncached=100, output=10), now=1e6).ttft_ms < 700


def test_numbers_that_no_answers_made_are_left_aside() -> None:
    good = json.loads(json.dumps(model().to_dict()))
    huge: dict[str, list[Any]] = {
        "variance": [1e7, 1e308],
        "weights": [[1e308] * 4, [1e10] * 4],
        "level": [-1e300],
        "witnesses": [[1e300], [0.0] * 10_000],
        "spread": [[[1e308] * 4] * 4, [[-1e300] * 4] * 4],
    }
    bad = [{**good, "first": {**good["first"], name: value}} for name, values in huge.items() for value in values]
    for data in (*bad, {**good, "answers": 10**400}, {**good, "answers": -5}, {**good, "seen_at": math.inf}):
        speeds = model()
        speeds.load(data)
        assert speeds.to_dict() == model().to_dict()
    crooked = [[1e4 if i == j else -1e9 for j in range(4)] for i in range(4)]  # within bounds, and the spread of nothing
    speeds = model()
    speeds.load({**good, "first": {**good["first"], "spread": crooked}})
    run(speeds, Server(300.0, 0.02, 8.0), 50)
    assert 100 < speeds.speed(Work(uncached=2_000, output=10), now=50.0).ttft_ms < 1_000


@pytest.mark.parametrize("own", [None, "measured"])
def test_whatever_answers_teach_it_stays_a_number_that_can_be_read_again(own: str | None) -> None:
    draw, extremes = random.Random(7), (0.0, 1e-300, 1.0, 1e6, 1e300)
    speeds, now = SpeedModel(own=own), 0.0
    for _ in range(3_000):
        tokens = [draw.choice((0, 1, 10_000, 10**7)) for _ in range(3)]
        first, rest = draw.choice(extremes), draw.choice(extremes)
        work = Work(uncached=tokens[0], cached=tokens[1], output=tokens[2], own_first_ms=first, own_rest_ms=rest)
        first = draw.choice(extremes)
        speeds.learn(work, ttft_ms=first, total_ms=first + draw.choice(extremes), now=now)
        said = speeds.speed(work, now=now)
        assert all(math.isfinite(v) for v in (said.ttft_ms, said.total_ms, said.ttft_high_ms, said.total_high_ms))
        now += draw.choice((0.0, 1.0, 1_000.0, -10.0))
    again = SpeedModel(own=own)
    again.load(json.loads(json.dumps(speeds.to_dict(), allow_nan=False)))
    assert again.to_dict() == speeds.to_dict()


def test_load_makes_it_slower() -> None:
    speeds = model()
    draw = random.Random(4)
    for i in range(300):
        load = draw.randint(0, 8)
        speeds.learn(
            Work(uncached=500, output=50, load=load), ttft_ms=200.0 + 400.0 * load, total_ms=900.0 + 400.0 * load, now=i
        )
    calm, busy = (speeds.speed(Work(uncached=500, output=50, load=n), now=300.0).ttft_ms for n in (0, 8))
    assert busy > 4 * calm


def test_what_could_not_be_timed_teaches_nothing() -> None:
    speeds = model()
    for ttft, total in ((None, 5.0), (-1.0, 5.0), (6.0, 5.0), (1.0, math.inf), (math.nan, math.nan)):
        speeds.learn(Work(uncached=1, output=1), ttft_ms=ttft, total_ms=total, now=0.0)
    assert speeds.answers == 0
    assert MEASURED > 0


def test_what_was_learned_survives_a_restart_and_garbage_does_not() -> None:
    speeds = model()
    run(speeds, Server(300.0, 0.02, 8.0), 50)
    again = model()
    again.load(json.loads(json.dumps(speeds.to_dict())))
    work = Work(uncached=700, cached=30, output=40, load=2)
    assert again.speed(work, now=60.0) == speeds.speed(work, now=60.0)
    good = speeds.to_dict()
    wrong: tuple[dict[str, Any], ...] = ({"answers": "x"}, {"first": {}}, {"rest": {**good["rest"], "variance": -1}})
    garbage: list[Any] = [None, [], {}, *({**good, **part} for part in wrong)]
    for bad in garbage:
        other = model()
        other.load(bad)
        assert other.answers == 0
        assert other.speed(work, now=60.0) == model().speed(work, now=60.0)
