"""What a client remembers of sessions."""

from __future__ import annotations

from typing import Any

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
    assert [text.split(";")[0] for text in resumed.changed] == [
        "reasoning: high became 2048 tokens",
        "response_format: nothing became json",
        "b.speed: fast became standard",
    ]


def test_a_tool_choice_is_never_carried_over() -> None:
    tools = [{"name": "t", "input_schema": {"type": "object", "properties": {}}}]
    sessions = kept(tools=tools, tool_choice="required")
    resumed = sessions.resume(ask(tools=tools))
    assert resumed.request.tool_choice is None
    assert [text.split(";")[0] for text in resumed.changed] == ["tool_choice: required became nothing"]


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
