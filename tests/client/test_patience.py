"""A backend that takes a request and says nothing: others are asked while there is time for them (cases C2, D15)."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from typing import Any

import anyio
import pytest
from tests.wire.frames import Api, answer
from tests.wire.server import WireServer

from cachespec import call
from cachespec.blame import patience_s
from cachespec.client import Client
from cachespec.decision import Latency
from cachespec.errors import RequestTimeoutError, StreamInterruptedError
from cachespec.events import Finished, ResponseStarted, Retrying, TextDelta
from cachespec.testing import Reply, ScriptedBackend


def client_of(server: WireServer, api: Api, *models: str, **options: Any) -> Client:
    def backend(model: str) -> dict[str, Any]:
        if api == "messages":
            return {"use": "anthropic", "model": model, "api_key": "k", "base_url": server.url}
        return {"use": "openai", "model": model, "api_key": "k", "base_url": server.openai_url, "api": api}

    backends = {f"b{i}": backend(model) for i, model in enumerate(models)}
    return Client(
        backends=backends,
        models={"main": list(backends)},
        model="main",
        policies={"routing": {"use": "pinned", "backend": "b0"}},
        max_output_tokens=50,
        **options,
    )


@pytest.mark.anyio
@pytest.mark.parametrize(("api", "fault", "waits"), [("chat", "slowstart-60000", 4), ("messages", "stall-0", 6)])
async def test_who_brings_nothing_leaves_time_to_others(api: Api, fault: str, waits: int, wire_server: WireServer) -> None:
    """Half of it where nothing at all came, a quarter where the response had begun."""
    begun = anyio.current_time()
    async with client_of(wire_server, api, f"ok-9+{fault}", "ok-3") as client, client.stream("Hi", timeout=8) as stream:
        events = [event async for event in stream]
        assert (await stream.get_final_completion()).text == answer(3)
        assert anyio.current_time() - begun > waits - 0.3
        entries = await client.ledger.entries()
        assert sorted((entry.backend, entry.outcome) for entry in entries) == [("b0", "failed"), ("b1", "completed")]
        assert next(o for o in client.plan("Hi").candidates if o.backend == "b0").eligible  # so few seconds say little of it
    (retrying,) = [event for event in events if isinstance(event, Retrying)]
    assert (retrying.backend, retrying.next_backend) == ("b0", "b1")
    assert isinstance(retrying.error, RequestTimeoutError)
    assert "no content within" in str(retrying.error)


@pytest.mark.parametrize("left", [None, 4.0, 60.0])
def test_patience(left: float | None) -> None:
    quick, slow, unknown = (Latency(ttft_ms=ms, total_ms=None) for ms in (500.0, 9_000.0, None))
    assert patience_s(quick, [], left) == patience_s(quick, [slow], 10.0) == (math.inf, math.inf)
    expected = {None: (math.inf, math.inf), 4.0: (2.0, 3.0), 60.0: (30.0, 50.0)}
    assert patience_s(quick, [unknown], left) == patience_s(quick, [slow, quick], left) == expected[left]
    assert patience_s(slow, [quick], 30.0) == (18.0, 22.5)  # who usually takes long has twice as long
    assert patience_s(slow, [slow], 60.0) == (30.0, 42.0)
    assert patience_s(slow, [quick], 17.0) == (math.inf, math.inf)


@pytest.mark.anyio
async def test_who_has_begun_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun, and thinks for longer than a silent one would have."""
    monkeypatch.setattr(call, "patience_s", lambda *_: (1.0, 20.0))
    thinks = Reply(batches=((ResponseStarted(request_id="r", model=None),), (TextDelta("slow"),), (Finished(reason="stop"),)))
    first, second = ScriptedBackend([replace(thinks, delay_s=0.7)], name="first"), ScriptedBackend(name="second")
    backends = {"first": first, "second": second}
    routing = {"routing": {"use": "pinned", "backend": "first"}}
    async with Client(backends=backends, models={"main": list(backends)}, model="main", policies=routing) as client:
        assert (await client.complete("Hi", timeout=30)).text == "slow"
        assert [entry.backend for entry in await client.ledger.entries()] == ["first"]


@pytest.mark.anyio
async def test_who_cannot_be_reached_in_half_of_the_time_was_not_asked_and_costs_nothing(wire_server: WireServer) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        backend = {"use": "openai", "model": "ok-3", "api_key": "k", "api": "chat", "prices": {"input": "1000", "output": "10"}}
        urls = {"b0": f"http://127.0.0.1:{full.getsockname()[1]}/v1", "b1": wire_server.openai_url}
        backends = {name: {**backend, "base_url": url} for name, url in urls.items()}
        routing = {"routing": {"use": "pinned", "backend": "b0"}}
        async with Client(backends=backends, models={"main": list(backends)}, model="main", policies=routing) as client:
            assert (await client.complete("Hi", timeout=4)).backend == "b1"
            assert [entry.backend for entry in await client.ledger.entries()] == ["b1"]
        for one in waiting:
            one.close()


@pytest.mark.anyio
async def test_with_nobody_else_it_has_all_of_the_time(wire_server: WireServer) -> None:
    async with client_of(wire_server, "chat", "ok-3+slowstart-1200") as client:
        assert (await client.complete("Hi", timeout=2)).text == answer(3)


@pytest.mark.anyio
async def test_who_began_to_answer_is_not_hurried(wire_server: WireServer) -> None:
    async with client_of(wire_server, "chat", "ok-4+drip-400", "ok-3") as client:
        done = await client.complete("Hi", timeout=3)
        assert (done.backend, done.text) == ("b0", answer(4))
    async with client_of(wire_server, "chat", "ok-9+stall-2", "ok-3") as client:
        with pytest.raises(StreamInterruptedError) as caught:
            await client.complete("Hi", timeout=2)
        assert caught.value.partial is not None
        assert caught.value.partial.text == answer(2)
