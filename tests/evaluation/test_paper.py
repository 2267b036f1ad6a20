"""Decoding on paper: the live control over known answers, against closed forms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.engine.scripted import ScriptedRuntime, forever

from cachespec.engine.contained import Fault
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import CostTable
from cachespec.evaluation.paper import Played, Sample, Truth, on_this_thread, play, shadow
from cachespec.policies.acceptance import Fixed, Goodput, Never

FLAT = CostTable({1: {1: 1.0, 25: 1.0}})
STEEP = CostTable({1: {1: 1.0, 2: 2.0, 25: 25.0}})
RUNTIME = ScriptedRuntime(forever)


def sample(answer: list[int], prompt: list[int] | None = None, *, ended: bool = False) -> Sample:
    return Sample(
        category="x",
        prompt=tuple(prompt or [1, 2, 3]),
        answer=tuple(answer),
        sampling=Sampling(seed=0, temperature=0),
        output=len(answer) + ended,
        ended=ended,
        namespace=b"",
    )


def one(samples: list[Sample], policy: object, costs: CostTable) -> list[Played]:
    truth = Truth({1: costs})
    made = play(samples, policy, SuffixDrafter(), truth=truth, believed=costs, runtime=RUNTIME, width=32)  # type: ignore[arg-type]
    return list(made)


REPEATED = [*range(10, 42)] * 4
RNG = random.Random(3)
NOVEL = RNG.sample(range(50, 250), 120)


def test_plain_decoding_takes_a_call_for_each_token_after_the_first() -> None:
    (found,) = one([sample(NOVEL)], Never(), FLAT)
    assert (found.calls, found.tokens, found.plain_s) == (119, 119, 119.0)
    assert found.seconds == pytest.approx(119, rel=0.01)
    (ended,) = one([sample(NOVEL, ended=True)], Never(), FLAT)
    assert (ended.calls, ended.plain_s) == (120, 120.0)


def test_text_that_repeats_is_faster_where_calls_cost_the_same_and_not_where_they_cost_by_token() -> None:
    (flat,) = one([sample(REPEATED)], Goodput(), FLAT)
    assert flat.plain_s == 127
    assert flat.plain_s / flat.seconds > 2.5
    assert flat.calls < 50
    (steep,) = one([sample(REPEATED)], Goodput(), STEEP)
    assert steep.plain_s / steep.seconds == pytest.approx(1.0, abs=0.05)
    assert steep.calls > 115


def test_a_fixed_length_pays_for_all_of_it() -> None:
    (found,) = one([sample(REPEATED)], Fixed(draft_length=4), STEEP)
    assert found.seconds > found.plain_s


def test_an_earlier_answer_is_known_unless_nobody_may_share() -> None:
    first, again = one([sample(NOVEL), sample(NOVEL)], Goodput(), FLAT)
    assert first.plain_s / first.seconds < 1.1
    assert again.plain_s / again.seconds > 5
    apart = [replace(sample(NOVEL), namespace=None)] * 2
    assert all(played.plain_s / played.seconds < 1.1 for played in one(apart, Goodput(), FLAT))


def test_shadow_counts_are_those_of_each_request() -> None:
    counts = list(shadow([sample(NOVEL), sample(REPEATED), sample([5])], SuffixDrafter(), RUNTIME))
    (a, r), (more, less), nothing = counts
    assert a == 0
    assert more / (more + less) > 0.9
    assert nothing == (0, 0)
    assert a + r < 20


def test_costs_grow_with_the_context_between_two_measured_ones() -> None:
    truth = Truth({64: CostTable({1: {1: 1.0, 9: 3.0}}), 1064: CostTable({1: {1: 2.0, 9: 11.0}})})
    assert truth.seconds(1, 64) == 1.0
    assert truth.seconds(9, 564) == 7.0
    assert truth.seconds(5, 64) == 2.0
    assert truth.seconds(1, 2064) == 3.0


def test_costs_are_measured_and_nothing_is_left_in_the_runtime() -> None:
    runtime = ScriptedRuntime(forever, context=400, width=64)
    truth = Truth.measure(runtime, 4000, seconds=0.2)
    assert runtime.used == 0
    assert truth.seconds(9, 100) > 0
    assert {1, 2, 8, 25} <= set(runtime.calls)
    assert not on_this_thread(runtime)


class Breaking(SuffixDrafter):
    """Drafts well, until it has accepted so many times."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def accept(self, track: object, tokens: Sequence[int]) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no more")
        super().accept(track, tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [0, 3])
def test_a_drafter_that_breaks_is_no_drafter_that_is_never_right(after: int) -> None:
    given = [sample(REPEATED)]
    with pytest.raises(Fault, match="suffix: accept: RuntimeError: no more"):
        list(shadow(given, Breaking(after), RUNTIME))
    truth = Truth({1: FLAT})
    with pytest.raises(Fault, match="no more"):
        list(play(given, Goodput(), Breaking(after), truth=truth, believed=FLAT, runtime=RUNTIME, width=32))
