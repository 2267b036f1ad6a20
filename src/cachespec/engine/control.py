"""What stands between the loop and drafters: chooses lengths, scores what became of drafts, keeps the accounts (contract E4).

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

from cachespec.engine.contained import ContainedDrafter, ContainedPolicy, Fault
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.base import MUCH_BEHIND, Draft, Drafter
from cachespec.engine.estimates import DrafterEstimate, RequestEstimate
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import AcceptancePolicy, Candidate, Choice, CostTable, Step

Answer = TypeVar("Answer")
_LOG: Final = logging.getLogger("cachespec")
RISK: Final = 0.01
"""Share of plain decoding's time that speculation may lose on a request."""
PROBING: Final = 0.005
"""Share of decoding's time for probes."""
ANCHOR_EVERY: Final = 600
"""Steps with drafts after which a few plain ones tell again what drafts are compared with: half a percent of them."""
_START, _MOST = 0.5, 3.0  # credit of a request at its start, and at most, in tokens decoded plainly
_READS: Final = 0.1  # of the target's time for a token, in the widest call that was measured, that a draft model reads one in
_SAVED_PROBES = 4.0  # probe time that is kept at most, in steps of plain decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one sequence verifies in this step, and why that much.

    `draft` may be shorter than what was chosen. `computed`: it was not known before, and making it took time; `reading_s` of
    that went into tokens that its drafter was behind with, at the speed of the table of costs.
    """

    draft: Draft
    choice: Choice
    computed: bool = False
    reading_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is to be expected of a request before anything is known of its text."""

    drafter: str | None
    choice: Choice
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it: `accepted` drafts were right, and `tokens` were committed (as `Drafter.accept` wants them)."""

    accepted: int
    tokens: Sequence[int]


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


@dataclass(frozen=True, slots=True)
class _Paper:
    """A draft on paper: what it would have cost, and what each token of it that is right would have saved, in seconds."""

    length: int
    cost: float
    share: float


class Track:
    """One request, as the control sees it."""

    __slots__ = ("credit", "estimates", "idle", "inner", "left", "output", "owed", "paper", "previous", "shadow", "shadow_at")

    def __init__(self, inner: Any, estimates: dict[str, RequestEstimate], output: int) -> None:
        self.inner, self.estimates, self.output = inner, estimates, output
        self.credit: float | None = None  # in seconds; None until costs are known
        self.left = output  # tokens that may still come
        self.owed = 0.0  # seconds of reading that the tokens to come have to pay for, in equal parts
        self.previous = 0
        self.idle: Choice | None = None  # what the policy chose when there was nothing to draft
        self.shadow: Draft | None = None
        self.shadow_at = 0
        self.paper: _Paper | None = None  # the beginning of the shadow that would have been drafted with more credit


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
        self._costs, self._clock = costs, clock
        self._max_tokens, self._fits, self._vendor = max_tokens, fits, vendor_optimises
        names = drafter.sources if drafter is not None else ()
        self._estimates = {name: DrafterEstimate() for name in names}
        self._empty = {name: Draft(source=name) for name in ("", *names)}
        self._draft_s: dict[str, float] = {}  # seconds a drafted token, of drafters that have to compute it
        self._read_s: dict[str, float] = {}  # seconds a token that they have to read first
        self._time: dict[str, float] = dict.fromkeys(names, 0.0)
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        self._reasons: Counter[str] = Counter()
        self._seconds = self._probe_s = self._probe_credit = self._planning = 0.0
        self._awaited = 0.0  # seconds that the next probe needs for reading
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
        """Begin a request of which `output` tokens are expected."""
        inner = self._ask(lambda drafter: drafter.open(prompt, sampling=sampling, namespace=namespace))
        estimates = {name: RequestEstimate(estimate) for name, estimate in self._estimates.items()}
        return Track(inner, estimates, output)

    def close(self, track: Track, *, learn: bool) -> None:
        """End a request. `learn`: its answer is complete."""
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
                track.shadow, track.shadow_at, track.paper = hint, 0, self._on_paper(len(tracks), choice.wanted)
        if not drafting:
            return [
                Plan(draft=self._empty[hint.source], choice=choice, computed=hint.pending)
                for choice, hint in zip(choices, hints, strict=True)
            ]
        drafts, reading = self._draft(tracks, hints, choices)
        return [
            Plan(draft=draft, choice=choice, computed=hint.pending, reading_s=reading.get(i, 0.0))
            for i, (draft, choice, hint) in enumerate(zip(drafts, choices, hints, strict=True))
        ]

    def _idle(self, tracks: Sequence[Track], hints: Sequence[Draft]) -> list[Plan] | None:
        """Where there is nothing to draft, and the policy was asked before why that is: the plans."""
        for track, hint in zip(tracks, hints, strict=True):
            if hint.tokens or hint.pending or track.idle is None:
                return None
        return [Plan(draft=h, choice=t.idle) for t, h in zip(tracks, hints, strict=True) if t.idle is not None]

    def _on_paper(self, batch: int, wanted: int) -> _Paper | None:
        """A draft that there was no credit for."""
        if not wanted or self._costs is None:
            return None
        table = self._costs.table
        plain = table.seconds(batch, batch)
        return _Paper(wanted, table.seconds(batch, batch + wanted) - plain, plain / batch)

    def step(self, tracks: Sequence[Track], hints: Sequence[Draft], remaining: Sequence[int]) -> Step:
        """What the policy is asked."""
        table = None if self._costs is None else self._costs.table
        if table is not None:
            for track in tracks:
                if track.credit is None:
                    track.credit = _START * table.seconds(1, 1)
        for track, left in zip(tracks, remaining, strict=True):
            track.left = left
        candidates = tuple(self._candidate(t, h, r) for t, h, r in zip(tracks, hints, remaining, strict=True))
        self._awaited = min((c.setup_s for c in candidates if not c.scored), default=self._awaited)
        return Step(
            candidates=candidates,
            costs=table,
            max_tokens=self._max_tokens,
            probe_s=self._probe_credit,
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
            output=track.output,
            draft_s=self._draft_s.get(hint.source, 0.0) if hint.pending else 0.0,
            setup_s=self._reading_s(hint.source, hint.behind) if hint.pending else 0.0,
            scored=not hint.pending,
            previous=track.previous,
            credit_s=0.0 if track.credit is None else track.credit,
        )

    def _reading_s(self, source: str, behind: int) -> float:
        """What a draft model takes to read so many tokens; until that was seen, rather too little, so that it will be."""
        if behind < MUCH_BEHIND or self._costs is None:
            return 0.0
        each = self._read_s.get(source)
        if each is None:
            table = self._costs.table
            widest = max(table.points[min(table.points)])
            each = _READS * table.seconds(1, widest) / widest
        return behind * each

    def _draft(
        self, tracks: Sequence[Track], hints: Sequence[Draft], choices: Sequence[Choice]
    ) -> tuple[list[Draft], dict[int, float]]:
        """The drafts, and the seconds that were spent on reading, by track."""
        lengths = [choice.length for choice in choices]
        drafts = [hint.first(length) for hint, length in zip(hints, lengths, strict=True)]
        computed = [i for i, hint in enumerate(hints) if hint.pending and lengths[i]]
        if computed and self._drafter is not None:
            began = self._clock()
            made = self._drafter.propose([tracks[i].inner for i in computed], [lengths[i] for i in computed])
            took, count = self._clock() - began, sum(len(draft.tokens) for draft in made)
            for i, draft in zip(computed, made, strict=True):
                drafts[i] = draft
                self._time[draft.source] += took * len(draft.tokens) / count if count else took / len(made)
            if self._costs is not None:
                return drafts, self._learn_drafting(tracks, hints, computed, made, took / self._costs.speed)
        return drafts, {}

    def _learn_drafting(
        self, tracks: Sequence[Track], hints: Sequence[Draft], computed: Sequence[int], made: Sequence[Draft], took: float
    ) -> dict[int, float]:
        """What a drafted token takes, and one that a draft model has to read before it can draft; what was spent on those, by
        track."""
        count, name, drafter = sum(len(draft.tokens) for draft in made), hints[computed[0]].source, self._drafter
        if drafter is not None and any(hints[i].behind >= MUCH_BEHIND for i in computed):
            after = drafter.prospects([tracks[i].inner for i in computed], self._policy.max_length)
            read = {i: max(hints[i].behind - hint.behind, 0) for i, hint in zip(computed, after, strict=True) if hint.pending}
            total = sum(read.values())
            if total < MUCH_BEHIND:
                return {}
            each = max(took - count * self._draft_s.get(name, took / (total + count)), 0.0) / total
            self._read_s[name] = 0.8 * self._read_s.get(name, each) + 0.2 * each
            return {i: tokens * each for i, tokens in read.items()}
        for draft in made if count else ():
            each = took / count
            self._draft_s[draft.source] = 0.8 * self._draft_s.get(draft.source, each) + 0.2 * each
        return {}

    def settle(self, tracks: Sequence[Track], plans: Sequence[Plan], outcomes: Sequence[Outcome], seconds: float) -> None:
        """Take in what became of a step whose call, draws included, took `seconds`."""
        batch, tokens = len(tracks), len(tracks) + sum(len(plan.draft.tokens) for plan in plans)
        self._steps += 1
        self._seconds += seconds + self._planning
        if self._costs is not None:
            self._account(tracks, plans, outcomes, self._costs.table)
            self._costs.observe(batch, tokens, seconds)
        for track, plan, outcome in zip(tracks, plans, outcomes, strict=True):
            self._reasons[plan.choice.reason] += 1
            self._emitted += len(outcome.tokens)
            self._score(track, plan, outcome)
            track.previous = plan.choice.length if plan.choice.reason != "eval_required" else 0
            self._tell(track, outcome.tokens)

    def _account(self, tracks: Sequence[Track], plans: Sequence[Plan], outcomes: Sequence[Outcome], table: CostTable) -> None:
        """Who saved and who lost time against plain decoding, by the table; what a call cost more is shared by drafts."""
        batch = len(tracks)
        drafted = sum(len(plan.draft.tokens) for plan in plans)
        plain = table.seconds(batch, batch)
        # What a draft model has yet to read is saved up for, too: behind a long prompt it is tried seldom, but it is.
        self._probe_credit = min(self._probe_credit + PROBING * plain, _SAVED_PROBES * plain + self._awaited)
        share = plain / batch
        more = (table.seconds(batch, batch + drafted) - plain) / drafted if drafted else 0.0
        for track, plan, outcome in zip(tracks, plans, outcomes, strict=True):
            draft = plan.draft
            each = more + (self._draft_s.get(draft.source, 0.0) if plan.computed else 0.0)
            cost = len(draft.tokens) * each
            if plan.choice.length and plan.choice.reason == "eval_required":
                self._probe_s += cost + plan.reading_s
                self._probe_credit -= cost + plan.reading_s
            else:
                track.owed += plan.reading_s
                part = track.owed * min(1.0, (outcome.accepted + 1) / max(1, track.left))
                track.owed -= part
                cost += part
                saved = outcome.accepted * share + (outcome.accepted + 1) * share * RISK - cost
                track.credit = min((track.credit or 0.0) + saved, _MOST * share)

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
            paper = track.paper
            if paper is not None and (not right or track.shadow_at == paper.length):
                credit, most = track.credit or 0.0, _MOST * paper.share
                saved = (at + right) * paper.share - paper.cost
                track.credit = min(max(credit + saved, min(credit, -most)), most)
                track.paper = None
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
            draft_s=self._draft_s.get(source or "", 0.0),
            setup_s=self._reading_s(source, prompt) if source in self._draft_s else 0.0,
            previous=1,
        )
        costs = None if self._costs is None else self._costs.table
        step = Step(
            candidates=(candidate,), costs=costs, max_tokens=self._max_tokens, fits=self._fits, vendor_optimises=self._vendor
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
            probe_s=self._probe_s,
            reasons=dict(self._reasons),
            sources=sources,
            fault=self._fault,
        )
