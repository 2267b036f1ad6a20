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
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RequestRejectedError,
)

FAILURES = 3
"""Failures in a row that open a breaker. One is enough where nothing listens, and where our key is refused; a server that took
a request and hung up is there."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
LONGEST_ASKED_S = 3600.0
"""A server that says when it will be back is believed up to an hour: one request then sees whether it meant it."""
_AT_ONCE = (AuthenticationError, PermissionDeniedError, NotFoundError, ConnectionFailedError, EngineStoppedError)
_BUSY = (RateLimitError, OverloadedError)
NOT_ITS_FAULT = (RequestRejectedError, OutOfPagesError)
"""What a request is refused for says nothing of who refuses it."""


@dataclass(slots=True)
class _Breaker:
    """`openings` counts how often it opened, for ever; `probe` is the attempt that tries the backend after the pause.
    `busy`: it opened for load."""

    failures: int = 0
    pauses: int = 0
    openings: int = 0
    opened_at: float = 0.0
    open_until: float = 0.0
    probe: Trial | None = None
    cause: str = ""
    busy: bool = False

    def waits(self, now: float) -> bool:
        """Whether its pause goes on; a clock that was set back to before it began ends it, too."""
        return self.opened_at <= now < self.open_until

    def close(self) -> None:
        self.failures = self.pauses = 0
        self.opened_at = self.open_until = 0.0
        self.probe = None


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """An attempt under way, from when it is decided. `opening`: the last opening of its backend's breaker before it."""

    backend: str
    opening: int


class Health:
    """The breakers of a client's backends, and how many requests each has under way. Times are Unix seconds.

    `started` is told of an attempt as soon as it is decided, so that of many requests that are decided at once one is the
    probe; then exactly one of `answered`, `left` and `failed` of what became of it.
    """

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
        if breaker.probe is not None:
            return f"{breaker.cause}; one request is trying it now"
        return None

    def gone(self, backend: str, now: float) -> bool:
        """Whether it should not be asked because nobody answers there, or not us. Who only has too much to do is not gone."""
        return self.refusal(backend, now) is not None and not self._breakers[backend].busy

    def load(self, backend: str) -> int:
        """Requests under way there, of this client."""
        return self._load.get(backend, 0)

    def started(self, backend: str, now: float) -> Trial:
        """An attempt begins; through an open breaker whose pause is over it is the probe."""
        self._load[backend] = self._load.get(backend, 0) + 1
        breaker = self._breakers.get(backend)
        trial = Trial(backend, 0 if breaker is None else breaker.openings)
        if breaker is not None and breaker.open_until and not breaker.waits(now) and breaker.probe is None:
            breaker.probe = trial
        return trial

    def began(self, trial: Trial) -> None:
        """An attempt's answer begins: where it is the probe, others need not wait for its end."""
        breaker = self._breakers.get(trial.backend)
        if breaker is not None and breaker.probe is trial:
            breaker.close()

    def answered(self, trial: Trial) -> None:
        """An attempt was answered to its end: the breaker closes, unless the attempt is older than what opened it."""
        breaker = self._ended(trial)
        if breaker is not None and (trial.opening == breaker.openings or not breaker.open_until):
            breaker.close()

    def left(self, trial: Trial) -> None:
        """An attempt was not sent, or left or cancelled by the caller, or failed by the caller's doing: it says nothing."""
        self._ended(trial)

    def failed(self, trial: Trial, error: Exception, now: float) -> None:
        """An attempt failed with this error.

        The pause doubles once for each opening: of the attempts that were under way when the breaker opened, and of those
        that are made although it is open, further failures add nothing but what a server says of when to come back.
        """
        breaker = self._ended(trial)
        if isinstance(error, NOT_ITS_FAULT) or not isinstance(error, BackendError):
            return
        if breaker is None:
            breaker = self._breakers[trial.backend] = _Breaker()
        asked = asked_pause(error)
        waiting = bool(breaker.open_until) and breaker.waits(now)
        if waiting or trial.opening < breaker.openings:
            if waiting and asked is not None:
                breaker.open_until = max(breaker.open_until, now + asked)
            return
        breaker.failures += 1
        asked_off = asked is not None and isinstance(error, RateLimitError)
        at_once = asked_off or (isinstance(error, _AT_ONCE) and not error.begun)
        if not (breaker.open_until or at_once or breaker.failures >= FAILURES):
            return
        pause = min(FIRST_PAUSE_S * 2.0**breaker.pauses, LONGEST_PAUSE_S)
        breaker.pauses = min(breaker.pauses + 1, 16)
        breaker.openings += 1
        breaker.probe = None
        breaker.opened_at, breaker.open_until = now, now + (pause if asked is None else asked)
        breaker.busy = isinstance(error, _BUSY)
        breaker.cause = f"{type(error).__name__} after {breaker.failures} failure{'s' if breaker.failures > 1 else ''} in a row"

    def forget(self, backend: str) -> None:
        """Somebody else answers by this name now: what attempts that are under way still tell is of the one before."""
        breaker = self._breakers.setdefault(backend, _Breaker())
        breaker.close()
        breaker.openings += 1

    def _ended(self, trial: Trial) -> _Breaker | None:
        count = self._load.get(trial.backend, 0) - 1
        if count > 0:
            self._load[trial.backend] = count
        else:
            self._load.pop(trial.backend, None)
        breaker = self._breakers.get(trial.backend)
        if breaker is not None and breaker.probe is trial:
            breaker.probe = None
        return breaker


def asked_pause(error: BaseException) -> float | None:
    """The seconds that a server asks to be left alone, 0 to `LONGEST_ASKED_S`; None where it says nothing, or no number."""
    asked = getattr(error, "retry_after", None)
    if not isinstance(asked, int | float) or asked != asked:
        return None
    return min(max(float(asked), 0.0), LONGEST_ASKED_S)
