"""Answers as servers of odd habits send them, through the whole client: nothing is lost, merged or made up."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from tests.backends.decoding import say
from tests.backends.raw_server import RawServer, answer
from tests.wire.server import WireServer

from cachespec.client import Client
from cachespec.events import Completion
from cachespec.usage import Usage

pytestmark = pytest.mark.anyio
PRICES = {"input": "1", "cache_read": "0.1", "cache_write": {"5m": "1.25", "1h": "2", "30m": "1.25"}, "output": "10"}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("a", "b", "get_weather")]


async def ask(api: str, body: bytes, kind: str = "text/event-stream", **request: Any) -> tuple[Completion, str]:
    """What a server of protocol `api` answers with `body`, and what it was sent."""
    whole = answer("200 OK", body, f"content-type: {kind}")

    def say_it(connection: socket.socket, _: int) -> bool:
        connection.sendall(whole)
        return True

    with RawServer(say_it) as server:
        table: dict[str, Any] = {"model": "gpt-4o", "base_url": f"{server.url}/v1", "api_key": "k", "prices": PRICES}
        if api == "messages":
            table |= {"use": "anthropic", "model": "claude-sonnet-5", "base_url": server.url}
        else:
            table |= {"use": "openai", "api": api} if api in ("chat", "responses") else {"use": "compatible", "server": api}
        async with Client(backends={"b": table}) as client:
            done = await client.complete(**{"prompt": "hi", "max_output_tokens": 100, **request})
        return done, server.requests[-1].decode()


def made(done: Completion) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, call.arguments) for call in done.tool_calls]


def chat(*deltas: dict[str, Any], reason: str = "stop", **last: Any) -> bytes:
    chunks = [{"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    end = {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}], **last}
    return say(*chunks, end, "[DONE]")


def call(index: int | None, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}
    return {"tool_calls": [{key: value for key, value in entry.items() if value is not None}]}


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        (
            [call(0, None, "a", '{"x"'), call(0, "i1", None, ":1}"), call(1, None, "b", "{"), call(1, "i2", None, "}")],
            "late id",
        ),
        ([call(None, None, "a", '{"x"'), call(None, "i1", None, ":1}"), call(None, None, "b", "{}")], "late id, no index"),
        ([call(0, "", "a", '{"x":1}'), call(0, "", "b", "{}")], "one index"),
        ([call(0, None, "a", '{"x":1}'), call(0, None, "a", "{}")], "one index, one name"),
        ([call(0, "i1", "get_", ""), call(0, None, "weather", ""), call(0, None, None, "{}")], "name in pieces"),
        ([call(0, "i1", "a", ""), call(0, "i1", "a", '{"x"'), call(0, None, "a", ":1}")], "name on every piece"),
    ],
)
async def test_tool_calls_of_chat_servers(deltas: Sequence[dict[str, Any]], expected: str) -> None:
    done, _ = await ask("vllm", chat(*deltas, reason="tool_calls"), tools=TOOLS)
    assert (
        made(done)
        == {
            "late id": [("i1", "a", '{"x":1}'), ("i2", "b", "{}")],
            "late id, no index": [("i1", "a", '{"x":1}'), ("call_1", "b", "{}")],
            "one index": [("call_0", "a", '{"x":1}'), ("call_1", "b", "{}")],
            "one index, one name": [("call_0", "a", '{"x":1}'), ("call_1", "a", "{}")],
            "name in pieces": [("i1", "get_weather", "{}")],
            "name on every piece": [("i1", "a", '{"x":1}')],
        }[expected]
    )
    assert done.finish_reason == "tool_calls"


async def test_calls_of_one_place_in_responses() -> None:
    calls: list[dict[str, Any]] = [
        {"type": "function_call", "id": f"f{n}", "call_id": f"c{n}", "name": n, "arguments": ""} for n in "ab"
    ]
    place: dict[str, Any] = {"output_index": 0}
    added = [{"type": "response.output_item.added", **place, "item": item} for item in calls]
    done = [{"type": "response.output_item.done", **place, "item": item | {"arguments": "{}"}} for item in calls]
    pieces = [
        {"type": "response.function_call_arguments.delta", **place, "item_id": f"f{n}", "delta": piece}
        for piece in ("{", "}")
        for n in "ba"
    ]
    end = {"type": "response.completed", "response": {"id": "r", "status": "completed", "model": "gpt-4o", "output": []}}
    for events in ([*added, *pieces, *done], done):
        answered, _ = await ask("responses", say(*events, end, named=True), tools=TOOLS)
        assert made(answered) == [("ca", "a", "{}"), ("cb", "b", "{}")]


@pytest.mark.parametrize("api", ["chat", "vllm"])
async def test_reads_that_an_earlier_chunk_counted_are_paid_as_reads(api: str) -> None:
    early = {"prompt_tokens": 1000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 800}}
    first = {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant"}}], "usage": early}
    done, _ = await ask(api, say(first) + chat({"content": "x"}, usage={"prompt_tokens": 1000, "completion_tokens": 5}))
    assert done.usage == Usage(uncached=200, cache_read=800, cache_write=None, output=5)
    assert (done.cost, done.estimated) == (Decimal("0.00033"), False)


async def test_a_number_that_python_cannot_hold_goes_out_and_back_as_it_was_written() -> None:
    used = '{"type":"tool_use","id":"t","name":"a","input":{"p":1.10,"q":1e400}}'
    counts = '"usage":{"input_tokens":1,"output_tokens":1}'
    body = f'{{"id":"m","type":"message","role":"assistant","content":[{used}],"stop_reason":"tool_use",{counts}}}'.encode()
    done, _ = await ask("messages", body, "application/json", tools=TOOLS)
    assert made(done) == [("t", "a", '{"p":1.10,"q":1e400}')]
    given: list[Any] = [{"role": "user", "content": "hi"}, done.message, {"role": "tool", "tool_call_id": "t", "content": "x"}]
    _, sent = await ask("messages", body, "application/json", tools=TOOLS, prompt=None, messages=given)
    assert '"input":{"p":1.10,"q":1e400}' in sent


@pytest.mark.parametrize("given", [{"include_usage": False}, {"include_obfuscation": True}])
async def test_usage_comes_whatever_the_caller_says_of_the_stream(wire_server: WireServer, given: dict[str, bool]) -> None:
    table = {
        "use": "openai",
        "api": "chat",
        "model": "ok-5",
        "base_url": wire_server.openai_url,
        "api_key": "k",
        "prices": PRICES,
    }
    async with Client(backends={"b": table}) as client:
        done = await client.complete("Hi", max_output_tokens=50, extra={"b": {"stream_options": given}})
    assert done.usage is not None
    assert (done.usage.output, done.estimated) == (5, False)
