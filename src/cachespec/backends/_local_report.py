"""What an in-process backend tells of itself: figures since its start, and what it intends for a request."""

from __future__ import annotations

from typing import Any

from cachespec.backends._startup import Started
from cachespec.decision import Speculation
from cachespec.engine.runtimes.base import Runtime


def report(runtime: Runtime, started: Started) -> dict[str, Any]:
    """See `LocalBackend.report`."""
    engine = started.engine
    found = engine.report()
    off = None if started.reason is None else {"reason": started.reason}
    return {
        "runtime": dict(runtime.facts()),
        "requests": {"active": engine.active, "preempted": found["preempted"]},
        "speeds": {
            "prefill": engine.prefill_speed.value,
            "decode": engine.decode_speed.value,
            "answer": engine.answer_length.value,
        },
        "prefix": found["prefix"].to_dict(),
        "speculation": off if found["speculation"] is None else found["speculation"].to_dict(),
    }


def speculation(started: Started, output: int) -> Speculation | None:
    """What the engine intends for an answer of this length; None: it was given no drafter."""
    if started.control is None:
        if started.reason is None:
            return None
        return Speculation(drafter=None, draft_length=0, acceptance=None, gain=None, reason=started.reason)
    forecast = started.control.forecast(output)
    return Speculation(
        drafter=forecast.drafter,
        draft_length=forecast.choice.length,
        acceptance=forecast.acceptance,
        gain=forecast.choice.gain,
        reason=forecast.choice.reason,
    )
