"""What a user is told of a local backend: why it drafts or does not, what drafts were worth, what does not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.backends.test_local import Toy, toy
from tests.engine.scripted import ScriptedRuntime, forever

import cachespec
from cachespec.engine.drafters.base import Draft
from cachespec.errors import ContextLengthError, EngineStoppedError, InputError
from cachespec.events import DraftVerified
from cachespec.policies.acceptance import Fixed

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def calibrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


def speculating(acceptance: Any, **more: Any) -> Toy:
    """Its model says the alphabet over and over, which a suffix drafter soon knows."""
    made = toy(**more)
    return Toy(made.runtime, draft={"use": "suffix"}, acceptance=acceptance)


async def ask(backend: Toy, output: int = 120) -> tuple[cachespec.Completion, list[DraftVerified]]:
    client = cachespec.Client(backends={"toy": backend})
    async with client.stream("Say the alphabet.", temperature=0, max_output_tokens=output) as stream:
        events = [event async for event in stream]
    assert stream.completion is not None
    return stream.completion, [e for e in events if isinstance(e, DraftVerified)]


async def test_drafts_are_told_in_events_usage_decision_and_report() -> None:
    backend = speculating({"use": "fixed", "draft_length": 4})
    with pytest.raises(EngineStoppedError):
        backend.report()
    await backend.start()
    try:
        before = backend.report()
        assert before["speculation"]["goodput"] is None
        assert before["speeds"]["answer"] is None
        done, told = await ask(backend)
        assert bool not in {type(figure) for figure in backend.report()["prefix"].values()}  # nor after one query
        spoken = done.decision.candidates[0].speculation
        assert spoken is not None
        assert (spoken.drafter, spoken.draft_length, spoken.reason) == ("suffix", 0, "rule")
        assert "suffix drafts no tokens a step (rule)" in done.decision.explain()
        assert done.usage is not None
        assert done.usage.drafted == sum(e.drafted for e in told) > 50
        assert done.usage.accepted == sum(e.accepted for e in told) > 50
        again, _ = await ask(backend)
        spoken = again.decision.candidates[0].speculation
        assert spoken is not None
        assert spoken.draft_length == 4
        assert (spoken.acceptance or 0) > 0.8
        assert "suffix drafts 4 tokens a step (rule)" in again.decision.explain()
        report = json.loads(json.dumps(backend.report()))
        assert report["requests"] == {"active": 0, "preempted": 0}
        assert report["speeds"]["answer"] == pytest.approx(120)
        assert report["prefix"]["hit_tokens"] == again.usage.cache_read if again.usage else False
        found = report["speculation"]
        assert found["goodput"] > 0
        assert found["reasons"] == {"rule": found["steps"]}
        drafter = found["drafters"]["suffix"]
        assert drafter["drafted"] >= drafter["accepted"] > 100
        assert len(drafter["positions"]) == 4
        assert all(tried >= right for tried, right in drafter["positions"])
        assert 0.8 < drafter["acceptance"] <= 1
    finally:
        await backend.aclose()
    with pytest.raises(EngineStoppedError):
        backend.report()


class Wrong:
    """A drafter, as a plug-in of one's own, that is never right."""

    name = "wrong"
    sources = ("wrong",)

    def open(self, prompt: Sequence[int], *, sampling: Any, namespace: bytes | None) -> None: ...

    def prospects(self, tracks: Sequence[None], limit: int) -> list[Draft]:
        return self.propose(tracks, [limit] * len(tracks))

    def propose(self, tracks: Sequence[None], lengths: Sequence[int]) -> list[Draft]:
        return [Draft(source=self.name, tokens=(1,) * n, confidence=(0.9,) * n) for n in lengths]

    def accept(self, track: None, tokens: Sequence[int]) -> None: ...

    def close(self, track: None, *, learn: bool) -> None: ...

    def stats(self) -> dict[str, int]:
        return {"tracks": 0, "bytes": 0}

    def stop(self) -> None: ...


