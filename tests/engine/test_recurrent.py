"""A recurrent model on llama.cpp: its state cannot be rewound, so there are no drafts, and reuse by checkpoints only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.engine.loop_support import read, read_all, running, text, usage
from tests.engine.speculate import GuessDrafter
from tests.engine.tiny_models import VOCAB, mamba

from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.runtimes.base import Span
from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job
from cachespec.engine.speculation import CostTable
from cachespec.policies.acceptance import Fixed

PROMPT = tuple(b"the quick brown fox jumps over the lazy dog, and then some more of it")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    return mamba(tmp_path_factory.mktemp("models") / "mamba.gguf")


def load(file: Path) -> LlamaCppRuntime:
    return LlamaCppRuntime(file, context=256, threads=1, sequences=4, width=64)


def test_it_is_recognised_and_says_what_it_cannot_do(file: Path) -> None:
    runtime = load(file)
    assert not runtime.info.rewinds
    tokens = list(PROMPT[:30])
    whole = runtime.rows(runtime.evaluate([Span(sequence=0, start=0, tokens=tokens, rows=1)]))
    assert not runtime.truncate(0, 10)
    runtime.free(0)
    runtime.evaluate([Span(sequence=0, start=0, tokens=tokens[:16])])
    assert not runtime.fork(0, 1, 8)
    assert runtime.length(1) == 0
    assert runtime.fork(0, 1, 16)
    assert runtime.import_state(2, runtime.export_state(0))
    for sequence in (0, 1, 2):
        row = runtime.rows(runtime.evaluate([Span(sequence=sequence, start=16, tokens=tokens[16:], rows=1)]))
        assert np.abs(row - whole).max() < 1e-5
    runtime.close()


def test_ids_that_only_fill_a_matrix_up_are_never_drawn(tmp_path: Path) -> None:
    """Case 30: here they would be the most probable ones."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    runtime = load(mamba(tmp_path / "padded.gguf", padding=6))
    assert runtime.info.vocab == VOCAB + 6
    rows = runtime.evaluate([Span(sequence=0, start=0, tokens=PROMPT[:20], rows=20)])
    found = runtime.rows(rows)
    assert np.isneginf(found[:, VOCAB:]).all()
    assert np.isfinite(found[:, :VOCAB]).all()
    for how in (Sampling(seed=1, temperature=0), Sampling(seed=1, temperature=2.0)):
        assert max(runtime.draw(rows, [how] * 20, list(range(1, 21)))) < VOCAB
    runtime.close()


def test_turns_go_on_from_checkpoints_and_no_draft_is_made(file: Path) -> None:
    sampling = Sampling(seed=3, temperature=1.0)
    drafter = GuessDrafter(lambda tokens, k: [tokens[-1]] * k)
    control = SpeculationControl(Fixed(), drafter, costs=CostModel(CostTable({1: {1: 1e-3}})), max_tokens=64)
    runtime = load(file)
    with running(runtime, parallel=2, host_bytes=1 << 20, control=control) as engine:
        first = Job(prompt=PROMPT, sampling=sampling, output=12)
        cold = read(engine.submit(first))
        warm = read(engine.submit(first))
        later = Job(prompt=(*PROMPT, *b" and a later question that is longer"), sampling=sampling, output=12)
        turns = read_all([engine.submit(later), engine.submit(first)])
        assert text(warm) == text(turns[1]) == text(cold)
        assert usage(cold).cache_read == 0
        assert [usage(events).cache_read for events in (warm, *turns)] == [64, 64, 64]
        assert usage(cold).drafted == 0
    with running(load(file), parallel=2) as engine:
        assert text(read(engine.submit(later))) == text(turns[0])
