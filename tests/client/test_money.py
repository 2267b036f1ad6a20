"""What requests cost, and whom their budgets hold together, on scripted backends and on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.backends.raw_server import RawServer, answer

from cachespec.backends.anthropic import AnthropicBackend
from cachespec.backends.openai import OpenAIBackend
from cachespec.client import Client
from cachespec.errors import BudgetExceededError, StreamInterruptedError
from cachespec.pricing import hosted_rates
from cachespec.testing import ScriptedBackend, say
from cachespec.usage import Usage

pytestmark = pytest.mark.anyio
COUNTS = {"input_tokens": 100, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 1}
MODEL = "claude-sonnet-5-5"
PRICES = {"input": "1", "cache_read": "0.1", "cache_write": {"5m": "1.25", "1h": "2", "30m": "1.25"}, "output": "10"}


def server(*events: Mapping[str, Any]) -> RawServer:
    """Answers every request with these events."""
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return RawServer(lambda connection, _: connection.sendall(answer("200 OK", body, "content-type: text/event-stream")))


def message(usage: Mapping[str, Any], later: Mapping[str, Any] | None = None, *, model: str = MODEL) -> list[dict[str, Any]]:
    """A whole Messages stream whose first usage object says this, and its last one that, beside 5 tokens of output."""
    start = {"id": "m", "type": "message", "role": "assistant", "model": model, "content": [], "usage": usage}
    return [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5, **(later or {})}},
        {"type": "message_stop"},
    ]


def cut(*events: Mapping[str, Any]) -> RawServer:
    """Begins every answer with these events and hangs up."""
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 100000\r\n\r\n"
    return RawServer(lambda connection, _: connection.sendall(head + body))


def claude(url: str, **options: Any) -> dict[str, Any]:
    return {"use": "anthropic", "model": MODEL, "api_key": "k", "base_url": url, "prices": PRICES, **options}


async def test_a_sessions_budget_is_each_tenants_own() -> None:
    """Whoever calls a session as another tenant does has its own limit, not the other's."""
    rates = hosted_rates(None, "m", prices={"input": "0", "output": "1000"})
    usage = Usage(uncached=10, cache_read=0, cache_write={}, output=100)
    backend = ScriptedBackend([say("Hi", usage=usage)] * 3, rates=rates)
    budgets = [{"scope": "session", "limit": "0.15"}]
    async with Client(backends={"scripted": backend}, policies={"budgets": budgets}) as client:
        for tenant in ("a", "b", None):
            done = await client.complete("Hi", tenant=tenant, session_id="chat-1", max_output_tokens=100)
            assert done.cost == Decimal("0.1")
            with pytest.raises(BudgetExceededError) as caught:
                await client.complete("Hi", tenant=tenant, session_id="chat-1", max_output_tokens=100)
            assert caught.value.spent == Decimal("0.1")
            assert caught.value.scope == f"session:{tenant}/chat-1 in total" if tenant else "session:chat-1 in total"


async def test_a_decision_says_what_each_budget_does_at_its_end() -> None:
    rates = hosted_rates(None, "m", prices={"input": "0", "output": "1"})
    budgets = [
        {"scope": "request", "limit": "1"},
        {"scope": "tenant", "limit": "1", "per": "day"},
        {"scope": "tenant", "limit": "2", "per": "day", "mode": "soft"},
        {"scope": "tenant", "limit": "3", "per": "day", "mode": "downgrade"},
    ]
    async with Client(backends={"scripted": ScriptedBackend(rates=rates)}, policies={"budgets": budgets}) as client:
        told = client.plan("Hi", tenant="acme", max_output_tokens=100).explain()
        lines = [line.strip() for line in told.splitlines() if " budget " in line]
        assert lines == [
            "hard budget tenant:acme per day: $0 spent, $0 reserved of $1",
            "soft budget tenant:acme per day: $0 spent, $0 reserved of $2",
            "downgrade budget tenant:acme per day: $0 spent, $0 reserved of $3",
        ]


async def test_a_price_that_the_table_lacks_is_no_bound_for_a_hard_budget() -> None:
    """A place of inference has a surcharge that the price list does not know: what it may cost is not known either."""
    backend = {"use": "anthropic", "model": "claude-opus-5-5", "api_key": "k"}
    budgets = [{"scope": "overall", "limit": "5.00"}]
    async with Client(backends={"b": backend}, policies={"budgets": budgets}) as client:
        for geo, chosen in ((None, "b"), ("global", "b"), ("us", None)):
            extra = {} if geo is None else {"b": {"inference_geo": geo}}
            decision = client.plan("Hi", max_output_tokens=100, extra=extra)
            (offer,) = decision.candidates
            assert decision.chosen == chosen
            assert [r.code for r in offer.reasons if r.code == "price_unknown"] == ([] if chosen else ["price_unknown"])
            assert offer.quote is not None
            assert (offer.quote.worst is None) == (chosen is None)


@pytest.mark.parametrize(
    ("facts", "estimated"), [({}, False), ({"inference_geo": "global"}, False), ({"inference_geo": "us"}, True)]
)
async def test_a_place_of_inference_without_a_price_makes_an_estimate(facts: dict[str, str], estimated: bool) -> None:
    with server(*message({**COUNTS, **facts})) as wire:
        async with Client(backends={"b": claude(wire.url)}) as client:
            done = await client.complete("Hi")
    assert (done.cost, done.estimated) == (Decimal("0.00015"), estimated)


