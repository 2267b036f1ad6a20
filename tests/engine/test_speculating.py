"""Speculation in the loop: the text of a seed is the same with any drafter, alone or in a batch, cold or warm."""

from __future__ import annotations

import gc
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.loop_support import finish, job, read, read_all, running, text, usage
from tests.engine.markov import MarkovRuntime, near, random_logits
from tests.engine.scripted import END, ScriptedRuntime, engine_threads, forever, says, wait_until
from tests.engine.speculate import GuessDrafter

from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.hybrid import HybridDrafter
from cachespec.engine.drafters.model import ModelDrafter
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.engine.loop import Engine
from cachespec.engine.processors import Processing
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job
from cachespec.engine.speculation import AcceptancePolicy, CostTable
from cachespec.engine.structured import Vocabulary
from cachespec.errors import InputError
from cachespec.events import DraftVerified, Event, LogprobsReported, TextDelta, TokenLogprob
from cachespec.policies.acceptance import Fixed, Goodput, Never, Threshold

FLAT = CostTable({1: {1: 1e-3, 32: 1.2e-3}})
STEEP = CostTable({1: {1: 1e-3, 32: 32e-3}})
VOCAB = 12


def control(drafter: Any, policy: AcceptancePolicy | None = None, table: CostTable = FLAT, most: int = 512) -> dict[str, Any]:
    costs = CostModel(table)
    return {"control": SpeculationControl(policy or Goodput(), drafter, costs=costs, max_tokens=most), "costs": costs}


def drafts(events: List[Event]) -> list[DraftVerified]:
    return [e for e in events if isinstance(e, DraftVerified)]


def oracle(tokens: list[int], length: int) -> list[int]:
    return [forever(range(len(tokens) + i)) for i in range(length)]


def wrong(tokens: list[int], length: int) -> list[int]:
    return [65] * length


def mostly(tokens: list[int], length: int) -> list[int]:
    """Right for a while: every fifth position is not."""
    return [65 if (len(tokens) + i) % 5 == 0 else forever(range(len(tokens) + i)) for i in range(length)]


@pytest.mark.parametrize("guess", [oracle, wrong, mostly])
@pytest.mark.parametrize("policy", [Fixed(draft_length=6), Goodput(), Threshold(), Never()])
def test_drafts_change_nothing_but_the_number_of_calls(guess: Callable[..., List[int]], policy: AcceptancePolicy) -> None:
    runtime = ScriptedRuntime()
    with running(runtime, **control(GuessDrafter(guess), policy)) as engine:
        events = read(engine.submit(job(output=100)))
        stats = engine.report()["speculation"]
    assert text(events) == bytes(forever(range(6 + i)) for i in range(100)).decode()
    used, told = usage(events), drafts(events)
    assert used.output == 100
    assert (used.drafted, used.accepted) == (sum(e.drafted for e in told), sum(e.accepted for e in told))
    assert stats.sources["guess"].drafted == used.drafted
    if guess is oracle and not isinstance(policy, Never):
        assert len(runtime.calls) < 40
        assert used.drafted == used.accepted
    if isinstance(policy, Never) or (guess is wrong and isinstance(policy, Goodput)):
        assert len(runtime.calls) >= 95


def test_why_nothing_is_drafted_is_said_once_and_again_when_it_changes() -> None:
    with running(ScriptedRuntime(), **control(GuessDrafter(oracle), Never())) as engine:
        told = drafts(read(engine.submit(job(output=50))))
    assert [(e.drafted, e.reason) for e in told] == [(0, "rule")]
    with running(ScriptedRuntime(), **control(GuessDrafter(oracle), Goodput(min_output_tokens=20))) as engine:
        told = drafts(read(engine.submit(job(output=10))))
        assert [(e.drafted, e.reason) for e in told] == [(0, "short_output")]
        told = drafts(read(engine.submit(job(output=40))))
    assert {e.reason for e in told if e.drafted} == {"gain"}


def test_without_a_drafter_usage_does_not_speak_of_drafts() -> None:
    with running(ScriptedRuntime()) as engine:
        used = usage(read(engine.submit(job(output=5))))
    assert (used.drafted, used.accepted) == (None, None)


# What ends an answer in the middle of an accepted run (cases 17, 18, 20, 44)


@pytest.mark.parametrize("length", [1, 3, 8, 16])
def test_an_end_token_inside_a_run_ends_the_request(length: int) -> None:
    runtime = ScriptedRuntime(says("short", after=6))
    guess = GuessDrafter(lambda tokens, k: [*b"short"[len(tokens) - 6 :], *([END] if len(tokens) < 12 else []), 65, 66][:k])
    with running(runtime, **control(guess, Fixed(draft_length=length))) as engine:
        events = read(engine.submit(job()))
    assert text(events) == "short"
    assert (usage(events).output, finish(events).reason) == (5, "stop")


