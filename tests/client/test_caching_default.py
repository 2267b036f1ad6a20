"""The default policy on the wire: it learns what comes back and when, and pays for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.caching_support import Vendor, marks_of, text

pytestmark = pytest.mark.anyio
CLAUDE, GPT = "claude-sonnet-5", "gpt-5.6-sol"
SYSTEM = text(1500, "manual ")


def spent(vendor: Vendor, *, skip: int = 0) -> float:
    """What the input cost, relative to no caching at all: reads 0.1, writes 1.25 (5m, 30m) and 2 (1h)."""
    price = {"5m": 1.25, "30m": 1.25, "1h": 2.0}
    paid = whole = 0.0
    for _, read, writes, total in vendor.rules.log[skip:]:
        written = sum(writes.values())
        paid += 0.1 * read + sum(price[ttl] * n for ttl, n in writes.items()) + total - read - written
        whole += total
    return paid / whole


@pytest.mark.parametrize("model", [CLAUDE, GPT])
async def test_b11_b30_one_shot_calls_do_not_pay_for_writes(vendor: Vendor, model: str) -> None:
    async with vendor.client(model, None) as client:
        for i in range(40):
            await client.complete(text(1500, f"summary {i} "))
            vendor.clock.advance(30)
    last = vendor.bodies[-20:]
    assert sum(bool(marks_of(body)) for body in last) <= 2
    if model == GPT:  # which writes by default: silence would cost
        assert sum(body.get("prompt_cache_options") == {"mode": "explicit"} for body in last) >= 18
    assert spent(vendor, skip=20) < 1.03


@pytest.mark.parametrize("model", [CLAUDE, GPT])
async def test_b11_b30_one_read_after_the_write_is_enough(vendor: Vendor, model: str) -> None:
    """Of every two calls with one prefix the second reads what the first wrote: 1.25 + 0.1 < 2."""
    async with vendor.client(model, None) as client:
        for i in range(40):
            for question in ("One?", "Two?"):
                await client.complete(question, system=text(1500, f"document {i} "))
                vendor.clock.advance(20)
    assert spent(vendor, skip=40) < 0.75
    reads = vendor.reads[-20:]
    assert all(read > 1400 for read in reads[1::2])


async def test_b13_a_prefix_with_long_gaps_is_kept_for_an_hour(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE, None) as client:
        for _ in range(40):
            await client.complete("Anything new?", system=SYSTEM, session_id="watch")
            vendor.clock.advance(400)  # always too late for five minutes
    assert all("1h" in dict(marks_of(body)).values() for body in vendor.bodies[-10:])
    assert all(read > 1400 for read in vendor.reads[-10:])
    assert spent(vendor, skip=20) < 0.35


async def test_a_shared_system_prompt_is_read_by_every_session(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE, None) as client:
        for i in range(30):
            await client.complete(f"Question {i}?", system=SYSTEM, session_id=f"s{i}")
            vendor.clock.advance(25)
    assert all(read > 1400 for read in vendor.reads[-15:])
    assert spent(vendor, skip=10) < 0.2


@pytest.mark.parametrize("model", [CLAUDE, GPT])
async def test_a_conversation_is_cached_as_it_grows(vendor: Vendor, model: str) -> None:
    history: list[Any] = [{"role": "user", "content": text(400, "a ")}]
    async with vendor.client(model, None) as client:
        for turn in range(12):
            done = await client.complete(messages=history, system=SYSTEM, session_id="s")
            history += [done.message, {"role": "user", "content": text(200, f"{turn} ")}]
            vendor.clock.advance(25)
    totals = [total for _, _, _, total in vendor.rules.log]
    assert all(vendor.reads[i] >= 0.95 * totals[i - 1] for i in range(2, 12))
    assert {request.status for request in vendor.server.requests} == {200}


async def test_a_callers_lifetime_that_the_terms_do_not_have_breaks_no_later_request(vendor: Vendor) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    first: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": text(3000), **mark}]}
    plain = {"role": "user", "content": text(3000)}
    async with vendor.client("gpt-5.6-sol", None) as client:
        for messages in (
            [first],
            [first],
            [plain, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}],
        ):
            await client.complete(messages=messages)
            vendor.clock.advance(5)
    assert vendor.reads[0] == 0
    assert min(vendor.reads[1:]) > 2_900
    planned = [ttl for body in vendor.bodies[2:] for _, ttl in marks_of(body)]
    assert planned
    assert set(planned) == {"30m"}  # nobody publishes a price of 12h


@pytest.mark.parametrize("model", ["claude-sonnet-5", "gpt-5.6-sol"])
async def test_a_clock_that_is_set_back_makes_nobody_wait_for_it_to_catch_up(vendor: Vendor, model: str) -> None:
    async with vendor.client(model, None) as client:
        await client.complete("One?", system=text(3000))
        vendor.clock.advance(-86_400)
        for _ in range(3):
            await client.complete("One?", system=text(3000))
            vendor.clock.advance(20)
    assert vendor.reads[1] == 0  # the vendor's clock is the same one here
    assert min(vendor.reads[2:]) > 2_900
