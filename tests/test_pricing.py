"""Prices: exact, dated, never another model's, and the same as the table's own arithmetic."""

from __future__ import annotations

import decimal
import json
import math
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachespec._rates import INPUT, OUTPUT, REASONING, REQUEST, PriceList, TokenRates
from cachespec.errors import ConfigError, InputError
from cachespec.pricing import Rates, hosted_rates, local_rates
from cachespec.usage import Cost, Usage, money_text
from cachespec.usage_shapes import usage_from

NOVEMBER = datetime(2026, 11, 29, 12, tzinfo=UTC)
PLAIN = Usage(uncached=1000, cache_read=0, cache_write={}, output=100)


def known(provider: str, model: str) -> Rates:
    rates = hosted_rates(provider, model)
    assert rates is not None
    return rates


def own(**prices: Any) -> Rates:
    rates = hosted_rates("anthropic", "some-model", prices=prices)
    assert rates is not None
    return rates


def dollars(amount: str, *, estimated: bool, source: str = "override", date: str | None = None) -> Cost:
    return Cost(amount=Decimal(amount), estimated=estimated, source=source, price_date=date)


# -- cases from public reports ------------------------------------------------------------------------------------------


def test_a1_cached_tokens_are_not_charged_at_both_rates() -> None:
    usage = usage_from(
        "chat", {"prompt_tokens": 2006, "completion_tokens": 300, "prompt_tokens_details": {"cached_tokens": 1920}}
    )
    assert own(input="2.50", cache_read="1.25", output="10").cost(usage) == dollars("0.005615", estimated=False)


@pytest.mark.parametrize(
    ("input_tokens", "written", "output", "prices", "amount"),
    [
        pytest.param(3, 12_304, 550, ("3", "3.75", "15"), "0.054399", id="A2"),
        pytest.param(6, 159_217, 2_745, ("5", "6.25", "25"), "1.06376125", id="A3"),
    ],
)
def test_a2_a3_writes_are_charged_once(
    input_tokens: int, written: int, output: int, prices: tuple[str, str, str], amount: str
) -> None:
    payload = {"input_tokens": input_tokens, "cache_creation_input_tokens": written, "output_tokens": output}
    rates = own(input=prices[0], cache_write={"5m": prices[1]}, output=prices[2])
    assert rates.cost(usage_from("messages", payload)) == dollars(amount, estimated=True)  # its lifetime was not said
    payload["cache_creation"] = {"ephemeral_5m_input_tokens": written}  # type: ignore[assignment]
    assert rates.cost(usage_from("messages", payload)) == dollars(amount, estimated=False)


def test_a6_hour_long_writes_have_their_own_price() -> None:
    rates = own(input="3", cache_write={"5m": "3.75", "1h": "6"}, output="15")
    payload: dict[str, Any] = {"input_tokens": 0, "cache_creation_input_tokens": 10_000, "output_tokens": 0}
    split = {"ephemeral_5m_input_tokens": 2_000, "ephemeral_1h_input_tokens": 8_000}
    assert rates.cost(usage_from("messages", payload | {"cache_creation": split})) == dollars("0.0555", estimated=False)
    assert rates.cost(usage_from("messages", payload)) == dollars("0.0375", estimated=True)


# -- never another model's price ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("openai", "gpt-6.2-astra"),
        ("openai", "gpt-6.2-sol"),
        ("openai", "gpt-6-sol-mini"),
        ("anthropic", "claude-sonnet-6"),
        ("anthropic", "claude-opus-4-55"),
        ("anthropic", "claude-haiku-4-5-turbo"),
        ("google", "gemini-3.7-flash-lite"),
        ("google", "gemini-1.5-flash-8b"),
        ("deepseek", "deepseek-r1-distill-qwen-7b"),
        ("aws", "us.anthropic.claude-opus-4-59-v1:0"),
        ("openai", ""),
        ("nobody", "gpt-6-sol"),
        (None, "gpt-6-sol"),
    ],
)
def test_an_unknown_model_has_no_price(provider: str | None, model: str) -> None:
    assert hosted_rates(provider, model) is None


@pytest.mark.parametrize(
    ("provider", "model", "same_as"),
    [
        ("openai", "gpt-6-sol-2026-09-01", "gpt-6-sol"),
        ("openai", "gpt-5.2-20251211", "gpt-5.2"),
        ("openai", "GPT-6-Sol", "gpt-6-sol"),
        ("openai", "gpt-4o-audio-preview-2024-12-17", "gpt-4o-audio-preview"),
        ("openai", "ft:gpt-4o-2024-08-06:acme::x1", "ft:gpt-4o-2024-08-06"),
        ("anthropic", "claude-haiku-4-5-20251001", "claude-haiku-4-5"),
        ("anthropic", "claude-sonnet-5-5@20260901", "claude-sonnet-5-5"),
        ("google", "gemini-2.5-pro-preview-05-06", "gemini-2.5-pro"),
        ("google", "gemini-3.5-flash-001", "gemini-3.5-flash"),
        ("bedrock", "us.amazon.nova-lite-v1:0", "amazon.nova-lite-v1:0"),
    ],
)
def test_a_release_of_a_known_model_has_its_price(provider: str, model: str, same_as: str) -> None:
    assert known(provider, model) == known(provider, same_as)


