"""The deterministic mode on the real small model: a seed's text depends on nothing but the request (contract E2)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.loop_support import read, read_all, text, usage
from tests.engine.scripted import wait_until
from tests.engine.speculate import GuessDrafter
from tests.engine.tiny_models import llama

from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.engine.invariance import invariant_width, search
from cachespec.engine.loop import Engine
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job
from cachespec.engine.speculation import CostTable
from cachespec.errors import ConfigError
from cachespec.policies.acceptance import Fixed

pytestmark = pytest.mark.model
WIDTH = 40
PROMPTS = (
    "The tide tables for the harbour are: Monday 6:10, Tuesday 6:55, Wednesday 7:40. The tide tables for",
    "Write one line about a fox. A fox",
    "one two three one two three one two three one two",
)


class Reused(LlamaCppRuntime):
    """Survives its engines: loading takes longer than the tests."""

    def close(self) -> None:
        if self._model:
            for sequence in range(self.sequences):
                self.free(sequence)

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Reused]:
    pytest.importorskip("llama_cpp")
    try:
        path = find_model("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    loaded = Reused(path, context=256, threads=1, sequences=5, isolated=True, width=WIDTH, flash_attention=True)
    yield loaded
    loaded.end()


@pytest.fixture(scope="module")
def width(runtime: Reused) -> int:
    found = invariant_width(runtime)
    assert found >= 8, "nothing can be drafted inside a width like this"
    return found


def jobs(runtime: Reused) -> list[Job]:
    found = []
    for temperature in (0.0, 0.7, 1.0):
        for i, prompt in enumerate(PROMPTS):
            tokens = tuple(runtime.tokenize(prompt, special=False))
            sampling = Sampling(seed=40 + i, temperature=temperature, top_p=0.95 if i == 1 else None)
            found.append(Job(prompt=tokens, sampling=sampling, output=12))
    return found


def answers(
    runtime: Reused,
    width: int,
    drafter: Any,
    *,
    together: bool,
    twice: bool = False,
    work: Callable[[Reused], list[Job]] = jobs,
) -> list[list[str]]:
    """The answers, and again with what was kept of the first time."""
    options: dict[str, Any] = {}
    if drafter is not None:
        costs = CostModel(CostTable({1: {1: 1e-3}}))
        options["control"] = SpeculationControl(Fixed(draft_length=5), drafter, costs=costs, max_tokens=width)
    engine = Engine(runtime, parallel=3, prefill_chunk=16 if together else 64, width=width, **options)
    engine.start()
    try:
        found = []
        for _ in range(1 + twice):
            if together:
                events = read_all([engine.submit(job) for job in work(runtime)])
            else:
                events = [read(engine.submit(job)) for job in work(runtime)]
            found.append([text(e) for e in events])
            hits = sum(usage(e).cache_read or 0 for e in events)
            drafted = sum(usage(e).drafted or 0 for e in events)
        assert hits > 0
        assert (drafted > 0) is (drafter is not None)
        wait_until(lambda: engine.active == 0)
    finally:
        engine.close()
    return found


@pytest.fixture(scope="module")
def expected(runtime: Reused, width: int) -> list[str]:
    """One request at a time, without drafts."""
    (found,) = answers(runtime, width, None, together=False)
    assert len(set(found)) == len(found)
    return found


RANDOM = random.Random(11)
DRAFTERS: dict[str, Callable[[], Any]] = {
    "suffix": SuffixDrafter,
    "random": lambda: GuessDrafter(lambda tokens, k: [RANDOM.randrange(300, 49000) for _ in range(k)]),
    "adversarial": lambda: GuessDrafter(lambda tokens, k: [*tokens[-3:], *tokens[-3:]][:k]),
}


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_a_seed_gives_one_text_with_any_drafter(runtime: Reused, width: int, expected: list[str], name: str) -> None:
    """In a batch of three, in other chunks, from a cold start and from what was kept."""
    for found in answers(runtime, width, DRAFTERS[name](), together=True, twice=name == "suffix"):
        assert found == expected


LONG = "".join(f"Boat {i} left the harbour at {i % 24}:{i * 7 % 60:02d}, with {i * i % 97} boxes. " for i in range(40))


def long_jobs(runtime: Reused) -> list[Job]:
    """Answers that pass 256, 512 and 1,024 tokens, and one that begins like another."""
    prompts = [LONG[:230], LONG[300:790], LONG[300:700] + "And then", LONG[:1010]]
    sampled = [Sampling(seed=i, temperature=i % 2) for i in range(len(prompts))]
    return [Job(prompt=tuple(p.encode()), sampling=s, output=30) for p, s in zip(prompts, sampled, strict=True)]


def test_a_seed_gives_one_text_behind_many_tokens(tmp_path: Path) -> None:
    """With two threads llama.cpp has another kernel for a lone row behind more than 256 tokens. A small model will do."""
    pytest.importorskip("llama_cpp")
    path = llama(tmp_path / "tiny.gguf")
    guesses = GuessDrafter(lambda tokens, k: [RANDOM.randrange(256) for _ in range(k)])
    found = []
    for threads in (1, 2):
        loaded = Reused(path, context=1100, threads=threads, sequences=5, isolated=True, width=64, flash_attention=True)
        try:
            assert search(loaded, seconds=120) == (64, True)
            found += answers(loaded, 64, None, together=False, work=long_jobs)
            if threads == 2:
                found += answers(loaded, 64, guesses, together=True, work=long_jobs)
                found += answers(loaded, 64, SuffixDrafter(), together=True, twice=True, work=long_jobs)
        finally:
            loaded.end()
    assert len(set(found[0])) == len(found[0])
    for other in found[1:]:
        assert other == found[0]