@pytest.mark.parametrize("length", [1, 3, 8, 16])
def test_a_stop_string_inside_or_across_runs(length: int) -> None:
    answer = "one two STOP three four five six"
    runtime = ScriptedRuntime(says(answer, after=6))
    guess = GuessDrafter(lambda tokens, k: answer.encode()[len(tokens) - 6 :][:k])
    with running(runtime, **control(guess, Fixed(draft_length=length))) as engine:
        events = read(engine.submit(job(stop=("STOP",))))
        assert text(events) == "one two "
        assert usage(events).output == 8
        prompt = tuple(b"prompt" + answer.encode())
        assert engine.peek(prompt, None)[0] == 0  # 14 tokens are committed: not one page, and nothing beyond


@pytest.mark.parametrize("length", [1, 3, 8, 16])
@pytest.mark.parametrize("stop", ["STOP", "wo STOP thr", " three four", "x", "e f", "one two STOP three four five si"])
def test_what_a_stop_string_takes_back_was_not_accepted(length: int, stop: str) -> None:
    """Of drafts that were right only those in the answer count: in the events, in the usage, and in the report."""
    answer = "one two STOP three four five six"
    runtime = ScriptedRuntime(says(answer, after=6))
    guess = GuessDrafter(lambda tokens, k: answer.encode()[len(tokens) - 6 :][:k])
    with running(runtime, **control(guess, Fixed(draft_length=length))) as engine:
        events = read(engine.submit(job(stop=(stop,))))
        stats = engine.report()["speculation"].sources["guess"]
    used, told = usage(events), drafts(events)
    assert used.output == answer.index(stop)
    expected, at = 0, 1  # the first token comes of the prompt; after it, of each step's tokens all but the last are drafts
    for spans in runtime.spans[1:]:
        drafted = len(spans[0].tokens) - 1
        expected += sum(i < used.output for i in range(at, at + drafted))
        at += drafted + 1
    assert used.accepted == expected
    assert sum(e.accepted for e in told) == stats.accepted == expected
    assert sum(e.drafted for e in told) == stats.drafted == used.drafted
    assert all(0 <= e.accepted <= e.drafted for e in told)


@pytest.mark.parametrize("output", [1, 2, 5, 17, 18])
def test_drafts_are_clipped_at_the_limit_and_at_the_end_of_the_context(output: int) -> None:
    runtime = ScriptedRuntime(context=6 + output)
    with running(runtime, **control(GuessDrafter(oracle), Fixed(draft_length=16))) as engine:
        events = read(engine.submit(job(output=output)))
    assert (usage(events).output, finish(events).reason) == (output, "length")


def test_only_what_was_accepted_is_kept_for_others() -> None:
    runtime = ScriptedRuntime()
    with running(runtime, **control(GuessDrafter(mostly), Fixed(draft_length=7))) as engine:
        events = read(engine.submit(job(output=60)))
        said = b"prompt" + text(events).encode()
        assert engine.peek((*said, 1), None)[0] == 64
        again = read(engine.submit(job((said[:-1] + b"x").decode(), output=10)))
    assert usage(again).cache_read == 64  # speculation does not cost hits (case 15)


def test_a_reader_that_pauses_in_the_middle_of_runs_loses_nothing() -> None:
    with running(ScriptedRuntime(), parallel=1, **control(GuessDrafter(oracle), Fixed(draft_length=5))) as engine:
        lazy = engine.submit(job("lazy", output=1000))
        busy = engine.submit(job("busy", output=1000))
        expected = bytes(forever(range(4 + i)) for i in range(1000)).decode()
        assert text(read(busy)) == text(read(lazy)) == expected


def test_a_model_that_cannot_rewind_is_never_given_drafts() -> None:
    runtime = ScriptedRuntime(rewinds=False)
    with running(runtime, **control(GuessDrafter(oracle), Fixed())) as engine:
        events = read(engine.submit(job(output=30)))
    assert len(text(events)) == 30
    assert usage(events).drafted == 0
    assert max(runtime.calls) == 6


# Identity (cases 13, 32, 33, 38)

LAW = random_logits(VOCAB, order=2, seed=3)


def markov(**more: Any) -> MarkovRuntime:
    return MarkovRuntime(LAW, VOCAB, sequences=6, ends=(0,), **more)


def answers(engine: Engine, temperature: float, *, together: bool) -> list[str]:
    jobs = []
    for i in range(8):
        prompt = tuple(random.Random(i).randrange(1, VOCAB) for _ in range(20 + i))
        sampling = Sampling(seed=i, temperature=temperature, top_k=8 if i % 2 else None, min_p=0.01 if i % 3 else None)
        jobs.append(Job(prompt=prompt, sampling=sampling, output=60))
    if together:
        return [text(events) for events in read_all([engine.submit(job) for job in jobs])]
    return [text(read(engine.submit(job))) for job in jobs]