def test_the_vendor_is_found_by_its_id_or_its_url() -> None:
    by_url = hosted_rates(None, "gpt-6-sol", base_url="https://api.openai.com/v1")
    assert by_url == known("openai", "gpt-6-sol")
    assert hosted_rates("my-proxy", "gpt-6-sol", base_url="https://api.openai.com/v1") == by_url
    assert hosted_rates(None, "gpt-6-sol", base_url="http://127.0.0.1:8000/v1") is None


@pytest.mark.parametrize(
    ("url", "model", "found"),
    [
        ("https://api.openai.com", "gpt-6-sol", True),
        ("https://api.openai.com:443/v1", "gpt-6-sol", True),
        ("https://api.openai.com.evil.example/v1", "gpt-6-sol", False),
        ("https://api.openai.company/v1", "gpt-6-sol", False),
        ("https://gateway.example.com/api.openai.com/v1", "gpt-6-sol", False),
        ("https://api.anthropic.com.evil.example", "claude-sonnet-5-5", False),
        ("https://x.googleapis.com/v1", "gemini-2.5-pro", True),
        ("https://evil.example/x.googleapis.com/v1", "gemini-2.5-pro", False),
        ("https://mine.openai.azure.com/openai/v1", "gpt-4o", True),
        ("https://mine.openai.azure.com.evil.example/openai/v1", "gpt-4o", False),
        ("https://evil.example/mine.openai.azure.com/v1", "gpt-4o", False),
        ("https://api.moonshot.ai/v1", "kimi-k2.5", True),
        ("https://api.moonshot.evil.example/v1", "kimi-k2.5", False),
        ("https://router.huggingface.co/cerebras/v1", "openai/gpt-oss-120b", True),
    ],
)
def test_a_vendors_address_is_all_of_the_host(url: str, model: str, found: bool) -> None:
    """What only begins like a vendor's host, or has it in its path, is somebody else's, who may bill what they like."""
    assert (hosted_rates(None, model, base_url=url) is not None) is found


def test_every_model_of_the_table_is_found_by_its_own_name() -> None:
    from genai_prices.data_snapshot import get_snapshot

    from cachespec._price_table import _find

    snapshot = get_snapshot()
    for vendor in snapshot.providers:
        for model in vendor.models:
            try:
                theirs = snapshot.find_provider_model(model.id, None, vendor.id, None)[1]
            except LookupError:
                continue
            if theirs is model:
                found = _find(model.id, vendor.id, None)
                assert found is not None, (vendor.id, model.id)
                assert found[1] is model


# -- the same as the table's own arithmetic -----------------------------------------------------------------------------

MOMENTS = [
    NOVEMBER,
    datetime(2025, 1, 1, tzinfo=UTC),
    datetime(2026, 11, 27, 2, 30, tzinfo=UTC),
    datetime(2027, 2, 1, tzinfo=UTC),
]
CONTEXTS: list[dict[str, str]] = [
    {},
    {"service_tier": "default"},
    {"service_tier": "flex"},
    {"service_tier": "priority"},
    {"service_tier": "fast"},
    {"processing": "batch"},
    {"speed": "fast"},
]
SIZES = [(0, 0, 0, 0, 0), (7, 100, 20, 30, 50), (150_000, 0, 0, 0, 9), (1, 199_000, 900, 99, 10_000), (900_000, 1, 1, 1, 1)]


@pytest.mark.parametrize("provider", ["openai", "anthropic", "google", "deepseek", "groq", "aws", "openrouter", "perplexity"])
def test_our_cost_is_the_tables_cost_for_every_model(provider: str) -> None:
    from genai_prices import Usage as TheirUsage
    from genai_prices.data_snapshot import get_snapshot

    snapshot, priced = get_snapshot(), 0
    vendor = next(p for p in snapshot.providers if p.id == provider)
    models = vendor.models[::10] if len(vendor.models) > 500 else vendor.models
    for model in models:
        rates = hosted_rates(provider, model.id)
        theirs = vendor.find_model(model.id, all_providers=snapshot.providers)
        if not isinstance(rates, TokenRates):
            continue
        assert theirs is not None
        priced += 1
        silent = any(OUTPUT not in p.prices or INPUT not in p.prices for p in rates.lists)
        for at in MOMENTS:
            for context in CONTEXTS:
                for uncached, read, short, long, output in SIZES:
                    output = 0 if silent else output
                    usage = Usage(uncached=uncached, cache_read=read, cache_write={"5m": short, "1h": long}, output=output)
                    expected = theirs.calc_price(
                        TheirUsage(
                            input_tokens=uncached + read + short + long,
                            cache_read_tokens=read,
                            cache_write_tokens=short + long,
                            cache_write_5m_tokens=short,
                            cache_write_1h_tokens=long,
                            output_tokens=output,
                        ),
                        vendor,
                        genai_request_timestamp=at,
                        price_context=context,
                    )
                    assert rates.cost(usage, at=at, billing=context).amount == expected.total_price, (
                        model.id,
                        at,
                        context,
                        usage,
                    )
    assert priced > (3 if provider == "deepseek" else 10)


