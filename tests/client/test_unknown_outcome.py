"""Requests of which nobody can say what became of them: sent, and then no answer. What was never sent costs nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.backends.raw_server import CHAT, OK, RawServer, answer

from cachespec.client import Client
from cachespec.errors import ConnectionFailedError, OverloadedError, RateLimitError, RequestTimeoutError
from cachespec.ledger.base import Entry
from cachespec.testing import FakeClock, ScriptedBackend, say
from cachespec.usage import MOST_TOKENS, Cost, Usage

pytestmark = pytest.mark.anyio
PRICES = {"input": "1", "cache_read": "0.1", "output": "10"}
BEGUN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 1000\r\n\r\n"
PROMPT = "word " * 200


def table(url: str, **more: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {"use": "openai", "api": "chat", "model": "m", "prices": PRICES, "api_key": "k"}
    return {**shared, "base_url": f"{url}/v1", **more}


def client_of(tmp_path: Path, urls: list[str], *, clock: FakeClock | None = None, attempts: int = 1) -> Client:
    names = [f"b{i}" for i in range(len(urls))]
    return Client(
        backends={n: table(url) for n, url in zip(names, urls, strict=True)},
        models={"both": names},
        model="both",
        ledger={"use": "sqlite", "path": str(tmp_path / "ledger.db")},
        policies={"retries": {"attempts": attempts}, "routing": {"use": "pinned", "backend": "b0"}},
        clock=clock,
    )


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def hang_up(connection: socket.socket, n: int) -> object:
    return None


def cut_early(connection: socket.socket, n: int) -> object:
    connection.sendall(BEGUN)
    return None


def stall(connection: socket.socket, n: int) -> object:
    time.sleep(5)
    return None


async def booked(
    tmp_path: Path, handler: Callable[[socket.socket, int], object], error: type[Exception], timeout: float = 20.0
) -> list[Entry]:
    with RawServer(handler) as server:
        async with client_of(tmp_path, [server.url]) as client:
            with pytest.raises(error):
                await client.complete(PROMPT, timeout=timeout)
            entries = list(await client.ledger.entries())
        assert len(server.requests) == 1
    return entries


async def test_a_server_that_hangs_up_is_booked_as_one_that_stalls_and_one_that_cuts(tmp_path: Path) -> None:
    """The same prompt in three ways: each is booked as an estimate of its input, since each may be billed."""
    hung = await booked(tmp_path, hang_up, ConnectionFailedError)
    (tmp_path / "ledger.db").unlink()
    cut = await booked(tmp_path, cut_early, ConnectionFailedError)
    (tmp_path / "ledger.db").unlink()
    stalled = await booked(tmp_path, stall, RequestTimeoutError, timeout=1.5)
    for entries in (hung, cut, stalled):
        (entry,) = entries
        assert (entry.outcome, entry.estimated, entry.usage) == ("failed", True, None)
        assert entry.amount is not None
        assert entry.amount > 0
        assert entry.amount == hung[0].amount


async def test_what_was_never_sent_costs_nothing(tmp_path: Path) -> None:
    async with client_of(tmp_path, [closed_port()]) as client:
        with pytest.raises(ConnectionFailedError, match="no connection") as caught:
            await client.complete(PROMPT)
        assert not caught.value.begun
        assert await client.ledger.entries() == ()


async def test_nobody_there_to_accept_in_time_costs_nothing(tmp_path: Path) -> None:
    """A listener whose queue is full takes no connection: the time to connect runs out."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        backends = {"b0": table(f"http://127.0.0.1:{address[1]}", connect_timeout=0.3)}
        async with Client(backends=backends, policies={"retries": {"attempts": 1}}) as client:
            with pytest.raises(RequestTimeoutError, match="no connection") as caught:
                await client.complete(PROMPT)
            assert not caught.value.begun
            assert await client.ledger.entries() == ()
        for one in waiting:
            one.close()


async def test_hang_ups_count_as_failures_in_a_row_and_a_closed_port_is_enough_by_itself(tmp_path: Path) -> None:
    clock = FakeClock()
    with RawServer(hang_up) as ill, RawServer(lambda connection, n: connection.sendall(OK)) as well:
        async with client_of(tmp_path, [ill.url, well.url], clock=clock, attempts=2) as client:
            for asked in (1, 2, 3):
                assert client.plan("Hi").chosen == "b0"
                assert (await client.complete("Hi")).backend == "b1"
                assert len(ill.requests) == asked
            assert client.plan("Hi").chosen == "b1"
            entries = await client.ledger.entries()
            assert [e.outcome for e in entries] == ["completed", "failed"] * 3
        async with client_of(tmp_path, [closed_port(), well.url], clock=clock, attempts=2) as client:
            assert (await client.complete("Hi")).backend == "b1"
            assert client.plan("Hi").chosen == "b1"


