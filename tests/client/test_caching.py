"""Planned caching on the wire: the bodies that the real SDKs send to servers that keep the vendors' rules. `b…` names a report
of what other systems got wrong; each is one fault here, and its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.client.caching_support import PRICES, Recording, Vendor, marks_of, text

from cachespec.caching import CacheAsk, CachePlan, Choice
from cachespec.client import Client
from cachespec.decision import REASON_CODES, Decision
from cachespec.errors import ConfigError, RequestRejectedError
from cachespec.ledger.memory import MemoryLedger
from cachespec.ledger.sqlite import SqliteLedger
from cachespec.telemetry import MarksIgnored

pytestmark = pytest.mark.anyio
CLAUDE, GPT, OLD = "claude-sonnet-5", "gpt-5.6-sol", "gpt-5.4"
SYSTEM = text(1500, "manual ")
TOOL = {"name": "look", "description": "Looks things up.", "input_schema": {"type": "object", "properties": {}}}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def said(tokens: int, salt: str = "", **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": text(tokens, salt), **({"cache_control": {"type": "ephemeral", **mark}} if mark else {})}


def steps(count: int, tokens: int = 100) -> list[dict[str, Any]]:
    """So many tool calls of an agent, each with its result."""
    turns: list[dict[str, Any]] = [user(said(200, "task "))]
    for i in range(count):
        call = {"type": "tool_use", "id": f"call_{i}", "name": "look", "input": {"at": i}}
        result = {"type": "tool_result", "tool_use_id": f"call_{i}", "content": text(tokens, f"{i} ")}
        turns += [{"role": "assistant", "content": [call]}, user(result)]
    return turns


def codes(decision: Decision) -> list[str]:
    assert decision.plan is not None
    found = [reason.code for reason in decision.plan.reasons]
    assert REASON_CODES.issuperset(found)
    return found


# -- where marks stand


@pytest.mark.parametrize("empty", ["", "  \n"])
@pytest.mark.parametrize("model", [CLAUDE, GPT])
async def test_b1_a_mark_never_stands_on_an_empty_text(vendor: Vendor, model: str, empty: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    async with vendor.client(model) as client:
        await client.complete(messages=[user(said(1200), image, {"type": "text", "text": empty})])
        await client.complete(messages=[user(said(1200, "x")), {"role": "assistant", "content": "Well."}, user(said(9), image)])
        only = await client.complete(messages=[user({"type": "text", "text": empty or " "})], system=SYSTEM)
        nothing = await client.complete(messages=[user({"type": "text", "text": empty or " "})])
    key = "messages" if model == CLAUDE else "input"
    assert [path for path, _ in marks_of(vendor.bodies[0])] == [f"{key}[0].content[1]"]
    assert [path for path, _ in marks_of(vendor.bodies[1])] == [f"{key}[2].content[1]"]
    assert len(marks_of(vendor.bodies[2])) == 1
    assert only.decision.plan is not None
    assert [mark.at for mark in only.decision.plan.marks] == ["system[0]"]
    assert marks_of(vendor.bodies[3]) == []
    assert codes(nothing.decision) == ["below_minimum"]
    assert {request.status for request in vendor.server.requests} == {200}


async def test_b2_marks_do_not_add_up_over_turns_the_callers_win(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE) as client:
        history: list[Any] = []
        for turn in range(6):
            history = (
                [*history, user(said(1100, f"{turn} ", ttl="5m"))] if turn < 4 else [*history, user(said(1100, f"{turn} "))]
            )
            done = await client.complete(messages=history, system=SYSTEM)
            history.append(done.message)
            vendor.clock.advance(20)
    for turn, body in enumerate(vendor.bodies):
        marks = [path for path, _ in marks_of(body)]
        assert len(marks) <= 4
        theirs = [f"messages[{2 * i}].content[0]" for i in range(min(turn + 1, 4))]
        assert set(theirs) <= set(marks)
    assert marks_of(vendor.bodies[0])[0][0] == "system[0]"  # one of ours beside the caller's
    assert len(marks_of(vendor.bodies[5])) == 4  # none of ours: the caller took all slots
    assert {request.status for request in vendor.server.requests} == {200}


async def test_b4_lifetimes_never_rise_in_wire_order(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE, Recording(head="1h", warm="1h", end="1h")) as client:
        for marked in (
            {**TOOL, "cache_control": {"type": "ephemeral"}},
            {**TOOL, "cache_control": {"type": "ephemeral", "ttl": "5m"}},
        ):
            await client.complete(messages=[user(said(1200))], system=SYSTEM, tools=[marked])
    for body in vendor.bodies:  # a bare mark counts as 5m
        assert [ttl for _, ttl in marks_of(body)] == ["5m", "5m", "5m"]
    vendor.server.reset()
    async with vendor.client(CLAUDE, Recording(head="5m", end=None)) as client:
        done = await client.complete(messages=[user(said(1200, ttl="1h"))], system=SYSTEM)
    assert marks_of(vendor.bodies[0]) == [("system[0]", "1h"), ("messages[0].content[0]", "1h")]  # lifted: it costs nothing
    assert done.decision.plan is not None
    assert [mark.ttl for mark in done.decision.plan.marks] == ["1h", "1h"]
    assert vendor.writes[-1] == {"1h": vendor.rules.log[-1][3]}
    assert {request.status for request in vendor.server.requests} == {200}


async def test_b5_the_window_slides_and_the_anchor_stays(vendor: Vendor) -> None:
    turns = steps(30)
    async with vendor.client(CLAUDE, Recording(head=None)) as client:
        for count in range(1, len(turns) + 1, 2):
            done = await client.complete(messages=turns[:count], system=SYSTEM, tools=[TOOL], session_id="s")
            vendor.clock.advance(10)
    assert done.decision.plan is not None
    at = [mark.at for mark in done.decision.plan.marks]
    assert at == ["system[0]", "messages[58][0]", "messages[60][0]"]
    assert [path for path, _ in marks_of(vendor.bodies[-1])] == [
        "system[0]",
        "messages[58].content[0]",
        "messages[60].content[0]",
    ]
    assert vendor.reads[-1] == vendor.rules.log[-2][3]


@pytest.mark.parametrize("model", [CLAUDE, GPT])
async def test_b6_a_turn_of_many_blocks_is_bridged(vendor: Vendor, model: str) -> None:
    first = [user(said(1200))]
    many = [*first, {"role": "assistant", "content": "Ok."}, user(*[said(30, f"{i} ") for i in range(25)])]
    more = [*many, {"role": "assistant", "content": "Ok."}, user(*[said(30, f"more {i} ") for i in range(60)])]
    async with vendor.client(model, Recording(head=None, warm=None)) as client:  # a policy that knows of no look-back
        for messages in (first, many, more):
            await client.complete(messages=messages)
            vendor.clock.advance(10)
    totals = [total for _, _, _, total in vendor.rules.log]
    assert vendor.reads == [0, totals[0], totals[1]]
    assert [len(marks_of(body)) for body in vendor.bodies] == [1, 2, 2]


async def test_b6_with_one_slot_left_the_mark_stays_within_reach(vendor: Vendor) -> None:
    """The caller took three slots at the front: the last mark is drawn back as far as it must, not lost."""
    tools = [{**TOOL, "name": f"look_{i}", "cache_control": {"type": "ephemeral"}} for i in range(2)]
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    history: list[Any] = [user(said(300))]
    async with vendor.client(CLAUDE, Recording(head=None, warm=None)) as client:
        await client.complete(messages=history, system=system, tools=tools)
        first = vendor.rules.log[-1][3]
        for i in range(12):
            history += [{"role": "assistant", "content": f"Ok {i}."}, user(said(50, f"{i} "))]
        vendor.clock.advance(10)
        await client.complete(messages=history, system=system, tools=tools)
    assert vendor.reads[-1] == first
    assert len(marks_of(vendor.bodies[-1])) == 4
    assert {request.status for request in vendor.server.requests} == {200}


async def test_b6_calls_and_results_that_stand_together_count_once(vendor: Vendor) -> None:
    calls = [{"type": "tool_use", "id": f"c{i}", "name": "look", "input": {}} for i in range(30)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": f"found {i}"} for i in range(30)]
    history = [user(said(1200)), {"role": "assistant", "content": calls}, user(*results)]
    async with vendor.client(CLAUDE, Recording(head=None, warm=None)) as client:
        await client.complete(messages=history[:1], tools=[TOOL])
        vendor.clock.advance(10)
        await client.complete(messages=history, tools=[TOOL])
    assert vendor.reads == [0, vendor.rules.log[0][3]]
    assert len(marks_of(vendor.bodies[-1])) == 1  # no bridge is needed, and none is built


async def test_b9_b10_below_the_models_own_minimum_there_is_no_mark(vendor: Vendor) -> None:
    decisions = {}
    elsewhere = ("anthropic.claude-haiku-4-5-20251001-v1:0", "anthropic/claude-haiku-4-5")
    for model in ("claude-sonnet-5", "claude-haiku-4-5", "claude-opus-5-5", "claude-opus-4-7", *elsewhere):
        async with vendor.client(model, api="messages") as client:
            decisions[model] = (await client.complete("Hello", system=text(1500))).decision
    marks = {model: [path for path, _ in marks_of(body)] for model, body in zip(decisions, vendor.bodies, strict=True)}
    assert marks["claude-sonnet-5"] == ["system[0]", ""]
    assert marks["claude-haiku-4-5"] == marks["claude-opus-4-7"] == []
    assert [marks[model] for model in elsewhere] == [[], []]
    haiku = decisions["claude-haiku-4-5"]
    assert codes(haiku) == ["below_minimum"]
    assert haiku.plan is not None
    assert "4096" in haiku.plan.reasons[0].detail
    tokens = haiku.candidates[0].tokens
    assert (tokens.cache_read, tokens.cache_write) == (0, 0)  # and no saving is predicted
    assert "below_minimum" not in codes(decisions["claude-sonnet-5"])


async def test_b10_a_callers_mark_below_the_minimum_stays_and_is_told(vendor: Vendor) -> None:
    async with vendor.client("claude-haiku-4-5") as client:
        done = await client.complete(messages=[user(said(300, ttl="1h"))])
    assert marks_of(vendor.bodies[0]) == [("messages[0].content[0]", "1h")]
    assert codes(done.decision) == ["caller_marks", "below_minimum"]


async def test_b24_the_callers_marks_are_law(vendor: Vendor) -> None:
    given = {"type": "ephemeral", "ttl": "1h", "scope": "mine"}
    async with vendor.client(CLAUDE) as client:
        done = await client.complete(
            messages=[user({**said(1200), "cache_control": given}), user(said(100, "q "))], system=SYSTEM
        )
    assert vendor.bodies[0]["messages"][0]["content"][0]["cache_control"] == given
    assert done.decision.plan is not None
    told = [(mark.at, mark.ttl) for mark in done.decision.plan.marks]
    assert told == [("system[0]", "1h"), ("messages[0][0]", "1h"), ("messages[1][0]", "5m")]
    assert codes(done.decision)[0] == "caller_marks"


async def test_an_automatic_mark_of_the_caller_takes_a_slot_and_the_last_block(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE, Recording(end="1h", head="1h")) as client:
        body = {"extra": {"b": {"cache_control": {"type": "ephemeral"}}}}
        done = await client.complete(messages=[user(said(1200))], system=SYSTEM, **body)  # type: ignore[arg-type]
    assert marks_of(vendor.bodies[0]) == [("system[0]", "1h"), ("", "5m")]
    assert done.decision.plan is not None
    assert [mark.at for mark in done.decision.plan.marks] == ["system[0]", "messages[0][0]"]


THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}


@pytest.mark.parametrize("last", [THOUGHT, user({"type": "text", "text": " "})], ids=["thinking", "blank"])
@pytest.mark.parametrize("lifetime", [{}, {"ttl": "1h"}])
async def test_b4_an_automatic_mark_sits_on_the_last_block_that_may_have_one(
    vendor: Vendor, last: dict[str, Any], lifetime: dict[str, str]
) -> None:
    turns = [user(said(1200)), {"role": "assistant", "content": [said(600)]}, last]
    if last is not THOUGHT:
        turns.insert(2, THOUGHT)
    async with vendor.client(CLAUDE, {"use": "always", "ttl": "1h"}) as client:
        top = {"extra": {"b": {"cache_control": {"type": "ephemeral", **lifetime}}}}
        done = await client.complete(messages=turns, system=SYSTEM, **top)  # type: ignore[arg-type]
    ttl = lifetime.get("ttl", "5m")
    assert marks_of(vendor.bodies[0]) == [("system[0]", "1h"), ("", ttl)]
    assert done.decision.plan is not None
    assert [(mark.at, mark.ttl) for mark in done.decision.plan.marks] == [("system[0]", "1h"), ("messages[1][0]", ttl)]
    assert done.usage is not None
    assert sum(vendor.writes[0].values()) == done.usage.written
    assert ttl in vendor.writes[0]


async def test_content_is_never_moved_and_a_plain_last_text_gets_the_automatic_mark(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE) as client:
        await client.complete(text(1200))
    assert vendor.bodies[0]["messages"] == [{"role": "user", "content": text(1200)}]
    assert vendor.bodies[0]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}


async def test_thinking_deferred_tools_and_server_blocks_get_no_mark(vendor: Vendor) -> None:
    thinking = {"type": "thinking", "thinking": text(600), "signature": "c2ln"}
    server = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    late = {**TOOL, "name": "late", "description": text(1500), "defer_loading": True}
    early = {**TOOL, "name": "early", "description": text(1500)}
    history = [user(said(1200)), {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, server, thinking]}]
    async with vendor.client(CLAUDE, Recording(head="5m")) as client:
        await client.complete(messages=history, tools=[early, late])
    assert [path for path, _ in marks_of(vendor.bodies[0])] == ["tools[0]", "messages[1].content[0]"]


# -- OpenAI


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_openai_marks_what_can_be_marked_and_nothing_else(vendor: Vendor, api: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history: list[Any] = [
        {"role": "user", "content": text(300, "a ")},
        {"role": "assistant", "content": text(300, "b ")},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": text(300, "c ")},
    ]
    async with vendor.client(GPT, api=api) as client:
        await client.complete(messages=history, system=SYSTEM, tools=[tool])
        await client.complete(messages=history[:4], system=SYSTEM, tools=[tool])  # ends with what takes no mark
    body, cut = vendor.bodies
    assert body["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
    assert "prompt_cache_key" not in body  # no tenant: one cache for all
    assert "prompt_cache_retention" not in body
    key, result = ("input", "output") if api == "responses" else ("messages", "content")
    assert marks_of(body) == [(f"{key}[0].content[0]", "30m"), (f"{key}[5].{result}[0]", "30m")]
    assert marks_of(cut)[-1] == (f"{key}[3].content[0]", "30m")
    if api == "responses":
        assert body["input"][0]["role"] == "developer"
        assert "instructions" not in body


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_one_shot_traffic_opts_out_of_the_write(vendor: Vendor, api: str) -> None:
    async with vendor.client(GPT, Recording(head=None, warm=None, end=None, opt_out=True), api=api) as client:
        done = await client.complete(text(1500), tenant="t")
    assert vendor.bodies[0]["prompt_cache_options"] == {"mode": "explicit"}
    assert "prompt_cache_key" not in vendor.bodies[0]
    assert vendor.writes == [{}]
    assert done.usage is not None
    assert done.usage.written == 0


async def test_without_a_mark_or_an_opt_out_the_model_writes_and_the_quote_says_so(vendor: Vendor) -> None:
    async with vendor.client(GPT, Recording(head=None, warm=None, end=None)) as client:
        first = await client.complete(text(1500))
        second = await client.complete(text(1500))
    assert all("prompt_cache_options" not in body for body in vendor.bodies)
    tokens = first.decision.candidates[0].tokens
    assert tokens.writes == {"30m": tokens.input}
    assert vendor.reads == [0, vendor.rules.log[0][3]]
    assert second.decision.candidates[0].tokens.cache_read == vendor.reads[1]


async def test_the_callers_own_steering_is_left_alone(vendor: Vendor) -> None:
    cases: list[dict[str, Any]] = [
        {"prompt_cache_options": {"mode": "explicit"}},
        {"prompt_cache_options": {"mode": "implicit"}},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_key": "mine"},
    ]
    async with vendor.client(GPT) as client:
        for given in cases:
            await client.complete("Hi", system=SYSTEM, extra={"b": given}, tenant="t")
    bodies = vendor.bodies
    for body, given in zip(bodies, cases, strict=True):
        assert given.items() <= body.items()
        assert not {"prompt_cache_options", "prompt_cache_retention"} <= body.keys()
    assert marks_of(bodies[0]) == []  # explicit without a mark: nothing is to be cached
    assert 0 < len(marks_of(bodies[1])) <= 3  # the implicit one takes a slot
    assert bodies[3]["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
    assert {request.status for request in vendor.server.requests} == {200}


async def test_before_5_6_a_key_and_a_retention_and_no_marks(vendor: Vendor) -> None:
    async with vendor.client(OLD, Recording(end="24h")) as client:
        done = await client.complete("Hi", system=SYSTEM)
    body = vendor.bodies[0]
    assert marks_of(body) == []
    assert body["prompt_cache_retention"] == "24h"
    assert body["prompt_cache_key"].startswith("cs-")
    assert "prompt_cache_options" not in body
    assert done.decision.plan is not None
    assert dict(done.decision.plan.options) == {k: body[k] for k in ("prompt_cache_key", "prompt_cache_retention")}
    vendor.server.reset()
    async with vendor.client("gpt-4o", Recording(end="24h")) as client:
        await client.complete("Hi", system=SYSTEM)
    assert "prompt_cache_retention" not in vendor.bodies[0]  # this model has but one


# -- keys


async def test_b28_a_routing_key_is_of_the_shared_prefix(vendor: Vendor) -> None:
    async with vendor.client(OLD) as client:
        for question in ("One?", "Two?"):
            await client.complete(question, system=SYSTEM, tenant="a")
        await client.complete("One?", system=SYSTEM, tenant="b")
        await client.complete("One?", system=text(1500, "other "), tenant="a")
        turns = [user(said(1200)), {"role": "assistant", "content": "Yes."}, user(said(10))]
        await client.complete(messages=turns[:1])
        await client.complete(messages=turns)
    keys = [body["prompt_cache_key"] for body in vendor.bodies]
    assert keys[0] == keys[1]
    assert len({keys[0], keys[2], keys[3]}) == 3
    assert keys[4] == keys[5]  # a conversation keeps its key as it grows


async def test_a_busy_prefix_gets_several_keys_and_each_conversation_keeps_one(vendor: Vendor) -> None:
    async with vendor.client(OLD) as client:
        for i in range(60):
            await client.complete("Go on.", system=SYSTEM, session_id=f"s{i % 20}")
            vendor.clock.advance(0.5)
    keys = [body["prompt_cache_key"] for body in vendor.bodies]
    assert len(set(keys[:15])) == 1
    busy = keys[-20:]
    assert len(set(busy)) == 4
    async with vendor.client(OLD) as client:
        assert client.plan("Hi", system=SYSTEM).plan is not None


async def test_d7_two_tenants_share_no_entry_one_tenant_does(vendor: Vendor) -> None:
    ledger = MemoryLedger()
    async with vendor.client(GPT, ledger=ledger) as client:
        for tenant in ("a", "b", "a"):
            done = await client.complete("Hi", system=SYSTEM, tenant=tenant, session_id=f"of {tenant}")
            assert "isolation" not in codes(done.decision)
    keys = [body["prompt_cache_key"] for body in vendor.bodies]
    assert keys[0] == keys[2] != keys[1]
    assert vendor.reads[:2] == [0, 0]
    assert vendor.reads[2] == vendor.rules.log[0][3]
    async with vendor.client(GPT, ledger=MemoryLedger()) as other:  # another application, another secret
        await other.complete("Hi", system=SYSTEM, tenant="a")
    assert vendor.bodies[-1]["prompt_cache_key"] != keys[0]
    for _ in range(2):  # one secret, two ledgers: one key
        async with vendor.client(GPT, secret="of the application") as client:
            await client.complete("Hi", system=SYSTEM, tenant="a")
    assert vendor.bodies[-1]["prompt_cache_key"] == vendor.bodies[-2]["prompt_cache_key"] not in keys
    vendor.server.reset()
    async with vendor.client(CLAUDE) as client:
        done = await client.complete("Hi", system=SYSTEM, tenant="a")
        alone = await client.complete("Hi", system=SYSTEM)
    assert "isolation" in codes(done.decision)  # Anthropic parts by workspace only, and the decision says so
    assert "isolation" not in codes(alone.decision)


# -- belief


def cache_reasons(decision: Decision) -> list[str]:
    assert decision.plan is not None
    return [f"{r.code}: {r.detail}" for r in decision.plan.reasons if r.code in ("cache_off", "isolation")]


async def test_d7_a_model_that_is_not_known_gets_its_tenants_key_and_no_promises(vendor: Vendor) -> None:
    own = {"extra": {"b": {"prompt_cache_key": "mine"}}}
    async with vendor.client("my-deployment", secret="s" * 32) as client:
        shared = await client.complete("Hi", system=SYSTEM)
        first = [await client.complete("Hi", system=SYSTEM, tenant=name) for name in ("a", "b", "a")]
        named = await client.complete("Hi", system=SYSTEM, tenant="a", **own)  # type: ignore[arg-type]
        off = await client.complete("Hi", system=SYSTEM, tenant="a", cache="off")
        held = await client.complete("Hi", system=SYSTEM, tenant="a", cache="no-write")
    keys = [body.get("prompt_cache_key") for body in vendor.bodies]
    assert keys[0] is None
    assert keys[1] == keys[3] == keys[6] != keys[2]
    assert (keys[4], keys[5]) == ("mine", None)
    assert not any("prompt_cache_options" in body for body in vendor.bodies)
    unknown = "it is not known whether that parts the cache of this model"
    assert cache_reasons(shared.decision) == []
    assert cache_reasons(first[0].decision) == [f"isolation: the tenant has a key of its own; {unknown}"]
    assert cache_reasons(named.decision) == ["isolation: it is not known whether tenants share what this server caches"]
    # Such a model may well cache by itself: nothing else is promised.
    assert cache_reasons(off.decision) == [
        'cache_off: cache="off": nothing is marked; whether it caches by itself is not known, and it is not told not to'
    ]
    assert [reason.partition(":")[0] for reason in cache_reasons(held.decision)] == ["cache_off", "isolation"]


@pytest.mark.parametrize("server", ["vllm", "sglang", "openrouter", "llama-server"])
async def test_d7_of_servers_whose_cache_is_not_known_the_decision_says_so(vendor: Vendor, server: str) -> None:
    table = {"use": "compatible", "server": server, "model": "m", "base_url": vendor.server.openai_url, "api_key": "k"}
    async with Client(backends={"b": {**table, "prices": PRICES}}) as client:
        assert cache_reasons(client.plan("Hi")) == []
        assert cache_reasons(client.plan("Hi", tenant="a")) == [
            "isolation: it is not known whether tenants share what this server caches"
        ]


async def test_b13_life_counts_from_the_start_of_the_request(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE) as client:
        async with client.stream("Hi", system=SYSTEM) as stream:
            vendor.clock.advance(60)  # a long answer
            await stream.get_final_completion()
        vendor.clock.advance(239)
        warm = client.plan("Hi", system=SYSTEM).candidates[0]
        assert (warm.belief.state, warm.belief.expires_in_s) == ("warm", 1)
        assert warm.tokens.cache_read == vendor.rules.log[0][3]
        vendor.clock.advance(2)
        cold = client.plan("Hi", system=SYSTEM).candidates[0]
        assert cold.belief.state == "stale"
        assert cold.tokens.cache_read == 0
        assert warm.quote is not None
        assert cold.quote is not None
        assert warm.quote.expected is not None
        assert cold.quote.expected is not None
        assert warm.quote.expected < cold.quote.expected
        await client.complete("Hi", system=SYSTEM)
    assert vendor.reads == [0, 0]


async def test_the_expected_price_is_what_it_will_cost(vendor: Vendor) -> None:
    """Reads, writes of both lifetimes, and what is left, each at its price."""
    history: list[Any] = [user(said(500))]
    async with vendor.client(CLAUDE, Recording(head="1h")) as client:
        for turn in range(4):
            done = await client.complete(messages=history, system=SYSTEM)
            tokens, usage = done.decision.candidates[0].tokens, done.usage
            assert usage is not None
            assert usage.cache_write is not None
            assert tokens.cache_read == pytest.approx(usage.cache_read or 0, rel=0.05)
            assert (tokens.writes or {}) == pytest.approx({k: v for k, v in usage.cache_write.items() if v}, rel=0.05)
            history += [done.message, user(said(300, f"{turn} "))]
            vendor.clock.advance(20)
    assert [sorted(w) for w in vendor.writes] == [["1h", "5m"], ["5m"], ["5m"], ["5m"]]


async def test_b26_zero_read_drops_the_belief_and_silence_only_weakens_it(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE, Recording(warm=None, end=None)) as client:
        await client.complete("One", system=SYSTEM)
        assert client.plan("Two", system=SYSTEM).candidates[0].belief.state == "warm"
        vendor.rules.entries.clear()  # evicted
        vendor.rules.minimum = 10**9  # and not written again
        vendor.clock.advance(10)
        await client.complete("Two", system=SYSTEM)
        assert client.plan("Three", system=SYSTEM).candidates[0].belief.state == "cold"
    vendor.rules.minimum = 1024
    policy = Recording()
    async with vendor.client(GPT, policy) as client:
        await client.complete("One", system=SYSTEM)
        vendor.server.counts = lambda *_: (
            lambda output: {"input_tokens": 1510, "output_tokens": output}
        )  # says nothing of caches
        vendor.clock.advance(10)
        await client.complete("One", system=SYSTEM)
        still = client.plan("One", system=SYSTEM).candidates[0].belief
        assert still.state == "warm"
        assert policy.told[-1][1].read is None
        client.plan("One", system=SYSTEM)
        warm = [p.warm for p in policy.asks[-1].prefixes if p.warm is not None]
        assert warm[-1].sure == 1.0
        await client.complete("One", system=SYSTEM)
        warm = [p.warm for p in policy.asks[-1].prefixes if p.warm is not None]
        assert warm[-1].sure == pytest.approx(0.7)


async def test_a_read_of_what_another_client_wrote_is_believed(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE) as one, vendor.client(CLAUDE) as two:
        await one.complete("Hi", system=SYSTEM)
        vendor.clock.advance(5)
        assert two.plan("Hi", system=SYSTEM).candidates[0].belief.state == "cold"
        await two.complete("Hi", system=SYSTEM)
        assert vendor.reads[-1] > 0
        decision = two.plan("Hi", system=SYSTEM)
        assert decision.explain().count("warm_prefix") == 1  # of the policy and the plan, one says it
        found = decision.candidates[0]
        assert found.belief.state == "warm"
        assert found.tokens.cache_read == vendor.reads[-1]


async def test_a_failed_request_leaves_no_belief(vendor: Vendor) -> None:
    policy = Recording()
    async with vendor.client(CLAUDE, policy) as client:
        vendor.server.counts = lambda *_: "no"
        with pytest.raises(RequestRejectedError):
            await client.complete("Hi", system=SYSTEM)
        assert client.plan("Hi", system=SYSTEM).candidates[0].belief.state == "cold"
    assert [outcome.stop for _, outcome in policy.told] == ["error"]


async def test_the_policy_is_told_of_every_request_and_how_it_ended(vendor: Vendor) -> None:
    policy = Recording()
    async with vendor.client(CLAUDE, policy) as client:
        client.plan("Hi", system=SYSTEM)
        assert policy.asks == []  # what is only explained teaches nothing
        await client.complete("Hi", system=SYSTEM, tenant="t", session_id="s", tags=["x"])
        async with client.stream("Left", system=SYSTEM):
            pass
    ask, outcome = policy.told[0]
    assert (ask.tenant, ask.session, ask.traffic, ask.input_types) == ("t", "s", ("b", "x"), ("text",))
    assert all(told is sent for (told, _), sent in zip(policy.told, policy.asks, strict=True))
    assert [p.kind for p in ask.prefixes] == ["system", "end"]
    assert (outcome.stop, outcome.read, outcome.written) == ("stop", 0, vendor.rules.log[0][3])
    assert outcome.output_tokens == 5
    assert len(policy.told) == len(policy.asks) == 2


async def test_belief_and_keys_survive_a_restart(vendor: Vendor, tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.db")
    policy = Recording()
    policy.saved = b"what it learned"
    async with vendor.client(GPT, policy, ledger=SqliteLedger(path)) as client:
        await client.complete("Hi", system=SYSTEM, tenant="t")
    vendor.clock.advance(30)
    after = Recording()
    async with vendor.client(GPT, after, ledger={"use": "sqlite", "path": path}) as client:
        assert after.saved == b"what it learned"
        offer = client.plan("Hi", system=SYSTEM, tenant="t").candidates[0]
        assert (offer.belief.state, offer.belief.expires_in_s) == ("warm", 1770)
        assert offer.tokens.cache_read == vendor.rules.log[0][3]
        await client.complete("Hi", system=SYSTEM, tenant="t")
    assert vendor.reads[-1] == vendor.rules.log[0][3]
    vendor.clock.advance(1801)
    async with vendor.client(GPT, Recording(), ledger={"use": "sqlite", "path": path}) as client:
        assert client.plan("Hi", system=SYSTEM, tenant="t").candidates[0].belief.state == "stale"


async def test_marks_that_never_engage_raise_an_alarm(vendor: Vendor) -> None:
    told: list[Any] = []
    vendor.rules.minimum = 10**9
    async with vendor.client(CLAUDE, hooks=[told.append]) as client:
        for i in range(4):
            await client.complete(f"Hi {i}", system=SYSTEM)
            vendor.clock.advance(10)
        alarms = [details for details in told if isinstance(details, MarksIgnored)]
        assert [(a.backend, a.requests, a.minimum) for a in alarms] == [("b", 3, 1024)]
        vendor.rules.minimum = 1024  # now it does: the count begins anew
        await client.complete("Hi", system=SYSTEM)
        vendor.rules.minimum = 10**9
        vendor.rules.entries.clear()
        for i in range(2):
            await client.complete(f"Ho {i}", system=SYSTEM)
    assert len([details for details in told if isinstance(details, MarksIgnored)]) == 1


async def test_too_short_is_no_alarm(vendor: Vendor) -> None:
    told: list[Any] = []
    async with vendor.client("claude-haiku-4-5", hooks=[told.append]) as client:
        for _ in range(5):
            await client.complete(messages=[user(said(300, ttl="5m"))])
    assert not [details for details in told if isinstance(details, MarksIgnored)]


# -- modes, sessions, policies


@pytest.mark.parametrize("model", [CLAUDE, GPT, OLD])
async def test_off_and_no_write(vendor: Vendor, model: str) -> None:
    async with vendor.client(model) as client:
        for mode in ("off", "no-write"):
            await client.complete("Hi", system=SYSTEM, cache=mode)
        cold = vendor.bodies[:2]
        await client.complete("Hi", system=SYSTEM)
        vendor.clock.advance(10)
        before = len(vendor.rules.entries)
        warm = await client.complete("Ho", system=SYSTEM, cache="no-write")
        await client.complete("Ho", system=SYSTEM, cache="off")
    assert all(marks_of(body) == [] for body in cold)
    if model == OLD:
        return  # it caches by itself
    if model == GPT:
        assert all(body["prompt_cache_options"] == {"mode": "explicit"} for body in cold)
    assert vendor.writes[:2] == [{}, {}]
    head = warm.decision.candidates[0].tokens.cache_read
    assert head is not None
    assert head > 1400
    assert warm.usage is not None
    assert (warm.usage.cache_read, warm.usage.written) == (vendor.reads[3], 0)
    assert vendor.reads[3] > 1400  # what is warm is read
    assert len(vendor.rules.entries) == before  # and nothing is written
    assert (vendor.reads[4], vendor.writes[4]) == (0, {})
    assert codes(warm.decision)[0] == "cache_off"


async def test_no_write_reads_in_the_tenants_own_cache(vendor: Vendor) -> None:
    async with vendor.client(GPT) as client:
        await client.complete("Hi", system=SYSTEM, tenant="t")
        vendor.clock.advance(10)
        await client.complete("Ho", system=SYSTEM, tenant="t", cache="no-write", extra={"b": {"prompt_cache_key": "mine"}})
        await client.complete("Ho", system=SYSTEM, tenant="u", cache="no-write")
    keys = [body.get("prompt_cache_key") for body in vendor.bodies]
    assert keys[0] == keys[1]
    assert keys[2] is None  # nothing is warm there, so nothing is to be read
    assert vendor.reads[1] > 1400
    assert vendor.writes[1:] == [{}, {}]


async def test_a_top_level_null_is_no_mark(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE) as client:
        await client.complete(text(1200), extra={"b": {"cache_control": None}})
    assert marks_of({**vendor.bodies[0], "cache_control": {}})[0] == ("messages[0].content[0]", "5m")
    assert vendor.bodies[0]["cache_control"] is None


async def test_b20_a_session_keeps_the_parameters_that_are_cached(vendor: Vendor) -> None:
    turns = steps(3)
    async with vendor.client("claude-opus-5-5") as client:
        shared: dict[str, Any] = {"system": SYSTEM, "tools": [TOOL], "session_id": "s"}
        await client.complete(messages=turns[:1], reasoning="high", extra={"b": {"speed": "fast"}}, **shared)
        second = await client.complete(messages=turns[:3], **shared)  # a tool's result, without a word about effort
        third = await client.complete(messages=turns[:5], reasoning="low", tool_choice="required", **shared)
        fourth = await client.complete(messages=turns, **shared)
        other = await client.complete(messages=turns[:1], session_id="t", system=SYSTEM, tools=[TOOL])
    settings = [(b.get("thinking"), b.get("output_config"), b.get("speed"), b.get("tool_choice")) for b in vendor.bodies]
    high, low = {"effort": "high"}, {"effort": "low"}
    adaptive = {"type": "adaptive"}
    assert settings[0] == settings[1] == (adaptive, high, "fast", None)
    assert settings[2] == (adaptive, low, "fast", {"type": "any"})
    assert settings[3] == (adaptive, low, "fast", None)  # a choice of tools is not carried over
    assert settings[4] == (None, None, None, None)
    assert "params_changed" not in codes(second.decision)
    assert third.decision.plan is not None
    changed = [reason.detail for reason in third.decision.plan.reasons if reason.code == "params_changed"]
    assert [text.split(";")[0] for text in changed] == ["reasoning: high became low", "tool_choice: nothing became required"]
    assert codes(fourth.decision).count("params_changed") == 1
    assert "params_changed" not in codes(other.decision)
    assert vendor.reads[1] > 0  # nothing moved
    assert third.decision.candidates[0].tokens.cache_read == 0  # the change is in the quote


class Broken(Recording):
    """A policy that does as it is told, wrongly."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self._plan = plan

    def plan(self, ask: CacheAsk) -> CachePlan:
        if isinstance(self._plan, Exception):
            raise self._plan
        made: CachePlan = self._plan
        return made


