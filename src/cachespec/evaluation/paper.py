"""Decoding on paper: the live control, policy and drafter over answers that are known, and a clock that is calculated.

What a call takes comes from t(n), measured on this machine at a short and at a long context, since attention makes long ones
dearer. What the control believes is the saved calibration, as in a live engine, corrected step by step by what calls "took".
Choosing, and drafting from memory, are timed as they run; so is a draft model, which really runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, thread_time
from typing import Any, Final

from cachespec.engine.accounts import Outcome, Plan
from cachespec.engine.contained import Fault
from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.base import Drafter
from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import AcceptancePolicy, CostTable
from cachespec.engine.verify import clip
from cachespec.evaluation.interval import Counts
from cachespec.policies.acceptance import Fixed

SHADOW: Final = 8
"""Length of the drafts that acceptance is counted on, whatever a policy would choose."""
SHORT: Final = 64
_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 25)
_ROUNDS = 7
_END: Final = -1  # stands for the end token, which no drafter proposes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request with its answer, as tokens.

    Attributes:
        output: the most tokens that the answer could have.
        ended: it ended by itself, with an end token that took a step of its own.
        namespace: whose answers its drafter may learn from; None: nobody's.
    """

    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    sampling: Sampling
    output: int
    ended: bool
    namespace: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One request on paper: seconds of plain decoding and of the policy's, calls, tokens, and what was right of its drafts."""

    category: str
    plain_s: float
    seconds: float
    calls: int
    tokens: int


class Truth:
    """t(n) at any context: a line between two measured ones, for each number of tokens."""

    def __init__(self, tables: dict[int, CostTable]) -> None:
        self._tables = sorted(tables.items())

    @classmethod
    def measure(cls, runtime: Runtime, longest: int, *, seconds: float = 6.0) -> Truth:
        """Measure calls of one sequence that holds `SHORT` tokens, and `longest`. The sequences are empty afterwards.

        Where one thread of the CPU does everything, its CPU seconds count, which other processes disturb least.
        """
        clock = thread_time if on_this_thread(runtime) else perf_counter
        widths = [n for n in _WIDTHS if n <= runtime.width]
        room = min(runtime.info.context, runtime.info.room or runtime.info.context) - max(widths)
        contexts = sorted({max(1, min(SHORT, room)), max(1, min(longest, room))})
        try:
            return cls({c: _measured(runtime, c, widths, seconds / len(contexts), clock) for c in contexts})
        finally:
            runtime.free(0)

    def seconds(self, tokens: int, context: int) -> float:
        """Of a call that evaluates so many tokens of one sequence that holds `context`."""
        (low, first), (high, last) = self._tables[0], self._tables[-1]
        a = first.seconds(1, tokens)
        if high == low:
            return a
        b = last.seconds(1, tokens)
        return max(a + (b - a) * (context - low) / (high - low), min(a, b) / 2)


def on_this_thread(runtime: Runtime) -> bool:
    """Whether calls run on the thread that makes them, and nowhere else."""
    facts = runtime.facts()
    library = str(facts.get("library", "")).rpartition(", ")[2]
    return facts.get("threads") == 1 and (facts.get("device") == "cpu" or library.startswith("CPU"))


def _measured(runtime: Runtime, context: int, widths: Sequence[int], seconds: float, clock: Callable[[], float]) -> CostTable:
    """The fastest of some rounds over all widths, since whatever else the machine does only ever adds."""
    runtime.free(0)
    vocab = runtime.info.vocab
    for at in range(0, context, runtime.width):
        part = [(7 * i + 3) % vocab for i in range(at, min(context, at + runtime.width))]
        runtime.evaluate([Span(sequence=0, start=at, tokens=part)])
    greedy = Sampling(seed=0, temperature=0)
    best = dict.fromkeys(widths, float("inf"))
    until = perf_counter() + seconds
    for turn in range(_ROUNDS):
        for width in widths:
            if turn and perf_counter() > until:
                break
            tokens = [(11 * i + 5) % vocab for i in range(width)]
            before = clock()
            rows = runtime.evaluate([Span(sequence=0, start=context, tokens=tokens, rows=width)])
            runtime.draw(rows, [greedy] * width, [context + j + 1 for j in range(width)])
            best[width] = min(best[width], max(clock() - before, 1e-9))
            runtime.truncate(0, context)
    return CostTable({1: best})


def play(
    samples: Sequence[Sample],
    policy: AcceptancePolicy,
    drafter: Drafter[Any],
    *,
    truth: Truth,
    believed: CostTable,
    runtime: Runtime,
    width: int,
) -> Iterator[Played]:
    """The samples one after another, as one client's requests to an engine that decodes one at a time. Raises Fault."""
    control = SpeculationControl(policy, drafter, costs=CostModel(believed), max_tokens=width)
    for sample in samples:
        yield _play(sample, control, truth, runtime)


def shadow(samples: Sequence[Sample], drafter: Drafter[Any], runtime: Runtime) -> Iterator[Counts]:
    """Accepted and rejected tokens of each sample, for drafts of `SHADOW` tokens at every place that verifying reaches.

    Raises Fault.
    """
    control = SpeculationControl(Fixed(draft_length=SHADOW), drafter, costs=None, max_tokens=1 + SHADOW)
    before = (0, 0)
    for sample in samples:
        _play(sample, control, None, runtime)
        pairs = [pair for source in control.stats().sources.values() for pair in source.positions]
        tried, right = sum(t for t, _ in pairs), sum(r for _, r in pairs)
        now = (right, tried - right)
        yield now[0] - before[0], now[1] - before[1]
        before = now


def _play(sample: Sample, control: SpeculationControl, truth: Truth | None, runtime: Runtime) -> Played:
    track = control.open(sample.prompt, sampling=sample.sampling, namespace=sample.namespace, output=sample.output)
    text = [*sample.answer, *([_END] if sample.ended else [])]
    plain = seconds = 0.0
    calls, at = 0, 1
    control.accept(track, sample.answer[:1])  # it is drawn from the prompt, whoever drafts
    while at < len(text):
        held, left = len(sample.prompt) + at - 1, sample.output - at
        wall, cpu = perf_counter(), thread_time()
        plan = control.plan([track], [left])[0]
        drafts = clip(plan.draft.tokens, room=runtime.info.context - held, left=left, is_end=runtime.is_end)
        plan = _first(plan, len(drafts))
        took = perf_counter() - wall if plan.computed else thread_time() - cpu
        right = next((i for i, token in enumerate(drafts) if token != text[at + i]), len(drafts))
        emitted = [token for token in text[at : at + right + 1] if token != _END]
        call = 0.0 if truth is None else truth.seconds(1 + len(drafts), held)
        cpu = thread_time()
        control.settle([track], [plan], [Outcome(right, emitted)], max(call, 1e-9))
        seconds += call + took + thread_time() - cpu
        if truth is not None:
            plain += sum(truth.seconds(1, held + i) for i in range(min(right + 1, len(text) - at)))
        calls += 1
        at += right + 1
    control.close(track, learn=True)
    if control.fault is not None:  # live it would go on plainly; here it would look like a drafter that is never right
        raise Fault(control.fault)
    return Played(category=sample.category, plain_s=plain, seconds=seconds, calls=calls, tokens=max(0, len(text) - 1))


def _first(plan: Plan, length: int) -> Plan:
    return plan if length == len(plan.draft.tokens) else replace(plan, draft=plan.draft.first(length))
