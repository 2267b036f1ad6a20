"""Configurations that an evaluation writes."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from typing import Any

import pytest

from cachespec.config import Config, PluginSpec, parse_config
from cachespec.config_check import check_text
from cachespec.errors import InputError
from cachespec.evaluation.policy_file import _value, policy_file
from cachespec.evaluation.result import ALL, Evaluation, Group
from cachespec.evaluation.sharing import Prefixes

FULL = """
# a remark
[client]
model = "assistant"
timeout = "60s"

[backends.laptop]
use = "llamacpp"
model = "smollm2"
draft = { use = "suffix", min_match = 2 }
require_eval = 0.6
cost = { per_hour = "0.40" }

[backends."my claude"]
use = "anthropic"
model = "claude-sonnet-5-5"
api_key = { env = "KEY" }
prices = { input = "1", output = "2", cache_write = { "5m" = "1.25" } }

[models.assistant]
backends = ["laptop", "my claude"]

[policies]
caching = { use = "always" }
budgets = [{ scope = "tenant", limit = "50.00", per = "day", mode = "hard" }]
rules = [{ when = { tags = ["private"] }, only = ["laptop"] }]
"""


def evaluation(backend: str, words: str = 'Say "yes"\nor\x7f no.') -> Evaluation:
    group = Group(category=ALL, requests=1, tokens=1, drafters={}, recommended="no_gain")
    prefix = Prefixes(shared_tokens=0, total_tokens=0, by_lifetime={"5m": None, "1h": None, "any": 0})
    policies = {"off": Decimal("1.50"), "x": None}
    return Evaluation(backend=backend, groups=(), overall=group, prefix=prefix, policies=policies, recommendation=words)


def written(config: Config, backend: str, draft: Any, caching: str | None) -> dict[str, Any]:
    text = policy_file(config, evaluation(backend), draft, caching)
    assert not [finding for finding in check_text(text, "out.toml") if finding.level == "error"]
    return tomllib.loads(text)


def test_what_is_not_recommended_stays_as_it_was() -> None:
    before, config = tomllib.loads(FULL), parse_config(FULL)
    found = written(config, "laptop", {"use": "suffix", "min_match": 1}, None)
    assert found["backends"]["laptop"].pop("draft") == {"use": "suffix", "min_match": 1}
    assert before["backends"]["laptop"].pop("draft")
    assert found == before


def test_no_draft_takes_the_demand_for_evidence_with_it() -> None:
    found = written(parse_config(FULL), "laptop", None, None)
    assert found["backends"]["laptop"].keys() == {"use", "model", "cost"}


def test_a_caching_policy_is_named_once() -> None:
    config = parse_config(FULL)
    assert written(config, "my claude", None, "expected-cost")["policies"]["caching"] == {"use": "expected-cost"}
    assert written(config, "my claude", None, "always")["policies"]["caching"] == {"use": "always"}


def test_a_configuration_without_a_file() -> None:
    spec = PluginSpec(use="llamacpp", options={"model": "smollm2", "cost": {"per_hour": "0"}})
    config = Config(backends={"smollm2": spec}, models={"default": ("smollm2",)}, default_model="default")
    found = written(config, "smollm2", {"use": "suffix"}, None)
    assert found["client"] == {"model": "default"}
    assert found["backends"]["smollm2"]["draft"] == {"use": "suffix"}


def test_every_kind_of_value_comes_back() -> None:
    tree = {"text": 'a "b" \\ \n \x7f é', "many": [1, 2.5, True, {"odd key": {}}]}
    assert tomllib.loads("\n".join(f"{key} = {_value(value)}" for key, value in tree.items())) == tree
    with pytest.raises(InputError):
        _value(object())