@pytest.mark.parametrize(
    "plan",
    [
        ValueError("oops"),
        None,
        CachePlan(marks=(Choice(index=9, ttl="5m"),)),
        CachePlan(marks=(Choice(index=-1, ttl="5m"),)),
        CachePlan(marks=(Choice(index=0, ttl="7m"),)),
        CachePlan(marks=(Choice(index=1, ttl="5m"), Choice(index=0, ttl="5m"))),
    ],
)
async def test_a_policy_that_fails_is_named(vendor: Vendor, plan: Any) -> None:
    async with vendor.client(CLAUDE, Broken(plan)) as client:
        with pytest.raises(ConfigError, match=r"Broken\.plan") as caught:
            await client.complete("Hi", system=SYSTEM)
    assert caught.value.key == "policies.caching"
    assert vendor.server.requests == []


async def test_a_policy_that_fails_to_learn_costs_no_answer(vendor: Vendor, caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(Recording):
        def ended(self, ask: CacheAsk, outcome: Any) -> None:
            raise RuntimeError("no")

    async with vendor.client(CLAUDE, Forgetful()) as client:
        assert (await client.complete("Hi", system=SYSTEM)).text
    assert "Forgetful" in caplog.text


async def test_many_at_once_leave_a_sound_belief(vendor: Vendor) -> None:
    async with vendor.client(CLAUDE) as client:

        async def ask(i: int) -> None:
            await client.complete(f"Hi {i}", system=SYSTEM)

        async with anyio.create_task_group() as tasks:
            for i in range(20):
                tasks.start_soon(ask, i)
        vendor.clock.advance(5)
        done = await client.complete("Hi 3", system=SYSTEM)
    assert done.decision.candidates[0].tokens.cache_read == vendor.reads[-1] > 0


async def test_prices_decide_the_multiples(vendor: Vendor) -> None:
    policy = Recording()
    prices = {**PRICES, "cache_read": "0.5", "cache_write": {"5m": "3", "1h": "4"}}
    async with vendor.client(CLAUDE, policy, prices=prices) as client:
        await client.complete("Hi", system=SYSTEM)
    terms = policy.asks[0].terms
    assert (terms.read, [(t.name, t.write) for t in terms.lifetimes]) == (0.5, [("5m", 3.0), ("1h", 4.0)])