@pytest.mark.parametrize(
    ("provider", "model", "api", "flavor", "payload"),
    [
        (
            *("anthropic", "claude-opus-5-5", "messages", "default"),
            {
                "input_tokens": 1000,
                "cache_read_input_tokens": 10,
                "cache_creation_input_tokens": 0,
                "output_tokens": 100,
                "server_tool_use": {"web_search_requests": 5, "web_fetch_requests": 2},
            },
        ),
        (
            *("perplexity", "sonar-deep-research", "chat", "default"),
            {"prompt_tokens": 33, "completion_tokens": 71, "num_search_queries": 18, "total_tokens": 104},
        ),
        (
            *("openai", "gpt-audio", "chat", "chat"),
            {
                "prompt_tokens": 1000,
                "completion_tokens": 500,
                "prompt_tokens_details": {"audio_tokens": 900, "cached_tokens": 0},
                "completion_tokens_details": {"audio_tokens": 480, "reasoning_tokens": 0},
            },
        ),
        (
            *("google", "gemini-2.5-flash", "gemini", "default"),
            {
                "promptTokenCount": 1000,
                "candidatesTokenCount": 50,
                "thoughtsTokenCount": 7,
                "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 100}, {"modality": "AUDIO", "tokenCount": 900}],
            },
        ),
        (
            *("google", "gemini-2.5-flash-image", "gemini", "default"),
            {
                "promptTokenCount": 300,
                "candidatesTokenCount": 1300,
                "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 42}, {"modality": "IMAGE", "tokenCount": 258}],
                "candidatesTokensDetails": [{"modality": "IMAGE", "tokenCount": 1290}],
            },
        ),
    ],
    ids=["searches", "queries", "sound", "Gemini's sound", "images"],
)
def test_what_is_billed_apart_costs_what_the_table_says(
    provider: str, model: str, api: str, flavor: str, payload: dict[str, Any]
) -> None:
    from genai_prices import extract_usage

    container = "usageMetadata" if api == "gemini" else "usage"
    theirs = extract_usage({"model": model, "modelVersion": model, container: payload}, provider_id=provider, api_flavor=flavor)
    price = theirs.calc_price(genai_request_timestamp=NOVEMBER).total_price
    cost = known(provider, model).cost(usage_from(api, payload), at=NOVEMBER)
    assert (cost.amount, cost.estimated) == (price, False)
    text = known(provider, model).cost(replace(usage_from(api, payload), apart=None), at=NOVEMBER).amount
    assert text is not None
    assert text < price / 2


def test_what_is_billed_apart_without_a_price_of_its_own_is_an_estimate() -> None:
    rates = own(input="2", cache_read="0.2", output="10")
    for apart, estimated in (
        ({"web_search": 1}, True),
        ({"input_audio": 900}, True),
        ({"output_audio": 10}, True),
        ({"input_image": 900, "output_image": 10, "output_video": 3}, False),
    ):
        assert rates.cost(replace(PLAIN, apart=apart)) == dollars("0.003", estimated=estimated)
    # Which of it was read is not told: it is billed as if none of it were.
    sound, part = known("openai", "gpt-audio"), {"input_audio": 900}
    none_read, read = replace(PLAIN, apart=part), replace(PLAIN, uncached=950, cache_read=50, apart=part)
    assert not sound.cost(none_read, at=NOVEMBER).estimated
    assert sound.cost(read, at=NOVEMBER).estimated
    more = replace(PLAIN, uncached=500, cache_read=500, apart=part)
    assert sound.cost(more, at=NOVEMBER) == sound.cost(replace(more, apart={"input_audio": 500}), at=NOVEMBER)


def test_pictures_are_in_the_worst_case() -> None:
    rates = known("google", "gemini-2.5-flash-image")
    cost = rates.cost(Usage(uncached=0, cache_read=0, cache_write=None, output=100, apart={"output_image": 100})).amount
    worst = rates.worst(input_tokens=0, output_tokens=100)
    assert cost is not None
    assert worst is not None
    assert worst >= cost > Decimal("0.001")


