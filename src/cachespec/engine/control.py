"""What stands between the loop and drafters: chooses lengths, scores what became of drafts (contract E4).

The loop does, for the sequences of one step::

    plans = control.plan(tracks, remaining)          # drafts of the chosen lengths
    ... evaluate and verify plan.draft.tokens ...
    control.settle(tracks, plans, outcomes, seconds)  # what was drawn, and how long the call took

and `open` and `close` around a request. All on the engine's thread.

A drafter or a policy that breaks its contract is asked nothing more, from then on everything is decoded plainly, and the
statistics say why: neither can fail a request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Final, TypeVar

from cachespec.engine.accounts import Account, Accounts, Outcome, Plan
from cachespec.engine.contained import ContainedDrafter, ContainedPolicy, Fault
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.base import MUCH_BEHIND, Draft, Drafter
from cachespec.engine.estimates import DrafterEstimate, RequestEstimate
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import AcceptancePolicy, Candidate, Choice, Step

Answer = TypeVar("Answer")
_LOG: Final = logging.getLogger("cachespec")
ANCHOR_EVERY: Final = 600
"""Steps with drafts after which a few plain ones tell again what drafts are compared with: half a percent of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is to be expected of a request before anything is known of its text."""

    drafter: str | None
    choice: Choice
    acceptance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStats:
    """One drafter's figures. `positions` are pairs of tried and right for each place of a draft, shadow drafts included."""

    drafted: int
    accepted: int
    steps: int
    draft_s: float
    acceptance: float | None
    positions: tuple[tuple[int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "positions": [list(pair) for pair in self.positions]}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Figures since the start. `reasons` counts choices by code; seconds are of decoding steps, drafting included.

    `fault`: why speculation was switched off, None as long as it is not.
    """

    steps: int
    emitted: int
    seconds: float
    probe_s: float
    reasons: dict[str, int]
    sources: dict[str, SourceStats]
    fault: str | None = None

    @property
    def goodput(self) -> float | None:
        """Tokens a second; None before any."""
        return self.emitted / self.seconds if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """JSON, with `goodput`, and the sources as `drafters`."""
        names = ("steps", "emitted", "seconds", "probe_s", "goodput", "fault")
        drafters = {name: source.to_dict() for name, source in self.sources.items()}
        return {**{name: getattr(self, name) for name in names}, "reasons": dict(self.reasons), "drafters": drafters}


_NOTHING: Final = Draft(source="")
_OFF: Final = Choice(length=0, reason="rule", gain=1.0)


class Track(Account):
    """One request, as the control sees it."""

    __slots__ = ("estimates", "idle", "inner", "output", "previous", "shadow", "shadow_at")

    def __init__(self, inner: Any, estimates: dict[str, RequestEstimate], output: int) -> None:
        super().__init__()
        self.inner, self.estimates, self.output = inner, estimates, output
        self.previous = 0
        self.idle: Choice | None = None  # what the policy chose when there was nothing to draft
        self.shadow: Draft | None = None  # of which the beginning may be on paper
        self.shadow_at = 0


class SpeculationControl:
    """See the module's docstring.

    Args:
        drafter: None: there is none, and every plan is empty.
        costs: None: nothing was measured, and `goodput` will not speculate.
        max_tokens: the most that one call may evaluate, in all (the runtime's width, or the invariant one).
        fits: whether the draft model fits beside the target; None: there is none.
    """

    def __init__(
        self,
        policy: AcceptancePolicy,
        drafter: Drafter[Any] | None,
        *,
        costs: CostModel | None,
        max_tokens: int,
        fits: bool | None = None,
        vendor_optimises: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._policy = ContainedPolicy(policy, max_tokens)
        self._drafter = None if drafter is None else ContainedDrafter(drafter)
        self._fault: str | None = None
        self._costs, self._clock, self._accounts = costs, clock, Accounts(costs)
        self._max_tokens, self._fits, self._vendor = max_tokens, fits, vendor_optimises
        names = drafter.sources if drafter is not None else ()
        self._estimates = {name: DrafterEstimate() for name in names}
        self._empty = {name: Draft(source=name) for name in ("", *names)}
        self._time: dict[str, float] = dict.fromkeys(names, 0.0)
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        self._reasons: Counter[str] = Counter()
        self._seconds = self._planning = 0.0
        self._steps = self._emitted = 0

    @property
    def fault(self) -> str | None:
        """Why speculation was switched off; None as long as it is not."""
        return self._fault

    def serve(self, vocab: int) -> None:
        """Draft for a model with so many tokens."""
        if self._drafter is not None:
            self._drafter.vocab = vocab

    def _ask(self, call: Callable[[ContainedDrafter], Answer]) -> Answer | None:
        """Ask the drafter, as long as it is of use."""
        if self._drafter is not None and self._fault is None:
            try:
                return call(self._drafter)
            except Fault as fault:
                self._switch_off(fault)
        return None

    def _switch_off(self, fault: Fault) -> None:
        """For good, and said once."""
        if self._fault is None:
            self._fault = str(fault)
            _LOG.warning("speculation is off from now on: %s", fault, exc_info=fault.__cause__)

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None, output: int) -> Track:
        """Begin a request that asks for `output` tokens at most."""
        inner = self._ask(lambda drafter: drafter.open(prompt, sampling=sampling, namespace=namespace))
        estimates = {name: RequestEstimate(estimate) for name, estimate in self._estimates.items()}
        return Track(inner, estimates, output)

    def close(self, track: Track, *, learn: bool) -> None:
        """End a request. `learn`: its answer is complete."""
        self._accounts.end(track)
        self._ask(lambda drafter: drafter.close(track.inner, learn=learn))

    def plan(self, tracks: Sequence[Track], remaining: Sequence[int]) -> list[Plan]:
        """Choose and draft, for sequences that may still emit so many tokens each."""
        began, plans = self._clock(), None
        if self._fault is None:
            try:
                plans = self._plan(tracks, remaining)
            except Fault as fault:
                self._switch_off(fault)
        self._planning = self._clock() - began
        return [Plan(draft=_NOTHING, choice=_OFF) for _ in tracks] if plans is None else plans

    def _plan(self, tracks: Sequence[Track], remaining: Sequence[int]) -> list[Plan]:
        drafter, most = self._drafter, self._policy.max_length
        if drafter is None or not most:
            hints = [_NOTHING] * len(tracks)
        else:
            hints = drafter.prospects([t.inner for t in tracks], most)
            idle = self._idle(tracks, hints)
            if idle is not None:
                return idle
        step = self.step(tracks, hints, remaining)
        choices = self._policy.choose(step)
        drafting = False
        for track, hint, choice in zip(tracks, hints, choices, strict=True):
            if choice.length:
                drafting = True
            elif not hint.tokens:
                track.idle = None if hint.pending else choice
            elif track.shadow is None or (choice.wanted and track.paper is None):
                track.shadow, track.shadow_at, track.paper = hint, 0, self._accounts.on_paper(len(tracks), choice.wanted)
        drafts, reading = [self._empty[hint.source] for hint in hints], dict[int, float]()
        if drafting:
            drafts, reading = self._draft(tracks, hints, choices)
        by = [hint.source if hint.pending else None for hint in hints]
        return [
            Plan(draft=draft, choice=choice, computed=by[i], reading_s=reading.get(i, 0.0))
            for i, (draft, choice) in enumerate(zip(drafts, choices, strict=True))
        ]

    def _idle(self, tracks: Sequence[Track], hints: Sequence[Draft]) -> list[Plan] | None:
        """Where there is nothing to draft, and the policy was asked before why that is: the plans."""
        for track, hint in zip(tracks, hints, strict=True):
            if hint.tokens or hint.pending or track.idle is None:
                return None
        return [Plan(draft=h, choice=t.idle) for t, h in zip(tracks, hints, strict=True) if t.idle is not None]

    def step(self, tracks: Sequence[Track], hints: Sequence[Draft], remaining: Sequence[int]) -> Step:
        """What the policy is asked."""
        accounts = self._accounts
        accounts.begin(tracks, remaining)
        candidates = tuple(self._candidate(t, h, r) for t, h, r in zip(tracks, hints, remaining, strict=True))
        accounts.wait_for(candidates)
        return Step(
            candidates=candidates,
            costs=accounts.table,
            max_tokens=self._max_tokens,
            probe_s=accounts.purse,
            fits=self._fits,
            vendor_optimises=self._vendor,
            anchor=self._costs is not None and self._costs.unanchored >= ANCHOR_EVERY,
        )

    def _candidate(self, track: Track, hint: Draft, remaining: int) -> Candidate:
        estimate = track.estimates.get(hint.source)
        chances: tuple[float, ...] = ()
        if estimate is not None:
            chances = estimate.blind(self._policy.max_length) if hint.pending else estimate.chances(hint.confidence)
        return Candidate(
            source=hint.source,
            chances=chances,
            acceptance=None if estimate is None else estimate.acceptance,
            remaining=remaining,
            ahead=track.left,
            output=track.output,
            draft_s=self._accounts.drafting_s(hint.source) if hint.pending else 0.0,
            setup_s=self._accounts.setup_s(hint.source, hint.behind) if hint.pending else 0.0,
            scored=not hint.pending,
            previous=track.previous,
            credit_s=0.0 if track.credit is None else track.credit,
        )

    def _draft(
        self, tracks: Sequence[Track], hints: Sequence[Draft], choices: Sequence[Choice]
    ) -> tuple[list[Draft], dict[int, float]]:
        """The drafts, and the seconds that were spent on reading, by track."""
        lengths = [choice.length for choice in choices]
        drafts = [hint.first(length) for hint, length in zip(hints, lengths, strict=True)]
        computed = [i for i, hint in enumerate(hints) if hint.pending and lengths[i]]
        drafter = self._drafter
        if not computed or drafter is None:
            return drafts, {}
        inner, began = [tracks[i].inner for i in computed], self._clock()
        made = drafter.propose(inner, [lengths[i] for i in computed])
        took, count = self._clock() - began, sum(len(draft.tokens) for draft in made)
        for i, draft in zip(computed, made, strict=True):
            drafts[i] = draft
            self._time[hints[i].source] += took * len(draft.tokens) / count if count else took / len(made)
        much = any(hints[i].behind >= MUCH_BEHIND for i in computed)
        after = drafter.prospects(inner, self._policy.max_length) if much else None
        reading = self._accounts.computed([hints[i] for i in computed], after, made, took)
        return drafts, dict(zip(computed, reading, strict=True))

    def settle(self, tracks: Sequence[Track], plans: Sequence[Plan], outcomes: Sequence[Outcome], seconds: float) -> None:
        """Take in what became of a step whose call, draws included, took `seconds`."""
        batch, tokens = len(tracks), len(tracks) + sum(len(plan.draft.tokens) for plan in plans)
        self._steps += 1
        self._seconds += seconds + self._planning
        self._accounts.settle(tracks, plans, outcomes)
        if self._costs is not None:
            self._costs.observe(batch, tokens, seconds)
        for track, plan, outcome in zip(tracks, plans, outcomes, strict=True):
            self._reasons[plan.choice.reason] += 1
            self._emitted += len(outcome.tokens)
            self._score(track, plan, outcome)
            track.previous = plan.choice.length if plan.choice.reason != "eval_required" else 0
            self._tell(track, outcome.tokens)

    def _score(self, track: Track, plan: Plan, outcome: Outcome) -> None:
        draft = plan.draft
        if draft.tokens:
            track.shadow = track.paper = None
            counts = self._counts[draft.source]
            counts.update(drafted=len(draft.tokens), accepted=outcome.accepted, steps=1)
            estimate = track.estimates[draft.source]
            for i in range(min(outcome.accepted + 1, len(draft.tokens))):
                if i < outcome.accepted or len(outcome.tokens) > outcome.accepted:
                    estimate.score(i, draft.confidence[i], i < outcome.accepted)
        elif track.shadow is not None:
            self._score_shadow(track, track.shadow, outcome.tokens)

    def _score_shadow(self, track: Track, shadow: Draft, tokens: Sequence[int]) -> None:
        """Compare a draft that was not verified with the tokens that came."""
        for token in tokens:
            at = track.shadow_at
            right = shadow.tokens[at] == token
            track.estimates[shadow.source].score(at, shadow.confidence[at], right)
            track.shadow_at += 1
            if not right or (track.paper is not None and track.shadow_at == track.paper.length):
                self._accounts.settle_paper(track, at + right)
            if not right or track.shadow_at == len(shadow.tokens):
                track.shadow = None
                break

    def taken_back(self, source: str, accepted: int) -> None:
        """So many drafts that were accepted are not in the answer after all: a stop string took them back."""
        self._counts[source]["accepted"] -= accepted

    def accept(self, track: Track, tokens: Sequence[int]) -> None:
        """Tokens that came of no plan: the first of an answer, drawn from its prompt."""
        if track.shadow is not None:
            self._score_shadow(track, track.shadow, tokens)
        self._tell(track, tokens)

    def _tell(self, track: Track, tokens: Sequence[int]) -> None:
        track.emitted += len(tokens)
        self._ask(lambda drafter: drafter.accept(track.inner, tokens))

    def stop(self) -> None:
        """Release what the drafter holds."""
        if self._drafter is not None:
            try:
                self._drafter.stop()
            except Fault as fault:
                self._switch_off(fault)

    def forecast(self, output: int, prompt: int = 0) -> Forecast:
        """What is to be expected of a request for so many tokens, alone, by what earlier ones taught.

        `prompt`: tokens of it that are new here, which a draft model has to read as well.
        """
        if self._fault is not None:
            return Forecast(drafter=None, choice=_OFF, acceptance=None)
        try:
            return self._forecast(output, prompt)
        except Fault as fault:
            self._switch_off(fault)
            return Forecast(drafter=None, choice=_OFF, acceptance=None)

    def _forecast(self, output: int, prompt: int) -> Forecast:
        names = list(self._estimates)
        source = max(names, key=lambda name: self._estimates[name].acceptance or 0.0, default=None)
        acceptance = None if source is None else self._estimates[source].acceptance
        candidate = Candidate(
            source=source or "",
            chances=() if acceptance is None else (acceptance,) * self._policy.max_length,
            acceptance=acceptance,
            remaining=output,
            output=output,
            draft_s=self._accounts.drafting_s(source or ""),
            setup_s=self._accounts.ahead_s(source or "", prompt),
            previous=1,
        )
        step = Step(
            candidates=(candidate,),
            costs=self._accounts.table,
            max_tokens=self._max_tokens,
            fits=self._fits,
            vendor_optimises=self._vendor,
        )
        choice = self._policy.choose(step)[0]
        if source is not None and acceptance is None and choice.reason == "no_gain":
            choice = Choice(length=0, reason="eval_required")
        return Forecast(drafter=source, choice=choice, acceptance=acceptance)

    def stats(self) -> SpeculationStats:
        """For reports and metrics."""
        sources = {
            name: SourceStats(
                drafted=counts["drafted"],
                accepted=counts["accepted"],
                steps=counts["steps"],
                draft_s=self._time[name],
                acceptance=self._estimates[name].acceptance,
                positions=tuple((tried, right) for tried, right in self._estimates[name].positions),
            )
            for name, counts in self._counts.items()
        }
        return SpeculationStats(
            steps=self._steps,
            emitted=self._emitted,
            seconds=self._seconds,
            probe_s=self._accounts.probe_s,
            reasons=dict(self._reasons),
            sources=sources,
            fault=self._fault,
        )
