"""What one request's data, a drafter or a policy does wrong stays with it: everybody else goes on, with the same text."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.loop_support import job, read, read_all, running, text, usage
from tests.engine.scripted import ScriptedRuntime, says, wait_until
from tests.engine.speculate import GuessDrafter

from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.base import Draft
from cachespec.engine.processors import Processing
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job
from cachespec.engine.speculation import AcceptancePolicy, Choice, CostTable, Step
from cachespec.engine.structured import GrammarError, Vocabulary
from cachespec.engine.toolcalls import Piece, PlainText
from cachespec.errors import BackendError, EngineStoppedError, InputError, ServerError, UnsupportedParameterError
from cachespec.policies.acceptance import Fixed, Goodput

ANSWER = "abcdefghij" * 12
TABLE = CostTable({1: {1: 1e-3, 64: 2e-3}, 2: {2: 1e-3, 64: 2e-3}})


def control(drafter: Any, policy: AcceptancePolicy | None = None) -> dict[str, Any]:
    costs = CostModel(TABLE)
    policy = policy or Fixed(draft_length=4)
    return {"control": SpeculationControl(policy, drafter, costs=costs, max_tokens=512), "costs": costs}


def right(tokens: list[int], length: int) -> list[int]:
    return list(ANSWER.encode()[len(tokens) - 6 :][:length])


# One request's own data


class Broken:
    """A grammar whose methods may fail: `at` says in which, after so many tokens."""

    def __init__(self, method: str, error: Exception, after: int = 0) -> None:
        self.method, self.error, self.after, self.seen = method, error, after, 0
        self.asked: list[str] = []

    def start(self) -> Broken:
        self._ask("start")
        return Broken(self.method, self.error, self.after)

    def _ask(self, method: str) -> None:
        self.asked.append(method)
        if method == self.method and self.seen >= self.after:
            raise self.error

    @property
    def finished(self) -> bool:
        self._ask("finished")
        return False

    def valid(self, drafts: Sequence[int]) -> int:
        self._ask("valid")
        return len(drafts)

    def masks(self, drafts: Sequence[int]) -> list[Any]:
        import numpy as np

        self._ask("masks")
        return [np.full(9, 2**32 - 1, np.uint32) for _ in range(len(drafts) + 1)]

    def accept(self, tokens: Sequence[int]) -> None:
        self._ask("accept")
        self.seen += len(tokens)


class Picky(PlainText):
    """A parser that fails: at once, or at the end."""

    def __init__(self, when: str) -> None:
        self.when = when

    def push(self, text: str) -> list[Piece]:
        if self.when == "push" and "f" in text:
            raise KeyError("unexpected")
        return super().push(text)

    def finish(self) -> list[Piece]:
        if self.when == "finish":
            raise RecursionError("too deep")
        return super().finish()


def beside(culprit: Job, *, drafting: bool = False, runtime: ScriptedRuntime | None = None) -> BackendError:
    """Runs a job that fails beside one that does not, and another after it; nothing is left of it (`running`)."""
    runtime = runtime or ScriptedRuntime(says(ANSWER, after=6))
    drafter = GuessDrafter(right)
    with running(runtime, parallel=2, **(control(drafter) if drafting else {})) as engine:
        other = engine.submit(job(output=100))
        bad = engine.submit(culprit)
        with pytest.raises(BackendError) as error:
            read(bad)
        assert text(read(other)) == ANSWER[:100]
        assert text(read(engine.submit(job("third!", output=40)))) == ANSWER[:40]
        assert engine.failure is None
        if drafting:
            assert engine.report()["speculation"].fault is None
    assert drafter.stats()["tracks"] == 0
    assert not error.value.retryable
    assert error.value.backend == "test"
    return error.value


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("method", ["masks", "accept", "finished"])
def test_a_grammar_that_fails_fails_its_request_only(method: str, after: int, drafting: bool) -> None:
    grammar: Any = Broken(method, RuntimeError("lost its way"), after)
    error = beside(job(output=50, grammar=grammar), drafting=drafting)
    assert isinstance(error, ServerError)
    assert "lost its way" in str(error)


def test_a_grammar_that_does_not_start_fails_its_request_only() -> None:
    grammar: Any = Broken("start", RuntimeError("lost its way"))
    assert isinstance(beside(job(output=50, grammar=grammar)), ServerError)


def test_a_grammar_that_cannot_judge_drafts_is_decoded_plainly() -> None:
    grammar: Any = Broken("valid", RuntimeError("who knows"))
    with running(ScriptedRuntime(says(ANSWER, after=6)), **control(GuessDrafter(right))) as engine:
        events = read(engine.submit(job(output=50, grammar=grammar)))
    assert text(events) == ANSWER[:50]
    assert usage(events).drafted == 0


class Shy(Broken):
    """Fails for what drafts lead to."""

    def start(self) -> Broken:
        return Shy(self.method, self.error)

    def masks(self, drafts: Sequence[int]) -> list[Any]:
        if drafts:
            raise GrammarError("too complex")
        return super().masks(drafts)


def test_drafts_that_lead_a_grammar_astray_are_not_looked_at() -> None:
    grammar: Any = Shy("none", RuntimeError())
    with running(ScriptedRuntime(says(ANSWER, after=6)), **control(GuessDrafter(right))) as engine:
        events = read(engine.submit(job(output=50, grammar=grammar)))
        assert engine.failure is None
        stats = engine.report()["speculation"]
        assert stats is not None
        (source,) = stats.sources.values()
        assert not any(tried > right for tried, right in source.positions)  # nobody looked at them: they were not wrong
    assert text(events) == ANSWER[:50]
    assert usage(events).accepted == 0


@pytest.mark.parametrize("when", ["push", "finish"])
def test_a_parser_that_fails_fails_its_request_only(when: str) -> None:
    error = beside(job(output=50, parser=Picky(when)))
    assert isinstance(error, ServerError)


class Undrawable(ScriptedRuntime):
    """Cannot draw for one seed."""

    def __init__(self, *, together: bool) -> None:
        super().__init__(says(ANSWER, after=6))
        self.info = replace(self.info, draws_together=together)

    def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        if any(how.seed == 13 for how in sampling):
            raise ValueError("no such row")
        return super().draw(rows, sampling, positions)


@pytest.mark.parametrize("together", [False, True])
def test_rows_that_cannot_be_drawn_from_fail_their_request_only(together: bool) -> None:
    error = beside(job(output=9, sampling=Sampling(seed=13)), runtime=Undrawable(together=together))
    assert isinstance(error, ServerError)
    assert "no such row" in str(error)


def test_a_runtime_that_cannot_draw_at_all_ends_the_engine() -> None:
    """That is nobody's own data, and whoever waits may go elsewhere."""

    class Gone(ScriptedRuntime):
        def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
            raise RuntimeError("the device fell off")

    with running(Gone(), parallel=2) as engine:
        for sequence in [engine.submit(job()), engine.submit(job("other!"))]:
            with pytest.raises(EngineStoppedError, match="fell off"):
                read(sequence)