def test_each_request_that_a_vendor_made_has_its_own_size() -> None:
    """A compaction and the answer after it, and the turns of a loop at the vendor, pass no limit together."""
    plain = {"input_tokens": 60_000, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 100}
    rates, message = known("anthropic", "claude-haiku-5-5"), {"type": "message", **plain}
    one = rates.cost(usage_from("messages", plain), at=NOVEMBER).amount
    assert one == Decimal("0.00605")
    both = {key: 2 * count for key, count in plain.items()}
    for payload, cost in (
        ({**plain, "iterations": [{"type": "compaction", **plain}, message]}, 2 * one),
        ({**plain, "iterations": [{"type": "compaction", **plain}]}, 2 * one),
        ({**both, "iterations": [message, message]}, 2 * one),
        ({**both, "iterations": [message, {"type": "compaction", **plain}, message]}, 3 * one),
        ({**both, "iterations": [message]}, 10 * one),  # what the totals are of is not told
        (both, 10 * one),
    ):
        usage = usage_from("messages", payload)
        assert rates.cost(usage, at=NOVEMBER) == Cost(
            amount=cost, estimated=False, source=rates.source, price_date=rates.cost(PLAIN, at=NOVEMBER).price_date
        )
    searched = usage_from(
        "messages", {**payload, "iterations": [message, message], "server_tool_use": {"web_search_requests": 3}}
    )
    assert rates.cost(searched, at=NOVEMBER).amount == 2 * one + Decimal("0.03")
    unsure = usage_from(
        "messages", {**plain, "iterations": [{"type": "compaction", **plain, "cache_creation_input_tokens": 9}]}
    )
    assert rates.cost(unsure, at=NOVEMBER).estimated


@pytest.mark.parametrize(
    ("provider", "asked", "answered", "prices", "estimated"),
    [
        ("openai", "gpt-5.6-terra", "gpt-5.6-terra", "gpt-5.6-terra", False),
        ("openai", "gpt-5.6-terra", "gpt-5.6-terra-2026-07-01", "gpt-5.6-terra", False),
        (
            "openrouter",
            "anthropic/claude-sonnet-4.6",
            "anthropic/claude-4.6-sonnet-20260217",
            "anthropic/claude-sonnet-4.6",
            False,
        ),
        ("anthropic", "claude-haiku-5-5", "claude-opus-5-5", "claude-opus-5-5", False),
        ("anthropic", "claude-opus-5-5", "claude-haiku-5-5", "claude-haiku-5-5", False),
        ("deepseek", "deepseek-chat", "deepseek-v4-flash", "deepseek-v4-flash", False),
        ("openai", "gpt-5.6-terra", "gpt-5.6-terra-2099-01-01", "gpt-5.6-terra", False),
        ("openai", "gpt-5.6-terra", "openai/gpt-5.6-terra-20990101", "gpt-5.6-terra", False),
        ("google", "gemini-2.5-flash", "models/gemini-2.5-flash", "gemini-2.5-flash", False),
        ("anthropic", "claude-haiku-5-5", "claude-haiku-5-5@20991231", "claude-haiku-5-5", False),
        ("x-ai", "grok-4", "grok-4-1231", "grok-4", False),
        ("mistral", "mistral-large-latest", "mistral-large-9912", "mistral-large-latest", True),
        ("openai", "gpt-5.6-terra", "gpt-5.6-terra-mini-2099-01-01", "gpt-5.6-terra", True),
        ("openai", "gpt-5.6-terra", "gpt-5.6-terra-4096", "gpt-5.6-terra", True),
        ("openai", "gpt-5.6-terra", "mygpt-5.6-terra", "gpt-5.6-terra", True),
        ("openai", "gpt-5.6-terra", "gpt-5x6-terra-2099-01-01", "gpt-5.6-terra", True),
        ("openai", "gpt-5.6-terra", "gpt-99-terra", "gpt-5.6-terra", True),
        ("openai", "gpt-5.6-terra", "gpt-5.6-terra" + "-2026-07-01" * 1000, "gpt-5.6-terra", True),
    ],
)
def test_the_model_that_answered_sets_the_price(provider: str, asked: str, answered: str, prices: str, estimated: bool) -> None:
    """A16: no model is given another one's price, also where another answers than was asked."""
    rates, theirs = known(provider, asked), known(provider, prices)
    for _ in range(2):
        cost = rates.cost(PLAIN, billing={"model": answered}, at=NOVEMBER)
        assert (cost.amount, cost.estimated) == (theirs.cost(PLAIN, at=NOVEMBER).amount, estimated)
    tier = {"service_tier": "priority"}
    tiered = rates.cost(PLAIN, billing={**tier, "model": answered}, at=NOVEMBER)
    assert tiered.amount == theirs.cost(PLAIN, billing=tier, at=NOVEMBER).amount
    # Prices of one's own stand for whatever answers there; and before the answer nobody knows who that is.
    ours = hosted_rates(provider, asked, prices={"input": "1", "cache_read": "1", "output": "1"})
    assert ours is not None
    assert ours.cost(PLAIN, billing={"model": answered}) == ours.cost(PLAIN)
    assert not ours.cost(PLAIN, billing={"model": answered}).estimated


