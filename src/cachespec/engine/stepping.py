"""One step of an engine: what every running sequence needs next, in one call of the runtime.

Everything a sequence needs is the difference between its tokens and those its KV holds: the whole prompt, what a shared
prefix left of it, or one token, with drafts after it. So prefill, decode, reuse and going on after a pause are one thing:
evaluate the next part of the difference, and when nothing is left of it, draw.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from contextlib import suppress
from dataclasses import dataclass, field, replace

from cachespec.engine.accounts import Outcome, Plan
from cachespec.engine.control import SpeculationControl, Track
from cachespec.engine.costs import CostModel
from cachespec.engine.pages import PAGE
from cachespec.engine.processors import Adjust, Processor, log_probabilities
from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.sampling import Sampling
from cachespec.engine.scheduling import Pace, chunk_beside, shares
from cachespec.engine.sequence import Sequence, Verified
from cachespec.engine.slots import Lease
from cachespec.engine.structured import GrammarError
from cachespec.engine.verify import Proposal, Settled, clip, settle, verify
from cachespec.events import DraftVerified, Event, TokenLogprob


@dataclass(slots=True, eq=False)
class Part:
    """One sequence's part in a step. `plan` is there for a sequence that decodes, and only then may there be drafts.

    `before` is how many tokens it had. `unfollowed`: its drafts were not looked at, since the grammar broke on their way.
    """

    sequence: Sequence
    lease: Lease
    tokens: list[int]
    draws: bool
    track: Track | None = None
    plan: Plan | None = None
    unfollowed: bool = False
    before: int = field(init=False)

    def __post_init__(self) -> None:
        self.before = len(self.sequence.tokens)

    @property
    def drafts(self) -> tuple[int, ...]:
        return () if self.plan is None else self.plan.draft.tokens

    @property
    def evaluated(self) -> list[int]:
        return [*self.tokens, *self.drafts]

    @property
    def count(self) -> int:
        """How many tokens are evaluated."""
        plan = self.plan
        return len(self.tokens) + (0 if plan is None else len(plan.draft.tokens))

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts) if self.draws else 0

    def clip(self, drafts: int) -> None:
        """Keep so many drafts at most."""
        if self.plan is not None and drafts < len(self.drafts):
            self.plan = replace(self.plan, draft=self.plan.draft.first(drafts))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step gave one sequence: `settled` None for a prefill that is not done.

    `error`: what came of its own data, such as a row that is no law, or a grammar that cannot be followed further.
    """

    part: Part
    settled: Settled | None = None
    text: str = ""
    error: Exception | None = None


