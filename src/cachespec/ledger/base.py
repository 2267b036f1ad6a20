"""The contract of a ledger: reserve before a request is sent, settle exactly once after it.

A reservation counts against every limit it names until it is settled, released, or its lease runs out (its process
died); whoever is still at work renews it. The check and the reservation are one atomic step, so that with any number of
tasks and processes spent + reserved never passes a hard limit (contract M3). Amounts are USD, exact decimals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from cachespec.decision import BudgetState
from cachespec.usage import Usage

MOST_USD = Decimal("9223372.036854775807")
"""The most that a ledger holds for one request, in USD: 64 bits of 1e-12 USD. More is refused, reserved or settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A hard limit that a reservation must fit under.

    `scope` is what a person reads (``tenant:acme per day``); `account` is the counter it adds to, the same for every
    request of that scope; `since` is where the current window began and `resets_at` where it ends (None: never).
    """

    scope: str
    account: str
    limit: Decimal
    since: datetime | None = None
    resets_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What to reserve: the worst case of one request. `accounts` are all counters the spend will be added to."""

    amount: Decimal
    backend: str
    model: str
    tenant: str | None
    session_id: str | None
    tags: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    lease_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What a request really cost. `amount` None: the price is not known. `outcome`: completed, left, cancelled, failed."""

    amount: Decimal | None
    estimated: bool
    usage: Usage | None
    outcome: str
    request_id: str | None = None
    price_source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One settled request, as `entries` returns it. Times are UTC."""

    id: int
    at: datetime
    backend: str
    model: str
    tenant: str | None
    session_id: str | None
    tags: tuple[str, ...]
    amount: Decimal | None
    estimated: bool
    usage: Usage | None
    outcome: str
    request_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over settled requests, of what is known.

    `unpriced` counts the requests whose price was not known, `uncounted` those whose tokens the backend did not report, or
    not all of them: the token sums are without those.
    """

    requests: int
    amount: Decimal
    estimated: int
    unpriced: int
    uncounted: int
    uncached: int
    cache_read: int
    cache_write: int
    output: int


class Ledger(Protocol):
    """Safe for many tasks at once. Everything raises `LedgerError` when the store cannot be read or written."""

    async def reserve(self, hold: Hold) -> str:
        """Check every limit and reserve, atomically; return the reservation's id. Raises BudgetExceededError."""

    async def renew(self, reservation: str, hold: Hold) -> None:
        """Begin the lease anew, `hold.lease_s` from now, since what `hold` was reserved for is not over; it ends no earlier.

        A lease that ran out is taken up again, whatever was reserved meanwhile: what may yet be spent counts. Unknown,
        released or settled ids change nothing.
        """

    async def settle(self, reservation: str, settlement: Settlement) -> None:
        """Replace the reservation by what was spent. A second call for the same id changes nothing."""

    async def release(self, reservation: str) -> None:
        """Drop a reservation: nothing was spent. Unknown or settled ids change nothing."""

    def snapshot(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """The last known state of these limits, without I/O (contract D3): what `plan` shows."""

    async def refresh(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """Read these limits, other processes' spending included; what `snapshot` returns from then on."""

    async def reset(self, limits: Sequence[Limit]) -> None:
        """Count these limits' windows from nothing again, each by itself: what was settled stays in `entries` and in other
        windows of the same account, and open reservations keep their room."""

    async def accounts(self) -> tuple[str, ...]:
        """Every counter that something was spent on or is reserved on, in order."""

    async def entries(self, *, limit: int | None = None, tenant: str | None = None) -> tuple[Entry, ...]:
        """Settled requests, newest first."""

    async def totals(self, *, tenant: str | None = None) -> Totals:
        """Sums over settled requests."""

    async def secret(self, name: str) -> bytes:
        """32 random bytes kept under `name`, made at the first call: the salt of tenants' keys."""

    async def save(self, name: str, data: bytes) -> None:
        """Keep `data` under `name`, instead of what was there: what a client learned, for the next one."""

    async def load(self, name: str) -> bytes | None:
        """What was saved last under `name`; None: nothing was."""

    async def aclose(self) -> None:
        """Flush and close. Idempotent."""
