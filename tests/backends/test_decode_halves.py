"""Halves of characters that servers cut deltas between, and bodies that begin with blanks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.decoding import DECODERS, RECORDED, api_of, decode, decoder, fails, run, say, text, thoughts

from cachespec.errors import ServerError
from cachespec.events import Event, Finished, ReasoningFinished, TextDelta, ToolCallDelta

GRIN = "\U0001f600"
HIGH, LOW = "\ud83d", "\ude00"


def chat(**delta: Any) -> dict[str, Any]:
    return {"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta}]}


def block(delta: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def spoken(api: str, *pieces: str) -> list[Any]:
    """A whole answer of an api whose text comes in these pieces, then its end."""
    if api == "chat":
        return [*(chat(content=p) for p in pieces), {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    if api == "responses":
        deltas = [{"type": "response.output_text.delta", "output_index": 0, "delta": p} for p in pieces]
        return [*deltas, {"type": "response.completed", "response": {"id": "r", "output": []}}]
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    return [start, *(block({"type": "text_delta", "text": p}) for p in pieces), {"type": "message_stop"}]


def encodable(events: list[Event]) -> bool:
    repr(events).encode()
    return json.dumps([str(e) for e in events], ensure_ascii=False).encode() is not None


@pytest.mark.parametrize("api", DECODERS)
def test_halves_over_two_deltas_are_one_character(api: str) -> None:
    assert text(decode(api, *spoken(api, f"hi {HIGH}", f"{LOW} there"))) == f"hi {GRIN} there"
    assert text(decode(api, *spoken(api, HIGH, LOW, HIGH, LOW))) == GRIN * 2
    assert text(decode(api, *spoken(api, HIGH + LOW))) == GRIN


@pytest.mark.parametrize("api", DECODERS)
@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        (("a" + HIGH,), "a\ufffd"),
        ((HIGH, "b"), "\ufffdb"),
        ((LOW, HIGH), "\ufffd\ufffd"),
        ((HIGH, HIGH, LOW), "\ufffd" + GRIN),
        ((f"ü{LOW}x",), "ü\ufffdx"),
    ],
)
def test_a_half_that_stands_alone_is_a_broken_character(api: str, pieces: tuple[str, ...], whole: str) -> None:
    events = decode(api, *spoken(api, *pieces))
    assert text(events) == whole
    assert isinstance(events[-1], Finished)
    assert encodable(events)


@pytest.mark.parametrize("api", DECODERS)
def test_a_half_that_the_end_cuts_off_is_told(api: str) -> None:
    events, error = run(api, [say(*spoken(api, "a" + HIGH)[:-1])])
    assert error is None
    assert text(events) == "a\ufffd"


def test_each_block_waits_for_its_own_half() -> None:
    starts = [
        {"type": "content_block_start", "index": i, "content_block": b}
        for i, b in enumerate(({"type": "thinking", "thinking": ""}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}))
    ]
    pieces = [
        block({"type": "thinking_delta", "thinking": "x" + HIGH}),
        block({"type": "input_json_delta", "partial_json": '{"k":"' + HIGH}, 1),
        block({"type": "thinking_delta", "thinking": LOW}),
        block({"type": "input_json_delta", "partial_json": LOW + '"}'}, 1),
    ]
    stops = [{"type": "content_block_stop", "index": i} for i in (0, 1)]
    events = decode("messages", *starts, *pieces, *stops, {"type": "message_stop"})
    assert thoughts(events) == f"x{GRIN}"
    assert "".join(e.arguments for e in events if isinstance(e, ToolCallDelta)) == '{"k":"' + GRIN + '"}'
    (part,) = (e.part for e in events if isinstance(e, ReasoningFinished))
    assert (part.text, part.raw) == (f"x{GRIN}", {"type": "thinking", "thinking": f"x{GRIN}"})


def test_a_thought_that_ends_in_half_is_whole_before_it_is_finished() -> None:
    events = decode("chat", chat(reasoning_content=HIGH), chat(content="a"))
    assert thoughts(events) == "\ufffd"
    assert [type(e).__name__ for e in events].index("ReasoningFinished") < len(events) - 1
    assert encodable(events)


def test_names_ids_and_messages_of_errors_hold_whole_characters() -> None:
    call = {"index": 0, "id": "a" + HIGH, "function": {"name": HIGH + LOW, "arguments": HIGH}}
    events = decode("chat", {**chat(tool_calls=[call]), "id": HIGH}, {"choices": [{"index": 0, "finish_reason": "stop"}]})
    assert ToolCallDelta(0, "a\ufffd", GRIN, "") in events
    assert encodable(events)
    _, error = fails("chat", {"error": {"message": "no " + LOW, "type": "server_error"}})
    assert str(error).encode()


def test_a_whole_answer_holds_whole_characters() -> None:
    message = {"role": "assistant", "content": "a" + LOW}
    body = json.dumps({"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    events, error = run("chat", [body])
    assert error is None
    assert TextDelta("a\ufffd") in events


@pytest.mark.parametrize("api", DECODERS)
@settings(max_examples=60, deadline=None)
@given(
    halves=st.lists(st.sampled_from(["a", "ü", HIGH, LOW, HIGH + LOW, "\\ud83d"]), min_size=1, max_size=8),
    cut=st.integers(1, 7),
)
def test_however_text_is_cut_into_deltas_it_is_the_same(api: str, halves: list[str], cut: int) -> None:
    whole = "".join(halves)
    one = text(decode(api, *spoken(api, whole)))
    assert text(decode(api, *spoken(api, *whole))) == one
    assert text(decode(api, *spoken(api, *(p for p in (whole[:cut], whole[cut:]) if p)))) == one
    assert one == whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# -- calls without a name


NAMELESS: dict[str, list[Any]] = {
    "chat": [chat(tool_calls=[{"index": 0, "id": "a", "function": {"arguments": "{}"}}])],
    "responses": [{"type": "response.output_item.added", "item": {"type": "function_call", "call_id": "a", "name": ""}}],
    "messages": [{"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "a", "name": ""}}],
}


@pytest.mark.parametrize("api", DECODERS)
def test_a_call_without_a_name_is_the_servers_fault(api: str) -> None:
    _, error = fails(api, *NAMELESS[api], *spoken(api, "x")[-1:])
    assert type(error) is ServerError


def test_a_name_may_come_after_the_id() -> None:
    first, then = {"index": 0, "id": "a", "function": {}}, {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    events = decode("chat", chat(tool_calls=[first]), chat(tool_calls=[then]), spoken("chat", "x")[-1])
    assert [(e.id, e.name) for e in events if isinstance(e, ToolCallDelta)] == [("a", ""), ("", "f")]


def test_arguments_before_their_call_wait_for_it() -> None:
    delta = {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": '{"a":1}'}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'}
    done = {"type": "response.output_item.done", "output_index": 0, "item": item}
    end = {"type": "response.completed", "response": {"id": "r", "output": [item]}}
    for payloads in ((delta, done, end), (delta, end)):
        calls = [e for e in decode("responses", *payloads) if isinstance(e, ToolCallDelta)]
        assert calls == [ToolCallDelta(0, "c", "f", ""), ToolCallDelta(0, "", "", '{"a":1}')]
    _, error = fails("responses", delta, {"type": "response.completed", "response": {"id": "r", "output": []}})
    assert type(error) is ServerError


# -- where a body begins


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize(
    "lead", [b" ", b"  ", b"\t", b"\n \r\n", b"\xef\xbb\xbf", b" \xef\xbb\xbf\n", b"\xef\xbb\xbf\xef\xbb\xbf"]
)
def test_blanks_before_a_body_mean_nothing_however_it_is_cut(name: str, lead: bytes) -> None:
    api, body = api_of(name), RECORDED[name]
    expected = run(api, [body])
    assert run(api, [lead + body]) == expected
    for cut in range(1, len(lead) + 8):
        assert run(api, [(lead + body)[:cut], (lead + body)[cut:]]) == expected, cut


@pytest.mark.parametrize("lead", [b" ", b"\t\n", b"\xef\xbb\xbf "])
def test_blanks_before_an_object_mean_nothing_however_it_is_cut(lead: bytes) -> None:
    message = {"role": "assistant", "content": "whole"}
    body = lead + json.dumps({"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    expected = run("chat", [body])
    assert text(expected[0]) == "whole"
    for cut in range(1, len(body)):
        assert run("chat", [body[:cut], body[cut:]]) == expected, cut


def test_blanks_alone_are_not_kept() -> None:
    d = decoder("chat")
    for _ in range(1000):
        assert d.feed(b" \n\t" * 100) == []
    assert d._head == b""
    assert d.close() == []