def test_extreme_penalties_make_no_noise_and_fail_their_request_at_most() -> None:
    for how in (Processing(repetition_penalty=1e308), Processing(frequency_penalty=1.7e308, presence_penalty=1.7e308)):
        with running(ScriptedRuntime()) as engine:
            assert len(text(read(engine.submit(job(output=20, processing=how))))) == 20
    banned = Processing(logit_bias={token: float("-inf") for token in range(257)})
    assert "finite maximum" in str(beside(job(output=9, processing=banned)))


def test_a_waiter_that_fails_counts_as_a_reader_who_left() -> None:
    def waiter() -> None:
        raise KeyError("no loop")

    with running(ScriptedRuntime(delay_s=0.001)) as engine:
        sequence = engine.submit(job(output=2000))
        while not sequence.when_ready(waiter):
            sequence.take()
        wait_until(lambda: sequence.done)
        assert engine.failure is None
    assert sequence.cancelled


# Grammars of the library that go wrong

LOST: list[Any] = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", LOST[:3])
def test_a_schema_whose_first_token_cannot_be_said_is_refused(schema: Any) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(InputError, match="followed") as error:
        Vocabulary(ScriptedRuntime()).compile("schema", schema)
    assert error.value.field == "response_format"
    assert "<state>" not in str(error.value)


def test_a_schema_that_is_no_text_is_refused() -> None:
    pytest.importorskip("llguidance")
    deep: Any = {"type": "string"}
    for _ in range(20_000):
        deep = {"items": deep}
    vocabulary = Vocabulary(ScriptedRuntime())
    cases: list[Any] = [deep, {"const": object()}]
    for schema in cases:
        with pytest.raises(InputError) as error:
            vocabulary.compile("schema", schema)
        assert error.value.field == "response_format"


