"""The result of an evaluation, and what it recommends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from cachespec.evaluation.interval import Acceptance
from cachespec.evaluation.sharing import Prefixes
from cachespec.usage import money_text

ALL: Final = "all"
"""The name of the whole slice as a group."""
WORTH: Final = 1.03
"""Predicted speed-up from which a drafter is recommended: less is within what a prediction may be off."""

Progress = Callable[[str, int, int], None]
"""Told what is going on, and how much of how much is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterScore:
    """What a drafter would give. `acceptance` None: it proposed nothing, or nothing that could be compared.

    `tokens_per_pass` and `predicted_speedup` are those of the backend's acceptance policy, which may draft less than it could,
    or nothing.
    """

    acceptance: Acceptance | None
    tokens_per_pass: float
    predicted_speedup: float

    def to_dict(self) -> dict[str, Any]:
        rate = self.acceptance
        return {
            "acceptance": None if rate is None else rate.rate,
            "low": None if rate is None else rate.low,
            "high": None if rate is None else rate.high,
            "tokens_per_pass": self.tokens_per_pass,
            "predicted_speedup": self.predicted_speedup,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A category. `tokens` are of its answers; `recommended` is a drafter's name, or the reason code why none is."""

    category: str
    requests: int
    tokens: int
    drafters: Mapping[str, DrafterScore]
    recommended: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "category": self.category,
            "requests": self.requests,
            "tokens": self.tokens,
            "drafters": {name: score.to_dict() for name, score in self.drafters.items()},
            "recommended": self.recommended,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All of it. `overall` is the whole slice as one group; `best` what is recommended for it, as `Group.recommended`.

    `notes` are remarks for a person: what was left out, and why. `failed` are drafters that broke, each with its error: there
    are no figures of those.
    """

    backend: str
    groups: tuple[Group, ...]
    overall: Group
    prefix: Prefixes
    policies: Mapping[str, Decimal | None]
    recommendation: str
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        return self.overall.recommended

    def to_dict(self) -> dict[str, Any]:
        """The format ``eval``; with `failed`, the error by drafter, where one failed."""
        return {
            "backend": self.backend,
            "groups": [group.to_dict() for group in self.groups],
            "prefix": self.prefix.to_dict(),
            "policies": {name: money_text(cost) for name, cost in self.policies.items()},
            "recommendation": self.recommendation,
            **({"failed": dict(self.failed)} if self.failed else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation, and what it says to put into a configuration: the `draft` table, the caching policy's name."""

    evaluation: Evaluation
    draft: Mapping[str, Any] | None
    caching: str | None


def recommended(drafters: Mapping[str, DrafterScore], bar: float | None) -> str:
    """Of the drafters, of which there are some, the one that is predicted to give most, if that is worth it and over the bar;
    else why none."""
    over = {name: score for name, score in drafters.items() if over_bar(score, bar)}
    if not over:
        return "low_acceptance" if any(score.acceptance for score in drafters.values()) else "no_gain"
    best = max(over, key=lambda name: over[name].predicted_speedup)
    return best if over[best].predicted_speedup >= WORTH else "no_gain"


def over_bar(score: DrafterScore, bar: float | None) -> bool:
    """Whether its acceptance is known and reaches the bar, if there is one."""
    return score.acceptance is not None and (bar is None or score.acceptance.rate >= bar)


def local_words(
    backend: str,
    overall: Group,
    groups: tuple[Group, ...],
    bar: float | None,
    prefix: Prefixes,
    failed: Mapping[str, str],
) -> str:
    """What to do about a local backend, in words. `failed`: drafters that nothing is known of, since they broke."""
    best, scores = overall.recommended, overall.drafters
    if best in scores:
        score = scores[best]
        gains = [group.drafters[best].predicted_speedup for group in groups]
        text = f"enable {best} speculation on {backend}: acceptance {_rate(score)}"
        text += f" reaches require_eval = {_bar(bar)}, and" if bar is not None else ";"
        text += f" answers are predicted to come {score.predicted_speedup:.2f} times as fast"
        if len(gains) > 1:
            text += f" ({min(gains):.2f} to {max(gains):.2f} by category)"
    elif not scores and failed:
        text = f"no speculation on {backend} ({best}): no drafter could be evaluated"
    elif not scores:
        text = f"no speculation on {backend} (capability): its model cannot go back, so nothing can be drafted"
    else:
        name = max(scores, key=lambda name: scores[name].predicted_speedup)
        score = scores[name]
        text = f"leave speculation off on {backend} ({best}): {name} has acceptance {_rate(score)}"
        if best == "low_acceptance" and bar is not None:
            text += f", below require_eval = {_bar(bar)}"
        else:
            text += f", and is predicted to make answers {score.predicted_speedup:.2f} times as fast: not worth it here"
        some = [group.category for group in groups if group.recommended == name]
        if some:
            text += f"; it would pay for {', '.join(some)} alone"
    broke = "".join(f"{name} failed, and nothing is said of it: {error}. " for name, error in failed.items())
    return f"{text}. {broke}{_sharing(prefix)}"


def hosted_words(
    backend: str,
    prefix: Prefixes,
    caching: Mapping[str, Decimal | None],
    best: str | None,
    routing: Mapping[str, Decimal | None],
) -> str:
    """What to do about a hosted backend, in words; `best` is the caching policy that costs least, `routing` what other ways to
    choose who answers cost."""
    text = f"no speculation on {backend} (vendor_optimises): whoever runs the model speculates already"
    least, without = caching.get(best or ""), caching.get("off")
    if least is not None:
        if len(caching) > 1 and set(caching.values()) == {least}:
            text += f". Every caching policy costs the same for this slice: {money_text(least)} USD"
        else:
            text += f". Cheapest caching policy for this slice: {best}, {money_text(least)} USD"
            if without:
                text += f", {float(least / without):.0%} of what no caching costs"
        ways = {name: cost for name, cost in routing.items() if cost is not None and cost < least}
        if ways:
            way = min(ways, key=lambda name: ways[name])
            text += f". Less by who answers: {way}, {money_text(ways[way])} USD, {float(ways[way] / least):.0%} of that"
    elif caching:
        text += ". What caching policies cost is not known: the model has no known price"
    return f"{text}. {_sharing(prefix)}"


def _rate(score: DrafterScore) -> str:
    rate = score.acceptance
    return "that is not known" if rate is None else f"{rate.rate:.2f} [{rate.low:.2f}, {rate.high:.2f}]"


def _bar(bar: float) -> str:
    """As it is written, with two digits at least."""
    return max(f"{bar:.2f}", repr(bar), key=len)


def _sharing(prefix: Prefixes) -> str:
    total = max(1, prefix.total_tokens)
    text = f"{prefix.shared_tokens / total:.0%} of prompt tokens repeat an earlier prompt's beginning"
    soon = prefix.by_lifetime["5m"]
    return text + ("." if soon is None else f", {soon / total:.0%} within 5 minutes.")
