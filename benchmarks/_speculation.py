"""What the speculation benchmarks share: one engine whose speculation is changed between requests, and paired statistics.

All candidates run on the same engine, the same loaded weights and the same KV, one request after another in turning order, so
that whatever the machine does hits all of them. What other processes took of the cores meanwhile is measured too, and a run
that they disturbed is made again. Plain decoding is an engine without speculation, not one that drafts nothing: what choosing
costs is on the other side.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeVar

from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.backends.torch import TorchBackend
from cachespec.engine.accounts import Outcome, Plan
from cachespec.engine.chat import ChatTemplate
from cachespec.engine.control import SpeculationControl, Track
from cachespec.engine.costs import CostModel, calibrate
from cachespec.engine.drafters.base import Drafter
from cachespec.engine.loop import Engine
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job
from cachespec.engine.speculation import AcceptancePolicy, CostTable
from cachespec.messages import Message, TextPart
from cachespec.policies.acceptance import Never

GREEDY = Sampling(seed=0, temperature=0.0)
QUIET = 0.1
"""Share of a core that others may take from a run that counts."""
TRIES = 3
_TICK = 0.01  # seconds that /proc/stat counts in
T = TypeVar("T")


def busy_s() -> float:
    """Seconds that all cores together were busy, time stolen from this machine included; 0 where it is not known."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) * _TICK


def undisturbed(measure: Callable[[], tuple[T, float]], *, threads: int | None = None, tries: int = TRIES) -> tuple[T, float]:
    """What `measure` gives, with the share of a core that others took from its threads. It returns its value and the CPU
    seconds it used.

    Measured again while others are at work; after so many tries the least disturbed counts. Cores without a thread of ours
    are others' to use (`threads` None: there are none).
    """
    cores = os.cpu_count() or 1
    spare = cores - (threads or cores)
    best: tuple[T, float] | None = None
    for _ in range(tries):
        busy, began = busy_s(), perf_counter()
        value, own = measure()
        wall = perf_counter() - began
        others = max(0.0, (busy_s() - busy - own - 2 * _TICK) / wall - spare)
        if best is None or others < best[1]:
            best = value, others
        if others <= QUIET:
            break
    assert best is not None
    return best


@dataclass(slots=True)
class Passes:
    """What a request's steps were: drafts by their length, tokens that came of them, seconds spent on choosing."""

    lengths: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    emitted: int = 0
    planning_s: float = 0.0

    def add(self, plan: Plan, outcome: Outcome) -> None:
        size = len(plan.draft.tokens)
        self.lengths[size] += 1
        self.drafted += size
        self.accepted += outcome.accepted
        self.rejected += outcome.accepted < size
        self.emitted += len(outcome.tokens)


class Switch(SpeculationControl):
    """The control of an engine that stands for several: `current` is asked; None decodes as without one.

    `cpu`: what a step took is told in CPU seconds.
    """

    def __init__(self, *, cpu: bool) -> None:
        super().__init__(Never(), None, costs=None, max_tokens=1)
        self.current: SpeculationControl | None = None
        self.passes = Passes()
        self._cpu, self._planned = cpu, 0.0

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None, output: int) -> Track:
        self.passes = Passes()
        if self.current is None:
            return None  # type: ignore[return-value]  # what the stepper has without a control
        return self.current.open(prompt, sampling=sampling, namespace=namespace, output=output)

    def close(self, track: Track, *, learn: bool) -> None:
        if self.current is not None:
            self.current.close(track, learn=learn)

    def plan(self, tracks: Sequence[Track], remaining: Sequence[int]) -> list[Plan]:
        assert self.current is not None
        began = perf_counter()
        plans = self.current.plan(tracks, remaining)
        self.passes.planning_s += perf_counter() - began
        self._planned = process_time()
        return plans

    def settle(self, tracks: Sequence[Track], plans: Sequence[Plan], outcomes: Sequence[Outcome], seconds: float) -> None:
        assert self.current is not None
        if self._cpu:
            seconds = process_time() - self._planned
        began = perf_counter()
        self.current.settle(tracks, plans, outcomes, seconds)
        self.passes.planning_s += perf_counter() - began
        for plan, outcome in zip(plans, outcomes, strict=True):
            self.passes.add(plan, outcome)

    def accept(self, track: Track, tokens: Sequence[int]) -> None:
        if self.current is not None:
            self.current.accept(track, tokens)

    def stop(self) -> None:
        """Drafters are the bench's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request: seconds from its first token to its end, and of all of it; the tokens of the answer.

    `decode_cpu_s` and `whole_cpu_s` are the same in CPU seconds of this process. `others`: the share of a core that other
    processes took meanwhile.
    """

    decode_s: float
    decode_cpu_s: float
    whole_s: float
    whole_cpu_s: float
    tokens: tuple[int, ...]
    passes: Passes
    others: float = 0.0


