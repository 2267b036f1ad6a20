"""Acceptance policies on cost tables, and played against costs and drifting acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.simulate import FLAT, MIDDLE, STEEP, UNEVEN, play, table

from cachespec.engine.assumptions import completed
from cachespec.engine.costs import CostModel
from cachespec.engine.speculation import AcceptancePolicy, Candidate, Choice, CostTable, Step, expected_tokens
from cachespec.errors import InputError
from cachespec.policies.acceptance import Fixed, Goodput, Never, Threshold

TABLES = {"flat": FLAT, "steep": STEEP, "middle": MIDDLE, "uneven": UNEVEN}


def candidate(chance: float = 0.8, most: int = 16, **more: Any) -> Candidate:
    facts: dict[str, Any] = {"source": "suffix", "chances": (chance,) * most, "remaining": 500, "output": 500, "previous": 1}
    return Candidate(**(facts | more))


def step(*candidates: Candidate, costs: CostTable | None, **more: Any) -> Step:
    facts: dict[str, Any] = {"max_tokens": 1024}
    return Step(candidates=candidates, costs=costs, **(facts | more))


def only(policy: AcceptancePolicy, made: Step) -> Choice:
    (choice,) = policy.choose(made)
    return choice


def test_expected_tokens_are_those_of_the_books() -> None:
    """Leviathan et al., equation 1, as tabled in the literature."""
    for chance, k, expected in ((0.5, 4, 1.94), (0.7, 6, 3.06), (0.8, 8, 4.33), (0.95, 1, 1.95), (1.0, 3, 4.0)):
        assert expected_tokens((chance,) * k) == pytest.approx(expected, abs=0.006)


def test_on_flat_costs_it_drafts_far_and_on_steep_ones_hardly_ever() -> None:
    flat = [only(Goodput(), step(candidate(a), costs=table(FLAT))) for a in (0.3, 0.7, 0.9)]
    assert [choice.reason for choice in flat] == ["gain"] * 3
    assert flat[0].length < flat[1].length < flat[2].length
    assert flat[1].gain == pytest.approx(3.05, abs=0.2)
    steep = [only(Goodput(), step(candidate(a), costs=table(STEEP))) for a in (0.3, 0.7, 0.9, 0.95)]
    assert [(choice.length, choice.reason) for choice in steep] == [(0, "no_gain")] * 4
    sure = only(Goodput(), step(candidate(0.99), costs=table(STEEP)))
    assert sure.length >= 6
    assert sure.reason == "gain"
    middle = only(Goodput(), step(candidate(0.8), costs=table(MIDDLE)))
    assert middle.gain == pytest.approx(1.54, abs=0.02)


def test_it_steps_over_widths_that_cost_more_than_wider_ones() -> None:
    """Torch float32: two to four tokens cost more than five."""
    choice = only(Goodput(), step(candidate(0.6), costs=table(UNEVEN)))
    assert choice.length == 4
    assert only(Goodput(), step(candidate(0.55, most=2), costs=table(UNEVEN))).length == 0


def at_least_four(gain: float, batch: int, acceptance: float = 0.87) -> dict[int, float]:
    """Costs at which four drafts a sequence gain that much, in kernels that are padded to five tokens a sequence."""
    wide = expected_tokens((acceptance,) * 4) / (1 + gain)
    return {batch: 0.020, batch + 1: 0.020 * wide, 5 * batch: 0.020 * wide, 6 * batch: 0.040 * wide}


def test_high_acceptance_is_not_gain() -> None:
    """vllm#26504: at acceptance 0.87 four drafts gain 23 % alone and lose 16 % in a batch of 32: four, and none."""
    costs = CostTable({1: at_least_four(0.23, 1), 32: at_least_four(-0.16, 32)})
    alone = only(Goodput(min_acceptance=0.5), step(candidate(0.87, acceptance=0.87), costs=costs))
    assert (alone.length, alone.reason) == (4, "gain")
    assert alone.gain == pytest.approx(1.23, abs=0.005)
    crowd = Goodput(min_acceptance=0.5).choose(step(*[candidate(0.87, acceptance=0.87)] * 32, costs=costs))
    assert {(choice.length, choice.reason) for choice in crowd} == {(0, "no_gain")}