def test_each_request_that_a_vendor_made_has_the_price_of_its_model() -> None:
    """A declined request, and the one of a fallback model that served it; an adviser whose price nobody knows."""
    counts = {"input_tokens": 1000, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 100}
    message = {"type": "message", "model": "claude-opus-5-5", **counts}
    rates, other = known("anthropic", "claude-opus-5-5"), known("anthropic", "claude-haiku-5-5")
    one, two = rates.cost(PLAIN, at=NOVEMBER).amount, other.cost(PLAIN, at=NOVEMBER).amount
    assert one is not None
    assert two is not None
    for kind, model, amount, estimated in (
        ("fallback_message", "claude-haiku-5-5", one + two, False),
        ("advisor_message", "claude-haiku-99", 2 * one, True),
    ):
        usage = usage_from("messages", {**counts, "iterations": [message, {"type": kind, "model": model, **counts}]})
        cost = rates.cost(usage, at=NOVEMBER)
        assert (cost.amount, cost.estimated) == (amount, estimated)


def test_a_tier_is_a_cliff_on_the_whole_input() -> None:
    rates = known("openai", "gpt-6-sol")

    def cost(uncached: int, read: int) -> Decimal | None:
        return rates.cost(Usage(uncached=uncached, cache_read=read, cache_write={}, output=0), at=NOVEMBER).amount

    assert cost(272_000, 0) == Decimal("0.544")
    assert cost(2_000, 270_001) == Decimal("0.1160004")  # all tokens at twice the price: 0.4 for reads, 4 for the rest


def test_prices_have_dates() -> None:
    rates = known("openai", "gpt-5.6-sol")
    before, after = datetime(2026, 8, 20, 23, 59, tzinfo=UTC), datetime(2026, 8, 21, tzinfo=UTC)
    assert rates.cost(PLAIN, at=before).amount == Decimal("0.008")
    now = rates.cost(PLAIN, at=after)
    assert (now.amount, now.price_date) == (Decimal("0.006"), "2026-08-21")
    assert rates.cost(PLAIN, at=after.replace(tzinfo=None)) == now  # naive times are UTC
    assert rates.price_date is not None
    assert "2026-11-01" <= rates.price_date <= datetime.now(UTC).date().isoformat()
    assert rates.source.startswith("genai-prices ")


@pytest.mark.parametrize("model", ["deepseek-v4-pro", "deepseek-v4-flash"])
def test_peak_hours_on_a_weekend_are_an_upper_bound(model: str) -> None:
    """DeepSeek's peak is 01:00 to 04:00 and 06:00 to 10:00 UTC from Monday to Friday; the table has no days of the week."""
    rates, friday = known("deepseek", model), datetime(2026, 11, 27, tzinfo=UTC)
    usual = rates.cost(PLAIN, at=friday + timedelta(hours=5)).amount
    assert usual is not None
    for days in range(7):
        for hour in range(24):
            peak, weekend = 1 <= hour < 4 or 6 <= hour < 10, days in (1, 2)
            cost = rates.cost(PLAIN, at=friday + timedelta(days=days, hours=hour))
            assert cost.amount == (2 * usual if peak else usual)
            assert cost.estimated == (peak and weekend)


def test_the_tier_of_the_response_sets_the_price() -> None:
    rates = known("openai", "gpt-6-sol")
    standard = rates.cost(PLAIN, at=NOVEMBER)
    assert standard.amount == Decimal("0.003")
    assert rates.cost(PLAIN, at=NOVEMBER, billing={"service_tier": "default"}) == standard
    flex = rates.cost(PLAIN, at=NOVEMBER, billing={"service_tier": "flex"})
    assert (flex.amount, flex.estimated) == (Decimal("0.0015"), False)
    fast = known("anthropic", "claude-opus-5-5").cost(PLAIN, at=NOVEMBER, billing={"speed": "fast", "service_tier": "standard"})
    assert (fast.amount, fast.estimated) == (Decimal("0.012"), False)
    batch = known("anthropic", "claude-opus-5-5").cost(PLAIN, at=NOVEMBER, billing={"service_tier": "batch"})
    assert (batch.amount, batch.estimated) == (Decimal("0.003"), False)


@pytest.mark.parametrize("billing", [{"service_tier": "scale"}, {"inference_geo": "us"}, {"service_tier": "flex", "new": "x"}])
def test_a_fact_that_no_price_is_known_for_makes_an_estimate(billing: dict[str, str]) -> None:
    assert known("openai", "gpt-6-sol").cost(PLAIN, at=NOVEMBER, billing=billing).estimated


# -- classes without a price --------------------------------------------------------------------------------------------


def priced(rates: Rates, **counts: Any) -> tuple[Decimal | None, bool]:
    nothing: dict[str, Any] = {"uncached": 0, "cache_read": 0, "cache_write": {}, "output": 0}
    cost = rates.cost(Usage(**(nothing | counts)), at=NOVEMBER)
    return cost.amount, cost.estimated