class Bench:
    """An engine and the candidates that run on it: `add` them, then `run`.

    `cpu`: on a machine that is not quiet, one thread is measured by the CPU seconds it took, which the engine's policy goes by.
    """

    def __init__(
        self, backend: LlamaCppBackend | TorchBackend, *, threads: int, cpu: bool = False, budget_s: float = 6.0
    ) -> None:
        self._threads, self._tries = threads, 1 if cpu else TRIES
        self.backend = backend
        self.runtime: Runtime = backend.load_runtime(lambda part: True)
        self._clock = clock = process_time if cpu else perf_counter

        def calibrated() -> CostTable:
            return calibrate(self.runtime, batches=(1,), seconds=budget_s, clock=clock)

        table = undisturbed(lambda: _own(calibrated), threads=threads, tries=self._tries)[0]
        self.costs: CostTable = table
        self._switch = Switch(cpu=cpu)
        self._controls: dict[str, SpeculationControl | None] = {}
        self._template = ChatTemplate(self.runtime.info)
        self._engine = Engine(self.runtime, parallel=1, prefill_chunk=128, control=self._switch, costs=CostModel(self.costs))
        self._engine.start()

    def add(self, name: str, policy: AcceptancePolicy | None, drafter: Drafter[Any] | None) -> None:
        """A candidate; policy None decodes plainly. Each has estimates and costs of its own."""
        control = None
        if policy is not None:
            costs = CostModel(self.costs)
            control = SpeculationControl(policy, drafter, costs=costs, max_tokens=self.runtime.width, clock=self._clock)
        self._controls[name] = control

    def prompt(self, text: str) -> tuple[int, ...]:
        """The tokens of one user message in the model's chat template."""
        return self._template.prompt(self.runtime, (), [Message(role="user", parts=(TextPart(text=text),))], ()).tokens

    def warm(self, prompt: tuple[int, ...]) -> None:
        """Evaluate a prompt once, so that every candidate finds its KV."""
        self._switch.current = None
        self._run(prompt, 1, "auto")

    def run(self, name: str, prompt: tuple[int, ...], tokens: int, *, reuse: bool = True) -> Run:
        """One request of at most so many tokens. `reuse`: of the KV of a prompt that was warmed."""
        self._switch.current = self._controls[name]
        cache = "no-write" if reuse else "off"
        run, others = undisturbed(
            lambda: _own(lambda: self._run(prompt, tokens, cache)), threads=self._threads, tries=self._tries
        )
        return replace(run, others=others)

    def _run(self, prompt: tuple[int, ...], tokens: int, cache: Any) -> Run:
        ready = threading.Event()
        began, cpu = perf_counter(), process_time()
        sequence = self._engine.submit(Job(prompt=prompt, sampling=GREEDY, output=tokens, cache=cache))
        first: tuple[float, float] | None = None
        while True:
            ended = sequence.done
            if not sequence.take():
                if ended:
                    break
                ready.clear()
                if sequence.when_ready(ready.set):
                    ready.wait()
            elif first is None:
                first = perf_counter(), process_time()
        now, used = perf_counter(), process_time()
        if sequence.error is not None:
            raise sequence.error
        answer = tuple(sequence.tokens[len(prompt) :])
        since, spent = first or (began, cpu)
        return Run(
            decode_s=now - since,
            decode_cpu_s=used - spent,
            whole_s=now - began,
            whole_cpu_s=used - cpu,
            tokens=answer,
            passes=self._switch.passes,
        )

    def close(self) -> None:
        self._engine.close()


def backend_for(runtime: str, *, model: str, threads: int, context: int) -> LlamaCppBackend | TorchBackend:
    """`runtime`: ``llamacpp``, or ``float32``, ``bfloat16``, ``int8`` of torch."""
    if runtime == "llamacpp":
        return LlamaCppBackend(name="bench", model=model, context=context, parallel=1, threads=threads)
    precision: Any = runtime
    return TorchBackend(
        name="bench",
        model=model,
        context=context,
        parallel=1,
        device="cpu",
        dtype=precision,
        threads=threads,
        prefill_chunk=128,
    )


def _own(measure: Callable[[], T]) -> tuple[T, float]:
    before = process_time()
    return measure(), process_time() - before


class Records:
    """What was measured, one JSON value a line in `file` as soon as it is there, so that a run that is cut short counts."""

    def __init__(self, file: Path | None) -> None:
        self.all: list[dict[str, Any]] = []
        self._file = file

    def add(self, record: dict[str, Any]) -> None:
        self.all.append(record)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")

    @staticmethod
    def read(files: Sequence[Path]) -> list[dict[str, Any]]:
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def interval(ratios: Sequence[float], *, rounds: int = 4000, seed: int = 0) -> tuple[float, float]:
    """The bootstrap 95 % interval of the geometric mean of paired ratios."""
    rng, logs = random.Random(seed), [math.log(ratio) for ratio in ratios]
    means = sorted(sum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(rounds))
    return math.exp(means[int(0.025 * rounds)]), math.exp(means[int(0.975 * rounds)])
