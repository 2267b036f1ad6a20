"""Tool calls in text: whatever the cuts, the same calls, and their arguments byte for byte."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachespec.engine.toolbodies import ARGS, JSON, KEYED, NAMED, Source, split_object
from cachespec.engine.toolcalls import FORMATS, HERMES, Piece, PlainText, ToolFormat
from cachespec.events import TextDelta, ToolCallDelta
from cachespec.messages import Tool

PROPERTIES = {
    "city": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": ["number", "string"]},
    "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "mode": {"enum": ["12", "a"]},
    "other": {"enum": [12, "a"]},
    "same": {"const": "3"},
    "any": {},
    "either": {"oneOf": [{"type": "string"}, {}]},
    "zip": {"$ref": "#/$defs/a~1b%20c"},
    "all": {"allOf": [{}, {"type": "string"}]},
    "both": {"allOf": [{"type": ["number", "null", "string"]}, {"type": ["integer", "null"]}]},
    "maybe": {"anyOf": [{"$ref": "#/$defs/a~1b%20c"}, {"type": "null"}]},
    "loop": {"$ref": "#/$defs/loop"},
    "lost": {"$ref": "#/$defs/none/such"},
    "far": {"$ref": "https://example.com/zip"},
}
DEFS = {"a/b c": {"type": "string"}, "loop": {"allOf": [{"$ref": "#/$defs/loop"}]}}
WEATHER = {"type": "object", "properties": PROPERTIES, "$defs": DEFS}
USABLE = (Tool(name="get_weather", parameters=WEATHER), Tool(name="f"))
ODD = '{"city" : "Zürich\\n\\u00e9",  "n": 1.50, "deep":{"a":[1,2, {}]}, "t":"</tool_call"}'

TAGGED = '{"q": "a </tool_call>, \\\\", "</tool_call>": "\\"</tool_call><tool_call>\\""}'


def run(form: ToolFormat, text: str, at: list[int]) -> tuple[str, list[tuple[str, str]], list[Piece]]:
    parser = form.parser(USABLE)
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


def text_of(pieces: list[Piece]) -> str:
    assert all(isinstance(piece, TextDelta) for piece in pieces)
    return "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))


def call(arguments: str, name: str = "get_weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def keyed(name: str, **arguments: str) -> str:
    return name + "".join(f"\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in arguments.items()) + "\n"


def named(name: str, **arguments: str) -> str:
    lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"\n<function={name}>\n{lines}</function>\n"


LLAMA, MISTRAL = ToolFormat("<|python_tag|>", bare=True), ToolFormat("[TOOL_CALLS]")
GLM, CODER = (ToolFormat("<tool_call>", "</tool_call>", body) for body in (KEYED, NAMED))
DEVSTRAL = ToolFormat("[TOOL_CALLS]", body=ARGS)
ACTIONS = ToolFormat("<|START_ACTION|>", "<|END_ACTION|>")
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
    (HERMES, "Say \n<tool_call> so.", "Say \n<tool_call> so.", []),
    (
        HERMES,
        f"<tool_call>{call('{}')}</tool_call>\n <tool_call>no</tool_call>",
        "\n <tool_call>no</tool_call>",
        [("get_weather", "{}")],
    ),
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
    (HERMES, f"<tool_call>[{call('{}')},\n{call(ODD, 'f')}]</tool_call>", "", [("get_weather", "{}"), ("f", ODD)]),
    (
        ACTIONS,
        f'I see.<|START_ACTION|>[\n  {{"tool_call_id": "0", "tool_name": "f", "parameters": {ODD}}}\n]<|END_ACTION|>',
        "I see.",
        [("f", ODD)],
    ),
    (DEVSTRAL, f"Sure.[TOOL_CALLS]get_weather[ARGS]{ODD}", "Sure.", [("get_weather", ODD)]),
    (DEVSTRAL, f"[TOOL_CALLS]f[ARGS] {{}}\n[TOOL_CALLS]f[CALL_ID]x1[ARGS]{ODD}", "", [("f", "{}"), ("f", ODD)]),
    (DEVSTRAL, "[TOOL_CALLS]f[ARGS]{} and", "[TOOL_CALLS]f[ARGS]{} and", []),
    (DEVSTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    (
        GLM,
        f"So.\n<tool_call>{keyed('get_weather', city='12', n=' 3', x='1.50')}</tool_call>\n<tool_call>f</tool_call>",
        "So.",
        [("get_weather", '{"city": "12", "n": 3, "x": 1.50}'), ("f", "{}")],
    ),
    (
        GLM,
        "<tool_call>" + keyed("g", a='"</tool_call><arg_key>"', b='[1, {"a":  2}]') + "</tool_call>",
        "",
        [("g", '{"a": "\\"</tool_call><arg_key>\\"", "b": [1, {"a":  2}]}')],
    ),
    (GLM, "A <tool_call>word</tool_call>.", "A <tool_call>word</tool_call>.", []),
    (GLM, f"<tool_call>{call(ODD)}</tool_call>", f"<tool_call>{call(ODD)}</tool_call>", []),
    (GLM, "<tool_call>f<arg_key>a</arg_key></tool_call>", "<tool_call>f<arg_key>a</arg_key></tool_call>", []),
    (
        CODER,
        "<tool_call>" + named("get_weather", city=" a\n", on="True", any="[1]") + "</tool_call>",
        "",
        [("get_weather", '{"city": " a\\n", "on": true, "any": [1]}')],
    ),
    (
        CODER,
        f"<tool_call>{named('f', a='</tool_call>')}</tool_call><tool_call>{named('f')}",
        "",
        [("f", '{"a": "</tool_call>"}'), ("f", "{}")],
    ),
    (
        CODER,
        "<tool_call><function=f><parameter=a>\nx</parameter><parameter=b>\n\n</parameter></function></tool_call>",
        "",
        [("f", '{"a": "\\nx", "b": ""}')],
    ),
    (CODER, "<tool_call><function=f><parameter=a>é</parameter></function></tool_call>", "", [("f", '{"a": "é"}')]),
    (CODER, "<tool_call><function=f><parameter=a></parameter></function></tool_call>", "", [("f", '{"a": ""}')]),
    (CODER, "<tool_call><function=f> x</function></tool_call>!", "<tool_call><function=f> x</function></tool_call>!", []),
    (CODER, "<tool_call><function=f></tool_call>", "<tool_call><function=f></tool_call>", []),
    # A value that was not closed takes neither the text nor the calls behind it along.
    (
        GLM,
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>\nSo.\n<tool_call>" + keyed("f", a="y") + "</tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>\nSo.",
        [("f", '{"a": "y"}')],
    ),
    (
        CODER,
        f"<tool_call>\n<function=f>\n<parameter=a>\nx\n</tool_call>\nSo.\n<tool_call>{named('f', a='y')}</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</tool_call>\nSo.",
        [("f", '{"a": "y"}')],
    ),
    (
        CODER,
        "<tool_call><function=f>\n<parameter=a>\nx\n<parameter=n>\n3\n</parameter>\n</function></tool_call>",
        "<tool_call><function=f>\n<parameter=a>\nx\n<parameter=n>\n3\n</parameter>\n</function></tool_call>",
        [],
    ),
    (
        HERMES,
        f"<tool_call>\n{call('{}')}\n<tool_call>\n{call(ODD, 'f')}\n</tool_call>",
        f"<tool_call>\n{call('{}')}",
        [("f", ODD)],
    ),
]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
@given(at=CUTS)
def test_calls_and_text(form: ToolFormat, text: str, shown: str, calls: list[tuple[str, str]], at: list[int]) -> None:
    assert run(form, text, at)[:2] == (shown, calls)


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = HERMES.parser(USABLE)
    assert parser.push("Hello <") == [TextDelta("Hello")]
    assert parser.push("b> ") == [TextDelta(" <b>")]
    assert parser.push("x") == [TextDelta(" x")]


@given(st.text(max_size=60))
def test_text_without_calls_comes_through_unchanged(text: str) -> None:
    for form in FORMATS:
        if any(marker in text for marker in form.markers):
            continue
        assert run(form, text, [3, 9, 20])[0] == text


def test_broken_calls_are_not_kept_back() -> None:
    parser = HERMES.parser(USABLE)
    assert parser.push('<tool_call>{"a": "</tool_call>') == []  # a string is open: it may go on
    assert text_of(parser.push('"} no')) == '<tool_call>{"a": "</tool_call>"} no'
    assert text_of(parser.push(" call<tool_call>no")) == " call<tool_call>no"


UNCLOSED = [
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "x}}\n</tool_call>'),
    (HERMES, 'The tag <tool_call> is "opened. And </tool_call> closes.'),
    (GLM, "<tool_call>f<arg_key>a</arg_key>x</tool_call>"),
    (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>\n<tool_call>f<arg_key>a</arg_key><arg_value>"),
    (CODER, "<tool_call><function=f><parameter=a>\nx\n</function></tool_call>"),
    (CODER, "<tool_call><function=f><parameter=a>x</function></tool_call>"),
    (CODER, "<tool_call><function=f><parameter=a>\nx\n<parameter=n>\n3\n</parameter>\n</function></tool_call>"),
    (CODER, "<tool_call><function=f><parameter=a>x</tool_call> or <function=f>"),
]


@pytest.mark.parametrize(("form", "broken"), UNCLOSED)
def test_text_behind_a_broken_call_streams(form: ToolFormat, broken: str) -> None:
    parser = form.parser(USABLE)
    shown = text_of([piece for char in broken + " and" for piece in parser.push(char)])
    if broken.endswith("<arg_value>"):
        assert shown == broken.rpartition("\n")[0]  # the second may be a call yet
        return
    assert shown == broken + " and"
    assert parser.push(" on") == [TextDelta(" on")]


@pytest.mark.parametrize("form", [HERMES, GLM, CODER])
def test_a_call_that_is_not_all_there_is_text(form: ToolFormat) -> None:
    """An answer may be cut off anywhere. A call without its closing tag counts only if it shows its own end."""
    written = {
        HERMES: call('{"city": "x", "on": true}'),
        GLM: keyed("get_weather", city="x", on="true"),
        CODER: named("get_weather", city="x", on="true"),
    }[form]
    whole = f"<tool_call>{written}</tool_call>"
    for end in range(len("<tool_call>") + 1, len(whole)):
        text, calls, _ = run(form, whole[:end], [])
        if calls:
            assert form is not GLM
            assert (text, len(calls)) == ("", 1)
            assert json.loads(calls[0][1]) == {"city": "x", "on": True}
        else:
            assert text == whole[:end]
    assert run(form, whole, [])[1]
    assert bool(run(form, whole.removesuffix("</tool_call>"), [])[1]) == (form is not GLM)


def test_the_beginning_of_a_name_is_no_call() -> None:
    usable = (Tool(name="get"), Tool(name="get_weather"))
    parser = GLM.parser(usable)
    assert text_of(parser.push("<tool_call>get") + parser.finish()) == "<tool_call>get"


@pytest.mark.parametrize(
    ("form", "segment"),
    [
        (HERMES, '<tool_call>{"a": "x</tool_call>'),
        (HERMES, '<tool_call>{"a": {"</tool_call>'),
        (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>"),
        (GLM, "<tool_call>f<arg_key>a</tool_call>"),
        (CODER, "<tool_call><function=f><parameter=a>x</function></tool_call>"),
        (CODER, "<tool_call><function=f><parameter=a>\nx</function></tool_call>"),
        (CODER, "<tool_call><function=f></tool_call>"),
        (ACTIONS, '<|START_ACTION|>[{"a": "x<|END_ACTION|>'),
    ],
)
def test_broken_calls_take_time_linear_in_what_comes(form: ToolFormat, segment: str) -> None:
    def read(times: int) -> int:
        """How often a place in the text was moved on from."""
        moves = 0

        class Counting(Source):
            __slots__ = ()

            def __setattr__(self, name: str, value: object) -> None:
                nonlocal moves
                if name == "at":
                    moves += max(0, int(str(value)) - getattr(self, "at", 0))
                super().__setattr__(name, value)

        parser = form.parser(USABLE)
        parser._source = Counting(form.close)  # type: ignore[attr-defined]
        text = segment * times
        pieces = [piece for i in range(0, len(text), 6) for piece in parser.push(text[i : i + 6])] + parser.finish()
        assert text_of(pieces) == text
        return moves

    assert read(1000) <= 3 * len(segment) * 1000


SCRAPS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"a": "',
    '"}}',
    '"',
    "\\",
    " \n",
    "é",
    "<arg_key>a</arg_key>",
]
SCRAPS += ["<arg_value>", "</arg_value>", "f", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "</tool_"]


@given(st.lists(st.sampled_from(SCRAPS), max_size=14), CUTS)
def test_scraps_of_calls_are_text_whatever_the_cuts(scraps: list[str], at: list[int]) -> None:
    text = "".join(scraps)
    for form in (HERMES, GLM, CODER):
        whole = run(form, text, [])[:2]
        assert run(form, text, at)[:2] == whole
        if not whole[1]:
            assert whole[0] == text


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
    assert JSON.read(text, {}) is None


def test_deep_nesting_is_no_crash() -> None:
    assert JSON.read('{"name": "f", "arguments": ' + "[" * 100_000, {}) is None
    assert run(CODER, f"<tool_call>{named('f', a='[' * 100_000)}</tool_call>", [])[1] == [
        ("f", json.dumps({"a": "[" * 100_000}))
    ]


def test_calls_are_all_there_is() -> None:
    assert JSON.read(call("{}") + " and text", {}) is None
    assert JSON.read("[1]", {}) is None
    assert JSON.read("[" + call("{}"), {}) is None


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "true", '"true"'),
        ("city", ' "a" ', '" \\"a\\" "'),
        ("n", " 12 ", "12"),
        ("n", "twelve", '"twelve"'),  # what it is not cannot be made of it
        ("any", '"a"', '"\\"a\\""'),  # strings are written without quotes
        ("x", "12", "12"),
        ("x", "true", '"true"'),
        ("x", "NaN", '"NaN"'),
        ("on", "False", "false"),
        ("on", "None", "null"),
        ("mode", "12", '"12"'),
        ("other", "12", "12"),
        ("other", "a", '"a"'),
        ("same", "3", '"3"'),
        ("any", "True", '"True"'),
        ("any", "null", "null"),
        ("any", '{"a" : 1e5}', '{"a" : 1e5}'),
        ("either", "1", "1"),
        ("unknown", "-0.5", "-0.5"),
        ("zip", "90210", '"90210"'),
        ("all", "true", '"true"'),
        ("both", "3", "3"),
        ("both", "None", "null"),
        ("maybe", "90210", '"90210"'),
        ("maybe", "null", "null"),
        ("loop", "1", "1"),
        ("lost", "1", "1"),
        ("far", "1", "1"),
    ],
)
def test_values_without_quotes_are_what_the_schema_says(key: str, text: str, value: str) -> None:
    for form, written in ((GLM, keyed("get_weather", **{key: text})), (CODER, named("get_weather", **{key: text}))):
        assert run(form, f"<tool_call>{written}</tool_call>", [])[1] == [("get_weather", f'{{"{key}": {value}}}')]


def test_markers_are_all_that_a_format_is_made_of() -> None:
    assert HERMES.markers == ("<tool_call>", "</tool_call>")
    assert {"<tool_call>", "<arg_key>", "</arg_value>"} <= set(GLM.markers)
    assert LLAMA.markers == ("<|python_tag|>",)
    assert len(set(FORMATS)) == len(FORMATS)