def test_how_a_class_without_a_price_is_billed() -> None:
    million = 1_000_000
    bare = own(input="3", output="15")
    assert priced(bare, cache_read=million) == (Decimal(3), True)
    assert priced(bare, cache_write={"30m": million}) == (Decimal(3), True)
    assert priced(bare, uncached=million, cache_read=None) == (Decimal(3), False)  # no cheaper read that it may have been
    full = own(input="3", cache_read="0.3", cache_write={"5m": "3.75", "1h": "6"}, output="15")
    assert priced(full, uncached=million, cache_read=None) == (Decimal(3), True)
    assert priced(full, uncached=0, cache_read=None) == (Decimal(0), False)
    assert priced(full, cache_write={"unspecified": million}) == (Decimal("3.75"), True)
    assert priced(full, cache_write={"30m": million}) == (Decimal(6), True)  # the dearest that is listed
    assert priced(own(input="3", cache_write={"30m": "4"}), cache_write={"12h": million}) == (Decimal(4), True)
    assert priced(own(input="3", cache_write={"12h": "5"}), cache_write={"12h": million}) == (Decimal(5), False)
    openai, anthropic = known("openai", "gpt-6-sol"), known("anthropic", "claude-sonnet-5-5")
    assert priced(openai, cache_write={"30m": 1000}) == (Decimal("0.0025"), False)
    assert priced(openai, cache_write={"12h": 1000}) == (Decimal("0.0025"), True)
    assert priced(anthropic, cache_write={"5m": 1000}) == (Decimal("0.0025"), False)
    assert priced(anthropic, cache_write={"1h": 1000}) == (Decimal("0.004"), False)
    assert priced(anthropic, cache_write={"unspecified": 1000}) == (Decimal("0.0025"), True)
    assert priced(anthropic, cache_write={"30m": 1000}) == (Decimal("0.0025"), True)


@pytest.mark.parametrize("provider", ["google", "gemini", "cohere"])
def test_silence_about_reads_is_an_answer_where_the_vendor_leaves_zeros_out(provider: str) -> None:
    rates = hosted_rates(provider, "x", prices={"input": "3", "cache_read": "0.3", "output": "15"})
    assert rates is not None
    assert priced(rates, uncached=1_000_000, cache_read=None) == (Decimal(3), False)


def test_an_unknown_price_or_count_is_no_cost() -> None:
    assert priced(own(input="3"), uncached=1, output=1) == (None, False)
    assert priced(own(output="3"), uncached=1, output=1) == (None, False)
    assert priced(own(input="3"), uncached=1_000_000) == (Decimal(3), False)
    assert priced(own(input="3", output="15"), uncached=None, cache_read=None, cache_write=None) == (None, False)
    assert priced(own(input="3", output="15"), uncached=1, output=None) == (None, False)


# -- the worst case -----------------------------------------------------------------------------------------------------


def test_the_worst_case_is_the_dearest_class_and_the_dearest_tier() -> None:
    anthropic, openai = known("anthropic", "claude-sonnet-5-5"), known("openai", "gpt-6-sol")
    assert anthropic.worst(input_tokens=1000, output_tokens=100, at=NOVEMBER) == Decimal("0.005")  # 1h writes: 4 a million
    assert openai.worst(input_tokens=1000, output_tokens=100, at=NOVEMBER) == Decimal("0.0035")  # writes: 2.5 a million
    assert openai.worst(input_tokens=272_001, output_tokens=0, at=NOVEMBER) == Decimal("1.360005")
    asked = openai.worst(input_tokens=1000, output_tokens=100, billing={"service_tier": "priority"}, at=NOVEMBER)
    assert asked == Decimal("0.007")
    assert own(output="1").worst(input_tokens=1, output_tokens=1) is None
    assert own(input="1").worst(input_tokens=1, output_tokens=1) is None


def test_the_worst_case_covers_the_tier_asked_for_and_the_standard_one() -> None:
    openai = known("openai", "gpt-6-sol")
    counts: dict[str, Any] = {"input_tokens": 1000, "output_tokens": 100, "at": NOVEMBER}
    standard = openai.worst(**counts)
    # A cheaper tier may be served at the standard price; "auto" is the project's default.
    for tier in ("flex", "batch", "auto", "default"):
        assert openai.worst(**counts, billing={"service_tier": tier}) == standard
    assert known("anthropic", "claude-opus-5-5").worst(**counts, billing={"speed": "fast"}) == Decimal("0.02")
    # What may be dearer and has no price has no bound, unless the prices are the caller's own.
    assert openai.worst(**counts, billing={"service_tier": "scale"}) is None
    assert known("anthropic", "claude-opus-5-5").worst(**counts, billing={"inference_geo": "us"}) is None
    assert own(input="3", output="15").worst(**counts, billing={"service_tier": "scale"}) == Decimal("0.0045")


@pytest.mark.parametrize("traps", [[], [decimal.Inexact, decimal.Rounded, decimal.Subnormal]])
def test_the_callers_decimal_context_plays_no_part(traps: list[type[decimal.DecimalException]]) -> None:
    usage = Usage(uncached=123_457, cache_read=1, cache_write={"1h": 7}, output=89_123)
    with decimal.localcontext(decimal.Context(prec=3, Emax=3, Emin=-3, traps=traps)):
        rates, hourly = known("anthropic", "claude-sonnet-5-5"), local_rates({"per_hour": "0.123456789"})
        assert hourly is not None
        cost, worst = rates.cost(usage, at=NOVEMBER), rates.worst(input_tokens=123_457, output_tokens=89_123, at=NOVEMBER)
        busy = hourly.cost(usage, busy_s=12345.678).amount
        shown = money_text(cost.amount)
    assert (cost.amount, shown) == (Decimal("1.1381721"), "1.1381721")
    assert worst == Decimal("1.385058")
    assert busy == Decimal("0.423377156641")


