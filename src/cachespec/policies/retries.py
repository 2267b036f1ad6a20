"""When to try again, and how long to wait: tenacity's stop and wait rules under one budget for all attempts (S3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachespec.errors import (
    AuthenticationError,
    BackendError,
    BudgetExceededError,
    NotFoundError,
    PermissionDeniedError,
    PriceUnknownError,
    RequestRejectedError,
)
from cachespec.health import asked_pause
from cachespec.rules import RetryRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt: which backend, with what error, `at` seconds after the request was entered."""

    backend: str
    error: Exception
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAttempt:
    """Try `backend` after `delay_s` seconds."""

    backend: str
    delay_s: float


def next_attempt(
    rule: RetryRule,
    failures: Sequence[Failure],
    candidates: Sequence[str],
    *,
    left_s: float | None,
    stays: str | None = None,
) -> NextAttempt | None:
    """What to do after the last of `failures`; None: give up.

    `candidates` are the backends in the order of the decision, `left_s` is what is left of the deadline. As long as the
    one that `stays` can serve us, nobody else is asked.

    A rejected request (400) ends it: the same body would be refused again. A backend that cannot serve us at all (key,
    permission, model not there, budget) is left out for the rest. What may pass (429, 5xx, overload, cut, timeout) moves
    on to the next backend at once, since waiting for a second one costs nothing; when all were tried, the one that is
    free soonest is tried again after its ``Retry-After`` (an hour at most) or an exponential pause with jitter.
    """
    import tenacity

    last = failures[-1]
    if isinstance(last.error, RequestRejectedError) or (left_s is not None and left_s <= 0):
        return None
    gone = {f.backend for f in failures if not _may_pass(f.error)}
    # Refusals by our own ledger reach nobody and do not count against the budget of attempts.
    sent = [f for f in failures if not isinstance(f.error, BudgetExceededError | PriceUnknownError)]
    state = tenacity.RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    state.attempt_number = max(len(sent), 1)
    if sent and tenacity.stop_after_attempt(rule.attempts)(state):
        return None
    usable = [name for name in candidates if name not in gone]
    usable = [stays] if stays in usable else usable
    tried = {f.backend for f in failures}
    fresh = [name for name in usable if name not in tried]
    if fresh:
        return NextAttempt(backend=fresh[0], delay_s=0.0)
    if not usable:
        return None
    state.attempt_number = max(sum(f.backend == name for f in sent) for name in usable)
    # Half a step of jitter keeps clients apart and every pause longer than the one before.
    wait = tenacity.wait_exponential_jitter(multiplier=rule.first_delay_s, max=rule.max_delay_s, jitter=rule.first_delay_s / 2)
    pause = float(wait(state))
    ready = {name: _ready_at(name, failures, pause) for name in usable}
    best = min(usable, key=lambda name: ready[name])
    delay = max(0.0, ready[best] - last.at)
    if left_s is not None and delay >= left_s:
        return None
    return NextAttempt(backend=best, delay_s=delay)


def _may_pass(error: Exception) -> bool:
    if isinstance(error, AuthenticationError | PermissionDeniedError | NotFoundError | BudgetExceededError | PriceUnknownError):
        return False
    return isinstance(error, BackendError) and error.retryable


def _ready_at(name: str, failures: Sequence[Failure], pause: float) -> float:
    last = [f for f in failures if f.backend == name][-1]
    asked = asked_pause(last.error)
    return last.at + (pause if asked is None else asked)