class Stepper:
    """Makes, evaluates and settles steps. Belongs to the engine's thread.

    `width` is the most tokens a call may evaluate, `chunk` the most prompt tokens of them, `max_gap` how many times longer
    a step may take that prefills beside running streams.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        width: int,
        chunk: int,
        max_gap: float,
        control: SpeculationControl | None,
        costs: CostModel | None,
    ) -> None:
        self._runtime, self._width, self._chunk, self._max_gap = runtime, width, min(chunk, width), max_gap
        self._control, self._costs = control, costs
        if control is not None:
            control.serve(runtime.info.vocab)
        self._together = runtime.info.draws_together
        self._pace = Pace()
        self._names = {token: name.encode() for name, token in runtime.info.controls.items()}
        self._steps = 0
        self._prefills_next = False

    def parts(self, running: List[Sequence]) -> list[Part]:
        """What to evaluate next, of sequences whose readers keep up; those that decode first."""
        here = [(s, s.lease) for s in running if s.lease is not None]
        prefilling = [(s, lease) for s, lease in here if s.missing > 1]
        decoding = [Part(s, lease, s.tokens[lease.held :], True, s.track) for s, lease in here if s.missing == 1]
        if len(decoding) + bool(prefilling) > self._width:  # a narrow call: who waited longest goes first
            decoding.sort(key=lambda part: part.sequence.stepped)
            self._prefills_next = bool(prefilling) and not self._prefills_next
            decoding = [] if self._prefills_next else decoding[: self._width]
        self._draft(decoding, (self._width // 2 if prefilling else self._width) - len(decoding))
        self._steps += 1
        for part in decoding:
            part.sequence.stepped = self._steps
        return decoding + self._prefill(prefilling, decoding)

    def _draft(self, parts: list[Part], budget: int) -> None:
        control = self._control
        drafted = [(part, part.track) for part in parts if part.track is not None]
        if control is None or not drafted:
            return
        info, left = self._runtime.info, [_left(part.sequence) for part, _ in drafted]
        plans = control.plan([track for _, track in drafted], left)
        budget = max(0, budget)
        for (part, _), plan, remaining in zip(drafted, plans, left, strict=True):
            part.plan = plan
            if not plan.draft.tokens:
                continue
            drafts = clip(part.drafts, room=info.context - part.lease.held, left=remaining, is_end=self._runtime.is_end)[
                : budget if info.rewinds else 0
            ]
            part.clip(_valid(part.sequence, drafts))
            budget -= len(part.drafts)

    def _prefill(self, missing: list[tuple[Sequence, Lease]], decoding: list[Part]) -> list[Part]:
        """The next chunks of prompts. The last token of one is drawn from at once."""
        if not missing:
            return []
        beside = sum(part.count for part in decoding)
        most = min(self._chunk, self._width - beside)
        table = None if self._costs is None else self._costs.table
        streams = len(decoding)
        budget = chunk_beside(table, self._pace, streams=streams, tokens=beside, most=most, max_gap=self._max_gap)
        parts = []
        for (sequence, lease), size in zip(missing, shares([s.missing for s, _ in missing], budget), strict=True):
            size = min(size, self._until_checkpoint(sequence, lease))
            if size > 0:
                tokens = sequence.tokens[lease.held : lease.held + size]
                parts.append(Part(sequence, lease, tokens, size == sequence.missing))
        return parts

    def _until_checkpoint(self, sequence: Sequence, lease: Lease) -> int:
        """Where a model cannot rewind, a call ends at the last page that a later request could share."""
        if self._runtime.info.rewinds or lease.namespace is None:
            return sequence.missing
        stop = (len(sequence.job.prompt) - 1) // PAGE * PAGE
        return stop - lease.held if lease.held < stop else sequence.missing

    def evaluate(self, parts: List[Part]) -> list[int]:
        """One call. Handles of its rows. Raises as `Runtime.evaluate`."""
        spans = [Span(sequence=p.lease.slot, start=p.lease.held, tokens=p.evaluated, rows=p.rows) for p in parts]
        rows = self._runtime.evaluate(spans)
        for part in parts:
            part.lease.held += part.count
        return rows

    def draw(self, parts: List[Part], rows: List[int]) -> list[Drawn]:
        """Draw and take what the rows give. The KV holds wrong drafts yet: `kept` says how much of it counts.

        Whatever goes wrong with one sequence's rows, grammar or text is the `error` of that one only.
        """
        handles = iter(rows)
        proposals: dict[int, Proposal] = {}
        tokens: dict[int, List[int]] = {}
        errors: dict[int, Exception] = {}
        for i, part in enumerate(parts):
            own = [next(handles) for _ in range(part.rows)]
            if part.draws:
                try:
                    proposals[i] = self._proposal(part, own)
                except Exception as error:  # noqa: BLE001
                    errors[i] = error
        try:
            found = verify(self._runtime, list(proposals.values()), together=self._together)
            tokens.update(zip(proposals, found, strict=True))
        except Exception:  # noqa: BLE001 - of one of them: drawing changes nothing, so each can be asked alone
            for i, proposal in proposals.items():
                try:
                    tokens[i] = verify(self._runtime, [proposal])[0]
                except ArithmeticError as error:
                    errors[i] = error
                except Exception as error:  # noqa: BLE001
                    self._probe(proposal)
                    errors[i] = error
        result = []
        for i, part in enumerate(parts):
            drawn = Drawn(part, error=errors.get(i))
            if i in tokens:
                try:
                    drawn = self._take(part, tokens[i], proposals[i].rows)
                except Exception as error:  # noqa: BLE001
                    drawn = Drawn(part, error=error)
            result.append(drawn)
        return result

    def _probe(self, proposal: Proposal) -> None:
        """Whether the runtime can still draw at all: else it is the runtime that failed, and its exception goes on."""
        with suppress(ArithmeticError):
            self._runtime.draw([proposal.rows[0]], [Sampling(seed=0, temperature=0)], [proposal.position])

    def _proposal(self, part: Part, rows: list[int]) -> Proposal:
        sequence, drafts = part.sequence, part.drafts
        processor, adjusts = sequence.processor, list[Adjust | None]()
        if processor is not None:
            try:
                adjusts = processor.adjusts(drafts)
            except GrammarError:
                if not drafts:
                    raise
                drafts, rows, part.unfollowed = (), rows[:1], True  # what drafts would lead to is no fault of the answer
                adjusts = processor.adjusts(())
        return Proposal(
            position=len(sequence.tokens), drafts=drafts, rows=rows, sampling=sequence.job.sampling, adjusts=adjusts
        )

    def _score(self, part: Part, rows: List[int]) -> None:
        """Note the log probabilities of the tokens that a step added, in the rows that they were drawn from."""
        sequence = part.sequence
        new, top = sequence.tokens[part.before :], sequence.job.logprobs or 0
        for token, row in zip(new, self._runtime.rows(rows[: len(new)]) if new else (), strict=True):
            own, best = log_probabilities(row, token, top)
            others = tuple(self._scored(other, score) for other, score in best)
            sequence.scores.append(self._scored(token, own, others))

    def _scored(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        name = self._names.get(token)
        return TokenLogprob(token=token, text=self._runtime.piece(token) if name is None else name, logprob=logprob, top=top)

    def _take(self, part: Part, drawn: List[int], rows: List[int]) -> Drawn:
        text: list[str] = []
        settled = settle(drawn, lambda token: self._take_token(part.sequence, token, text))
        if part.sequence.job.logprobs is not None:
            self._score(part, rows)
        return Drawn(part, settled, "".join(text))

    def _take_token(self, sequence: Sequence, token: int, text: list[str]) -> str | None:
        """Take a drawn token into the answer, and its text; why the answer ends with it, if it does."""
        job = sequence.job
        if self._runtime.is_end(token):
            return "stop"
        sequence.tokens.append(token)
        piece = job.pieces.get(token)
        text.append(sequence.text.push(self._runtime.piece(token) if piece is None else piece))
        if sequence.text.stopped is not None:
            return "stop"
        if sequence.processor is not None:
            sequence.processor.accept([token])
        if sequence.grammar is not None and sequence.grammar.finished:
            return "stop"
        return None if _left(sequence) else "length"

    def begin(self, sequence: Sequence) -> None:
        """A sequence is admitted for the first time: its grammar and penalties, and its drafter's track."""
        job = sequence.job
        sequence.grammar = None if job.grammar is None else job.grammar.start()
        if sequence.grammar is not None or job.processing.active:
            vocab = self._runtime.info.vocab
            sequence.processor = Processor(job.processing, prompt=job.prompt, vocab=vocab, mask=sequence.grammar)
        if self._control is not None and self._runtime.info.rewinds:
            space = None if job.cache == "off" else sequence.space
            sequence.track = self._control.open(job.prompt, sampling=job.sampling, namespace=space, output=job.output)

    def end(self, sequence: Sequence, *, learn: bool) -> None:
        """It is over. `learn`: what it answered may help others."""
        if self._control is not None and sequence.track is not None:
            self._control.close(sequence.track, learn=learn and sequence.job.cache == "auto")
        sequence.track = sequence.processor = sequence.grammar = None

    def settle(self, drawn: List[Drawn], seconds: float) -> None:
        """Tell the drafter and the policy what became of a step, by the time it took, and note it for the readers."""
        control = self._control
        prefilling = sum(len(d.part.tokens) for d in drawn if len(d.part.tokens) > 1)
        decoding = sum(d.part.count for d in drawn if len(d.part.tokens) == 1)
        self._pace.observe(seconds, decoding=decoding, prefilling=prefilling)
        known = [(d.part, d.settled) for d in drawn if d.settled is not None and d.part.plan is not None]
        if control is not None and known:
            everything = sum(d.part.count for d in drawn)
            tokens = sum(part.count for part, _ in known)
            control.settle(
                [part.track for part, _ in known if part.track is not None],
                [_judged(part) for part, _ in known],
                [Outcome(settled.accepted, _emitted(part, settled)) for part, settled in known],
                self._without_prefill(seconds, len(known), tokens, everything - tokens, len(drawn)),
            )
        for d in drawn:
            track = d.part.sequence.track
            if control is not None and track is not None and d.settled is not None and d.part.plan is None:
                control.accept(track, _emitted(d.part, d.settled))
        for d in drawn:
            _note(d)

    def verified(self, sequence: Sequence) -> list[Event]:
        """What became of drafts, once all that are right are certain to be in the answer; only those count as accepted."""
        text, events = sequence.text, list[Event]()
        while sequence.verified:
            step = sequence.verified[0]
            if text.stopped is None and text.certain < step.at + step.accepted:
                break
            sequence.verified.popleft()
            accepted = max(0, min(step.accepted, text.tokens - step.at))
            if accepted < step.accepted and self._control is not None:
                sequence.accepted -= step.accepted - accepted
                self._control.taken_back(step.drafter, step.accepted - accepted)
            events.append(
                DraftVerified(drafter=step.drafter or None, drafted=step.drafted, accepted=accepted, reason=step.reason)
            )
        return events

    def _without_prefill(self, seconds: float, batch: int, tokens: int, more: int, everyone: int) -> float:
        """What the step would have taken without prompt tokens beside it, by the measured costs."""
        if not more or self._costs is None:
            return seconds
        table = self._costs.table
        return seconds * table.seconds(batch, tokens) / table.seconds(everyone, tokens + more)


