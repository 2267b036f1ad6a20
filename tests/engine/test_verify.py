"""Verification and what acts on verified rows: clipping, ends and stops inside a run, penalties, bias, log probabilities."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.engine.markov import MarkovRuntime, random_logits
from tests.engine.speculate import GuessDrafter, Run, generate, step

from cachespec.engine.processors import Adjust, Processing, Processor, log_probabilities
from cachespec.engine.sampling import Sampling, draw, target
from cachespec.engine.text import TextStream
from cachespec.engine.verify import Proposal, Settled, clip, settle, verify
from cachespec.errors import InputError

VOCAB = 30
GREEDY = Sampling(seed=0, temperature=0)


def never(token: int) -> bool:
    return False


def test_drafts_are_clipped_with_room_for_the_pending_token_and_the_bonus() -> None:
    drafts = [1, 2, 3, 4, 5, 6]
    for room, left, expected in ((100, 100, 6), (100, 4, 3), (100, 1, 0), (4, 100, 3), (1, 100, 0), (0, 0, 0)):
        assert len(clip(drafts, room=room, left=left, is_end=never)) == expected
    assert clip(drafts, room=9, left=9, is_end=lambda t: t == 3) == [1, 2]
    assert clip(tuple(drafts), room=3, left=9, is_end=lambda t: t == 3) == (1, 2)


def test_an_answer_near_the_context_end_uses_every_token_of_it() -> None:
    """exllamav2#274, vllm#16087: with drafts as without, to the last token, and never past it."""
    for context in range(12, 20):
        runtime = MarkovRuntime(random_logits(VOCAB), VOCAB, context=context)
        output = context - 5
        run = Run(runtime, [1, 2, 3, 4, 5], GREEDY, output=output, drafter=GuessDrafter(lambda t, k: [1] * k))
        assert len(generate(run, lambda step: 8)) == output
        assert run.reason == "length"


def test_drafts_that_run_past_the_limit_cost_nothing_and_emit_nothing() -> None:
    plain = generate(Run(MarkovRuntime(random_logits(VOCAB), VOCAB), [1, 2], GREEDY, output=40))
    for output in range(1, 12):
        runtime = MarkovRuntime(random_logits(VOCAB), VOCAB)
        drafter = GuessDrafter(lambda tokens, k: plain[len(tokens) - 2 :][:k])
        run = Run(runtime, [1, 2], GREEDY, output=output, drafter=drafter)
        assert generate(run, lambda step: 7) == plain[:output]
        assert runtime.evaluated == 2 + output - 1  # not one token more than plain decoding
        assert run.accepted == run.drafted


def test_an_end_token_inside_a_run_ends_the_request() -> None:
    """transformers#47912, koboldcpp#1276: nothing after it is emitted, counted or kept."""
    row = random_logits(VOCAB, seed=2)
    plain = generate(Run(MarkovRuntime(row, VOCAB), [1, 2], GREEDY, output=60))
    end = plain[9]
    first = plain.index(end)
    for k in range(9):
        runtime = MarkovRuntime(row, VOCAB, ends=[end])
        drafter = GuessDrafter(lambda tokens, k: plain[len(tokens) - 2 :][:k])
        run = Run(runtime, [1, 2], GREEDY, output=60, drafter=drafter)
        assert generate(run, lambda step: k) == plain[:first]  # noqa: B023
        assert run.reason == "stop"
        assert runtime.held[0] == run.tokens[: len(runtime.held[0])]
        assert end not in runtime.held[0]


@pytest.mark.parametrize("k", range(8))
def test_a_stop_string_inside_a_run_or_over_its_border(k: int) -> None:
    """sglang#31599, #23802: it is found wherever steps fall, and nothing after it is shown, counted or kept in the KV."""
    data = b"the answer is forty-two. END and then some more of it"
    row = np.full((256, 256), -30.0, np.float32)

    def script(tokens: tuple[int, ...]) -> Any:
        line = row[0].copy()
        line[data[(len(tokens) - 3) % len(data)]] = 0
        return line

    pieces = [bytes([i]) for i in range(256)]
    for stop in ("END", "wo. E", ".", "the"):
        runtime = MarkovRuntime(script, 256, pieces=pieces)
        stream = TextStream([stop])
        shown: list[str] = []

        def take(token: int, stream: TextStream = stream, shown: list[str] = shown) -> str | None:
            shown.append(stream.push(bytes([token])))
            return "stop" if stream.stopped is not None else None

        drafter = GuessDrafter(lambda tokens, k: list(data[len(tokens) - 3 :][:k]))
        run = Run(runtime, [1, 2, 3], GREEDY, output=200, drafter=drafter, stop=take)
        generate(run, lambda step: k)
        text = data.decode()
        assert "".join(shown) == text[: text.index(stop)]
        assert stream.tokens == text.index(stop)
        assert run.reason == "stop"
        assert len(run.answer) == text.index(stop) + len(stop)  # what was looked at
        assert bytes(runtime.held[0][3:]) in data[: text.index(stop) + len(stop)]


