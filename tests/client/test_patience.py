"""A backend that takes a request and says nothing: others are asked while there is time for them (cases C2, D15)."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from tests.wire.frames import Api, answer
from tests.wire.server import WireServer

from cachespec.client import Client
from cachespec.errors import RequestTimeoutError, StreamInterruptedError
from cachespec.events import Retrying

pytestmark = pytest.mark.anyio
APIS: tuple[Api, ...] = ("messages", "chat", "responses")


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


@pytest.mark.parametrize(("api", "fault"), [*((api, "stall-0") for api in APIS), ("chat", "slowstart-60000")])
async def test_who_says_nothing_leaves_half_of_the_time_to_others(api: Api, fault: str, wire_server: WireServer) -> None:
    begun = anyio.current_time()
    async with client_of(wire_server, api, f"ok-9+{fault}", "ok-3") as client, client.stream("Hi", timeout=4) as stream:
        events = [event async for event in stream]
        assert (await stream.get_final_completion()).text == answer(3)
        assert 1.9 < anyio.current_time() - begun < 4
        entries = await client.ledger.entries()
        assert sorted((entry.backend, entry.outcome) for entry in entries) == [("b0", "failed"), ("b1", "completed")]
        assert next(o for o in client.plan("Hi").candidates if o.backend == "b0").eligible  # two seconds say little of it
    (retrying,) = [event for event in events if isinstance(event, Retrying)]
    assert (retrying.backend, retrying.next_backend) == ("b0", "b1")
    assert isinstance(retrying.error, RequestTimeoutError)
    assert "no content within 2 s" in str(retrying.error)


async def test_with_nobody_else_it_has_all_of_the_time(wire_server: WireServer) -> None:
    async with client_of(wire_server, "chat", "ok-3+slowstart-1200") as client:
        assert (await client.complete("Hi", timeout=2)).text == answer(3)


async def test_who_began_to_answer_is_not_hurried(wire_server: WireServer) -> None:
    async with client_of(wire_server, "chat", "ok-4+drip-400", "ok-3") as client:
        done = await client.complete("Hi", timeout=3)
        assert (done.backend, done.text) == ("b0", answer(4))
    async with client_of(wire_server, "chat", "ok-9+stall-2", "ok-3") as client:
        with pytest.raises(StreamInterruptedError) as caught:
            await client.complete("Hi", timeout=2)
        assert caught.value.partial is not None
        assert caught.value.partial.text == answer(2)
