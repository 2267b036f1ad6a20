"""Which backends are worth asking now: a circuit breaker for each, fed by how attempts ended.

Nygard's breaker (Release It!, 2nd ed., ch. 5): closed while a backend answers; open, so that nobody waits for it, after
failures in a row; after a pause that doubles each time it lets one request through, whose end decides. A server that says when
it will be back is believed. What is wrong with a request says nothing about a backend.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachespec.errors import (
    AuthenticationError,
    BackendError,
    ConnectionFailedError,
    EngineStoppedError,
    NotFoundError,
    OutOfPagesError,
    PermissionDeniedError,
    RateLimitError,
    RequestRejectedError,
)

FAILURES = 3
"""Failures in a row that open a breaker. One is enough where nothing listens, and where our key is refused."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
_AT_ONCE = (AuthenticationError, PermissionDeniedError, NotFoundError, ConnectionFailedError, EngineStoppedError)
_NOT_ITS_FAULT = (RequestRejectedError, OutOfPagesError)


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    pauses: int = 0
    opened_at: float = 0.0
    open_until: float = 0.0
    probing: bool = False
    cause: str = ""

    def waits(self, now: float) -> bool:
        """Whether its pause goes on; a clock that was set back to before it began ends it, too."""
        return self.opened_at <= now < self.open_until


class Health:
    """The breakers of a client's backends, and how many requests each has under way. Times are Unix seconds."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}
        self._load: dict[str, int] = {}

    def refusal(self, backend: str, now: float) -> str | None:
        """Why this backend should not be asked at `now`; None: it may be. Changes nothing."""
        breaker = self._breakers.get(backend)
        if breaker is None or not breaker.open_until:
            return None
        if breaker.waits(now):
            return f"{breaker.cause}; tried again in {breaker.open_until - now:.0f} s"
        if breaker.probing:
            return f"{breaker.cause}; one request is trying it now"
        return None

    def load(self, backend: str) -> int:
        """Requests under way there, of this client."""
        return self._load.get(backend, 0)

    def started(self, backend: str, now: float) -> None:
        """An attempt begins; through an open breaker it is the probe."""
        self._load[backend] = self._load.get(backend, 0) + 1
        breaker = self._breakers.get(backend)
        if breaker is not None and breaker.open_until and not breaker.waits(now):
            breaker.probing = True

    def answered(self, backend: str) -> None:
        """An attempt was answered to its end: the breaker closes."""
        self._ended(backend)
        self._breakers.pop(backend, None)

    def left(self, backend: str) -> None:
        """An attempt was left or cancelled by the caller: it says nothing."""
        self._ended(backend)
        if (breaker := self._breakers.get(backend)) is not None:
            breaker.probing = False

    def failed(self, backend: str, error: Exception, now: float) -> None:
        """An attempt failed with this error."""
        self._ended(backend)
        breaker = self._breakers.setdefault(backend, _Breaker())
        probed, breaker.probing = breaker.probing, False
        if isinstance(error, _NOT_ITS_FAULT) or not isinstance(error, BackendError):
            return
        breaker.failures += 1
        asked = error.retry_after
        at_once = isinstance(error, _AT_ONCE) or (asked is not None and isinstance(error, RateLimitError))
        if not (probed or at_once or breaker.failures >= FAILURES):
            return
        pause = min(FIRST_PAUSE_S * 2.0**breaker.pauses, LONGEST_PAUSE_S)
        breaker.pauses = min(breaker.pauses + 1, 16)
        breaker.opened_at, breaker.open_until = now, now + max(pause if asked is None else float(asked), 0.0)
        breaker.cause = f"{type(error).__name__} after {breaker.failures} failure{'s' if breaker.failures > 1 else ''} in a row"

    def _ended(self, backend: str) -> None:
        count = self._load.get(backend, 0) - 1
        if count > 0:
            self._load[backend] = count
        else:
            self._load.pop(backend, None)
