"""Messages: usage that comes twice, errors in mid-stream, blocks of every kind."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.decoding import decode, fails, run, say, text, thoughts

from cachespec.backends._decode import merged_usage
from cachespec.errors import (
    AuthenticationError,
    BackendError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RequestRejectedError,
    RequestTimeoutError,
    ServerError,
)
from cachespec.events import Event, Finished, ReasoningFinished, ToolCallDelta, UsageReported
from cachespec.usage import Usage


def start(**usage: Any) -> dict[str, Any]:
    return {"type": "message_start", "message": {"id": "m1", "type": "message", "model": "c1", "content": [], "usage": usage}}


def block(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": fields}


def delta(index: int, kind: str, value: str) -> dict[str, Any]:
    field = {"text": "text", "input_json": "partial_json"}.get(kind, kind)
    return {"type": "content_block_delta", "index": index, "delta": {"type": f"{kind}_delta", field: value}}


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def end(reason: str | None = "end_turn", /, **usage: Any) -> list[dict[str, Any]]:
    return [{"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage or None}, {"type": "message_stop"}]


TEXT = [block(0, type="text", text=""), delta(0, "text", "x"), stop(0)]


def last_usage(events: list[Event]) -> Usage | None:
    found = [e.usage for e in events if isinstance(e, UsageReported)]
    return found[-1] if found else None


def finish(events: list[Event]) -> str:
    (one,) = [e for e in events if isinstance(e, Finished)]
    return one.reason


# -- usage -----------------------------------------------------------------------------------------------------------


def test_start_and_delta_are_merged_never_added() -> None:
    counts = {"input_tokens": 6, "cache_creation_input_tokens": 159_217, "cache_read_input_tokens": 0}
    events = decode("messages", start(**counts, output_tokens=1), *TEXT, *end(**counts, output_tokens=2_745))
    assert last_usage(events) == Usage(uncached=6, cache_read=0, cache_write={"unspecified": 159_217}, output=2_745)


def test_the_split_by_lifetime_of_the_start_is_kept() -> None:
    split = {"ephemeral_5m_input_tokens": 2_000, "ephemeral_1h_input_tokens": 8_000}
    events = decode(
        "messages",
        start(input_tokens=6, cache_creation_input_tokens=10_000, cache_creation=split, output_tokens=1),
        *TEXT,
        *end(input_tokens=6, cache_creation_input_tokens=10_000, cache_read_input_tokens=None, output_tokens=9),
    )
    assert last_usage(events) == Usage(uncached=6, cache_read=None, cache_write={"5m": 2_000, "1h": 8_000}, output=9)


def test_hosts_that_report_the_cache_only_at_the_end() -> None:
    late = {"input_tokens": 7, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 50, "output_tokens": 9}
    events = decode("messages", start(input_tokens=0, output_tokens=0), *TEXT, *end(**late))
    assert last_usage(events) == Usage(uncached=7, cache_read=900, cache_write={"unspecified": 50}, output=9)


def test_a_later_zero_or_null_erases_nothing() -> None:
    early = {"input_tokens": 7, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 50}
    for nothing in (0, None):
        later = dict.fromkeys(early, nothing)
        events = decode("messages", start(**early, output_tokens=1), *TEXT, *end(**later, output_tokens=9))
        assert last_usage(events) == Usage(uncached=7, cache_read=900, cache_write={"unspecified": 50}, output=9)


def test_merging_goes_into_objects() -> None:
    earlier = {"a": {"x": 1, "y": 2}, "tier": "standard", "b": None}
    assert merged_usage(earlier, {"a": {"x": 0, "y": 5}, "tier": None, "b": 0}) == {
        "a": {"x": 1, "y": 5},
        "tier": "standard",
        "b": 0,
    }
    assert earlier == {"a": {"x": 1, "y": 2}, "tier": "standard", "b": None}


def test_compaction_outside_the_totals_is_counted() -> None:
    iterations = [
        {"type": "compaction", "input_tokens": 1_000, "output_tokens": 100},
        {"type": "message", "input_tokens": 10, "output_tokens": 9},
    ]
    events = decode("messages", start(input_tokens=10, output_tokens=1), *TEXT, *end(output_tokens=9, iterations=iterations))
    usage = last_usage(events)
    assert usage is not None
    assert (usage.uncached, usage.output) == (1_010, 109)


def test_a_message_delta_without_usage_leaves_the_output_unknown() -> None:
    events = decode("messages", start(input_tokens=6, output_tokens=1), *TEXT, *end())
    assert last_usage(events) == Usage(uncached=6, cache_read=None, cache_write=None, output=None)
    assert finish(events) == "stop"


def test_no_usage_at_all_is_absent() -> None:
    assert last_usage(decode("messages", start(), *TEXT, *end())) is None


def test_streamed_and_whole_give_the_same_usage() -> None:
    counts = {"input_tokens": 6, "cache_creation_input_tokens": 128, "cache_read_input_tokens": 1_024}
    split = {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 28}
    streamed = decode(
        "messages", start(**counts, cache_creation=split, output_tokens=1), *TEXT, *end(**counts, output_tokens=9)
    )
    whole = {
        "id": "m1",
        "type": "message",
        "model": "c1",
        "content": [{"type": "text", "text": "x"}],
        "stop_reason": "end_turn",
        "usage": {**counts, "cache_creation": split, "output_tokens": 9},
    }
    events, error = run("messages", [say(whole)[6:]])
    assert error is None
    assert last_usage(events) == last_usage(streamed)
    assert last_usage(events) is not None
    assert (text(events), finish(events)) == (text(streamed), finish(streamed))


# -- content ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("pause_turn", "pause"),
        ("compaction", "compaction"),
        (None, "stop"),
    ],
)
def test_stop_reasons(reason: str | None, expected: str) -> None:
    assert finish(decode("messages", start(), *TEXT, *end(reason))) == expected


def test_tool_calls_and_server_tools() -> None:
    events = decode(
        "messages",
        start(),
        block(0, type="server_tool_use", id="s", name="web_search", input={}),
        delta(0, "input_json", '{"query":"x"}'),
        stop(0),
        block(1, type="web_search_tool_result", tool_use_id="s", content=[]),
        stop(1),
        block(2, type="tool_use", id="t", name="f", input={}),
        delta(2, "input_json", '{"a" :'),
        delta(2, "input_json", " 1}"),
        stop(2),
        block(3, type="tool_use", id="u", name="g", input={"b": "ü"}),
        stop(3),
        *end("tool_use"),
    )
    tools = [(e.index, e.id, e.name, e.arguments) for e in events if isinstance(e, ToolCallDelta)]
    assert tools == [(2, "t", "f", ""), (2, "", "", '{"a" :'), (2, "", "", " 1}"), (3, "u", "g", ""), (3, "", "", '{"b":"ü"}')]
    assert finish(events) == "tool_calls"


def test_text_and_thinking_in_the_start_of_a_block() -> None:
    events = decode(
        "messages",
        start(),
        block(0, type="thinking", thinking="a", extra=1),
        delta(0, "thinking", "b"),
        delta(0, "signature", "s1"),
        delta(0, "signature", "s2"),
        stop(0),
        block(1, type="text", text="c"),
        stop(1),
        *end(),
    )
    assert (thoughts(events), text(events)) == ("ab", "c")
    (part,) = [e.part for e in events if isinstance(e, ReasoningFinished)]
    assert part.raw == {"type": "thinking", "thinking": "ab", "extra": 1, "signature": "s1s2"}


def test_thinking_that_is_not_shown_keeps_its_signature() -> None:
    events = decode("messages", start(), block(0, type="thinking", thinking=""), delta(0, "signature", "s"), stop(0), *end())
    (part,) = [e.part for e in events if isinstance(e, ReasoningFinished)]
    assert (part.text, part.raw) == ("", {"type": "thinking", "thinking": "", "signature": "s"})


def test_unknown_events_blocks_and_deltas_are_passed_over() -> None:
    events = decode(
        "messages",
        {"type": "ping"},
        start(),
        {"type": "something_new", "x": 1},
        block(0, type="container_upload", file_id="f"),
        stop(0),
        block(1, type="text", text=""),
        {"type": "content_block_delta", "index": 1, "delta": {"type": "citations_delta", "citation": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "new_delta"}},
        delta(1, "text", "x"),
        stop(1),
        stop(7),
        *end(),
    )
    assert (text(events), finish(events)) == ("x", "stop")


def test_a_clean_end_before_message_stop_is_no_finish() -> None:
    events = decode("messages", start(), *TEXT, end()[0])
    assert not any(isinstance(e, Finished) for e in events)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("overloaded_error", OverloadedError),
        ("rate_limit_error", RateLimitError),
        ("api_error", ServerError),
        ("timeout_error", RequestTimeoutError),
        ("invalid_request_error", RequestRejectedError),
        ("authentication_error", AuthenticationError),
        ("permission_error", PermissionDeniedError),
        ("billing_error", PermissionDeniedError),
        ("not_found_error", NotFoundError),
        ("something_new", ServerError),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
def test_an_error_event_is_classified_by_its_type(kind: str, expected: type[BackendError], after: int) -> None:
    error = {"type": "error", "error": {"type": kind, "message": "why"}, "request_id": "req_9"}
    events, raised = fails("messages", start(), *TEXT[:after], error)
    assert text(events) == ("x" if after else "")
    assert type(raised) is expected
    assert (raised.status, raised.request_id, raised.retryable) == (None, "req_9", expected.default_retryable)
    assert "why" in str(raised)
    named, again = run("messages", [say(start(), *TEXT[:after], error, named=True)])
    assert (named, type(again)) == (events, expected)


def test_blocks_whose_stop_never_came_end_with_the_message() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    events = decode("messages", {"type": "content_block_start", "index": 0, "content_block": use}, {"type": "message_stop"})
    assert [e for e in events if isinstance(e, ToolCallDelta)] == [
        ToolCallDelta(0, "t", "f", ""),
        ToolCallDelta(0, "", "", '{"a":1}'),
    ]


NUMBERS = '{"p":1.10,"q":1e400,"big":[1E5,-0.0,12345678901234567890]}'


def test_numbers_of_an_input_that_comes_as_an_object_stay_as_they_were_written() -> None:
    used = b'{"type":"tool_use","id":"t","name":"f","input":' + NUMBERS.encode() + b"}"
    message = b'{"id":"m","type":"message","role":"assistant","content":[' + used + b'],"stop_reason":"tool_use","usage":{}}'
    begun = b'data: {"type":"content_block_start","index":0,"content_block":' + used + b"}\n\n"
    for body in (message, say(start()) + begun + say(stop(0), *end("tool_use"))):
        events, error = run("messages", [body])
        assert error is None
        assert "".join(e.arguments for e in events if isinstance(e, ToolCallDelta)) == NUMBERS


def test_a_block_that_takes_the_place_of_another_ends_it() -> None:
    events = decode(
        "messages",
        start(),
        block(0, type="thinking", thinking=""),
        delta(0, "thinking", "hm"),
        delta(0, "signature", "s"),
        block(0, type="tool_use", id="t", name="f", input={}),
        block(0, type="tool_use", id="u", name="g", input={"a": 1}),
        *end("tool_use"),
    )
    assert [(e.id, e.name, e.arguments) for e in events if isinstance(e, ToolCallDelta)] == [
        ("t", "f", ""),
        ("", "", "{}"),
        ("u", "g", ""),
        ("", "", '{"a":1}'),
    ]
    (thought,) = [e.part for e in events if isinstance(e, ReasoningFinished)]
    assert thought.raw == {"type": "thinking", "thinking": "hm", "signature": "s"}
