"""Drafters and acceptance policies as options of a local backend and of ``[policies]``, on the real small model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.backends.test_llamacpp import PLAN, ask, available, engine, idle, make, one_loop, run, text, usage
from tests.engine.scripted import engine_threads
from tests.engine.test_control import TickingRuntime

from cachespec.backends._drafts import draft_fits, free_memory
from cachespec.backends._startup import measured_costs
from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.engine.costs import CalibrationStore, _Bench, calibrate
from cachespec.engine.models import find_model
from cachespec.errors import ConfigError, UnknownPluginError
from cachespec.events import DraftVerified
from cachespec.policies.acceptance import Fixed, Goodput, Never, Threshold
from cachespec.prompt import build_prompt
from cachespec.registry import wire

model = pytest.mark.model
COPY = "Repeat this sentence: The harbour master keeps the keys of the lighthouse in a blue tin box on the second shelf."


@pytest.fixture(autouse=True)
def calibrations(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own."""
    folder = tmp_path_factory.getbasetemp() / "calibrations"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    return folder


async def started(**more: Any) -> LlamaCppBackend:
    available()
    backend = make(**{"context": 512, "parallel": 2, **more})
    await backend.start()
    return backend


@model
@one_loop
@pytest.mark.anyio
async def test_drafts_are_verified_reported_and_quoted(calibrations: Path) -> None:
    plain = await started()
    request = ask(COPY, max_output_tokens=24)
    expected = await run(plain, request)
    assert plain.estimate(build_prompt(request)).speculation is None
    await plain.aclose()

    backend = await started(draft={"use": "suffix"}, acceptance={"use": "fixed", "draft_length": 4})
    try:
        unseen = backend.estimate(build_prompt(request))
        assert unseen.speculation is not None
        assert (unseen.speculation.drafter, unseen.speculation.acceptance) == ("suffix", None)
        assert unseen.latency.evidence == "measured"  # by the calibration
        events = await run(backend, request)
        told = [e for e in events if isinstance(e, DraftVerified)]
        counted = usage(events)
        assert (counted.drafted, counted.accepted) == (sum(e.drafted for e in told), sum(e.accepted for e in told))
        assert (counted.accepted or 0) > 4
        assert text(events)[:40] == text(expected)[:40]  # calls of several tokens round differently, later on it may show
        spoken = backend.estimate(build_prompt(request)).speculation
        assert spoken is not None
        assert spoken.reason == "rule"
        assert spoken.draft_length == 4
        assert 0.3 < (spoken.acceptance or 0) <= 1
        assert list(calibrations.rglob("*.json")), "what was measured is kept"
    finally:
        await backend.aclose()


@model
@one_loop
@pytest.mark.anyio
async def test_the_second_start_measures_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the first had no time for."""
    measured: list[tuple[int, int]] = []
    fastest = _Bench.fastest

    def watched(self: _Bench, batch: int, width: int, times: int, until: float) -> float:
        measured.append((batch, width))
        return fastest(self, batch, width, times, until)

    monkeypatch.setattr(_Bench, "fastest", watched)
    for _ in range(2):
        backend = await started(draft={"use": "suffix"}, threads=1, prefill_chunk=96)
        await backend.aclose()
    assert {(1, 1), (1, 8)} <= set(measured)
    assert len(set(measured)) == len(measured)


def test_every_start_is_nearer_to_a_whole_table_on_a_machine_however_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a single call takes longer than a start may measure."""
    runtime, store, settings = TickingRuntime(), CalibrationStore(tmp_path), make(context=4096, parallel=4).settings
    monkeypatch.setattr("cachespec.backends._startup.calibrate", partial(calibrate, clock=runtime.clock))
    left: list[int] = []
    while not left or left[-1]:
        calls, begin = len(runtime.calls), runtime.clock.now
        table = measured_costs(runtime, settings, runtime.width, store)
        left.append(len(table.assumed))
        assert len(left) == 1 or left[-1] < left[-2]
        assert len(left) == 1 or runtime.clock.now - begin < 60
        assert len(runtime.calls) > calls
    calls = len(runtime.calls)
    assert measured_costs(runtime, settings, runtime.width, store).assumed == frozenset()
    assert len(runtime.calls) == calls


@model
@one_loop
@pytest.mark.anyio
async def test_a_draft_model_drafts_alone_and_in_a_hybrid() -> None:
    """The target drafts for itself, so that nearly everything is right."""
    available()
    path = str(find_model("smollm2"))
    for table in ({"use": "model"}, {"use": "hybrid", "confidence": 0.9}):
        backend = await started(draft={**table, "model": path}, acceptance={"use": "fixed", "draft_length": 3})
        try:
            events = await run(backend, ask("Write a line about the sea.", max_output_tokens=12))
            assert (usage(events).accepted or 0) >= 0.6 * (usage(events).drafted or 0) > 3
            names = {e.drafter for e in events if isinstance(e, DraftVerified) and e.drafted}
            assert "model" in names
        finally:
            await backend.aclose()


