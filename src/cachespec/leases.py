"""Leases of the requests that are under way: renewed before they run out, as long as somebody may still read the answer.

A lease outlives its request's deadline a little. A reader that thinks past the deadline, a request that has none, or a wall
clock that jumps (a machine that slept) outlive the lease; what they reserved must not be free before they are settled
(contract M3). When the process dies nobody renews, and the lease frees it.
"""

from __future__ import annotations

import logging
import math

from cachespec.background import Background
from cachespec.clock import Clock
from cachespec.errors import LedgerError
from cachespec.ledger.base import Hold, Ledger

MARGIN_S = 60.0
"""A lease outlives its request's deadline by this much. At the deadline it is renewed, when the request is still open."""
AGAIN_S = 5.0
"""When a renewal that failed is tried again."""


class Leases:
    """See the module's docstring. One object for a client, used by the tasks of one event loop. Times are the clock's."""

    def __init__(self, ledger: Ledger, background: Background, clock: Clock) -> None:
        self._ledger, self._background, self._clock = ledger, background, clock
        self._kept: dict[str, tuple[float, Hold]] = {}  # by reservation: when its renewal is due
        self._next = math.inf

    def keep(self, reservation: str, hold: Hold) -> None:
        """Renew this reservation from time to time, until it is dropped."""
        if hold.amount:
            due = self._clock.time() + max(hold.lease_s - MARGIN_S, 0.0)
            self._kept[reservation] = due, hold
            self._plan(due)

    def drop(self, reservation: str) -> None:
        """Renew this one no more: it is about to be settled or released."""
        self._kept.pop(reservation, None)

    async def renew(self) -> None:
        """Renew what is due. What the ledger cannot do now is logged, and tried again soon."""
        now = self._clock.time()
        if now < self._next:
            return
        try:
            for reservation in tuple(self._kept):
                due, hold = self._kept.get(reservation, (math.inf, None))
                if hold is not None and due <= now:
                    await self._renew(reservation, hold)
        finally:
            # Whoever comes meanwhile finds these still due and renews them too, before it reserves: twice does no harm.
            self._next = math.inf
            if self._kept:
                self._plan(min(due for due, _ in self._kept.values()))

    async def _renew(self, reservation: str, hold: Hold) -> None:
        again_s = max(hold.lease_s - MARGIN_S, hold.lease_s / 2)
        try:
            await self._ledger.renew(reservation, hold)
        except LedgerError as error:
            again_s = AGAIN_S
            logging.getLogger("cachespec").warning("the lease of a request could not be renewed: %s", error)
        if reservation in self._kept:
            self._kept[reservation] = self._clock.time() + again_s, hold

    def _plan(self, due: float) -> None:
        if due < self._next:
            self._next = due
            self._background.at(due, "leases", self.renew)
