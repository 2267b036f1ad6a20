"""How long an answer will be, learned from the answers that came.

Answers of one kind of traffic resemble each other, so lengths are kept by class: the alias; with whether tools are offered;
with the tenant; with the tags. A class seen rarely borrows from the one above it (the usual shrinkage of a hierarchical mean:
Gelman et al., Bayesian Data Analysis, 5.5). It is the mean that is kept, since that is what answers cost in the long run.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from cachespec.decision import Ask
from cachespec.pieces import listed

BORROWED = 4.0
"""How many answers of its own a class needs before it outweighs the one above it."""
_MEMORY = 64.0  # answers after which an old one has lost its weight: traffic changes
_CLASSES = 20_000
_LONGEST = 10_000_000  # tokens that no answer has

Class: TypeAlias = tuple[str, ...]
"""A class of traffic: it begins with the one above it."""


class OutputLengths:
    """Mean output tokens by class of traffic. Not for several threads at once."""

    def __init__(self) -> None:
        self._classes: OrderedDict[Class, tuple[float, float]] = OrderedDict()  # weight, mean

    def expected(self, ask: Ask) -> float | None:
        """Expected output tokens of a request; None where nothing was learned about its alias."""
        mean = None
        for key in classes(ask):
            found = self._classes.get(key)
            if found is None:
                break
            weight, own = found
            mean = own if mean is None else (weight * own + BORROWED * mean) / (weight + BORROWED)
        return mean

    def learn(self, ask: Ask, tokens: int) -> None:
        """An answer to this request, read to its end, had so many output tokens. One that none has teaches nothing."""
        if not 0 <= tokens <= _LONGEST:
            return
        for key in classes(ask):
            weight, mean = self._classes.get(key, (0.0, 0.0))
            weight = min(weight + 1.0, _MEMORY)
            self._classes[key] = (weight, mean + (tokens - mean) / weight)
            self._classes.move_to_end(key)
        while len(self._classes) > _CLASSES:
            self._classes.popitem(last=False)

    def pieces(self) -> Iterator[str]:
        """What it learned, as JSON in pieces (`cachespec.pieces`)."""
        return listed([*key, *self._classes[key]] for key in list(self._classes) if key in self._classes)

    @classmethod
    def from_list(cls, data: Any) -> OutputLengths:
        """What `pieces` gave; rows that cannot be that are left out."""
        made = cls()
        rows = ((key, weight, mean) for key, weight, mean in counted(data) if 0 < weight <= _MEMORY and mean <= _LONGEST)
        made._classes.update((key, (weight, mean)) for key, weight, mean in rows)
        return made


def counted(rows: Any) -> Iterator[tuple[Class, float, float]]:
    """Classes with two counts each, of JSON that should hold them; what does not is left out."""
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [*key, int() | float() as a, int() | float() as b] if all(isinstance(k, str) for k in key):
                if math.isfinite(a) and math.isfinite(b) and a >= 0 and b >= 0:
                    yield tuple(key), float(a), float(b)
            case _:
                continue


def classes(ask: Ask) -> Iterator[Class]:
    """The classes of a request, the widest first: alias, whether tools are offered, tenant, tags."""
    key: Class = (ask.alias,)
    yield key
    for step in _steps(ask):
        key = (*key, step)
        yield key


def _steps(ask: Ask) -> Iterable[str]:
    yield "tools" if ask.tools else "plain"
    yield "" if ask.tenant is None else f"tenant {ask.tenant}"
    if ask.tags:
        yield "\n".join(sorted(set(ask.tags)))
