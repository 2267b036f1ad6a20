"""Whoever ends a request, and however: nothing stays open, and what was used is booked exactly once."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import anyio
import pytest

from cachespec.client import Client
from cachespec.errors import LedgerError, StreamInterruptedError, StreamStateError
from cachespec.events import TextDelta
from cachespec.ledger.base import Limit, Settlement
from cachespec.ledger.memory import MemoryLedger
from cachespec.pricing import hosted_rates
from cachespec.testing import Reply, ScriptedBackend, say

pytestmark = pytest.mark.anyio
RATES = hosted_rates(None, "scripted", prices={"input": "1", "output": "10"})
BUDGET = {"budgets": [{"scope": "overall", "limit": "100"}]}


def slow(delay_s: float = 0.01) -> ScriptedBackend:
    return ScriptedBackend(say(*"abcdefgh", delay_s=delay_s), rates=RATES)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_at_any_moment_loses_no_settlement(tmp_path: Path) -> None:
    """``task.cancel()`` gets through a shielded scope; closing and booking are done to their end all the same."""
    backend = slow(0.002)
    ledger = {"use": "sqlite", "path": str(tmp_path / "ledger.db")}
    chance = random.Random(7)
    async with Client(backends={"scripted": backend}, ledger=ledger, policies=BUDGET) as client:

        async def one() -> None:
            await client.complete("Hi")

        for _ in range(60):
            task = asyncio.create_task(one())
            await asyncio.sleep(chance.uniform(0, 0.03))
            task.cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert backend.open_attempts == 0
        limit = Limit(scope="overall in total", account="overall", limit=Decimal(100))
        assert (await client.ledger.refresh([limit]))[0].reserved == 0
        entries = await client.ledger.entries()
        assert len(entries) == (await client.ledger.totals()).requests


async def test_another_task_may_close_a_stream_that_is_being_read() -> None:
    backend = slow(5.0)
    async with Client(backends={"scripted": backend}) as client:
        stream = client.stream("Hi")
        told: list[str] = []

        async def read() -> None:
            async with stream:
                with pytest.raises(StreamStateError, match="closed while"):
                    await stream.until_done()
                told.append("closed")

        with anyio.fail_after(3):
            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await anyio.sleep(0.05)
                await stream.aclose()
        assert told == ["closed"]
        assert backend.open_attempts == 0
        assert [e.outcome for e in await client.ledger.entries()] == ["left"]


class SlowToOpen(ScriptedBackend):
    """Takes its time before it accepts."""

    async def open(self, request, plan, *, timeout):  # type: ignore[no-untyped-def]
        await anyio.sleep(0.2)
        return await super().open(request, plan, timeout=timeout)


async def test_another_task_may_close_a_stream_that_is_being_entered() -> None:
    backend = SlowToOpen(rates=RATES)
    async with Client(backends={"scripted": backend}) as client:
        stream = client.stream("Hi")

        async def enter() -> None:
            with pytest.raises(StreamStateError, match="closed while"):
                async with stream:
                    pass

        async with anyio.create_task_group() as group:
            group.start_soon(enter)
            await anyio.sleep(0.05)
            await stream.aclose()
        await anyio.sleep(0.3)
        assert backend.open_attempts == 0
        assert [e.outcome for e in await client.ledger.entries()] == ["left"]


async def test_closing_the_client_settles_its_open_streams_first() -> None:
    backend = slow(5.0)
    ledger = MemoryLedger()
    client = Client(backends={"scripted": backend}, ledger=ledger)

    async def read() -> None:
        with pytest.raises(StreamStateError):
            await client.complete("Hi")

    with anyio.fail_after(3):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.sleep(0.05)
            await client.aclose()
    assert backend.open_attempts == 0
    assert [e.outcome for e in await ledger.entries()] == ["left"]


class Failing(MemoryLedger):
    """Can reserve, cannot settle."""

    async def settle(self, reservation: str, settlement: Settlement) -> None:
        raise LedgerError("disk full")


async def test_a_failing_ledger_hides_neither_a_cancellation_nor_a_partial_answer() -> None:
    cut = Reply(batches=((TextDelta("par"),),))
    async with Client(backends={"scripted": ScriptedBackend(cut)}, ledger=Failing()) as client:
        with pytest.raises(StreamInterruptedError) as caught:
            await client.complete("Hi")
        assert caught.value.partial is not None
        assert caught.value.partial.text == "par"
    async with Client(backends={"scripted": slow(1.0)}, ledger=Failing()) as client:
        with anyio.move_on_after(0.05) as scope:
            await client.complete("Hi")
        assert scope.cancelled_caught


async def test_a_passed_deadline_reserves_nothing_more() -> None:
    first = ScriptedBackend(say("a", delay_s=5.0), name="first", rates=RATES)
    others = [ScriptedBackend(name=f"b{i}", rates=RATES) for i in range(3)]
    backends = {b.name: b for b in (first, *others)}
    policies = {"routing": {"use": "pinned", "backend": "first"}}
    async with Client(backends=backends, models={"m": list(backends)}, policies=policies) as client:
        with pytest.raises(Exception, match="not finished within"):
            await client.complete("Hi", timeout=0.1)
        entries = await client.ledger.entries()
        assert [e.backend for e in entries] == ["first"]
    assert all(not b.requests for b in others)
