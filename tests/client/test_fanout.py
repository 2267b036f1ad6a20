"""A cold fan-out: one writes, the others read; nobody waits for ever, and a leader that fails is followed by another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import anyio
import pytest
from tests.client.caching_support import PRICES, Recording, text
from tests.wire.cache_rules import CacheRules
from tests.wire.server import WireServer

from cachespec.client import Client
from cachespec.decision import Decision
from cachespec.errors import BackendError

pytestmark = pytest.mark.anyio
MANUAL = text(10_000, "manual ")


@pytest.fixture
def rules(wire_server: WireServer) -> Iterator[CacheRules]:
    """The vendor's rules in real time: an entry is readable 0.3 s after its request, when its response begins."""
    wire_server.counts = made = CacheRules(time.time, ready_s=0.3)
    yield made
    wire_server.counts = None


def make(server: WireServer, model: str, policy: Any = None, **more: Any) -> Client:
    claude = model.startswith("claude")
    table: dict[str, Any] = {"use": "anthropic" if claude else "openai", "model": model, "api_key": "k", "prices": PRICES}
    table["base_url"] = server.url if claude else server.openai_url
    return Client(backends={"b": table}, policies={} if policy is None else {"caching": policy}, **more)


def waited(decision: Decision) -> bool:
    assert decision.plan is not None
    return any(reason.code == "cold_fan_out" for reason in decision.plan.reasons)


@pytest.mark.parametrize("policy", [None, Recording(end=None)], ids=["default", "recording"])
@pytest.mark.parametrize("vendor", ["claude-sonnet-5", "gpt-5.6-sol"])
async def test_of_200_at_once_exactly_one_writes(wire_server: WireServer, rules: CacheRules, vendor: str, policy: Any) -> None:
    """First event after 300 ms, and no response ends before all have arrived."""
    decisions: list[Decision] = []
    async with make(wire_server, f"{vendor}@slowfirst-300+gate-200+ok-3", policy) as client:

        async def ask(number: int) -> None:
            done = await client.complete(f"Question {number}?", system=MANUAL)
            decisions.append(done.decision)

        with anyio.fail_after(90):
            async with anyio.create_task_group() as tasks:
                for number in range(200):
                    tasks.start_soon(ask, number)
    assert len(rules.log) == 200
    big = [sum(written.values()) for _, _, written, _ in rules.log if sum(written.values()) > 5_000]
    assert len(big) == 1
    assert sum(read > 9_000 for _, read, _, _ in rules.log) == 199
    assert sum(waited(decision) for decision in decisions) >= 100


async def test_a_leader_that_fails_is_followed_by_another(wire_server: WireServer, rules: CacheRules) -> None:
    model = "claude-sonnet-5@slowstart-300+529-1-0+ok-3"
    policies: Any = {"caching": Recording(end=None), "retries": {"attempts": 1}}
    failed: list[BackendError] = []
    async with make(wire_server, model) as plain:
        table = {"b": plain.backends["b"]}
        async with Client(backends=table, policies=policies) as client:

            async def ask(number: int) -> None:
                try:
                    await client.complete(f"Question {number}?", system=MANUAL)
                except BackendError as error:
                    failed.append(error)

            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    for number in range(20):
                        tasks.start_soon(ask, number)
    assert len(failed) == 1
    assert len([1 for _, _, written, _ in rules.log if written]) == 1
    assert len(rules.log) == 19


async def test_waiting_ends_where_the_deadline_wants_it(wire_server: WireServer, rules: CacheRules) -> None:
    """The first response does not begin for long: the others pay for a second write rather than wait past half their time."""
    async with make(wire_server, "claude-sonnet-5@slowfirst-4000+ok-3", Recording(end=None)) as client:
        begin = time.monotonic()
        waits: list[float] = []

        async def ask(number: int) -> None:
            async with client.stream(f"Question {number}?", system=MANUAL, timeout=2.0) as stream:
                waits.append(time.monotonic() - begin)
                await stream.get_final_completion()

        with pytest.raises(BaseExceptionGroup):
            async with anyio.create_task_group() as tasks:
                for number in range(3):
                    tasks.start_soon(ask, number)
    assert len(wire_server.requests) == 3


async def test_no_money_is_held_while_waiting_and_leaving_is_free(wire_server: WireServer, rules: CacheRules) -> None:
    budgets = [{"scope": "overall", "limit": "100", "mode": "hard"}]
    async with make(wire_server, "claude-sonnet-5@slowfirst-500+ok-3", Recording(end=None)) as plain:
        policies: Any = {"caching": Recording(end=None), "budgets": budgets}
        async with Client(backends={"b": plain.backends["b"]}, policies=policies, max_output_tokens=10) as client:
            seen: list[Decimal] = []

            async def ask(number: int) -> None:
                with anyio.move_on_after(0.2 if number else 30):
                    await client.complete(f"Question {number}?", system=MANUAL)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, 0)
                while not wire_server.requests:
                    await anyio.sleep(0.01)
                for number in range(1, 10):
                    tasks.start_soon(ask, number)
                await anyio.sleep(0.1)
                (state,) = client.plan("Hi").budgets
                seen.append(state.reserved)
            (state,) = client.plan("Hi").budgets
            assert state.reserved == 0
            one = client.plan("Question 0?", system=MANUAL).candidates[0].quote
            assert one is not None
            assert one.worst is not None
            assert seen[0] <= one.worst * 2
    assert len(wire_server.requests) == 1


async def test_other_prefixes_do_not_wait(wire_server: WireServer, rules: CacheRules) -> None:
    async with make(wire_server, "claude-sonnet-5@slowfirst-300+ok-3", Recording(end=None)) as client:
        decisions: list[Decision] = []

        async def ask(number: int) -> None:
            done = await client.complete("Hi", system=text(3000, f"manual {number} "))
            decisions.append(done.decision)

        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(ask, number)
        assert not any(waited(decision) for decision in decisions)
        assert len(client._now.caching.fanout) == 0
