"""What OpenAI's models take, by name and by API."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.hosted_support import WEATHER, ask

from cachespec.backends.openai import OpenAIBackend, generation, openai_profile, reasons
from cachespec.decision import Plan
from cachespec.request import Reasoning


def backend(model: str, api: Any = "responses") -> OpenAIBackend:
    return OpenAIBackend(name="b", model=model, api_key="k", api=api)


def refused(model: str, api: Any = "responses", **fields: Any) -> list[str]:
    return [reason.detail.partition(":")[0] for reason in backend(model, api).check(ask(**fields))]


@pytest.mark.parametrize(
    ("model", "version", "thinks"),
    [
        ("gpt-5.6-sol", (5, 6), True),
        ("gpt-6-astra", (6, 0), True),
        ("gpt-5-chat-latest", (5, 0), False),
        ("gpt-4.1-mini", (4, 1), False),
        ("gpt-4o", (4, 0), False),
        ("ft:gpt-5.4-mini:acme::x", (5, 4), True),
        ("o3-mini", (1, 0), True),
        ("my-deployment", None, False),
    ],
)
def test_versions_are_read_from_names(model: str, version: tuple[int, int] | None, thinks: bool) -> None:
    assert generation(model) == version
    assert reasons(model) is thinks


def test_reasoning_models_refuse_sampling_unless_reasoning_is_off() -> None:
    off = Reasoning(effort="none")
    for api in ("chat", "responses"):
        assert refused("gpt-6-astra", api, temperature=0.5, top_p=0.9) == ["temperature", "top_p"]
        assert refused("gpt-6-astra", api, temperature=0.5, top_p=0.9, reasoning=off) == []
        assert refused("gpt-5-mini", api, temperature=0.5, reasoning=off) == ["temperature"]
        assert refused("o3", api, temperature=0.5) == ["temperature"]
        assert refused("gpt-4.1", api, temperature=0.5, top_p=0.9) == []
        assert refused("gpt-4.1", api, reasoning=Reasoning(effort="low")) == ["reasoning"]
        assert refused("my-deployment", api, temperature=0.5, reasoning=Reasoning(effort="low")) == []
    sent = backend("gpt-6-astra").wire(ask(temperature=0.5, reasoning=off), Plan(backend="b"))
    assert '"temperature":0.5' in sent.body


def test_stop_and_seed_are_of_chat_completions_alone() -> None:
    assert refused("gpt-4.1", "chat", stop=("x",), seed=1) == []
    assert refused("gpt-4.1", "responses", stop=("x",), seed=1) == ["stop", "seed"]
    assert refused("o3", "chat", stop=("x",)) == ["stop"]
    assert refused("gpt-4.1", "chat", top_k=1, min_p=0.1) == ["top_k", "min_p"]


def test_tools_beside_an_effort_over_chat_completions() -> None:
    effort = Reasoning(effort="high")
    assert refused("gpt-5.6-luna", "chat", tools=(WEATHER,), reasoning=effort) == ["reasoning.effort"]
    assert refused("gpt-5.6-luna", "chat", tools=(WEATHER,), reasoning=Reasoning(effort="none")) == []
    assert refused("gpt-5.6-luna", "responses", tools=(WEATHER,), reasoning=effort) == []


def test_cache_settings_follow_the_generation() -> None:
    new, old, unknown = (openai_profile(m, "responses") for m in ("gpt-5.6-sol", "gpt-5.5", "my-deployment"))
    assert new.marks == "openai"
    assert new.opt_out == {"prompt_cache_options": {"mode": "explicit"}}
    assert old.marks is None
    assert old.opt_out is None
    assert old.cache_fields == {"prompt_cache_key", "prompt_cache_retention"}
    assert unknown.marks == "openai"  # the caller knows what stands behind the name
    assert unknown.opt_out is None
    assert backend("gpt-5.6-sol").capabilities.opt_out == new.opt_out


def test_responses_is_the_default_and_chat_is_asked_for() -> None:
    plan = Plan(backend="b")
    assert backend("gpt-6-astra").wire(ask(), plan).url == "https://api.openai.com/v1/responses"
    assert backend("gpt-6-astra", "chat").wire(ask(), plan).url == "https://api.openai.com/v1/chat/completions"
    assert '"include"' not in backend("gpt-4.1").wire(ask(), plan).body  # answered with an error where nothing reasons
