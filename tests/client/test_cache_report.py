"""What a session knows of its cache: the local verdict, the vendor's own, and the price. And prewarming."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from tests.client.caching_support import Recording, Vendor, text

from cachespec.backends._decode_messages import MessagesDecoder
from cachespec.backends._decode_responses import ResponsesDecoder
from cachespec.errors import BudgetExceededError
from cachespec.events import CacheDiagnosed, Event

pytestmark = pytest.mark.anyio
SYSTEM = text(3000, "manual ")
MODELS = ["claude-sonnet-5", "gpt-5.6-sol"]


@pytest.mark.parametrize("model", MODELS)
async def test_each_turn_is_reported_with_what_it_lost_and_why(vendor: Vendor, model: str) -> None:
    async with vendor.client(model) as client:
        session = client.session(system=SYSTEM)
        await session.complete("One?")
        vendor.clock.advance(10)
        await session.complete("Two?")
        vendor.clock.advance(7_200)  # everything is gone by now
        await session.complete("Three?")
        report = session.cache_report()
    assert [turn.turn for turn in report] == [0, 1, 2]
    first, second, third = report
    assert (first.why, first.lost, first.price) == (None, None, None)
    assert second.expected_read is not None
    assert second.read is not None
    assert second.read > 2_900
    assert second.lost is not None
    assert second.lost < 100
    assert second.why is not None
    assert second.why.divergence is not None
    assert second.why.divergence.kind == "appended"
    assert third.read == 0
    assert third.lost == third.reusable
    assert third.lost is not None
    assert third.price == Decimal(third.lost) * (Decimal("1.25") - Decimal("0.1")) / 10**6
    assert json.loads(json.dumps([turn.to_dict() for turn in report]))


async def test_the_vendor_is_asked_where_that_is_switched_on(vendor: Vendor) -> None:
    async with vendor.client(MODELS[0], diagnostics=True) as client:
        session = client.session(system=SYSTEM)
        await session.complete("One?")
        await session.complete("Two?")
        await client.complete("No session.", system=SYSTEM)
    first, second, third = vendor.bodies
    assert first["diagnostics"] == {"previous_message_id": None}
    assert second["diagnostics"]["previous_message_id"].startswith("msg_")
    assert "diagnostics" not in third
    vendor.server.requests.clear()
    async with vendor.client(MODELS[1], diagnostics=True) as client:
        session = client.session(system=SYSTEM)
        await session.complete("One?")
        await session.complete("Two?")
    first, second = vendor.bodies
    assert "comparison_response_id" not in first.get("prompt_cache_options", {})
    assert second["prompt_cache_options"]["comparison_response_id"].startswith("resp_")
    assert second["prompt_cache_options"]["mode"] == first["prompt_cache_options"]["mode"]
    vendor.server.requests.clear()
    async with vendor.client(MODELS[0]) as client:
        await client.session(system=SYSTEM).complete("One?")
    assert "diagnostics" not in vendor.bodies[0]


def decoded(decoder: Any, *payloads: dict[str, Any]) -> list[Event]:
    lines = "".join(f"event: {p['type']}\ndata: {json.dumps(p)}\n\n" for p in payloads)
    found: list[Event] = list(decoder.feed(lines.encode()))
    return found


@pytest.mark.parametrize(
    ("said", "reason", "missed"),
    [
        ({"cache_miss_reason": None}, "pending", None),
        ({"cache_miss_reason": {"type": "system_changed", "cache_missed_input_tokens": 900}}, "system_changed", 900),
        ({"cache_miss_reason": {"type": "previous_message_not_found"}}, "previous_message_not_found", None),
        (None, None, None),
    ],
)
async def test_anthropics_word(said: Any, reason: str | None, missed: int | None) -> None:
    decoder = MessagesDecoder(backend="b", model="m", provider="anthropic")
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m", "usage": {"input_tokens": 5}}
    start = {"type": "message_start", "message": {**message, "diagnostics": said}}
    events = [event for event in decoded(decoder, start) if isinstance(event, CacheDiagnosed)]
    assert events == ([] if reason is None else [CacheDiagnosed(reason=reason, missed_tokens=missed)])


@pytest.mark.parametrize(
    ("said", "reason", "missed"),
    [
        ({"type": "cache_hit"}, "hit", None),
        ({"type": "cache_miss", "reason": "tools_changed", "cache_missed_tokens": 900}, "tools_changed", 900),
        ({"type": "comparison_response_not_found"}, "comparison_response_not_found", None),
        (None, None, None),
    ],
)
async def test_openais_word(said: Any, reason: str | None, missed: int | None) -> None:
    decoder = ResponsesDecoder(backend="b", model="m")
    response = {"id": "resp_1", "object": "response", "status": "completed", "model": "m", "output": []}
    end = {"type": "response.completed", "response": {**response, "prompt_cache_diagnostics": said}}
    events = [event for event in decoded(decoder, end) if isinstance(event, CacheDiagnosed)]
    assert events == ([] if reason is None else [CacheDiagnosed(reason=reason, missed_tokens=missed)])


@pytest.mark.parametrize("model", MODELS)
async def test_what_is_prewarmed_is_read_by_the_first_request(vendor: Vendor, model: str) -> None:
    async with vendor.client(model) as client:
        done = await client.prewarm(system=SYSTEM, tenant="acme")
        assert done.sent
        assert done.cost is not None
        assert done.usage is not None
        assert done.usage.written is not None
        assert done.usage.written > 2_900
        again = await client.prewarm(system=SYSTEM, tenant="acme")
        assert (again.sent, "warm already" in again.reason) == (False, True)
        answer = await client.complete("One?", system=SYSTEM, tenant="acme")
        assert answer.usage is not None
        assert answer.usage.cache_read is not None
        assert answer.usage.cache_read > 2_900
        totals = await client.ledger.totals(tenant="acme")
        assert totals.requests == 2
    assert len(vendor.bodies) == 2


async def test_what_does_not_pay_is_not_prewarmed(vendor: Vendor) -> None:
    async with vendor.client(MODELS[0]) as client:
        short = await client.prewarm(system="Be brief.")
        assert not short.sent
        assert "tokens" in short.reason
    async with vendor.client(MODELS[0], Recording(head=None, warm=None, end=None)) as client:
        unmarked = await client.prewarm(system=SYSTEM)
        assert (unmarked.sent, unmarked.backend) == (False, "b")
    async with vendor.client("gpt-5.4") as client:
        assert not (await client.prewarm(system=SYSTEM)).sent
    assert vendor.bodies == []


async def test_prewarming_keeps_to_budgets_and_a_failure_leaves_nothing(vendor: Vendor) -> None:
    from cachespec.client import Client
    from cachespec.errors import BackendError

    async with vendor.client(MODELS[0]) as plain:
        policies: Any = {"caching": Recording(), "budgets": [{"scope": "overall", "limit": "0.000001"}]}
        async with Client(backends={"b": plain.backends["b"]}, policies=policies, clock=vendor.clock) as client:
            with pytest.raises(BudgetExceededError):
                await client.prewarm(system=SYSTEM)
    assert vendor.bodies == []
    vendor.server.counts = lambda *_: "refused"
    async with vendor.client(MODELS[0]) as client:
        with pytest.raises(BackendError):
            await client.prewarm(system=SYSTEM)
        assert len(client._now.caching.fanout) == 0
        assert (await client.ledger.totals()).requests == 0


async def test_no_question_is_put_where_the_vendor_would_refuse_it(vendor: Vendor) -> None:
    async with vendor.client("gpt-5.4", diagnostics=True) as client:  # cache options came with 5.6
        for _ in range(2):
            await client.complete("One?", system=SYSTEM, session_id="s")
    async with vendor.client(MODELS[1], diagnostics=True) as client:  # a retention and options are refused together
        for _ in range(2):
            await client.complete("One?", system=SYSTEM, session_id="t", extra={"b": {"prompt_cache_retention": "24h"}})
    assert len(vendor.bodies) == 4
    assert not any("prompt_cache_options" in body for body in vendor.bodies)
    assert [body.get("prompt_cache_retention") for body in vendor.bodies[2:]] == ["24h", "24h"]
