"""Decoding on paper: a text, a drafter that is right with a given chance at each place, and a table of costs for a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachespec.engine.accounts import Outcome
from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.base import Draft
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import AcceptancePolicy, CostTable

Acceptance = Callable[[int], float]
GREEDY = Sampling(seed=0, temperature=0)

FLAT = {1: 22.9, 2: 21.5, 4: 21.5, 8: 23.6, 9: 25.0, 16: 27.7, 17: 29.0, 32: 35.7}
STEEP = {1: 7.5, 2: 19.4, 4: 33.5, 8: 55.3, 16: 95.3, 32: 180.0}
MIDDLE = {1: 10.3, 2: 13.9, 4: 19.7, 8: 32.3, 16: 41.2, 32: 77.3}
UNEVEN = {1: 41.0, 2: 65.2, 3: 81.6, 5: 56.6, 9: 68.9, 12: 66.8, 17: 77.9, 33: 105.0}
"""Milliseconds by tokens: torch bfloat16, llama.cpp Q4_1, llama.cpp BF16, torch float32, all measured."""


def table(row: dict[int, float]) -> CostTable:
    return CostTable({1: {n: ms / 1000 for n, ms in row.items()}})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PaperDrafter:
    """Its tokens are 1 where right; the text is all ones. `says` is its confidence; `draft_s` makes it a draft model, which
    reads `prompt` tokens, in `read_s` each, before its first draft of a request."""

    def __init__(
        self,
        good: Sequence[bool],
        says: Callable[[int], float],
        *,
        clock: Clock,
        draft_s: float = 0.0,
        prompt: int = 0,
        read_s: float = 0.0,
    ) -> None:
        self.name = "paper"
        self.sources: tuple[str, ...] = ("paper",)
        self._good, self._says, self._clock, self._draft_s = good, says, clock, draft_s
        self.drafted_s = self.reading_s = 0.0
        self._prompt, self._read_s = prompt, read_s
        self._read = set[int]()

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None) -> list[int]:
        return [0]

    def prospects(self, tracks: Sequence[list[int]], limit: int) -> list[Draft]:
        if self._draft_s:
            return [Draft(source=self.name, pending=True, behind=self._behind(track)) for track in tracks]
        return [self._draft(track[0], limit) for track in tracks]

    def propose(self, tracks: Sequence[list[int]], lengths: Sequence[int]) -> list[Draft]:
        for track, length in zip(tracks, lengths, strict=True):
            if length:
                self.reading_s += self._behind(track) * self._read_s
                self._clock.now += self._behind(track) * self._read_s
                self._read.add(id(track))
        self._clock.now += sum(lengths) * self._draft_s
        self.drafted_s += sum(lengths) * self._draft_s
        return [self._draft(track[0], length) for track, length in zip(tracks, lengths, strict=True)]

    def _behind(self, track: list[int]) -> int:
        return 0 if id(track) in self._read else self._prompt

    def _draft(self, at: int, length: int) -> Draft:
        tokens = tuple(int(g) for g in self._good[at : at + length])
        return Draft(source=self.name, tokens=tokens, confidence=tuple(self._says(at + i) for i in range(len(tokens))))

    def accept(self, track: list[int], tokens: Sequence[int]) -> None:
        track[0] += len(tokens)

    def forget(self) -> None:
        """The requests are over; those that follow are read anew."""
        self._read.clear()

    def close(self, track: list[int], *, learn: bool) -> None: ...

    def stats(self) -> dict[str, int]:
        return {"tracks": 0, "bytes": 0}

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Played:
    seconds: float
    plain: float
    lengths: list[int]
    probe_s: float
    reasons: dict[str, int]


def play(
    policy: AcceptancePolicy,
    costs: CostTable,
    acceptance: Acceptance,
    *,
    tokens: int = 600,
    requests: int = 1,
    batch: int = 1,
    seed: int = 0,
    says: Callable[[int], float] = lambda at: 0.5,
    believed: CostTable | None = None,
    noise: float = 0.0,
    draft_s: float = 0.0,
    prompt: int = 0,
    read_s: float = 0.0,
    answers: Sequence[int] = (),
    limit: int | None = None,
) -> Played:
    """Decode answers one after another, each by `batch` streams of their own at once, until the first of them is done.

    `answers` are their lengths, where they are not all `tokens`; `limit` is what they are allowed, where it is more.
    `believed` is what the calibration said, where it differs from the truth.
    """
    rng = random.Random(seed)
    clock = Clock()
    total, plain = 0.0, 0.0
    lengths: list[int] = []
    good: list[bool] = []
    drafter = PaperDrafter(good, says, clock=clock, draft_s=draft_s, prompt=prompt, read_s=read_s)
    control = SpeculationControl(policy, drafter, costs=CostModel(believed or costs), max_tokens=64 * batch, clock=clock)
    at = 0
    for length in answers or [tokens] * requests:
        each, most = length + 64, limit or length
        good[:] = [rng.random() < acceptance(at + i) for _ in range(batch) for i in range(each)]
        tracks = [control.open([0], sampling=GREEDY, namespace=None, output=most) for _ in range(batch)]
        for i, track in enumerate(tracks):
            track.inner[0] = i * each
        done = [0] * batch
        while max(done) < length:
            before = clock.now
            plans = control.plan(tracks, [most - n for n in done])
            drafts = [plan.draft.tokens for plan in plans]
            accepted = [next((i for i, token in enumerate(draft) if not token), len(draft)) for draft in drafts]
            took = costs.seconds(batch, batch + sum(map(len, drafts))) * (1 + noise * rng.uniform(-1, 1))
            clock.now += took
            control.settle(tracks, plans, [Outcome(n, [1] * (n + 1)) for n in accepted], took)
            total += clock.now - before
            done = [n + right + 1 for n, right in zip(done, accepted, strict=True)]
            lengths += map(len, drafts)
        for track in tracks:
            control.close(track, learn=True)
        drafter.forget()
        plain += sum(done) / batch * costs.seconds(batch, batch)
        at += length
    stats = control.stats()
    return Played(total, plain, lengths, stats.probe_s, stats.reasons)
