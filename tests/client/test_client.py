"""Client, session, sync facade, middleware and hooks on scripted backends."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import cachespec.client
import cachespec.sync
from cachespec.backends.base import Capabilities
from cachespec.client import Client
from cachespec.decision import REASON_CODES
from cachespec.errors import (
    BudgetExceededError,
    ConfigError,
    ContextLengthError,
    InputError,
    LedgerError,
    PriceUnknownError,
    StreamStateError,
    UnknownPluginError,
    UnsupportedParameterError,
)
from cachespec.events import Completion, TextDelta
from cachespec.ledger.base import Settlement
from cachespec.ledger.memory import MemoryLedger
from cachespec.messages import Message, TextPart
from cachespec.pricing import hosted_rates
from cachespec.request import Request, build_request
from cachespec.telemetry import BudgetPassed, Decided, Details, Settled
from cachespec.testing import ALL_PARAMETERS, FakeClock, ScriptedBackend, check_backend, say
from cachespec.usage import Usage

CHEAP = hosted_rates(None, "cheap", prices={"input": "0.1", "output": "0.4"})
DEAR = hosted_rates(None, "dear", prices={"input": "5", "output": "25"})
USAGE = Usage(uncached=100, cache_read=0, cache_write={}, output=20)


@pytest.mark.anyio
async def test_the_cheapest_backend_answers_and_the_decision_says_why() -> None:
    dear, cheap = ScriptedBackend(name="dear", rates=DEAR), ScriptedBackend(name="cheap", rates=CHEAP)
    client = Client(backends={"dear": dear, "cheap": cheap}, models={"assistant": ["dear", "cheap"]}, model="assistant")
    async with client:
        decision = client.plan("Hi", max_output_tokens=100)
        done = await client.complete("Hi", max_output_tokens=100)
    assert decision.chosen == done.backend == "cheap"
    told = decision.to_dict()
    assert set(told) == {"chosen", "candidates", "plan", "budgets", "generation", "decided_in_us"}
    assert [c["backend"] for c in told["candidates"]] == ["cheap", "dear"]
    assert told["candidates"][0]["reasons"][0]["code"] == "cheapest"
    assert Decimal(told["candidates"][0]["quote"]["worst"]) >= Decimal(told["candidates"][0]["quote"]["expected"])
    assert json.loads(json.dumps(told)) == told
    assert all(r["code"] in REASON_CODES for c in told["candidates"] for r in c["reasons"])
    assert "cheap" in decision.explain()
    assert dear.requests == []


@pytest.mark.anyio
async def test_names_are_an_alias_then_a_backend_then_provider_and_model() -> None:
    a = ScriptedBackend(name="a", provider="openai", model="gpt-x")
    b = ScriptedBackend(name="b", provider="anthropic", model="claude-x")
    async with Client(backends={"a": a, "b": b}, models={"both": ["a", "b"]}) as client:
        for name, chosen in {"b": "b", "openai:gpt-x": "a", "anthropic:claude-x": "b", "both": "a"}.items():
            assert client.plan("Hi", model=name).chosen == chosen
        with pytest.raises(InputError, match="nearest: both") as caught:
            client.plan("Hi", model="boht")
        assert caught.value.field == "model"
        with pytest.raises(InputError, match="did you mean"):
            client.plan("Hi", extra={"aa": {"x": 1}})


@pytest.mark.anyio
async def test_pinned_policy_and_sticky_sessions() -> None:
    dear, cheap = ScriptedBackend(name="dear", rates=DEAR), ScriptedBackend(name="cheap", rates=CHEAP)
    backends = {"dear": dear, "cheap": cheap}
    models = {"assistant": ["dear", "cheap"]}
    async with Client(backends=backends, models=models, policies={"routing": {"use": "pinned", "backend": "dear"}}) as client:
        decision = client.plan("Hi")
        assert decision.chosen == "dear"
        assert decision.candidates[0].reasons[-1].code == "pinned"
    policies = {"routing": {"use": "sticky"}}
    async with Client(backends=backends, models=models, model="assistant", policies=policies) as client:
        await client.complete("Hi", model="dear", session_id="s1")
        assert client.plan("Hi", session_id="s1").chosen == "dear"
        assert client.plan("Hi", session_id="s1").candidates[0].reasons[-1].code == "sticky"
        assert client.plan("Hi", session_id="s2").chosen == "cheap"


@pytest.mark.anyio
async def test_when_every_candidate_falls_for_one_cause_its_own_error_is_raised() -> None:
    small = Capabilities(parameters=frozenset(), context=20)
    backends = {n: ScriptedBackend(name=n, capabilities=small) for n in ("a", "b")}
    models = {"assistant": ["a", "b"]}
    async with Client(backends=backends, models=models) as client:
        with pytest.raises(ContextLengthError):
            await client.complete("word " * 200)
        with pytest.raises(UnsupportedParameterError, match="temperature") as caught:
            await client.complete("Hi", temperature=0.5)
        for said in ("a: temperature: ", "; b: temperature: ", '; on_unsupported = "drop" leaves it out'):
            assert said in str(caught.value)
        codes = [[r.code for r in c.reasons] for c in client.plan("Hi", temperature=0.5).candidates]
        assert codes == [["unsupported_parameter"]] * 2
    async with Client(backends=backends, models=models, on_unsupported="drop") as client:
        done = await client.complete("Hi", temperature=0.5, seed=3)
        assert any("temperature" in w for w in done.warnings)
        assert backends["a"].requests[-1][0].temperature is None
    toolless = ScriptedBackend(name="c", capabilities=Capabilities(parameters=frozenset(), tools=False))
    async with Client(backends={"c": toolless}) as client:
        with pytest.raises(UnsupportedParameterError, match="c takes no tools") as caught:
            await client.complete("Hi", temperature=0.5, tools=[{"name": "t", "input_schema": {"type": "object"}}])
        assert "on_unsupported" not in str(caught.value)  # that gives it no tools
    hard = {"budgets": [{"scope": "overall", "limit": "1.00"}]}
    async with Client(backends=backends, models=models, policies=hard) as client:
        with pytest.raises(PriceUnknownError, match="say it with `prices`"):
            await client.complete("Hi")
    assert sum(len(b.requests) for b in backends.values()) == 1


@pytest.mark.anyio
async def test_budgets_are_checked_before_anything_is_sent_and_the_next_candidate_is_asked() -> None:
    dear, cheap = ScriptedBackend(name="dear", rates=DEAR), ScriptedBackend(say("x", usage=USAGE), name="cheap", rates=CHEAP)
    policies = {
        "routing": {"use": "pinned", "backend": "dear"},
        "budgets": [{"scope": "tenant", "limit": "0.01", "per": "day"}, {"scope": "request", "limit": "0.02"}],
    }
    models = {"assistant": ["dear", "cheap"]}
    async with Client(backends={"dear": dear, "cheap": cheap}, models=models, policies=policies) as client:
        done = await client.complete("Hi", tenant="acme", max_output_tokens=600)
        assert done.backend == "cheap"
        assert dear.requests == []
        with pytest.raises(BudgetExceededError) as caught:
            await client.complete("Hi", model="dear", tenant="acme", max_output_tokens=600)
        assert caught.value.scope == "tenant:acme per day"
        assert caught.value.limit == Decimal("0.01")
        assert caught.value.resets_at is not None
        with pytest.raises(BudgetExceededError) as caught:
            await client.complete("Hi", model="dear", max_output_tokens=4000)
        assert caught.value.scope.startswith("request")
        assert (await client.ledger.totals()).requests == 1
    assert dear.requests == []


@pytest.mark.anyio
async def test_a_soft_budget_warns_and_lets_pass() -> None:
    seen: list[Details] = []
    backend = ScriptedBackend(rates=DEAR)
    policies = {"budgets": [{"scope": "overall", "limit": "0.0001", "mode": "soft"}]}
    async with Client(backends={"scripted": backend}, policies=policies, hooks=[seen.append]) as client:
        done = await client.complete("Hi")
    assert any("soft budget" in w for w in done.warnings)
    passed = [d for d in seen if isinstance(d, BudgetPassed)]
    assert [p.scope for p in passed] == ["overall in total"]


class Shout:
    """Middleware for the tests: adds a tag on the way in and shouts on the way out."""

    def request(self, request: Request) -> Request:
        return replace(request, tags=(*request.tags, "loud"))

    def completion(self, request: Request, completion: Completion) -> Completion:
        return replace(completion, text=completion.text.upper() + "!" * len(request.tags))


@pytest.mark.anyio
async def test_middleware_sees_requests_and_completions_and_hooks_are_told() -> None:
    seen: list[Details] = []

    def broken(details: Details) -> None:
        raise RuntimeError("a hook's own fault")

    client = Client(backends={"scripted": ScriptedBackend()}, middleware=[Shout()], hooks=[broken, seen.append])
    async with client:
        done = await client.complete("Hi")
    assert done.text == "HELLO THERE.!"
    assert [type(d) for d in seen] == [Decided, Settled]
    assert isinstance(seen[0], Decided)
    assert seen[0].tags == ("loud",)
    with pytest.raises(ConfigError, match=r"middleware\[0\]"):
        Client(backends={"scripted": ScriptedBackend()}, middleware=[object()])  # type: ignore[list-item]


@pytest.mark.anyio
async def test_the_whole_decision_is_logged_as_one_json_value(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="cachespec.decision"):
        async with Client(backends={"scripted": ScriptedBackend()}) as client:
            await client.complete("a secret prompt")
    records = [r for r in caplog.records if r.name == "cachespec.decision"]
    assert json.loads(records[0].getMessage())["chosen"] == "scripted"
    assert "secret" not in caplog.text


@pytest.mark.anyio
async def test_a_session_appends_and_a_turn_that_fails_changes_nothing() -> None:
    backend = ScriptedBackend([say("one"), say("two"), say("three")])
    async with Client(backends={"scripted": backend}) as client:
        session = client.session(system="Be brief.", tenant="acme")
        assert (await session.complete("first")).text == "one"
        async with session.stream("left") as stream:
            async for _ in stream.text_stream:
                break
        assert len(session.messages) == 2
        async with session.stream([{"role": "user", "content": "second"}]) as stream:
            with pytest.raises(StreamStateError, match="one turn at a time"):
                await session.complete("third")
            done = await stream.get_final_completion()
        assert done.text == "three"
        assert [m.text for m in session.messages] == ["first", "one", "second", "three"]
        sent = backend.requests[-1][0]
        assert [m.text for m in sent.messages] == ["first", "one", "second"]
        assert sent.system == (TextPart(text="Be brief."),)
        assert sent.session_id == session.session_id
        await session.complete([{"role": "system", "content": "Be loud."}, {"role": "user", "content": "fourth"}])
        sent = backend.requests[-1][0]
        assert sent.system == (TextPart(text="Be brief."),)
        assert [(m.role, m.text) for m in sent.messages[-2:]] == [("system", "Be loud."), ("user", "fourth")]


@pytest.mark.anyio
async def test_a_completion_is_appendable_as_it_is() -> None:
    async with Client(backends={"scripted": ScriptedBackend()}) as client:
        done = await client.complete("Hi")
        history: list[Message | dict[str, str]] = [{"role": "user", "content": "Hi"}, done.message]
        history.append({"role": "user", "content": "Again"})
        again = await client.complete(messages=history)
        assert again.text == "Hello there."


@pytest.mark.anyio
async def test_structured_answers_are_parsed_or_told() -> None:
    backend = ScriptedBackend([say('{"a":', " 1}"), say("no json"), say('{"a":', reason="length")])
    async with Client(backends={"scripted": backend}) as client:
        assert (await client.complete("Hi", response_format="json")).parsed == {"a": 1}
        for _ in range(2):
            done = await client.complete("Hi", response_format="json")
            assert done.parsed is None
            assert any("does not parse" in w for w in done.warnings)
        assert done.finish_reason == "length"


class FullDisk(MemoryLedger):
    """A ledger that can reserve and then has no room to settle."""

    async def settle(self, reservation: str, settlement: Settlement) -> None:
        raise LedgerError("disk full")


@pytest.mark.anyio
async def test_an_answer_that_could_not_be_booked_is_not_lost() -> None:
    async with Client(backends={"scripted": ScriptedBackend()}, ledger=FullDisk()) as client:
        with pytest.raises(LedgerError) as caught:
            await client.complete("Hi")
        assert caught.value.completion is not None
        assert caught.value.completion.text == "Hello there."
        async with client.stream("Hi") as stream:
            await stream.__anext__()


@pytest.mark.anyio
async def test_a_closed_client_takes_nothing_and_closing_is_idempotent() -> None:
    backend = ScriptedBackend()
    client = Client(backends={"scripted": backend})
    await client.complete("Hi")
    assert backend.started == 1
    await client.aclose()
    await client.aclose()
    assert backend.closed
    with pytest.raises(StreamStateError, match="closed"):
        client.stream("Hi")


@pytest.mark.anyio
async def test_connect_starts_from_a_file_and_closes(tmp_path: Path) -> None:
    path = tmp_path / "cachespec.toml"
    path.write_text(
        '[client]\nledger = { use = "sqlite", path = "LEDGER" }\n'
        '[backends.one]\nuse = "tests.client.test_client:make_scripted"\nmodel = "m"\n'.replace(
            "LEDGER", str(tmp_path / "ledger.db")
        )
    )
    async with cachespec.client.connect(path) as client:
        assert (await client.complete("Hi")).backend == "one"
        assert (await client.ledger.totals()).requests == 1
    with pytest.raises(UnknownPluginError):
        path.write_text('[backends.one]\nuse = "vllm"\nmodel = "m"\n')
        async with cachespec.client.connect(path):
            pass


def make_scripted(*, name: str, model: str) -> ScriptedBackend:
    return ScriptedBackend(name=name, model=model)


@pytest.mark.anyio
async def test_wrong_wiring_fails_when_it_is_wired() -> None:
    backend = ScriptedBackend()
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"backends": {}}, ConfigError),
        ({"backends": {"scripted": backend}, "models": {"a": ["nobody"]}}, ConfigError),
        ({"backends": {"scripted": backend}, "policies": {"routing": {"use": "cheapst"}}}, UnknownPluginError),
        ({"backends": {"scripted": backend}, "policies": {"caching": {"use": "expected-cots"}}}, UnknownPluginError),
        ({"backends": {"scripted": backend}, "timeout": "soon"}, ConfigError),
        ({"backends": {"scripted": backend}, "max_output_tokens": 0}, ConfigError),
        ({"backends": {"other": backend}}, ConfigError),
        ({"backends": {"x": {"use": "openai", "modle": "m"}}}, ConfigError),
    ]
    for arguments, kind in wrong:
        with pytest.raises(kind):
            Client(**arguments)


def test_the_sync_facade_streams_completes_and_closes() -> None:
    backend = ScriptedBackend([say("a", "b"), say("c"), say("d"), say("e", "f"), say("g")])
    with cachespec.sync.Client(Client(backends={"scripted": backend})) as client:
        with client.stream("Hi") as stream:
            assert list(stream.text_stream) == ["a", "b"]
            assert stream.get_final_completion().text == "ab"
            assert stream.decision.chosen == "scripted"
        assert client.complete("Hi").text == "c"
        assert client.plan("Hi").chosen == "scripted"
        session = client.session()
        assert session.complete("one").text == "d"
        assert len(session.messages) == 2
        with session.stream("two") as turn:
            assert [e.text for e in turn if isinstance(e, TextDelta)] == ["e", "f"]
        with client.stream("Hi") as stream:
            next(iter(stream))
    assert backend.closed
    assert backend.open_attempts == 0
    with pytest.raises(StreamStateError, match="the client is closed"):
        client.complete("Hi")


@pytest.mark.anyio
async def test_the_scripted_backend_passes_the_contract_it_is_there_to_check() -> None:
    await check_backend(lambda: ScriptedBackend(), build_request("Hi"))

    class Silent(ScriptedBackend):
        def check(self, request: Request) -> Sequence[Any]:
            return [*super().check(request), "no"]

    with pytest.raises(AssertionError, match="check must accept"):
        await check_backend(lambda: Silent(), build_request("Hi"))
    assert ALL_PARAMETERS
    assert FakeClock().time() > 0


def test_a_table_in_code_may_hold_a_key_and_no_message_shows_it() -> None:
    table = {"use": "openai", "model": "gpt-x", "api_key": "sk-very-secret", "base_url": "http://127.0.0.1:9/v1"}
    client = Client(backends={"b": table})
    assert "very-secret" not in repr(client.config)
    with pytest.raises(ConfigError) as caught:
        Client(backends={"b": {**table, "modle": "x"}})
    assert "very-secret" not in str(caught.value)


@pytest.mark.anyio
async def test_a_turn_is_entered_and_left_once() -> None:
    async with Client(backends={"a": ScriptedBackend([say("one"), say("two", "three")], name="a")}) as client:
        session = client.session()
        async with session.stream("first") as turn:
            await turn.get_final_completion()
            await turn.aclose()
        assert [m.text for m in session.messages] == ["first", "one"]
        async with session.stream("second") as later:
            await turn.aclose()  # of a turn that is over: the one under way stays the only one
            with pytest.raises(StreamStateError, match="one turn at a time"):
                await session.complete("third")
            await later.get_final_completion()
        with pytest.raises(StreamStateError, match="entered once"):
            await later.__aenter__()
        assert [m.text for m in session.messages] == ["first", "one", "second", "twothree"]
