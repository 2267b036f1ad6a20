"""A client whose backends fail: who is asked next, whose fault it was, and what it may cost."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from cachespec.client import Client
from cachespec.errors import ConnectionFailedError
from cachespec.ledger.base import Hold
from cachespec.ledger.memory import MemoryLedger
from cachespec.pricing import hosted_rates
from cachespec.testing import FakeClock, ScriptedBackend

pytestmark = pytest.mark.anyio


def backend(name: str, script: Any = (), *, price: str = "1", kind: type[ScriptedBackend] = ScriptedBackend) -> Any:
    return kind(script, name=name, rates=hosted_rates(None, name, prices={"input": price, "output": price}))


def client_of(*backends: ScriptedBackend, clock: FakeClock | None = None, **options: Any) -> Client:
    models = {"main": [b.name for b in backends]}
    return Client(backends={b.name: b for b in backends}, models=models, model="main", clock=clock or FakeClock(), **options)


def said(client: Client, name: str) -> str:
    """What a plan says of a backend."""
    offer = next(o for o in client.plan("Hi").candidates if o.backend == name)
    return "; ".join(map(str, offer.reasons))


class Down(ScriptedBackend):
    """Refuses connections while it is down, some time after it was asked; counts who asked."""

    down, asked = True, 0

    async def open(self, request, plan, *, timeout):  # type: ignore[no-untyped-def]
        self.asked += 1
        await anyio.sleep(0.05)
        if self.down:
            raise ConnectionFailedError("refused", backend=self.name)
        return await super().open(request, plan, timeout=timeout)


class SlowLedger(MemoryLedger):
    """Reserves as a file does: others run meanwhile."""

    async def reserve(self, hold: Hold) -> str:
        await anyio.sleep(0.01)
        return await super().reserve(hold)


async def test_of_many_requests_one_probes_a_backend_whose_pause_is_over_and_one_fault_is_one_failure() -> None:
    clock, ill, well = FakeClock(), backend("ill", kind=Down), backend("well", price="50")

    async def many() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(client.complete, "Hi")

    async with client_of(ill, well, clock=clock, ledger=SlowLedger()) as client:
        await many()
        assert said(client, "ill") == "unhealthy: ConnectionFailedError after 1 failure in a row; tried again in 5 s"
        clock.advance(6)
        ill.asked = 0
        await many()
        assert ill.asked == 1
        assert said(client, "ill").endswith("tried again in 10 s")


async def test_a_probe_that_was_decided_and_not_sent_leaves_room_for_the_next() -> None:
    clock, ledger = FakeClock(), SlowLedger()
    ill, well = backend("ill", kind=Down), backend("well", price="50")
    async with client_of(ill, well, clock=clock, ledger=ledger) as client:
        await client.complete("Hi")
        clock.advance(6)
        ill.down = False
        with anyio.move_on_after(0.002) as scope:  # cancelled while the ledger reserves
            await client.complete("Hi")
        assert scope.cancelled_caught
        assert ill.asked == 1
        assert (await client.complete("Hi")).backend == "ill"
