"""The vendors' rules as data: which row a model gets, and whose prices its multiples are."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from cachespec.backends.anthropic import VERSION, AnthropicBackend, anthropic_profile
from cachespec.backends.compatible import compatible
from cachespec.backends.openai import OpenAIBackend, generation
from cachespec.cache_terms import ROWS, prompt_cache, with_prices
from cachespec.pricing import hosted_rates

MINIMUMS = {
    "claude-fable-5": 512,
    "claude-mythos-5-1": 512,
    "claude-opus-5": 512,
    "claude-opus-5-5": 512,
    "claude-sonnet-5-5": 512,
    "claude-haiku-5-5": 512,
    "claude-opus-4-8": 1024,
    "claude-sonnet-5": 1024,
    "claude-sonnet-4-6": 1024,
    "claude-sonnet-4-5-20250929": 1024,
    "claude-sonnet-4-20250514": 1024,
    "claude-opus-4-1": 1024,
    "claude-opus-4-20250514": 1024,
    "claude-opus-4-7": 2048,
    "claude-mythos-preview": 2048,
    "claude-3-5-haiku-20241022": 2048,
    "claude-haiku-4-5": 4096,
    "claude-opus-4-6": 4096,
    "claude-opus-4-5-20251101": 4096,
    "claude-fable-5-20260201": 512,
    "claude-haiku-4-5@20251001": 4096,
}


@pytest.mark.parametrize(("model", "minimum"), MINIMUMS.items())
def test_minimums_of_anthropics_models(model: str, minimum: int) -> None:
    cache = prompt_cache("anthropic", "messages", model)
    assert cache is not None
    assert cache.terms.minimum == minimum


ELSEWHERE = (
    "anthropic.{}",
    "us.anthropic.{}-v1:0",
    "anthropic/{}",
    "openrouter/anthropic/{}",
    "vertex_ai/{}",
    "{}-v2",
)


@pytest.mark.parametrize("form", ELSEWHERE)
@pytest.mark.parametrize("model", MINIMUMS)
def test_a_model_is_the_same_by_the_names_of_clouds_and_proxies(form: str, model: str) -> None:
    cache, there = prompt_cache("anthropic", "messages", model), prompt_cache("anthropic", "messages", form.format(model))
    assert cache == there
    own, other = (anthropic_profile(name, VERSION) for name in (model, form.format(model)))
    assert own == other


def test_a_date_is_no_version_and_a_dotted_one_is() -> None:
    dated = prompt_cache("anthropic", "messages", "claude-fable-5-20260201")
    assert (
        dated
        == prompt_cache("anthropic", "messages", "claude-fable-5")
        != prompt_cache("anthropic", "messages", "claude-fable-5-2")
    )

    cache = prompt_cache("anthropic", "messages", "anthropic/claude-haiku-4.5")
    assert cache is not None
    assert cache.terms.minimum == 4_096
    backend = AnthropicBackend(name="b", model="anthropic/claude-haiku-4.5", api_key="k")
    assert backend.capabilities.context == 200_000


@pytest.mark.parametrize(
    ("model", "control", "keys"),
    [
        ("gpt-5.6-sol", "breakpoints", "partition"),
        ("gpt-5.10", "breakpoints", "partition"),
        ("gpt-6.1-sol", "breakpoints", "partition"),
        ("gpt-6-luna", "breakpoints", "partition"),
        ("ft:gpt-6-luna:org", "breakpoints", "partition"),
        ("gpt-5.5-pro", "routing", "route"),
        ("gpt-5.4", "routing", "route"),
        ("gpt-5", "routing", "route"),
        ("gpt-4.1-mini", "routing", "route"),
        ("gpt-4o", "routing", "route"),
        ("o3-mini", "routing", "route"),
    ],
)
def test_openais_generations(model: str, control: str, keys: str) -> None:
    cache = prompt_cache("openai", "responses", model)
    assert cache is not None
    assert (cache.control, cache.keys) == (control, keys)
    assert (cache.control == "breakpoints") == ((generation(model) or (0, 0)) >= (5, 6))
    assert cache.terms.opt_out is (control == "breakpoints")


def test_an_unknown_name_is_not_second_guessed() -> None:
    assert prompt_cache("openai", "chat", "my-deployment") is None
    assert OpenAIBackend(name="b", model="my-deployment", api_key="k").capabilities.caching is None
    assert (
        compatible(name="b", server="openrouter", model="anthropic/claude-opus-5-5", api_key="k").capabilities.caching is None
    )
    assert compatible(name="b", server="vllm", model="m", api="messages").capabilities.caching is None


@pytest.mark.parametrize(
    ("server", "model", "read", "seconds"),
    [
        ("deepseek", "deepseek-v4-pro", 0.044 / 1.32, 7_200),
        ("groq", "openai/gpt-oss-120b", 0.5, 7_200),
        ("mistral", "mistral-large-4", 0.1, 300),
        ("xai", "grok-4.7", 0.25, 300),
    ],
)
def test_vendors_that_cache_by_themselves_do_so_where_reads_have_a_price(
    server: str, model: str, read: float, seconds: int
) -> None:
    backend = compatible(name="b", server=server, model=model, api_key="k")
    cache = backend.capabilities.caching
    assert cache is not None
    assert cache.terms.read == pytest.approx(read, rel=1e-4)
    assert (cache.control, cache.keys, [t.seconds for t in cache.terms.lifetimes]) == ("routing", None, [seconds])
    unpriced = compatible(name="b", server=server, model="no-such-model", api_key="k")
    assert unpriced.capabilities.caching is None
    assert compatible(name="b", server="groq", model="llama-3.3-70b-versatile", api_key="k").capabilities.caching is None
    own = {"input": "1", "cache_read": "0.4", "output": "2"}
    told = compatible(name="b", server=server, model="no-such-model", api_key="k", prices=own).capabilities.caching
    assert told is not None
    assert told.terms.read == 0.4


def test_every_row_has_a_source_and_a_date() -> None:
    for rows in ROWS.values():
        for row in rows:
            assert row.terms.source
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.terms.date)
            seconds = [lifetime.seconds for lifetime in row.terms.lifetimes]
            assert seconds == sorted(seconds)
            assert row.terms.implicit is None or row.terms.lifetime(row.terms.implicit)


@pytest.mark.parametrize("model", ["claude-sonnet-5-5", "claude-haiku-4-5", "claude-fable-5-1", "gpt-5.6-sol", "gpt-6.1-sol"])
def test_multiples_are_those_of_the_price_list(model: str) -> None:
    vendor = "anthropic" if model.startswith("claude") else "openai"
    rates, cache = hosted_rates(vendor, model), prompt_cache(vendor, "messages", model)
    assert rates is not None
    assert cache is not None
    priced = with_prices(cache, rates).terms
    assert priced.read == cache.terms.read  # the rows agree with the list, today
    assert [t.write for t in priced.lifetimes] == [t.write for t in cache.terms.lifetimes]


def test_own_prices_replace_them_and_a_twelve_hour_price_offers_that_lifetime() -> None:
    cache = prompt_cache("openai", "responses", "gpt-5.6-sol")
    assert cache is not None
    own = {"input": "2", "cache_read": "0.5", "cache_write": {"30m": "3", "12h": "5"}, "output": "9"}
    terms = with_prices(cache, hosted_rates("openai", "x", prices=own)).terms
    assert terms.read == 0.25
    assert [(t.name, t.seconds, t.write) for t in terms.lifetimes] == [("30m", 1800, 1.5), ("12h", 43200, 2.5)]
    assert with_prices(cache, None) == cache
    free = hosted_rates("openai", "x", prices={"input": "0", "output": "0"})
    assert with_prices(cache, free) == cache


def test_a_proxys_multiples_are_the_vendors_own() -> None:
    proxied = AnthropicBackend(name="b", model="claude-sonnet-5-5", api_key="k", base_url="http://127.0.0.1:9")
    assert proxied.rates is None
    assert proxied.capabilities.caching is not None
    assert proxied.capabilities.caching.terms.read == 0.05
    published = hosted_rates("anthropic", "claude-sonnet-5-5")
    assert published is not None
    assert published.worst(input_tokens=1, output_tokens=0) is not None
    assert isinstance(published.worst(input_tokens=1, output_tokens=0), Decimal)
