"""Responses: every failure form, items without deltas, indexes that are missing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.decoding import decode, fails, run, say, text, thoughts

from cachespec.errors import (
    BackendError,
    ContentFilteredError,
    ContextLengthError,
    RateLimitError,
    RequestRejectedError,
    ServerError,
)
from cachespec.events import Event, Finished, ReasoningFinished, ResponseStarted, TextDelta, ToolCallDelta, UsageReported

USAGE = {"input_tokens": 10, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}


def response(status: str, **more: Any) -> dict[str, Any]:
    return {
        "type": f"response.{status}",
        "response": {"id": "r1", "object": "response", "status": status, "model": "m1", **more},
    }


CREATED = {"type": "response.created", "response": {"id": "r1", "status": "in_progress", "model": "m1"}}


def delta(piece: str, index: int | None = 0, kind: str = "output_text", **more: Any) -> dict[str, Any]:
    event = {"type": f"response.{kind}.delta", "delta": piece, "item_id": "i", **more}
    return event if index is None else event | {"output_index": index}


def item(kind: str, index: int, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.output_item.{kind}", "output_index": index, "item": fields}


def finish(events: list[Event]) -> str:
    (one,) = [e for e in events if isinstance(e, Finished)]
    return one.reason


def test_incomplete_is_an_end_with_usage() -> None:
    for reason, expected in (("max_output_tokens", "length"), ("content_filter", "content_filter"), ("steered", "steered")):
        events = decode(
            "responses", CREATED, delta("x"), response("incomplete", incomplete_details={"reason": reason}, usage=USAGE)
        )
        assert finish(events) == expected
        assert any(isinstance(e, UsageReported) for e in events)
    assert finish(decode("responses", CREATED, response("incomplete", incomplete_details=None))) == "incomplete"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("rate_limit_exceeded", RateLimitError),
        ("server_error", ServerError),
        ("context_length_exceeded", ContextLengthError),
        ("content_filter", ContentFilteredError),
        ("invalid_prompt", ContentFilteredError),
        ("image_content_policy_violation", ContentFilteredError),
        ("invalid_image", RequestRejectedError),
        ("image_too_large", RequestRejectedError),
        ("vector_store_timeout", ServerError),
        ("something_new", ServerError),
    ],
)
def test_a_failed_response_is_raised_with_its_code_and_its_usage_is_kept(code: str, kind: type[BackendError]) -> None:
    failed = response("failed", error={"code": code, "message": "why"}, usage=USAGE)
    events, raised = fails("responses", CREATED, delta("x"), failed)
    assert (type(raised), raised.request_id, raised.retryable) == (kind, "r1", kind.default_retryable)
    assert "why" in str(raised)
    assert text(events) == "x"
    assert isinstance(events[-1], UsageReported)
    assert not any(isinstance(e, Finished) for e in events)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "code": "rate_limit_exceeded", "message": "slow", "param": None, "sequence_number": 3},
        {"type": "error", "error": {"type": "rate_limit_error", "code": None, "message": "slow"}},
        {"error": {"type": "x", "code": "rate_limit_exceeded", "message": "slow"}},
        {"type": "error", "error": {"code": 429, "message": "slow"}},
    ],
)
def test_error_events_flat_and_nested(event: dict[str, Any]) -> None:
    events, raised = fails("responses", CREATED, delta("x"), event)
    assert text(events) == "x"
    assert type(raised) is RateLimitError
    assert "slow" in str(raised)


def test_a_failure_without_a_reason() -> None:
    _, raised = fails("responses", CREATED, response("failed", error=None))
    assert type(raised) is ServerError


def test_a_failed_response_commits_to_no_content() -> None:
    output = [{"type": "message", "id": "m", "content": [{"type": "output_text", "text": "half"}]}]
    events, _ = fails("responses", CREATED, response("failed", error={"code": "server_error"}, output=output))
    assert text(events) == ""


def test_what_has_no_deltas_is_taken_from_the_finished_item_once() -> None:
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": '{"a":1}'}
    message = {
        "type": "message",
        "id": "m",
        "content": [{"type": "output_text", "text": "hi"}, {"type": "refusal", "refusal": "no"}],
    }
    thought = {"type": "reasoning", "id": "s", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    events = decode(
        "responses",
        CREATED,
        item("done", 0, **thought),
        item("added", 1, **(call | {"arguments": ""})),
        delta('{"a', 1, "function_call_arguments"),
        item("done", 1, **call),
        item("done", 2, **(call | {"call_id": "d"})),
        item("done", 3, **message),
        response("completed", output=[message, call], usage=USAGE),
    )
    assert (thoughts(events), text(events)) == ("hm", "hino")
    tools = [e for e in events if isinstance(e, ToolCallDelta)]
    assert [(e.index, e.id, e.arguments) for e in tools] == [
        (1, "c", ""),
        (1, "", '{"a'),
        (1, "", '":1}'),
        (2, "d", ""),
        (2, "", '{"a":1}'),
    ]
    (block,) = [e for e in events if isinstance(e, ReasoningFinished)]
    assert (block.part.text, block.part.raw) == ("hm", thought)
    assert finish(events) == "tool_calls"


def test_only_a_terminal_event() -> None:
    message = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "hi"}]}
    events = decode("responses", response("completed", output=[message], usage=USAGE))
    assert events[0] == ResponseStarted(request_id="r1", response_id="r1", model="m1")
    assert (text(events), finish(events)) == ("hi", "stop")


def test_events_without_an_output_index_go_by_their_item() -> None:
    events = decode(
        "responses", CREATED, delta("a", None), {**delta("b", None), "item_id": "j"}, delta("c", None), response("completed")
    )
    assert [e for e in events if isinstance(e, TextDelta)] == [TextDelta("a", 0), TextDelta("b", 1), TextDelta("c", 0)]


def test_a_server_that_numbers_nothing_and_names_its_model_last() -> None:
    """As llama.cpp does."""
    call = {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": ""}
    arguments = {"type": "response.function_call_arguments.delta", "item_id": "fc", "delta": "{}"}
    events = decode(
        "responses",
        {"type": "response.created", "response": {"id": "r1", "status": "in_progress"}},
        {"type": "response.output_item.added", "item": call},
        arguments,
        {"type": "response.output_item.done", "item": call | {"arguments": "{}"}},
        response("completed", usage=USAGE),
    )
    assert [e for e in events if isinstance(e, ToolCallDelta)] == [
        ToolCallDelta(0, "c", "f", ""),
        ToolCallDelta(0, "", "", "{}"),
    ]
    started = [e for e in events if isinstance(e, ResponseStarted)]
    assert started == [
        ResponseStarted(request_id="r1", response_id="r1"),
        ResponseStarted(request_id="r1", response_id="r1", model="m1"),
    ]


def test_a_refusal() -> None:
    events = decode("responses", CREATED, delta("No", kind="refusal"), delta(".", kind="refusal"), response("completed"))
    assert (text(events), finish(events)) == ("No.", "content_filter")


def test_open_reasoning_text_and_custom_tools() -> None:
    tool = {"type": "custom_tool_call", "id": "x", "call_id": "c", "name": "sql", "input": ""}
    events = decode(
        "responses",
        CREATED,
        delta("hm", 0, "reasoning_text", content_index=0),
        item("added", 1, **tool),
        delta("SELECT", 1, "custom_tool_call_input"),
        item("done", 1, **(tool | {"input": "SELECT 1"})),
        response("completed"),
    )
    assert thoughts(events) == "hm"
    assert "".join(e.arguments for e in events if isinstance(e, ToolCallDelta)) == "SELECT 1"


def test_unknown_events_and_items_are_passed_over() -> None:
    events = decode(
        "responses",
        CREATED,
        {"type": "response.web_search_call.searching", "output_index": 0},
        {"type": "response.something.new", "delta": 3},
        {"type": "keepalive"},
        {"note": 1},
        item("added", 0, type="web_search_call", id="w"),
        item("done", 0, type="web_search_call", id="w"),
        delta("x", 1),
        response("completed"),
    )
    assert text(events) == "x"


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "in_progress", "queued"])
def test_a_whole_answer_instead_of_a_stream(status: str) -> None:
    message = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "hi"}]}
    whole = response(status, output=[message], usage=USAGE, incomplete_details={"reason": "max_output_tokens"}, error=None)[
        "response"
    ]
    events, error = run("responses", [say(whole)[6:]])
    if status in ("completed", "incomplete"):
        assert error is None
        assert (text(events), finish(events)) == ("hi", "stop" if status == "completed" else "length")
        assert any(isinstance(e, UsageReported) for e in events)
    else:
        assert type(error) is ServerError


# -- usage


@pytest.mark.parametrize("last", [None, {}, {"input_tokens": 0, "output_tokens": 0}])
def test_input_that_was_counted_at_the_start_stays_counted(last: Any) -> None:
    begun = {"type": "response.in_progress", "response": {"id": "r1", "status": "in_progress", "usage": USAGE}}
    events = decode("responses", CREATED, begun, delta("x"), response("completed", usage=last))
    usage = [e.usage for e in events if isinstance(e, UsageReported)][-1]
    # What the start says of the output is no count of it.
    assert (usage.uncached, usage.cache_read, usage.output) == (6, 4, 0 if last else None)


# -- what only the finished response holds


def test_items_only_in_the_finished_response_are_not_lost_and_none_comes_twice() -> None:
    message = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "Let me look."}]}
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs", "summary": []}
    events = decode(
        "responses",
        {"type": "response.output_item.done", "output_index": 0, "item": thought},
        {"type": "response.output_text.delta", "output_index": 1, "item_id": "m", "delta": "Let me look."},
        {"type": "response.completed", "response": {"id": "r", "output": [thought, message, call]}},
    )
    assert text(events) == "Let me look."
    assert sum(isinstance(e, ReasoningFinished) for e in events) == 1
    assert [e for e in events if isinstance(e, ToolCallDelta)] == [
        ToolCallDelta(2, "c", "f", ""),
        ToolCallDelta(2, "", "", "{}"),
    ]
    assert events[-1] == Finished(reason="tool_calls")


def test_items_are_known_by_their_ids_where_their_places_differ() -> None:
    # The stream numbers nothing: the call's place is 0 there, and 1 in the finished response.
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}"}
    message = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "Hi"}]}
    events = decode(
        "responses",
        {"type": "response.output_item.added", "item": {**call, "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "item_id": "f", "delta": "{}"},
        {"type": "response.output_item.done", "item": call},
        {"type": "response.output_text.delta", "item_id": "m", "delta": "Hi"},
        {"type": "response.completed", "response": {"id": "r", "output": [message, call]}},
    )
    assert text(events) == "Hi"
    assert "".join(e.arguments for e in events if isinstance(e, ToolCallDelta)) == "{}"


# -- several items in one place (S4: an item is known by its place and its id)

CALLS = [{"type": "function_call", "id": f"f{n}", "call_id": f"c{n}", "name": n, "arguments": f'{{"{n}":1}}'} for n in "ab"]


def arguments(piece: str, item_id: str, index: int = 0) -> dict[str, Any]:
    return delta(piece, index, "function_call_arguments", item_id=item_id)


def made(events: list[Event]) -> list[tuple[int, str, str, str]]:
    """The calls, put together by their indexes."""
    found: dict[int, list[str]] = {}
    for e in events:
        if isinstance(e, ToolCallDelta):
            whole = found.setdefault(e.index, ["", "", ""])
            whole[:] = [whole[0] + e.id, whole[1] + e.name, whole[2] + e.arguments]
    return [(index, *parts) for index, parts in found.items()]  # type: ignore[misc]


BEGUN = [item("added", 0, **call | {"arguments": ""}) for call in CALLS]
DONE = [item("done", 0, **call) for call in CALLS]
TOLD = [[arguments(call["arguments"][:3], call["id"]), arguments(call["arguments"][3:], call["id"])] for call in CALLS]


@pytest.mark.parametrize(
    "payloads",
    [
        [*BEGUN, TOLD[0][0], TOLD[1][0], TOLD[0][1], TOLD[1][1], *DONE],
        [*BEGUN, *TOLD[1], *TOLD[0], *reversed(DONE)],
        [BEGUN[0], *TOLD[0], DONE[0], BEGUN[1], *TOLD[1], DONE[1]],
        [BEGUN[0], *TOLD[0], BEGUN[1], *TOLD[1]],
        [BEGUN[0], DONE[1], *TOLD[0], DONE[0]],
        DONE,
        [],
    ],
)
def test_calls_that_share_a_place_are_two(payloads: list[dict[str, Any]]) -> None:
    events = decode("responses", CREATED, *payloads, response("completed", output=CALLS))
    assert [call[1:] for call in sorted(made(events))] == [("ca", "a", '{"a":1}'), ("cb", "b", '{"b":1}')]
    assert finish(events) == "tool_calls"


def test_pieces_without_an_id_are_of_the_latest_item_of_their_place() -> None:
    pieces = [[{**event, "item_id": None} for event in told] for told in TOLD]
    events = decode("responses", CREATED, BEGUN[0], *pieces[0], BEGUN[1], *pieces[1], response("completed"))
    assert made(events) == [(0, "ca", "a", '{"a":1}'), (1, "cb", "b", '{"b":1}')]


def test_a_place_that_another_item_took_moves_the_next_one_on() -> None:
    third = {"type": "function_call", "id": "fc", "call_id": "cc", "name": "c", "arguments": "{}"}
    events = decode("responses", CREATED, *DONE, item("done", 1, **third), response("completed", output=[*CALLS, third]))
    assert made(events) == [(0, "ca", "a", '{"a":1}'), (1, "cb", "b", '{"b":1}'), (2, "cc", "c", "{}")]


def test_an_id_that_changes_with_every_event_splits_nothing() -> None:
    message = {"type": "message", "content": [{"type": "output_text", "text": "Hi you"}]}
    events = decode(
        "responses",
        CREATED,
        item("added", 0, type="message", id="m1", content=[]),
        delta("Hi", 0, item_id="m2"),
        delta(" you", 0, item_id="m3"),
        item("done", 0, **message, id="m4"),
        item("added", 1, **CALLS[0] | {"id": "x1", "arguments": ""}),
        arguments(CALLS[0]["arguments"], "x2", 1),
        item("done", 1, **CALLS[0] | {"id": "x3"}),
        response("completed", output=[{**message, "id": "m5"}, CALLS[0] | {"id": "x4"}]),
    )
    assert [e for e in events if isinstance(e, TextDelta)] == [TextDelta("Hi", 0), TextDelta(" you", 0)]
    assert made(events) == [(1, "ca", "a", '{"a":1}')]


def test_texts_and_thoughts_that_share_a_place_stay_apart() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    message = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "Hi"}]}
    events = decode("responses", CREATED, item("done", 0, **thought), item("done", 0, **message), response("completed"))
    assert (thoughts(events), text(events)) == ("hm", "Hi")
    assert [e.index for e in events if isinstance(e, TextDelta | ReasoningFinished)] == [0, 1]