def test_a_batch_gives_its_room_to_the_most_probable_tokens() -> None:
    costs = CostTable({4: {4: 0.010, 8: 0.0104, 12: 0.011, 20: 0.014, 68: 0.06}})
    chances = (0.95, 0.3, 0.6, 0.05)
    lengths = [c.length for c in Goodput().choose(step(*[candidate(a) for a in chances], costs=costs))]
    assert lengths[0] > lengths[2] >= lengths[1] >= lengths[3] == 0
    tight = [c.length for c in Goodput().choose(step(*[candidate(a) for a in chances], costs=costs, max_tokens=7))]
    assert tight == [3, 0, 0, 0]
    assert sum(c.length for c in Goodput().choose(step(*[candidate(0.9)] * 4, costs=costs, max_tokens=3))) == 0


def test_batch_32_drafts_less_than_a_single_stream() -> None:
    """A kernel that is free up to 64 tokens a call and linear beyond: room for one draft each, then none."""
    row = {
        1: {n: 0.02 * max(1, n / 64) for n in (1, 64, 128, 256)},
        32: {n: 0.02 * max(1, n / 64) for n in (32, 64, 128, 1024)},
    }
    costs = CostTable(row)
    assert only(Goodput(), step(candidate(0.8), costs=costs)).length == 16
    lengths = [c.length for c in Goodput().choose(step(*[candidate(0.8)] * 32, costs=costs))]
    assert set(lengths) == {1}


def test_guards_say_why() -> None:
    costs, policy = table(FLAT), Goodput(min_acceptance=0.5, min_output_tokens=20)
    threshold = Threshold()
    for any_policy in (policy, threshold):
        for made, code in (
            (step(candidate(), costs=costs, fits=False), "draft_does_not_fit"),
            (step(candidate(), costs=costs, vendor_optimises=True), "vendor_optimises"),
            (step(candidate(output=19), costs=costs), "short_output"),
            (step(candidate(acceptance=0.49), costs=costs), "low_acceptance"),
            (step(candidate(most=0), costs=costs), "no_gain"),
        ):
            choice = only(any_policy, made)
            assert (choice.length, choice.reason) == (0, code)
        assert only(any_policy, step(candidate(acceptance=0.5, output=20), costs=costs, fits=True)).reason == "gain"
    assert only(policy, step(candidate(), costs=None)) == Choice(length=0, reason="eval_required")
    assert only(policy, step(candidate(), costs=None, fits=False)).reason == "draft_does_not_fit"
    assert only(policy, step(candidate(), costs=costs, anchor=True)) == Choice(length=0, reason="eval_required", gain=1.0)
    assert only(threshold, step(candidate(), costs=None)) == Choice(length=4, reason="gain")
    two = policy.choose(step(candidate(output=5), candidate(0.9), costs=CostTable({2: {2: 0.02, 10: 0.021, 40: 0.03}})))
    assert [choice.reason for choice in two] == ["short_output", "gain"]


def test_lengths_respect_what_remains_and_what_a_call_takes() -> None:
    for policy in (Goodput(), Threshold(draft_length=8), Fixed(draft_length=8)):
        assert only(policy, step(candidate(0.99, remaining=3), costs=table(FLAT))).length == 2
        assert only(policy, step(candidate(0.99, remaining=1), costs=table(FLAT))).length == 0
        assert only(policy, step(candidate(0.99), costs=table(FLAT), max_tokens=4)).length == 3
        many = policy.choose(step(candidate(0.99), candidate(0.98), costs=CostTable({2: {2: 0.02, 40: 0.021}}), max_tokens=9))
        assert sum(choice.length for choice in many) <= 7
    assert Goodput(max_length=5).max_length == 5
    assert only(Goodput(max_length=5), step(candidate(0.99), costs=table(FLAT))).length == 5


def test_the_simple_policies() -> None:
    assert only(Never(), step(candidate(), costs=None)) == Choice(length=0, reason="rule", gain=1.0)
    assert Never().max_length == 0
    assert only(Fixed(draft_length=3), step(candidate(0.1), costs=table(STEEP))).length == 3
    assert only(Fixed(), step(candidate(), costs=table(FLAT), fits=False)).reason == "draft_does_not_fit"
    assert only(Fixed(), step(candidate(0.5), costs=table(STEEP))).gain == pytest.approx(0.39, abs=0.05)
    assert Threshold(draft_length=3).max_length == 3
    wrong: list[Callable[[], object]] = [
        lambda: Goodput(min_acceptance=1.5),
        lambda: Goodput(min_output_tokens=-1),
        lambda: Goodput(max_length=0),
        lambda: Threshold(min_acceptance=-0.1),
        lambda: Fixed(draft_length=0),
    ]
    for make in wrong:
        with pytest.raises(InputError):
            make()


