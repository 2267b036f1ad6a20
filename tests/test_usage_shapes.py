"""Usage objects of every vendor become disjoint buckets, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachespec.errors import InputError
from cachespec.pricing import hosted_rates
from cachespec.usage import APART, Usage
from cachespec.usage_shapes import APIS, billing_from, usage_from, usage_to


def usage(
    uncached: int | None,
    read: int | None,
    write: Mapping[str, int] | None,
    output: int | None,
    reasoning: int | None = None,
    apart: Mapping[str, int] | None = None,
) -> Usage:
    return Usage(uncached=uncached, cache_read=read, cache_write=write, output=output, reasoning=reasoning, apart=apart)


CASES: list[tuple[str, str, dict[str, Any], Usage]] = [
    (
        "chat: cached and written lie inside the prompt",
        "chat",
        {
            "prompt_tokens": 4020,
            "completion_tokens": 40,
            "total_tokens": 4060,
            "prompt_tokens_details": {"cached_tokens": 3000, "cache_write_tokens": 1000, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 30},
            "cost": 0.1,
        },
        usage(20, 3000, {"30m": 1000}, 40, 30),
    ),
    (
        "chat: a model that reports no writes",
        "chat",
        {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}},
        usage(10, 0, None, 5),
    ),
    (
        "chat: a server that reports totals alone",
        "chat",
        {"prompt_tokens": 10, "completion_tokens": 5},
        usage(10, None, None, 5),
    ),
    (
        "chat: null is not reported",
        "chat",
        {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": None, "completion_tokens_details": None},
        usage(10, None, None, 5),
    ),
    (
        "chat: writes reported as none",
        "chat",
        {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}},
        usage(7, 0, {}, 1),
    ),
    (
        "chat: DeepSeek's hits and misses",
        "chat",
        {"prompt_tokens": 100, "completion_tokens": 3, "prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36},
        usage(36, 64, None, 3),
    ),
    (
        "chat: hits and misses without the total",
        "chat",
        {"completion_tokens": 3, "prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36},
        usage(36, 64, None, 3),
    ),
    (
        "chat: a bare cached_tokens",
        "chat",
        {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 4},
        usage(5, 4, None, 3),
    ),
    (
        "chat: reasoning beside completion_tokens",
        "chat",
        {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "total_tokens": 115,
            "completion_tokens_details": {"reasoning_tokens": 100},
        },
        usage(10, None, None, 105, 100),
    ),
    (
        "chat: the same tokens read and written count once, as written",
        "chat",
        {
            "prompt_tokens": 2168,
            "completion_tokens": 100,
            "prompt_tokens_details": {"cached_tokens": 2161, "cache_write_tokens": 2161},
        },
        usage(7, 0, {"30m": 2161}, 100),
    ),
    (
        "responses: writes by lifetime",
        "responses",
        {
            "input_tokens": 5000,
            "input_tokens_details": {
                "cached_tokens": 1000,
                "cache_write_tokens": 3500,
                "cache_write_tokens_details": {"ttl_30m_tokens": 500, "ttl_12h_tokens": 3000},
            },
            "output_tokens": 54,
            "output_tokens_details": {"reasoning_tokens": 47},
            "total_tokens": 5054,
        },
        usage(500, 1000, {"30m": 500, "12h": 3000}, 54, 47),
    ),
    (
        "responses: what the split leaves over is 30m",
        "responses",
        {
            "input_tokens": 50,
            "input_tokens_details": {"cache_write_tokens": 30, "cache_write_tokens_details": {"ttl_12h_tokens": 10}},
            "output_tokens": 1,
        },
        usage(20, None, {"30m": 20, "12h": 10}, 1),
    ),
    (
        "responses: no split",
        "responses",
        {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 30}, "output_tokens": 1},
        usage(20, 0, {"30m": 30}, 1),
    ),
    (
        "messages: three counts beside each other, writes split",
        "messages",
        {
            "input_tokens": 4,
            "cache_creation_input_tokens": 379,
            "cache_read_input_tokens": 14714,
            "cache_creation": {"ephemeral_5m_input_tokens": 300, "ephemeral_1h_input_tokens": 79},
            "output_tokens": 290,
            "output_tokens_details": {"thinking_tokens": 19},
            "service_tier": "standard",
        },
        usage(4, 14714, {"5m": 300, "1h": 79}, 290, 19),
    ),
    (
        "messages: no split",
        "messages",
        {"input_tokens": 3, "cache_creation_input_tokens": 12304, "cache_read_input_tokens": 0, "output_tokens": 550},
        usage(3, 0, {"unspecified": 12304}, 550),
    ),
    (
        "messages: what the split leaves over is unspecified",
        "messages",
        {
            "input_tokens": 3,
            "cache_creation_input_tokens": 100,
            "cache_creation": {"ephemeral_1h_input_tokens": 60},
            "output_tokens": 1,
        },
        usage(3, None, {"1h": 60, "unspecified": 40}, 1),
    ),
    (
        "messages: a split without its total",
        "messages",
        {"input_tokens": 3, "cache_creation": {"ephemeral_5m_input_tokens": 60}, "output_tokens": 1},
        usage(3, None, {"5m": 60}, 1),
    ),
    (
        "messages: nothing cached",
        "messages",
        {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 1},
        usage(3, 0, {}, 1),
    ),
    (
        "messages: iterations that are no message lie outside the totals",
        "messages",
        {
            "input_tokens": 181,
            "cache_creation_input_tokens": 10,
            "cache_read_input_tokens": 500,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 8,
            "iterations": [
                {
                    "type": "compaction",
                    "input_tokens": 100,
                    "cache_read_input_tokens": 55096,
                    "cache_creation_input_tokens": 7,
                    "output_tokens": 83,
                },
                {"type": "message", "input_tokens": 181, "output_tokens": 8},
            ],
        },
        usage(281, 55596, {"5m": 10, "unspecified": 7}, 91),
    ),
    (
        "chat: searches of a server that counts its sources",
        "chat",
        {"prompt_tokens": 3, "completion_tokens": 1, "num_sources_used": 4},
        usage(3, None, None, 1, apart={"web_search": 4}),
    ),
    (
        "responses: searches are counted beside the usage",
        "responses",
        {"input_tokens": 3, "output_tokens": 1, "tool_usage": {"web_search": {"num_requests": 2}, "image_gen": None}},
        usage(3, None, None, 1, apart={"web_search": 2}),
    ),
    (
        "messages: searches are counted beside the tokens",
        "messages",
        {"input_tokens": 3, "output_tokens": 1, "server_tool_use": {"web_search_requests": 2, "web_fetch_requests": 1}},
        usage(3, None, None, 1, apart={"web_search": 2}),
    ),
    (
        "chat: what is no text lies inside the totals",
        "chat",
        {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 60, "image_tokens": 30, "text_tokens": 10},
            "completion_tokens_details": {"audio_tokens": 40},
        },
        usage(100, 0, None, 50, apart={"input_audio": 60, "input_image": 30, "output_audio": 40}),
    ),
    (
        "gemini: what is no text, by its modality",
        "gemini",
        {
            "promptTokenCount": 100,
            "candidatesTokenCount": 50,
            "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 40}, {"modality": "DOCUMENT", "tokenCount": 60}],
            "toolUsePromptTokensDetails": [{"modality": "IMAGE", "tokenCount": 5}],
            "candidatesTokensDetails": [{"modality": "VIDEO", "tokenCount": 50}],
        },
        usage(100, None, None, 50, apart={"input_image": 65, "output_video": 50}),
    ),
    (
        "converse: three counts beside each other, writes by cacheDetails",
        "converse",
        {
            "inputTokens": 3,
            "outputTokens": 61,
            "totalTokens": 2435,
            "cacheReadInputTokens": 2074,
            "cacheWriteInputTokens": 297,
            "cacheDetails": [{"ttl": "5m", "inputTokens": 200}, {"ttl": "1h", "inputTokens": 97}],
            "serverToolUsage": {},
        },
        usage(3, 2074, {"5m": 200, "1h": 97}, 61),
    ),
    (
        "converse: no details",
        "converse",
        {"inputTokens": 2326, "outputTokens": 37, "cacheReadInputTokens": 0, "cacheWriteInputTokens": 1505},
        usage(2326, 0, {"unspecified": 1505}, 37),
    ),
    (
        "gemini: cached lies inside the prompt, thoughts beside the candidates",
        "gemini",
        {
            "promptTokenCount": 3520,
            "cachedContentTokenCount": 3512,
            "candidatesTokenCount": 2,
            "thoughtsTokenCount": 51,
            "totalTokenCount": 3573,
            "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 3520}],
        },
        usage(8, 3512, None, 53, 51),
    ),
    (
        "gemini: tool prompts beside the prompt; a miss is not reported",
        "gemini",
        {"promptTokenCount": 10, "toolUsePromptTokenCount": 5, "candidatesTokenCount": 2},
        usage(15, None, None, 2),
    ),
    (
        "gemini: zero counts are left out",
        "gemini",
        {"promptTokenCount": 10, "thoughtsTokenCount": 4, "totalTokenCount": 14},
        usage(10, None, None, 4, 4),
    ),
    (
        "cohere: billed units",
        "cohere",
        {"billed_units": {"input_tokens": 2406.0, "output_tokens": 2}, "tokens": {"input_tokens": 2935}, "cached_tokens": 2928},
        usage(2406, None, None, 2),
    ),
    ("cohere: nothing billed is reported", "cohere", {"tokens": {"input_tokens": 5, "output_tokens": 1}}, usage(*[None] * 4)),
    ("messages: output alone", "messages", {"output_tokens": 5}, usage(None, None, None, 5)),
]


@pytest.mark.parametrize(("api", "payload", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_vendors_object_becomes_disjoint_buckets(api: str, payload: dict[str, Any], expected: Usage) -> None:
    assert usage_from(api, payload) == expected


@pytest.mark.parametrize("api", APIS)
def test_what_nobody_reported_is_none_and_never_zero(api: str) -> None:
    nothing = usage_from(api, {})
    assert nothing == usage(None, None, None, None)
    assert nothing.input_tokens is None
    assert usage_to(api, nothing) == {}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"prompt_tokens": -1, "completion_tokens": 1}, "prompt_tokens"),
    ("chat", {"prompt_tokens": 1.5, "completion_tokens": 1}, "prompt_tokens"),
    ("chat", {"prompt_tokens": "12", "completion_tokens": 1}, "prompt_tokens"),
    ("chat", {"prompt_tokens": True, "completion_tokens": 1}, "prompt_tokens"),
    ("chat", {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 11}}, "prompt_tokens_details.cached_tokens"),
    ("chat", {"prompt_tokens": 10, "prompt_cache_hit_tokens": 11}, "prompt_cache_hit_tokens"),
    ("chat", {"prompt_tokens": 10, "prompt_tokens_details": {"cache_write_tokens": 11}}, "prompt_tokens_details"),
    ("chat", {"prompt_tokens_details": {"cached_tokens": 3}}, "prompt_tokens"),
    ("chat", {"prompt_tokens": 10, "prompt_tokens_details": [1]}, "prompt_tokens_details"),
    (
        "chat",
        {"completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 2}},
        "completion_tokens_details.reasoning_tokens",
    ),
    ("chat", {"completion_tokens_details": {"reasoning_tokens": 2}}, "completion_tokens"),
    (
        "responses",
        {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 3}},
        "input_tokens_details",
    ),
    (
        "responses",
        {
            "input_tokens": 5,
            "input_tokens_details": {"cache_write_tokens": 1, "cache_write_tokens_details": {"ttl_12h_tokens": 2}},
        },
        "input_tokens_details.cache_write_tokens_details",
    ),
    ("messages", {"cache_read_input_tokens": 3, "output_tokens": 1}, "input_tokens"),
    (
        "messages",
        {"input_tokens": 1, "cache_creation_input_tokens": 5, "cache_creation": {"ephemeral_1h_input_tokens": 6}},
        "cache_creation",
    ),
    (
        "messages",
        {"output_tokens": 1, "output_tokens_details": {"thinking_tokens": 2}},
        "output_tokens_details.thinking_tokens",
    ),
    (
        "converse",
        {"inputTokens": 1, "cacheWriteInputTokens": 1, "cacheDetails": [{"ttl": "1h", "inputTokens": 2}]},
        "cacheDetails",
    ),
    ("converse", {"cacheReadInputTokens": 1}, "inputTokens"),
    ("gemini", {"promptTokenCount": 1, "cachedContentTokenCount": 2}, "cachedContentTokenCount"),
    ("gemini", {"toolUsePromptTokenCount": 2}, "promptTokenCount"),
    ("cohere", {"billed_units": {"input_tokens": 1.5}}, "billed_units.input_tokens"),
    ("cohere", {"billed_units": 3}, "billed_units"),
    ("chat", {"prompt_tokens": 10**25, "completion_tokens": 1}, "prompt_tokens"),
    ("chat", {"prompt_tokens": 10**5000, "completion_tokens": 1}, "prompt_tokens"),
    ("cohere", {"billed_units": {"input_tokens": 1e300}}, "billed_units.input_tokens"),
    ("gemini", {"promptTokenCount": 2**53 - 1, "toolUsePromptTokenCount": 1}, "uncached"),
    ("nonsense", {}, "api"),
]


@pytest.mark.parametrize(("api", "payload", "field"), BAD, ids=[f"{b[0]}-{b[2]}-{i}" for i, b in enumerate(BAD)])
def test_a_bad_object_is_an_input_error_that_names_the_field(api: str, payload: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        usage_from(api, payload)
    assert caught.value.field == field


CHAT = {"prompt_tokens": 100, "completion_tokens": 5}
MESSAGES = {"input_tokens": 100, "output_tokens": 5}
ODD_ASIDES: list[tuple[str, dict[str, Any], Usage]] = [
    ("chat", {**CHAT, "num_search_queries": 1.5}, usage(100, None, None, 5)),
    (
        "chat",
        {**CHAT, "prompt_tokens_details": {"image_tokens": -1, "video_tokens": 3, "cached_tokens": 40}},
        usage(60, 40, None, 5, apart={"input_video": 3}),
    ),
    ("chat", {**CHAT, "completion_tokens_details": {"audio_tokens": "2"}}, usage(100, None, None, 5)),
    ("responses", {**MESSAGES, "tool_usage": "none"}, usage(100, None, None, 5)),
    ("responses", {**MESSAGES, "tool_usage": {"web_search": 2}}, usage(100, None, None, 5)),
    (
        "gemini",
        {"promptTokenCount": 1, "candidatesTokenCount": 2, "promptTokensDetails": [{"modality": 1}]},
        usage(1, None, None, 2),
    ),
    ("gemini", {"promptTokenCount": 1, "candidatesTokenCount": 2, "promptTokensDetails": 7}, usage(1, None, None, 2)),
    ("messages", {**MESSAGES, "server_tool_use": {"web_search_requests": "2"}}, usage(100, None, None, 5)),
    ("messages", {**MESSAGES, "server_tool_use": []}, usage(100, None, None, 5)),
    ("messages", {**MESSAGES, "iterations": {"type": "message"}}, usage(100, None, None, 5)),
    ("messages", {**MESSAGES, "iterations": [7]}, usage(100, None, None, 5)),
    ("messages", {**MESSAGES, "iterations": [{"type": ["message"], **MESSAGES}]}, usage(100, None, None, 5)),
    ("messages", {**MESSAGES, "iterations": [{"type": "compaction", "input_tokens": -1}]}, usage(100, None, None, 5)),
    ("messages", {**MESSAGES, "iterations": [{"type": "compaction", "input_tokens": 9}]}, usage(109, None, None, 5)),
    (
        "messages",
        {**MESSAGES, "iterations": [{"type": "message", "model": {"id": "x"}, **MESSAGES}]},
        usage(100, None, None, 5),
    ),
    (
        "messages",
        {**MESSAGES, "iterations": [{"type": "compaction", "model": 1, **MESSAGES}]},
        usage(200, None, None, 10),
    ),
]


@pytest.mark.parametrize(("api", "payload", "expected"), ODD_ASIDES)
def test_what_stands_beside_the_totals_and_makes_no_sense_leaves_an_estimate(
    api: str, payload: dict[str, Any], expected: Usage
) -> None:
    """The totals are what they are; only what may be billed besides is not known."""
    found = usage_from(api, payload)
    assert found == expected
    assert found.unread
    rates = hosted_rates(None, "m", prices={"input": "1", "cache_read": "1", "output": "1"})
    assert rates is not None
    cost = rates.cost(found)
    assert cost.estimated
    assert cost.amount == rates.cost(expected).amount
    assert not rates.cost(expected).estimated
    assert not usage_from(api, usage_to(api, expected)).unread


def test_a_count_that_has_not_come_is_no_odd_one() -> None:
    """And what else was made for the request does not stand for the answer's own output."""
    rates = hosted_rates(None, "m", prices={"input": "1", "cache_read": "1", "output": "1"})
    assert rates is not None
    for entries in (
        [],
        [{"type": "compaction", **MESSAGES}],
        [{"type": "compaction", "input_tokens": 9}, {"type": "x", **MESSAGES}],
    ):
        found = usage_from("messages", {"input_tokens": 100, "iterations": entries})
        assert found.unread == (len(entries) == 2)
        assert rates.cost(found).amount is None


