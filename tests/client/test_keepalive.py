"""Keep-alives: real requests on the wire, in the ledger, dropped when somebody reads first, and never past a budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import anyio
import pytest
from tests.client.caching_support import Recording, Vendor, marks_of, text

from cachespec.caching import Held, KeepAlive
from cachespec.client import Client
from cachespec.errors import ConnectionFailedError
from cachespec.keepalive import cut
from cachespec.request import build_request
from cachespec.telemetry import KeptAlive
from cachespec.testing import FakeClock

pytestmark = pytest.mark.anyio
SYSTEM = text(3000, "manual ")
MODELS = ["claude-sonnet-5", "gpt-5.6-sol"]
LIVES = {"claude-sonnet-5": 300.0, "gpt-5.6-sol": 1800.0}


class Keeping(Recording):
    """Keeps the whole prompt alive ten seconds before it dies, `most` times."""

    def __init__(self, most: int = 2, **more: Any) -> None:
        super().__init__(**more)
        self.most = most
        self.held_: list[Held] = []

    def held(self, held: Held, now: float) -> KeepAlive | None:
        self.held_.append(held)
        if held.pings >= self.most:
            return None
        return KeepAlive(at=held.warm.expires_at - 10, index=held.index, ttl=held.warm.ttl)


async def pass_time(client: Client, clock: FakeClock, seconds: float) -> None:
    """Let time go by in steps, and what is due run."""
    end = clock.now + seconds
    while clock.now < end:
        clock.advance(min(5.0, end - clock.now))
        await client._background.run_due()


def planned(client: Client) -> int:
    """Keep-alives to come."""
    return sum(key != "leases" for key in client._background._jobs)


@pytest.mark.parametrize("model", MODELS)
async def test_a_prefix_is_kept_alive_and_read_long_after_its_lifetime(vendor: Vendor, model: str) -> None:
    told: list[Any] = []
    policy, life = Keeping(), LIVES[model]
    async with vendor.client(model, policy, hooks=[told.append]) as client:
        await client.complete("What is it?", system=SYSTEM)
        await pass_time(client, vendor.clock, 2.5 * life)
        assert len(vendor.rules.log) == 3
        done = await client.complete("What is it?", system=SYSTEM)
    assert done.usage is not None
    assert done.usage.cache_read is not None
    assert done.usage.cache_read > 2_900
    assert [held.pings for held in policy.held_[:3]] == [0, 1, 2]
    pings = [t for t in told if isinstance(t, KeptAlive)]
    assert [t.read is not None and t.read > 2_900 for t in pings] == [True, True]
    assert all(t.cost is not None for t in pings)
    body = vendor.bodies[1]
    first = vendor.bodies[0]
    if model.startswith("claude"):
        assert body["max_tokens"] == 0
        assert "stream" not in body
        assert marks_of(body) == [("messages[0].content[0]", "5m")]
    else:
        assert body["prompt_cache_options"]["prewarm"] is True
        assert body.get("prompt_cache_key") == first.get("prompt_cache_key")
        assert "stream" not in body


@pytest.mark.parametrize("model", MODELS)
async def test_what_they_cost_is_booked(vendor: Vendor, model: str) -> None:
    async with vendor.client(model, Keeping(most=1)) as client:
        await client.complete("Hi", system=SYSTEM, tenant="acme")
        before = (await client.ledger.totals(tenant="acme")).amount
        await pass_time(client, vendor.clock, LIVES[model])
        entries = await client.ledger.entries(tenant="acme")
        assert [e.outcome for e in entries] == ["kept", "completed"]
        after = (await client.ledger.totals(tenant="acme")).amount
    assert before < after < before * 2


def hangs_up(*_: Any) -> None:
    return None


def tells_nothing(*_: Any) -> Any:
    return lambda _output: "no usage object"


class Stalled:
    """Says nothing until it is let go, then hangs up."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def __call__(self, *_: Any) -> None:
        self.let_go.wait(30)


@pytest.fixture
def stalls() -> Iterator[Stalled]:
    made = Stalled()
    yield made
    made.let_go.set()


