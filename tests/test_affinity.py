"""What a client remembers of sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cachespec.affinity import Sessions
from cachespec.request import Request, build_request


def ask(session: str | None = "s", **more: Any) -> Request:
    return build_request("Hi", session_id=session, **more)


def kept(**more: Any) -> Sessions:
    sessions = Sessions()
    sessions.remember(ask(**more), backend="b", model="m")
    return sessions


def test_a_session_goes_on_where_it_was() -> None:
    sessions = kept(reasoning="high", extra={"b": {"speed": "fast", "top_k": 3}})
    resumed = sessions.resume(ask())
    assert resumed.previous_backend == "b"
    assert resumed.request.reasoning == ask(reasoning="high").reasoning
    assert resumed.request.extra == {"b": {"speed": "fast"}}  # what is no part of a cache key is not carried over
    assert resumed.changed == ()


def test_what_a_request_says_holds_and_is_told() -> None:
    sessions = kept(reasoning="high", extra={"b": {"speed": "fast"}})
    resumed = sessions.resume(
        ask(reasoning={"budget_tokens": 2048}, extra={"b": {"speed": "standard"}}, response_format="json")
    )
    assert resumed.request.extra == {"b": {"speed": "standard"}}
    assert [str(one) for one in resumed.changed] == [
        "reasoning: high became 2048 tokens",
        "response_format: nothing became json",
        "b.speed: fast became standard",
    ]


@pytest.mark.parametrize(
    ("field", "first", "then"),
    [
        ("text", {"verbosity": "low"}, {"verbosity": "high"}),
        ("verbosity", "low", "high"),
        ("context_management", [{"type": "compaction"}], []),
        ("prompt_cache_key", "mine", "yours"),
        ("service_tier", "flex", "priority"),
    ],
)
def test_every_field_that_is_part_of_a_cache_key_is_kept_or_told(field: str, first: object, then: object) -> None:
    sessions = kept(extra={"b": {field: first}})
    silent, said = sessions.resume(ask()), sessions.resume(ask(extra={"b": {field: then}}))
    assert (silent.request.extra, silent.changed) == ({"b": {field: first}}, ())
    assert said.request.extra == {"b": {field: then}}
    assert [(one.owner, one.field) for one in said.changed] == [("b", field)]


@pytest.mark.parametrize(
    ("field", "first", "goes_on"),
    [
        ("parallel_tool_calls", False, None),
        ("text", {"format": {"type": "text"}}, None),
        ("text", {"format": {"type": "text"}, "verbosity": "low"}, {"verbosity": "low"}),
        ("output_config", {"format": {"type": "json_schema"}, "effort": "low"}, {"effort": "low"}),
    ],
)
def test_what_is_asked_of_one_turn_is_not_carried_over_and_told(field: str, first: object, goes_on: object) -> None:
    resumed = kept(extra={"b": {field: first}}).resume(ask())
    assert resumed.request.extra == ({} if goes_on is None else {"b": {field: goes_on}})
    assert [(one.owner, one.field) for one in resumed.changed] == [("b", field)]


@pytest.mark.parametrize(
    ("field", "first", "goes_on"),
    [
        ("reasoning", {"effort": "low"}, None),
        ("reasoning_effort", "low", None),
        ("thinking", {"type": "disabled"}, None),
        ("output_config", {"effort": "low"}, None),
        ("output_config", {"effort": "low", "task_budget": 9}, {"task_budget": 9}),
    ],
)
def test_what_a_request_says_itself_holds_against_a_field_that_was_kept(field: str, first: object, goes_on: object) -> None:
    resumed = kept(extra={"b": {field: first}}).resume(ask(reasoning="high"))
    assert resumed.request.extra == ({} if goes_on is None else {"b": {field: goes_on}})
    assert [(one.owner, one.field) for one in resumed.changed] == [(None, "reasoning"), ("b", field)]


def test_settings_of_one_object_are_kept_one_by_one() -> None:
    form = {"type": "json_object"}
    resumed = kept(extra={"b": {"text": {"verbosity": "low"}}}).resume(ask(extra={"b": {"text": {"format": form}}}))
    assert resumed.request.extra == {"b": {"text": {"verbosity": "low", "format": form}}}


def test_whether_calls_may_be_parallel_is_told_beside_the_choice() -> None:
    tools = [{"name": "t", "input_schema": {"type": "object", "properties": {}}}]
    sessions = kept(tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    (change,) = sessions.resume(ask(tools=tools, tool_choice="auto")).changed
    assert (change.field, str(change)) == ("parallel_tool_calls", "parallel_tool_calls: False became nothing")


def test_a_tool_choice_is_never_carried_over() -> None:
    tools = [{"name": "t", "input_schema": {"type": "object", "properties": {}}}]
    sessions = kept(tools=tools, tool_choice="required")
    resumed = sessions.resume(ask(tools=tools))
    assert resumed.request.tool_choice is None
    assert [str(one) for one in resumed.changed] == ["tool_choice: required became nothing"]


def test_without_a_session_nothing_is_remembered() -> None:
    sessions = Sessions()
    sessions.remember(ask(None), backend="b", model="m")
    request = ask(None)
    assert sessions.resume(request).request is request
    assert sessions.resume(ask()).previous_backend is None


def test_the_longest_unused_session_is_forgotten() -> None:
    sessions = Sessions(most=2)
    for name in ("a", "b", "a", "c"):
        sessions.remember(ask(name), backend=name, model="m")
    assert [sessions.resume(ask(name)).previous_backend for name in ("a", "b", "c")] == ["a", None, "c"]


def test_an_unchanged_request_stays_the_one_it_is() -> None:
    request = ask(reasoning="low")
    assert kept(reasoning="low").resume(request).request is request


def results(first: str, *calls: str, session: str | None = None, tenant: str | None = None) -> Request:
    """What is sent after an answer that called tools: a conversation that began with `first`, and their results."""
    made = [{"id": call, "type": "function", "function": {"name": "look", "arguments": "{}"}} for call in calls]
    told = [{"role": "tool", "tool_call_id": call, "content": "seen"} for call in calls]
    messages: list[Any] = [{"role": "user", "content": first}, {"role": "assistant", "tool_calls": made}, *told]
    return build_request(messages=messages, session_id=session, tenant=tenant)


def called(
    sessions: Sessions, first: str, backend: str, *calls: str, session: str | None = None, tenant: str | None = None
) -> None:
    request = build_request(first, session_id=session, tenant=tenant)
    sessions.remember(request, backend=backend, model="m", calls=calls)


def test_a_tool_call_is_known_by_its_session_whatever_its_id() -> None:
    sessions = Sessions()
    called(sessions, "One", "a", "call_0", session="s1")
    called(sessions, "One", "b", "call_0", session="s2")
    called(sessions, "One", "c", "call_0", session="s1", tenant="t")
    for session, tenant, backend in (("s1", None, "a"), ("s2", None, "b"), ("s1", "t", "c")):
        resumed = sessions.resume(results("One", "call_0", session=session, tenant=tenant))
        assert (resumed.previous_backend, resumed.tool_loop) == (backend, True)
    # A history that was cut is still its session's; results of another session's calls are none of it.
    assert sessions.resume(results("Cut", "call_0", session="s1")).previous_backend == "a"
    called(sessions, "Two", "d", "call_9", session="s3")
    other = sessions.resume(results("Two", "call_9", session="s1"))
    assert (other.previous_backend, other.tool_loop) == ("a", False)


def test_without_a_session_a_tool_call_is_known_by_its_conversation() -> None:
    sessions = Sessions()
    called(sessions, "One", "a", "call_0", "x")
    called(sessions, "Two", "b", "call_0", "y")
    assert [sessions.resume(results(first, "call_0")).previous_backend for first in ("One", "Two")] == ["a", "b"]
    assert sessions.resume(results("One", "call_0", tenant="t")).tool_loop is False
    # Where the conversation is not known: an id that only one backend used will do, one that two used will not.
    assert sessions.resume(results("Cut", "call_0")).previous_backend is None
    assert sessions.resume(results("Cut", "y")).previous_backend == "b"
    assert sessions.resume(results("One", "call_0", session="new")).previous_backend == "a"


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ITEM = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
CHAT: list[Any] = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "seen"}]
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
BRIEF = {"role": "user", "content": "Be brief."}
SAID = {"type": "text", "text": "seen"}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "seen"}}
SEARCH = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "seen"}]}


def used(*content: Any) -> list[Any]:
    return [USE, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": list(content)}]}]


ANSWERS: dict[str, list[Any]] = {
    "followed by a user": [*CHAT, BRIEF],
    "followed by the system": [*CHAT, {"role": "system", "content": "Be brief."}],
    "followed by several": [*CHAT, BRIEF, BRIEF],
    "followed by the beginning of an answer": [*CHAT, {"role": "assistant", "content": "I see"}],
    "beside text": [USE, {"role": "user", "content": [*used(SAID)[1]["content"], SAID]}],
    "document": used(DOCUMENT),
    "document beside text": used(SAID, DOCUMENT),
    "search result": used(SEARCH),
    "tool reference": used({"type": "tool_reference", "tool_name": "look"}),
    "items": [{"type": "reasoning", "summary": []}, ITEM, {"type": "function_call_output", "call_id": "c", "output": "seen"}],
    "file": [ITEM, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_id": "f"}]}],
    "custom": [
        {"type": "custom_tool_call", "call_id": "c", "name": "look", "input": "raw"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "seen"},
    ],
    "item followed by a user": [ITEM, {"type": "function_call_output", "call_id": "c", "output": "seen"}, BRIEF],
}


@pytest.mark.parametrize("session", ["s", None])
@pytest.mark.parametrize("answer", ANSWERS)
def test_results_are_known_in_every_form_and_until_they_are_answered(answer: str, session: str | None) -> None:
    sessions = Sessions()
    called(sessions, "One", "a", "c", session=session)
    called(sessions, "Two", "b", "c", session="another")
    told = [{"role": "user", "content": "One"}, *ANSWERS[answer]]
    resumed = sessions.resume(build_request(messages=told, session_id=session))
    assert (resumed.previous_backend, resumed.tool_loop) == ("a", True)
    more = [*told, {"role": "assistant", "content": "Done."}, BRIEF]
    assert sessions.resume(build_request(messages=more, session_id=session)).tool_loop is False


def test_calls_made_after_the_beginning_of_an_answer_are_known_by_their_conversation() -> None:
    sessions = Sessions()
    for first, backend in (("One", "a"), ("Two", "b")):
        begun: list[Any] = [{"role": "user", "content": first}, {"role": "assistant", "content": "I will"}]
        sessions.remember(build_request(messages=begun), backend=backend, model="m", calls=["c"])
        assert sessions.resume(build_request(messages=[*begun, *CHAT])).previous_backend == backend
    assert sessions.resume(build_request(messages=[{"role": "user", "content": "One"}, *CHAT])).previous_backend == "a"


def test_parallel_conversations_of_one_session_are_told_apart() -> None:
    sessions = Sessions()
    called(sessions, "One", "a", "call_0", session="s")
    called(sessions, "Two", "b", "call_0", session="s")
    assert [sessions.resume(results(first, "call_0", session="s")).previous_backend for first in ("One", "Two")] == ["a", "b"]


def test_tenants_share_no_sessions() -> None:
    sessions = Sessions()
    extra = {"b": {"betas": ["own"]}}
    sessions.remember(replace(ask(reasoning="high", extra=extra), tenant="t1"), backend="b", model="m", response_id="r1")
    for tenant in (None, "t2"):
        request = replace(ask(), tenant=tenant)
        resumed = sessions.resume(request)
        assert (resumed.request, resumed.previous_backend, resumed.previous_response) == (request, None, None)
    again = sessions.resume(replace(ask(), tenant="t1"))
    assert (again.previous_backend, again.previous_response, again.request.extra) == ("b", "r1", extra)


def test_another_server_under_the_same_name_does_not_know_the_last_answer() -> None:
    sessions = Sessions()
    for session, backend in (("s", "a"), ("t", "b")):
        sessions.remember(ask(session), backend=backend, model="m", response_id=f"r-{session}")
    sessions.forget_answers("a")
    assert [sessions.resume(ask(name)).previous_response for name in ("s", "t")] == [None, "r-t"]
    assert sessions.resume(ask("s")).previous_backend == "a"
