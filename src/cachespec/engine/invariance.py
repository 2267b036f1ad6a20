"""How many tokens one call may take so that its rows are bit for bit those of one token at a time (contract E2).

Kernels change with the number of rows, and rounding with them: on a CPU llama.cpp's Q4_1 agrees up to 63 tokens a call
with flash attention on. Measured at start, with the settings that will be used, when ``deterministic = true``.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.sampling import key

_SIZES = (2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 192, 255, 256, 384, 511, 512)
_BASE = 11  # a start that no tile size divides


def invariant_width(runtime: Runtime) -> int:
    """The widest call found invariant, at most ``runtime.width``. Sequence 0 must be empty, and is so afterwards."""
    limit = min(runtime.width, runtime.info.context - _BASE)
    tokens = [key(0, i) % runtime.info.vocab for i in range(_BASE + max(limit, 0))]
    singly: list[bytes] = []
    width = 1
    try:
        for size in (s for s in _SIZES if s <= limit):
            # What the last round left is, bit for bit, what single tokens would have left.
            for at in range(len(singly), _BASE + size):
                singly += _digests(runtime, at, tokens[at : at + 1])
            if not runtime.truncate(0, _BASE):
                runtime.free(0)
                for at in range(_BASE):
                    _digests(runtime, at, tokens[at : at + 1])
            if _digests(runtime, _BASE, tokens[_BASE : _BASE + size]) != singly[_BASE : _BASE + size]:
                break
            width = size
    finally:
        runtime.free(0)
    return width


def _digests(runtime: Runtime, start: int, tokens: Sequence[int]) -> list[bytes]:
    """Evaluate in one call; the digest of each row of logits."""
    rows = runtime.rows(runtime.evaluate([Span(sequence=0, start=start, tokens=tokens, rows=len(tokens))]))
    return [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