@model
@one_loop
@pytest.mark.anyio
async def test_two_hundred_aborted_drafting_requests_leave_nothing() -> None:
    backend = await started(draft={"use": "suffix"}, acceptance={"use": "fixed", "draft_length": 4})
    try:
        threads = engine_threads()
        for i in range(200):
            request = ask(f"{COPY} {i % 5}", max_output_tokens=60, seed=i)
            attempt = await backend.open(request, PLAN, timeout=60)
            if i % 8 == 1:
                await attempt.read()
            elif i % 3 == 2:
                await anyio.sleep(0.004)
            await attempt.aclose()
        await idle(backend)
        running = engine(backend)
        assert running._control._drafter.stats()["tracks"] == 0
        running._slots.check()
        assert engine_threads() == threads
        assert text(await run(backend, ask("Say hello.", max_output_tokens=4)))
    finally:
        await backend.aclose()


@one_loop
@pytest.mark.anyio
async def test_a_draft_model_that_is_not_there_fails_the_start() -> None:
    available()
    backend = make(draft={"use": "model", "model": "/nowhere/model.gguf"})
    with pytest.raises(ConfigError, match=r"/nowhere/model\.gguf"):
        await backend.start()
    assert backend._loaded is None
    await backend.aclose()


@model
@one_loop
@pytest.mark.anyio
async def test_a_draft_model_that_does_not_fit_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    available()
    monkeypatch.setattr("cachespec.backends._drafts.free_memory", lambda: 1000)
    backend = await started(draft={"use": "model", "model": "smollm2"})
    try:
        events = await run(backend, ask("Say hello.", max_output_tokens=4))
        assert [(e.drafted, e.reason) for e in events if isinstance(e, DraftVerified)] == [(0, "draft_does_not_fit")]
        spoken = backend.estimate(build_prompt(ask("x"))).speculation
        assert spoken is not None
        assert (spoken.draft_length, spoken.reason) == (0, "draft_does_not_fit")
    finally:
        await backend.aclose()


def test_room_for_a_draft_is_reckoned_as_it_will_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 4 bits a weight is a model of 16 or 32 when torch holds it."""
    available()
    file = find_model("smollm2")
    settings = make(context=512, parallel=2).settings
    weights = 134.5e6 * 4 * 1.2
    for need, name, runtime, options in (
        (file.stat().st_size * 1.2, "smollm2", "llamacpp", None),
        (weights, "smollm2", "torch", {"device": "cpu", "dtype": "float32"}),
        (weights / 2, "smollm2", "torch", {"device": "cpu", "dtype": "bfloat16"}),
    ):
        for free, expected in ((need * 0.9, False), (need * 1.25, True)):
            monkeypatch.setattr("cachespec.backends._drafts.free_memory", lambda free=free: int(free))
            assert draft_fits(name, runtime, settings, torch=options) is expected, (name, runtime, options)
    monkeypatch.setattr("cachespec.backends._drafts.free_memory", lambda: None)
    assert draft_fits("smollm2", "llamacpp", settings) is None
    assert draft_fits("no-such-model", "llamacpp", settings) is None


def test_free_memory_keeps_the_limit_of_the_group(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8000 kB\n")
    assert free_memory(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for limit, expected in (("max", 8000 * 1024), (str(3000 * 1024), 2500 * 1024), (str(90_000 * 1024), 8000 * 1024)):
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text(f"{1000 * 1024}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {500 * 1024}\n")
        assert free_memory(tmp_path) == expected


def policy_of(backends: dict[str, Any], acceptance: Any = None) -> Any:
    policies = {} if acceptance is None else {"acceptance": acceptance}
    wired = wire(
        backends={name: {"use": "llamacpp", "model": "smollm2", **t} for name, t in backends.items()}, policies=policies
    )
    return {name: backend.settings.policy() for name, backend in wired.backends.items()}  # type: ignore[attr-defined]


def test_policies_name_the_acceptance_of_every_local_backend_and_an_option_overrides() -> None:
    suffix = {"draft": {"use": "suffix"}}
    assert policy_of({"a": suffix}) == {"a": Goodput()}
    found = policy_of(
        {"a": suffix, "b": {**suffix, "acceptance": {"use": "fixed", "draft_length": 2}}},
        {"use": "threshold", "min_acceptance": 0.3},
    )
    assert found == {"a": Threshold(min_acceptance=0.3), "b": Fixed(draft_length=2)}
    mine = Never()
    assert policy_of({"a": suffix}, mine)["a"] is mine
    with pytest.raises(UnknownPluginError, match="goodput"):
        policy_of({"a": suffix}, {"use": "godput"})


def test_hosted_backends_are_not_told() -> None:
    backends = {"h": {"use": "anthropic", "model": "claude-sonnet-5-5", "api_key": "k"}}
    assert wire(backends=backends, policies={"acceptance": {"use": "never"}}).backends["h"].name == "h"


def test_calibrations_are_kept_where_the_user_keeps_caches(calibrations: Path) -> None:
    assert str(calibrations) in str(CalibrationStore()._folder)
