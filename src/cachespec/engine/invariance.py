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
    """The widest call found invariant, at most ``runtime.width``. All sequences must be empty, and are so afterwards."""
    limit = min(runtime.width, runtime.info.context - _BASE)
    tokens = [key(0, i) % runtime.info.vocab for i in range(_BASE + max(limit, 0))]
    singly: list[bytes] = []
    found = [1]
    try:
        for size in (s for s in _SIZES if s <= limit):
            # What the last round left is, bit for bit, what single tokens would have left.
            for at in range(len(singly), _BASE + size):
                singly += _digests(runtime, [(at, tokens[at : at + 1])])
            _rewind(runtime, tokens)
            if _digests(runtime, [(_BASE, tokens[_BASE : _BASE + size])]) != singly[_BASE : _BASE + size]:
                break
            found.append(size)
        while found[-1] > 1 and not _in_company(runtime, tokens, singly, found[-1]):
            found.pop()
    finally:
        for sequence in range(runtime.sequences):
            runtime.free(sequence)
    return found[-1]


def _in_company(runtime: Runtime, tokens: Sequence[int], singly: Sequence[bytes], size: int) -> bool:
    """Whether calls of this size are also right when other sequences have a part in them: one, or as many as there are."""
    for others in {1, min(runtime.sequences, size) - 1} - {0} if runtime.sequences > 1 else ():
        own = max(1, size // 2) if others == 1 else size - others
        for sequence in range(1, others + 1):
            runtime.free(sequence)
        _rewind(runtime, tokens)
        spans = [(_BASE, tokens[_BASE : _BASE + own])]
        spans += [(0, tokens[: size - own] if others == 1 else tokens[i : i + 1]) for i in range(others)]
        if _digests(runtime, spans) != singly[_BASE : _BASE + own]:
            return False
    return True


def _rewind(runtime: Runtime, tokens: Sequence[int]) -> None:
    """Have sequence 0 hold the base, as single tokens make it."""
    if not runtime.truncate(0, _BASE):
        runtime.free(0)
    for at in range(runtime.length(0), _BASE):
        _digests(runtime, [(at, tokens[at : at + 1])])


def _digests(runtime: Runtime, parts: Sequence[tuple[int, Sequence[int]]]) -> list[bytes]:
    """Evaluate in one call, the first sequence's first; the digest of each of its rows of logits."""
    spans = [Span(sequence=i, start=start, tokens=tokens, rows=len(tokens)) for i, (start, tokens) in enumerate(parts)]
    rows = runtime.rows(runtime.evaluate(spans)[: len(parts[0][1])])
    return [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
