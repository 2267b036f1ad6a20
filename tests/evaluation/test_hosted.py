"""A hosted backend: prefix sharing and costs of the live policies, from recorded requests, with nothing sent."""

from __future__ import annotations

import json
import socket
from decimal import Decimal
from typing import Any

import anyio
import pytest

from cachespec.config import parse_config
from cachespec.evaluation.prompts import parse_prompts
from cachespec.evaluation.result import Evaluated
from cachespec.evaluation.run import evaluate
from cachespec.usage import money_text

MANUAL = "Section. The harbour opens at dawn and closes at dusk, but for ships with a pilot on board. " * 200
CONFIG = """
[backends.claude]
use = "anthropic"
model = "claude-sonnet-5-5"
api_key = { env = "NOBODY_SET_THIS" }
prices = { input = "1", cache_read = "0.1", cache_write = { "5m" = "1.25", "1h" = "2" }, output = "10" }
"""
CHEAP = """
[backends.cheap]
use = "anthropic"
model = "claude-haiku-5-5"
api_key = { env = "NOBODY_SET_THIS" }
prices = { input = "0.5", cache_read = "0.05", cache_write = { "5m" = "0.625" }, output = "5" }
[backends.laptop]
use = "llamacpp"
model = "smollm2"
cost = { per_hour = "0.40" }
[models.assistant]
backends = ["claude", "cheap", "laptop"]
"""


def body(i: int, **more: Any) -> str:
    ask = [{"role": "user", "content": f"Question {i}: when does it open?"}]
    return json.dumps({"model": "claude-sonnet-5-5", "max_tokens": 50, "system": MANUAL, "messages": ask, **more})


def evaluated(lines: list[str], text: str = CONFIG) -> Evaluated:
    async def run() -> Evaluated:
        return await evaluate(parse_prompts(lines), parse_config(text), "claude", progress=lambda *step: None)

    return anyio.run(run)


@pytest.fixture(autouse=True)
def _nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("something was sent")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_system_prompt_that_comes_again_is_shared_and_worth_caching() -> None:
    done = evaluated([body(i, t=30 * i, category="support", answer="At dawn.") for i in range(12)])
    found = done.evaluation.to_dict()
    (group,) = found["groups"]
    assert (group["category"], group["requests"], group["drafters"]) == ("support", 12, {})
    assert group["recommended"] == "vendor_optimises"
    assert "vendor_optimises" in found["recommendation"]
    prefix = found["prefix"]
    assert 0.85 < prefix["shared_tokens"] / prefix["total_tokens"] < 0.92  # 11 of 12
    assert prefix["by_lifetime"] == dict.fromkeys(("5m", "1h", "any"), prefix["shared_tokens"])
    costs = {name: Decimal(cost) for name, cost in found["policies"].items()}
    assert {"always", "expected-cost", "last-message", "off", "caller"} <= costs.keys()
    # The prompt at the input price, and 12 answers of about two tokens.
    assert costs["off"] == pytest.approx(Decimal(prefix["total_tokens"]) / 10**6, rel=Decimal("0.02"))
    # One write, eleven reads.
    once = costs["off"] / 12
    assert costs["always"] == pytest.approx(once * (Decimal("1.25") + 11 * Decimal("0.1")), rel=Decimal("0.1"))
    assert costs["expected-cost"] < costs["off"] * Decimal("0.6")
    assert done.caching == min(costs, key=lambda name: costs[name])


def test_lifetimes_run_out() -> None:
    found = evaluated([body(i, t=1000 * i) for i in range(4)]).evaluation
    assert found.prefix.by_lifetime["5m"] == 0
    assert found.prefix.by_lifetime["1h"] == found.prefix.shared_tokens > 0
    assert found.policies["always"] is not None
    assert found.policies["off"] is not None
    assert found.policies["always"] > found.policies["off"], "all writes, no reads"


def test_every_choice_of_route_has_a_price() -> None:
    done = evaluated([body(i, t=10 * i, session_id="s") for i in range(3)], CONFIG + CHEAP)
    costs = done.evaluation.policies
    assert {"only:claude", "only:cheap", "routing:cheapest", "routing:sticky"} <= costs.keys()
    assert "only:laptop" not in costs, "nobody knows before it is evaluated"
    assert costs["only:cheap"] is not None
    assert costs["only:claude"] is not None
    assert costs["only:cheap"] < costs["only:claude"]
    assert costs["routing:cheapest"] == costs["only:cheap"]
    words = done.evaluation.recommendation
    assert f"Less by who answers: only:cheap, {money_text(costs['only:cheap'])} USD" in words


def test_where_no_caching_policy_saves_anything_none_is_called_the_cheapest() -> None:
    short = [json.dumps({"prompt": f"Hi {i}", "max_output_tokens": 5}) for i in range(2)]
    done = evaluated(short)
    (cost,) = {cost for name, cost in done.evaluation.policies.items() if ":" not in name}
    assert f"Every caching policy costs the same for this slice: {money_text(cost)} USD." in done.evaluation.recommendation
    assert "Less by who answers" not in done.evaluation.recommendation


def test_an_unknown_price_is_not_known() -> None:
    unpriced = CONFIG.replace("claude-sonnet-5-5", "no-such-model").replace("prices", "# prices")
    found = evaluated([body(0)], unpriced).evaluation
    assert set(found.policies.values()) == {None}
    assert "not known" in found.recommendation
    assert found.to_dict()["policies"]["off"] is None


def test_turns_without_recorded_answers_end_where_nobody_knows_how_they_go_on() -> None:
    known = json.dumps({"turns": ["a", "b", "c"], "answer": ["x", "y"]})
    found = evaluated([known, json.dumps({"turns": ["a", "b"]})]).evaluation
    assert found.overall.requests == 4
    assert found.notes == ("1 later turns left out: they need the answers before them, which are not recorded",)
