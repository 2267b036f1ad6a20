"""What enters a vendor's cache key, and what does not: reads on the wire, and what the decision expects of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.caching_support import Vendor, text

from cachespec.events import Completion

pytestmark = pytest.mark.anyio

TOOL = {"name": "look", "description": text(3000), "input_schema": {"type": "object", "properties": {}}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
UPLOADED = {"type": "image", "source": {"type": "file", "file_id": "f1"}}
OPENAI = [("gpt-5.6-terra", "responses"), ("gpt-5.6-terra", "chat"), ("gpt-5", "responses"), ("gpt-5", "chat")]


def turns(count: int) -> list[dict[str, Any]]:
    said = ("user", "assistant")
    return [{"role": said[i % 2], "content": f"{i} {text(60)}"} for i in range(2 * count + 1)]


def expected(done: Completion) -> int | None:
    found = done.decision.candidates[0].tokens
    return None if found is None else found.cache_read


def changes(done: Completion) -> list[str]:
    plan = done.decision.plan
    return [] if plan is None else [reason.detail for reason in plan.reasons if reason.code == "params_changed"]


async def talk(vendor: Vendor, model: str, api: str | None, long: int, *asks: dict[str, Any]) -> list[Completion]:
    """Turns of one conversation in one session, the first of them after `long` others."""
    history, done = turns(long), []
    async with vendor.client(model, None, api=api) as client:
        for more in asks:
            shared: dict[str, Any] = {"system": text(6000), "tools": [TOOL], "session_id": "s", "tenant": "t"}
            last = more.pop("last", {"role": "user", "content": "And?"})
            done.append(await client.complete(messages=[*history, last], max_output_tokens=20, **shared, **more))
            history += [last, {"role": "assistant", "content": "Yes."}]
            vendor.clock.advance(20)
    return done


@pytest.mark.parametrize(("model", "api"), OPENAI)
async def test_the_choice_of_a_tool_is_nothing_to_openais_caches(vendor: Vendor, model: str, api: str) -> None:
    choices: list[dict[str, Any]] = [{}, {}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": "required"}]
    done = await talk(vendor, model, api, 20, *choices)
    assert len({body.get("prompt_cache_key") for body in vendor.bodies}) == 1
    for one, read in list(zip(done, vendor.reads, strict=True))[1:]:
        assert read > 9_000
        assert abs((expected(one) or 0) - read) < 0.05 * read
        assert changes(one) == []


@pytest.mark.parametrize("model", ["gpt-5.6-terra", "gpt-5"])
async def test_whether_calls_may_be_parallel_counts_with_openai(vendor: Vendor, model: str) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    done = await talk(vendor, model, "responses", 1, {}, {}, {"tool_choice": choice})
    assert vendor.reads[1] > 9_000
    assert (vendor.reads[2], expected(done[2])) == (0, 0)
    assert [detail.partition(":")[0] for detail in changes(done[2])] == ["parallel_tool_calls"]


@pytest.mark.parametrize("long", [1, 30])
@pytest.mark.parametrize(
    "last",
    [
        {"tool_choice": "none"},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"last": {"role": "user", "content": [{"type": "text", "text": "And this?"}, PICTURE]}},
        {"last": {"role": "user", "content": [{"type": "text", "text": "And this?"}, UPLOADED]}},
    ],
    ids=["choice", "parallel", "image", "uploaded image"],
)
async def test_with_anthropic_tools_and_system_are_read_and_no_message(vendor: Vendor, long: int, last: dict[str, Any]) -> None:
    done = await talk(vendor, "claude-sonnet-5", None, long, {}, {}, {}, dict(last))
    head = vendor.reads[-1]
    assert 8_500 < head < 9_100 < min(vendor.reads[1:-1])
    assert abs((expected(done[-1]) or 0) - head) < 0.05 * head
    if "tool_choice" in last:
        assert changes(done[-1])
        assert {detail.partition("; ")[2] for detail in changes(done[-1])} == {
            "only tools and system are read of what was cached before"
        }
    again = await talk(vendor, "claude-sonnet-5", None, long, {})
    assert vendor.reads[-1] > head  # what was cached without is there still
    assert again[0].usage is not None


@pytest.mark.parametrize(
    ("model", "api", "fields"),
    [
        ("claude-sonnet-5", None, [{"diagnostics": {"previous_message_id": f"m{i}"}} for i in range(4)]),
        ("claude-sonnet-5", None, [{"metadata": {"user_id": f"u{i}"}} for i in range(4)]),
        ("gpt-5.6-terra", "responses", [{"include": ["x"] * i, "store": bool(i % 2), "truncation": "auto"} for i in range(4)]),
        ("gpt-5.6-terra", "chat", [{"prediction": {"type": "content", "content": f"x{i}"}} for i in range(4)]),
        ("gpt-5.6-terra", "chat", [{"logprobs": bool(i % 2), "frequency_penalty": i / 10, "seed": i} for i in range(4)]),
    ],
)
async def test_what_no_model_reads_starts_no_new_belief(
    vendor: Vendor, model: str, api: str | None, fields: list[dict[str, Any]]
) -> None:
    done = await talk(vendor, model, api, 20, *({"extra": {"b": some}} for some in fields))
    for one, read in list(zip(done, vendor.reads, strict=True))[1:]:
        assert read > 9_000
        assert abs((expected(one) or 0) - read) < 0.05 * read


async def test_what_a_model_may_read_does(vendor: Vendor) -> None:
    done = await talk(vendor, "claude-sonnet-5", None, 1, {}, {}, {"extra": {"b": {"speed": "fast"}}})
    assert (vendor.reads[2], expected(done[2])) == (0, 0)
    assert vendor.reads[1] > 9_000


@pytest.mark.parametrize("said", [{"text": {"verbosity": "low"}}, {"prompt_cache_key": "mine"}], ids=str)
async def test_b20_what_is_in_openais_key_stays_as_it_was_said_once(vendor: Vendor, said: dict[str, Any]) -> None:
    done = await talk(vendor, "gpt-5.6-terra", "responses", 1, {"extra": {"b": said}}, {}, {})
    assert [{key: body[key] for key in said} for body in vendor.bodies] == [said] * 3
    assert min(vendor.reads[1:]) > 9_000
    assert [changes(one) for one in done] == [[], [], []]


async def test_the_form_of_one_answer_is_not_asked_of_the_next(vendor: Vendor) -> None:
    own = {"text": {"format": {"type": "json_object"}, "verbosity": "low"}, "parallel_tool_calls": False}
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    asks: list[dict[str, Any]] = [{"extra": {"b": own}}, {"response_format": schema}, {}]
    done = await talk(vendor, "gpt-5.6-terra", "responses", 1, *asks)
    kinds = [(body["text"].get("format") or {}).get("type") for body in vendor.bodies]
    assert kinds == ["json_object", "json_schema", None]
    assert [body["text"]["verbosity"] for body in vendor.bodies] == ["low"] * 3
    assert [body.get("parallel_tool_calls") for body in vendor.bodies] == [False, None, None]
    assert changes(done[1])


async def test_what_a_change_leaves_is_told_as_it_is_believed(vendor: Vendor) -> None:
    choices = ["required", "auto", "required", "auto"]
    done = await talk(vendor, "claude-sonnet-5", None, 30, *({"tool_choice": choice} for choice in choices))
    told = [[detail.partition("; ")[2] for detail in changes(one)] for one in done]
    assert told[1] == ["only tools and system are read of what was cached before"]
    for one, read, details in list(zip(done, vendor.reads, told, strict=True))[2:]:
        assert read > 9_500  # what was cached two turns ago, with this choice
        assert abs((expected(one) or 0) - read) < 0.05 * read
        assert details == [f"about {expected(one)} tokens are read of what was cached with it as it is now"]
