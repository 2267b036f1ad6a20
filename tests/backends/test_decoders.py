"""What holds for all three decoders: recordings, every cut, every framing, garbage, linear time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.decoding import DECODERS, RECORDED, api_of, decoder, framings, run, say

from cachespec.errors import BackendError, ServerError
from cachespec.events import (
    Event,
    Finished,
    ReasoningDelta,
    ReasoningFinished,
    ResponseStarted,
    TextDelta,
    ToolCallDelta,
    UsageReported,
)
from cachespec.messages import ReasoningPart
from cachespec.usage import Usage


def usage(
    uncached: int, read: int | None, write: dict[str, int] | None, output: int | None, reasoning: int | None = None
) -> Any:
    return UsageReported(Usage(uncached=uncached, cache_read=read, cache_write=write, output=output, reasoning=reasoning))


def thought(index: int, text: str, raw: dict[str, Any], provider: str | None) -> ReasoningFinished:
    return ReasoningFinished(index=index, part=ReasoningPart(text=text, raw=raw, provider=provider, model="asked"))


SUMMARY = [{"type": "summary_text", "text": "First."}, {"type": "summary_text", "text": "Then — ça."}]
EXPECTED: dict[str, list[Event]] = {
    "chat_text": [
        ResponseStarted(request_id="chatcmpl-C9xk2", model="gpt-6-luna-2026-08-01", billing={"service_tier": "default"}),
        TextDelta("Grüße"),
        TextDelta(' 日本 🙂\n"ok"'),
        Finished(reason="stop"),
        usage(86, 1920, None, 300, 0),
    ],
    "chat_tools": [
        ResponseStarted(request_id="chatcmpl-T1", model="gpt-6-luna"),
        ToolCallDelta(0, "call_a", "get_weather", ""),
        ToolCallDelta(0, "", "", '{"city": "Zü'),
        ToolCallDelta(0, "", "", 'rich"}'),
        ToolCallDelta(1, "call_b", "get_time", "{}"),
        Finished(reason="tool_calls"),
        usage(80, None, None, 22),
    ],
    "chat_reasoning": [
        ResponseStarted(request_id="gen-1", model="deepseek-v4-pro"),
        ReasoningDelta("Let me "),
        ReasoningDelta("think ≥ 2."),
        thought(0, "Let me think ≥ 2.", {"reasoning_content": "Let me think ≥ 2."}, None),
        TextDelta("Two."),
        Finished(reason="length"),
        usage(104, 896, None, 40, 31),
    ],
    "responses_text": [
        ResponseStarted(request_id="resp_1", response_id="resp_1", model="gpt-6-luna-2026-08-01"),
        ReasoningDelta("First."),
        ReasoningDelta("\n\nThen — ça."),
        thought(
            0,
            "First.\n\nThen — ça.",
            {"id": "rs_1", "type": "reasoning", "summary": SUMMARY, "encrypted_content": "gAAAAAB=="},
            "openai",
        ),
        TextDelta("Héllo", 1),
        TextDelta(" 🙂", 1),
        ResponseStarted(
            request_id="resp_1", response_id="resp_1", model="gpt-6-luna-2026-08-01", billing={"service_tier": "flex"}
        ),
        usage(52, 2048, {"30m": 800, "12h": 100}, 25, 18),
        Finished(reason="stop"),
    ],
    "responses_tools": [
        ResponseStarted(request_id="resp_2", response_id="resp_2", model="gpt-6-luna"),
        ToolCallDelta(0, "call_a", "get_weather", ""),
        ToolCallDelta(1, "call_b", "get_time", ""),
        ToolCallDelta(0, "", "", '{"city": "Zü'),
        ToolCallDelta(1, "", "", "{}"),
        ToolCallDelta(0, "", "", 'rich"}'),
        usage(80, None, None, 22),
        Finished(reason="tool_calls"),
    ],
    "messages_text": [
        ResponseStarted(
            request_id="msg_01",
            response_id="msg_01",
            model="claude-sonnet-5-5",
            billing={"service_tier": "standard", "speed": "fast"},
        ),
        usage(6, 0, {"5m": 2000, "1h": 8000}, None),
        ReasoningDelta("Hmm — "),
        ReasoningDelta("ja."),
        thought(0, "Hmm — ja.", {"type": "thinking", "thinking": "Hmm — ja.", "signature": "EqQB+/=="}, "anthropic"),
        thought(1, "", {"type": "redacted_thinking", "data": "b64=="}, "anthropic"),
        TextDelta("Übung", 2),
        TextDelta(" 🙂", 2),
        usage(6, 0, {"5m": 2000, "1h": 8000}, 42, 30),
        Finished(reason="stop"),
    ],
    "messages_tools": [
        ResponseStarted(request_id="msg_02", response_id="msg_02", model="claude-haiku-5-5"),
        usage(80, None, None, None),
        ToolCallDelta(0, "toolu_a", "get_weather", ""),
        ToolCallDelta(0, "", "", '{"city": "Zü'),
        ToolCallDelta(0, "", "", 'rich"}'),
        ToolCallDelta(1, "toolu_b", "get_time", ""),
        ToolCallDelta(1, "", "", "{}"),
        usage(80, None, None, 22),
        Finished(reason="tool_calls"),
    ],
}


def test_every_recording_has_its_events() -> None:
    assert set(RECORDED) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recording_cut_at_every_byte_gives_the_same_events(name: str) -> None:
    body, api = RECORDED[name], api_of(name)
    assert run(api, [body]) == (EXPECTED[name], None)
    assert run(api, [body[i : i + 1] for i in range(len(body))]) == (EXPECTED[name], None)
    for cut in range(len(body)):
        assert run(api, [body[:cut], body[cut:]]) == (EXPECTED[name], None)


@pytest.mark.parametrize("framing", framings(b""))
@pytest.mark.parametrize("name", EXPECTED)
def test_a_recording_gives_the_same_events_in_every_framing(name: str, framing: str) -> None:
    body, api = framings(RECORDED[name])[framing], api_of(name)
    for size in (len(body), 1, 2, 3, 7, 64, 1000):
        assert run(api, [body[i : i + size] for i in range(0, len(body), size)]) == (EXPECTED[name], None)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(EXPECTED)), st.sampled_from(sorted(framings(b""))), st.lists(st.floats(0, 1), max_size=8))
def test_a_recording_cut_anywhere_in_any_framing(name: str, framing: str, cuts: list[float]) -> None:
    body = framings(RECORDED[name])[framing]
    points = [0, *sorted(int(c * len(body)) for c in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(points)]
    assert run(api_of(name), pieces) == (EXPECTED[name], None)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_clean_end_anywhere_finishes_only_where_the_protocol_did(name: str) -> None:
    """Whatever the bytes end with, `Finished` is there iff its event was, and a cut line never makes up content."""
    body, whole = RECORDED[name], EXPECTED[name]
    for cut in range(0, len(body), 3):
        events, error = run(api_of(name), [body[:cut]])
        assert events == whole[: len(events)]
        assert error is None or isinstance(error, ServerError)


@pytest.mark.parametrize("name", EXPECTED)
def test_after_the_last_word_nothing_is_read(name: str) -> None:
    d = decoder(api_of(name))
    d.feed(RECORDED[name])
    assert d.done
    assert d.feed(b'data: {"error":{"message":"too late"}}\n\n') == []
    assert d.close() == []


BROKEN = [
    '{"id":"x","choices":[{"del',
    "null",
    "[]",
    "7",
    '"text"',
    "{" * 100_000,
    "NaN",
    '{"a":' + "9" * 5000 + "}",
    "garbage",
]

# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", DECODERS)
@pytest.mark.parametrize(
    "line",
    ['{"id":"x","choices":[{"del', "null", "[]", "7", '"text"', "{" * 100_000, "NaN", '{"a":' + "9" * 5000 + "}", "garbage"],
)
def test_a_malformed_line_is_the_servers_fault_and_comes_after_what_preceded_it(api: str, line: str) -> None:
    name = f"{api}_text"
    body = RECORDED[name]
    cut = body.index(b"\n\n", len(body) // 2) + 2
    before, _ = run(api, [body[:cut]])
    broken = body[:cut] + f"data: {line}\n\n".encode() + body[cut:]
    for pieces in ([broken], [broken[:cut], broken[cut:]], [broken[i : i + 50] for i in range(0, len(broken), 50)]):
        events, error = run(api, pieces)
        assert events == before
        assert type(error) is ServerError
        assert error.retryable
        assert len(str(error)) < 400


@pytest.mark.parametrize("api", DECODERS)
def test_an_error_waits_for_the_events_before_it_and_is_raised_again(api: str) -> None:
    body = RECORDED[f"{api}_text"]
    d = decoder(api)
    cut = body.index(b"\n\n", len(body) // 2) + 2
    assert d.feed(body[:cut] + b'data: {"error":{"message":"gone","type":"server_error"}}\n\n')
    assert d.error is not None
    for more in (b"", body[cut:]):
        with pytest.raises(ServerError, match="gone"):
            d.feed(more)
        with pytest.raises(ServerError, match="gone"):
            d.close()


@pytest.mark.parametrize("api", DECODERS)
@pytest.mark.parametrize(
    "body", [b"<!doctype html><title>x</title>", b"upstream connect error", b'"text"', b"[1]", b'{"a":1}', b"idle"]
)
def test_a_body_that_is_no_event_stream_is_named(api: str, body: bytes) -> None:
    for pieces in ([body], [body[i : i + 1] for i in range(len(body))], [b"\n\n", body]):
        events, error = run(api, pieces)
        assert events == []
        assert type(error) is ServerError
        assert "no event stream" in str(error)
        assert body.decode()[:20].strip('"') in str(error)


@pytest.mark.parametrize("api", DECODERS)
def test_a_json_error_with_status_200_is_that_error(api: str) -> None:
    body = b'{"error":{"message":"slow down","type":"rate_limit_error","code":"rate_limit_exceeded"}}'
    events, error = run(api, [body[:9], body[9:]])
    assert events == []
    assert type(error).__name__ == "RateLimitError"
    assert "slow down" in str(error)


@pytest.mark.parametrize("api", DECODERS)
@pytest.mark.parametrize(
    "body", [b"", b": ping\n\n: ping\n\n", b"event: ping\n\n", b"\n\n\n", b"\xef\xbb\xbf", b"data: [DONE]\n\n"]
)
def test_nothing_said_is_no_event_and_no_error(api: str, body: bytes) -> None:
    assert run(api, [body]) == ([], None)


@pytest.mark.parametrize("api", DECODERS)
def test_an_error_event_that_is_no_json(api: str) -> None:
    events, error = run(api, [b"event: error\ndata: upstream is overloaded\n\n"])
    assert events == []
    assert type(error) is ServerError
    assert "upstream is overloaded" in str(error)


@pytest.mark.parametrize("api", DECODERS)
def test_a_body_without_end_is_bounded(api: str) -> None:
    d = decoder(api)
    with pytest.raises(ServerError, match="no event stream"):
        for _ in range(20):
            d.feed(b"<" + b"x" * (1 << 20))


# -- garbage ---------------------------------------------------------------------------------------------------------

_KEYS = sorted(
    {key for body in RECORDED.values() for key in re.findall(r'"(\w+)":', body.decode())} | {"message", "error", "code"}
)
_HANDLED = {t for d in DECODERS.values() for t in getattr(d, "_HANDLERS", ())}
_TYPES = sorted(_HANDLED | {"text_delta", "tool_use", "thinking", "message", "function_call"})
_leaf = st.none() | st.booleans() | st.integers(-3, 5) | st.floats() | st.text(max_size=3) | st.sampled_from(_TYPES)
_json = st.recursive(
    _leaf,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5),
    max_leaves=8,
)
_object = st.dictionaries(st.sampled_from(_KEYS), _json, max_size=8).flatmap(
    lambda given: st.sampled_from([None, *_TYPES]).map(lambda kind: given if kind is None else given | {"type": kind})
)


def only_backend_errors(api: str, pieces: list[bytes]) -> tuple[list[Event], BackendError | None]:
    events, error = run(api, pieces)
    for event in events:
        assert isinstance(getattr(event, "text", ""), str)
        assert isinstance(getattr(event, "index", 0), int)
        if isinstance(event, ToolCallDelta):
            assert all(isinstance(x, str) for x in (event.id, event.name, event.arguments))
        if isinstance(event, Finished):
            assert isinstance(event.reason, str)
    return events, error


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=300), st.integers(0, 300))
def test_random_bytes_raise_backend_errors_only(api: str, body: bytes, cut: int) -> None:
    whole = only_backend_errors(api, [body])
    halves = only_backend_errors(api, [body[:cut], body[cut:]])
    assert halves[0] == whole[0]
    assert str(halves[1]) == str(whole[1])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(DECODERS)), st.lists(_object, min_size=1, max_size=4), st.booleans())
def test_objects_of_any_shape_raise_backend_errors_only(api: str, objects: list[Any], plain: bool) -> None:
    texts = [json.dumps(o) for o in objects]
    body = texts[0].encode() if plain else "".join(f"data: {t}\n\n" for t in texts).encode()
    only_backend_errors(api, [body])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(RECORDED)), st.data())
def test_a_damaged_recording_raises_backend_errors_only(name: str, data: st.DataObject) -> None:
    body = bytearray(RECORDED[name])
    for _ in range(data.draw(st.integers(1, 6))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    only_backend_errors(api_of(name), [bytes(body)])


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_with_any_value_of_another_type_raises_backend_errors_only(name: str) -> None:
    """Every value of every event, one after another, replaced by each other kind of value."""
    lines = RECORDED[name].decode().split("\n")
    for i, line in enumerate(lines):
        if not line.startswith("data: {"):
            continue
        for path in _paths(json.loads(line[6:])):
            for other in (None, 7, "x", [], {}, [7], {"x": 7}, 1.5, True, -1):
                payload = json.loads(line[6:])
                parent = payload
                for step in path[:-1]:
                    parent = parent[step]
                parent[path[-1]] = other
                changed = [*lines[:i], f"data: {json.dumps(payload)}", *lines[i + 1 :]]
                only_backend_errors(api_of(name), ["\n".join(changed).encode()])


def _paths(value: Any) -> list[list[Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [[key, *rest] for key, inner in items for rest in [[], *_paths(inner)]]


# -- time ------------------------------------------------------------------------------------------------------------


CHUNKS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "reasoning": (
        "chat",
        lambda i: {"id": "c", "choices": [{"index": 0, "delta": {"reasoning_content": "word "}, "finish_reason": None}]},
    ),
    "calls": (
        "chat",
        lambda i: {
            "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}}]
        },
    ),
    "text": (
        "responses",
        lambda i: {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "word "},
    ),
    "items without places": (
        "responses",
        lambda i: {"type": "response.output_item.added", "item": {"type": "function_call", "id": f"f{i}", "name": "f"}},
    ),
    "items in one place": (
        "responses",
        lambda i: {"type": "response.output_item.done", "output_index": 0, "item": {"type": "reasoning", "id": f"r{i}"}},
    ),
    "thinking": (
        "messages",
        lambda i: {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "word "}},
    ),
    "signature": (
        "messages",
        lambda i: {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "A" * 99}},
    ),
}


@pytest.mark.parametrize("kind", CHUNKS)
def test_time_is_linear_in_the_number_of_chunks(kind: str) -> None:
    api, chunk = CHUNKS[kind]
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}

    def seconds(n: int) -> float:
        best = 9e9
        chunks = [say(chunk(i)) for i in range(n)]
        for _ in range(4):
            begin = time.process_time()
            d = decoder(api)
            if api == "messages":
                d.feed(say(start))
            for data in chunks:
                d.feed(data)
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(10_000) < 35 * seconds(1_000)  # 10 when linear, 100 when quadratic
