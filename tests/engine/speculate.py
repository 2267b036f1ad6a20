"""The smallest engine that speculates: what a loop does with drafters, verification and processors, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cachespec.engine.drafters.base import Draft, Drafter
from cachespec.engine.processors import Processor
from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.sampling import Sampling
from cachespec.engine.verify import Proposal, Settled, clip, settle, verify

Length = Callable[[int], int]


class GuessDrafter:
    """Drafts by a function of the committed tokens and the length."""

    def __init__(self, guess: Callable[[list[int], int], Sequence[int]], name: str = "guess") -> None:
        self.name, self._guess = name, guess
        self.sources: tuple[str, ...] = (name,)
        self._open = 0

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None) -> list[int]:
        self._open += 1
        return list(prompt)

    def prospects(self, tracks: Sequence[list[int]], limit: int) -> list[Draft]:
        return self.propose(tracks, [limit] * len(tracks))

    def propose(self, tracks: Sequence[list[int]], lengths: Sequence[int]) -> list[Draft]:
        guesses = [tuple(self._guess(track, k))[:k] for track, k in zip(tracks, lengths, strict=True)]
        return [Draft(source=self.name, tokens=g, confidence=(0.5,) * len(g)) for g in guesses]

    def accept(self, track: list[int], tokens: Sequence[int]) -> None:
        track += tokens

    def close(self, track: list[int], *, learn: bool) -> None:
        self._open -= 1

    def stats(self) -> dict[str, int]:
        return {"tracks": self._open, "bytes": 0}

    def stop(self) -> None: ...


class Run:
    """One sequence's answer, step by step, on sequence `slot` of a runtime."""

    def __init__(
        self,
        runtime: Runtime,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        output: int,
        slot: int = 0,
        drafter: Drafter[Any] | None = None,
        processor: Processor | None = None,
        stop: Callable[[int], str | None] | None = None,
        namespace: bytes | None = b"n" * 16,
    ) -> None:
        self.runtime, self.sampling, self.output, self.slot = runtime, sampling, output, slot
        self.tokens, self.prompt = list(prompt), len(prompt)
        self.drafter, self.processor, self.stop = drafter, processor, stop
        self.track = None if drafter is None else drafter.open(prompt, sampling=sampling, namespace=namespace)
        self.reason: str | None = None
        self.drafted = self.accepted = self.steps = 0
        runtime.free(slot)
        if len(prompt) > 1:
            runtime.evaluate([Span(sequence=slot, start=0, tokens=prompt[:-1])])

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]

    def propose(self, length: int) -> list[int]:
        if self.drafter is None:
            return []
        drafts: Sequence[int] = self.drafter.propose([self.track], [length])[0].tokens
        left = self.output - len(self.answer)
        room = self.runtime.info.context - self.runtime.length(self.slot)
        drafts = clip(drafts, room=room, left=left, is_end=self.runtime.is_end)
        return list(drafts if self.processor is None else drafts[: self.processor.valid(drafts)])

    def proposal(self, drafts: Sequence[int], rows: Sequence[int]) -> Proposal:
        adjusts = () if self.processor is None else self.processor.adjusts(drafts)
        return Proposal(position=len(self.tokens), drafts=drafts, rows=rows, sampling=self.sampling, adjusts=adjusts)

    def settle(self, drafts: Sequence[int], drawn: Sequence[int]) -> Settled:
        before = len(self.tokens)
        settled = settle(drawn, self._take)
        new = self.tokens[before:]
        if self.processor is not None:
            self.processor.accept(new)
        if self.drafter is not None:
            self.drafter.accept(self.track, new)
            if settled.reason is not None:
                self.drafter.close(self.track, learn=True)
        self.runtime.truncate(self.slot, min(before + settled.accepted, len(self.tokens)))
        self.reason = settled.reason
        self.steps += 1
        self.drafted += len(drafts)
        self.accepted += settled.accepted
        return settled

    def _take(self, token: int) -> str | None:
        if self.runtime.is_end(token):
            return "stop"
        self.tokens.append(token)
        reason = None if self.stop is None else self.stop(token)
        return reason or ("length" if len(self.answer) >= self.output else None)


def step(runs: Sequence[Run], lengths: Sequence[int], *, together: bool = False) -> None:
    """One verification of all runs of one runtime in one call."""
    runtime = runs[0].runtime
    drafts = [run.propose(length) for run, length in zip(runs, lengths, strict=True)]
    spans, counts = [], []
    for run, draft in zip(runs, drafts, strict=True):
        tokens = [run.tokens[-1], *draft]
        spans.append(Span(sequence=run.slot, start=runtime.length(run.slot), tokens=tokens, rows=len(tokens)))
        counts.append(len(tokens))
    handles = runtime.evaluate(spans)
    proposals, at = [], 0
    for run, draft, count in zip(runs, drafts, counts, strict=True):
        proposals.append(run.proposal(draft, handles[at : at + count]))
        at += count
    for run, draft, drawn in zip(runs, drafts, verify(runtime, proposals, together=together), strict=True):
        run.settle(draft, drawn)


def generate(run: Run, length: Length = lambda step: 4, *, together: bool = False) -> list[int]:
    """The whole answer of one run. `length` gives the draft length of each step."""
    while run.reason is None:
        step([run], [length(run.steps)], together=together)
        held = run.runtime.length(run.slot)
        assert held <= len(run.tokens)
        assert run.reason is not None or held == len(run.tokens) - 1
    return run.answer
