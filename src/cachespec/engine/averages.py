"""Two small things that the engine and its callers count with."""

from __future__ import annotations

from collections.abc import Sequence

_MEMORY = 0.98  # weight of the past in running averages, per measurement


class Average:
    """A running ratio (tokens a second, tokens an answer) that forgets slowly. `value` is None before any sample."""

    __slots__ = ("_amount", "_weight")

    def __init__(self) -> None:
        self._amount = self._weight = 0.0

    def add(self, amount: float, weight: float) -> None:
        self._amount = self._amount * _MEMORY + amount
        self._weight = self._weight * _MEMORY + weight

    @property
    def value(self) -> float | None:
        return self._amount / self._weight if self._weight > 0 else None


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two tuples (or two lists) have in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices compare at C speed, a Python loop over thousands of tokens does not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