def test_settle_counts_what_was_looked_at() -> None:
    seen: list[int] = []

    def take(token: int) -> str | None:
        seen.append(token)
        return "stop" if token == 9 else None

    assert settle([1, 2, 3], take) == Settled(3, 2, None)
    assert settle([1, 9, 3, 4], take) == Settled(2, 2, "stop")
    assert settle([1, 2, 9], take) == Settled(3, 2, "stop")
    assert settle([9], take) == Settled(1, 0, "stop")
    assert seen == [1, 2, 3, 1, 9, 1, 2, 9, 9]


def test_rows_are_drawn_one_by_one_or_together_with_the_same_result() -> None:
    asked: list[int] = []

    class Counting(MarkovRuntime):
        def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
            asked.append(len(rows))
            return super().draw(rows, sampling, positions)

    answers = []
    for together in (False, True):
        runtime = Counting(random_logits(VOCAB), VOCAB)
        processing = Processing(presence_penalty=1.0)
        runs = [
            Run(runtime, [1, 2], Sampling(seed=1), output=30, slot=0, drafter=GuessDrafter(lambda t, k: [3] * k)),
            Run(
                runtime,
                [1, 3],
                Sampling(seed=2),
                output=30,
                slot=1,
                drafter=GuessDrafter(lambda t, k: [4] * k),
                processor=Processor(processing, prompt=[1, 3], vocab=VOCAB),
            ),
        ]
        while any(run.reason is None for run in runs):
            active = [run for run in runs if run.reason is None]
            step(active, [3] * len(active), together=together)
        answers.append([run.answer for run in runs])
    assert answers[0] == answers[1]
    assert 4 in asked
    with pytest.raises(ValueError, match="2 drafts, 2 rows"):
        Proposal(position=1, drafts=[1, 2], rows=[0, 1], sampling=GREEDY)
    with pytest.raises(ValueError, match="1 adjustments"):
        Proposal(position=1, drafts=[1], rows=[0, 1], sampling=GREEDY, adjusts=[None])


def test_a_step_without_drafts_uses_the_same_random_numbers() -> None:
    """vllm-ascend#13608: lengths that change from step to step, 0 among them, change nothing."""
    row = random_logits(VOCAB, spread=1.0)
    plain = generate(Run(MarkovRuntime(row, VOCAB), [1, 2], Sampling(seed=7), output=50))
    for lengths in ((0,), (1, 0), (0, 0, 5), (3,)):
        drafter = GuessDrafter(lambda tokens, k: random.Random(len(tokens)).choices(range(VOCAB), k=k))
        run = Run(MarkovRuntime(row, VOCAB), [1, 2], Sampling(seed=7), output=50, drafter=drafter)
        assert generate(run, lambda step: lengths[step % len(lengths)]) == plain  # noqa: B023


# Processing.


def plainly(row: Any, how: Processing, prompt: Sequence[int], answer: Sequence[int]) -> Any:
    """The rule of `engine.processors`, written as it reads."""
    logits = row.astype(np.float64)
    for token in {*prompt, *answer}:
        x = logits[token]
        logits[token] = x / how.repetition_penalty if x > 0 else x * how.repetition_penalty
    for token, n in Counter(answer).items():
        logits[token] -= n * how.frequency_penalty
        logits[token] -= how.presence_penalty
    for token, bias in how.logit_bias.items():
        logits[token] += bias
    return logits


PROCESSINGS = [
    Processing(repetition_penalty=1.3),
    Processing(presence_penalty=0.8),
    Processing(frequency_penalty=-0.5),
    Processing(logit_bias={3: 2.5, 7: -100.0, 11: float("-inf")}),
    Processing(repetition_penalty=0.8, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={1: 1.0, 5: -1.0}),
]