def test_the_edges_of_the_calendar() -> None:
    rates, east = known("openai", "gpt-6-sol"), timezone(timedelta(hours=14))
    with pytest.raises(InputError, match="at"):
        rates.cost(PLAIN, at=datetime.min.replace(tzinfo=east))
    assert rates.worst(input_tokens=1, output_tokens=1, at=datetime.max) is not None


TTLS = st.sampled_from(["5m", "30m", "1h", "12h", "unspecified"])


@given(
    model=st.sampled_from(
        [
            ("openai", "gpt-6-sol"),
            ("openai", "gpt-5.6-luna"),
            ("openai", "gpt-4o"),
            ("anthropic", "claude-haiku-5-5"),
            ("anthropic", "claude-sonnet-4-6"),
            ("google", "gemini-2.5-pro"),
            ("deepseek", "deepseek-chat"),
            ("deepseek", "deepseek-v4-pro"),
            ("aws", "us.amazon.nova-pro-v1:0"),
        ]
    ),
    uncached=st.integers(0, 400_000),
    read=st.integers(0, 400_000),
    writes=st.dictionaries(TTLS, st.integers(0, 400_000)),
    output=st.integers(0, 100_000),
    hour=st.integers(0, 23),
    spare=st.integers(0, 10_000),
)
def test_no_request_costs_more_than_its_worst_case(
    model: tuple[str, str], uncached: int, read: int, writes: dict[str, int], output: int, hour: int, spare: int
) -> None:
    rates = known(*model)
    usage = Usage(uncached=uncached, cache_read=read, cache_write=writes, output=output)
    assert usage.input_tokens is not None
    reserved = rates.worst(input_tokens=usage.input_tokens + spare, output_tokens=output, at=NOVEMBER)
    spent = rates.cost(usage, at=NOVEMBER.replace(hour=hour)).amount
    assert reserved is not None
    assert spent is not None
    assert spent <= reserved


def test_reasoning_and_requests_may_have_prices_of_their_own() -> None:
    def flat(price: int) -> tuple[tuple[int, Decimal], ...]:
        return ((0, Decimal(price)),)

    table = PriceList(prices={INPUT: flat(1), OUTPUT: flat(10), REASONING: flat(3), REQUEST: flat(5_000)})
    rates = TokenRates(source="test", price_date=None, lists=(table,))
    usage = Usage(uncached=100, cache_read=0, cache_write={}, output=50, reasoning=40)
    assert rates.cost(usage).amount == Decimal("0.00532")  # 100 + 10 x 10 + 40 x 3 + 5,000, in millionths
    assert rates.worst(input_tokens=100, output_tokens=50) == Decimal("0.0056")


# -- local engines ------------------------------------------------------------------------------------------------------


def test_local_time_is_billed_by_the_second() -> None:
    rates = local_rates({"per_hour": "0.40"})
    assert rates is not None
    assert rates.cost(PLAIN, busy_s=9.0) == dollars("0.001", estimated=False, source="config")
    assert rates.cost(PLAIN, busy_s=0.1).amount == Decimal("0.000011111111")
    assert rates.cost(PLAIN).amount is None
    assert rates.worst(input_tokens=1, output_tokens=1, seconds=3600) == Decimal("0.4")
    assert rates.worst(input_tokens=1, output_tokens=1, seconds=0.1) == Decimal("0.000011111112")  # a bound is rounded up
    assert rates.worst(input_tokens=1, output_tokens=1, seconds=math.inf) is None
    assert rates.worst(input_tokens=1, output_tokens=1) is None


@pytest.mark.parametrize("cost", ["0", {"per_hour": "0"}, {"per_hour": "0.00"}])
def test_already_paid_costs_nothing(cost: Any) -> None:
    rates = local_rates(cost)
    assert rates is not None
    unreported = Usage(uncached=None, cache_read=None, cache_write=None, output=None)
    assert rates.cost(unreported) == dollars("0", estimated=False, source="config")
    assert rates.worst(input_tokens=10**6, output_tokens=10**6) == 0


def test_local_tokens_can_have_a_price() -> None:
    local = Usage(uncached=10, cache_read=1000, cache_write={"kv": 90}, output=100)
    flat, split = local_rates({"per_mtok": "0.10"}), local_rates({"per_mtok": {"input": "0.10", "output": "0.50"}})
    assert flat is not None
    assert split is not None
    assert flat.cost(local) == dollars("0.00002", estimated=False, source="config")  # what was reused cost no time
    assert split.cost(local) == dollars("0.00006", estimated=False, source="config")
    assert split.worst(input_tokens=1000, output_tokens=100) == Decimal("0.00015")
    assert local_rates(None) is None


