"""The memory ledger: the contract, and staying small."""

from __future__ import annotations

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
    await ledger.settle(await ledger.reserve(hold("1", accounts=("all",))), spent("1"))
    clock.now -= 3600
    await ledger.settle(await ledger.reserve(hold("1", accounts=("all",))), spent("1"))
    assert figures(ledger.snapshot([limit("9", since=NOON)])) == [("2", "0")]


@pytest.mark.anyio
async def test_only_the_last_settled_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.ledger.memory._REMEMBERED", 5)
    ledger = MemoryLedger()
    for _ in range(20):
        await ledger.settle(await ledger.reserve(hold("1")), spent("1"))
    assert len(ledger._settled) == 5
