"""Time as the package sees it, in one place, so that tests can own it (`cachespec.testing.FakeClock`)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for windows, leases and beliefs; `sleep` for the pauses between attempts."""

    def time(self) -> float:
        """Unix time in seconds."""

    async def sleep(self, seconds: float) -> None:
        """Wait; cancellable."""


class SystemClock:
    """The machine's own clock."""

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        from anyio import sleep

        await sleep(seconds)
