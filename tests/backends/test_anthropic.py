"""What Anthropic's models take, by name and by API version."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.hosted_support import ask, schema

from cachespec.backends.anthropic import AnthropicBackend
from cachespec.decision import Plan
from cachespec.request import Reasoning, ResponseFormat


def backend(model: str = "claude-sonnet-5-5", **options: Any) -> AnthropicBackend:
    return AnthropicBackend(name="b", model=model, api_key="k", **options)


def refused(model: str = "claude-sonnet-5-5", version: str = "2026-10-21", **fields: Any) -> list[str]:
    return [reason.detail.partition(":")[0] for reason in backend(model, version=version).check(ask(**fields))]


def test_sampling_is_gone_from_the_current_version() -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 5}
    assert refused(**asked) == ["temperature", "top_p", "top_k"]
    assert refused(version="2023-06-01", **asked) == []
    assert refused(seed=1, min_p=0.1) == ["min_p", "seed"]
    assert refused(stop=("x",), max_output_tokens=5) == []


def test_efforts_and_budgets() -> None:
    assert refused(reasoning=Reasoning(effort="high", summary="auto")) == []
    assert refused(reasoning=Reasoning(budget_tokens=2048)) == []
    assert refused("claude-haiku-4-5", reasoning=Reasoning(effort="high")) == ["reasoning.effort"]
    assert refused("claude-haiku-4-5-20251001", reasoning=Reasoning(budget_tokens=2048)) == []


def test_json_needs_a_schema() -> None:
    assert refused(response_format=ResponseFormat(kind="json")) == ["response_format"]
    assert refused(response_format=ResponseFormat(kind="schema", schema=schema(a={"type": "string"}))) == []


@pytest.mark.parametrize("url", ["https://x.example", "https://x.example/", "https://x.example/v1", "https://x.example/v1/"])
def test_the_base_url_may_name_the_version_or_not(url: str) -> None:
    assert backend(base_url=url).wire(ask(), Plan(backend="b")).url == "https://x.example/v1/messages"


def test_marks_are_its_own() -> None:
    assert backend().capabilities.marks == "anthropic"
    assert backend().capabilities.opt_out is None  # nothing is cached unasked