def drafters() -> dict[str, Callable[[MarkovRuntime], Any]]:
    rng = random.Random(5)

    def model(target: MarkovRuntime) -> ModelDrafter:
        return ModelDrafter(MarkovRuntime(near(LAW, 0.5, VOCAB), VOCAB, ends=(0,)), target)

    return {
        "suffix": lambda target: SuffixDrafter(),
        "model": model,
        "hybrid": lambda target: HybridDrafter(SuffixDrafter(), model(target)),
        "random": lambda target: GuessDrafter(lambda tokens, k: [rng.randrange(VOCAB) for _ in range(k)]),
        "adversarial": lambda target: GuessDrafter(lambda tokens, k: [(tokens[-1] + 1) % VOCAB] * k),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", list(drafters()))
def test_any_drafter_alone_or_together_cold_or_warm_gives_one_text(name: str, temperature: float) -> None:
    with running(markov()) as engine:
        expected = answers(engine, temperature, together=False)
    for policy in (Fixed(draft_length=5), Goodput()):
        target = markov()
        options = control(drafters()[name](target), policy)
        with running(target, parallel=4, chunk=7, **options) as engine:
            assert answers(engine, temperature, together=True) == expected
            assert answers(engine, temperature, together=False) == expected
        narrow = markov(context=256)
        with running(narrow, parallel=3, width=9, **control(drafters()[name](narrow), policy, most=9)) as engine:
            assert answers(engine, temperature, together=True) == expected


HOW = Processing(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.2, logit_bias={3: 1.0, 5: -100.0})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", list(drafters()))
def test_penalties_bias_and_log_probabilities_are_those_of_plain_decoding(
    name: str, temperature: float, together: bool
) -> None:
    """Cases 38, 39: at every verified position, whether rows are drawn one by one or in one call, on the host."""

    def run(target: MarkovRuntime, **options: Any) -> list[tuple[str, list[TokenLogprob]]]:
        target.info = replace(target.info, draws_together=together)
        with running(target, parallel=3, **options) as engine:
            how = [Sampling(seed=i, temperature=temperature, top_k=9) for i in range(5)]
            jobs = [Job(prompt=(1, 2, 3, 1 + i), sampling=s, output=40, processing=HOW, logprobs=2) for i, s in enumerate(how)]
            return [(text(events), scores(events)) for events in read_all([engine.submit(job) for job in jobs])]

    expected = run(markov())
    target = markov()
    assert run(target, **control(drafters()[name](target), Fixed(draft_length=4))) == expected
    for said, tokens in expected:
        assert "".join(token.text.decode() for token in tokens) == said
        assert "5" not in said.split(), "banned"


def scores(events: List[Event]) -> list[TokenLogprob]:
    return [token for e in events if isinstance(e, LogprobsReported) for token in e.tokens]


@pytest.mark.parametrize("length", [1, 3, 16])
def test_log_probabilities_are_of_tokens_that_count_only(length: int) -> None:
    """Tokens of a stop string are none of them, however it came; nothing is said of a token before that is certain."""
    answer = "one ST two STOP three"
    guess = GuessDrafter(lambda tokens, k: answer.encode()[len(tokens) - 6 :][:k])
    runtime = ScriptedRuntime(says(answer, after=6))
    with running(runtime, **control(guess, Fixed(draft_length=length))) as engine:
        events = read(engine.submit(job(stop=("STOP",), logprobs=0)))
    assert bytes(token.token for token in scores(events)).decode() == text(events) == "one ST two "
    assert len(scores(events)) == usage(events).output
    assert {token.top for token in scores(events)} == {()}
    assert all(-1e-9 < token.logprob <= 0 for token in scores(events))
    shown = told = ""
    for event in events:
        shown += event.text if isinstance(event, TextDelta) else ""
        told += bytes(t.token for t in event.tokens).decode() if isinstance(event, LogprobsReported) else ""
        assert shown.startswith(told)


def test_a_bias_of_a_token_that_does_not_exist_is_refused_at_once() -> None:
    with running(ScriptedRuntime()) as engine, pytest.raises(InputError, match="vocabulary of 257") as caught:
        engine.submit(job(processing=Processing(logit_bias={300: 1.0})))
    assert caught.value.field == "logit_bias"


def test_goodput_takes_what_pays_and_leaves_what_does_not() -> None:
    for table, fewer in ((FLAT, True), (STEEP, False)):
        runtime = ScriptedRuntime()
        with running(runtime, **control(GuessDrafter(mostly), Goodput(), table)) as engine:
            for _ in range(4):
                read(engine.submit(job(output=200)))
        assert (len(runtime.calls) < 600) is fewer


def test_the_report_has_acceptance_by_drafter_and_position() -> None:
    with running(ScriptedRuntime(), **control(GuessDrafter(mostly), Fixed(draft_length=6))) as engine:
        read(engine.submit(job(output=200)))
        stats = engine.report()["speculation"]
    guess = stats.sources["guess"]
    assert 0.6 < (guess.acceptance or 0) < 0.95
    assert len(guess.positions) == 5  # the fifth never was right, so that nothing came to a sixth
    assert all(right <= tried for tried, right in guess.positions)
    assert stats.goodput > 0
    assert stats.reasons == {"rule": stats.steps}


# Nothing leaks (case 23)


def test_two_thousand_aborts_leave_no_track_and_no_memory() -> None:
    """With drafts, pins, penalties, log probabilities, and KV in host memory; at any moment of a request."""
    runtime, drafter, chance = ScriptedRuntime(room=4096), SuffixDrafter(history_bytes=50_000), random.Random(3)

    def abort(engine: Engine, count: int) -> int:
        waiting = []
        for i in range(count):
            how = Processing(presence_penalty=0.1) if i % 3 else Processing()
            waiting.append(
                engine.submit(
                    job(
                        "q" * chance.randint(1, 90) + str(i % 20),
                        output=chance.randint(1, 200),
                        session=f"s{i % 5}",
                        keep_s=60.0,
                        namespace=f"t{i % 3}",
                        processing=how,
                        logprobs=i % 2 or None,
                    )
                )
            )
            if chance.random() < 0.4:
                waiting[-1].take()
            if chance.random() < 0.1:
                time.sleep(0.001)
            while len(waiting) > 5:
                waiting.pop(chance.randrange(len(waiting))).cancel()
        for sequence in waiting:
            sequence.cancel()
        wait_until(lambda: engine.active == 0)
        del waiting
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with running(runtime, parallel=3, chunk=32, host_bytes=20_000, **control(drafter, Fixed(draft_length=4))) as engine:
        threads = engine_threads()
        tracemalloc.start()
        try:
            runtime.calls, runtime.spans, runtime.truncations = Nowhere(), Nowhere(), Nowhere()
            first = abort(engine, 1000)
            grown = abort(engine, 1000) - first
        finally:
            tracemalloc.stop()
        assert drafter.stats()["tracks"] == 0
        assert drafter.stats()["bytes"] <= 50_000
        assert engine_threads() == threads
        assert len(engine._slots._pins) <= runtime.sequences
        assert grown < 300_000, f"a thousand requests left {grown:,} bytes"
        read(engine.submit(job("after", output=3)))


class Nowhere(list[Any]):
    """What a scripted runtime notes of its calls goes here."""

    def append(self, item: Any) -> None: ...


# Grammar (cases 42, 43)


@pytest.mark.parametrize("name", ["none", "suffix", "random", "right"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_acts_on_every_verified_position(name: str, temperature: float) -> None:
    """Drafts outside the grammar are cut before they cost anything, its state moves with accepted tokens only, and nothing
    comes after its end."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "grey"]}, "n": {"type": "integer", "minimum": 10, "maximum": 9999}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    rng = random.Random(3)
    guesses: dict[str, Any] = {
        "suffix": SuffixDrafter(),
        "random": GuessDrafter(lambda tokens, k: [rng.randrange(257) for _ in range(k)]),
        "right": GuessDrafter(lambda tokens, k: list(b'{"colour": "gr')[len(tokens) - 6 :][:k]),
    }
    runtime = Fickle()
    options = {} if name == "none" else control(guesses[name], Fixed(draft_length=6))
    with running(runtime, parallel=2, **options) as engine:
        runtime.hand_over()
        grammar = Vocabulary(runtime).compile("schema", schema)
        runtime.hand_over()
        jobs = [job(grammar=grammar, sampling=Sampling(seed=i, temperature=temperature), output=200) for i in range(6)]
        found = read_all([engine.submit(one) for one in jobs])
    for events in found:
        value = json.loads(text(events))
        assert value["colour"] in ("red", "green", "grey")
        assert 10 <= value["n"] <= 9999
        assert finish(events).reason == "stop"
    assert [text(events) for events in found] == STRUCTURED.setdefault(temperature, [text(events) for events in found])
    if name == "right":
        assert all((usage(events).accepted or 0) > 5 for events in found)


STRUCTURED: dict[float, list[str]] = {}
"""What came without drafts, by temperature."""


class Fickle(ScriptedRuntime):
    """Logits that depend on the last tokens; blanks, which the grammar allows nearly everywhere, are improbable."""

    def _row(self, handle: int) -> NDArray[np.float32]:
        tokens, _ = self._rows[handle]
        row = (2 * np.random.default_rng(tokens[-3:]).standard_normal(257)).astype(np.float32)
        row[[9, 10, 13, 32]] -= 40
        return row
