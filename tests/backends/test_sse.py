"""The decoder of server-sent events: every line ending, every cut, bounded and linear."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachespec.backends._sse import SSEDecoder
from cachespec.errors import ServerError


def decode(*pieces: bytes, limit: int = 1 << 20) -> list[tuple[str | None, str]]:
    decoder = SSEDecoder(backend="b", model="m", limit=limit)
    out: list[tuple[str | None, str]] = []
    for piece in pieces:
        out += decoder.feed(piece)
    return out + list(decoder.close())


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b"data: a\n\n", [(None, "a")]),
        (b"data:a\n\n", [(None, "a")]),
        (b"data:  a\n\n", [(None, " a")]),
        (b"data: a\r\n\r\n", [(None, "a")]),
        (b"data: a\r\rdata: b\r\r", [(None, "a"), (None, "b")]),
        (b"data: a\ndata: b\ndata:\n\n", [(None, "a\nb\n")]),
        (b": comment\n\ndata: a\n\n:\n\n", [(None, "a")]),
        (b"event: x\nid: 7\nretry: 10\ndata: a\n\ndata: b\n\n", [("x", "a"), (None, "b")]),
        (b"data: a\nevent: late\n\n", [("late", "a")]),
        (b"event: ping\n\nid: 7\n\ndata: a\n\n", [(None, "a")]),
        (b"event\ndata: a\n\n", [(None, "a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [(None, "a")]),
        (b"\xef\xbb\xbfevent: x\ndata: a\n\n", [("x", "a")]),
        (b"database: no\nunknown\ndata: a\n\n", [(None, "a")]),
        ("data: é日🙂\n\n".encode(), [(None, "é日🙂")]),
        (b"data: \xff\n\n", [(None, "�")]),
        (b"data: a\n\ndata: last", [(None, "a"), (None, "last")]),
        (b"data: a\n\ndata: last\n", [(None, "a"), (None, "last")]),
        (b"", []),
        (b"\n\n\n", []),
    ],
)
def test_bodies_decode_the_same_for_every_cut(body: bytes, events: list[tuple[str | None, str]]) -> None:
    assert decode(body) == events
    assert decode(*(body[i : i + 1] for i in range(len(body)))) == events
    for cut in range(len(body) + 1):
        assert decode(body[:cut], body[cut:]) == events


@given(
    st.lists(st.tuples(st.sampled_from(["", "x", "response.created"]), st.text(alphabet="aé🙂 :", max_size=12)), max_size=8),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_any_events_in_any_framing_at_any_cuts(events: list[tuple[str, str]], newline: str, cuts: list[int]) -> None:
    lines = [line for name, data in events for line in ([f"event: {name}"] if name else []) + [f"data: {data}", ": c", ""]]
    body = "".join(line + newline for line in lines).encode()
    points = [0, *sorted(min(c, len(body)) for c in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(points)]
    assert decode(*pieces) == [(name or None, data) for name, data in events]


@given(st.binary(max_size=200), st.integers(0, 200))
def test_garbage_decodes_the_same_for_every_cut(body: bytes, cut: int) -> None:
    assert decode(body[:cut], body[cut:]) == decode(body)


@pytest.mark.parametrize(
    "body",
    [b"data: " + b"x" * 200, b"data: " + b"x" * 200 + b"\n\n", b"data: xxxxxxxx\n" * 20 + b"\n", b": " + b"x" * 200 + b"\n"],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_event_over_the_limit_is_the_servers_fault(body: bytes, size: int) -> None:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    with pytest.raises(ServerError, match="larger than 100 bytes") as caught:
        decode(*pieces, limit=100)
    assert (caught.value.backend, caught.value.model, caught.value.retryable) == ("b", "m", True)


def test_many_small_events_never_reach_the_limit() -> None:
    body = b"event: x\ndata: 0123456789\n\n" * 50
    for size in (1, 7, 64, len(body)):
        assert len(decode(*(body[i : i + size] for i in range(0, len(body), size)), limit=40)) == 50


def test_events_before_the_one_over_the_limit_are_given() -> None:
    decoder = SSEDecoder(limit=100)
    events = decoder.feed(b"data: a\n\ndata: " + b"x" * 200 + b"\n\n")
    assert next(events) == (None, "a")
    with pytest.raises(ServerError):
        next(events)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(lambda n: [b"data: "] + [b"x" * 100] * n + [b"\n\n"], id="one event in many pieces"),
        pytest.param(lambda n: [b"data: xxxxxxxx\n"] * n + [b"\n"], id="one event of many lines"),
        pytest.param(lambda n: [b'data: {"a":1}\n\n'] * n, id="many events"),
        pytest.param(lambda n: [b'data: {"a":1}\n\n' * n], id="many events in one piece"),
        pytest.param(lambda n: [b"\n"] * n, id="blank lines"),
    ],
)
def test_time_is_linear_in_the_number_of_pieces(pieces: Callable[[int], list[bytes]]) -> None:
    def seconds(n: int) -> float:
        given = pieces(n)
        best = 9e9
        for _ in range(4):
            start = time.process_time()
            decode(*given, limit=1 << 30)
            best = min(best, time.process_time() - start)
        return best

    small, large = seconds(2_000), seconds(20_000)
    assert large < 35 * max(small, 1e-4)  # 10 when linear, 100 when quadratic