def test_what_is_read_first_is_taken_off_every_gain() -> None:
    costs = table(FLAT)
    for policy in (Goodput(max_length=4), Threshold(draft_length=4), Fixed(draft_length=4)):
        here, behind = (only(policy, step(candidate(0.9, setup_s=s, remaining=300), costs=costs)) for s in (0.0, 1.0))
        assert (here.length, behind.length) == (4, 4)
        each = 1 + sum(0.9**i for i in range(1, 5))
        assert here.gain == pytest.approx(each / costs.seconds(1, 5) * costs.seconds(1, 1))
        assert behind.gain == pytest.approx(each / (costs.seconds(1, 5) + each / 300) * costs.seconds(1, 1))


def test_it_takes_up_speculation_again_only_for_a_clear_gain() -> None:
    costs = CostTable({1: {1: 0.020, 2: 0.0245, 3: 1.0}})  # one draft at 0.26 gains 2.9 %, at 0.30 6 %
    assert only(Goodput(), step(candidate(0.26, previous=1), costs=costs)).length == 1
    assert only(Goodput(), step(candidate(0.26, previous=0), costs=costs)).length == 0
    assert only(Goodput(), step(candidate(0.30, previous=0), costs=costs)).length == 1


def test_credit_bounds_what_may_be_lost() -> None:
    costs = table(MIDDLE)
    lengths = [only(Goodput(), step(candidate(0.5, credit_s=s), costs=costs)).length for s in (1.0, 0.002, 0.001, -1.0)]
    assert lengths == [1, 1, 0, 0]
    assert only(Goodput(), step(candidate(0.97, credit_s=-1.0), costs=costs)).length > 8  # promises too much to be left


def test_what_is_read_first_is_at_risk_as_a_whole() -> None:
    costs = table(MIDDLE)
    for setup, credit, length in ((0.0, 0.003, 1), (0.05, 0.003, 0), (0.05, 0.03, 1)):
        behind = candidate(0.5, credit_s=credit, setup_s=setup, remaining=2000)
        assert only(Goodput(), step(behind, costs=costs)).length == length
    sure = candidate(0.97, credit_s=0.0, setup_s=0.05, remaining=2000)
    assert only(Goodput(), step(sure, costs=costs)).length > 8


def test_probes_are_short_and_only_where_nothing_is_learned_otherwise() -> None:
    costs = table(MIDDLE)
    blind = candidate(0.1, scored=False, draft_s=0.002, previous=0)
    price = 0.0139 - 0.0103 + 0.002
    assert only(Goodput(), step(blind, costs=costs, probe_s=price + 1e-9)) == Choice(length=1, reason="eval_required", gain=1.0)
    assert only(Goodput(), step(blind, costs=costs, probe_s=price - 1e-6)).reason == "no_gain"
    assert only(Goodput(), step(candidate(0.1, previous=0), costs=costs, probe_s=1.0)).reason == "no_gain"
    low = candidate(0.1, scored=False, acceptance=0.1, previous=0)
    assert only(Goodput(min_acceptance=0.5), step(low, costs=costs, probe_s=1.0)).reason == "eval_required"
    short = candidate(0.1, scored=False, output=5, previous=0)
    assert only(Goodput(min_output_tokens=20), step(short, costs=costs, probe_s=1.0)).reason == "short_output"
    behind = candidate(0.1, scored=False, draft_s=0.002, previous=0, setup_s=0.5)
    assert only(Goodput(), step(behind, costs=costs, probe_s=price + 0.5 + 1e-9)).reason == "eval_required"
    assert only(Goodput(), step(behind, costs=costs, probe_s=price + 0.49)).reason == "no_gain"
    late = candidate(0.1, scored=False, draft_s=0.002, previous=0, setup_s=0.5, remaining=40)
    assert only(Goodput(), step(late, costs=costs, probe_s=1.0)).reason == "no_gain"  # it could not pay any more
    pair = Goodput().choose(step(behind, blind, costs=CostTable({2: {2: 0.02, 40: 0.2}}), probe_s=0.1))
    assert [choice.reason for choice in pair] == ["no_gain", "eval_required"]  # the cheaper one
    # A batch in which another sequence gains is not probed besides.
    both = Goodput().choose(step(candidate(0.95), blind, costs=CostTable({2: {2: 0.02, 40: 0.021}}), probe_s=1.0))
    assert both[0].reason == "gain"


