"""Policies are pure functions: each one by itself, on hand-written values."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from cachespec.decision import Ask, Latency, Reason
from cachespec.errors import (
    AuthenticationError,
    BudgetExceededError,
    ContextLengthError,
    InputError,
    OverloadedError,
    RateLimitError,
    ServerError,
)
from cachespec.policies.budgets import accounts, applied, known, window
from cachespec.policies.retries import Failure, NextAttempt, next_attempt
from cachespec.policies.routing import Balanced, Cheapest, Fastest, Pinned, Sticky, Weighted, stay
from cachespec.rules import BudgetRule, RetryRule
from cachespec.testing import _offer as offer
from cachespec.testing import check_routing

ASK = Ask(
    alias="assistant",
    tenant="acme",
    session_id="s",
    tags=("a", "b", "a"),
    tools=False,
    max_output_tokens=100,
    timeout_s=60.0,
    now=datetime(2026, 3, 29, 0, 30, tzinfo=UTC).timestamp(),
)


def names(offers: Any) -> list[str]:
    return [o.backend for o in offers]


ROUTING = (
    *(Cheapest(), Cheapest(max_ttft=0.2), Cheapest(max_total=0.01), Pinned(backend="b1"), Sticky(), Sticky(max_ttft=0.2)),
    *(
        Fastest(),
        Fastest(by="ttft"),
        Fastest(max_cost=Decimal("0.005")),
        Balanced(),
        Balanced(per_second=Decimal(1), max_ttft=0.2),
    ),
    *(Weighted(weights={"b0": 1, "b2": 3}), Weighted(weights={"b9": 1})),
)


@pytest.mark.parametrize("policy", ROUTING, ids=repr)
def test_routing_policies_pass_the_contract(policy: Any) -> None:
    check_routing(policy)


def test_the_contract_test_catches_a_policy_that_invents_or_changes() -> None:
    class Inventor:
        def rank(self, ask: Ask, offers: Any) -> Any:
            return [*offers, offer("new", "0", 1.0)]

    class Changer:
        def rank(self, ask: Ask, offers: Any) -> Any:
            return [replace(o, latency=Latency(ttft_ms=0, total_ms=0)) for o in offers]

    for policy in (Inventor(), Changer()):
        with pytest.raises(AssertionError):
            check_routing(policy)


def test_cheapest_puts_price_first_unknown_last_and_late_behind() -> None:
    offers = [offer("dear", "1", 10.0), offer("unknown", None, 5.0), offer("late", "0.1", 900.0), offer("cheap", "0.2", 50.0)]
    assert names(Cheapest().rank(ASK, offers)) == ["late", "cheap", "dear", "unknown"]
    ranked = Cheapest(max_ttft=0.8).rank(ASK, offers)
    assert names(ranked) == ["cheap", "dear", "unknown", "late"]
    assert ranked[0].reasons == (Reason("cheapest", "expected 0.2 USD, the lowest of 3 in time"),)
    assert ranked[-1].reasons[0].code == "latency_limit"
    assert names(Cheapest(max_ttft=0.001).rank(ASK, offers)) == ["unknown", "dear", "cheap", "late"]


def test_pinned_and_sticky() -> None:
    offers = [offer("a", "1", 1.0), offer("b", "1", 1.0)]
    assert names(Pinned(backend="b").rank(ASK, offers)) == ["b", "a"]
    assert names(Pinned(backend="b", only=True).rank(ASK, offers)) == ["b"]
    assert names(Pinned(backend="c", only=True).rank(ASK, offers)) == []
    there = replace(ASK, previous_backend="b", session_id="s")
    assert names(Cheapest().rank(there, offers)) == ["b", "a"]
    assert names(Cheapest().rank(there, [offer("a", "0.9", 1.0), offers[1]])) == ["a", "b"]
    ranked = Sticky().rank(there, [offer("a", "0.1", 1.0), offers[1]])
    assert names(ranked) == ["b", "a"]
    assert ranked[0].reasons[-1].code == "sticky"
    assert names(Sticky().rank(replace(ASK, previous_backend="gone"), offers)) == ["a", "b"]


def test_a_tool_loop_goes_on_where_it_began_whatever_the_policy_says() -> None:
    offers = [offer("a", "1", 1.0), offer("b", "2", 1.0)]
    there = replace(ASK, previous_backend="b", tool_loop=True)
    ranked = stay(there, Cheapest().rank(there, offers))
    assert names(ranked) == ["b", "a"]
    assert ranked[0].reasons[-1].code == "tool_loop"
    assert names(stay(replace(there, previous_backend="gone"), offers)) == ["a", "b"]
    assert names(stay(replace(there, tool_loop=False), offers)) == ["a", "b"]


def test_limits_are_held_against_the_slow_answers_and_the_deadline_is_one() -> None:
    def times(name: str, price: str, total: float, high: float | None) -> Any:
        made = offer(name, price, 1.0)
        return replace(
            made, latency=replace(made.latency, ttft_ms=total, total_ms=total, ttft_high_ms=high, total_high_ms=high)
        )

    offers = [times("wild", "1", 500.0, 1500.0), times("calm", "2", 700.0, 800.0), times("dear", "3", 100.0, None)]
    assert names(Cheapest(max_ttft=1.0).rank(ASK, offers)) == ["calm", "dear", "wild"]
    assert names(Cheapest(max_total=1.0).rank(ASK, offers)) == ["calm", "dear", "wild"]
    hurried = Cheapest().rank(replace(ASK, timeout_s=1.0), offers)
    assert names(hurried) == ["calm", "dear", "wild"]
    assert hurried[-1].reasons[0].code == "latency_limit"
    assert names(Cheapest().rank(replace(ASK, timeout_s=None), offers)) == ["wild", "calm", "dear"]
    # When none is in time, the fastest of the slow answers.
    assert names(Cheapest(max_total=0.01).rank(ASK, offers)) == ["dear", "calm", "wild"]


def test_fastest_within_a_price() -> None:
    offers = [offer("slow", "0.1", 900.0), offer("quick", "1", 10.0), offer("unknown", None, 5.0), offer("middle", "0.2", 50.0)]
    assert names(Fastest(by="ttft").rank(ASK, offers)) == ["unknown", "quick", "middle", "slow"]
    ranked = Fastest(by="ttft", max_cost=Decimal("0.5")).rank(ASK, offers)
    assert names(ranked) == ["middle", "slow", "quick", "unknown"]
    assert [r.reasons[0].code for r in ranked if r.reasons] == ["fastest", "budget", "price_unknown"]
    with pytest.raises(InputError, match="by"):
        Fastest(by="size")


def test_balanced_weighs_seconds_in_money() -> None:
    def timed(name: str, price: str | None, total: float | None) -> Any:
        made = offer(name, price, 1.0)
        return replace(made, latency=replace(made.latency, total_ms=total))

    offers = [timed("cheap", "0.01", 9000.0), timed("quick", "0.05", 1000.0)]
    assert names(Balanced(per_second=Decimal("0.001")).rank(ASK, offers)) == ["cheap", "quick"]
    ranked = Balanced(per_second=Decimal("0.01")).rank(ASK, offers)
    assert names(ranked) == ["quick", "cheap"]
    assert ranked[0].reasons[-1].code == "cheapest"
    assert names(Balanced(per_second=Decimal(1)).rank(ASK, [timed("unknown", None, 1.0), *offers])) == [
        "quick",
        "cheap",
        "unknown",
    ]
    assert names(Balanced(per_second=Decimal(1)).rank(ASK, [timed("untimed", "0", None), *offers])) == [
        "quick",
        "untimed",
        "cheap",
    ]


def test_weighted_draws_in_proportion_and_keeps_the_rest_for_failover() -> None:
    offers = [offer(n, "1", 1.0) for n in ("a", "b", "c", "spare")]
    policy = Weighted(weights={"a": 1, "b": 3, "c": 0})
    orders = [names(policy.rank(replace(ASK, draw=i / 1000), offers)) for i in range(1000)]
    assert sum(order[0] == "a" for order in orders) == 250
    assert all(sorted(order) == ["a", "b", "c", "spare"] for order in orders)
    assert all(order[2:] == ["c", "spare"] for order in orders)
    for weights in ({}, {"a": 0}, {"a": -1}, {"a": float("nan")}):
        with pytest.raises(InputError, match="weight"):
            Weighted(weights=weights)


def attempt(
    *errors: tuple[str, Exception, float], rule: RetryRule | None = None, left: float | None = 60.0
) -> NextAttempt | None:
    failures = [Failure(backend=b, error=e, at=t) for b, e, t in errors]
    return next_attempt(rule or RetryRule(), failures, ["a", "b"], left_s=left)


def test_retries_move_on_at_once_then_wait_for_whoever_is_free_first() -> None:
    busy = OverloadedError("busy")
    assert attempt(("a", busy, 0.0)) == NextAttempt(backend="b", delay_s=0.0)
    limited = RateLimitError("slow", retry_after=9.0)
    step = attempt(("a", limited, 0.0), ("b", busy, 1.0))
    assert step is not None
    assert step.backend == "b"
    assert 0.5 <= step.delay_s <= 0.75
    step = attempt(("a", limited, 0.0), ("b", RateLimitError("slow", retry_after=20.0), 1.0))
    assert step == NextAttempt(backend="a", delay_s=8.0)
    assert attempt(("a", limited, 0.0), ("b", RateLimitError("slow", retry_after=20.0), 1.0), left=7.0) is None


def test_a_server_that_asks_for_years_is_believed_for_an_hour() -> None:
    for_ever = RateLimitError("slow", retry_after=1.7e9)
    assert attempt(("a", for_ever, 0.0), ("b", for_ever, 1.0), left=7200.0) == NextAttempt(backend="a", delay_s=3599.0)
    assert attempt(("a", for_ever, 0.0), ("b", for_ever, 1.0), left=60.0) is None
    step = attempt(("a", RateLimitError("slow", retry_after=float("nan")), 0.0), ("b", for_ever, 0.0))
    assert step is not None
    assert step.delay_s < 1


def test_retries_never_resend_what_cannot_succeed() -> None:
    assert attempt(("a", ContextLengthError("long"), 0.0)) is None
    key = AuthenticationError("no")
    assert attempt(("a", key, 0.0)) == NextAttempt(backend="b", delay_s=0.0)
    assert attempt(("a", key, 0.0), ("b", key, 0.1)) is None
    step = attempt(("a", key, 0.0), ("b", ServerError("500"), 0.1))
    assert step is not None
    assert step.backend == "b"


def test_one_budget_for_all_attempts_and_refused_reservations_cost_none() -> None:
    error = ServerError("500")
    assert attempt(("a", error, 0.0), ("b", error, 0.0), ("a", error, 1.0), ("b", error, 2.0)) is None
    refused = BudgetExceededError(
        scope="s", limit=Decimal(1), spent=Decimal(0), reserved=Decimal(1), requested=Decimal(1), resets_at=None
    )
    assert attempt(("a", refused, 0.0), rule=RetryRule(attempts=1)) == NextAttempt(backend="b", delay_s=0.0)
    assert attempt(("a", refused, 0.0), ("b", refused, 0.0)) is None
    assert attempt(("a", error, 0.0), rule=RetryRule(attempts=1)) is None


def test_the_pause_grows_and_is_bounded() -> None:
    pauses = []
    for count in range(1, 8):
        failures = [Failure(backend="a", error=ServerError("500"), at=0.0)] * count
        step = next_attempt(RetryRule(attempts=99), failures, ["a"], left_s=None)
        assert step is not None
        pauses.append(step.delay_s)
    assert all(0.5 * 2 ** min(i, 4) <= p <= 8.0 for i, p in enumerate(pauses))


def test_budget_windows_follow_the_time_zone_across_daylight_saving() -> None:
    # 29 March 2026: Berlin goes from UTC+1 to UTC+2 at 01:00 UTC, so this day has 23 hours.
    start, end = window("day", "Europe/Berlin", ASK.now)
    assert start == datetime(2026, 3, 28, 23, tzinfo=UTC)
    assert end == datetime(2026, 3, 29, 22, tzinfo=UTC)
    assert window("week", "Europe/Berlin", ASK.now)[0] == datetime(2026, 3, 22, 23, tzinfo=UTC)
    assert window("month", "UTC", ASK.now) == (datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC))
    assert window("hour", "UTC", ASK.now) == (datetime(2026, 3, 29, 0, tzinfo=UTC), datetime(2026, 3, 29, 1, tzinfo=UTC))
    assert window("minute", "UTC", ASK.now)[0] == datetime(2026, 3, 29, 0, 30, tzinfo=UTC)
    assert window("total", "UTC", ASK.now) == (None, None)


def test_a_request_falls_under_the_budgets_of_everything_it_belongs_to() -> None:
    rules = [
        BudgetRule(scope="overall", limit=Decimal(1)),
        BudgetRule(scope="tenant", limit=Decimal(2), key="other"),
        BudgetRule(scope="tenant", limit=Decimal(3), per="day"),
        BudgetRule(scope="tag", limit=Decimal(4)),
        BudgetRule(scope="session", limit=Decimal(5)),
        BudgetRule(scope="alias", limit=Decimal(6), key="assistant"),
        BudgetRule(scope="request", limit=Decimal(7)),
    ]
    found = [a.limit.scope for a in applied(rules, ASK)]
    assert found == [
        "overall in total",
        "tenant:acme per day",
        "tag:a in total",
        "tag:b in total",
        "session:acme/s in total",
        "alias:assistant in total",
        "request in total",
    ]
    assert accounts(ASK) == ("overall", "alias:assistant", "tenant:acme", "session:acme/s", "tag:a", "tag:b")
    assert accounts(replace(ASK, tenant=None, session_id=None, tags=())) == ("overall", "alias:assistant")


def test_a_session_is_each_tenants_own_under_a_name_of_its_own() -> None:
    """Tenants who call their sessions alike share no limit, and no two sessions are ever called the same."""
    rule = BudgetRule(scope="session", limit=Decimal(5))
    chats = [("a", "1"), ("b", "1"), (None, "1"), (None, "a/1"), ("a/1", "1"), ("a", "1/1"), (None, "a%2F1"), ("a%2F1", "1")]
    names = []
    for tenant, session in chats:
        ask = replace(ASK, tenant=tenant, session_id=session)
        (limit,) = (a.limit for a in applied([rule], ask))
        assert limit.account in accounts(ask)
        assert [a.limit.account for a in known([rule], [limit.account], 0.0)] == [limit.account]
        names.append(limit.account)
    assert len(set(names)) == len(chats)
    assert names[:4] == ["session:a/1", "session:b/1", "session:1", "session:a%2F1"]
    assert applied([rule], replace(ASK, session_id=None)) == ()


def test_a_session_that_a_budget_names_is_found_with_every_tenant() -> None:
    rule = BudgetRule(scope="session", limit=Decimal(5), key="1/2")
    named = [
        a.limit.account
        for tenant in ("acme", None)
        for session in ("1/2", "2")
        for a in applied([rule], replace(ASK, tenant=tenant, session_id=session))
    ]
    assert named == ["session:acme/1%2F2", "session:1%2F2"]
    spent = [*named, "session:2", "session:acme/2", "tenant:1/2", "overall"]
    assert [a.limit.account for a in known([rule], spent, 0.0)] == ["session:1%2F2", "session:acme/1%2F2"]
    assert [a.limit.account for a in known([rule], [], 0.0)] == ["session:1%2F2"]
