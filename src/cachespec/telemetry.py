"""What happens to requests, told to hooks and to the log; never a prompt, never a secret, never in the way.

A hook is any callable that takes one frozen details object; it is called in the task of the request. An exception in a
hook is logged and goes no further. The whole decision of each request is logged as one JSON value at level DEBUG on the
logger ``cachespec.decision`` (contract D4).
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol, TypeAlias

from cachespec.decision import Decision
from cachespec.errors import ConfigError
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
    """Something was booked: ``completed``, ``left``, ``cancelled`` or ``failed``. `cost` is USD.

    Once for a request, and once more for each attempt of it that failed and may have been billed all the same.
    """

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
    """A soft budget may be passed by this request, which may cost `requested` at most. USD."""

    scope: str
    limit: Decimal
    spent: Decimal
    reserved: Decimal
    requested: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksIgnored:
    """So many requests in a row marked a prefix of about `tokens` tokens, and the vendor neither read nor wrote any of it,
    although it caches from `minimum` on."""

    backend: str
    model: str
    requests: int
    tokens: int
    minimum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAlive:
    """A request was sent only to keep a cached prefix alive. Tokens as the vendor counted them; `cost` in USD."""

    backend: str
    model: str
    read: int | None
    written: int | None
    cost: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """A changed configuration was taken up; requests from now on are of this generation."""

    generation: int
    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadRefused:
    """A changed configuration was not taken up, and `generation` goes on unchanged. `error` says what is wrong with it."""

    generation: int
    path: str | None
    error: Exception


Details: TypeAlias = Decided | AttemptFailed | Settled | BudgetPassed | MarksIgnored | KeptAlive | Reloaded | ReloadRefused


class Hook(Protocol):
    """Told about every step of every request."""

    def __call__(self, details: Details, /) -> None: ...


def takes(function: object, arguments: int) -> str | None:
    """Why `function` cannot be called with that many positional arguments, here and now; None: it can."""
    if not callable(function):
        return "is missing" if function is None else "cannot be called"
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return "is async; it must be a plain function"
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return f"must take {arguments} positional argument{'s' if arguments > 1 else ''}"
    except ValueError:  # a builtin that does not tell its signature
        return None
    return None


class Telemetry:
    """Calls the hooks, in order, and writes the log. Raises ConfigError for a hook that cannot be called."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        for position, hook in enumerate(hooks):
            problem = takes(hook, 1)
            if problem is not None:
                raise ConfigError(f"{hook!r} {problem}", key=f"hooks[{position}]")
        self._hooks = tuple(hooks)
        self._log = logging.getLogger("cachespec")
        self._decisions = logging.getLogger("cachespec.decision")

    def tell(self, details: Details) -> None:
        if isinstance(details, Decided) and self._decisions.isEnabledFor(logging.DEBUG):
            self._decisions.debug("%s", json.dumps(details.decision.to_dict(), separators=(",", ":")))
        elif isinstance(details, AttemptFailed):
            self._log.info("attempt %d on %s failed: %s", details.attempt, details.backend, details.error)
        elif isinstance(details, Reloaded):
            self._log.info("configuration %s: generation %d", details.path, details.generation)
        elif isinstance(details, ReloadRefused):
            self._log.warning("configuration not taken up, generation %d goes on: %s", details.generation, details.error)
        for hook in self._hooks:
            try:
                hook(details)
            except Exception:  # noqa: BLE001 - somebody else's code must not fail a request
                self._log.exception("hook %r failed", hook)

    def warn(self, text: str) -> None:
        self._log.warning("%s", text)
