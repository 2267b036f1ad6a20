"""Methods that take what another one takes: the arguments are written once; type checkers, editors and `help` see them all."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def takes(like: Callable[Concatenate[Any, P], object]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Above a method that hands all of its arguments on to `like`: it takes those, by name and type, and returns its own.

    The method is not wrapped. Arguments that `like` does not take are its TypeError.
    """

    def told(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        own = signature(method).return_annotation
        method.__signature__ = signature(like).replace(return_annotation=own)  # type: ignore[attr-defined]
        return method

    return told
