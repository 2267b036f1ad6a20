"""Tool calls in text: whatever the cuts, the same calls, and their arguments byte for byte."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachespec.engine.toolcalls import Piece, PlainText, ToolFormat, read_call, read_calls, split_object, tool_format
from cachespec.events import TextDelta, ToolCallDelta

NAMES = frozenset({"get_weather", "f"})
ODD = '{"city" : "Zürich\\n\\u00e9",  "n": 1.50, "deep":{"a":[1,2, {}]}, "t":"</tool_call"}'

TAGGED = '{"q": "a </tool_call>, \\\\", "</tool_call>": "\\"</tool_call><tool_call>\\""}'


def run(form: ToolFormat, text: str, at: list[int]) -> tuple[str, list[tuple[str, str]], list[Piece]]:
    parser = form.parser(NAMES)
    points = sorted({0, len(text), *(a % (len(text) + 1) for a in at)})
    pieces: list[Piece] = []
    for a, b in pairwise(points):
        pieces += parser.push(text[a:b])
    pieces += parser.finish()
    calls = [p for p in pieces if isinstance(p, ToolCallDelta)]
    assert parser.calls == len(calls)
    assert [c.index for c in calls] == list(range(len(calls)))
    assert len({c.id for c in calls}) == len(calls)
    return "".join(p.text for p in pieces if isinstance(p, TextDelta)), [(c.name, c.arguments) for c in calls], pieces


def call(arguments: str, name: str = "get_weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


HERMES, LLAMA = ToolFormat("hermes"), ToolFormat("llama", ("<|python_tag|>",))
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",))
CUTS = st.lists(st.integers(0, 400), max_size=30)
CASES = [
    (HERMES, "Just text, 1 < 2.\n", "Just text, 1 < 2.\n", []),
    (HERMES, f"<tool_call>\n{call(ODD)}\n</tool_call>", "", [("get_weather", ODD)]),
    (
        HERMES,
        f"Let me look. \n<tool_call>{call('{}')}</tool_call>\n<tool_call>\n{call(ODD, 'f')}\n</tool_call>\n",
        "Let me look.",
        [("get_weather", "{}"), ("f", ODD)],
    ),
    (HERMES, f"<tool_call>\n{call(ODD)}", "", [("get_weather", ODD)]),  # the closing tag was cut off
    (HERMES, "<tool_call>\nnot json\n</tool_call> and on", "<tool_call>\nnot json\n</tool_call> and on", []),
    (HERMES, '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    (HERMES, "<tool_cal", "<tool_cal", []),
    (HERMES, f"<tool_call>\n{call(TAGGED)}\n</tool_call> ", "", [("get_weather", TAGGED)]),
    (HERMES, f"<tool_call>{call(TAGGED)}", "", [("get_weather", TAGGED)]),
    (
        HERMES,
        f"<tool_call>{call(TAGGED)}</tool_call><tool_call>{call(TAGGED, 'f')}</tool_call>",
        "",
        [("get_weather", TAGGED), ("f", TAGGED)],
    ),
    # A string that is never closed takes neither the text nor the calls behind it along.
    (HERMES, '<tool_call>{"a</tool_call> and on', '<tool_call>{"a</tool_call> and on', []),
    (
        HERMES,
        f'<tool_call>{{"name": "f</tool_call>\n<tool_call>{call(ODD)}</tool_call>',
        '<tool_call>{"name": "f</tool_call>',
        [("get_weather", ODD)],
    ),
    (HERMES, f'<tool_call>"</tool_call><tool_call>{call(TAGGED)}', '<tool_call>"</tool_call>', [("get_weather", TAGGED)]),
    (HERMES, '<tool_call>{"a": "</tool_call>"} x</tool_call>.', '<tool_call>{"a": "</tool_call>"} x</tool_call>.', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (LLAMA, call(ODD, key="parameters"), "", [("get_weather", ODD)]),
    (LLAMA, f"{call('{}', key='parameters')}; {call(ODD, 'f', 'parameters')}", "", [("get_weather", "{}"), ("f", ODD)]),
    (LLAMA, f"<|python_tag|>{call(ODD, 'anything', 'parameters')}", "", [("anything", ODD)]),
    (LLAMA, f" \n{call('{}', key='parameters')}\n", "", [("get_weather", "{}")]),
    (LLAMA, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    (LLAMA, '{"an": "answer"}', '{"an": "answer"}', []),
    (LLAMA, "{ not even json", "{ not even json", []),
    (LLAMA, 'Text, then {"name": "f", "parameters": {}}', 'Text, then {"name": "f", "parameters": {}}', []),
    (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (LLAMA, "a < b <|pyth", "a < b <|pyth", []),
    (LLAMA, "  ", "  ", []),
    (MISTRAL, f"[TOOL_CALLS][{call('{}')}, {call(ODD, 'f')}]", "", [("get_weather", "{}"), ("f", ODD)]),
    (MISTRAL, f"Sure. [TOOL_CALLS] [{call(ODD)}]", "Sure. ", [("get_weather", ODD)]),
    (MISTRAL, "[TOOL_CALLS][broken", "[TOOL_CALLS][broken", []),
    (MISTRAL, "[1, 2]", "[1, 2]", []),
]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
@given(at=CUTS)
def test_calls_and_text(form: ToolFormat, text: str, shown: str, calls: list[tuple[str, str]], at: list[int]) -> None:
    assert run(form, text, at)[:2] == (shown, calls)


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = HERMES.parser(NAMES)
    assert parser.push("Hello <") == [TextDelta("Hello")]
    assert parser.push("b> ") == [TextDelta(" <b>")]
    assert parser.push("x") == [TextDelta(" x")]


@given(st.text(max_size=60))
def test_text_without_calls_comes_through_unchanged(text: str) -> None:
    for form in (HERMES, LLAMA, MISTRAL):
        if "tool_call" in text or "TOOL" in text or "python" in text:
            continue
        assert run(form, text, [3, 9, 20])[0] == text


def test_broken_calls_are_not_kept_back() -> None:
    parser = HERMES.parser(NAMES)
    assert parser.push('<tool_call>{"a": "</tool_call>') == []  # a string is open: it may go on
    assert parser.push('"} no call</tool_call>') == [
        TextDelta('<tool_call>{"a": "</tool_call>'),
        TextDelta('"} no call</tool_call>'),
    ]
    assert parser.push("<tool_call>no</tool_call>") == [TextDelta("<tool_call>no</tool_call>")]


def test_plain_text() -> None:
    parser = PlainText()
    assert parser.push("<tool_call>") == [TextDelta("<tool_call>")]
    assert parser.push("") == []
    assert parser.finish() == []


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5), lambda x: st.lists(x, max_size=3)
        ),
    )
)
def test_members_keep_their_text(value: dict[str, object]) -> None:
    for indent in (None, 2):
        text = json.dumps(value, indent=indent)
        found = split_object(f"  {text} tail", 2)
        assert found is not None
        members, end = found
        assert end == 2 + len(text)
        assert {k: json.loads(v) for k, v in members.items()} == value


@pytest.mark.parametrize(
    "text", ["", "[", '{"a"', '{"a" 1}', '{"a": }', '{"a": 1', '{"a": 1; "b": 2}', "{1: 2}", "{'a': 1}", '{"a": 1,}']
)
def test_what_is_no_object(text: str) -> None:
    assert split_object(text, 0) is None
    assert read_call(text) is None


def test_deep_nesting_is_no_crash() -> None:
    assert read_call('{"name": "f", "arguments": ' + "[" * 100_000) is None


def test_one_call_is_one_call() -> None:
    assert read_call(call("{}") + " ") is None  # the caller strips
    assert read_calls(call("{}") + " and text") is None
    assert read_calls("") is None
    assert read_calls("[1]") is None


def test_format_by_template() -> None:
    assert tool_format("... <tool_call> ...") == HERMES
    assert tool_format("... [TOOL_CALLS] ...") == MISTRAL
    assert tool_format("... <|python_tag|> ...") == LLAMA
    assert tool_format('... {"name": x, "parameters": y} ...') == LLAMA
    assert tool_format("... <tool_call><function=x> ...") is None  # XML arguments: not understood here
    assert tool_format("... [TOOL_CALLS]name[ARGS]{} ...") is None
    assert tool_format("no calls at all") is None
