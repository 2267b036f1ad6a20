"""What happens to requests, told to hooks and to the log; never a prompt, never a secret, never in the way.

A hook is any callable that takes one frozen details object; it is called in the task of the request. An exception in a
hook is logged and goes no further. The whole decision of each request is logged as one JSON value at level DEBUG on the
logger ``cachespec.decision`` (contract D4).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol, TypeAlias

from cachespec.decision import Decision
from cachespec.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A backend was chosen (again, when a reservation or an attempt failed)."""

    tenant: str | None
    session_id: str | None
    tags: tuple[str, ...]
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """An attempt failed before any content; `next_backend` None means that it was the last one."""

    attempt: int
    backend: str
    error: Exception
    next_backend: str | None
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A request ended and was settled: ``completed``, ``left``, ``cancelled`` or ``failed``. `cost` is USD."""

    backend: str
    model: str
    tenant: str | None
    session_id: str | None
    outcome: str
    usage: Usage | None
    cost: Decimal | None
    estimated: bool
    ttft_ms: float | None
    total_ms: float
    request_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPassed:
    """A soft budget is passed by what this request may cost at most. USD."""

    scope: str
    limit: Decimal
    spent: Decimal
    reserved: Decimal
    requested: Decimal


Details: TypeAlias = Decided | AttemptFailed | Settled | BudgetPassed


class Hook(Protocol):
    """Told about every step of every request."""

    def __call__(self, details: Details, /) -> None: ...


class Telemetry:
    """Calls the hooks, in order, and writes the log."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = tuple(hooks)
        self._log = logging.getLogger("cachespec")
        self._decisions = logging.getLogger("cachespec.decision")

    def tell(self, details: Details) -> None:
        if isinstance(details, Decided) and self._decisions.isEnabledFor(logging.DEBUG):
            self._decisions.debug("%s", json.dumps(details.decision.to_dict(), separators=(",", ":")))
        elif isinstance(details, AttemptFailed):
            self._log.info("attempt %d on %s failed: %s", details.attempt, details.backend, details.error)
        for hook in self._hooks:
            try:
                hook(details)
            except Exception:  # noqa: BLE001 - somebody else's code must not fail a request
                self._log.exception("hook %r failed", hook)

    def warn(self, text: str) -> None:
        self._log.warning("%s", text)
