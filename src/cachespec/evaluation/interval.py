"""The acceptance of a drafter with a 95 % interval, from the counts of each request."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Counts: TypeAlias = tuple[int, int]
"""Accepted and rejected tokens of one request."""

_ROUNDS: Final = 2000
_Z: Final = 1.959964
"""The 97.5 % point of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """accepted / (accepted + rejected), and where it lies with 95 % confidence. Over `scored` tokens."""

    rate: float
    low: float
    high: float
    scored: int


def acceptance(requests: Sequence[Counts]) -> Acceptance | None:
    """The acceptance over some requests; None where nothing was scored.

    Tokens of one request succeed and fail together, so the interval is the cluster bootstrap's: whole requests are drawn with
    replacement (Efron and Tibshirani, An Introduction to the Bootstrap, ch. 8). With few requests that is too narrow, and with
    one it is a point, so it is never narrower than Wilson's (1927), which takes tokens as independent. Deterministic.
    """
    scored = [pair for pair in requests if sum(pair)]
    accepted, total = sum(a for a, _ in scored), sum(map(sum, scored))
    if not total:
        return None
    low, high = wilson(accepted, total)
    if len(scored) > 1:
        rng = random.Random(0)  # noqa: S311 - the same interval for the same counts
        rates = []
        for _ in range(_ROUNDS):
            drawn = rng.choices(scored, k=len(scored))
            rates.append(sum(a for a, _ in drawn) / sum(map(sum, drawn)))
        rates.sort()
        low = min(low, rates[int(0.025 * _ROUNDS)])
        high = max(high, rates[int(0.975 * _ROUNDS)])
    return Acceptance(rate=accepted / total, low=low, high=high, scored=total)


def wilson(accepted: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share."""
    share, z2 = accepted / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)