@pytest.mark.parametrize("drafting", [False, True])
def test_a_grammar_that_breaks_in_the_middle_fails_its_request_and_says_which_field(drafting: bool) -> None:
    pytest.importorskip("llguidance")
    grammar = Vocabulary(ScriptedRuntime()).compile("schema", LOST[3])
    spoken = '{"a":' + ANSWER

    def following(tokens: Sequence[int]) -> int:
        said = spoken if bytes(tokens[:6]) == b"broken" else ANSWER
        return said.encode()[len(tokens) - 6]

    runtime = ScriptedRuntime(following)
    speculation = (
        control(GuessDrafter(lambda tokens, k: [following([*tokens, *range(i)]) for i in range(k)])) if drafting else {}
    )
    with running(runtime, parallel=2, **speculation) as engine:
        other = engine.submit(job(output=100))
        with pytest.raises(UnsupportedParameterError, match="response_format"):
            read(engine.submit(job("broken", output=50, grammar=grammar)))
        assert text(read(other)) == ANSWER[:100]
        assert engine.failure is None


# Drafters and policies


def draft(*tokens: int, source: str = "odd", confidence: Sequence[float] | None = None) -> Draft:
    given = (0.9,) * len(tokens) if confidence is None else tuple(confidence)
    return Draft(source=source, tokens=tokens, confidence=given)


class OddDrafter:
    """Right for a while, then what `says` makes of the tokens and the length. `raises`: the method that fails."""

    name, sources = "odd", ("odd",)

    def __init__(self, says: Callable[[int], Any] | None = None, *, raises: str | None = None, pending: bool = False) -> None:
        self._says, self._raises, self._pending, self._asked, self.calls = says, raises, pending, 0, list[str]()

    def _ask(self, method: str) -> None:
        self.calls.append(method)
        if method == self._raises:
            raise ValueError("out of its mind")

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None) -> list[int]:
        self._ask("open")
        return list(prompt)

    def prospects(self, tracks: Sequence[list[int]], limit: int) -> list[Draft]:
        self._ask("prospects")
        self._asked += 1
        if self._pending:
            return [Draft(source="odd", pending=True) for _ in tracks]
        return self._drafts(tracks, [limit] * len(tracks))

    def propose(self, tracks: Sequence[list[int]], lengths: Sequence[int]) -> list[Draft]:
        self._ask("propose")
        return self._drafts(tracks, lengths)

    def _drafts(self, tracks: Sequence[list[int]], lengths: Sequence[int]) -> list[Draft]:
        if self._says is not None and self._asked > 1:
            return [self._says(length) for length in lengths]
        return [draft(*right(track, length)) for track, length in zip(tracks, lengths, strict=True)]

    def accept(self, track: list[int], tokens: Sequence[int]) -> None:
        self._ask("accept")
        track += tokens

    def close(self, track: list[int], *, learn: bool) -> None:
        self._ask("close")

    def stats(self) -> dict[str, int]:
        return {"tracks": 0, "bytes": 0}

    def stop(self) -> None:
        self._ask("stop")


class OddPolicy:
    def __init__(self, chooses: Callable[[Step], Any], most: Any = 4) -> None:
        self._chooses, self.max_length = chooses, most

    def choose(self, step: Step) -> Any:
        return self._chooses(step)


def fails(step: Step) -> Any:
    raise ZeroDivisionError("no idea")


def chooses(length: Any, **more: Any) -> Callable[[Step], list[Choice]]:
    return lambda step: [Choice(length=length, reason="rule", **more) for _ in step.candidates]


ODD: dict[str, Callable[[int], Any]] = {
    "beyond the vocabulary": lambda n: draft(99_999),
    "just beyond": lambda n: draft(257),
    "negative": lambda n: draft(97, -1),
    "no integer": lambda n: draft(97.0),  # type: ignore[arg-type]
    "unknown source": lambda n: draft(97, source="who"),
    "confidence missing": lambda n: draft(97, 98, confidence=(0.5,)),
    "confidence not a number": lambda n: draft(97, 98, confidence=(0.5, float("nan"))),
    "confidence above one": lambda n: draft(97, confidence=(5.0,)),
    "too long": lambda n: draft(*range(97, 98 + n)),
    "nothing": lambda n: None,
}
POLICIES: dict[str, OddPolicy] = {
    "raises": OddPolicy(fails),
    "too few": OddPolicy(lambda step: []),
    "no list": OddPolicy(lambda step: None),
    "float": OddPolicy(chooses(1.5)),
    "negative": OddPolicy(chooses(-3)),
    "huge": OddPolicy(chooses(10**9)),
    "wanted": OddPolicy(chooses(0, wanted=-1)),
    "max_length": OddPolicy(chooses(0), most="four"),
}


