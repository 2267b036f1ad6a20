"""Where keys stand in a file: every one that the standard parser finds, quickly."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachespec.annotations import Where
from cachespec.errors import ConfigError
from cachespec.toml_source import _lines, line_of, parse

EVERYTHING = r'''
bare-key_1 = 1
"quoted \" key" = 'x' # [comment]
'literal = key' = "y ] } , ' #"
dotted . "inner.part" . third = true
basic = """
[not.a.table]
a = "b" \"""
"""
quotes = """""two""""" # five at each end
literal = @@@ "" ]
'' @@@''
time = 1979-05-27 07:32:00.5
float = -3.14e2
nothing = []
nested = [ [1, 2,
  3,], # ]
  { a = [ { b = 1 }, { b.c = "}" } ], "d e" = {} },
]

[ table ]
x = 1
[table . sub."k.ey"]
x = 2
[[many]]
[many.deep]
x = 1
[[many.inner]]
y = 1
[[many.inner]]
y = 2
[[many]]
x = [
]
[tail]'''.replace("@@@", "'" * 3)


def paths(tree: Any, where: Where = ()) -> Iterator[Where]:
    steps: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        steps = list(tree.items())
    elif isinstance(tree, list):
        steps = list(enumerate(tree))
    for step, item in steps:
        yield (*where, step)
        yield from paths(item, (*where, step))


@pytest.mark.parametrize("text", [EVERYTHING, EVERYTHING.replace("\n", "\r\n")])
def test_every_key_is_found_where_it_is_written(text: str) -> None:
    lines = text.split("\n")
    for where in paths(tomllib.loads(text)):
        line = line_of(text, where)
        assert line is not None
        name = next(step for step in reversed(where) if isinstance(step, str))
        written = name.replace('"', '\\"')
        assert written in lines[line - 1] or isinstance(where[-1], int), where
    assert [line_of(text, ("nested", *rest)) for rest in ((0,), (0, 2), (1,), (1, "a", 1, "b", "c"))] == [16, 17, 18, 18]
    assert [line_of(text, ("many", *rest)) for rest in ((0,), (0, "deep"), (0, "inner", 1, "y"), (1,))] == [25, 26, 31, 32]


VALUES: st.SearchStrategy[str] = st.recursive(
    st.sampled_from(["1", "1.5", '"a"', '"]"', "'{'", '"""\n[x]\n"""', "2020-01-01 00:00:00", "true", "'''\"'''"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[\n " + " ,\n".join(items) + "\n]"),
        st.lists(inner.filter(lambda v: "\n" not in v), max_size=3).map(
            lambda items: "{" + ", ".join(f"k{i} = {v}" for i, v in enumerate(items)) + "}"
        ),
    ),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.sampled_from(["", "[t]", "[[m]]", "[m.d]", "[t.u]", "# [c]"]), VALUES), max_size=8))
def test_the_standard_parser_and_the_walk_find_the_same_keys(statements: list[tuple[str, str]]) -> None:
    text, seen = "", set()
    for i, (header, value) in enumerate(statements):
        again = header in seen and header in ("[t]", "[t.u]", "[m.d]")
        text += "" if again or (header == "[m.d]" and "[[m]]" in seen) else f"{header}\n"
        seen.add(header)
        text += f"v{i} = {value}\n"
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # [[m]] after [m.d]
    assert set(paths(tree)) == set(_lines(text))


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a = 1\nb = 2\na = 3\n", "a", 3),
        ("[t]\nx = [\n1,\n]\nx = [\n2,\n]\n", "t.x", 5),
        ("[t]\na = { b = 1, b = 2 }\n", None, 2),
        ("a = 1\n[a]\nb = 1\n", "a", 2),
        ("a = 1\na.b = 2\n", "a", 2),
        ("[a.b]\n[a]\nb = 1\n", "a.b", 3),
        ("[[m]]\nx = 1\n[[m]]\nx = 1\nx = 2\n", "m[1].x", 5),
    ],
)
def test_a_key_that_is_there_twice_is_named(text: str, key: str | None, line: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.toml")
    assert (caught.value.key, caught.value.line) == (key, line)


def test_a_number_that_is_too_long() -> None:
    with pytest.raises(ConfigError, match=r"f\.toml:2: holds a number that is too long"):
        parse(f"a = 1\nb = {'9' * 5000}\n", "f.toml")


@pytest.mark.parametrize("text", ["a = [", "[", "a", "a = {b", '"', "= 1", "a = ]"])
def test_what_is_no_toml_is_told_as_that(text: str) -> None:
    with pytest.raises(ConfigError):
        line_of(text, ("a",))


def test_many_lines_are_looked_up_quickly() -> None:
    """Two hundred errors in a thousand lines."""
    text = "budgets = [\n" + "".join(f'  {{ scope = "tenant", key = "t{i}", limit = {i} }},\n' for i in range(1000)) + "]\n"
    start = time.perf_counter()
    assert [line_of(text, ("budgets", i, "limit")) for i in range(0, 1000, 5)] == list(range(2, 1002, 5))
    assert time.perf_counter() - start < 1  # about 30 ms