@given(
    chances=st.lists(st.lists(st.floats(0, 1), max_size=12), min_size=1, max_size=6),
    row=st.lists(st.floats(0.001, 0.2), min_size=4, max_size=4),
    room=st.integers(0, 60),
    credit=st.floats(-1, 1),
    probe=st.floats(0, 1),
)
def test_whatever_is_asked_the_answer_is_legal(
    chances: list[list[float]], row: list[float], room: int, credit: float, probe: float
) -> None:
    batch = len(chances)
    costs = CostTable({batch: dict(zip((batch, 2 * batch, 5 * batch, 20 * batch), row, strict=True))})
    candidates = [
        Candidate(source="s", chances=tuple(c), remaining=1 + i * 2, output=9, credit_s=credit, scored=i % 2 == 0)
        for i, c in enumerate(chances)
    ]
    made = step(*candidates, costs=costs, max_tokens=batch + room, probe_s=probe)
    for policy in (Goodput(), Goodput(min_acceptance=0.5), Threshold(), Fixed(), Never()):
        choices = policy.choose(made)
        assert len(choices) == batch
        assert batch + sum(choice.length for choice in choices) <= max(batch, made.max_tokens)
        for choice, one in zip(choices, candidates, strict=True):
            assert 0 <= choice.length <= min(len(one.chances), one.remaining - 1, policy.max_length)
            assert (choice.length > 0) <= (choice.reason in ("gain", "rule", "eval_required"))


# Played: the whole control on paper, against costs and texts.


def wave(at: int) -> float:
    return 0.5 + 0.45 * math.sin(at / 150)


