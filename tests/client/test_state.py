"""What a vendor keeps never moves (contract D2), however a request names it: in `extra`, or in the vendor's own body."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cachespec.bodies import request_from_body
from cachespec.client import Client
from cachespec.decision import Decision
from cachespec.errors import ConnectionFailedError, NoRouteError
from cachespec.events import Finished, ResponseStarted, TextDelta, UsageReported
from cachespec.pricing import hosted_rates
from cachespec.testing import ALL_PARAMETERS, Reply, ScriptedBackend
from cachespec.usage import Usage

PRICES = {"cheap": {"input": "0.1", "output": "0.4"}, "dear": {"input": "1", "output": "4"}}
USAGE = Usage(uncached=10, cache_read=0, cache_write={}, output=1)
RESPONSES = {"input": "And then?", "previous_response_id": "resp_1"}
CONVERSATION = {"input": "And then?", "conversation": {"id": "conv_1"}}
MESSAGES = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 50, "container": "cont_1"}


def table(use: str, price: str, **more: Any) -> dict[str, Any]:
    model = "gpt-4.1" if use == "openai" else "claude-sonnet-4-5"
    return {"use": use, "model": model, "api_key": "k", "prices": PRICES[price], **more}


def three() -> Client:
    """Two accounts of one vendor, and another vendor; the first is dear."""
    backends = {
        "gpt": table("openai", "dear"),
        "gpt2": table("openai", "cheap", base_url="http://127.0.0.1:9/v1"),
        "claude": table("anthropic", "cheap"),
    }
    return Client(backends=backends, models={"main": ["gpt", "gpt2", "claude"]})


def left(decision: Decision) -> list[str]:
    assert all(o.eligible or [r.code for r in o.reasons] == ["capability"] for o in decision.candidates)
    return [o.backend for o in decision.candidates if o.eligible]


@pytest.mark.parametrize(("body", "keeper"), [(RESPONSES, "gpt"), (CONVERSATION, "gpt"), (MESSAGES, "claude")])
def test_a_body_that_names_what_its_vendor_keeps_goes_to_the_first_of_that_vendor(body: dict[str, Any], keeper: str) -> None:
    client = three()
    verdict = client.plan_request(request_from_body({"model": "main", **body}))
    assert left(verdict.decision) == [keeper]
    wire = client.wire(verdict)
    assert wire is not None
    assert any(f'"{name}":' in wire.body for name in ("previous_response_id", "conversation", "container"))


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "thread", "prompt", "container"])
def test_extra_says_whose_it_is(field: str) -> None:
    assert left(three().plan("Hi", extra={"claude": {field: "id_1"}}, model="main")) == ["claude"]
    assert left(three().plan("Hi", extra={"gpt": {field: {"id": "id_1"}}}, model="main")) == ["gpt"]


@pytest.mark.parametrize("value", [None, "", {}, {"skills": []}])
def test_what_has_no_id_is_kept_by_nobody(value: Any) -> None:
    assert len(left(three().plan("Hi", extra={"claude": {"container": value}}, model="main"))) == 3


def test_where_nobody_can_be_told_it_nobody_answers() -> None:
    backends = {
        "chat": table("openai", "cheap", api="chat"),
        "server": {"use": "compatible", "server": "vllm", "model": "m", "api": "messages", "prices": PRICES["cheap"]},
        "claude": table("anthropic", "dear"),
    }
    client = Client(backends=backends, models={"main": list(backends), "local": ["chat", "server"]})
    decision = client.plan_request(request_from_body({"model": "main", **RESPONSES})).decision
    assert (decision.chosen, left(decision)) == (None, [])
    assert "previous_response_id names what openai keeps" in decision.candidates[0].reasons[0].detail
    assert left(client.plan_request(request_from_body({"model": "main", **MESSAGES})).decision) == ["claude"]
    assert left(client.plan_request(request_from_body({"model": "local", **MESSAGES})).decision) == []


def test_of_those_that_speak_a_protocol_the_vendor_itself_comes_first() -> None:
    backends = {
        "server": {"use": "compatible", "server": "vllm", "model": "m", "api": "responses", "prices": PRICES["cheap"]},
        "gpt": table("openai", "dear"),
    }
    client = Client(backends=backends, models={"main": ["server", "gpt"], "local": ["server"]})
    assert left(client.plan_request(request_from_body({"model": "main", **RESPONSES})).decision) == ["gpt"]
    assert left(client.plan_request(request_from_body({"model": "local", **RESPONSES})).decision) == ["server"]


def answering(response_id: str) -> Reply:
    started = ResponseStarted(request_id="r", model=None, response_id=response_id)
    return Reply(batches=((started,), (TextDelta("Hi"),), (Finished(reason="stop"), UsageReported(USAGE))))


def accounts(**scripts: Any) -> dict[str, ScriptedBackend]:
    return {
        name: ScriptedBackend(
            scripts.get(name, ()), name=name, provider="openai", rates=hosted_rates(None, "m", prices=PRICES[name])
        )
        for name in ("cheap", "dear")
    }


@pytest.mark.anyio
async def test_an_id_that_was_seen_says_who_keeps_it_to_its_own_tenant() -> None:
    backends = accounts(dear=[answering("resp_9")])
    models = {"main": ["cheap", "dear"], "other": ["cheap"]}
    async with Client(backends=backends, models=models, model="main") as client:
        async with client.stream_request(replace(request_from_body({"input": "Hi", "model": "dear"}), tenant="a")) as stream:
            await stream.until_done()
        follows = request_from_body({"input": "More", "previous_response_id": "resp_9"})
        assert left(client.plan_request(replace(follows, tenant="a")).decision) == ["dear"]
        assert left(client.plan_request(replace(follows, tenant="b")).decision) == ["cheap"]
        elsewhere = replace(follows, tenant="a", model="other")
        assert left(client.plan_request(elsewhere).decision) == []
        with pytest.raises(NoRouteError):
            async with client.stream_request(elsewhere):
                pass


@pytest.mark.anyio
async def test_what_was_named_stays_where_it_was_answered_and_a_session_tells_the_account() -> None:
    async with Client(backends=accounts(), models={"main": ["cheap", "dear"]}, model="main") as client:
        await client.complete("Hi", model="dear", session_id="s", extra={"dear": {"conversation": "conv_7"}})
        body = {"input": "More", "conversation": "conv_7"}
        assert left(client.plan_request(request_from_body(body)).decision) == ["dear"]
        unseen = request_from_body({"input": "More", "conversation": "conv_8"})
        assert left(client.plan_request(unseen).decision) == ["cheap"]
        assert left(client.plan_request(replace(unseen, session_id="s")).decision) == ["dear"]
        assert left(client.plan_request(replace(unseen, session_id="s", tenant="b")).decision) == ["cheap"]


@pytest.mark.anyio
async def test_it_does_not_move_when_its_vendor_fails() -> None:
    backends = accounts(cheap=Reply(refuse=ConnectionFailedError("refused", backend="cheap")))
    capable = backends["dear"].capabilities
    backends["dear"].capabilities = replace(capable, parameters=ALL_PARAMETERS, keeps=frozenset())
    async with Client(backends=backends, models={"main": ["cheap", "dear"]}, model="main") as client:
        with pytest.raises(ConnectionFailedError):
            async with client.stream_request(request_from_body({"input": "More", "previous_response_id": "resp_1"})):
                pass
    assert backends["dear"].requests == []