OFF: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("a short answer", {"use": "goodput", "min_output_tokens": 500}, {}, "short_output"),
    (
        "acceptance under the floor",
        {"use": "threshold", "min_acceptance": 0.5, "min_output_tokens": 0},
        {"wrong": True},
        "low_acceptance",
    ),
    ("no policy for it", {"use": "never"}, {}, "rule"),
    ("nothing gained", {"use": "goodput"}, {"wrong": True}, "no_gain"),
    ("a draft model that is too large", {"use": "goodput"}, {"large": True}, "draft_does_not_fit"),
]


@pytest.mark.parametrize(("acceptance", "how", "reason"), [row[1:] for row in OFF], ids=[row[0] for row in OFF])
async def test_why_speculation_is_off_reaches_events_and_decisions(
    acceptance: dict[str, Any], how: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = speculating(acceptance)
    if "wrong" in how:
        backend = Toy(backend.runtime, draft={"use": f"{__name__}:Wrong"}, acceptance=acceptance)
    if "large" in how:
        (tmp_path / "draft.gguf").write_bytes(b"GGUF" * 1000)
        backend = Toy(backend.runtime, draft={"use": "model", "model": str(tmp_path / "draft.gguf")}, acceptance=acceptance)
        monkeypatch.setattr(backend, "draft_fits", lambda model, runtime: False)
    await backend.start()
    try:
        for _ in range(2):
            done, told = await ask(backend)
        assert reason in {e.reason for e in told if not e.drafted}
        spoken = done.decision.candidates[0].speculation
        assert spoken is not None
        assert (spoken.draft_length, spoken.reason) == (0, reason)
        assert reason in backend.report()["speculation"]["reasons"]
    finally:
        await backend.aclose()


async def test_a_model_that_cannot_rewind_says_so() -> None:
    backend = speculating(Fixed(), rewinds=False)
    await backend.start()
    try:
        done, told = await ask(backend, output=20)
        assert told == []
        spoken = done.decision.candidates[0].speculation
        assert spoken is not None
        assert (spoken.drafter, spoken.draft_length, spoken.reason) == (None, 0, "capability")
        assert backend.report()["speculation"] == {"reason": "capability"}
    finally:
        await backend.aclose()


async def test_without_a_drafter_nothing_is_said_of_drafts() -> None:
    backend = Toy(ScriptedRuntime(forever))
    await backend.start()
    try:
        done, _ = await ask(backend, output=20)
        assert done.decision.candidates[0].speculation is None
        assert backend.report()["speculation"] is None
    finally:
        await backend.aclose()


async def test_a_prompt_beyond_the_context_takes_the_backend_out() -> None:
    backend = Toy(ScriptedRuntime(forever, context=64))
    client = cachespec.Client(backends={"toy": backend})
    await backend.start()
    try:
        decision = client.plan("long " * 40)
        assert decision.chosen is None
        assert [reason.code for reason in decision.candidates[0].reasons] == ["context_length"]
        with pytest.raises(ContextLengthError, match="64"):
            await client.complete("long " * 40)
        done = await client.complete("short", max_output_tokens=1000)
        assert done.finish_reason == "length"
        assert done.usage is not None
        assert (done.usage.input_tokens or 0) + (done.usage.output or 0) == 64
    finally:
        await backend.aclose()


async def test_log_probabilities_come_with_the_completion() -> None:
    backend = Toy(ScriptedRuntime(forever))
    client = cachespec.Client(backends={"toy": backend})
    await backend.start()
    try:
        done = await client.complete("hi", temperature=0, max_output_tokens=5, extra={"toy": {"logprobs": 2}})
        assert done.logprobs is not None
        assert b"".join(token.text for token in done.logprobs).decode() == done.text
        shown = json.loads(json.dumps(done.to_dict()))["logprobs"]
        assert [entry["token"] for entry in shown] == list(done.text)
        assert shown[0]["bytes"] == [ord(done.text[0])]
        assert len(shown[0]["top_logprobs"]) == 2
        plain = await client.complete("hi", temperature=0, max_output_tokens=5)
        assert plain.logprobs is None
        assert "logprobs" not in plain.to_dict()
        with pytest.raises(InputError, match="did you mean 'logprobs'"):
            await client.complete("hi", extra={"toy": {"logprob": 2}})
    finally:
        await backend.aclose()