def _left(sequence: Sequence) -> int:
    """Tokens that the answer may still have."""
    return sequence.job.output - (len(sequence.tokens) - len(sequence.job.prompt))


def _emitted(part: Part, settled: Settled) -> List[int]:
    """The tokens that a step added to the answer; an end token is none of them, nor is what a stop string took back."""
    tokens, prompt = part.sequence.tokens, len(part.sequence.job.prompt)
    return tokens[part.before : prompt + part.sequence.text.tokens]


def _judged(part: Part) -> Plan:
    """What a drafter is judged by: drafts that nobody looked at were not wrong."""
    plan = part.plan
    assert plan is not None  # noqa: S101 - the caller chose those that have one
    return replace(plan, draft=plan.draft.first(0)) if part.unfollowed else plan


def _valid(sequence: Sequence, drafts: List[int]) -> int:
    """How many leading drafts can be right; none where its grammar cannot say: what is wrong shows when it is drawn from."""
    if sequence.processor is None or not drafts:
        return len(drafts)
    try:
        return sequence.processor.valid(drafts)
    except Exception:  # noqa: BLE001
        return 0


def _note(drawn: Drawn) -> None:
    """A draft that was verified; or, when it changes, why none was made."""
    plan, settled, sequence = drawn.part.plan, drawn.settled, drawn.part.sequence
    if plan is None or settled is None:
        return
    reason, drafted = plan.choice.reason, len(plan.draft.tokens)
    if not drafted and reason == sequence.reason:
        return
    sequence.reason = reason
    sequence.drafted += drafted
    sequence.accepted += settled.accepted
    at = drawn.part.before - len(sequence.job.prompt)
    sequence.verified.append(Verified(at, plan.draft.source, drafted, settled.accepted, reason))
