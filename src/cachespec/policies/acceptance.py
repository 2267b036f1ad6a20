"""Acceptance policies: how many tokens to draft. The contract is `engine.speculation`.

`Goodput` is the default: at every step the lengths that promise the most tokens a second, 0 where plain decoding does. The
others are for comparison, and for people who know better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from cachespec.engine.speculation import Candidate, Choice, CostTable, ReasonCode, Step, expected_tokens, survivals
from cachespec.errors import InputError

_ENTER = 1.04
"""Gain from which speculation is taken up again after a step without: noise alone must not switch it."""
_SURE = 1.5
"""Time expected to be saved, over time spent, from which a draft is tried whatever was lost before."""
_DOUBT = 0.15
"""No draft is taken to fail less often than this, when its risk is weighed."""
_READING = 0.5
"""Share of the time that an answer is expected to take yet from which reading, before any draft, could hardly ever pay."""


_NO_GAIN = Choice(length=0, reason="no_gain", gain=1.0)


def guard(step: Step, candidate: Candidate, *, min_acceptance: float, min_output_tokens: int) -> ReasonCode | None:
    """What speaks against speculating at all: None, or why. The classic rules, in the order in which they are cheapest."""
    if step.fits is False:
        return "draft_does_not_fit"
    if step.vendor_optimises:
        return "vendor_optimises"
    if candidate.output < min_output_tokens:
        return "short_output"
    if candidate.acceptance is not None and candidate.acceptance < min_acceptance:
        return "low_acceptance"
    return None


def longest(candidate: Candidate, most: int) -> int:
    """The longest draft there is a use for: one token more than it is emitted."""
    return max(0, min(len(candidate.chances), candidate.remaining - 1, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The lengths with the most expected tokens a second, by measured costs and estimated chances.

    Within a batch each further token goes to the sequence where it survives most probably, as long as the whole call gains
    by it. Losses are bounded: what a draft costs, with what a draft model has to read before it, weighed with the doubt about
    its first token, must be within the request's credit, unless it promises much more than that. Without credit it is drafted
    on paper, which may earn it. Where only trying can tell whether it would pay, a short probe is made when there is time for
    one.

    Args:
        min_acceptance: floor of acceptance; below it nothing is drafted, whatever the costs are.
        min_output_tokens: answers expected to be shorter are decoded plainly.
        max_length: the longest draft.
    """

    min_acceptance: float = 0.0
    min_output_tokens: int = 0
    max_length: int = 24

    def __post_init__(self) -> None:
        _check(self.min_acceptance, self.min_output_tokens, self.max_length, "max_length")

    def choose(self, step: Step) -> Sequence[Choice]:
        candidates, costs = step.candidates, step.costs
        limits = self.min_acceptance, self.min_output_tokens
        barred = [guard(step, c, min_acceptance=limits[0], min_output_tokens=limits[1]) for c in candidates]
        if costs is None:
            return [Choice(length=0, reason=reason or "eval_required") for reason in barred]
        if step.anchor:
            return [Choice(length=0, reason=reason or "eval_required", gain=1.0) for reason in barred]
        least = 1.0 if any(c.previous for c in candidates) else _ENTER
        lengths, gain, wanted = [0] * len(candidates), 1.0, [0] * len(candidates)
        if _promises(step, costs, self.max_length) >= least:
            wanted, hoped = _allocate(step, [0 if reason else self.max_length for reason in barred], costs)
            if hoped < least:
                wanted = lengths
            else:
                lengths, gain = self._within_credit(step, wanted, hoped, costs, least)
        probed = self._probe(step, barred, lengths, costs)
        result = []
        for i, (length, reason) in enumerate(zip(lengths, barred, strict=True)):
            if i == probed:
                result.append(Choice(length=1, reason="eval_required", gain=gain))
            elif not length and reason is None and gain == 1.0 and not wanted[i]:
                result.append(_NO_GAIN)
            else:
                reason = reason or ("gain" if length else "no_gain")
                result.append(Choice(length=length, reason=reason, gain=gain, wanted=0 if length else wanted[i]))
        return result

    def _within_credit(
        self, step: Step, wanted: list[int], gain: float, costs: CostTable, least: float
    ) -> tuple[list[int], float]:
        """The best lengths that the requests' credit allows, and their gain; where that is not enough, none.

        `wanted`, with `gain`, are the best that there are.
        """
        batch = len(wanted)
        credit = [self._allowed(c, batch, costs) if length else 0 for c, length in zip(step.candidates, wanted, strict=True)]
        if all(length <= most for length, most in zip(wanted, credit, strict=True)):
            return wanted, gain
        lengths, gain = _allocate(step, credit, costs)
        return (lengths, gain) if gain >= least else ([0] * batch, 1.0)

    def _allowed(self, candidate: Candidate, batch: int, costs: CostTable) -> int:
        """The longest draft that the request's credit covers, or that promises so much that it needs none."""
        plain, most = costs.seconds(batch, batch), longest(candidate, self.max_length)
        saved = [s * plain / batch for s in accumulate(survivals(candidate.chances[:most]))]
        doubt = max(_DOUBT, 1 - candidate.chances[0]) if most else 1.0
        for length in range(most, 0, -1):
            cost = costs.seconds(batch, batch + length) - plain + length * candidate.draft_s
            covered = (cost + candidate.setup_s) * doubt <= candidate.credit_s
            if covered or saved[length - 1] >= _SURE * (cost + _share(candidate, length)):
                return length
        return 0

    def _probe(self, step: Step, barred: Sequence[ReasonCode | None], lengths: Sequence[int], costs: CostTable) -> int | None:
        """The sequence to probe, if any: one that is off, that nothing is learned of meanwhile, and that time allows for."""
        candidates, batch = step.candidates, len(step.candidates)
        if all(candidate.scored for candidate in candidates) or any(lengths) or batch >= step.max_tokens:
            return None
        plain = costs.seconds(batch, batch)
        prices = [
            (candidate.draft_s + candidate.setup_s, i)
            for i, candidate in enumerate(candidates)
            if not candidate.scored
            and barred[i] in (None, "low_acceptance")
            and longest(candidate, self.max_length)
            and candidate.setup_s <= _READING * _coming(candidate) * plain
        ]
        price, cheapest = min(prices, default=(inf, None))
        return cheapest if costs.seconds(batch, batch + 1) - plain + price <= step.probe_s else None


