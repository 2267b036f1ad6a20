"""A ledger in this process's memory: exact and atomic among its tasks and threads, gone when the process ends."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cachespec.decision import BudgetState
from cachespec.errors import BudgetExceededError, LedgerError
from cachespec.ledger._amounts import from_micros, from_units, limit_units, to_micros, to_units
from cachespec.ledger.base import Entry, Hold, Limit, Settlement, Totals


@dataclass(slots=True)
class _Spend:
    """A counter: what was spent on one account since one moment."""

    since: int
    units: int


class MemoryLedger:
    """See `cachespec.ledger.base.Ledger`. `clock` gives Unix time in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Hold, int, float]] = {}  # hold, units, lease end
        self._held: dict[str, set[str]] = {}  # reservations by account
        self._entries: list[Entry] = []
        self._settled: set[str] = set()
        self._by_account: dict[str, list[tuple[int, int]]] = {}  # (when, units)
        self._spent: dict[str, dict[int, _Spend]] = {}
        self._secrets: dict[str, bytes] = {}
        self._closed = False

    async def reserve(self, hold: Hold) -> str:
        """See `Ledger.reserve`."""
        units = to_units(hold.amount, field="amount", up=True)
        limits = [(limit, limit_units(limit.limit)) for limit in hold.limits]
        with self._lock:
            self._check_open()
            for limit, most in limits:
                spent, reserved = self._spent_since(limit.account, to_micros(limit.since)), self._reserved(limit.account)
                if spent + reserved + units > most:
                    raise BudgetExceededError(
                        scope=limit.scope,
                        limit=limit.limit,
                        spent=from_units(spent),
                        reserved=from_units(reserved),
                        requested=from_units(units),
                        resets_at=limit.resets_at,
                    )
            reservation = secrets.token_hex(16)
            self._open[reservation] = (hold, units, self._clock() + hold.lease_s)
            for account in accounts_of(hold):
                self._held.setdefault(account, set()).add(reservation)
            return reservation

    async def settle(self, reservation: str, settlement: Settlement) -> None:
        """See `Ledger.settle`. A lease that ran out does not matter: the spend is recorded."""
        units = None if settlement.amount is None else to_units(settlement.amount, field="amount")
        with self._lock:
            self._check_open()
            if reservation in self._settled:
                return
            if reservation not in self._open:
                raise LedgerError(f"memory ledger: unknown reservation {reservation}")
            hold = self._drop(reservation)
            self._settled.add(reservation)
            now = round(self._clock() * 1_000_000)
            self._entries.append(
                Entry(
                    id=len(self._entries) + 1,
                    at=from_micros(now),
                    backend=hold.backend,
                    model=hold.model,
                    tenant=hold.tenant,
                    session_id=hold.session_id,
                    tags=hold.tags,
                    amount=None if units is None else from_units(units),
                    estimated=settlement.estimated,
                    usage=settlement.usage,
                    outcome=settlement.outcome,
                    request_id=settlement.request_id,
                )
            )
            for account in accounts_of(hold) if units else ():
                self._by_account.setdefault(account, []).append((now, units or 0))
                for spend in self._spent.get(account, {}).values():
                    if now >= spend.since:
                        spend.units += units or 0

    async def release(self, reservation: str) -> None:
        """See `Ledger.release`."""
        with self._lock:
            self._check_open()
            if reservation in self._open:
                self._drop(reservation)

    def snapshot(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """See `Ledger.snapshot`: exact here."""
        with self._lock:
            return tuple(
                BudgetState(
                    scope=limit.scope,
                    limit=limit.limit,
                    spent=from_units(self._spent_since(limit.account, to_micros(limit.since))),
                    reserved=from_units(self._reserved(limit.account)),
                )
                for limit in limits
            )

    async def refresh(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """The state of these limits now; what `snapshot` returns from then on."""
        return self.snapshot(limits)

    async def entries(self, *, limit: int | None = None, tenant: str | None = None) -> tuple[Entry, ...]:
        """See `Ledger.entries`."""
        with self._lock:
            newest = [e for e in reversed(self._entries) if tenant is None or e.tenant == tenant]
            return tuple(newest if limit is None else newest[: max(limit, 0)])

    async def totals(self, *, tenant: str | None = None) -> Totals:
        """See `Ledger.totals`."""
        return totals_of(await self.entries(tenant=tenant))

    async def secret(self, name: str) -> bytes:
        """32 random bytes, made at the first call and kept as long as this ledger: the salt of tenants' keys."""
        with self._lock:
            return self._secrets.setdefault(name, secrets.token_bytes(32))

    async def aclose(self) -> None:
        """See `Ledger.aclose`. Reading stays possible."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise LedgerError("memory ledger: closed")

    def _spent_since(self, account: str, since: int) -> int:
        windows = self._spent.setdefault(account, {})
        if since not in windows:
            units = sum(u for at, u in self._by_account.get(account, ()) if at >= since)
            windows[since] = _Spend(since, units)
        return windows[since].units

    def _reserved(self, account: str) -> int:
        now = self._clock()
        open_ = (self._open[r] for r in self._held.get(account, ()))
        return sum(units for _, units, end in open_ if end > now)

    def _drop(self, reservation: str) -> Hold:
        hold = self._open.pop(reservation)[0]
        for account in accounts_of(hold):
            self._held[account].discard(reservation)
        return hold


def accounts_of(hold: Hold) -> tuple[str, ...]:
    """Every counter that a hold adds to, once each: its own, and those of its limits."""
    return tuple(dict.fromkeys((*hold.accounts, *(limit.account for limit in hold.limits))))


def totals_of(entries: Iterable[Entry]) -> Totals:
    """Sums over entries. Counts that were not reported add nothing."""
    rows = list(entries)
    usages = [e.usage for e in rows if e.usage is not None]
    return Totals(
        requests=len(rows),
        amount=sum((e.amount for e in rows if e.amount is not None), start=from_units(0)),
        estimated=sum(e.estimated for e in rows),
        unpriced=sum(e.amount is None for e in rows),
        uncached=sum(u.uncached or 0 for u in usages),
        cache_read=sum(u.cache_read or 0 for u in usages),
        cache_write=sum(u.written or 0 for u in usages),
        output=sum(u.output or 0 for u in usages),
    )
