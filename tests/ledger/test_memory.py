"""The memory ledger: the contract, and staying small."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from tests.ledger.contract import NOON, Clock, FullLedger, LedgerContract, figures, hold, limit, spent

from cachespec.ledger.memory import MemoryLedger


class TestMemoryLedger(LedgerContract):
    def make(self, folder: Path, clock: Clock) -> FullLedger:
        return MemoryLedger(clock=clock)


@pytest.mark.anyio
async def test_old_entries_go_and_sums_stay() -> None:
    clock = Clock()
    ledger = MemoryLedger(keep=3, clock=clock)
    for _ in range(10):
        await ledger.settle(await ledger.reserve(hold("1", accounts=("all",))), spent("0.5"))
        clock.now += 1
    assert [e.id for e in await ledger.entries()] == [10, 9, 8]
    assert (await ledger.totals(tenant="acme")).amount == Decimal(5)
    window = limit("9", since=NOON.replace(second=7))  # asked for the first time now
    assert figures(ledger.snapshot([window])) == [("1.5", "0")]


@pytest.mark.anyio
async def test_a_clock_set_back_loses_no_spending() -> None:
    clock = Clock()
    ledger = MemoryLedger(clock=clock)
    for amount, hours in (("1", -1), ("2", -1), ("4", 3)):
        await ledger.settle(await ledger.reserve(hold("9", accounts=("all",))), spent(amount))
        clock.now += 3600 * hours
    starts = [NOON + timedelta(hours=h) for h in (-3, -2, -1, 0, 1)]
    assert [s for s, _ in figures(ledger.snapshot([limit("9", since=at) for at in starts]))] == ["7", "7", "3", "1", "0"]


@pytest.mark.anyio
async def test_it_stays_small_where_windows_are_short_and_sessions_many() -> None:
    clock = Clock()
    ledger = MemoryLedger(clock=clock)
    for minute in range(500):
        now = limit("1", since=NOON + timedelta(minutes=minute))
        ledger.snapshot([limit("1", account=f"session:{minute}")])
        await ledger.settle(await ledger.reserve(hold("0.2", limit("999"), now)), spent("0.1"))
        clock.now += 60
    assert len(ledger._accounts["all"].windows) <= 64
    assert list(ledger._accounts) == ["all"]


@pytest.mark.anyio
async def test_only_the_last_settled_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.ledger.memory._REMEMBERED", 5)
    ledger = MemoryLedger()
    for _ in range(20):
        await ledger.settle(await ledger.reserve(hold("1")), spent("1"))
    assert len(ledger._settled) == 5
