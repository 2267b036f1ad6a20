"""What a slice would have cost by who answers, with the live code on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachespec.backends.base import Backend
from cachespec.config import Config, PluginSpec
from cachespec.evaluation.spending import Spent, routing_costs
from cachespec.pricing import hosted_rates
from cachespec.request import build_request
from cachespec.rules import Rule, RuleCondition
from cachespec.testing import ScriptedBackend

PRICES = {"cheap": {"input": "1", "output": "4"}, "dear": {"input": "5", "output": "25"}}


def fresh() -> dict[str, Backend]:
    return {n: ScriptedBackend(name=n, rates=hosted_rates(None, n, prices=p)) for n, p in PRICES.items()}


def turns(*whose: tuple[str | None, str]) -> list[Spent]:
    requests = [build_request("Hi " * 100, tenant=tenant, session_id=session) for tenant, session in whose]
    return [Spent(request=request, t=float(i), output=100) for i, request in enumerate(requests)]


@pytest.mark.parametrize("other", ["t2", None])
def test_sessions_of_one_name_are_each_tenants_own(other: str | None) -> None:
    """By a rule one tenant's session is at the dear backend; the other tenant's, of the same name, stays where it is cheap."""
    config = Config(
        backends={name: PluginSpec(use="compatible") for name in PRICES},
        routing=PluginSpec(use="sticky"),
        rules=(Rule(when=RuleCondition(tenant=frozenset({"t1"})), only=frozenset({"dear"})),),
    )
    same = routing_costs(config, turns(("t1", "s"), (other, "s"), ("t1", "s"), (other, "s")), fresh, lambda *_: None)
    apart = routing_costs(config, turns(("t1", "s"), (other, "o"), ("t1", "s"), (other, "o")), fresh, lambda *_: None)
    assert same["routing:sticky"] == apart["routing:sticky"]
    everywhere = routing_costs(replace(config, rules=()), turns(*[(other, "s")] * 4), fresh, lambda *_: None)
    assert everywhere["only:cheap"] is not None
    assert everywhere["only:dear"] is not None
    half = (everywhere["only:cheap"] + everywhere["only:dear"]) / 2
    assert same["routing:sticky"] == pytest.approx(half)