@pytest.mark.parametrize("how", PROCESSINGS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_processing_acts_on_every_verified_position(how: Processing, temperature: float) -> None:
    """vllm#10198: with the drafts before a position appended, as without speculation, for any draft length."""
    row, prompt = random_logits(VOCAB, order=1, spread=1.5), [1, 2, 3, 2]
    sampling = Sampling(seed=5, temperature=temperature, top_p=0.9, min_p=0.02)
    expected: list[int] = []
    for _ in range(40):
        text = (*prompt, *expected)
        expected.append(draw(plainly(row(text), how, prompt, expected), sampling, len(text)))
    for k in (0, 1, 4):
        for guess in (expected, [9] * 60):
            run = Run(
                MarkovRuntime(row, VOCAB),
                prompt,
                sampling,
                output=40,
                drafter=GuessDrafter(lambda tokens, k: guess[len(tokens) - 4 :][:k]),  # noqa: B023
                processor=Processor(how, prompt=prompt, vocab=VOCAB),
            )
            assert generate(run, lambda step: k, together=k == 4) == expected  # noqa: B023
    plain = generate(Run(MarkovRuntime(row, VOCAB), prompt, sampling, output=40))
    assert temperature == 0 or plain != expected, "it changes something"


def test_processing_that_changes_nothing_takes_the_runtimes_own_draw() -> None:
    assert not Processing().active
    assert Processor(Processing(), prompt=[1], vocab=VOCAB).adjusts([1, 2]) == [None, None, None]
    assert Processor(Processing(), prompt=[1], vocab=VOCAB).valid([1, 2]) == 2
    assert all(how.active for how in PROCESSINGS)


def test_processing_out_of_range_is_refused_by_name() -> None:
    nan, inf = float("nan"), float("inf")
    wrong: list[tuple[str, Any]] = [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", inf),
        ("repetition_penalty", nan),
        ("presence_penalty", nan),
        ("frequency_penalty", inf),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: nan}),
        ("logit_bias", {1: inf}),
    ]
    for name, value in wrong:
        with pytest.raises(InputError) as error:
            Processing(**{name: value})
        assert error.value.field == name
    with pytest.raises(InputError, match="not in a vocabulary"):
        Processor(Processing(logit_bias={VOCAB: 1.0}), prompt=[], vocab=VOCAB)


def test_what_is_not_allowed_is_never_drawn_whatever_the_filters_are() -> None:
    """Fewer tokens allowed than top-k wants, in a row longer than the mask."""
    rng = np.random.default_rng(0)
    bits = np.zeros(2, np.uint32)
    bits[0] = 1 << 3 | 1 << 17
    for position in range(200):
        row = rng.standard_normal(70).astype(np.float32)
        sampling = Sampling(seed=1, temperature=(position % 3) * 0.8, top_k=20, top_p=0.99, min_p=0.01)
        adjusted = Adjust(allowed=bits).apply(row)
        assert draw(adjusted, sampling, position) in (3, 17)
        assert np.isneginf(adjusted).sum() == 68
        if sampling.temperature:
            ids, logits = target(adjusted, sampling)
            law = np.exp(logits) / np.exp(logits).sum()
            assert law[~np.isin(ids, (3, 17))].sum() == 0
    with pytest.raises(ArithmeticError):
        draw(Adjust(allowed=np.zeros(3, np.uint32)).apply(row), Sampling(seed=1), 0)


def test_log_probabilities_are_the_models_own() -> None:
    row = np.array([1.0, 3.0, 3.0, -2.0, 0.0], np.float32)
    own, best = log_probabilities(row, 3, 3)
    law = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
    assert own == pytest.approx(np.log(law[3]))
    assert [token for token, _ in best] == [1, 2, 0]
    assert [p for _, p in best] == pytest.approx(np.log(law[[1, 2, 0]]))
    assert log_probabilities(row, 0, 0)[1] == []


def test_an_end_drawn_by_verify_needs_no_kv() -> None:
    runtime = MarkovRuntime(random_logits(VOCAB), VOCAB, ends=range(VOCAB))
    run = Run(runtime, [1, 2, 3], GREEDY, output=5)
    assert generate(run) == []
    assert (run.reason, runtime.held[0]) == ("stop", [1, 2, 3])
    assert verify(runtime, []) == []
    assert verify(runtime, [], together=True) == []
