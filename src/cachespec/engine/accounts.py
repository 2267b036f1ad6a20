"""What drafting takes, and what may be spent on it: times of drafters, the credit of each request, the purse for probes.

A draft model that reads a prompt spends that on tokens to come. Nobody knows how many do: it is shared by as many as answers
had of late, not by as many as are allowed. What an answer ended too early to pay is a debt, which who reads next takes over.

All seconds are at the speed of the table of costs (`CostModel.speed`). A draft is held against plain decoding by that table;
what a call costs more is shared by the drafts in it. Without a table nothing is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.base import MUCH_BEHIND, Draft
from cachespec.engine.speculation import Candidate, Choice, CostTable

RISK: Final = 0.01
"""Share of plain decoding's time that speculation may lose on a request."""
PROBING: Final = 0.005
"""Share of decoding's time for probes."""
FORGIVEN: Final = 0.005
"""Share of decoding's time by which the debt shrinks, so that what once was lost does not keep a draft model off for good."""
_START, _MOST = 0.5, 3.0  # credit of a request at its start, and at most, in tokens decoded plainly
_READS: Final = 0.1  # of the target's time for a token, in the widest call that was measured, that a draft model reads one in
_RECENT: Final = 16  # answers whose lengths are remembered
_SAVED_PROBES = 4.0  # probe time that is kept at most beside what has to be read, in steps of plain decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one sequence verifies in a step, and why that much.

    `draft` may be shorter than what was chosen. `computed`: the drafter that was asked to compute it, which took time, whoever
    it is of in the end; None: it was known before. `reading_s` went into tokens that this drafter was behind with.
    """

    draft: Draft
    choice: Choice
    computed: str | None = None
    reading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it: `accepted` drafts were right, and `tokens` were committed (as `Drafter.accept` wants them)."""

    accepted: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Paper:
    """A draft on paper: what it would have cost, and what each token of it that is right would have saved."""

    length: int
    cost: float
    share: float