@pytest.mark.parametrize("use", ["vllm", "groq"])
async def test_a_count_that_was_running_when_the_stream_was_cut_is_an_estimate(use: str) -> None:
    """A14: a server on our own machines knows no more of a cut answer than a vendor's does."""
    usage = {"prompt_tokens": 1000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 900}}
    delta = {"choices": [{"index": 0, "delta": {"content": "ab " * 50}, "finish_reason": None}], "usage": usage}
    with cut({"id": "c", "object": "chat.completion.chunk", "model": "m", **delta}) as wire:
        backend = {"use": "compatible", "server": use, "model": "m", "api_key": "k", "base_url": wire.url, "prices": PRICES}
        async with Client(backends={"b": backend}, policies={"retries": {"attempts": 1}}) as client:
            with pytest.raises(StreamInterruptedError) as caught:
                await client.complete("Hi", max_output_tokens=500)
            (entry,) = await client.ledger.entries()
    partial = caught.value.partial
    assert partial is not None
    cost = Decimal(100 + 90 + 38 * 10) / 1_000_000  # 1000 tokens of input, 900 of them read, and 150 characters of output
    assert (partial.cost, partial.estimated) == (entry.amount, entry.estimated) == (cost, True)


async def test_searches_at_the_vendor_are_told_and_an_estimate_without_a_price_of_their_own(tmp_path: Path) -> None:
    searched = {"server_tool_use": {"web_search_requests": 2, "web_fetch_requests": 0}}
    ledger = {"use": "sqlite", "path": str(tmp_path / "ledger.db")}
    with server(*message(COUNTS, searched)) as wire:
        async with Client(backends={"b": claude(wire.url)}, ledger=ledger) as client:
            done = await client.complete("Hi")
            (entry,) = await client.ledger.entries()
    assert done.usage is not None
    assert (done.cost, done.estimated) == (Decimal("0.00015"), True)
    assert done.to_dict()["usage"]["apart"] == {"web_search": 2}
    assert entry.usage == done.usage


async def test_the_requests_of_one_answer_are_priced_each_by_its_size() -> None:
    """A compaction that the vendor made before it answered passes no limit together with the answer."""
    of_each = {"input_tokens": 60_000, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 5}
    iterations = [{"type": "compaction", **of_each}, {"type": "message", **of_each}]
    with server(*message(of_each, {"iterations": iterations}, model="claude-haiku-5-5")) as wire:
        backend = AnthropicBackend(name="b", model="claude-haiku-5-5", api_key="k", base_url=wire.url)
        backend.rates = hosted_rates("anthropic", "claude-haiku-5-5")
        async with Client(backends={"b": backend}) as client:
            done = await client.complete("Hi")
    assert done.usage is not None
    assert done.usage.input_tokens == 120_000
    assert (done.cost, done.estimated) == (2 * (Decimal("0.006") + Decimal("0.0000025")), False)


@pytest.mark.parametrize(
    ("kind", "counted", "cost", "estimated"),
    [
        ("web_search_call", {"web_search": {"num_requests": 2}}, "0.02", False),
        ("web_search_call", {"web_search": {"num_requests": 0}}, "0", False),  # a page was opened, which is free
        ("web_search_call", None, "0", True),
        ("file_search_call", {"web_search": {"num_requests": 0}}, "0", True),
        ("function_call", None, "0", False),
    ],
)
async def test_what_tools_at_openai_cost_is_priced_or_told_as_an_estimate(
    kind: str, counted: Any, cost: str, estimated: bool
) -> None:
    usage = {"input_tokens": 0, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 0}
    item = {"type": kind, "id": "i", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}
    response = {
        "id": "r",
        "object": "response",
        "status": "completed",
        "model": "gpt-5.6-terra",
        "output": [item],
        "usage": usage,
    }
    end = {"type": "response.completed", "response": {**response, "tool_usage": counted}}
    with server({"type": "response.created", "response": {**response, "output": [], "usage": None}}, end) as wire:
        backend = OpenAIBackend(name="b", model="gpt-5.6-terra", api_key="k", base_url=f"{wire.url}/v1")
        backend.rates = hosted_rates("openai", "gpt-5.6-terra")
        async with Client(backends={"b": backend}) as client:
            done = await client.complete("Hi")
    assert (done.cost, done.estimated) == (Decimal(cost), estimated)


@pytest.mark.parametrize(
    ("model", "cost", "estimated"),
    [("claude-haiku-5-5", "0.0000125", False), ("claude-opus-5-5", "0.0005", False), ("claude-opus-99", "0.0000125", True)],
)
async def test_a16_whoever_answers_has_its_own_price(model: str, cost: str, estimated: bool) -> None:
    with server(*message(COUNTS, model=model)) as wire:
        backend = AnthropicBackend(name="b", model="claude-haiku-5-5", api_key="k", base_url=wire.url)
        backend.rates = hosted_rates("anthropic", "claude-haiku-5-5")
        async with Client(backends={"b": backend, "own": claude(wire.url)}) as client:
            done = await client.complete("Hi", model="b")
            own = await client.complete("Hi", model="own")
    assert (done.model, done.cost, done.estimated) == (model, Decimal(cost), estimated)
    assert (own.cost, own.estimated) == (Decimal("0.00015"), False)  # who gives prices says what is billed there
