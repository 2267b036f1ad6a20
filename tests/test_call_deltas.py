"""Which call a delta belongs to, whatever a server's habits with ids, indexes and names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.backends.decoding import run, say

from cachespec.assembly import Assembly
from cachespec.call_deltas import Calls
from cachespec.events import ToolCallDelta
from cachespec.messages import ToolCallPart


def calls(*deltas: tuple[int, str, str, str]) -> list[tuple[str, str, str]]:
    known = Calls()
    for delta in deltas:
        known.take(*delta)
    return [(call.id, call.name, "".join(call.texts)) for call in known.all]


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([(0, "", "a", '{"x":1}'), (0, "", "b", '{"y":2}')], [("call_0", "a", '{"x":1}'), ("call_1", "b", '{"y":2}')]),
        ([(0, "", "a", '{"x":1}'), (0, "", "a", '{"x":2}')], [("call_0", "a", '{"x":1}'), ("call_1", "a", '{"x":2}')]),
        ([(0, "", "a", '{"x":'), (0, "", "a", "1}"), (0, "", "a", "")], [("call_0", "a", '{"x":1}')]),
        ([(0, "", "a", ""), (0, "", "a", '{"x":"}{"'), (0, "", "a", "}")], [("call_0", "a", '{"x":"}{"}')]),
        ([(0, "", "a", '{"x":"\\'), (0, "", "a", '"}"'), (0, "", "a", "}")], [("call_0", "a", '{"x":"\\"}"}')]),
        ([(0, "", "a", '{"x":"\\\\"}'), (0, "", "a", "{}")], [("call_0", "a", '{"x":"\\\\"}'), ("call_1", "a", "{}")]),
        ([(0, "i", "get_", ""), (0, "", "weather", ""), (0, "", "", "{}")], [("i", "get_weather", "{}")]),
        ([(0, "i", "get", ""), (0, "i", "get_time", "{}")], [("i", "get_time", "{}")]),
        ([(0, "", "g", ""), (0, "", "get", ""), (0, "", "get_time", ""), (0, "", "", "{}")], [("call_0", "get_time", "{}")]),
        ([(0, "i", "f", ""), (0, "", "f", "{"), (0, "i", "f", "}")], [("i", "f", "{}")]),
        ([(0, "i", "", "{"), (0, "", "f", "}")], [("i", "f", "{}")]),
        ([(0, "i", "f", "{}"), (0, "j", "f", "{}"), (0, "i", "", " ")], [("i", "f", "{} "), ("j", "f", "{}")]),
        ([(0, "i", "f", "{}"), (0, "", "g", "{}")], [("i", "f", "{}"), ("call_1", "g", "{}")]),
        ([(0, "", "f", "{}"), (0, "i", "g", "{}")], [("call_0", "f", "{}"), ("i", "g", "{}")]),
        ([(0, "", "f", "{"), (0, "i", "", "}"), (0, "i", "", " ")], [("call_0", "f", "{} ")]),
        ([(0, "", "", "{"), (0, "i", "f", "}")], [("i", "f", "{}")]),
    ],
)
def test_a_delta_goes_to_its_call(deltas: list[tuple[int, str, str, str]], expected: list[tuple[str, str, str]]) -> None:
    assert calls(*deltas) == expected


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[str, str, str]]]:
    """Calls one after another as a server of some habits streams them, and what they are."""
    numbered, named = draw(st.booleans()), draw(st.sampled_from(["once", "always", "in pieces"]))
    ids = draw(st.sampled_from(["first", "always", "second", "never"]))
    entries: list[dict[str, Any]] = []
    expected: list[tuple[str, str, str]] = []
    for number in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["find", "get_weather"]))
        text = json.dumps(draw(st.dictionaries(st.text('a{}"\\', max_size=3), st.text('x{}[]"\\', max_size=4), max_size=2)))
        cuts = [0, *sorted(draw(st.sets(st.integers(1, len(text) - 1), min_size=1, max_size=4))), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        begins = [name[:2], name[2:]] if named == "in pieces" else [name]
        deltas = [{"name": piece, "arguments": ""} for piece in begins] + [{"arguments": piece} for piece in pieces]
        for position, function in enumerate(deltas):
            entry: dict[str, Any] = {"index": number if numbered else 0, "function": function}
            if named == "always":
                function["name"] = name
            if ids == "always" or (ids, position) in (("first", 0), ("second", 1)):
                entry["id"] = f"id{number}"
            entries.append(entry)
        expected.append((f"id{number}" if ids != "never" else f"call_{number}", name, text))
    return entries, expected


@given(answers(), st.booleans())
def test_calls_come_out_as_they_were_made(
    answer: tuple[list[dict[str, Any]], list[tuple[str, str, str]]], together: bool
) -> None:
    entries, expected = answer
    deltas = [entries] if together else [[entry] for entry in entries]
    chunks = [{"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": delta}}]} for delta in deltas]
    events, error = run(
        "chat", [say(*chunks, {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})]
    )
    assert error is None
    whole = Assembly(provider=None, model="m")
    shown = [event for event in map(whole.absorb, events) if isinstance(event, ToolCallDelta)]
    made = [part for part in whole.message().parts if isinstance(part, ToolCallPart)]
    assert [(part.id, part.name, part.arguments) for part in made] == expected
    # A reader who goes by the ids sees the same calls, each under one id from its first piece on.
    texts: dict[str, str] = {}
    for event in shown:
        texts[event.id] = texts.get(event.id, "") + event.arguments
    assert texts == {call_id: text for call_id, _, text in expected}


def test_a_name_on_every_piece_has_each_piece_read_once() -> None:
    read: list[str] = []

    class Piece(str):
        __slots__ = ()

        def __iter__(self) -> Iterator[str]:
            read.append(self)
            return super().__iter__()

    known = Calls()
    pieces = [Piece(text) for text in ["[", *['{"k":"v"},'] * 50, "null]", "[]"]]
    for piece in pieces:
        known.take(0, "", "f", piece)
    assert [len(call.texts) for call in known.all] == [52, 1]
    assert read == pieces[:-1]