class AnswerLengths:
    """How many tokens answers have: the recent ones, whatever ended them."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def add(self, tokens: int) -> None:
        """An answer is over."""
        self._recent.append(tokens)

    def ahead(self, tokens: int) -> float:
        """Tokens that follow the first `tokens` on average, where more do: as many again once it is longer than any other."""
        longer = [n for n in self._recent if n > tokens]
        return sum(longer) / len(longer) - tokens if longer else float(max(1, tokens))


class Account:
    """What one request may lose yet (`credit`; None until costs are known), and what it still has to pay for.

    `owed` is for what was read for it, if anything was (`read`): the tokens that are expected to come, `left`, bear it in equal
    parts. `emitted` are those that came. `paper` is the draft that there was no credit for.
    """

    __slots__ = ("credit", "emitted", "left", "owed", "paper", "read")

    def __init__(self) -> None:
        self.credit: float | None = None
        self.emitted, self.left = 0, 0.0
        self.owed, self.read = 0.0, False
        self.paper: Paper | None = None


class Accounts:
    """The accounts of one engine. `probe_s` was spent on probes, `purse` may be spent on the next one.

    `debt_s` was spent on reading, and lost on requests that read, and nobody paid it.
    """

    def __init__(self, costs: CostModel | None) -> None:
        self._costs = costs
        self._draft_s: dict[str, float] = {}  # seconds a drafted token, of drafters that have to compute it
        self._read_s: dict[str, float] = {}  # seconds a token that they have to read first
        self._awaited = 0.0  # what has to be read before the next probe
        self._lengths = AnswerLengths()
        self.probe_s = self.purse = self.debt_s = 0.0

    @property
    def table(self) -> CostTable | None:
        return None if self._costs is None else self._costs.table

    def begin(self, accounts: Sequence[Account], remaining: Sequence[int]) -> None:
        """A step of requests that may still emit so many tokens each."""
        table = self.table
        for account, left in zip(accounts, remaining, strict=True):
            account.left = min(left, self._lengths.ahead(account.emitted))
            if account.credit is None and table is not None:
                account.credit = _START * table.seconds(1, 1)

    def end(self, account: Account) -> None:
        """A request is over: what it read and did not pay, and lost in vain, is left to others."""
        if account.emitted:
            self._lengths.add(account.emitted)
        if account.read:
            self.debt_s += account.owed + max(0.0, -(account.credit or 0.0))

    def wait_for(self, candidates: Sequence[Candidate]) -> None:
        """Save up for a probe of these. Behind a long prompt a draft model is tried seldom, but it is."""
        self._awaited = min((c.setup_s for c in candidates if not c.scored), default=self._awaited)

    def drafting_s(self, source: str) -> float:
        """Of a token that has to be computed."""
        return self._draft_s.get(source, 0.0)

    def reading_s(self, source: str, behind: int) -> float:
        """Of so many tokens that a draft model has to read; until that was seen, rather too little, so that it will be."""
        table = self.table
        if behind < MUCH_BEHIND or table is None:
            return 0.0
        each = self._read_s.get(source)
        if each is None:
            widest = max(table.points[min(table.points)])
            each = _READS * table.seconds(1, widest) / widest
        return behind * each

    def setup_s(self, source: str, behind: int) -> float:
        """What has to be paid by an answer for which so many are read: that, and what is owed for others."""
        reading = self.reading_s(source, behind)
        return reading + self.debt_s if reading else 0.0

    def ahead_s(self, source: str, prompt: int) -> float:
        """The same before a request with so many new tokens; 0 for a drafter that never had to compute anything."""
        return self.setup_s(source, prompt) if source in self._draft_s else 0.0

    def computed(
        self, before: Sequence[Draft], after: Sequence[Draft] | None, made: Sequence[Draft], took: float
    ) -> list[float]:
        """Drafts were computed in `took` seconds of the clock. What of that was for reading, of each.

        `before` and `after` are the drafter's prospects, for what it was behind with; `after` None: with nothing much.
        """
        nothing = [0.0] * len(made)
        if self._costs is None:
            return nothing
        took, count, name = took / self._costs.speed, sum(len(draft.tokens) for draft in made), before[0].source
        if after is not None:
            read = [max(a.behind - b.behind, 0) if b.pending else 0 for a, b in zip(before, after, strict=True)]
            total = sum(read)
            if total < MUCH_BEHIND:
                return nothing
            each = max(took - count * self._draft_s.get(name, took / (total + count)), 0.0) / total
            self._read_s[name] = 0.8 * self._read_s.get(name, each) + 0.2 * each
            return [tokens * each for tokens in read]
        for hint in before if count else ():  # what a hybrid has to offer instead is another's, the time is not
            each = took / count
            self._draft_s[hint.source] = 0.8 * self._draft_s.get(hint.source, each) + 0.2 * each
        return nothing

    def settle(self, accounts: Sequence[Account], plans: Sequence[Plan], outcomes: Sequence[Outcome]) -> None:
        """Who saved and who lost time against plain decoding in a step."""
        table = self.table
        if table is None:
            return
        batch, drafted = len(accounts), sum(len(plan.draft.tokens) for plan in plans)
        plain = table.seconds(batch, batch)
        self.purse = min(self.purse + PROBING * plain, _SAVED_PROBES * plain + self._awaited)
        self.debt_s = max(0.0, self.debt_s - FORGIVEN * plain)
        share = plain / batch
        more = (table.seconds(batch, batch + drafted) - plain) / drafted if drafted else 0.0
        for account, plan, outcome in zip(accounts, plans, outcomes, strict=True):
            draft = plan.draft
            cost = len(draft.tokens) * (more + (self.drafting_s(plan.computed) if plan.computed else 0.0))
            if plan.choice.length and plan.choice.reason == "eval_required":
                self.probe_s += cost + plan.reading_s
                self.purse -= cost + plan.reading_s
                continue
            emitted = outcome.accepted + 1
            owed = account.owed + plan.reading_s
            if plan.reading_s:
                owed, self.debt_s, account.read = owed + self.debt_s, 0.0, True
            part = owed * min(1.0, emitted / max(1.0, account.left))
            account.owed = owed - part
            saved = outcome.accepted * share + emitted * share * RISK - cost - part
            account.credit = min((account.credit or 0.0) + saved, _MOST * share)

    def on_paper(self, batch: int, wanted: int) -> Paper | None:
        """A draft that there was no credit for."""
        table = self.table
        if not wanted or table is None:
            return None
        plain = table.seconds(batch, batch)
        return Paper(wanted, table.seconds(batch, batch + wanted) - plain, plain / batch)

    @staticmethod
    def settle_paper(account: Account, right: int) -> None:
        """What the draft on paper would have saved, now that so many tokens of it are known to be right and no more are."""
        paper = account.paper
        if paper is not None:
            credit, most = account.credit or 0.0, _MOST * paper.share
            account.credit = min(max(credit + right * paper.share - paper.cost, min(credit, -most)), most)
            account.paper = None
