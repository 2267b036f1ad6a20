"""A whole evaluation of a local backend: the real small model, one thread, a few short answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.backends.test_llamacpp import available
from tests.engine.tiny_models import mamba

from cachespec.backends._local import LocalBackend
from cachespec.config import Config, parse_config
from cachespec.engine.costs import CalibrationStore
from cachespec.engine.evidence import load_evidence
from cachespec.engine.models import find_model
from cachespec.errors import InputError
from cachespec.evaluation.page import html
from cachespec.evaluation.prompts import Slice, parse_prompts
from cachespec.evaluation.result import Evaluated
from cachespec.evaluation.run import evaluate
from cachespec.registry import build_backend

COPY = "Repeat exactly three times: The harbour master keeps the keys of the lighthouse in a blue tin box on the second shelf."
LINES = [
    f'{{"turns": ["{COPY}", "Again."], "category": "copy", "session_id": "a"}}',
    '{"prompt": "Say hello.", "temperature": 0, "max_output_tokens": 4}',
    '{"prompt": "Count.", "answer": "one two three one two three one two three one two three", "tenant": "acme"}',
]
LOCAL = """
[backends.laptop]
use = "llamacpp"
model = "smollm2"
context = 256
threads = 1
cost = { per_hour = "0.40" }
"""
HOSTED = """
[backends.claude]
use = "anthropic"
model = "claude-sonnet-5-5"
api_key = { env = "NOBODY_SET_THIS" }
[models.assistant]
backends = ["laptop", "claude"]
"""
model = pytest.mark.model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrations and evidence of all tests here: calls are measured once."""
    available()
    return tmp_path_factory.mktemp("calibrations")


def evaluated(
    folder: Path, text: str = LOCAL, prompts: Slice | None = None, told: list[tuple[str, int, int]] | None = None, **more: Any
) -> tuple[Evaluated, Config]:
    config = parse_config(text)
    slice_ = parse_prompts(LINES) if prompts is None else prompts

    async def run() -> Evaluated:
        return await evaluate(
            slice_,
            config,
            "laptop",
            progress=lambda *step: None if told is None else told.append(step),
            store=CalibrationStore(folder),
            **{"max_output_tokens": 24, "measure_s": 0.2, **more},
        )

    return anyio.run(run), config


def fingerprint(config: Config) -> bytes:
    backend = build_backend(config, "laptop")
    assert isinstance(backend, LocalBackend)
    runtime = backend.load_runtime(lambda part: True)
    try:
        return runtime.info.fingerprint
    finally:
        runtime.close()