def counted(prompt: int, output: int) -> bytes:
    usage = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % (prompt, output)
    return answer("200 OK", CHAT.replace(b"data: [DONE]", usage + b"data: [DONE]"), "content-type: text/event-stream")


@pytest.mark.parametrize("counts", [(MOST_TOKENS, 3), (50, MOST_TOKENS), (MOST_TOKENS, MOST_TOKENS)])
async def test_a_count_that_no_request_can_cost_is_taken_as_not_reported(tmp_path: Path, counts: tuple[int, int]) -> None:
    """More than 9.2 million USD: the answer reaches the user, and budgets go on by an estimate."""

    def handler(connection: socket.socket, n: int) -> object:
        connection.sendall(counted(*counts) if n == 1 else counted(50, 3))
        return True

    with RawServer(handler) as server:
        async with Client(
            backends={"b0": table(server.url)},
            ledger={"use": "sqlite", "path": str(tmp_path / "ledger.db")},
            policies={"budgets": [{"scope": "overall", "limit": "1.00"}]},
            max_output_tokens=100,
        ) as client:
            done = await client.complete(PROMPT)
            assert (done.text, done.usage, done.estimated) == ("hello", None, True)
            assert done.cost is not None
            assert 0 < done.cost < 1
            assert any(f"{counts[0]} tokens of input and {counts[1]} of output" in warning for warning in done.warnings)
            (entry,) = await client.ledger.entries()
            assert (entry.outcome, entry.usage, entry.estimated, entry.amount) == ("completed", None, True, done.cost)
            (state,) = client.plan("Hi").budgets
            assert state.spent == done.cost
            assert state.reserved == 0
            again = await client.complete(PROMPT)
            assert again.usage == Usage(uncached=50, cache_read=None, cache_write=None, output=3)
            assert (await client.ledger.totals()).amount == done.cost + (again.cost or 0)


class Wild:
    """A plug-in's rates that bound every request by a cent, and then ask for more than any ledger holds."""

    source, price_date = "wild", None

    def cost(self, usage: Usage, *, busy_s: float | None = None, billing: Any = None, at: Any = None) -> Cost:
        return Cost(amount=Decimal(10**13), estimated=False, source=self.source, price_date=None)

    def worst(self, **_: Any) -> Decimal:
        return Decimal("0.01")


async def test_a_price_that_no_ledger_holds_leaves_the_cost_unknown() -> None:
    backend = ScriptedBackend(say("Hello"), rates=Wild())
    async with Client(backends={"scripted": backend}) as client:
        done = await client.complete("Hi")
        (entry,) = await client.ledger.entries()
    assert (done.text, done.cost, entry.amount) == ("Hello", None, None)


TOOL_CALL = answer(
    "200 OK",
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","type":"function",'
    b'"function":{"name":"look","arguments":"{}"}}]}}]}\n\n'
    b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n',
    "content-type: text/event-stream",
)


@pytest.mark.parametrize("status", ["429 x", "503 x", "529 x"])
async def test_a_tool_loop_on_the_wire_waits_for_a_busy_vendor_and_gets_its_error(tmp_path: Path, status: str) -> None:
    said = answer(status, b'{"error":{"message":"too much to do"}}', "retry-after: 1")

    def handler(connection: socket.socket, n: int) -> object:
        connection.sendall(TOOL_CALL if n == 1 else said)
        return None

    clock = FakeClock()
    with RawServer(handler) as busy, RawServer(lambda connection, n: connection.sendall(OK)) as other:
        async with client_of(tmp_path, [busy.url, other.url], clock=clock, attempts=3) as client:
            tools = [{"name": "look", "input_schema": {"type": "object"}}]
            first = await client.complete("Look.", tools=tools)
            result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "seen"}
            history: list[Any] = [{"role": "user", "content": "Look."}, first.message, result]
            with pytest.raises(RateLimitError if status[0] == "4" else OverloadedError, match="too much to do"):
                await client.complete(messages=history, tools=tools)
            assert client.plan(messages=history, tools=tools).chosen == "b0"
        assert (len(busy.requests), len(other.requests)) == (4, 0)
        assert clock.sleeps == [pytest.approx(1.0, abs=0.2)] * 2


async def test_a_hang_up_counts_against_a_budget_of_its_request(tmp_path: Path) -> None:
    with RawServer(hang_up) as server:
        budgets = [{"scope": "overall", "limit": "1.00"}]
        async with Client(
            backends={"b0": table(server.url)},
            policies={"budgets": budgets, "retries": {"attempts": 3, "first_delay": 0.001}},
            clock=FakeClock(),
            max_output_tokens=20,
        ) as client:
            with pytest.raises(ConnectionFailedError):
                await client.complete(PROMPT)
            entries = await client.ledger.entries()
            (state,) = client.plan("Hi").budgets
    assert len(entries) == 3
    assert state.spent == sum((e.amount or Decimal(0) for e in entries), Decimal(0)) > 0
    assert state.reserved == 0