@pytest.mark.parametrize("becomes", [None, hangs_up, tells_nothing])
@pytest.mark.parametrize("model", MODELS)
async def test_one_that_was_sent_and_not_counted_is_booked_as_it_was_expected(
    vendor: Vendor, model: str, becomes: Any, stalls: Stalled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it stalls."""
    monkeypatch.setattr("cachespec.keepalive.TIMEOUT_S", 0.2)
    policies: Any = {"caching": Keeping(most=1), "budgets": [{"scope": "tenant", "limit": "1.00"}]}
    async with vendor.client(model) as plain:
        backends = {"b": plain.backends["b"]}
        async with Client(backends=backends, policies=policies, clock=vendor.clock, max_output_tokens=10) as client:
            await client.complete("Hi", system=SYSTEM, tenant="acme")
            vendor.server.counts = becomes or stalls
            await pass_time(client, vendor.clock, LIVES[model])
            assert len(vendor.bodies) > 1  # one that is hung up on over an idle connection is sent again
            ping, answered = await client.ledger.entries(tenant="acme")
            (state,) = client.plan("Hi", tenant="acme").budgets
    assert (ping.outcome, ping.estimated, ping.usage) == ("failed", True, None)
    assert ping.amount is not None
    assert answered.amount is not None
    reading = Decimal(3000) * Decimal("0.1") / 1_000_000  # a prefix of about so many tokens, at the price of reading
    assert reading * Decimal("0.7") < ping.amount < reading * Decimal("1.3")
    assert state.spent == ping.amount + answered.amount
    assert state.reserved == 0


@pytest.mark.parametrize("model", MODELS)
async def test_what_was_counted_is_told_where_there_is_no_price(vendor: Vendor, model: str) -> None:
    told: list[Any] = []
    async with vendor.client(model, Keeping(most=1), hooks=[told.append], prices=None) as client:
        warmed = await client.prewarm("What?", system=SYSTEM)
        await client.complete("What?", system=SYSTEM)
        await pass_time(client, vendor.clock, LIVES[model])
        ping, _, prewarming = await client.ledger.entries()
    assert (warmed.cost, ping.amount, ping.estimated) == (None, None, True)
    assert warmed.usage is not None
    assert warmed.usage == prewarming.usage
    assert warmed.usage.written == sum(vendor.writes[0].values())
    (kept,) = [one for one in told if isinstance(one, KeptAlive)]
    assert (kept.read, kept.cost) == (vendor.reads[2], None)
    assert ping.usage is not None
    assert ping.usage.cache_read == kept.read
    assert min(vendor.reads[2], *vendor.writes[0].values()) > 2_900


async def test_one_that_is_refused_costs_nothing(vendor: Vendor) -> None:
    async with vendor.client(MODELS[0], Keeping(most=1)) as client:
        await client.complete("Hi", system=SYSTEM)
        vendor.server.counts = lambda *_: "refused"
        await pass_time(client, vendor.clock, LIVES[MODELS[0]])
        assert len(vendor.bodies) == 2
        assert [e.outcome for e in await client.ledger.entries()] == ["completed"]


async def test_one_that_closing_cuts_short_is_booked(vendor: Vendor, stalls: Stalled) -> None:
    async with vendor.client(MODELS[0], Keeping(most=1)) as client:
        await client.complete("Hi", system=SYSTEM)
        vendor.server.counts = stalls
        async with anyio.create_task_group() as group:
            group.start_soon(pass_time, client, vendor.clock, LIVES[MODELS[0]])
            with anyio.fail_after(10):
                while len(vendor.bodies) < 2:
                    await anyio.sleep(0.005)
            group.cancel_scope.cancel()
        assert next((e.outcome, e.estimated) for e in await client.ledger.entries()) == ("cancelled", True)


@pytest.mark.parametrize("model", MODELS)
async def test_a_prewarming_that_is_hung_up_on_is_booked_as_written(vendor: Vendor, model: str) -> None:
    async with vendor.client(model) as client:
        vendor.server.counts = hangs_up
        with pytest.raises(ConnectionFailedError):
            await client.prewarm(system=SYSTEM)
        (entry,) = await client.ledger.entries()
    assert (entry.outcome, entry.estimated, entry.usage) == ("failed", True, None)
    assert entry.amount is not None
    assert entry.amount > Decimal(3000) * Decimal("1.25") * Decimal("0.7") / 1_000_000


async def test_a_request_in_time_makes_it_needless(vendor: Vendor) -> None:
    async with vendor.client(MODELS[0], Keeping()) as client:
        for i in range(4):
            await client.complete("Hi", system=SYSTEM)
            await pass_time(client, vendor.clock, 200)
            assert len(vendor.rules.log) == i + 1
        assert planned(client) == 1


async def test_no_keep_alive_goes_past_a_budget(vendor: Vendor) -> None:
    async with vendor.client(MODELS[0], Keeping()) as plain:
        policies: Any = {"caching": Keeping(), "budgets": [{"scope": "overall", "limit": "0.015", "mode": "hard"}]}
        backends = {"b": plain.backends["b"]}
        async with Client(backends=backends, policies=policies, clock=vendor.clock, max_output_tokens=10) as client:
            budgets = client.plan("Hi").budgets
            assert budgets[0].spent == 0
            # Its worst case, by bytes, is above what is left.
            done = await client.complete("Hi", system=text(1200, "short "))
            assert done.cost is not None
            await pass_time(client, vendor.clock, 300)
            assert len(vendor.rules.log) == 1
            assert client.plan("Hi").budgets[0].reserved == 0


async def test_what_cannot_be_sent_that_way_is_not(vendor: Vendor) -> None:
    policy = Keeping()
    async with vendor.client("claude-sonnet-4-5", policy) as client:
        await client.complete("Hi", system=SYSTEM, reasoning={"budget_tokens": 2048}, max_output_tokens=4096)
        tool = {"name": "look", "input_schema": {"type": "object"}}
        await client.complete("Hi", system=SYSTEM, tools=[tool], tool_choice="required")
        assert policy.held_ == []
        assert planned(client) == 0


async def test_a_keep_alive_that_finds_nothing_corrects_the_belief(vendor: Vendor) -> None:
    policy = Keeping(most=9)
    async with vendor.client(MODELS[0], policy) as client:
        await client.complete("Hi", system=SYSTEM)
        vendor.rules.minimum = 100_000  # the vendor neither has it nor writes it
        vendor.rules.entries.clear()
        await pass_time(client, vendor.clock, 1_000)
        assert len(vendor.rules.log) == 2
        assert planned(client) == 0


async def test_closing_drops_them(vendor: Vendor) -> None:
    async with vendor.client(MODELS[0], Keeping()) as client:
        await client.complete("Hi", system=SYSTEM)
        assert planned(client) == 1
    assert planned(client) == 0


def test_a_request_is_cut_where_a_prefix_ends() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "five"},
    ]
    tool = {"name": "look", "input_schema": {"type": "object"}}
    request = build_request(messages=messages, system="Manual.", tools=[tool])

    def shape(at: str) -> Any:
        made = cut(request, at)
        return None if made is None else (len(made.system), [(m.role, len(m.parts)) for m in made.messages])

    assert shape("tools[0]") == (0, [("user", 1)])
    assert shape("system[0]") == (1, [("user", 1)])
    assert shape("system[1]") is None
    assert shape("messages[0][0]") == (1, [("user", 1)])
    assert shape("messages[0][1]") == (1, [("user", 2)])
    assert shape("messages[1][0]") == (1, [("user", 2), ("assistant", 1), ("user", 1)])
    assert shape("messages[3][0]") is None
    assert cut(request, "messages[4][0]") == request


async def test_a_backend_that_a_reload_took_out_is_not_kept_alive(vendor: Vendor) -> None:
    async with vendor.client(MODELS[0], Keeping()) as client:
        await client.complete("What is it?", system=SYSTEM)
        assert planned(client) == 1
        gone = client.backends
        client._now = replace(client._now, wired=replace(client._now.wired, backends={}))
        await pass_time(client, vendor.clock, 600)
        assert len(vendor.rules.log) == 1
        client._now = replace(client._now, wired=replace(client._now.wired, backends=gone))