COUNT = st.integers(0, 10**9)
MAYBE = st.none() | COUNT


def writes(*ttls: str) -> st.SearchStrategy[dict[str, int] | None]:
    """Not reported, none, or some of these lifetimes."""
    return st.none() | st.dictionaries(st.sampled_from(ttls), st.integers(1, 10**9))


WHAT_A_SHAPE_CAN_SAY: dict[str, tuple[st.SearchStrategy[int | None], st.SearchStrategy[dict[str, int] | None], bool]] = {
    # reads, writes, reasoning
    "chat": (MAYBE, writes("30m"), True),
    "responses": (MAYBE, writes("30m", "12h"), True),
    "messages": (MAYBE, writes("5m", "1h", "unspecified"), True),
    "converse": (MAYBE, writes("5m", "1h", "unspecified"), False),
    "gemini": (MAYBE, st.none(), True),
    "cohere": (st.none(), st.none(), False),
}


MEDIA_APART = tuple(name for name in APART if name != "web_search")
APART_OF = {"chat": APART, "gemini": MEDIA_APART, "messages": ("web_search",), "responses": ("web_search",)}


@pytest.mark.parametrize("api", APIS)
@given(data=st.data())
def test_every_usage_that_a_shape_can_say_survives_the_round_trip(api: str, data: st.DataObject) -> None:
    reads, write, reasons = WHAT_A_SHAPE_CAN_SAY[api]
    output = data.draw(MAYBE)
    reasoning = data.draw(st.none() | st.integers(0, output)) if reasons and output is not None else None
    names = [name for name in APART_OF.get(api, ()) if output is not None or not name.startswith("output")]
    apart = data.draw(st.dictionaries(st.sampled_from(names), st.integers(1, 10**9))) if names else None
    given_usage = usage(data.draw(COUNT), data.draw(reads), data.draw(write), output, reasoning, apart or None)
    wire = usage_to(api, given_usage)
    assert usage_from(api, json.loads(json.dumps(wire))) == given_usage


