"""What an in-process backend tells of itself: figures since its start, and what it intends for a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cachespec.backends._startup import Started
from cachespec.backends.base import Estimate
from cachespec.decision import Belief, Latency, Speculation, TokenEstimate
from cachespec.engine.runtimes.base import Runtime
from cachespec.quotes import EXPECTED_OUTPUT
from cachespec.request import Request

_WARM = 0.8  # share of a prompt in the KV from which it is called warm


def report(facts: Mapping[str, Any], started: Started) -> dict[str, Any]:
    """See `LocalBackend.report`. `facts` are the runtime's, which may be closed by now."""
    engine = started.engine
    found = engine.report()
    off, stats = None if started.reason is None else {"reason": started.reason}, found["speculation"]
    return {
        "runtime": dict(facts),
        "requests": {"active": engine.active, "preempted": found["preempted"]},
        "speeds": {
            "prefill": engine.prefill_speed.value,
            "decode": engine.decode_speed.value,
            "answer": engine.answer_length.value,
        },
        "prefix": found["prefix"].to_dict(),
        "speculation": off if stats is None else {**stats.to_dict(), "withheld": started.withheld},
    }


def speculation(started: Started, output: int, prefill: int) -> Speculation | None:
    """What the engine intends for an answer of this length, after `prefill` tokens that are new here; None: it was given no
    drafter."""
    if started.control is None:
        if started.reason is None:
            return None
        return Speculation(drafter=None, draft_length=0, acceptance=None, gain=None, reason=started.reason)
    forecast = started.control.forecast(output, prefill)
    return Speculation(
        drafter=forecast.drafter,
        draft_length=forecast.choice.length,
        acceptance=forecast.acceptance,
        gain=forecast.choice.gain,
        reason=forecast.choice.reason,
        detail=started.withheld,
    )


def belief_of(runtime: Runtime, started: Started, request: Request, tokens: tuple[int, ...]) -> Belief:
    """What of a prompt's tokens there is KV of, and where it leaves what is kept."""
    if request.cache == "off":
        return Belief(state="cold", tokens=0, evidence="cache = off")
    here, stored, near = started.engine.peek(tokens, request.tenant)
    reach = max(here, stored)
    evidence = f"KV of {here} tokens is there"
    if stored > here:
        evidence = f"KV of {stored} tokens is in host memory, of {here} in place"
    if near is not None:
        held, asked = (runtime.piece(t).decode("utf-8", "replace") for t in (near.kept, near.given))
        evidence += f"; at token {near.position} it holds {held!r} where the prompt has {asked!r}"
    state = "cold" if reach == 0 else "warm" if reach >= _WARM * len(tokens) else "partial"
    return Belief(state=state, tokens=reach, evidence=evidence)  # type: ignore[arg-type]


def latency_of(
    runtime: Runtime, started: Started, prefill: int, output: int, *, assumed: tuple[float, float]
) -> tuple[Latency, float]:
    """How long it takes, and how much of that the engine works on it; the rest is waiting for others.

    `assumed`: the hardware's floating-point operations and bytes read a second, until speeds were measured.
    """
    engine, info = started.engine, runtime.info
    measured = engine.prefill_speed.value, engine.decode_speed.value
    prefill_speed = measured[0] or assumed[0] / (2 * max(1, info.parameters))
    decode_speed = measured[1] or assumed[1] / max(1, info.size)
    ahead_tokens, ahead = engine.backlog
    wait = ahead_tokens / prefill_speed + ahead * (engine.answer_length.value or EXPECTED_OUTPUT) / decode_speed
    first = wait + prefill / prefill_speed + 1 / decode_speed
    total = first + max(0, output - 1) / decode_speed
    evidence: Literal["measured", "assumed"] = "assumed" if None in measured else "measured"
    return Latency(ttft_ms=first * 1000, total_ms=total * 1000, evidence=evidence), total - wait


def unknown(why: str) -> Estimate:
    """Of a prompt that nothing can be said about."""
    nothing = TokenEstimate(input=None, cache_read=None, cache_write=None, uncached=None, output_expected=None, output_max=None)
    return Estimate(tokens=nothing, belief=Belief(state="unknown", evidence=why), latency=Latency(ttft_ms=None, total_ms=None))
