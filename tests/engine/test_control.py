"""Cost tables, calibration, estimates of acceptance, and the control that ties drafters to policies."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.markov import MarkovRuntime, random_logits
from tests.engine.simulate import FLAT, GREEDY, STEEP, UNEVEN, Clock, PaperDrafter, play, table

from cachespec.engine.accounts import Account, Accounts, AnswerLengths, Outcome, Plan
from cachespec.engine.control import ANCHOR_EVERY, SpeculationControl
from cachespec.engine.costs import ANCHORS, CalibrationStore, CostModel, cache_folder, calibrate
from cachespec.engine.drafters.base import Draft
from cachespec.engine.drafters.hybrid import HybridDrafter
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.engine.estimates import DrafterEstimate, RequestEstimate
from cachespec.engine.runtimes.base import Span
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import Choice, CostTable, Step
from cachespec.errors import InputError
from cachespec.policies.acceptance import Fixed, Goodput, Never


def test_costs_between_and_beyond_measured_points() -> None:
    costs = CostTable({1: {1: 1.0, 3: 2.0, 9: 2.6}, 8: {8: 2.0, 24: 6.0}})
    for batch, tokens, seconds in (
        (1, 1, 1.0),
        (1, 2, 1.5),
        (1, 3, 2.0),
        (1, 6, 2.3),
        (1, 12, 2.9),
        (8, 16, 4.0),
        (8, 32, 8.0),
    ):
        assert costs.seconds(batch, tokens) == pytest.approx(seconds)
    # Between batch sizes at the same tokens a sequence: three each.
    assert costs.seconds(4, 12) == pytest.approx(2.0 + (6.0 - 2.0) * 3 / 7)
    assert costs.seconds(16, 24) == pytest.approx(6.0)
    assert CostTable({2: {2: 1.0}}).seconds(1, 40) == 1.0
    assert CostTable({1: {1: 1.0, 2: 3.0, 4: 2.0}}).seconds(1, 40) == 2.0  # what falls at the end does not fall for ever
    wrong: list[dict[int, dict[int, float]]] = [
        {},
        {1: {}},
        {0: {1: 1.0}},
        {2: {1: 1.0}},
        {1: {1: 0.0}},
        {1: {1: float("nan")}},
    ]
    for points in wrong:
        with pytest.raises(InputError):
            CostTable(points)


ROWS = st.dictionaries(st.integers(1, 40), st.floats(0.1, 9), min_size=1, max_size=6)


@given(st.dictionaries(st.sampled_from([1, 2, 4, 7]), ROWS, min_size=1), st.integers(1, 9), st.integers(1, 60))
def test_no_call_with_drafts_costs_less_than_the_cheapest(rows: dict[int, dict[int, float]], batch: int, most: int) -> None:
    costs = CostTable({b: {b - 1 + n: s for n, s in row.items()} for b, row in rows.items()})
    least = min(costs.seconds(batch, batch + n) for n in range(1, most + 1))
    assert costs.cheapest(batch, most) == pytest.approx(least)


class Asked(Goodput):
    """Counts how often it is asked."""

    asked: ClassVar[list[int]] = []

    def choose(self, step: Step) -> Sequence[Choice]:
        self.asked.append(len(step.candidates))
        return super().choose(step)


def test_why_nothing_can_be_drafted_is_asked_once() -> None:
    policy = Asked(min_output_tokens=10)
    Asked.asked.clear()
    control = SpeculationControl(policy, SuffixDrafter(), costs=CostModel(table(FLAT)), max_tokens=64)
    tracks = [control.open([1, 2, 3], sampling=GREEDY, namespace=None, output=n) for n in (5, 50)]
    for i in range(6):
        plans = control.plan(tracks, [40, 40])
        assert [(plan.choice.length, plan.choice.reason) for plan in plans] == [(0, "short_output"), (0, "no_gain")]
        control.settle(tracks, plans, [Outcome(0, [10 + i]), Outcome(0, [20 + i])], 0.0229)
    assert Asked.asked == [2]
    control.accept(tracks[1], [1, 2])  # now there is something to draft
    (plan,) = control.plan(tracks[1:], [40])
    assert plan.draft.tokens[:1] == (3,) or plan.choice.reason == "no_gain"
    assert Asked.asked == [2, 1]


class TickingRuntime(MarkovRuntime):
    """Each call takes two seconds and a tenth for each token, on a clock of its own."""

    def __init__(self, *, sequences: int = 4, context: int = 4096, width: int = 512, cuts: bool = True) -> None:
        super().__init__(random_logits(16), 16, sequences=sequences, context=context, width=width, cuts=cuts)
        self.clock = Clock()

    def evaluate(self, spans: Sequence[Span]) -> list[int]:
        self.clock.now += 2 + 0.1 * sum(len(span.tokens) for span in spans)
        return super().evaluate(spans)


def test_calibration_measures_every_batch_and_leaves_no_trace() -> None:
    runtime = TickingRuntime()
    costs = calibrate(runtime, clock=runtime.clock, seconds=1e9)
    assert list(costs.points) == [1, 2, 4]
    assert list(costs.points[1]) == [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33]
    assert costs.seconds(1, 1) == pytest.approx(2.1)
    assert costs.seconds(4, 20) == pytest.approx(4.0)
    assert runtime.held == [[], [], [], []]
    assert costs.assumed == frozenset()


def test_a_calibration_without_time_measures_what_matters_and_the_next_one_the_rest() -> None:
    runtime = TickingRuntime()
    every = calibrate(runtime, clock=runtime.clock, seconds=1e9)
    short = calibrate(runtime, clock=runtime.clock, seconds=0.0)
    assert short.measured == {1: {1: pytest.approx(2.1), 8: pytest.approx(2.8)}}
    assert list(short.points) == [1, 2, 4]
    assert {b: list(row) for b, row in short.points.items()} == {b: list(row) for b, row in every.points.items()}
    assert short.points[4][4] == pytest.approx(2.4), "as many tokens in all cost as much"
    assert short.points[1][16] == pytest.approx(2 * 2.8), "in proportion beyond what was measured"
    before = runtime.clock.now
    longer = calibrate(runtime, clock=runtime.clock, seconds=120.0, known=short)
    assert 120 < runtime.clock.now - before < 140
    assert 2 < len(longer.measured[1]) < 15
    assert {4, 2} <= longer.measured.keys(), "plain decoding of every batch size comes early"
    calls = len(runtime.calls)
    assert calibrate(runtime, clock=runtime.clock, seconds=1e9, known=every).points == every.points
    assert len(runtime.calls) == calls, "what is known is not measured again"
    assert runtime.held == [[], [], [], []]


def test_calibration_keeps_to_what_a_runtime_takes() -> None:
    narrow = calibrate(TickingRuntime(width=5, context=40, sequences=2))
    assert max(narrow.points[1]) == 5
    assert max(narrow.points[2]) == 4
    stiff = TickingRuntime(cuts=False)
    with pytest.raises(InputError, match="rolled back"):
        calibrate(stiff)
    assert stiff.held == [[], [], [], []]


def test_saved_calibrations_are_whole_and_belong_to_their_settings(tmp_path: Path) -> None:
    store, costs = CalibrationStore(tmp_path / "deep"), table(FLAT)
    settings = {"threads": 2, "context": 4096, "kernel": None}
    assert store.load(b"model", settings) is None
    assert store.save(b"model", settings, costs)
    found = store.load(b"model", settings)
    assert found is not None
    assert found.points == costs.points
    assert store.load(b"other", settings) is None
    assert store.load(b"model", settings | {"threads": 1}) is None
    (path,) = (tmp_path / "deep").iterdir()
    text = path.read_text()
    saved = json.loads(text)
    broken = [
        text[:40],
        "",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps(saved | {"version": 0}),
        json.dumps(saved | {"identity": "x"}),
    ]
    wrong: list[Any] = [{}, {"1": {}}, {"1": {"1": -1}}, {"x": {"1": 1}}, {"1": [1]}, None]
    broken += [json.dumps(saved | {"points": points}) for points in wrong]
    for content in broken:
        path.write_text(content)
        assert store.load(b"model", settings) is None
    path.write_bytes(b"\xff\xfe\x00")
    assert store.load(b"model", settings) is None
    assert store.save(b"model", settings, costs)
    assert store.load(b"model", settings) is not None
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not CalibrationStore(blocked).save(b"model", settings, costs)


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "cachespec" / "calibration"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder().parts[-4:] == ("Library", "Caches", "cachespec", "calibration")


def test_a_busy_machine_does_not_look_like_drafts_that_do_not_pay() -> None:
    model = CostModel(table(STEEP))
    for _ in range(100):
        model.observe(1, 1, 3 * 0.0075)
    assert model.speed == pytest.approx(3.0, rel=0.01)
    assert model.table.seconds(1, 8) == pytest.approx(0.0553)
    for _ in range(200):
        model.observe(1, 8, 0.0553)  # quick again, while only such steps are made
    assert model.unanchored == 200
    for _ in range(ANCHORS):
        model.observe(1, 1, 0.0075)
    assert model.unanchored == 0
    for _ in range(50):
        model.observe(1, 1, 0.0075)
    assert model.speed == pytest.approx(1.0, rel=0.05)
    assert model.table.seconds(1, 8) == pytest.approx(0.0553, rel=0.6)
    model.observe(1, 8, 1000.0)  # a page fault
    assert model.table.seconds(1, 8) < 0.0553 * 1.7


def test_acceptance_is_accepted_over_accepted_and_rejected() -> None:
    """Not accepted over drafted, which reads 0.16, 0.50 and 0.84 for these at length 6."""
    rng = random.Random(0)
    for true in (0.5, 0.8, 0.95):
        overall = DrafterEstimate()
        request = RequestEstimate(overall)
        assert overall.acceptance is request.acceptance is None
        for _ in range(3000):
            for position in range(6):
                right = rng.random() < true
                request.score(position, 0.9, right)
                if not right:
                    break
        assert overall.acceptance == pytest.approx(true, abs=0.04)
        assert overall.chance(0.9) == pytest.approx(true, abs=0.04)
        tried = [position[0] for position in overall.positions]
        assert tried == sorted(tried, reverse=True)
        assert overall.positions[0][1] == tried[1]


def test_confidence_is_calibrated_and_each_request_has_its_own_level() -> None:
    rng = random.Random(1)
    drafter = DrafterEstimate()
    for _ in range(4000):  # says 0.95 and 0.35, is right in 0.7 and 0.2 of cases
        request = RequestEstimate(drafter)
        for confidence, true in ((0.95, 0.7), (0.35, 0.2)):
            request.score(0, confidence, rng.random() < true)
    assert drafter.chance(0.95) == pytest.approx(0.7, abs=0.06)
    assert drafter.chance(0.35) == pytest.approx(0.2, abs=0.06)
    copying, free = RequestEstimate(drafter), RequestEstimate(drafter)
    for _ in range(15):
        copying.score(0, 0.95, True)
        free.score(0, 0.95, rng.random() < 0.2)
    assert copying.chances([0.95])[0] > 0.85
    assert free.chances([0.95])[0] < 0.45
    assert len(free.chances([0.35] * 20)) < 6  # what hardly survives is left out
    assert max(copying.chances([1.0])) <= 0.995
    assert RequestEstimate(DrafterEstimate()).blind(3) == (0.7,) * 3


def drive(control: SpeculationControl, good: Sequence[bool], steps: int, seconds: float = 0.02) -> list[int]:
    """Decode one request; the lengths of its drafts."""
    track = control.open([0], sampling=GREEDY, namespace=None, output=10_000)
    lengths = []
    for _ in range(steps):
        (plan,) = control.plan([track], [1000])
        draft = plan.draft.tokens
        accepted = next((i for i, token in enumerate(draft) if not token), len(draft))
        control.settle([track], [plan], [Outcome(accepted, [1] * (accepted + 1))], seconds)
        lengths.append(len(draft))
    control.close(track, learn=True)
    return lengths


def test_shadow_scores_switch_it_on_without_an_experiment() -> None:
    good, clock = [True] * 5000, Clock()
    drafter = PaperDrafter(good, lambda at: 0.75, clock=clock)
    control = SpeculationControl(Goodput(), drafter, costs=CostModel(table(STEEP)), max_tokens=64, clock=clock)
    lengths = drive(control, good, 100)
    start = next(i for i, length in enumerate(lengths) if length)
    assert 5 < start < 60  # at first it does not pay for what is known; what comes proves the drafts right
    assert min(lengths[start + 3 : -1]) > 8
    stats = control.stats()
    assert stats.reasons["no_gain"] >= start
    paper = stats.sources["paper"]
    assert paper.acceptance == 1.0
    assert paper.drafted == paper.accepted == sum(lengths)
    assert paper.positions[0][0] > paper.steps  # shadow drafts among them
    assert stats.emitted == sum(lengths) + 100
    assert stats.goodput == pytest.approx(stats.emitted / 2.0)
    assert SpeculationControl(Never(), None, costs=None, max_tokens=1).stats().goodput is None


def test_plain_decoding_is_measured_now_and_then() -> None:
    good, clock = [True] * 50_000, Clock()
    drafter = PaperDrafter(good, lambda at: 0.95, clock=clock)
    control = SpeculationControl(Goodput(), drafter, costs=CostModel(table(FLAT)), max_tokens=64, clock=clock)
    lengths = drive(control, good, 1500)
    assert lengths.count(0) == 2 * ANCHORS
    assert lengths.index(0) == ANCHOR_EVERY
    assert control.stats().reasons["eval_required"] == 2 * ANCHORS


def test_a_draft_model_is_timed_and_probed() -> None:
    good, clock = [False] * 5000, Clock()
    drafter = PaperDrafter(good, lambda at: 0.75, clock=clock, draft_s=0.004)
    control = SpeculationControl(Goodput(), drafter, costs=CostModel(table(STEEP)), max_tokens=64, clock=clock)
    drive(control, good, 3000, 0.0075)
    stats = control.stats()
    assert 1 <= stats.reasons["eval_required"] < 30
    assert stats.sources["paper"].draft_s == pytest.approx(drafter.drafted_s)
    assert stats.probe_s <= 0.005 * stats.seconds * 1.02
    assert stats.sources["paper"].acceptance == 0.0


def test_reading_the_prompt_is_no_part_of_drafting() -> None:
    """A draft model of a twentieth of the target reads a prompt for as long as fifty plain steps. Over a long answer that pays,
    and it goes on drafting; over a short one it does not begin."""
    each = table(FLAT).seconds(1, 1)
    long = play(Goodput(), table(FLAT), lambda at: 0.9, tokens=600, requests=4, draft_s=each / 20, prompt=500, read_s=each / 10)
    assert long.plain / long.seconds > 2.0
    assert sum(n > 0 for n in long.lengths) > 0.9 * len(long.lengths)
    short = play(
        Goodput(), table(FLAT), lambda at: 0.9, tokens=24, requests=200, draft_s=each / 20, prompt=500, read_s=each / 10
    )
    assert short.plain / short.seconds > 0.98
    tried = sum(n > 0 for n in short.lengths)
    assert 0 < tried < 100  # the first answer finds out


def test_behind_long_prompts_a_draft_model_is_tried_again_within_the_same_budget() -> None:
    """Reading takes as long as 17 plain steps, and of a probe without it four are saved up for at most."""
    truth, tokens = table(FLAT), 300

    def late(at: int) -> float:
        return 0.02 if at < 12 * tokens else 0.9

    reading: dict[str, Any] = {"prompt": 2000, "read_s": 2e-4, "draft_s": 0.002, "tokens": tokens}
    bad = play(Goodput(), truth, lambda at: 0.02, requests=60, **reading)
    assert 0.3 * 0.005 * bad.seconds < bad.probe_s <= 0.005 * bad.seconds * 1.02
    assert bad.plain / bad.seconds > 0.98
    good = play(Goodput(), truth, late, requests=40, **reading)
    assert sum(n > 0 for n in good.lengths[-200:]) > 190
    assert good.plain / good.seconds > 1.5


def test_what_is_read_is_paid_for_by_the_tokens_that_follow_and_by_the_probes_budget_where_it_was_a_probe() -> None:
    clock, costs = Clock(), table(FLAT)
    drafter = PaperDrafter([False] * 500, lambda at: 0.9, clock=clock, draft_s=0.002, prompt=100, read_s=1e-3)
    control = SpeculationControl(Goodput(max_length=1), drafter, costs=CostModel(costs), max_tokens=64, clock=clock)
    seen = control.open([0], sampling=GREEDY, namespace=None, output=200)
    control.accept(seen, [1] * 101)
    control.close(seen, learn=True)
    track = control.open([0], sampling=GREEDY, namespace=None, output=200)
    (plan,) = control.plan([track], [200])
    assert (plan.choice.reason, plan.choice.length) == ("gain", 1)
    took = 0.1 + 0.002  # what a token takes is not known yet, and taken for what one takes to be read
    assert plan.reading_s == pytest.approx(took * 100 / 101)
    assert track.left == 101
    before = track.credit
    assert before is not None
    control.settle([track], [plan], [Outcome(0, [1])], costs.seconds(1, 2))
    assert track.credit is not None
    spent = before - track.credit
    assert spent == pytest.approx(costs.seconds(1, 2) - 1.01 * costs.seconds(1, 1) + plan.reading_s / 101, abs=2e-4)
    assert track.owed == pytest.approx(plan.reading_s * 100 / 101)
    for left in range(101, 0, -1):
        control.settle([track], [replace(plan, draft=Draft(source=""), reading_s=0.0)], [Outcome(0, [1])], 0.02)
        track.left = left - 1
    assert track.owed == pytest.approx(0.0, abs=1e-9)
    assert control.stats().probe_s == 0
    other = control.open([0], sampling=GREEDY, namespace=None, output=101)
    probe = Choice(length=1, reason="eval_required")
    control.step([other], [Draft(source="paper", pending=True)], [100])
    owed, before = other.owed, other.credit
    control.settle([other], [replace(plan, choice=probe, draft=Draft(source=""))], [Outcome(0, [1])], 0.02)
    assert (other.owed, other.credit) == (owed, before)
    assert control.stats().probe_s == plan.reading_s


@pytest.mark.parametrize("acceptance", [0.6, 0.9])
@pytest.mark.parametrize(
    ("answers", "prompt"),
    [([20] * 60, 2000), ([50] * 40, 6000), ([10, 35, 60, 85, 100, 20] * 10, 2000)],
    ids=lambda v: str(v)[:12],
)
def test_what_is_read_is_shared_by_as_many_tokens_as_answers_have_and_not_by_their_limit(
    answers: list[int], prompt: int, acceptance: float
) -> None:
    """Reading takes as long as 24 plain steps, or 73."""
    reading: dict[str, Any] = {"draft_s": 0.005, "prompt": prompt, "read_s": 5e-4}
    short = play(Goodput(), table(UNEVEN), lambda at: acceptance, answers=answers, limit=4096, **reading)
    assert short.plain / short.seconds > 0.98


def test_behind_long_prompts_it_begins_late_where_only_short_answers_were_seen_but_it_does() -> None:
    reading: dict[str, Any] = {"draft_s": 0.005, "prompt": 2000, "read_s": 5e-4}
    long = play(Goodput(), table(UNEVEN), lambda at: 0.9, answers=[20] * 10 + [1500] * 3, limit=4096, **reading)
    assert sum(long.lengths[:200]) == 0
    assert long.plain / long.seconds > 1.6


def test_answers_that_suddenly_are_short_do_not_lose_what_is_read_for_them_again_and_again() -> None:
    reading: dict[str, Any] = {"draft_s": 0.005, "prompt": 2000, "read_s": 5e-4}
    answers = [400] * 16 + [20] * 12
    played = play(Goodput(), table(UNEVEN), lambda at: 0.9, answers=answers, limit=4096, **reading)
    before = play(Goodput(), table(UNEVEN), lambda at: 0.9, answers=answers[:16], limit=4096, **reading)
    lost = (played.seconds - before.seconds) - (played.plain - before.plain)
    assert 0 < lost < 4 * 2000 * 5e-4  # of twelve


def test_a_debt_is_what_was_read_and_not_paid_and_who_reads_next_takes_it_over() -> None:
    accounts = Accounts(CostModel(table(FLAT)))
    gain = Choice(length=1, reason="gain")
    plan = Plan(draft=Draft(source="model"), choice=gain, computed="model", reading_s=1.0)
    first, next_, copying = Account(), Account(), Account()
    first.emitted = 100
    accounts.end(first)
    assert accounts.debt_s == 0  # nothing was read
    accounts.begin([first, next_, copying], [500, 500, 30])
    assert [account.left for account in (first, next_, copying)] == [100, 100, 30]
    accounts.settle([first], [plan], [Outcome(0, [1])])
    first.emitted += 1
    assert first.owed == pytest.approx(0.99)
    accounts.end(first)
    assert accounts.debt_s == pytest.approx(0.99, abs=0.02)
    assert accounts.setup_s("model", 100) == accounts.debt_s + accounts.reading_s("model", 100)
    assert accounts.setup_s("model", 0) == 0
    debt = accounts.debt_s
    accounts.settle([copying], [replace(plan, computed=None, reading_s=0.0)], [Outcome(0, [1])])
    assert accounts.debt_s == pytest.approx(debt - 0.005 * table(FLAT).seconds(1, 1))
    assert copying.owed == 0
    accounts.settle([next_], [plan], [Outcome(0, [1])])
    assert accounts.debt_s == 0
    assert next_.owed == pytest.approx((1 + debt) * 0.99, rel=1e-3)
    next_.owed, next_.credit = 0.0, -0.25
    accounts.end(next_)
    assert accounts.debt_s == 0.25


def test_the_tokens_to_be_expected_are_those_of_recent_answers() -> None:
    lengths = AnswerLengths()
    assert [lengths.ahead(n) for n in (0, 1, 50)] == [1, 1, 50]  # nothing is known: as many again
    for n in (20, 20, 20, 2000):
        lengths.add(n)
    assert [lengths.ahead(n) for n in (0, 20, 1990, 2000, 2500)] == [515, 1980, 10, 2000, 2500]
    for _ in range(16):
        lengths.add(30)
    assert [lengths.ahead(n) for n in (0, 29, 30)] == [30, 1, 30]


def test_a_forecast_knows_what_a_draft_model_has_to_read() -> None:
    clock = Clock()
    drafter = PaperDrafter([True] * 9000, lambda at: 0.75, clock=clock, draft_s=0.002, prompt=100, read_s=1e-3)
    control = SpeculationControl(Goodput(), drafter, costs=CostModel(table(FLAT)), max_tokens=64, clock=clock)
    drive(control, [True] * 9000, 200)
    near, far, long = (control.forecast(*of).choice for of in ((200, 0), (200, 3000), (4000, 3000)))
    assert near.gain is not None
    assert far.gain is not None
    assert long.gain is not None
    assert far.gain < long.gain < near.gain
    assert control.forecast(20, 3000).choice.reason == "no_gain"
    free = SpeculationControl(
        Goodput(), PaperDrafter([True] * 9000, lambda at: 0.75, clock=clock), costs=CostModel(table(FLAT)), max_tokens=64
    )
    drive(free, [True] * 9000, 50)
    assert free.forecast(200, 3000) == free.forecast(200)


def test_a_hybrids_time_is_that_of_the_part_that_took_it() -> None:
    """The second is asked and has no guess, so the first's is drafted: what that took is the second's all the same."""

    class Silent(PaperDrafter):
        def __init__(self, clock: Clock) -> None:
            super().__init__([], lambda at: 0.5, clock=clock, draft_s=0.004)
            self.name, self.sources = "silent", ("silent",)

    clock = Clock()
    first = PaperDrafter([True] * 9000, lambda at: 0.5, clock=clock)
    control = SpeculationControl(
        Goodput(), HybridDrafter(first, Silent(clock)), costs=CostModel(table(FLAT)), max_tokens=64, clock=clock
    )
    alone = SpeculationControl(Goodput(), first, costs=CostModel(table(FLAT)), max_tokens=64)
    for each in (control, alone):
        track, at = each.open([0], sampling=GREEDY, namespace=None, output=4000), 0
        while at < 2000:
            (plan,) = each.plan([track], [4000 - at])
            right = len(plan.draft.tokens)
            each.settle([track], [plan], [Outcome(right, [1] * (right + 1))], table(FLAT).seconds(1, 1 + right))
            at += right + 1
    sources = control.stats().sources
    assert sources["paper"].accepted > 1000
    assert sources["paper"].draft_s == 0
    assert sources["silent"].draft_s == pytest.approx(clock.now)
    ahead = control.forecast(200, 8000)
    assert ahead.drafter == "paper"
    assert ahead == alone.forecast(200, 8000)  # it has no prompt to read


def test_forecasts_say_what_is_known() -> None:
    clock = Clock()
    drafter = PaperDrafter([True] * 9000, lambda at: 0.75, clock=clock)
    control = SpeculationControl(
        Goodput(min_output_tokens=20), drafter, costs=CostModel(table(FLAT)), max_tokens=64, clock=clock
    )
    first = control.forecast(200)
    assert (first.drafter, first.acceptance, first.choice.length, first.choice.reason) == ("paper", None, 0, "eval_required")
    drive(control, [True] * 9000, 50)
    known = control.forecast(200)
    assert known.acceptance == 1.0
    assert known.choice.length > 10
    assert known.choice.gain is not None
    assert known.choice.gain > 3
    assert control.forecast(10).choice.reason == "short_output"
    nothing = SpeculationControl(Never(), None, costs=None, max_tokens=64).forecast(200)
    assert (nothing.drafter, nothing.choice.reason) == (None, "rule")
    unfit = SpeculationControl(Goodput(), drafter, costs=None, max_tokens=64, fits=False).forecast(200)
    assert unfit.choice.reason == "draft_does_not_fit"


def test_with_a_real_drafter_and_a_batch() -> None:
    """Suffix drafts of four sequences, one of which copies: it gets the drafts."""
    pattern = list(range(20)) * 4
    control = SpeculationControl(
        Goodput(), SuffixDrafter(), costs=CostModel(CostTable({4: {4: 0.02, 12: 0.021, 100: 0.2}})), max_tokens=100
    )
    prompts = [pattern, *([100 * i + j for j in range(80)] for i in range(1, 4))]
    tracks = [control.open(p, sampling=Sampling(seed=0), namespace=b"n", output=500) for p in prompts]
    for _ in range(20):
        plans = control.plan(tracks, [400] * 4)
        outcomes = [Outcome(len(plan.draft.tokens), [*plan.draft.tokens, 9000 + i]) for i, plan in enumerate(plans)]
        outcomes[0] = Outcome(len(plans[0].draft.tokens), list(plans[0].draft.tokens) or [0])
        control.settle(tracks, plans, outcomes, 0.02)
    assert len(plans[0].draft.tokens) >= 1
    for track in tracks:
        control.close(track, learn=True)
    fixed = SpeculationControl(Fixed(draft_length=2), SuffixDrafter(), costs=None, max_tokens=100)
    track = fixed.open(pattern, sampling=Sampling(seed=0), namespace=None, output=500)
    assert fixed.plan([track], [400])[0].draft.tokens == (0, 1)
    assert fixed.plan([track], [2])[0].draft.tokens == (0,)