def switch(at: int) -> float:
    return 0.95 if (at // 200) % 2 else 0.2


def rare(at: int) -> float:
    return 0.6 if (at // 200) % 2 else 0.05


def steady(chance: float) -> Callable[[int], float]:
    return lambda at: chance


TEXTS: dict[str, Callable[[int], float]] = {
    **{f"steady {a}": steady(a) for a in (0.05, 0.35, 0.65, 0.8, 0.95, 0.98)},
    "wave": wave,
    "switch": switch,
    "rare": rare,
}
SEEDS = range(3)


@pytest.mark.parametrize("costs", TABLES)
def test_adaptive_is_never_slower_than_plain_and_near_the_best_static(costs: str) -> None:
    """At most 2 % slower than plain decoding, at least 0.92 of the best fixed length chosen with hindsight, by the means."""
    truth = table(TABLES[costs])
    for name, text in TEXTS.items():
        speed, share = [], []
        for seed in SEEDS:
            adaptive = play(Goodput(), truth, text, tokens=300, requests=3, seed=seed, noise=0.1)
            fixed: list[AcceptancePolicy] = [Never(), *(Fixed(draft_length=k) for k in (1, 2, 4, 8, 16))]
            best = min(
                run.seconds / run.plain for run in (play(p, truth, text, tokens=300, requests=3, seed=seed) for p in fixed)
            )
            speed.append(adaptive.plain / adaptive.seconds)
            share.append(best / (adaptive.seconds / adaptive.plain))
        assert mean(speed) >= 0.98, f"{name}: {speed}"
        assert min(speed) >= 0.96, f"{name}: {speed}"
        assert mean(share) >= 0.92, f"{name}: {share}"


def test_it_follows_the_text_where_no_fixed_length_can() -> None:
    adaptive = play(Goodput(), table(MIDDLE), switch, tokens=400, requests=3)
    best = min(play(Fixed(draft_length=k), table(MIDDLE), switch, tokens=400, requests=3).seconds for k in (1, 2, 4, 8, 16))
    assert adaptive.seconds < 0.95 * best


def test_one_costly_miss_does_not_end_it() -> None:
    """Without credit it drafts on paper, and what is right there earns the credit back."""

    def one_miss(at: int) -> float:
        return float(at != 60)

    run = play(Goodput(), table(STEEP), one_miss, tokens=400, says=lambda at: 0.9)
    missed = next(i for i in range(len(run.lengths)) if sum(run.lengths[: i + 1]) + i >= 60)
    after = run.lengths[missed + 1 :]
    assert 0 in after  # the miss cost all the credit
    assert max(after) >= 6
    never = play(Goodput(), table(STEEP), steady(0.6), tokens=400, says=lambda at: 0.9)
    assert sum(length > 0 for length in never.lengths) <= 0.02 * len(never.lengths)


def test_what_is_wanted_is_told_where_only_credit_is_missing() -> None:
    poor = only(Goodput(), step(candidate(0.5, credit_s=-1.0, previous=0), costs=table(MIDDLE)))
    assert (poor.length, poor.reason) == (0, "no_gain")
    assert poor.wanted == only(Goodput(), step(candidate(0.5, previous=0), costs=table(MIDDLE))).length > 0
    assert only(Goodput(), step(candidate(0.3, credit_s=-1.0, previous=0), costs=table(STEEP))).wanted == 0
    assert only(Goodput(), step(candidate(0.95), costs=table(MIDDLE))).wanted == 0


def test_on_free_text_and_steep_costs_it_stays_at_zero() -> None:
    run = play(Goodput(), table(STEEP), steady(0.3), tokens=400, requests=2)
    assert sum(length > 0 for length in run.lengths) <= 0.01 * len(run.lengths)
    assert run.reasons.get("no_gain", 0) > 0.98 * sum(run.reasons.values())


def test_a_draft_model_that_does_not_pay_is_probed_within_its_budget_and_taken_up_when_it_does() -> None:
    """It cannot be scored in shadow, so without probes it would never be tried again."""
    truth = table(FLAT)

    def late(at: int) -> float:
        return 0.02 if at < 1500 else 0.9

    bad = play(Goodput(), truth, steady(0.02), tokens=3000, draft_s=0.008)
    assert 0 < bad.probe_s <= 0.005 * bad.seconds * 1.02
    assert bad.plain / bad.seconds >= 0.98
    good = play(Goodput(), truth, late, tokens=6000, draft_s=0.008)
    assert good.plain / good.seconds > 1.3
    assert sum(good.lengths[-200:]) > 400


WIDE = (1, 2, 4, 8, 16)
TRUTHS: dict[str, CostTable] = {
    # Where a sequence costs nothing by itself, on a CPU; where calls are flat up to many tokens, on a GPU; where it does.
    "steep": CostTable({b: {b * w: (2 + 5.5 * b * w) / 1e3 for w in WIDE} for b in (1, 2, 4, 8)}),
    "flat": CostTable({b: {b * w: (3 + 0.02 * b * w) / 1e3 for w in WIDE} for b in (1, 2, 4, 8)}),
    "by sequence": CostTable({b: {b * w: (8 + 6 * b + 0.5 * b * w) / 1e3 for w in WIDE} for b in (1, 2, 4, 8)}),
}
KNOWN: dict[str, Callable[[int, int], bool]] = {
    "two points": lambda batch, tokens: batch == 1 and tokens in (1, 8),
    "one stream": lambda batch, tokens: batch == 1,
    "plain beside it": lambda batch, tokens: batch == 1 or tokens == batch,
    "half a row": lambda batch, tokens: batch < 4 or (batch == 4 and tokens < 10),
}


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("costs", TRUTHS)
def test_a_calibration_that_was_cut_short_loses_nothing(costs: str, known: str) -> None:
    """What is assumed is never so cheap that it is drafted at a loss, and is learned on the way."""
    truth = TRUTHS[costs]
    calls = [(batch, tokens) for batch, row in truth.points.items() for tokens in row]
    rows = {b: {n: s for n, s in row.items() if KNOWN[known](b, n)} for b, row in truth.points.items()}
    believed = completed({b: row for b, row in rows.items() if row}, calls)
    assert sorted(believed.assumed) == [call for call in calls if not KNOWN[known](*call)]
    for batch in (3, 8):  # three were never measured at all
        for chance in (0.35, 0.8):
            runs = [
                play(Goodput(), truth, steady(chance), tokens=150, requests=3, batch=batch, seed=s, believed=believed)
                for s in range(2)
            ]
            speed = mean(run.plain / run.seconds for run in runs)
            assert speed >= 0.98, f"{batch} streams, {chance}: {speed:.3f}"


def test_what_is_assumed_is_learned_from_steps_that_are_made_anyway() -> None:
    truth = TRUTHS["by sequence"]
    calls = [(batch, tokens) for batch, row in truth.points.items() for tokens in row]
    model = CostModel(completed({1: truth.points[1]}, calls))
    assert model.table.measured == {1: truth.points[1]}
    assert model.table.seconds(4, 4) < 0.5 * truth.seconds(4, 4)
    for _ in range(6):
        assert (4, 4) in model.table.assumed
        model.observe(4, 4, truth.seconds(4, 4))
    assert (4, 4) not in model.table.assumed
    assert model.table.seconds(4, 4) == pytest.approx(truth.seconds(4, 4))
    assert model.speed == 1.0, "it was not the machine"
    model.observe(3, 7, truth.seconds(3, 7))
    assert model.table.seconds(3, 7) == pytest.approx(truth.seconds(3, 7))
    assert model.table.seconds(3, 3) < model.table.seconds(3, 7), "a batch size seen for the first time is no single point"


def test_a_wrong_calibration_is_found_out() -> None:
    """Believed flat, really steep: what steps take is noticed."""
    run = play(Goodput(), table(STEEP), steady(0.6), tokens=3000, believed=table(dict.fromkeys(STEEP, 7.5)))
    assert sum(run.lengths[:100]) > 300
    assert sum(run.lengths[-500:]) < 50
