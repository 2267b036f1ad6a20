"""A ledger in this process's memory: exact and atomic among its tasks and threads, gone when the process ends.

It stays small in a process that runs for months: sums are kept, single entries only the last `keep`, and of older
spending just 16 bytes a request and account, from which any window can be summed.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cachespec.decision import BudgetState
from cachespec.errors import BudgetExceededError, LedgerError
from cachespec.ledger._amounts import (
    accounts_of,
    from_micros,
    from_units,
    lease_micros,
    limit_units,
    reserved_units,
    spent_units,
    to_micros,
)
from cachespec.ledger.base import Entry, Hold, Limit, Settlement, Totals

_REMEMBERED = 4096  # settled ids kept, so that settling twice is told from settling what never was
_WINDOWS = 64  # sums kept of one account, more than periods and time zones have windows open at once; others are made anew


@dataclass(slots=True)
class _Account:
    """One counter: its open reservations, its spending in order of time, and the sums of the windows asked for last."""

    held: set[str] = field(default_factory=set)
    times: array[int] = field(default_factory=lambda: array("q"))
    units: array[int] = field(default_factory=lambda: array("q"))
    windows: OrderedDict[int, int] = field(default_factory=OrderedDict)
    forgiven: dict[int, int] = field(default_factory=dict)  # what `reset` took off windows

    def spend(self, now: int, units: int) -> None:
        place = bisect_right(self.times, now)  # the end, unless the clock was set back
        self.times.insert(place, now)
        self.units.insert(place, units)
        for since in self.windows:
            if now >= since:
                self.windows[since] += units

    def since(self, moment: int) -> int:
        if moment in self.windows:
            self.windows.move_to_end(moment)
        else:
            self.windows[moment] = self._sum(moment) - self.forgiven.get(moment, 0)
            if len(self.windows) > _WINDOWS:
                self.windows.popitem(last=False)
        return self.windows[moment]

    def forgive(self, moment: int) -> None:
        self.forgiven[moment] = self._sum(moment)
        self.windows[moment] = 0

    def _sum(self, moment: int) -> int:
        return sum(self.units[bisect_left(self.times, moment) :])


@dataclass(slots=True)
class _Sums:
    """Running totals of one tenant, or of all."""

    requests: int = 0
    units: int = 0
    estimated: int = 0
    unpriced: int = 0
    uncounted: int = 0
    uncached: int = 0
    cache_read: int = 0
    cache_write: int = 0
    output: int = 0

    def add(self, settlement: Settlement, units: int | None) -> None:
        self.requests += 1
        self.units += units or 0
        self.estimated += settlement.estimated
        self.unpriced += units is None
        self.uncounted += settlement.usage is None or settlement.usage.output is None
        if settlement.usage is not None:
            self.uncached += settlement.usage.uncached or 0
            self.cache_read += settlement.usage.cache_read or 0
            self.cache_write += settlement.usage.written or 0
            self.output += settlement.usage.output or 0


class MemoryLedger:
    """See `cachespec.ledger.base.Ledger`.

    Args:
        keep: how many of the last entries `entries` can return; sums and budgets cover all.
        clock: Unix time in seconds.
    """

    def __init__(self, *, keep: int = 1000, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Hold, int, int]] = {}  # hold, units, end of the lease
        self._accounts: dict[str, _Account] = {}
        self._entries: deque[Entry] = deque(maxlen=keep)
        self._settled: dict[str, None] = {}
        self._all = _Sums()
        self._tenants: dict[str, _Sums] = {}
        self._secrets: dict[str, bytes] = {}
        self._saved: dict[str, bytes] = {}
        self._closed = False

    async def reserve(self, hold: Hold) -> str:
        """See `Ledger.reserve`."""
        units = reserved_units(hold.amount)
        lease = lease_micros(hold.lease_s)
        limits = [(limit, limit_units(limit.limit)) for limit in hold.limits]
        with self._lock:
            self._check_open()
            for limit, most in limits:
                spent, reserved = self._look(limit)
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
            self._open[reservation] = (hold, units, self._now() + lease)
            for account in accounts_of(hold):
                self._account(account).held.add(reservation)
            return reservation

    async def renew(self, reservation: str, hold: Hold) -> None:
        """See `Ledger.renew`."""
        lease = lease_micros(hold.lease_s)
        with self._lock:
            self._check_open()
            if reservation in self._open:
                held, units, end = self._open[reservation]
                self._open[reservation] = (held, units, max(end, self._now() + lease))

    async def settle(self, reservation: str, settlement: Settlement) -> None:
        """See `Ledger.settle`. A lease that ran out does not matter: the spend is recorded."""
        units = spent_units(settlement.amount)
        with self._lock:
            self._check_open()
            if reservation in self._settled:
                return
            if reservation not in self._open:
                raise LedgerError(f"memory ledger: unknown reservation {reservation}")
            hold, now = self._drop(reservation), self._now()
            self._settled[reservation] = None
            if len(self._settled) > _REMEMBERED:
                del self._settled[next(iter(self._settled))]
            self._all.add(settlement, units)
            if hold.tenant is not None:
                self._tenants.setdefault(hold.tenant, _Sums()).add(settlement, units)
            for account in accounts_of(hold) if units else ():
                self._account(account).spend(now, units or 0)
            self._entries.append(
                Entry(
                    id=self._all.requests,
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

    async def release(self, reservation: str) -> None:
        """See `Ledger.release`."""
        with self._lock:
            self._check_open()
            if reservation in self._open:
                self._drop(reservation)

    def snapshot(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """See `Ledger.snapshot`: exact here."""
        with self._lock:
            seen = [(limit, *self._look(limit)) for limit in limits]
        return tuple(
            BudgetState(scope=limit.scope, limit=limit.limit, spent=from_units(spent), reserved=from_units(reserved))
            for limit, spent, reserved in seen
        )

    async def refresh(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """The state of these limits now; what `snapshot` returns from then on."""
        return self.snapshot(limits)

    async def reset(self, limits: Sequence[Limit]) -> None:
        """See `Ledger.reset`."""
        with self._lock:
            self._check_open()
            for limit in limits:
                self._account(limit.account).forgive(to_micros(limit.since))

    async def accounts(self) -> tuple[str, ...]:
        """See `Ledger.accounts`."""
        with self._lock:
            now = self._now()
            held = {name for name, a in self._accounts.items() if any(self._open[r][2] > now for r in a.held)}
            return tuple(sorted(held | {name for name, account in self._accounts.items() if account.times}))

    async def entries(self, *, limit: int | None = None, tenant: str | None = None) -> tuple[Entry, ...]:
        """See `Ledger.entries`: at most the last `keep` of all tenants together."""
        with self._lock:
            newest = [e for e in reversed(self._entries) if tenant is None or e.tenant == tenant]
        return tuple(newest if limit is None else newest[: max(limit, 0)])

    async def totals(self, *, tenant: str | None = None) -> Totals:
        """See `Ledger.totals`."""
        with self._lock:
            sums = self._all if tenant is None else self._tenants.get(tenant, _Sums())
            return Totals(
                requests=sums.requests,
                amount=from_units(sums.units),
                estimated=sums.estimated,
                unpriced=sums.unpriced,
                uncounted=sums.uncounted,
                uncached=sums.uncached,
                cache_read=sums.cache_read,
                cache_write=sums.cache_write,
                output=sums.output,
            )

    async def secret(self, name: str) -> bytes:
        """32 random bytes, made at the first call and kept as long as this ledger: the salt of tenants' keys."""
        with self._lock:
            return self._secrets.setdefault(name, secrets.token_bytes(32))

    async def save(self, name: str, data: bytes) -> None:
        """See `Ledger.save`: kept as long as this ledger."""
        with self._lock:
            self._check_open()
            self._saved[name] = bytes(data)

    async def load(self, name: str) -> bytes | None:
        """See `Ledger.load`."""
        with self._lock:
            return self._saved.get(name)

    async def aclose(self) -> None:
        """See `Ledger.aclose`. What was recorded stays readable."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise LedgerError("memory ledger: closed")

    def _account(self, name: str) -> _Account:
        if name not in self._accounts:
            self._accounts[name] = _Account()
        return self._accounts[name]

    def _look(self, limit: Limit) -> tuple[int, int]:
        account, now = self._accounts.get(limit.account), self._now()
        if account is None:
            return 0, 0
        reserved = sum(units for _, units, end in map(self._open.__getitem__, account.held) if end > now)
        return account.since(to_micros(limit.since)), reserved

    def _drop(self, reservation: str) -> Hold:
        hold = self._open.pop(reservation)[0]
        for account in accounts_of(hold):
            self._accounts[account].held.discard(reservation)
        return hold

    def _now(self) -> int:
        return round(self._clock() * 1_000_000)
