"""What is told of a value of the wrong form, for every kind of annotation that an option can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, TypedDict

import pytest

from cachespec.annotations import EnvRef, Example, PluginOf, PositiveInt
from cachespec.durations import Duration
from cachespec.forms import example, toml_text
from cachespec.options import Context, Problem, read
from cachespec.toml_source import parse

Name = NewType("Name", str)


@dataclass(frozen=True, kw_only=True)
class Node:
    """Holds itself: an example of it has no end."""

    child: Node | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    least: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Optional:
    names: tuple[str, ...] = ()
    more: Mapping[str, int] = field(default_factory=dict)


class Typed(TypedDict):
    limit: Decimal


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (str, '"..."'),
        (Path | None, '"..."'),
        (Name, '"..."'),
        (Literal["a", "b"], '"a"'),
        (Sequence[int], "[1]"),
        (frozenset[str], '["..."]'),
        (dict[str, bool], "{ name = true }"),
        (Pair, "{ least = 1.0, most = 1.0 }"),
        (Optional, '{ names = ["..."] }'),
        (Typed, '{ limit = "0.40" }'),
        (list[Typed], '[{ limit = "0.40" }]'),
        (Duration, '"30s"'),
        (PositiveInt, "1"),
        (EnvRef, '{ env = "..." }'),
        (Annotated[Pair, PluginOf("routing")], '{ use = "..." }'),
        (Annotated[Mapping[str, Any], Example("{ a = 1 }")], "{ a = 1 }"),
        (Mapping[str, Any], None),
        (Any, None),
        (Node, None),
        (object, None),
    ],
)
def test_examples_are_toml(annotation: Any, text: str | None) -> None:
    assert example(annotation) == text
    if text is not None:
        assert "key" in parse(f"key = {text}", "f")


@pytest.mark.parametrize(
    ("value", "annotation", "hint"),
    [
        (3, Sequence[int], "did you mean key = [3]?"),
        ([3], int, "did you mean key = 3?"),
        ({"x": 3}, int | None, "did you mean key = 3?"),
        ("1.50", Typed, 'did you mean key = { limit = "1.50" }?'),
        ("1.50", list[Typed], 'did you mean key = [{ limit = "1.50" }]?'),
        ("a", Optional, 'did you mean key = { names = ["a"] }?'),
        (True, Sequence[bool] | None, "did you mean key = [true]?"),
        ('say "hi"', Sequence[str], r'did you mean key = ["say \"hi\""]?'),
        ({"least": 1, "most": 2}, Sequence[Pair], "did you mean key = [{ least = 1, most = 2 }]?"),
        (3, Pair, "such as key = { least = 1.0, most = 1.0 }"),
        ([1, 2], int, "such as key = 1"),
        ("x" * 100, Sequence[str], 'such as key = ["..."]'),
        ("x", Node, None),
        ("x", int, None),
        (5, Decimal, 'money is written as text: "5"'),
        ("auot", Literal["auto", "off"], "did you mean 'auto'?"),
    ],
)
def test_hints_are_what_would_be_taken(value: Any, annotation: Any, hint: str | None) -> None:
    with pytest.raises(Problem) as caught:
        read(value, annotation, ("table", "key"))
    assert caught.value.hint == hint
    if hint is not None and hint.startswith("did you mean key = "):
        meant = parse(hint.removeprefix("did you mean ").removesuffix("?"), "f")["key"]
        read(meant, annotation, ("table", "key"))


def test_an_item_of_a_list_has_no_key() -> None:
    with pytest.raises(Problem) as caught:
        read(["1.50"], list[Typed], ("budgets",))
    assert (caught.value.where, caught.value.hint) == (("budgets", 0), 'did you mean { limit = "1.50" }?')


def test_without_hints_there_is_none() -> None:
    with pytest.raises(Problem) as caught:
        read(3, Sequence[int], ("key",), context=Context(hints=False))
    assert caught.value.hint is None


def test_toml_text_is_what_was_read() -> None:
    value = {"a b": [1, 2.5, True, "x\ny", {"c": "ü"}], "d": {}}
    assert parse(f"key = {toml_text(value)}", "f") == {"key": value}
