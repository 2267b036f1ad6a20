"""What a request reserved stays reserved until it is settled, however long its stream is open (contract M3)."""

from __future__ import annotations

import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pytest

from cachespec.background import Background
from cachespec.client import Client
from cachespec.errors import BudgetExceededError, LedgerError, StreamInterruptedError
from cachespec.leases import AGAIN_S, Leases
from cachespec.ledger.base import Hold, Limit
from cachespec.ledger.memory import MemoryLedger
from cachespec.ledger.sqlite import SqliteLedger
from cachespec.pricing import hosted_rates
from cachespec.testing import FakeClock, ScriptedBackend, say
from cachespec.usage import Usage

pytestmark = pytest.mark.anyio
RATES = hosted_rates(None, "scripted", prices={"input": "1000", "output": "1000"})
USAGE = Usage(uncached=900, cache_read=0, cache_write={}, output=0)
LIMIT = Limit(scope="overall in total", account="overall", limit=Decimal(1))
PROMPT = "x" * 880  # may cost a little more than 0.90 USD
BUDGET: dict[str, Any] = {"budgets": [{"scope": "overall", "limit": "1"}]}


def client_of(ledger: MemoryLedger | SqliteLedger, clock: FakeClock, timeout: float = 30.0) -> Client:
    backend = ScriptedBackend(say("one", "two", "three", usage=USAGE), rates=RATES)
    return Client(
        backends={"scripted": backend}, ledger=ledger, clock=clock, policies=BUDGET, max_output_tokens=5, timeout=timeout
    )


async def test_a_reader_that_outlives_the_lease_keeps_its_reservation() -> None:
    clock = FakeClock()
    ledger = MemoryLedger(clock=clock.time)
    async with client_of(ledger, clock) as client:
        async with client.stream(PROMPT, timeout=0.3) as stream:
            await stream.__anext__()
            await anyio.sleep(0.4)  # the reader thinks past its own deadline ...
            clock.advance(3600)  # ... and on, or the machine slept: nothing had a chance to renew in time
            with pytest.raises(BudgetExceededError) as caught:
                await client.complete(PROMPT)
            assert caught.value.reserved > Decimal("0.9")
            with pytest.raises(StreamInterruptedError):
                await stream.until_done()
        assert (await ledger.totals()).amount <= 1
        assert (await ledger.refresh([LIMIT]))[0].reserved == 0


@pytest.mark.parametrize("timeout", [30.0, 900.0])
async def test_other_processes_see_the_reservation_as_long_as_the_stream_is_open(timeout: float, tmp_path: Path) -> None:
    clock, path = FakeClock(), str(tmp_path / "ledger.db")
    other = SqliteLedger(path, clock=clock.time)
    async with client_of(SqliteLedger(path, clock=clock.time), clock, timeout) as client:
        async with client.stream(PROMPT) as stream:
            await stream.__anext__()
            for _ in range(40):
                clock.advance(25)
                await client._background.run_due()
                assert (await other.refresh([LIMIT]))[0].reserved > Decimal("0.9")
            done = await stream.get_final_completion()
        assert done.cost == Decimal("0.9")
        state = (await other.refresh([LIMIT]))[0]
        assert (state.spent, state.reserved) == (Decimal("0.9"), Decimal(0))
    await other.aclose()


async def test_a_process_that_died_frees_its_room() -> None:
    clock = FakeClock()
    ledger = MemoryLedger(clock=clock.time)
    client = client_of(ledger, clock)
    stream = client.stream(PROMPT)
    await stream.__aenter__()
    await client._background.aclose()  # nothing of it runs any more
    clock.advance(91)
    assert (await ledger.refresh([LIMIT]))[0].reserved == 0
    await stream.aclose()
    await client.aclose()


class Locked(MemoryLedger):
    """Renews only every other time; counts what was asked."""

    asked = 0

    async def renew(self, reservation: str, hold: Hold) -> None:
        self.asked += 1
        if self.asked % 2:
            raise LedgerError("database is locked")
        await super().renew(reservation, hold)


async def test_a_renewal_that_failed_is_tried_again_soon(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    ledger = Locked(clock=clock.time)
    background = Background(clock)
    leases = Leases(ledger, background, clock)
    hold = Hold(amount=Decimal(1), backend="b", model="m", tenant=None, session_id=None, limits=(LIMIT,), lease_s=120.0)
    reservation = await ledger.reserve(hold)
    leases.keep(reservation, hold)
    clock.advance(59)
    await leases.renew()
    assert ledger.asked == 0  # not yet due
    clock.advance(1)
    with caplog.at_level(logging.WARNING, logger="cachespec"):
        assert await background.run_due() == 1
    assert "could not be renewed: database is locked" in caplog.text
    clock.advance(AGAIN_S)
    await background.run_due()
    assert ledger.asked == 2
    clock.advance(59)
    await background.run_due()
    assert ledger.asked == 2
    assert (await ledger.refresh([LIMIT]))[0].reserved == 1
    leases.drop(reservation)
    clock.advance(3600)
    await background.run_due()
    await leases.renew()
    assert ledger.asked == 2
    assert len(background) == 0
    await background.aclose()


async def test_what_reserves_nothing_needs_no_renewal() -> None:
    clock = FakeClock()
    ledger, background = Locked(clock=clock.time), Background(clock)
    leases = Leases(ledger, background, clock)
    hold = Hold(amount=Decimal(0), backend="b", model="m", tenant=None, session_id=None)
    leases.keep(await ledger.reserve(hold), hold)
    clock.advance(3600)
    await leases.renew()
    assert (ledger.asked, len(background)) == (0, 0)
    await background.aclose()
