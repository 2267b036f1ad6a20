"""How much prefill goes into a step beside running streams: pure functions.

A step that prefills takes longer, and everything that runs waits for it. One that prefills little is inefficient, since a
call has a price of its own. So a chunk is as large as leaves the gap between two tokens of a running stream bearable.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachespec.engine.speculation import CostTable

_LEAST = 4
"""Tokens that a prefill gets in any case, or it would never end."""


class Pace:
    """How long steps take without prefill, and a prompt token beside them: for engines whose costs were not measured."""

    def __init__(self) -> None:
        self._quiet_s = self._token_s = 0.0

    def observe(self, seconds: float, *, decoding: int, prefilling: int) -> None:
        """Note a step that evaluated so many tokens of either kind."""
        if not prefilling:
            self._quiet_s = _follow(self._quiet_s, seconds)
        elif seconds > self._quiet_s or not decoding:
            self._token_s = _follow(self._token_s, (seconds - (self._quiet_s if decoding else 0.0)) / prefilling)

    def chunk(self, most: int, max_gap: float) -> int:
        """Prompt tokens of a step that may take `max_gap` times a quiet one; a quarter of `most` before any was seen."""
        if not self._quiet_s or not self._token_s:
            return max(_LEAST, most // 4)
        return max(_LEAST, int(min(most, (max_gap - 1) * self._quiet_s / self._token_s)))


def _follow(old: float, new: float) -> float:
    return new if not old else 0.8 * old + 0.2 * new


def chunk_beside(costs: CostTable | None, pace: Pace, *, streams: int, tokens: int, most: int, max_gap: float) -> int:
    """Prompt tokens to evaluate in a step with `streams` running ones of `tokens` in all; at most `most`.

    `max_gap` is how many times longer than without it the step may take, by measured costs, or else by recent steps.
    """
    if not streams or most <= _LEAST:
        return most
    if costs is None:
        return pace.chunk(most, max_gap)
    allowed = max_gap * _seconds(costs, streams, tokens)
    low, high = _LEAST, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _seconds(costs, streams, tokens + middle) <= allowed else (low, middle - 1)
    return low


def _seconds(costs: CostTable, streams: int, tokens: int) -> float:
    """As measured; beyond the widest measured call in proportion, since the slope of two points is mostly noise."""
    nearest = min(costs.points, key=lambda batch: abs(batch - streams))
    widest = max(streams, max(costs.points[nearest]) * streams // nearest)
    known = costs.seconds(streams, min(tokens, widest))
    return known * max(1.0, tokens / widest)


def shares(missing: Sequence[int], budget: int) -> list[int]:
    """The budget for prefills that lack so many tokens, the oldest first.

    Half goes to the oldest, which no stream of newcomers may starve; the rest to whoever is done soonest, so that a short
    prompt does not wait for a long one. What they do not need, the next one gets.
    """
    result = [0] * len(missing)
    if missing:
        result[0] = min(missing[0], -(-budget // 2) if len(missing) > 1 else budget)
        left = budget - result[0]
        for i in sorted(range(len(missing)), key=lambda i: (missing[i], i)):
            more = min(missing[i] - result[i], left)
            result[i] += more
            left -= more
    return result