@given(
    reads=MAYBE,
    write=writes("5m", "30m", "1h", "12h", "kv", "unspecified"),
    output=COUNT,
    api=st.sampled_from(APIS),
    uncached=COUNT,
)
def test_totals_survive_even_what_a_shape_cannot_say(
    reads: int | None, write: dict[str, int] | None, output: int, api: str, uncached: int
) -> None:
    given_usage = usage(uncached, reads, write, output)
    back = usage_from(api, usage_to(api, given_usage))
    assert back.input_tokens == given_usage.input_tokens
    assert back.output == output


def test_a_consumer_cannot_count_cache_tokens_twice() -> None:
    """A17: what is inside `input_tokens` is named, the same for every vendor."""
    openai = usage_from(
        "chat",
        {
            "prompt_tokens": 130_213,
            "completion_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 128_955, "cache_write_tokens": 1_253},
        },
    )
    anthropic = usage_from(
        "messages",
        {"input_tokens": 5, "cache_read_input_tokens": 128_955, "cache_creation_input_tokens": 1_253, "output_tokens": 9},
    )
    bedrock = usage_from(
        "converse", {"inputTokens": 5, "cacheReadInputTokens": 128_955, "cacheWriteInputTokens": 1_253, "outputTokens": 9}
    )
    for converted in (openai, anthropic, bedrock):
        assert (converted.input_tokens, converted.uncached, converted.cache_read, converted.written) == (
            130_213,
            5,
            128_955,
            1_253,
        )


