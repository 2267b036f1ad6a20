"""How many tokens one call may take so that its rows are bit for bit those of one token at a time (contract E2).

Kernels change with the number of rows, and rounding with them: on a CPU llama.cpp's Q4_1 agrees up to 63 tokens a call
with flash attention on. Measured with the settings that will be used, when ``deterministic = true``, within a few seconds;
what was found is kept beside the measured costs, for the same machine, model, settings and library only. A search that time
ended is taken up again at the next start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
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
_METHOD: Final = 2  # of this search; a width that another one found is not believed


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
    that one also in the company of other sequences.
    """
    limit = min(runtime.width, runtime.info.context - _BASE)
    tokens = [key(0, i) % runtime.info.vocab for i in range(_BASE + max(limit, 0))]
    until = clock() + seconds
    right: list[bytes] = []
    found, complete = [known], True
    try:
        for size in sorted({size for size in (*_SIZES, limit) if known < size <= limit}):
            if not right:
                _rewind(runtime, tokens)
            # What the last round left is, bit for bit, what single tokens would have left.
            while len(right) < size and clock() < until:
                plain = len(right) < _SINGLY or size - len(right) <= _LAST
                step = 1 if plain else min(found[-1], size - _LAST - len(right))
                at = _BASE + len(right)
                right += _digests(runtime, [Span(sequence=0, start=at, tokens=tokens[at : at + step], rows=step)])
            if clock() >= until:
                complete = False
                break
            _rewind(runtime, tokens)
            if _digests(runtime, [Span(sequence=0, start=_BASE, tokens=tokens[_BASE : _BASE + size], rows=size)]) != right:
                break
            found.append(size)
        # Halving what is left bounds the time: each attempt costs half of the one before.
        while found[-1] > known and not _in_company(runtime, tokens, right, found[-1]):
            del found[max(1, len(found) // 2) :]
    finally:
        for sequence in range(runtime.sequences):
            runtime.free(sequence)
    return found[-1], complete


def _in_company(runtime: Runtime, tokens: Sequence[int], right: Sequence[bytes], size: int) -> bool:
    """Whether a call of this size is also right when half of it are tokens of other sequences, as many as there are."""
    own = size - size // 2
    others = min(runtime.sequences - 1, size - own)
    if not others:
        return True
    for sequence in range(1, others + 1):
        runtime.free(sequence)
    _rewind(runtime, tokens)
    first = size - own - (others - 1)  # all but one of them have one token
    spans = [Span(sequence=i, start=0, tokens=tokens[: first if i == 1 else 1], rows=1) for i in range(1, others + 1)]
    spans.append(Span(sequence=0, start=_BASE, tokens=tokens[_BASE : _BASE + own], rows=own))
    return _digests(runtime, spans)[others:] == list(right[:own])


def _rewind(runtime: Runtime, tokens: Sequence[int]) -> None:
    """Have sequence 0 hold the base, which is made in the same way every time."""
    if not runtime.truncate(0, _BASE):
        runtime.free(0)
    while (held := runtime.length(0)) < _BASE:
        runtime.evaluate([Span(sequence=0, start=held, tokens=tokens[held : min(_BASE, held + runtime.width)])])


def _digests(runtime: Runtime, spans: Sequence[Span]) -> list[bytes]:
    """Evaluate in one call; the digest of each row of logits."""
    return [blake2b(row.tobytes(), digest_size=16).digest() for row in runtime.rows(runtime.evaluate(spans))]
