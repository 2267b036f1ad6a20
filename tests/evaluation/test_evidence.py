"""`require_eval`: nothing is drafted before an evaluation found enough, for this backend, model and drafter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.backends.test_drafting import COPY
from tests.backends.test_llamacpp import ask, available, make, one_loop, run, usage

from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.client import Client
from cachespec.engine.costs import CalibrationStore
from cachespec.engine.evidence import Evidence, load_evidence, save_evidence
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime
from cachespec.errors import ConfigError
from cachespec.events import DraftVerified
from cachespec.prompt import build_prompt

SUFFIX = {"use": "suffix"}
FOUND = Evidence(acceptance=0.6, low=0.5, high=0.7, requests=9, scored=400)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_evidence_is_of_one_backend_model_and_drafter(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    assert load_evidence(store, b"model", "laptop", SUFFIX) is None
    assert save_evidence(store, b"model", "laptop", SUFFIX, FOUND)
    assert load_evidence(CalibrationStore(tmp_path), b"model", "laptop", dict(SUFFIX)) == FOUND
    assert load_evidence(store, b"other", "laptop", SUFFIX) is None
    assert load_evidence(store, b"model", "server", SUFFIX) is None
    assert load_evidence(store, b"model", "laptop", {**SUFFIX, "min_match": 3}) is None
    newer = replace(FOUND, acceptance=0.2)
    save_evidence(store, b"model", "laptop", SUFFIX, newer)
    assert load_evidence(store, b"model", "laptop", SUFFIX) == newer


@pytest.mark.parametrize("bad", ['"x"', "7.5", "-1", "null", "{}"])
def test_a_file_that_is_not_right_is_as_good_as_none(tmp_path: Path, bad: str) -> None:
    store = CalibrationStore(tmp_path)
    save_evidence(store, b"model", "laptop", SUFFIX, FOUND)
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text().replace('"acceptance": 0.6', f'"acceptance": {bad}'))
    assert load_evidence(store, b"model", "laptop", SUFFIX) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not save_evidence(CalibrationStore(tmp_path / "file"), b"model", "laptop", SUFFIX, FOUND)


@pytest.mark.parametrize(
    "more", [{"require_eval": 1.5, "draft": SUFFIX}, {"require_eval": -0.1, "draft": SUFFIX}, {"require_eval": 0.5}]
)
def test_a_demand_that_makes_no_sense_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LlamaCppBackend(name="laptop", model="smollm2", **more)
    assert caught.value.key == "require_eval"


async def started(**more: Any) -> LlamaCppBackend:
    backend = make(context=512, parallel=1, draft=SUFFIX, acceptance={"use": "fixed", "draft_length": 4}, **more)
    await backend.start()
    return backend


async def drafting(backend: LlamaCppBackend) -> tuple[int, list[str], str, dict[str, int], str | None]:
    """Drafted tokens, the reasons of the events, that of the decision, those of the report, and what it says is missing."""
    request = ask(COPY, max_output_tokens=12)
    events = await run(backend, request)
    expected = backend.estimate(build_prompt(request)).speculation
    assert expected is not None
    told = [event.reason for event in events if isinstance(event, DraftVerified)]
    report = backend.report()["speculation"]
    assert report["withheld"] == expected.detail
    return usage(events).drafted or 0, told, expected.reason, report["reasons"], expected.detail


@pytest.mark.model
@one_loop
@pytest.mark.anyio
async def test_nothing_is_drafted_without_evidence_and_something_is_with_it() -> None:
    available()
    store = CalibrationStore()

    async def withheld(*says: str) -> None:
        backend = await started(require_eval=0.6)
        try:
            drafted, told, decided, counted, detail = await drafting(backend)
            offer = Client(backends={"laptop": backend}).plan(COPY).candidates[0]
        finally:
            await backend.aclose()
        assert drafted == 0
        assert told == ["eval_required"]
        assert decided == "eval_required"
        assert set(counted) == {"eval_required"}
        assert offer.eligible
        assert ("eval_required", detail) in [(r.code, r.detail) for r in offer.reasons]
        assert all(word in (detail or "") for word in says)

    await withheld("asks for an acceptance of 0.6", "cachespec eval SLICE --backend laptop")
    backend = await started()  # asks for none
    try:
        assert (await drafting(backend))[0] > 0
        assert backend._loaded is not None
        fingerprint = backend._loaded.runtime.info.fingerprint
    finally:
        await backend.aclose()

    save_evidence(store, fingerprint, backend.name, SUFFIX, replace(FOUND, acceptance=0.59))
    save_evidence(store, b"another model", backend.name, SUFFIX, FOUND)
    save_evidence(store, fingerprint, backend.name, {**SUFFIX, "min_match": 2}, FOUND)
    await withheld("acceptance of 0.590 in 9 requests", "asks for 0.6")

    # Another process found more.
    code = (
        "from cachespec.engine.costs import CalibrationStore\n"
        "from cachespec.engine.evidence import Evidence, save_evidence\n"
        f"found = {FOUND!r}\n"
        f"assert save_evidence(CalibrationStore(), {fingerprint!r}, {backend.name!r}, {SUFFIX!r}, found)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    backend = await started(require_eval=0.6)
    try:
        drafted, told, decided, counted, detail = await drafting(backend)
    finally:
        await backend.aclose()
    assert drafted > 0
    assert "eval_required" not in told
    assert (decided, detail) == ("rule", None)
    assert set(counted) == {"rule"}


@pytest.mark.model
@one_loop
@pytest.mark.anyio
async def test_a_draft_model_is_not_loaded_before_there_is_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    available()
    draft = {"use": "model", "model": str(find_model("smollm2"))}
    backend = make(context=512, parallel=1, draft=draft, require_eval=0.1)
    loaded: list[str] = []

    def load(model: str, runtime: str | None) -> Runtime:
        loaded.append(model)
        raise AssertionError("a draft model was loaded")

    monkeypatch.setattr(backend, "load_draft", load)
    await backend.start()
    try:
        assert not loaded
        assert (await drafting(backend))[2] == "eval_required"
    finally:
        await backend.aclose()