@model
def test_drafters_are_scored_on_the_model_s_own_answers(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    done, config = evaluated(folder, LOCAL + HOSTED, told=told)
    found = done.evaluation.to_dict()
    assert found.keys() == {"backend", "groups", "prefix", "policies", "recommendation"}
    copy, other = found["groups"]
    assert (copy["category"], copy["requests"], other["category"], other["requests"]) == ("copy", 2, "other", 2)
    assert 0 < copy["tokens"] <= 48
    score = copy["drafters"]["suffix"]
    assert score.keys() == {"acceptance", "low", "high", "tokens_per_pass", "predicted_speedup"}
    assert 0 <= score["low"] <= score["acceptance"] <= score["high"] <= 1
    assert score["acceptance"] > 0.3, "it is told to copy"
    assert score["tokens_per_pass"] >= 1
    assert 0.5 < score["predicted_speedup"] < 8
    prefix = found["prefix"]
    assert 0 < prefix["shared_tokens"] == prefix["by_lifetime"]["any"] < prefix["total_tokens"]
    assert prefix["by_lifetime"]["5m"] is None
    assert {"only:laptop", "only:claude", "routing:cheapest"} <= found["policies"].keys()
    assert all(cost is not None and float(cost) > 0 for cost in found["policies"].values())
    assert "laptop" in found["recommendation"]
    assert {what for what, _, _ in told} == {"loading", "measuring", "answers", "scoring suffix", "routes"}
    assert ("answers", 4, 4) in told

    kept = load_evidence(CalibrationStore(folder), fingerprint(config), "laptop", {"use": "suffix"})
    assert kept is not None
    overall = done.evaluation.overall.drafters["suffix"].acceptance
    assert overall is not None
    assert (kept.acceptance, kept.low, kept.high, kept.requests) == (overall.rate, overall.low, overall.high, 4)


@model
def test_a_bar_that_is_not_reached_and_recorded_answers_are_used_as_they_are(folder: Path) -> None:
    draft = 'draft = { use = "suffix", min_match = 2 }\nrequire_eval = 0.99\n'
    answer = "red green red blue red black red white red green red black red blue red white"
    told: list[tuple[str, int, int]] = []
    done, config = evaluated(folder, LOCAL + draft, parse_prompts([f'{{"prompt": "Colours.", "answer": "{answer}"}}']), told)
    overall = done.evaluation.overall
    assert overall.recommended == "low_acceptance"
    assert done.draft is None
    assert "below require_eval = 0.99" in done.evaluation.recommendation
    assert 14 < overall.tokens < 40
    kept = load_evidence(CalibrationStore(folder), fingerprint(config), "laptop", {"use": "suffix", "min_match": 2})
    assert kept is not None
    assert kept.acceptance < 0.99


@model
def test_a_draft_model_is_scored_with_its_hybrid(folder: Path) -> None:
    draft = f'draft = {{ use = "hybrid", model = "{find_model("smollm2")}" }}\n'
    prompts = parse_prompts(['{"turns": ["Name a colour."]}'])
    done, _ = evaluated(folder, LOCAL + draft, prompts, max_output_tokens=10)
    drafters = done.evaluation.overall.drafters
    assert list(drafters) == ["suffix", "model", "hybrid"]
    own = drafters["model"].acceptance
    assert own is not None
    assert own.rate > 0.8, "the model drafts for itself"
    assert drafters["model"].predicted_speedup < 1.1, "at its own price"


@model
def test_what_cannot_be_answered_is_left_out_and_told(folder: Path) -> None:
    long = '{"prompt": "' + "word " * 400 + '", "category": "long"}'
    done, _ = evaluated(folder, prompts=parse_prompts([long, LINES[1]]))
    assert [group.category for group in done.evaluation.groups] == ["other"]
    assert any("1 left out, the first: line 1: " in note for note in done.evaluation.notes)
    with pytest.raises(InputError, match="can answer no request"):
        evaluated(folder, prompts=parse_prompts([long]))


def test_a_backend_that_there_is_not() -> None:
    async def run() -> None:
        await evaluate(parse_prompts(LINES), parse_config(LOCAL), "lapdog", progress=lambda *step: None)

    with pytest.raises(InputError, match="laptop"):
        anyio.run(run)


@model
def test_a_model_that_cannot_go_back_has_no_drafters(folder: Path, tmp_path: Path) -> None:
    path = mamba(tmp_path / "mamba.gguf")
    text = LOCAL.replace('"smollm2"', f'"{path}"') + 'draft = { use = "suffix" }\n'
    done, _ = evaluated(folder, text, parse_prompts(['{"prompt": "abc"}']), max_output_tokens=4)
    assert done.evaluation.overall.drafters == {}
    assert done.evaluation.overall.recommended == "capability"
    assert "capability" in done.evaluation.recommendation


@model
def test_a_draft_model_that_does_not_fit_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.backends._drafts.free_memory", lambda: 1000)
    draft = f'draft = {{ use = "model", model = "{find_model("smollm2")}" }}\n'
    done, _ = evaluated(folder, LOCAL + draft, parse_prompts(['{"prompt": "a", "answer": "b c d"}']))
    assert list(done.evaluation.overall.drafters) == ["suffix"]
    assert len([note for note in done.evaluation.notes if "draft_does_not_fit" in note]) == 2


BROKEN = """
from cachespec.engine.drafters.suffix import SuffixDrafter


class Broken(SuffixDrafter):
    def prospects(self, tracks, limit):
        raise RuntimeError("the index is <gone>")

    def stop(self):
        raise RuntimeError("and cannot be stopped")
"""


@model
def test_a_drafter_that_fails_is_told_and_nothing_is_recommended_by_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_drafter.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = LOCAL + 'draft = { use = "broken_drafter:Broken" }\n'
    line = '{"prompt": "Colours.", "answer": "red green red green red green red green red green"}'
    done, config = evaluated(folder, text, parse_prompts([line]))
    found = done.evaluation
    use = "broken_drafter:Broken"
    assert list(found.overall.drafters) == ["suffix"]
    assert list(found.failed) == [use]
    assert found.failed[use].endswith("prospects: RuntimeError: the index is <gone>")
    assert found.to_dict()["failed"] == dict(found.failed)
    assert f"{use} failed" in found.recommendation
    assert found.best != use
    assert "is &lt;gone&gt;" in html(found, "slice")
    assert load_evidence(CalibrationStore(folder), fingerprint(config), "laptop", {"use": use}) is None


@model
def test_where_every_drafter_fails_nothing_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, tracks: object, limit: int) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr("cachespec.engine.drafters.suffix.SuffixDrafter.prospects", fail)
    done, _ = evaluated(folder, prompts=parse_prompts(['{"prompt": "a", "answer": "b c d"}']))
    found = done.evaluation
    assert (found.best, [group.recommended for group in found.groups]) == ("eval_required", ["eval_required"])
    assert "no drafter could be evaluated" in found.recommendation
    assert found.failed == {"suffix": "drafter suffix: prospects: RuntimeError: gone"}
    assert done.draft is None
