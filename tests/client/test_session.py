"""A session's turns take what a request takes, and a session goes on from stored messages."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from cachespec.client import Client
from cachespec.errors import InputError, StreamStateError
from cachespec.events import Completion, Finished, ToolCallDelta
from cachespec.messages_dump import message_to_dict
from cachespec.session import Session
from cachespec.testing import Reply, ScriptedBackend, say

TOOLS = [{"name": "population", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "population", "arguments": '{"city":"Zug"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many people live in Zug?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "31,000"},
    {"role": "assistant", "content": "31,000."},
]
GIVEN: dict[str, Any] = {
    "tool_choice": "none",
    "response_format": "json",
    "max_output_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "stop": ["END"],
    "seed": 3,
    "reasoning": "low",
    "timeout": 30,
    "cache": "no-write",
    "extra": {"a": {"x": 1}},
}


def client(*names: str, **policies: Any) -> tuple[Client, dict[str, ScriptedBackend]]:
    backends = {name: ScriptedBackend(say("1"), name=name) for name in names}
    return Client(backends=backends, models={"all": names}, model="all", policies=policies or None), backends


@pytest.mark.anyio
async def test_a_turn_takes_what_a_request_takes() -> None:
    made, backends = client("a")
    async with made:
        await made.complete("Hi", tools=TOOLS, tags=["t"], **GIVEN)
        await made.session(tools=TOOLS, tags=["t"]).complete("Hi", **GIVEN)
    (plain, _), (turn, _) = backends["a"].requests
    for name in GIVEN:
        assert getattr(turn, name) == getattr(plain, name), name
        assert getattr(turn, name) not in (None, "auto", (), {}), name
    assert (turn.messages, turn.tools, turn.tags) == (plain.messages, plain.tools, plain.tags)


def test_a_turn_names_all_that_a_request_takes_but_what_is_the_sessions() -> None:
    own = {"prompt", "turn", "messages", "system", "tools", "tenant", "session_id"}
    requests, turns = (dict(inspect.signature(kind.stream).parameters) for kind in (Client, Session))
    assert {n: p for n, p in turns.items() if n not in own} == {n: p for n, p in requests.items() if n not in own}
    for kind in (Client, Session):
        assert inspect.signature(kind.complete).parameters == inspect.signature(kind.stream).parameters
        assert inspect.signature(kind.complete).return_annotation == Completion.__name__


@pytest.mark.anyio
async def test_an_argument_that_does_not_exist_is_a_type_error() -> None:
    made, backends = client("a")
    async with made:
        with pytest.raises(TypeError, match="temprature"):
            await made.complete("Hi", temprature=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="system"):
            await made.session().complete("Hi", system="x")  # type: ignore[call-arg]
    assert backends["a"].requests == []


@pytest.mark.anyio
async def test_a_turn_may_go_to_another_model_and_carry_tags_of_its_own() -> None:
    made, _ = client("a", "b", rules=[{"when": {"tags": ["private"]}, "only": ["b"]}])
    async with made:
        session = made.session(model="a", tags=["t"])
        assert (await session.complete("one")).backend == "a"
        assert (await session.complete("two", model="b")).backend == "b"
        assert (await session.complete("three")).backend == "a"
        done = await session.complete("four", model="all", tags=["private", "t"])
        assert done.backend == "b"
        private = made.session(tags=["private"])
        assert (await private.complete("five", tags=["t"])).backend == "b"
    assert len(session.messages) == 8


@pytest.mark.anyio
@pytest.mark.parametrize(("model", "expected"), [(None, "a"), ("b", "b")])
async def test_a_tool_loop_stays_unless_its_turn_names_another_backend(model: str | None, expected: str) -> None:
    call = ToolCallDelta(0, "c1", "population", '{"city":"Zug"}')
    asks = Reply(batches=((call, Finished(reason="tool_calls")),))
    backends = {"a": ScriptedBackend([asks, say("31,000.")], name="a"), "b": ScriptedBackend(name="b")}
    async with Client(backends=backends, models={"all": ["b", "a"]}, model="all") as made:
        session = made.session(tools=TOOLS)
        await session.complete("How many people live in Zug?", model="a")
        results = [{"role": "tool", "tool_call_id": "c1", "content": "31,000"}]
        assert (await session.complete(results, model=model)).backend == expected


@pytest.mark.anyio
async def test_a_session_goes_on_from_stored_messages() -> None:
    made, backends = client("a")
    async with made:
        first = made.session(messages=HISTORY, tools=TOOLS, session_id="s")
        assert [m.role for m in first.messages] == ["user", "assistant", "tool", "assistant"]
        await first.complete([{"role": "system", "content": "Be loud."}, {"role": "user", "content": "And in Bern?"}])
        written = json.dumps([message_to_dict(message) for message in first.messages])
        again = made.session(messages=json.loads(written), system="Be brief.", tools=TOOLS, session_id="s")
        assert again.messages == made.session(messages=first.messages).messages == first.messages
        await again.complete("Thanks.")
        await made.complete(messages=[*HISTORY, {"role": "user", "content": "And in Bern?"}], tools=TOOLS)
        assert len(again.cache_report()) == 1
    stored, later, plain = (request for request, _ in backends["a"].requests)
    assert [p.text for p in stored.system] == [p.text for p in later.system] == ["Be brief."]
    assert (stored.system, stored.messages[:4], stored.messages[-1]) == (plain.system, plain.messages[:4], plain.messages[-1])
    assert [m.role for m in stored.messages[4:]] == ["system", "user"]
    assert later.messages[:6] == stored.messages
    assert len(again.messages) == 9


@pytest.mark.anyio
async def test_what_a_session_starts_from_is_checked_at_once_and_is_its_own() -> None:
    made, backends = client("a")
    stored = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    async with made:
        for wrong, field in (
            ({"messages": [*stored, {"role": "nobody", "content": "x"}]}, r"messages\[2\]\.role"),
            ({"messages": HISTORY[:1]}, "messages"),
            ({"system": 5}, "system"),
            ({"tags": [""]}, r"tags\[0\]"),
        ):
            with pytest.raises(InputError, match=field):
                made.session(**wrong)
        session = made.session(messages=stored)
        stored.append({"role": "user", "content": "later"})
        with pytest.raises(InputError, match="tool_choice"):
            await session.complete("x", tool_choice="required")
        assert [m.text for m in session.messages] == ["Hi", "Hello."]
        assert made.session(messages=[]).messages == ()
    assert backends["a"].requests == []


@pytest.mark.anyio
async def test_a_turns_stream_has_what_a_stream_has() -> None:
    made, _ = client("a")
    async with made:
        stream = made.session().stream("Hi")
        assert (stream.completion, stream.request_id) == (None, None)
        with pytest.raises(StreamStateError, match="enter the stream first"):
            await stream.get_final_text()
        async with stream:
            assert await stream.get_final_text() == "1"
            assert stream.completion is not None
            assert stream.request_id == "req_scripted"
