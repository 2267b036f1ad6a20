"""How many tokens one call may take so that its rows are bit for bit those of one token at a time (contract E2).

Kernels change with the number of rows, and rounding with them; some do so only behind many other tokens, as llama.cpp's for
a lone row does. Measured with the settings that will be used, when ``deterministic = true``, within a few seconds: every size
near the beginning of a sequence, then a few of them wherever a kernel may change, as far into the context as time allows. What
was found is kept beside the measured costs, for the same machine, model, settings and library only. A search that time ended
is taken up again at the next start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import inf
from time import perf_counter
from typing import Final

from cachespec.engine.costs import CalibrationStore
from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.sampling import key

SECONDS: Final = 10.0
"""The search begins nothing new after this long. What it found by then was verified, and is the answer."""

_SIZES: Final = (2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 256, 512)
_BASE: Final = 11  # a start that no tile size divides
_SINGLY: Final = 33  # the first rows, and the last few of each size, are compared with those of single tokens,
_LAST: Final = 4  # those between with rows of calls that were found right before
_EDGE: Final = 256  # where libraries choose anew by the length of a sequence: at this one, and at each twice as long
_AT_EDGES: Final = 0.5  # of the time, at most
_FAR: Final = (2, 4)  # sizes tried at an edge, with the one that was found
_METHOD: Final = 3  # of this search; a width that another one found is not believed


def kept_width(runtime: Runtime, store: CalibrationStore) -> int:
    """`invariant_width`, measured once and then kept in `store`."""
    identity = {**runtime.facts(), "context": runtime.info.context, "sequences": runtime.sequences, "method": _METHOD}
    saved = store.read(runtime.info.fingerprint, identity) or {}
    width = saved.get("invariant_width")
    known = width if type(width) is int and 1 <= width <= runtime.width else None
    if known is not None and saved.get("complete") is True:
        return known
    found, complete = search(runtime, known=known or 1)
    # One that gets no farther than the last start did would not at the next one either.
    store.write(runtime.info.fingerprint, identity, {"invariant_width": found, "complete": complete or found == known})
    return found


def invariant_width(runtime: Runtime) -> int:
    """The widest call found invariant, at most ``runtime.width``. All sequences must be empty, and are so afterwards."""
    return search(runtime)[0]


def search(
    runtime: Runtime, *, known: int = 1, seconds: float = SECONDS, clock: Callable[[], float] = perf_counter
) -> tuple[int, bool]:
    """The invariant width, and whether wider calls were found wrong or do not exist; False: there was no time to try them.

    `known`: a width that an earlier search found. All rows of a call are compared, at every size up to the one returned, and at
    that one also in the company of other sequences. Then, at each edge there is time for (the first belongs to a complete
    search), whether that holds there too: a width that does not is given up, known or not.
    """
    trial, edge = _Trial(runtime, until=clock() + seconds, clock=clock), _EDGE
    try:
        width, complete = _near(trial, known)
        until = min(trial.until, clock() + seconds * _AT_EDGES)
        while edge < runtime.info.context:
            trial.until = until
            width, edge = _at_edge(trial, edge, width), 2 * edge
    except _Late:
        complete = complete and edge > _EDGE
    finally:
        for sequence in range(runtime.sequences):
            runtime.free(sequence)
    return width, complete


class _Late(Exception):
    """There is no time for more."""


class _Trial:
    """Calls of the runtime about sequence 0, whose tokens are always the same, with the digest of each row of logits.

    Every call is made from `base` tokens on, which the sequence is brought back to.
    """

    def __init__(self, runtime: Runtime, *, until: float, clock: Callable[[], float]) -> None:
        self.runtime, self.until = runtime, until
        self._clock = clock

    @property
    def late(self) -> bool:
        return self._clock() >= self.until

    def rewind(self, base: int, step: int) -> None:
        """Have sequence 0 hold `base` tokens, evaluated `step` at a time where they are not there. Raises _Late."""
        if not self.runtime.truncate(0, base):
            self.runtime.free(0)
        while True:
            if base > _BASE and self.late:
                raise _Late
            if (held := self.runtime.length(0)) == base:
                return
            self._evaluate([self._span(held, min(step - held % step, base - held), 0)])

    def next(self, size: int) -> list[bytes]:
        """The rows of the next `size` tokens, in one call."""
        return self._evaluate([self._span(self.runtime.length(0), size, size)])

    def company(self, size: int) -> list[bytes]:
        """As `next`, of half as many tokens: the others of the call are of other sequences, as many as there are."""
        own = size - size // 2
        others = min(self.runtime.sequences - 1, size - own)
        for sequence in range(1, others + 1):
            self.runtime.free(sequence)
        spans = [self._span(self.runtime.length(0), own, own)]
        for sequence in range(1, others + 1):  # all but the first of them have one token
            tokens = self._tokens(0, size - own - (others - 1) if sequence == 1 else 1)
            spans.append(Span(sequence=sequence, start=0, tokens=tokens, rows=1))
        return self._evaluate(spans)[:own]

    def _span(self, start: int, size: int, rows: int) -> Span:
        return Span(sequence=0, start=start, tokens=self._tokens(start, size), rows=rows)

    def _tokens(self, start: int, size: int) -> list[int]:
        return [key(0, i) % self.runtime.info.vocab for i in range(start, start + size)]

    def _evaluate(self, spans: Sequence[Span]) -> list[bytes]:
        rows = self.runtime.evaluate(spans)
        return [blake2b(row.tobytes(), digest_size=16).digest() for row in self.runtime.rows(rows)] if rows else []


def _near(trial: _Trial, known: int) -> tuple[int, bool]:
    """The search at the beginning of a sequence, where every size is cheap."""
    runtime = trial.runtime
    limit = min(runtime.width, runtime.info.context - _BASE)
    right: list[bytes] = []
    found, complete = [known], True
    for size in sorted({size for size in (*_SIZES, limit) if known < size <= limit}):
        if not right:
            trial.rewind(_BASE, runtime.width)
        # What the last round left is, bit for bit, what single tokens would have left.
        while len(right) < size and not trial.late:
            plain = len(right) < _SINGLY or size - len(right) <= _LAST
            right += trial.next(1 if plain else min(found[-1], size - _LAST - len(right)))
        if trial.late:
            complete = False
            break
        trial.rewind(_BASE, runtime.width)
        if trial.next(size) != right:
            break
        found.append(size)
    # Halving what is left bounds the time: each attempt costs half of the one before.
    while found[-1] > known:
        trial.rewind(_BASE, runtime.width)
        rows = trial.company(found[-1])
        if rows == right[: len(rows)]:
            break
        del found[max(1, len(found) // 2) :]
    return found[-1], complete


def _at_edge(trial: _Trial, edge: int, width: int) -> int:
    """The widest call, at most `width`, that is right where a sequence passes this length. Raises _Late."""
    base = edge - 1  # the first row is before the edge where it is alone, and beyond where the call is
    most = trial.runtime.info.context - base
    trial.rewind(base, width)
    right = [row for _ in range(min(most, _FAR[-1])) for row in trial.next(1)]

    def holds(size: int) -> bool:
        for call, skipped in ((trial.next, 0), (trial.company, 1)):
            trial.rewind(base + skipped, width)
            rows = call(min(size, most))
            if any(row != single for row, single in zip(rows, right[skipped:], strict=False)):
                return False
        return True

    narrow = [size for size in _FAR if size < width]
    for i, size in enumerate(narrow):
        if not holds(size):
            return narrow[i - 1] if i else 1
    while width > 1 and not holds(width):
        trial.until = inf  # what is wrong is given up, whatever time it takes to find what is right
        smaller = [1, *(size for size in _SIZES if size < width)]
        width = smaller[len(smaller) // 2]
    return width