def _promises(step: Step, costs: CostTable, most: int) -> float:
    """A bound of what any lengths can gain, at next to no cost: every token there is, for the least that any call takes."""
    batch = len(step.candidates)
    tokens = sum(sum(survivals(c.chances[:most])) for c in step.candidates)
    room = min(step.max_tokens - batch, most * batch)
    return (1 + tokens / batch) * costs.seconds(batch, batch) / costs.cheapest(batch, room) if tokens and room > 0 else 0.0


def _allocate(step: Step, allowed: Sequence[int], costs: CostTable) -> tuple[list[int], float]:
    """The best lengths within what is allowed, and their goodput over that of plain decoding."""
    candidates, seconds = step.candidates, costs.seconds
    batch = len(candidates)
    chances = [survivals(c.chances[: longest(c, most)]) for c, most in zip(candidates, allowed, strict=True)]
    # The most probable token of all first. Survival never grows along a draft, so these are always whole beginnings.
    order = [(-s, j, i) for i, row in enumerate(chances) for j, s in enumerate(row)]
    if batch > 1:
        order.sort()
    plain = batch / seconds(batch, batch)
    emitted, drafting, best, taken = float(batch), 0.0, plain, 0
    for n, (survival, j, i) in enumerate(order[: max(0, step.max_tokens - batch)], start=1):
        emitted -= survival
        drafting += candidates[i].draft_s
        if candidates[i].setup_s:
            drafting += _share(candidates[i], j + 1) - (_share(candidates[i], j) if j else 0.0)
        goodput = emitted / (seconds(batch, batch + n) + drafting)
        if goodput > best:
            best, taken = goodput, n
    lengths = [0] * batch
    for _, _, i in order[:taken]:
        lengths[i] += 1
    return lengths, best / plain