@pytest.mark.parametrize(
    ("cost", "key"),
    [
        (0.4, "cost"),
        ("1", "cost"),
        ("free", "cost"),
        ({}, "cost"),
        ({"per_hour": "1", "per_mtok": "1"}, "cost"),
        ({"per_minute": "1"}, "cost"),
        ({"per_hour": 0.4}, "cost.per_hour"),
        ({"per_hour": "-1"}, "cost.per_hour"),
        ({"per_hour": "inf"}, "cost.per_hour"),
        ({"per_mtok": 1}, "cost.per_mtok"),
        ({"per_mtok": {"input": 1.0}}, "cost.per_mtok.input"),
        ({"per_mtok": {"inptu": "1"}}, "cost.per_mtok.inptu"),
    ],
)
def test_a_wrong_cost_names_its_key(cost: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        local_rates(cost)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("prices", "key"),
    [
        ({"input": 3}, "prices.input"),
        ({"input": 3.0}, "prices.input"),
        ({"input": "NaN"}, "prices.input"),
        ({"input": "1e400"}, "prices.input"),
        ({"input": "1_000"}, "prices.input"),
        ({"input": "٣"}, "prices.input"),
        ({"input": 10**5000}, "prices.input"),
        ({"cache_write": "3.75"}, "prices.cache_write"),
        ({"cache_write": {"5m": 3.75}}, "prices.cache_write.5m"),
        ({"cache_write": {"2h": "3.75"}}, "prices.cache_write.2h"),
        ({"reads": "1"}, "prices.reads"),
        ([1], "prices"),
    ],
)
def test_a_wrong_price_names_its_key(prices: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hosted_rates("openai", "gpt-6-sol", prices=prices)
    assert caught.value.key == key


# -- house rules --------------------------------------------------------------------------------------------------------


def test_rates_are_values() -> None:
    rates = known("openai", "gpt-6-sol")
    assert rates == known("openai", "gpt-6-sol")
    with pytest.raises(AttributeError):
        rates.source = "mine"  # type: ignore[misc]
    window = PriceList(prices={}, hours=(datetime(1, 1, 1, 22).time(), datetime(1, 1, 1, 2).time()))
    assert [window.active(NOVEMBER.replace(hour=h)) for h in (1, 2, 22)] == [True, False, True]


def test_importing_pricing_loads_no_price_table() -> None:
    code = "import sys, cachespec.pricing; print([m for m in ('genai_prices', 'pydantic', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.shared
def test_recorded_bills_are_what_we_compute(shared_data: Path) -> None:
    """OpenRouter sends its own bill with the usage; its prices of these models have not changed since."""
    checked = 0
    for line in (shared_data / "usage" / "recorded_usage.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line, parse_float=Decimal)
        if record["host"] != "openrouter.ai" or record["model"] not in ("anthropic/claude-sonnet-4.6", "openai/gpt-5-mini"):
            continue
        cost = known("openrouter", record["model"]).cost(usage_from("chat", record["usage"]))
        assert cost.amount == record["usage"]["cost"], record
        checked += 1
    assert checked > 10


@given(
    st.lists(st.tuples(st.times(), st.times()), max_size=3),
    st.datetimes(min_value=datetime(2026, 1, 1), max_value=datetime(2027, 1, 1), timezones=st.just(UTC)),
    st.sampled_from([None, {}, {"service_tier": "priority"}, {"service_tier": "flex"}, {"speed": "fast"}]),
    st.integers(0, 300_000),
)
def test_what_holds_now_is_what_holds_at_this_time(hours: Any, at: datetime, billing: Any, size: int) -> None:
    """Prices are worked out once for a stretch of time; at every moment of it they are those of that moment."""
    tiers = ((0, Decimal(1)), (200_000, Decimal("0.5")))
    prices = {INPUT: tiers, OUTPUT: ((0, Decimal(3)), (100_000, Decimal(4))), "5m": ((0, Decimal(2)),)}
    lists = [PriceList(prices={**prices, INPUT: ((0, Decimal(n + 5)),)}, hours=span) for n, span in enumerate(hours)]
    started = PriceList(prices={**prices, INPUT: ((0, Decimal(9)),)}, start=datetime(2026, 7, 1).date())
    priority = PriceList(prices={INPUT: ((0, Decimal(20)),)}, when=(("service_tier", "priority"),))
    rates = TokenRates(source="s", price_date=None, lists=(*lists, started, PriceList(prices=prices)), variants=(priority,))
    usage = Usage(uncached=size, cache_read=0, cache_write={}, output=100)
    since, until = rates._around(at)
    assert since <= at < until
    for moment in (since, at, until - timedelta(microseconds=1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cachespec._rates.unix_time", moment.timestamp)
            assert rates.cost(usage, billing=billing) == rates.cost(usage, billing=billing, at=moment)
            now = rates.worst(input_tokens=size, output_tokens=100, billing=billing)
            assert now == rates.worst(input_tokens=size, output_tokens=100, billing=billing, at=moment)
