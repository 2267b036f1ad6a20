"""A tool-using conversation crosses the protocols through failover, and nothing of it is lost or changed on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.wire.server import WireServer

from cachespec.backends.base import Backend
from cachespec.client import Client
from cachespec.messages import Message, ToolCallPart

pytestmark = pytest.mark.anyio
PRICES = {"input": "1", "cache_read": "0.1", "cache_write": {"5m": "1.25", "1h": "2", "30m": "1.25"}, "output": "10"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}


@pytest.fixture
def servers() -> Iterator[tuple[WireServer, WireServer, WireServer]]:
    with WireServer() as a, WireServer() as b, WireServer() as c:
        yield a, b, c


def table(use: str, server: WireServer, model: str, **more: Any) -> dict[str, Any]:
    url = server.url if use == "anthropic" else server.openai_url
    return {"use": use, "model": model, "base_url": url, "api_key": "k", "prices": PRICES, **more}


def results(message: Message, salt: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": c.id, "content": f"{salt} of {c.id}: 12.50 €"} for c in message.tool_calls]


def calls_in(body: dict[str, Any], api: str) -> list[tuple[str, str, Any]]:
    """(id, name, arguments as they stand on the wire) of every call in a body, in order."""
    if api == "messages":
        blocks = [b for m in body["messages"] if isinstance(m["content"], list) for b in m["content"]]
        return [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    if api == "responses":
        return [(i["call_id"], i["name"], i["arguments"]) for i in body["input"] if i.get("type") == "function_call"]
    calls = [c for m in body["messages"] for c in m.get("tool_calls") or ()]
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]


def results_in(body: dict[str, Any], api: str) -> list[tuple[str, str]]:
    """(id, text) of every result in a body, in order."""

    def text(content: Any) -> str:
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    if api == "messages":
        blocks = [b for m in body["messages"] if isinstance(m["content"], list) for b in m["content"]]
        return [(b["tool_use_id"], text(b["content"])) for b in blocks if b["type"] == "tool_result"]
    if api == "responses":
        return [(i["call_id"], text(i["output"])) for i in body["input"] if i.get("type") == "function_call_output"]
    return [(m["tool_call_id"], text(m["content"])) for m in body["messages"] if m["role"] == "tool"]


@pytest.mark.model
async def test_anthropic_openai_local_and_back(servers: tuple[WireServer, WireServer, WireServer]) -> None:
    """Each backend makes tool calls and then goes down; the next one takes the conversation over as it stands."""
    pytest.importorskip("llama_cpp")
    first, second, third = servers
    backends: dict[str, Backend | dict[str, Any]] = {
        "claude": table("anthropic", first, "claude-sonnet-4-5@tools2"),
        "gpt": table("openai", second, "gpt-5.6-sol@tool"),
        "chat": table("openai", third, "gpt-4.1@tools2", api="chat"),
        "laptop": {"use": "llamacpp", "model": "smollm2", "context": 4096, "threads": 1, "cost": {"per_hour": "1"}},
    }
    order = ["claude", "gpt", "chat", "laptop"]
    down: set[str] = set()

    class InOrder:
        def rank(self, ask: Any, offers: Any) -> Any:
            kept = [o for o in offers if o.backend not in down]
            return sorted(kept, key=lambda o: order.index(o.backend))

    history: list[Any] = [{"role": "user", "content": "Look both ways, größer."}]
    async with Client(
        backends=backends, models={"main": order}, policies={"routing": InOrder(), "retries": {"first_delay": 0.01}}
    ) as client:
        answered: list[str] = []
        for name in order[:3]:
            done = await client.complete(messages=history, tools=[TOOL], model="main", max_output_tokens=64)
            assert done.backend == name
            assert done.tool_calls
            answered.append(done.backend)
            history += [done.message, *results(done.message, name)]
            # Its server is gone from now on: the loop begun there moves, since its backend is gone.
            {"claude": first, "gpt": second, "chat": third}[name].stop()
        # This model's template knows no tools, so it is offered none; what was called before it reads all the same.
        done = await client.complete(messages=history, model="main", max_output_tokens=8, temperature=0)
        assert done.backend == "laptop"
        assert done.usage is not None
        assert done.usage.input_tokens is not None
        assert done.usage.input_tokens > 150
        history += [done.message, {"role": "user", "content": "And now?"}]
    made = [p for m in history if isinstance(m, Message) for p in m.parts if isinstance(p, ToolCallPart)]
    assert len(made) == 5
    with WireServer() as again:
        for use, api, model in (
            ("anthropic", "messages", "claude-sonnet-4-5@ok-3"),
            ("openai", "responses", "gpt-5.6-sol@ok-3"),
            ("openai", "chat", "gpt-4.1@ok-3"),
        ):
            more = {} if api == "messages" else {"api": api}
            async with Client(backends={"b": table(use, again, model, **more)}) as client:
                done = await client.complete(messages=history, tools=[TOOL])
            assert done.text
            body = again.requests[-1].json
            calls, outputs = calls_in(body, api), results_in(body, api)
            assert [name for _, name, _ in calls] == [part.name for part in made]
            for (_, _, arguments), part in zip(calls, made, strict=True):
                if api == "messages":
                    assert arguments == json.loads(part.arguments)
                    assert part.arguments in again.requests[-1].body.decode()  # spliced as the model wrote it
                else:
                    assert arguments == part.arguments
            # Every call has its result behind it, under the id that it has here, with the text that it was given.
            assert [i for i, _ in outputs] == [i for i, _, _ in calls]
            texts = [m["content"] for m in history if isinstance(m, dict) and m["role"] == "tool"]
            assert [text for _, text in outputs] == texts


async def test_takeovers_are_checked_on_each_servers_own_bodies(servers: tuple[WireServer, WireServer, WireServer]) -> None:
    """The same through failover within one request: the first backend refuses, the next gets the same conversation."""
    first, second, _ = servers
    backends = {
        "claude": table("anthropic", first, "claude-sonnet-4-5@529"),
        "gpt": table("openai", second, "gpt-5.6-sol@ok-3"),
    }
    call = {"id": "toolu_01AbC", "type": "function", "function": {"name": "look", "arguments": '{"q": 1.50,  "é":"x"}'}}
    history: list[Any] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_01AbC", "content": "seen"},
    ]
    policies = {"routing": {"use": "pinned", "backend": "claude"}, "retries": {"first_delay": 0.01}}
    async with Client(backends=backends, models={"main": ["claude", "gpt"]}, policies=policies) as client:
        done = await client.complete(messages=history, tools=[TOOL])
    assert done.backend == "gpt"
    one, two = first.requests[-1].json, second.requests[-1].json
    assert '{"q": 1.50,  "é":"x"}' in first.requests[-1].body.decode()
    assert calls_in(two, "responses") == [("toolu_01AbC", "look", '{"q": 1.50,  "é":"x"}')]
    assert results_in(one, "messages") == results_in(two, "responses") == [("toolu_01AbC", "seen")]
