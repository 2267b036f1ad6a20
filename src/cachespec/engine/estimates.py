"""Estimates of acceptance: per drafter for good, per request with a short memory (contract E4).

Accepted / drafted is not the chance that a token is right: what comes after a wrong token was never tried. The estimate is
accepted / (accepted + rejected), where a draft has at most one rejection: the maximum likelihood of a truncated geometric.

A drafter's own confidence says which tokens are likelier, seldom how likely. So each drafter has a table from confidence, in
tenths, to what really happened, and each request a factor on the misses that this table expects: text that is copied misses
less than it says, free text more. The first is learned over all requests, the second within a dozen tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_BINS: Final = 10
_LONG, _SHORT = 0.998, 0.97  # weight of the past, per scored token, for a drafter and for a request
_TRUST = 8.0  # scored tokens that a drafter's own confidence counts as
_MISSES, _LEFT = 1.0, 0.5  # misses as expected that a request begins with, and what always remains of them
_BLIND = 0.7  # acceptance of a drafter that nothing is known of, and whose drafts are not known before they are chosen
_HIGHEST = 0.995  # nothing is certain
_HOPELESS = 0.01  # survival under which a token is not worth thinking about


class DrafterEstimate:
    """What a drafter's tokens were worth, over all requests. Counts are of scored tokens, shadow ones included."""

    def __init__(self) -> None:
        self._hits = [_TRUST * (i + 0.5) / _BINS for i in range(_BINS)]
        self._tries = [_TRUST] * _BINS
        self.accepted = self.rejected = 0.0  # with a long memory
        self.positions: list[list[int]] = []  # for each position of a draft: tried, right

    def chance(self, confidence: float) -> float:
        """How often a token of this confidence was right."""
        i = int(confidence * _BINS) if confidence < 1 else _BINS - 1
        return self._hits[i] / self._tries[i]

    @property
    def acceptance(self) -> float | None:
        """Accepted / (accepted + rejected), recent tokens weighing more; None before any."""
        total = self.accepted + self.rejected
        return self.accepted / total if total else None

    def score(self, position: int, confidence: float, right: bool) -> None:
        """Note what became of one token, all before it having been right."""
        i = min(int(confidence * _BINS), _BINS - 1)
        self._hits[i] = self._hits[i] * _LONG + right
        self._tries[i] = self._tries[i] * _LONG + 1
        self.accepted = self.accepted * _LONG + right
        self.rejected = self.rejected * _LONG + (not right)
        while len(self.positions) <= position:
            self.positions.append([0, 0])
        self.positions[position][0] += 1
        self.positions[position][1] += right


class RequestEstimate:
    """What one drafter's tokens are worth in one request."""

    def __init__(self, drafter: DrafterEstimate) -> None:
        self._drafter = drafter
        self._missed = self._expected = _MISSES
        self._accepted = self._rejected = 0.0

    def chances(self, confidence: Sequence[float]) -> tuple[float, ...]:
        """For each token of a draft the chance that it is right if those before it are; without those that never survive."""
        factor = (self._missed + _LEFT) / (self._expected + _LEFT)
        result, survival, rate = [], 1.0, self._drafter.chance
        for c in confidence:
            chance = 1 - factor * (1 - rate(c))
            chance = 0.0 if chance < 0 else _HIGHEST if chance > _HIGHEST else chance
            survival *= chance
            if survival < _HOPELESS:
                break
            result.append(chance)
        return tuple(result)

    def blind(self, length: int) -> tuple[float, ...]:
        """The same for a draft of which nothing is known yet."""
        acceptance = self.acceptance
        return (min(_HIGHEST, _BLIND if acceptance is None else acceptance),) * length

    @property
    def acceptance(self) -> float | None:
        """Of this request, backed by the drafter's; None when neither is known."""
        prior, weight = self._drafter.acceptance, 2.0
        if prior is None:
            return None
        return (self._accepted + weight * prior) / (self._accepted + self._rejected + weight)

    def score(self, position: int, confidence: float, right: bool) -> None:
        """Note what became of one token, all before it having been right."""
        expected = 1 - self._drafter.chance(confidence)
        self._expected = self._expected * _SHORT + expected
        self._missed = self._missed * _SHORT + (not right)
        self._accepted = self._accepted * _SHORT + right
        self._rejected = self._rejected * _SHORT + (not right)
        self._drafter.score(position, confidence, right)