def _coming(candidate: Candidate) -> float:
    """Tokens that may be counted on."""
    return max(1.0, min(candidate.remaining, candidate.ahead))


def _share(candidate: Candidate, length: int) -> float:
    """The part of what it takes to begin drafting that a step with a draft bears: as much as it emits of what is to come."""
    if not candidate.setup_s:
        return 0.0
    return candidate.setup_s * min(1.0, expected_tokens(candidate.chances[:length]) / _coming(candidate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The classic rules: a fixed length, unless acceptance is under a floor, the answer is short, or the draft does not fit.

    It looks at no cost, so it also speculates where that loses; what is not drafted is scored only where that is free.
    """

    min_acceptance: float = 0.5
    min_output_tokens: int = 20
    draft_length: int = 4

    def __post_init__(self) -> None:
        _check(self.min_acceptance, self.min_output_tokens, self.draft_length)

    @property
    def max_length(self) -> int:
        return self.draft_length

    def choose(self, step: Step) -> Sequence[Choice]:
        limits = self.min_acceptance, self.min_output_tokens
        barred = [guard(step, c, min_acceptance=limits[0], min_output_tokens=limits[1]) for c in step.candidates]
        lengths = [0 if r else longest(c, self.draft_length) for r, c in zip(barred, step.candidates, strict=True)]
        lengths = _within(lengths, step.max_tokens)
        gain = _gain(step, lengths)
        return [
            Choice(length=length, reason=reason or ("gain" if length else "no_gain"), gain=gain)
            for length, reason in zip(lengths, barred, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Always the same length, where the draft fits at all: what to compare with."""

    draft_length: int = 4

    def __post_init__(self) -> None:
        _check(0.0, 0, self.draft_length)

    @property
    def max_length(self) -> int:
        return self.draft_length

    def choose(self, step: Step) -> Sequence[Choice]:
        if step.fits is False:
            return [Choice(length=0, reason="draft_does_not_fit") for _ in step.candidates]
        lengths = _within([longest(c, self.draft_length) for c in step.candidates], step.max_tokens)
        gain = _gain(step, lengths)
        return [Choice(length=length, reason="rule", gain=gain) for length in lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Never:
    """Plain decoding."""

    @property
    def max_length(self) -> int:
        return 0

    def choose(self, step: Step) -> Sequence[Choice]:
        return [Choice(length=0, reason="rule", gain=1.0) for _ in step.candidates]


def _within(lengths: list[int], max_tokens: int) -> list[int]:
    """Shortened, the longest first, until the call takes them."""
    while sum(lengths) > max(0, max_tokens - len(lengths)):
        lengths[lengths.index(max(lengths))] -= 1
    return lengths


def _gain(step: Step, lengths: Sequence[int]) -> float | None:
    """Expected goodput of these lengths over plain decoding; None without costs."""
    if step.costs is None:
        return None
    batch = len(lengths)
    pairs = list(zip(step.candidates, lengths, strict=True))
    emitted = batch + sum(sum(survivals(c.chances[:length])) for c, length in pairs)
    drafting = sum(c.draft_s * length + _share(c, length) for c, length in pairs if length)
    seconds = step.costs.seconds(batch, batch + sum(lengths)) + drafting
    return emitted / seconds * step.costs.seconds(batch, batch) / batch


def _check(acceptance: float, output: int, length: int, name: str = "draft_length") -> None:
    if not 0 <= acceptance <= 1:
        raise InputError(f"must be from 0 to 1, not {acceptance!r}", field="min_acceptance")
    if output < 0:
        raise InputError(f"must not be negative, not {output!r}", field="min_output_tokens")
    if length < 1:
        raise InputError(f"must be at least 1, not {length!r}", field=name)