def goes_on(drafter: Any, policy: AcceptancePolicy | None, caplog: pytest.LogCaptureFixture, says: str) -> None:
    """Two answers at once and one later are right, and it is said once, in the log and in the report, what went wrong."""
    caplog.set_level(logging.WARNING, "cachespec")
    with running(ScriptedRuntime(says_answer), parallel=2, **control(drafter, policy)) as engine:
        for events in read_all([engine.submit(job(output=60)), engine.submit(job("other!", output=70))]):
            assert text(events) == ANSWER[: usage(events).output]
            assert usage(events).output in (60, 70)
        calls = len(getattr(drafter, "calls", ()))
        assert text(read(engine.submit(job("later!", output=50)))) == ANSWER[:50]
        assert len(getattr(drafter, "calls", ())) == calls, "it is asked nothing more"
        stats = engine.report()["speculation"]
        assert says in stats.fault
        assert stats.to_dict()["fault"] == stats.fault
        assert engine._control is not None
        assert engine._control.forecast(100).choice.length == 0
    assert len([r for r in caplog.records if "speculation is off" in r.message and says in r.message]) == 1


def says_answer(tokens: Sequence[int]) -> int:
    return ANSWER.encode()[len(tokens) - 6]


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_a_drafter_that_answers_nonsense_is_switched_off(name: str, pending: bool, caplog: pytest.LogCaptureFixture) -> None:
    goes_on(OddDrafter(ODD[name], pending=pending), None, caplog, "drafter odd")


@pytest.mark.parametrize("name", ["negative", "confidence not a number", "unknown source"])
def test_so_it_is_whatever_the_policy(name: str, caplog: pytest.LogCaptureFixture) -> None:
    goes_on(OddDrafter(ODD[name]), Goodput(), caplog, "drafter odd")


@pytest.mark.parametrize("method", ["open", "prospects", "propose", "accept", "close"])
def test_a_drafter_that_raises_is_switched_off(method: str, caplog: pytest.LogCaptureFixture) -> None:
    goes_on(OddDrafter(raises=method, pending=method == "propose"), None, caplog, f"drafter odd: {method}: ValueError")


def test_a_drafter_that_cannot_stop_does_not_keep_the_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "cachespec")
    with running(ScriptedRuntime(says_answer), **control(OddDrafter(raises="stop"))) as engine:
        assert text(read(engine.submit(job(output=60)))) == ANSWER[:60]
    assert engine.failure is None
    assert "drafter odd: stop" in caplog.text


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_fails_is_switched_off(name: str, caplog: pytest.LogCaptureFixture) -> None:
    goes_on(GuessDrafter(right), POLICIES[name], caplog, "acceptance policy OddPolicy")


def test_a_policy_that_fails_before_anything_ran_makes_no_forecast() -> None:
    made = SpeculationControl(OddPolicy(fails), GuessDrafter(right), costs=None, max_tokens=64)
    assert made.forecast(50).choice.length == 0
    assert "ZeroDivisionError" in (made.stats().fault or "")


# A forked process


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_no_engine() -> None:
    """Whatever lock somebody held when it was forked."""
    with running(ScriptedRuntime()) as engine:
        read(engine.submit(job(output=5)))
        with engine._condition:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:  # no test runs on in here
                try:
                    engine.submit(job(output=5))
                    said = b"queued"
                except EngineStoppedError as error:
                    engine.close()
                    said = f"{engine.active} {engine.backlog} {error}".encode()
                except BaseException as error:
                    said = repr(error).encode()
                os.write(writer, said)
                os._exit(0)
        os.close(writer)
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
        with os.fdopen(reader) as pipe:
            assert pipe.read().startswith("0 (0, 0) test: the engine runs in the process")
        assert len(text(read(engine.submit(job(output=5))))) == 5
