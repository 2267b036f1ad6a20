"""Routing in a client: health, tool loops, state that never moves, budgets that downgrade, speeds that change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pytest

from cachespec.client import Client
from cachespec.decision import REASON_CODES, Ask, Decision, Offer, Reason
from cachespec.errors import (
    AuthenticationError,
    BackendError,
    BudgetExceededError,
    ConfigError,
    ConnectionFailedError,
    EngineStoppedError,
    NoRouteError,
    OverloadedError,
    RateLimitError,
    RequestRejectedError,
    ServerError,
)
from cachespec.events import Completion, Finished, ResponseStarted, TextDelta, ToolCallDelta, UsageReported
from cachespec.pricing import hosted_rates
from cachespec.testing import FakeClock, Reply, ScriptedBackend, say
from cachespec.usage import Usage

CHEAP = hosted_rates(None, "cheap", prices={"input": "1", "output": "4"})
DEAR = hosted_rates(None, "dear", prices={"input": "5", "output": "25"})
USAGE = Usage(uncached=100, cache_read=0, cache_write={}, output=20)
BOTH = {"both": ["cheap", "dear"]}


def pair(**scripts: Any) -> dict[str, ScriptedBackend]:
    return {n: ScriptedBackend(scripts.get(n, ()), name=n, rates=r) for n, r in (("cheap", CHEAP), ("dear", DEAR))}


def codes(decision: Decision, backend: str) -> list[str]:
    found = next(c for c in decision.candidates if c.backend == backend)
    assert all(r.code in REASON_CODES for r in found.reasons)
    return [r.code for r in found.reasons]


def calling(*ids: str) -> Reply:
    """An answer that calls a tool once for each id."""
    deltas = tuple(ToolCallDelta(index=i, id=name, name="look", arguments="{}") for i, name in enumerate(ids))
    end = (Finished(reason="tool_calls"), UsageReported(USAGE))
    return Reply(batches=((ResponseStarted(request_id="r", model=None),), deltas, end))


@pytest.mark.anyio
async def test_a_backend_that_is_down_is_left_alone_until_its_pause_is_over() -> None:
    clock, down = FakeClock(), Reply(refuse=ConnectionFailedError("refused", backend="cheap"))
    backends = pair(cheap=[down, say("back")])
    async with Client(backends=backends, models=BOTH, clock=clock) as client:
        assert (await client.complete("Hi")).backend == "dear"
        decision = client.plan("Hi")
        assert decision.chosen == "dear"
        assert codes(decision, "cheap") == ["unhealthy"]
        for _ in range(5):
            assert (await client.complete("Hi")).backend == "dear"
        assert len(backends["cheap"].requests) == 1
        clock.advance(10)
        assert (await client.complete("Hi")).text == "back"
        assert client.plan("Hi").chosen == "cheap"


@pytest.mark.anyio
async def test_a_plan_says_whom_a_hard_budget_would_refuse() -> None:
    routing = {"use": "pinned", "backend": "dear"}
    async with Client(backends=pair(), models=BOTH, policies={"routing": routing}) as client:
        worst = {o.backend: o.quote.worst for o in client.plan("Hi", max_output_tokens=20).candidates if o.quote is not None}
    assert worst["cheap"] is not None
    policies = {"routing": routing, "budgets": [{"scope": "overall", "limit": str(worst["cheap"])}]}
    async with Client(backends=pair(cheap=[say("a", usage=USAGE)]), models=BOTH, policies=policies) as client:
        decision = client.plan("Hi", max_output_tokens=20)
        assert decision.chosen == "cheap"
        assert codes(decision, "dear") == ["budget"]
        assert (await client.complete("Hi", max_output_tokens=20)).backend == "cheap"
        nobody = client.plan("Hi", max_output_tokens=20)
        assert nobody.chosen is None
        assert codes(nobody, "cheap") == codes(nobody, "dear") == ["budget"]
        with pytest.raises(BudgetExceededError):
            await client.complete("Hi", max_output_tokens=20)


@pytest.mark.anyio
async def test_when_all_are_down_they_are_asked_all_the_same() -> None:
    refusal = Reply(refuse=ConnectionFailedError("refused", backend="x"))
    backends = pair(cheap=[refusal] * 4 + [say("back")], dear=[refusal])
    policies = {"retries": {"attempts": 2}}
    async with Client(backends=backends, models=BOTH, clock=FakeClock(), policies=policies) as client:
        for _ in range(2):
            with pytest.raises(ConnectionFailedError):
                await client.complete("Hi")
        assert client.plan("Hi").chosen == "cheap"


@pytest.mark.anyio
async def test_what_is_wrong_with_requests_opens_no_breaker() -> None:
    backends = pair(cheap=Reply(refuse=RequestRejectedError("bad", backend="cheap")))
    async with Client(backends=backends, models=BOTH) as client:
        for _ in range(10):
            with pytest.raises(RequestRejectedError):
                await client.complete("Hi")
        assert client.plan("Hi").chosen == "cheap"


@pytest.mark.anyio
@pytest.mark.parametrize("session", ["s", None])
async def test_a_tool_loop_goes_on_where_it_began(session: str | None) -> None:
    clock = FakeClock()
    over = Reply(refuse=OverloadedError("529", backend="cheap"))
    backends = pair(cheap=[over, say("Cheap.")], dear=[calling("c1", "c2"), say("Done.")])
    async with Client(backends=backends, models=BOTH, clock=clock) as client:
        first = await client.complete("Look.", session_id=session)
        assert first.backend == "dear"
        results = [{"role": "tool", "tool_call_id": n, "content": "seen"} for n in ("c1", "c2")]
        history: list[Any] = [{"role": "user", "content": "Look."}, first.message, *results]
        decision = client.plan(messages=history, session_id=session)
        assert decision.chosen == "dear"
        assert codes(decision, "dear")[-1] == "tool_loop"
        done = await client.complete(messages=history, session_id=session)
        assert done.backend == "dear"
        # The loop is over: the next turn goes where it is cheapest.
        more = [*history, done.message, {"role": "user", "content": "Thanks."}]
        assert client.plan(messages=more, session_id=session).chosen == "cheap"


@pytest.mark.anyio
async def test_a_tool_loop_moves_when_its_backend_is_gone() -> None:
    gone = Reply(refuse=ConnectionFailedError("refused", backend="cheap"))
    backends = pair(cheap=[calling("c1"), gone], dear=[say("Taken over.")])
    async with Client(backends=backends, models=BOTH, clock=FakeClock()) as client:
        first = await client.complete("Look.")
        history: list[Any] = [
            {"role": "user", "content": "Look."},
            first.message,
            {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        ]
        assert client.plan(messages=history).chosen == "cheap"
        assert (await client.complete(messages=history)).text == "Taken over."


BUSY = [
    RateLimitError("429", backend="cheap", status=429),
    RateLimitError("429", backend="cheap", status=429, retry_after=2.0),
    OverloadedError("529", backend="cheap", status=529),
    OverloadedError("503", backend="cheap", status=503, retry_after=2.0),
]


@pytest.mark.anyio
@pytest.mark.parametrize("error", BUSY)
async def test_a_tool_loop_waits_for_who_is_busy_and_then_fails_as_it_did(error: BackendError) -> None:
    clock, busy = FakeClock(), Reply(refuse=error)
    backends = pair(cheap=[calling("c1"), busy, busy, say("Done."), *[busy] * 4, say("Again.")])
    async with Client(backends=backends, models=BOTH, clock=clock) as client:
        first = await client.complete("Look.", session_id="s")
        history = results(first, "c1")
        assert (await client.complete(messages=history, session_id="s")).text == "Done."
        assert all(pause >= (error.retry_after or 0.5) for pause in clock.sleeps)
        with pytest.raises(type(error)) as caught:
            await client.complete(messages=history, session_id="s")
        assert caught.value is error
        assert client.plan("Hi").chosen == "dear"  # four in a row: its breaker is open, which is no reason to move
        decision = client.plan(messages=history, session_id="s")
        assert decision.chosen == "cheap"
        assert codes(decision, "cheap")[-1] == "tool_loop"
        assert (await client.complete(messages=history, session_id="s")).text == "Again."
    assert not backends["dear"].requests


@pytest.mark.anyio
async def test_a_tool_loop_stays_where_others_were_sent_away_for_a_while() -> None:
    away = Reply(refuse=RateLimitError("429", backend="cheap", retry_after=60.0))
    backends = pair(cheap=[calling("c1"), away, say("Done.")])
    async with Client(backends=backends, models=BOTH, clock=FakeClock()) as client:
        first = await client.complete("Look.")
        assert (await client.complete("Hi")).backend == "dear"
        assert client.plan("Hi").chosen == "dear"
        assert (await client.complete(messages=results(first, "c1"))).text == "Done."


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (ConnectionFailedError("refused", backend="cheap"), 1),
        (AuthenticationError("401", backend="cheap"), 1),
        (EngineStoppedError("crashed", backend="cheap"), 1),
        (ServerError("500", backend="cheap"), 3),
        (ConnectionFailedError("hung up", backend="cheap", begun=True), 3),
    ],
)
async def test_a_backend_is_gone_when_its_breaker_opens_for_more_than_load(error: BackendError, asked: int) -> None:
    backends = pair(cheap=[calling("c1"), Reply(refuse=error)], dear=[say("Taken over.")])
    async with Client(backends=backends, models=BOTH, clock=FakeClock()) as client:
        first = await client.complete("Look.")
        done = await client.complete(messages=results(first, "c1"))
        assert (done.backend, done.text) == ("dear", "Taken over.")
        assert len(backends["cheap"].requests) == 1 + asked
        assert codes(done.decision, "cheap")[-1] == "unhealthy"


@pytest.mark.anyio
async def test_a_tool_loop_moves_when_its_backend_was_taken_out_of_the_alias() -> None:
    backends = pair(cheap=[calling("c1")])
    async with Client(backends=backends, models=BOTH | {"one": ["dear"]}) as client:
        first = await client.complete("Look.", model="both")
        assert (await client.complete(messages=results(first, "c1"), model="one")).backend == "dear"


def results(done: Completion, *calls: str) -> list[Any]:
    """The conversation after an answer that called tools, with their results."""
    told = [{"role": "tool", "tool_call_id": call, "content": "seen" * 400} for call in calls]
    return [{"role": "user", "content": "Look."}, done.message, *told]


@pytest.mark.anyio
async def test_a_tool_loop_is_its_sessions_whatever_ids_others_use() -> None:
    rules = [{"when": {"tags": ["dear"]}, "only": ["dear"]}]
    backends = pair(cheap=calling("call_0"), dear=calling("call_0"))
    async with Client(backends=backends, models=BOTH, policies={"rules": rules}) as client:
        first = await client.complete("Look.", session_id="s1")
        second = await client.complete("Look.", session_id="s2", tags=["dear"])
        assert (first.backend, second.backend) == ("cheap", "dear")
        decision = client.plan(messages=results(first, "call_0"), session_id="s1")
        assert codes(decision, "cheap")[-1] == "tool_loop"
        assert "tool_loop" not in codes(decision, "dear")
        assert client.plan(messages=results(second, "call_0"), session_id="s2").chosen == "dear"


@pytest.mark.anyio
@pytest.mark.parametrize("downgrade", [True, False])
async def test_neither_a_downgrade_nor_a_policy_moves_a_tool_loop(downgrade: bool) -> None:
    pinned = {
        "routing": {"use": "pinned", "backend": "dear"},
        "budgets": [{"scope": "overall", "limit": "0.001", "mode": "downgrade"}],
    }
    policies = pinned if downgrade else {"routing": Meddling(lambda offers: offers[:1])}
    async with Client(backends=pair(dear=calling("c1")), models=BOTH, policies=policies) as client:
        first = await client.complete("Look.", session_id="s", model="dear")
        assert (first.backend, client.plan("Hi", session_id="s", model="both").chosen) == ("dear", "cheap")
        decision = client.plan(messages=results(first, "c1"), session_id="s", model="both")
        assert decision.chosen == "dear"
        assert codes(decision, "dear")[-1] == "tool_loop"


@pytest.mark.anyio
async def test_a_session_of_one_tenant_is_none_of_anothers() -> None:
    rules = [{"when": {"tenant": ["t1"]}, "only": ["dear"]}]
    policies = {"rules": rules, "routing": {"use": "sticky"}}
    backends = pair()
    async with Client(backends=backends, models=BOTH, policies=policies) as client:
        await client.complete("Hi", session_id="1", tenant="t1", reasoning="high", extra={"dear": {"betas": ["own"]}})
        done = await client.complete("Hi", session_id="1", tenant="t2")
        assert done.backend == "cheap"
        assert backends["cheap"].requests[0][0].reasoning is None
        assert client.plan("Hi", session_id="1", tenant="t1").chosen == "dear"


@pytest.mark.anyio
async def test_state_that_a_provider_holds_never_moves() -> None:
    backends = pair(dear=Reply(refuse=ConnectionFailedError("refused", backend="dear")))
    async with Client(backends=backends, models=BOTH, clock=FakeClock()) as client:
        held = {"dear": {"previous_response_id": "resp_1"}}
        decision = client.plan("Hi", extra=held)
        assert decision.chosen == "dear"
        assert codes(decision, "cheap") == ["capability"]
        with pytest.raises(ConnectionFailedError):
            await client.complete("Hi", extra=held)
        assert backends["cheap"].requests == []
        with pytest.raises(NoRouteError):
            await client.complete("Hi", extra=held, model="cheap")


@pytest.mark.anyio
async def test_a_budget_that_downgrades_leaves_what_does_not_fit_to_cheaper_backends() -> None:
    spent = say("Hello", usage=Usage(uncached=1000, cache_read=0, cache_write={}, output=100))
    backends = pair(cheap=spent, dear=spent)
    policies: dict[str, Any] = {
        "routing": {"use": "pinned", "backend": "dear"},
        "budgets": [{"scope": "overall", "limit": "0.01", "mode": "downgrade"}],
    }
    async with Client(backends=backends, models=BOTH, policies=policies, max_output_tokens=100) as client:
        assert (await client.complete("Hi")).backend == "dear"  # 0.0075 spent
        decision = client.plan("Hi")
        assert decision.chosen == "cheap"
        assert codes(decision, "dear") == ["budget"]
        for _ in range(5):  # far over the limit: the cheapest goes on answering
            assert (await client.complete("Hi")).backend == "cheap"
        (state,) = client.plan("Hi").budgets
        assert state.spent > state.limit


@pytest.mark.anyio
async def test_a_hard_budget_still_refuses_beside_one_that_downgrades() -> None:
    policies = {
        "budgets": [
            {"scope": "overall", "limit": "0.000001", "mode": "downgrade"},
            {"scope": "overall", "limit": "0.0001", "mode": "hard"},
        ]
    }
    async with Client(backends=pair(), models=BOTH, policies=policies, max_output_tokens=1000) as client:
        with pytest.raises(BudgetExceededError):
            await client.complete("Hi")


@pytest.mark.anyio
async def test_measured_speeds_rule_where_limits_are() -> None:
    """Real time: the cheap one turns slow, and the route follows within 20 requests; then it is fast again."""
    slow, fast = say("Hello", usage=USAGE, delay_s=0.4), say("Hello", usage=USAGE)
    backends = pair(cheap=[fast] * 5 + [slow] * 20 + [fast])
    clock = FakeClock()
    policies = {"routing": {"use": "cheapest", "max_ttft": "250ms"}}
    async with Client(backends=backends, models=BOTH, policies=policies, clock=clock) as client:
        assert [(await client.complete("Hi")).backend for _ in range(5)] == ["cheap"] * 5
        latency = client.plan("Hi").candidates[0].latency
        assert latency.evidence == "measured"
        route = [(await client.complete("Hi")).backend for _ in range(20)]
        assert route[-5:] == ["dear"] * 5
        decision = client.plan("Hi")
        assert codes(decision, "cheap") == ["latency_limit"]


@pytest.mark.anyio
async def test_expected_lengths_are_learned() -> None:
    long = say("Hello", usage=Usage(uncached=10, cache_read=0, cache_write={}, output=3_000))
    async with Client(backends=pair(cheap=long), models=BOTH) as client:
        before = client.plan("Hi").candidates[0]
        for _ in range(10):
            await client.complete("Hi")
        after = client.plan("Hi").candidates[0]
    assert before.tokens.output_expected == 400
    assert after.tokens.output_expected == 3_000
    assert before.quote is not None
    assert after.quote is not None
    assert before.quote.expected is not None
    assert after.quote.expected is not None
    assert after.quote.expected > before.quote.expected * Decimal("5")


@pytest.mark.anyio
async def test_a_cut_answer_counts_as_a_failure_and_a_left_one_does_not() -> None:
    cut = Reply(batches=((ResponseStarted(request_id="r", model=None),), (TextDelta("Hel"),)))
    backends = pair(cheap=[say("Hello", "there")] * 5 + [cut])
    async with Client(backends=backends, models=BOTH, clock=FakeClock()) as client:
        for _ in range(5):
            async with client.stream("Hi") as stream:
                async for _text in stream.text_stream:
                    break
        assert client.plan("Hi").chosen == "cheap"
        for _ in range(3):
            with pytest.raises(Exception, match=r"ended|cut|interrupted"):
                await client.complete("Hi")
        assert client.plan("Hi").chosen == "dear"


@pytest.mark.anyio
async def test_chance_is_the_same_for_a_session_and_even_over_many() -> None:
    policies = {"routing": {"use": "weighted", "weights": {"cheap": 1, "dear": 3}}}
    async with Client(backends=pair(), models=BOTH, policies=policies) as client:
        chosen = [client.plan("Hi", session_id=f"s{i}").chosen for i in range(400)]
        assert chosen == [client.plan("Hi", session_id=f"s{i}").chosen for i in range(400)]
        assert 60 < chosen.count("cheap") < 140
        assert len({client.plan("Hi").chosen for _ in range(100)}) == 2


@pytest.mark.anyio
async def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    ledger = {"use": "sqlite", "path": str(tmp_path / "ledger.db")}
    long = say("Hello", usage=Usage(uncached=10, cache_read=0, cache_write={}, output=3_000))
    async with Client(backends=pair(cheap=long), models=BOTH, ledger=ledger) as client:
        for _ in range(10):
            await client.complete("Hi")
    async with Client(backends=pair(), models=BOTH, ledger=ledger) as client:
        offer = client.plan("Hi").candidates[0]
    assert offer.tokens.output_expected == 3_000
    assert offer.latency.evidence == "measured"


@pytest.mark.anyio
@pytest.mark.parametrize("first", [0, 1])
async def test_a_budget_that_downgrades_goes_by_its_own_limit_beside_a_hard_one_of_the_same_scope(first: int) -> None:
    budgets = [
        {"scope": "tenant", "limit": "50", "per": "day", "mode": "hard"},
        {"scope": "tenant", "limit": "0.0001", "per": "day", "mode": "downgrade"},
    ]
    policies = {"routing": {"use": "pinned", "backend": "dear"}, "budgets": budgets if first == 0 else budgets[::-1]}
    async with Client(backends=pair(), models=BOTH, policies=policies, max_output_tokens=100) as client:
        decision = client.plan("Hi", tenant="a")
        assert decision.chosen == "cheap"
        assert codes(decision, "dear") == ["budget"]
        assert client.plan("Hi").chosen == "dear"


@pytest.mark.anyio
async def test_every_report_corrects_the_token_estimate_and_the_error_is_told() -> None:
    """A server that plans no cache, with a tokenizer twice as fine as four bytes a token."""

    class Fine(ScriptedBackend):
        async def open(self, request: Any, plan: Any, *, timeout: float | None) -> Any:
            size = len(request.messages[0].parts[0].text)
            self._replies = [say("Hi", usage=Usage(uncached=size // 2, cache_read=0, cache_write={}, output=1))]
            return await super().open(request, plan, timeout=timeout)

    async with Client(backends={"b": Fine(name="b", rates=CHEAP)}) as client:
        assert client.plan("word " * 800).candidates[0].tokens.error is None
        first = client.plan("word " * 800).candidates[0].tokens.input
        for count in range(100, 1_300, 60):
            await client.complete("word " * count)
        offer = client.plan("word " * 800).candidates[0]
    assert first is not None
    assert abs(first - 1_000) < 60
    assert offer.tokens.input == pytest.approx(2_000, rel=0.1)
    assert offer.tokens.error is not None
    assert offer.tokens.error < 0.5
    assert "give or take" in offer.explain()
    assert offer.tokens.to_dict()["error"] == offer.tokens.error


@pytest.mark.anyio
async def test_a_stream_goes_on_where_its_session_is_when_it_is_entered() -> None:
    backends = pair(dear=calling("c1"))
    async with Client(backends=backends, models=BOTH, policies={"routing": {"use": "sticky"}}) as client:
        built = client.stream("More.", session_id="s", model="both")
        first = await client.complete("Look.", session_id="s", model="dear", reasoning="high")
        loop = client.stream(messages=results(first, "c1"), session_id="s", model="both")
        async with built as stream:
            assert stream.decision.chosen == "dear"
            await stream.until_done()
        assert [request.reasoning for request, _ in backends["dear"].requests][1] == backends["dear"].requests[0][0].reasoning
        async with loop as stream:
            assert codes(stream.decision, "dear")[-1] == "tool_loop"


class Meddling:
    """A policy that hands back other offers than it was given."""

    def __init__(self, change: Callable[[list[Offer]], Any]) -> None:
        self._change = change

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        assert isinstance(offers, list)
        return cast("Sequence[Offer]", self._change(offers))


def emptied(offers: list[Offer]) -> list[Offer]:
    offers.clear()
    return offers


def _free(offer: Offer) -> Offer:
    assert offer.quote is not None
    return replace(offer, quote=replace(offer.quote, worst=Decimal(0)), reasons=(Reason("pinned", "mine"),))


@pytest.mark.anyio
@pytest.mark.parametrize(
    "change", [_free, lambda o: replace(o, quote=None), lambda o: replace(o, eligible=False, model="other")]
)
async def test_a_policy_orders_offers_and_changes_nothing_else_of_them(change: Callable[[Offer], Offer]) -> None:
    policies = {
        "routing": Meddling(lambda offers: [change(o) for o in reversed(offers)]),
        "budgets": [{"scope": "overall", "limit": "0.00001"}],
    }
    async with Client(backends=pair(), models=BOTH, policies=policies, max_output_tokens=100) as client:
        with pytest.raises(BudgetExceededError):
            await client.complete("Hi")
        assert (await client.ledger.totals()).amount == 0


@pytest.mark.anyio
async def test_what_a_policy_adds_to_the_reasons_is_kept() -> None:
    policies = {"routing": Meddling(lambda offers: [_free(o) for o in reversed(offers)])}
    async with Client(backends=pair(), models=BOTH, policies=policies) as client:
        decision = client.plan("Hi")
        assert (decision.chosen, codes(decision, "dear")) == ("dear", ["pinned"])


@pytest.mark.anyio
@pytest.mark.parametrize(
    "change",
    [
        lambda offers: (offers.append(replace(offers[0], backend="made-up")), offers)[1],
        lambda offers: itertools.repeat(offers[0]),
        lambda offers: [replace(o, reasons=("because",)) for o in offers],
        lambda offers: [replace(o, backend=["a"]) for o in offers],
    ],
)
async def test_a_policy_that_makes_offers_up_is_named(change: Callable[[list[Offer]], Any]) -> None:
    async with Client(backends=pair(), models=BOTH, policies={"routing": Meddling(change)}) as client:
        with pytest.raises(ConfigError, match=r"policies\.routing: Meddling\.rank"):
            await client.complete("Hi")


@pytest.mark.anyio
async def test_a_policy_that_empties_its_list_has_left_them_out() -> None:
    async with Client(backends=pair(), models=BOTH, policies={"routing": Meddling(emptied)}) as client:
        decision = client.plan("Hi")
        assert [codes(decision, name) for name in ("cheap", "dear")] == [["rule"], ["rule"]]


def test_turns_to_come_pay_for_everything_where_nothing_is_cached() -> None:
    def ahead(policy: str) -> Decimal:
        claude = {"use": "anthropic", "model": "claude-sonnet-4-5", "api_key": "k"}
        client = Client(backends={"claude": claude}, policies={"caching": {"use": policy}})
        quote = client.plan("Hi", system="word " * 20_000, session_id="s", max_output_tokens=10).candidates[0].quote
        assert quote is not None
        assert quote.ahead is not None
        return quote.ahead

    assert ahead("off") > 4 * ahead("expected-cost")