def test_billing_facts_of_a_usage_object() -> None:
    assert billing_from("messages", {"service_tier": "batch", "speed": "fast", "inference_geo": None}) == {
        "service_tier": "batch",
        "speed": "fast",
    }
    assert billing_from("gemini", {"serviceTier": "flex"}) == {"service_tier": "flex"}
    assert billing_from("chat", {"service_tier": "flex"}) == {}
    with pytest.raises(InputError, match="speed"):
        billing_from("messages", {"speed": 1})


def api_of(record: Mapping[str, Any]) -> str:
    uri = record["uri"]
    parts = {"/messages": "messages", "/invoke": "messages", "/responses": "responses", "/completions": "chat"}
    parts |= {"/converse": "converse", ":generateContent": "gemini", "api.cohere.com": "cohere"}
    return next(api for part, api in parts.items() if part in uri)


def billed_input(api: str, payload: Mapping[str, Any]) -> int:
    """What the vendor bills as input, straight from its object."""
    if api == "messages":
        rows = [payload, *(e for e in payload.get("iterations", ()) if e["type"] != "message")]
        keys = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(row.get(key, 0) for row in rows for key in keys)
    if api == "converse":
        return sum(payload.get(key, 0) for key in ("inputTokens", "cacheReadInputTokens", "cacheWriteInputTokens"))
    path = {"chat": ["prompt_tokens"], "responses": ["input_tokens"], "gemini": ["promptTokenCount"]}
    value: Any = payload
    for key in path.get(api, ["billed_units", "input_tokens"]):
        value = value[key]
    assert isinstance(value, int)
    return value


@pytest.mark.shared
def test_every_recorded_object_adds_up_to_what_is_billed(shared_data: Path) -> None:
    lines = (shared_data / "usage" / "recorded_usage.jsonl").read_text(encoding="utf-8").splitlines()
    seen = set()
    for line in lines:
        record = json.loads(line)
        api = api_of(record)
        seen.add(api)
        converted = usage_from(api, record["usage"])
        assert converted.uncached is not None
        parts = converted.uncached + (converted.cache_read or 0) + sum((converted.cache_write or {}).values())
        assert parts == converted.input_tokens == billed_input(api, record["usage"]), record
        assert usage_from(api, usage_to(api, converted)) == converted
    assert seen == set(APIS)
