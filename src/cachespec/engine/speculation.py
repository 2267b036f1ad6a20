"""The contract of acceptance policies: how many tokens to draft, decided at every step from what was measured (contract E4).

An acceptance policy is ``choose(step) -> choices``: a pure function from frozen values, one choice for each sequence of the
step. It has no clock and no memory; what it must know of the past stands in the step. `engine.control` makes the steps.

Words: *chance*, of a drafted token, that it is right if those before it are; *survival*, that it and all before it are. A
step with drafts of lengths k emits ``1 + sum of survivals`` tokens a sequence and takes ``t(batch, tokens)`` seconds for
one call that evaluates all of them, and what drafting takes. Plain decoding emits one each in ``t(batch, batch)``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Literal, Protocol, TypeAlias

from cachespec.errors import InputError

ReasonCode: TypeAlias = Literal[
    "gain", "no_gain", "low_acceptance", "short_output", "draft_does_not_fit", "vendor_optimises", "eval_required", "rule"
]
"""Why a length was chosen: codes of the decision. `eval_required`: something has to be measured first, or is just being
measured; `rule`: the policy looks at nothing."""


class CostTable:
    """t(batch, tokens): the seconds of one call that evaluates so many tokens, rows and draws included, by measurement.

    Between measured points it is interpolated, in tokens within a batch size, and between batch sizes at the same tokens a
    sequence; beyond them the last slope goes on. `assumed` are points (batch, tokens) that nobody measured yet. Immutable.
    InputError for points that cannot be costs.
    """

    __slots__ = ("_batches", "_cheapest", "_known", "assumed", "points")

    def __init__(self, points: Mapping[int, Mapping[int, float]], *, assumed: Iterable[tuple[int, int]] = ()) -> None:
        self.assumed = frozenset(assumed)
        self.points = {batch: dict(sorted(points[batch].items())) for batch in sorted(points)}
        for batch, row in self.points.items():
            if batch < 1 or not row or min(row) < batch or not all(0 < seconds < 1e6 for seconds in row.values()):
                raise InputError(f"the costs of batch {batch} are not seconds by tokens: {row}", field="costs")
        if not self.points:
            raise InputError("a table of costs needs at least one point", field="costs")
        self._batches = list(self.points)
        self._known: dict[tuple[int, int], float] = {}
        self._cheapest: dict[tuple[int, int], float] = {}

    @property
    def measured(self) -> dict[int, dict[int, float]]:
        """The points without those that are assumed."""
        rows = {
            batch: {tokens: seconds for tokens, seconds in row.items() if (batch, tokens) not in self.assumed}
            for batch, row in self.points.items()
        }
        return {batch: row for batch, row in rows.items() if row}

    def seconds(self, batch: int, tokens: int) -> float:
        """Of a call for `batch` sequences with `tokens` tokens in all."""
        found = self._known.get((batch, tokens))
        if found is None:
            found = self._known[batch, tokens] = self._interpolate(batch, tokens)
        return found

    def cheapest(self, batch: int, most: int) -> float:
        """The least that a call with any draft costs, of 1 to `most` (at least 1) tokens more than one a sequence."""
        found = self._cheapest.get((batch, most))
        if found is None:
            # A line in pieces: the least stands where two of them meet. Between batch sizes those of both neighbours do.
            at = bisect_right(self._batches, batch)
            rows = self._batches[max(0, at - 1) : at + 1]
            meet = {1, most} | {n - batch for row in rows for n in self.points[row]}
            meet |= {n * batch // row + up - batch for row in rows for n in self.points[row] for up in (0, 1)}
            found = min(self.seconds(batch, batch + n) for n in meet if 1 <= n <= most)
            self._cheapest[batch, most] = found
        return found

    def _interpolate(self, batch: int, tokens: int) -> float:
        at = bisect_right(self._batches, batch)
        if at == 0 or at == len(self._batches) or self._batches[at - 1] == batch:
            return _on_line(self.points[self._batches[max(0, at - 1)]], tokens)
        low, high = self._batches[at - 1], self._batches[at]
        width = tokens / batch
        a, b = _on_line(self.points[low], width * low), _on_line(self.points[high], width * high)
        return a + (b - a) * (batch - low) / (high - low)


def _on_line(row: Mapping[int, float], tokens: float) -> float:
    counts = list(row)
    if tokens <= counts[0] or len(counts) == 1:
        return row[counts[0]]
    at = min(bisect_right(counts, tokens), len(counts) - 1)
    low, high = counts[at - 1], counts[at]
    slope = (row[high] - row[low]) / (high - low)
    return row[high] + max(0.0, slope) * (tokens - high) if tokens > high else row[low] + slope * (tokens - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One sequence of a step.

    Attributes:
        source: the drafter that would draft.
        chances: estimated for each token it can draft, the best estimate there is; empty: it has nothing to propose.
        acceptance: accepted / (accepted + rejected), of this request as far as it is known, else of the drafter; None: not
            known at all.
        remaining: tokens that the answer may still have.
        ahead: tokens that are expected of it from here on, by the lengths of answers before; inf: as many as it may have.
        output: tokens that are asked for at most, or expected where nothing is decoded yet.
        draft_s: seconds that each drafted token costs before the call; 0 for one that is there already.
        setup_s: seconds until the first can be drafted, once for the answer: a draft model reads the prompt first. With what
            it read before answers that were too short to pay for it.
        scored: what is not drafted is compared with the tokens that come all the same, so probing teaches nothing.
        previous: the length chosen at the step before.
        credit_s: seconds that speculation may still lose on this request.
    """

    source: str
    chances: tuple[float, ...]
    remaining: int
    output: int
    ahead: float = float("inf")
    acceptance: float | None = None
    draft_s: float = 0.0
    setup_s: float = 0.0
    scored: bool = True
    previous: int = 0
    credit_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a policy decides on.

    Attributes:
        costs: None: nothing was measured yet.
        max_tokens: the most tokens that the call may evaluate, over all sequences.
        probe_s: seconds that may be spent on a probe now, and on what is read before it: at most 0.5 % of the decoding time.
        fits: whether the draft model fits into memory beside the target; None: there is none.
        vendor_optimises: whoever runs the model speculates already.
        anchor: plain decoding was not measured for so long that a few steps of it are due.
    """

    candidates: tuple[Candidate, ...]
    costs: CostTable | None
    max_tokens: int
    probe_s: float = 0.0
    fits: bool | None = None
    vendor_optimises: bool = False
    anchor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How many tokens to draft, and why. `gain` is the step's expected tokens a second over those of plain decoding.

    `wanted`: how many it would have been with more credit, where it is none for the lack of it. They are then drafted on
    paper: what they would have saved or lost changes the credit.
    """

    length: int
    reason: ReasonCode
    gain: float | None = None
    wanted: int = 0


class AcceptancePolicy(Protocol):
    """Chooses draft lengths. Called at every step: must take well under 1 % of it."""

    @property
    def max_length(self) -> int:
        """The longest draft it may choose: what a drafter is asked for."""

    def choose(self, step: Step) -> Sequence[Choice]:
        """One choice for each candidate, in order; no length above its chances, nor above what remains after one token."""


def survivals(chances: Sequence[float]) -> list[float]:
    """The survival of each drafted token."""
    return list(accumulate(chances, mul))


def expected_tokens(chances: Sequence[float]) -> float:
    """Tokens that a step with this draft emits: E(a, k) = (1 - a^(k+1)) / (1 - a) where all chances are a."""
    return 1.0 + sum(survivals(chances))
