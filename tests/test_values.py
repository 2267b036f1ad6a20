"""`quick` changes how a frozen dataclass is made, and nothing that can be seen of it."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest

from cachespec.values import quick


@dataclass(frozen=True, slots=True)
class _Slow:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list)
    d: float = field(default=0.5, kw_only=True)


@quick
@dataclass(frozen=True, slots=True)
class _Quick:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list)
    d: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("a is negative")
        object.__setattr__(self, "d", self.d * 2)


def test_it_is_made_of_the_same_arguments() -> None:
    made = _Quick(1, "x", [2], d=3.0)
    assert (made.a, made.b, made.c, made.d) == (1, "x", [2], 6.0)
    first, second = _Quick(1), _Quick(a=1)
    assert first == second
    assert type(first) is _Quick
    assert first.c == []
    assert first.c is not second.c
    assert str(inspect.signature(_Quick)) == str(inspect.signature(_Slow))
    assert _Quick.__init__.__qualname__ == "_Quick.__init__"
    wrong: tuple[Any, ...]
    for wrong in ((), (1, "x", [], 2.0)):
        with pytest.raises(TypeError):
            _Quick(*wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'e'"):
        _Quick(1, e=2)  # type: ignore[call-arg]


def test_it_is_frozen_and_has_no_other_attributes() -> None:
    made = _Quick(1)
    for name in ("a", "new"):
        with pytest.raises((FrozenInstanceError, TypeError)):
            setattr(made, name, 2)
    with pytest.raises(FrozenInstanceError):
        del made.a
    assert not hasattr(made, "__dict__")


def test_a_subclass_is_made_as_ever() -> None:
    class More(_Quick):
        def twice(self) -> int:
            return 2 * self.a

    @dataclass(frozen=True, slots=True)
    class Longer(_Quick):
        e: int = 5

    assert More(3, d=1.0).twice() == 6
    assert More(3, d=1.0).d == 2.0
    assert (Longer(1, e=6).e, Longer(1).c, type(Longer(1))) == (6, [], Longer)


def test_copies_are_the_same_value() -> None:
    made = _Quick(1, c=[5])
    for other in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):  # noqa: S301 - our own
        assert other == made
        assert type(other) is _Quick
    assert replace(made, a=7) == _Quick(7, c=[5], d=1.0)


def test_what_post_init_refuses_is_not_made() -> None:
    with pytest.raises(ValueError, match="negative"):
        _Quick(-1)


def test_fields_that_are_no_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="arguments"):

        @quick
        @dataclass(frozen=True, slots=True)
        class _Hidden:
            a: int = field(default=1, init=False)

    with pytest.raises(TypeError, match="slots"):

        @quick
        @dataclass(frozen=True)
        class _Open:
            a: int = 1
