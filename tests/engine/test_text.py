"""Whole characters only; stop strings wherever they stand; nothing after them shown or counted."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachespec.engine.text import TextStream, overlap
from cachespec.errors import InputError


def cut(data: bytes, at: list[int]) -> list[bytes]:
    points = sorted({0, len(data), *(a % (len(data) + 1) for a in at)})
    return [data[a:b] for a, b in pairwise(points)]


def run(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(stops)
    out: list[str] = []
    for piece in pieces:
        out.append(stream.push(piece))
        if stream.stopped is not None:
            break
    out.append(stream.finish())
    return out, stream


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=20))
def test_any_cut_of_any_bytes_gives_the_text_of_all_of_them(data: bytes, at: list[int]) -> None:
    pieces = cut(data, at)
    out, stream = run(pieces)
    assert "".join(out) == data.decode("utf-8", "replace")
    assert stream.tokens == len(pieces)


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=20))
def test_a_character_in_pieces_is_never_shown_broken(text: str, at: list[int]) -> None:
    text = text.encode("utf-8", "ignore").decode().replace("\ufffd", "")
    out, _ = run(cut(text.encode(), at))
    assert "".join(out) == text
    assert all("\ufffd" not in piece for piece in out)


def test_incomplete_bytes_become_a_replacement_only_at_the_end() -> None:
    stream = TextStream()
    emoji = "👍".encode()
    assert [stream.push(emoji[i : i + 1]) for i in range(3)] == ["", "", ""]
    assert stream.finish() == "\ufffd"


@given(
    st.text(alphabet="ab ", max_size=40),
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 40), max_size=20),
)
def test_stop_strings_against_a_plain_search(text: str, stops: list[str], at: list[int]) -> None:
    pieces = cut(text.encode(), at)
    out, stream = run(pieces, tuple(stops))
    # What a reader of the stream would do: the first moment at which a stop string is complete decides.
    seen, expected, position = "", text, None
    for piece in pieces:
        seen += piece.decode()
        found = [seen.find(stop) for stop in stops if stop in seen]
        if found:
            position = min(found)
            expected = text[:position]
            break
    assert "".join(out) == expected
    assert (stream.stopped is not None) == (position is not None)
    starts = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    assert stream.tokens == (len(pieces) if position is None else sum(start < position for start in starts))


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_withheld_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    stream = TextStream(stops)
    shown, seen = "", ""
    for letter in text:
        seen += letter
        shown += stream.push(letter.encode())
        if stream.stopped is not None:
            assert shown + stream.stopped in seen
            return
        held = seen[len(shown) :]
        longest = max(k for k in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - k :]) and k < len(s) for s in stops))
        assert len(held) == longest


def test_a_stop_string_over_two_steps() -> None:
    stream = TextStream(("###",))
    assert [stream.push(p) for p in (b"Hello #", b"#", b"x #", b"#", b"# tail")] == ["Hello ", "", "##x ", "", ""]
    assert stream.stopped == "###"
    assert stream.tokens == 3
    assert stream.push(b"more") == ""
    assert stream.finish() == ""
    assert stream.tokens == 3


def test_a_stop_string_inside_one_token_ends_it_there() -> None:
    stream = TextStream(("END",))
    assert stream.push(b"abcENDdef") == "abc"
    assert stream.tokens == 1  # it carried text that was shown


def test_a_stop_string_at_the_very_beginning_leaves_nothing() -> None:
    stream = TextStream(("\n",))
    assert stream.push(b"\nx") == ""
    assert stream.tokens == 0


def test_a_stop_string_of_many_bytes_in_pieces() -> None:
    stop = "終👍"
    pieces = [bytes([b]) for b in f"a{stop}b".encode()]
    out, stream = run(pieces, (stop,))
    assert "".join(out) == "a"
    assert stream.tokens == 1


def test_an_unfinished_stop_string_is_text_after_all() -> None:
    stream = TextStream(("STOP",))
    assert stream.push(b"STO") == ""
    assert stream.finish() == "STO"
    assert stream.tokens == 1


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        TextStream(("",))


@given(st.text(alphabet="ab", max_size=8), st.text(alphabet="ab", min_size=1, max_size=8))
def test_overlap(text: str, marker: str) -> None:
    expected = max(k for k in range(len(marker)) if text.endswith(marker[:k]))
    assert overlap(text, marker) == expected
