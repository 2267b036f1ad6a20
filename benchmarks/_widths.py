"""By how much logits change with the number of tokens a call evaluates, and by how much one token beat another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.sampling import Sampling, gumbel, words

WIDTHS: Final = (2, 4, 5, 8, 16, 40, 64, 96, 128)
"""Tokens a call whose rounding is compared with that of single tokens."""
_BEST = 50


def gap(runtime: Runtime, prompt: Sequence[int], expected: Sequence[int], other: Sequence[int], how: Sampling) -> float:
    """By how many logits the expected token beat the other one where the answers part, noise included."""
    at = next((i for i, (a, b) in enumerate(zip(expected, other, strict=False)) if a != b), min(len(expected), len(other)))
    tokens = [*prompt, *expected[:at]]
    row = last_row(runtime, tokens)
    score = row.astype(np.float64)
    if how.temperature:
        ids = np.arange(len(row))
        score += how.temperature * gumbel(words(how.seed, len(tokens), ids))
    ends = [token for token in range(len(row)) if runtime.is_end(token)]
    one, two = (max([a[at]] if at < len(a) else ends, key=lambda t: score[t]) for a in (expected, other))
    return float(score[one] - score[two])


def last_row(runtime: Runtime, tokens: Sequence[int]) -> Any:
    """Logits after these tokens, evaluated one by one."""
    runtime.free(0)
    for at, token in enumerate(tokens):
        rows = runtime.evaluate([Span(sequence=0, start=at, tokens=[token], rows=int(at == len(tokens) - 1))])
    found = runtime.rows(rows)[0]
    runtime.free(0)
    return found


def width_effect(runtime: Runtime, texts: Sequence[Sequence[int]]) -> list[float]:
    """How much the difference of two of the best logits changes against single tokens, alone: for every token of the texts,
    in calls of each width, and of some tokens of all texts together."""
    singly = [evaluate_in(runtime, [tokens], 1)[0] for tokens in texts]
    best = [np.argpartition(rows, -_BEST, axis=1)[:, -_BEST:] for rows in singly]
    found: list[float] = []

    def compare(number: int, rows: Any) -> None:
        change = np.take_along_axis(rows - singly[number], best[number], axis=1)
        found.extend((change.max(axis=1) - change.min(axis=1)).tolist())

    for number, tokens in enumerate(texts):
        for width in (w for w in WIDTHS if w <= min(runtime.width, len(tokens))):
            compare(number, evaluate_in(runtime, [tokens], width)[0])
    for width in (w for w in (1, 2, 4, 9, 17) if w * len(texts) <= runtime.width):
        for number, rows in enumerate(evaluate_in(runtime, texts, width)):
            compare(number, rows)
    return found


def evaluate_in(runtime: Runtime, texts: Sequence[Sequence[int]], width: int) -> list[Any]:
    """All rows of logits of each text, from calls that take `width` tokens of each."""
    rows: list[list[Any]] = [[] for _ in texts]
    for at in range(0, max(map(len, texts)), width):
        parts = [(number, tokens[at : at + width]) for number, tokens in enumerate(texts) if at < len(tokens)]
        spans = [Span(sequence=number, start=at, tokens=part, rows=len(part)) for number, part in parts]
        found = runtime.rows(runtime.evaluate(spans))
        for number, part in parts:
            rows[number].append(found[: len(part)])
            found = found[len(part) :]
    for number in range(len(texts)):
        runtime.free(number)
    return [np.concatenate(parts) for parts in rows]
