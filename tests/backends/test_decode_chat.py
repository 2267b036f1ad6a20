"""Chat Completions: what vendors and compatible servers really send, and every way a stream of theirs fails."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.decoding import decode, decoder, fails, run, say, text, thoughts

from cachespec.assembly import Assembly
from cachespec.errors import (
    BackendError,
    ContentFilteredError,
    ContextLengthError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RequestRejectedError,
    ServerError,
)
from cachespec.events import Event, Finished, ReasoningFinished, ResponseStarted, TextDelta, ToolCallDelta, UsageReported
from cachespec.usage import Usage


def chunk(delta: dict[str, Any] | None = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "model": "m1", "choices": [{"index": 0, "delta": delta or {}, "finish_reason": reason}], **more}


def calls(events: list[Event]) -> list[tuple[int, str, str, str]]:
    return [(e.index, e.id, e.name, e.arguments) for e in events if isinstance(e, ToolCallDelta)]


def finish(events: list[Event]) -> str:
    (one,) = [e for e in events if isinstance(e, Finished)]
    return one.reason


def call(index: int | None, call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"function": {"name": name, "arguments": arguments}}
    return entry | ({} if index is None else {"index": index}) | ({} if call_id is None else {"id": call_id})


def tool_events(*deltas: list[dict[str, Any]]) -> list[tuple[int, str, str, str]]:
    return calls(decode("chat", *(chunk({"tool_calls": d}) for d in deltas), chunk(reason="tool_calls"), "[DONE]"))


def test_several_calls_in_one_delta_keep_their_order() -> None:
    one, two = call(0, "a", "f", '{"x":'), call(1, "b", "g", "{}")
    assert tool_events([one, two], [call(0, None, None, "1}")]) == [
        (0, "a", "f", '{"x":'),
        (1, "b", "g", "{}"),
        (0, "", "", "1}"),
    ]


def test_a_new_id_on_an_index_in_use_is_passed_on_as_it_is() -> None:
    assert tool_events([call(0, "a", "f", "{}")], [call(0, "b", "g", "{}")]) == [(0, "a", "f", "{}"), (0, "b", "g", "{}")]


def test_without_an_index_a_new_id_is_a_new_call() -> None:
    deltas = [call(None, "a", "f", "{"), call(None, "a", None, "}"), call(None, "b", "g", "{"), call(None, None, None, "}")]
    expected = [(0, "a", "f", "{"), (0, "a", "", "}"), (1, "b", "g", "{"), (1, "", "", "}")]
    assert tool_events(deltas) == expected
    assert tool_events(*([d] for d in deltas)) == expected


def test_without_index_and_id_a_name_is_a_new_call() -> None:
    assert tool_events([call(None, None, "f", "{}"), call(None, "", "g", "{}")]) == [(0, "", "f", "{}"), (1, "", "g", "{}")]


@pytest.mark.parametrize(
    ("tools", "names", "expected"),
    [
        (["f", "g"], ["f", "g", "f"], ["f", "g", "f"]),
        (["f", "get_time"], ["f", "get_", "time"], ["f", "get_time"]),
        (["f", "g", "fg"], ["f", "g"], ["fg"]),  # one tool, or two: its pieces
        (["f", "fgh"], ["f", "g", "h"], ["fgh"]),
        (["f"], ["f", "g"], ["fg"]),  # no tool begins so
        (["get", "get_time"], ["get", "get_time"], ["get_time"]),
        ([], ["f", "g"], ["fg"]),
    ],
)
@pytest.mark.parametrize("arguments", [None, "", "{}"])
def test_the_tools_tell_a_name_from_a_piece_of_one(
    tools: list[str], names: list[str], expected: list[str], arguments: str | None
) -> None:
    """Calls without ids on one index, of which only the last has arguments."""
    d, whole = decoder("chat"), Assembly(provider=None, model="m")
    d.tools = tools
    deltas = [call(0, None, name, "") for name in names] + [call(0, None, None, arguments)]
    body = say(*(chunk({"tool_calls": [delta]}) for delta in deltas), chunk(reason="tool_calls"), "[DONE]")
    for event in (*d.feed(body), *d.close()):
        whole.absorb(event)
    made = whole.message().tool_calls
    assert [made_call.name for made_call in made] == expected
    assert [made_call.arguments for made_call in made] == [*[""] * (len(expected) - 1), arguments or ""]
    assert len({made_call.id for made_call in made}) == len(made)


def test_a_call_that_has_an_id_keeps_it_where_another_takes_its_index() -> None:
    d = decoder("chat")
    d.tools = ["f", "g", "h"]
    deltas = [
        call(0, "a", "f", ""),
        call(0, None, "g", ""),
        call(1, None, "h", ""),
        call(0, "a", None, "{}"),
        call(1, None, None, "[]"),
    ]
    events = d.feed(say(*(chunk({"tool_calls": [delta]}) for delta in deltas), chunk(reason="tool_calls"), "[DONE]"))
    whole = Assembly(provider=None, model="m")
    for event in events:
        whole.absorb(event)
    made = [(made.id, made.name, made.arguments) for made in whole.message().tool_calls]
    assert made == [("a", "f", "{}"), ("call_1", "g", ""), ("call_2", "h", "[]")]


def test_argument_text_is_byte_exact_and_objects_become_compact_json() -> None:
    odd = '{"b" : 1,\t"a":"\\u00fc ü" }'
    assert tool_events([call(0, "a", "f", odd)]) == [(0, "a", "f", odd)]
    assert tool_events([call(0, "a", "f", {"b": "ü", "a": 1})]) == [(0, "a", "f", '{"b":"ü","a":1}')]
    assert tool_events([call(0, "a", "f", None)]) == [(0, "a", "f", "")]


NUMBERS = '{"p":1.10,"q":1e400,"big":[1E5,-0.0,12345678901234567890],"odd":[NaN,-Infinity]}'


def test_numbers_of_arguments_that_come_as_an_object_stay_as_they_were_written() -> None:
    head = b'{"id":"c","choices":[{"index":0,"finish_reason":"tool_calls","%s":{"tool_calls":[{"id":"a","function":{"name":"f",'
    rest = head + b'"arguments":' + NUMBERS.encode() + b"}}]}}]}"
    for body in (rest % b"message", b"data: " + rest % b"delta" + b"\n\n"):
        events, error = run("chat", [body])
        assert error is None
        assert calls(events) == [(0, "a", "f", NUMBERS)]


def test_the_old_function_call() -> None:
    events = decode(
        "chat",
        chunk({"function_call": {"name": "f", "arguments": ""}}),
        chunk({"function_call": {"arguments": "{}"}}),
        chunk(reason="function_call"),
    )
    assert calls(events) == [(0, "", "f", ""), (0, "", "", "{}")]
    assert finish(events) == "tool_calls"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("content_filter", "content_filter"),
        ("model_length", "length"),
        ("abort", "abort"),
    ],
)
def test_finish_reasons(reason: str, expected: str) -> None:
    assert finish(decode("chat", chunk({"content": "x"}), chunk(reason=reason))) == expected


def test_a_forced_call_that_stops_finished_for_its_tool_call() -> None:
    assert finish(decode("chat", chunk({"tool_calls": [call(0, "a", "f", "{}")]}), chunk(reason="stop"))) == "tool_calls"


def test_a_refusal_is_text_and_finishes_content_filter() -> None:
    events = decode("chat", chunk({"refusal": "I "}), chunk({"refusal": "won't."}), chunk(reason="stop"))
    assert text(events) == "I won't."
    assert finish(events) == "content_filter"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_of_compatible_servers(field: str) -> None:
    events = decode(
        "chat",
        chunk({field: "a"}),
        chunk({field: "b", "content": "c"}),
        chunk({field: None, "content": "d"}),
        chunk(reason="stop"),
    )
    assert (thoughts(events), text(events)) == ("ab", "cd")
    (block,) = [e for e in events if isinstance(e, ReasoningFinished)]
    assert block.part.raw == {field: "ab"}
    assert events.index(block) < events.index(TextDelta("c"))


def test_reasoning_that_ends_the_answer_or_comes_again_is_finished_too() -> None:
    events = decode(
        "chat", chunk({"reasoning": "a"}), chunk({"content": "b"}), chunk({"reasoning": "c"}), chunk(reason="length")
    )
    assert [(e.index, e.part.text) for e in events if isinstance(e, ReasoningFinished)] == [(0, "a"), (1, "c")]


def test_both_reasoning_fields_at_once_count_once() -> None:
    assert thoughts(decode("chat", chunk({"reasoning": "a", "reasoning_content": "a"}), chunk(reason="stop"))) == "a"


def test_content_as_a_list_of_parts() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reference", "ids": [1]},
        {"type": "text", "text": "ok"},
    ]
    events = decode("chat", chunk({"content": parts}), chunk(reason="stop"))
    assert (thoughts(events), text(events)) == ("hm", "ok")


USAGE = {"prompt_tokens": 10, "completion_tokens": 3}


@pytest.mark.parametrize("choices", [None, []])
def test_the_usage_chunk_after_the_finish(choices: Any) -> None:
    events = decode(
        "chat", chunk({"content": "x"}), chunk(reason="stop"), {"id": "c1", "choices": choices, "usage": USAGE}, "[DONE]"
    )
    assert isinstance(events[-1], UsageReported)
    assert (events[-1].usage.uncached, events[-1].usage.output) == (10, 3)
    assert isinstance(events[-2], Finished)


def test_usage_on_every_chunk_and_beside_the_finish_reason() -> None:
    def counted(n: int) -> dict[str, Any]:
        return {"usage": {"prompt_tokens": 10, "completion_tokens": n}}

    events = decode(
        "chat", chunk({"content": "x"}, **counted(1)), chunk({"content": "y"}, **counted(2)), chunk({}, "stop", **counted(3))
    )
    assert [e.usage.output for e in events if isinstance(e, UsageReported)] == [1, 2, 3]
    assert len([e for e in events if isinstance(e, Finished)]) == 1


def test_usage_where_moonshot_and_groq_put_it() -> None:
    moonshot = chunk(reason="stop")
    moonshot["choices"][0]["usage"] = USAGE
    for last in (moonshot, chunk(reason="stop", x_groq={"id": "r", "usage": USAGE})):
        events = decode("chat", chunk({"content": "x"}), last)
        assert [e.usage.output for e in events if isinstance(e, UsageReported)] == [3]


def test_deepseek_cache_hits() -> None:
    raw = USAGE | {"prompt_cache_hit_tokens": 8, "prompt_cache_miss_tokens": 2}
    (reported,) = [e for e in decode("chat", chunk({}, "stop", usage=raw)) if isinstance(e, UsageReported)]
    assert (reported.usage.uncached, reported.usage.cache_read, reported.usage.cache_write) == (2, 8, None)


@pytest.mark.parametrize("raw", [None, {}, {"prompt_tokens": -1}, {"prompt_tokens": "ten"}, {"note": 1}])
def test_usage_that_says_nothing_did_not_arrive(raw: Any) -> None:
    events = decode("chat", chunk({"content": "x"}), chunk(reason="stop"), {"id": "c1", "choices": [], "usage": raw})
    assert not any(isinstance(e, UsageReported) for e in events)


EARLY = {"prompt_tokens": 1000, "completion_tokens": 1, "total_tokens": 1001, "prompt_tokens_details": {"cached_tokens": 800}}


@pytest.mark.parametrize(
    "last",
    [
        {"prompt_tokens": 1000, "completion_tokens": 5, "total_tokens": 1005},
        {"prompt_tokens": 1000, "completion_tokens": 5, "prompt_tokens_details": None},
        {"prompt_tokens": 1000, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}},
        {"prompt_tokens": 0, "completion_tokens": 5},
        {"completion_tokens": 5},
    ],
)
def test_what_an_earlier_chunk_counted_no_later_one_erases(last: dict[str, Any]) -> None:
    events = decode("chat", chunk({"role": "assistant"}, usage=EARLY), chunk({"content": "x"}), chunk({}, "stop", usage=last))
    assert [e for e in events if isinstance(e, UsageReported)][-1].usage == Usage(
        uncached=200, cache_read=800, cache_write=None, output=5
    )


def test_counts_that_contradict_an_earlier_chunk_hold_alone() -> None:
    last = {"prompt_tokens": 500, "completion_tokens": 5}
    events = decode("chat", chunk({"content": "x"}, usage=EARLY), chunk({}, "stop", usage=last))
    assert isinstance(events[-1], UsageReported)
    assert events[-1].usage == Usage(uncached=500, cache_read=None, cache_write=None, output=5)


def test_start_and_tier() -> None:
    azure = {"id": "", "model": "", "choices": [], "prompt_filter_results": []}
    events = decode(
        "chat",
        azure,
        chunk({"role": "assistant", "content": ""}, service_tier="auto"),
        chunk({"content": "x"}, service_tier="auto"),
        chunk({}, "stop", service_tier="flex"),
    )
    assert [e for e in events if isinstance(e, ResponseStarted)] == [
        ResponseStarted(request_id="c1", model="m1"),
        ResponseStarted(request_id="c1", model="m1", billing={"service_tier": "flex"}),
    ]


@pytest.mark.parametrize(
    "output", ["hi", ["hi"], {"a": 1}, 3, [{"type": ["file_search_call"]}], [{"type": "file_search_call"}]]
)
def test_a_field_of_another_protocol_says_nothing_here(output: Any) -> None:
    events = decode("chat", {"output": output, **chunk({"content": "hi"}, "stop")})
    assert events == [ResponseStarted(request_id="c1", model="m1"), TextDelta("hi"), Finished(reason="stop")]
    usage = {"input_tokens": 3, "output_tokens": 1, "output": output}
    start = {"type": "message_start", "message": {"id": "c", "model": "m", "usage": usage}}
    assert decode("messages", start)[0] == ResponseStarted(request_id="c", model="m", response_id="c")


def test_other_choices_and_unknown_fields_are_passed_over() -> None:
    other = {"id": "c1", "choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "length"}]}
    assert (
        text(
            events := decode("chat", chunk({"content": "yes", "audio": {"id": "a"}}), other, chunk(reason="stop"), {"ping": 1})
        )
        == "yes"
    )
    assert finish(events) == "stop"


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        ({"message": "m", "type": "server_error", "code": None}, ServerError, None),
        ({"message": "m", "type": "tokens", "code": "rate_limit_exceeded"}, RateLimitError, None),
        ({"message": "m", "type": "insufficient_quota", "code": "insufficient_quota"}, PermissionDeniedError, None),
        ({"message": "m", "type": "invalid_request_error", "code": "context_length_exceeded"}, ContextLengthError, None),
        ({"message": "m", "type": "exceed_context_size_error", "code": 400}, ContextLengthError, 400),
        ({"message": "m", "type": "BadRequestError", "code": 400}, RequestRejectedError, 400),
        ({"message": "m", "type": "InternalServerError", "code": 500}, ServerError, 500),
        ({"message": "m", "code": 429}, RateLimitError, 429),
        ({"message": "m", "code": "503"}, OverloadedError, 503),
        ({"message": "m", "code": 502, "metadata": {"provider_name": "x"}}, ServerError, 502),
        ({"message": "m", "type": "invalid_request_error", "code": "content_filter"}, ContentFilteredError, None),
        ("m", ServerError, None),
        ({"type": "x"}, ServerError, None),
    ],
)
def test_an_error_chunk_is_raised_as_what_it_means(error: Any, kind: type[BackendError], status: int | None) -> None:
    events, raised = fails("chat", chunk({"content": "x"}), {"error": error})
    assert text(events) == "x"
    assert type(raised) is kind
    assert raised.status == status
    assert raised.request_id == "c1"
    assert raised.retryable is kind.default_retryable


def test_errors_in_other_forms() -> None:
    openrouter = chunk({"content": ""}, "error", error={"code": "server_error", "message": "Provider disconnected"})
    flat = {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}
    for payload, kind in ((openrouter, ServerError), (flat, RequestRejectedError), (chunk({}, "error"), ServerError)):
        events, raised = fails("chat", chunk({"content": "x"}), payload)
        assert (text(events), type(raised)) == ("x", kind)
        assert not any(isinstance(e, Finished) for e in events)
    events, error = run("chat", [b'event: error\ndata: {"message":"down","code":503}\n\n'])
    assert (events, type(error)) == ([], OverloadedError)


def test_a_cut_before_the_finish_reason_has_no_finish_and_after_it_no_usage() -> None:
    assert not any(isinstance(e, Finished) for e in decode("chat", chunk({"content": "x"}), "[DONE]"))
    events = decode("chat", chunk({"content": "x"}), chunk(reason="stop"))
    assert finish(events) == "stop"
    assert not any(isinstance(e, UsageReported) for e in events)


def test_a_whole_answer_instead_of_a_stream() -> None:
    message = {
        "role": "assistant",
        "content": "hi",
        "reasoning_content": "hm",
        "tool_calls": [call(None, "a", "f", "{}"), call(None, "b", "g", "{}")],
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    body = say({"id": "c1", "object": "chat.completion", "model": "m1", "choices": [choice], "usage": USAGE})[6:]
    events, error = run("chat", [body[:30], body[30:]])
    assert error is None
    assert (text(events), thoughts(events)) == ("hi", "hm")
    assert calls(events) == [(0, "a", "f", "{}"), (1, "b", "g", "{}")]
    assert finish(events) == "tool_calls"
    assert isinstance(events[-1], UsageReported)


# -- ids and names that come late, or not at all


def test_a_call_has_one_id_from_its_first_event_on() -> None:
    assert tool_events([call(0, None, "f", '{"x"')], [call(0, "a", None, ":1}")]) == [(0, "a", "f", '{"x":1}')]
    assert tool_events([call(0, None, "f", "{")], [call(0, None, None, "}")]) == [(0, "", "f", "{}")]
    assert tool_events([call(0, None, "f", "{}"), call(1, None, "g", "{}")]) == [(0, "", "f", "{}"), (1, "", "g", "{}")]
    assert tool_events([call(None, None, "f", "{")], [call(None, "a", None, "}")]) == [(0, "a", "f", "{}")]


def test_a_call_without_an_id_is_not_kept_back_for_long() -> None:
    first = chunk({"tool_calls": [call(0, None, "f", "{}")]})
    for last in (chunk({"content": "x"}), chunk({"reasoning": "x"}), chunk(reason="tool_calls"), "[DONE]"):
        events = decode("chat", first, last)
        assert calls(events) == [(0, "", "f", "{}")]
        assert not isinstance(events[-1], ToolCallDelta) or last == "[DONE]"
    events, error = fails("chat", first, {"error": {"message": "m", "code": 503}})
    assert (calls(events), type(error)) == ([(0, "", "f", "{}")], OverloadedError)
    events, broken = run("chat", [say(first) + b"data: {broken\n\n"])
    assert (calls(events), type(broken)) == ([(0, "", "f", "{}")], ServerError)


@pytest.mark.parametrize("late", [call(0, "b", None, "{}"), call(1, None, None, "{}"), call(None, "b", None, "{}")])
def test_a_call_that_never_gets_a_name_is_no_call(late: dict[str, Any]) -> None:
    events, error = fails("chat", chunk({"tool_calls": [call(0, "a", "f", "{}"), late]}), chunk(reason="tool_calls"))
    assert type(error) is ServerError
    assert not any(isinstance(e, Finished) for e in events)
