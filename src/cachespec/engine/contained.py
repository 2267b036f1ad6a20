"""Drafters and acceptance policies of whoever wrote them, held to their contracts: what breaks one is a `Fault`, named.

A drafter changes the speed of an answer and nothing else, so neither an exception of its code nor an answer that makes no
sense may reach the engine. `engine.control` goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, TypeVar

from cachespec.engine.drafters.base import Draft, Drafter
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import AcceptancePolicy, Choice, Step

Answer = TypeVar("Answer")


class Fault(Exception):
    """A plug-in raised, or answered what its contract does not allow. The text says which one, and what."""


class ContainedDrafter:
    """A drafter whose every failure is a `Fault`. `vocab`: ids below it exist; None: it is not known."""

    def __init__(self, drafter: Drafter[Any]) -> None:
        self._drafter = drafter
        self.name, self.sources = drafter.name, tuple(drafter.sources)
        self.vocab: int | None = None

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None) -> Any:
        return self._ask("open", lambda: self._drafter.open(prompt, sampling=sampling, namespace=namespace))

    def prospects(self, tracks: Sequence[Any], limit: int) -> list[Draft]:
        return self._ask("prospects", lambda: self._checked(self._drafter.prospects(tracks, limit), [limit] * len(tracks)))

    def propose(self, tracks: Sequence[Any], lengths: Sequence[int]) -> list[Draft]:
        return self._ask("propose", lambda: self._checked(self._drafter.propose(tracks, lengths), lengths, made=True))

    def accept(self, track: Any, tokens: Sequence[int]) -> None:
        self._ask("accept", lambda: self._drafter.accept(track, tokens))

    def close(self, track: Any, *, learn: bool) -> None:
        self._ask("close", lambda: self._drafter.close(track, learn=learn))

    def stats(self) -> dict[str, int]:
        return self._ask("stats", self._drafter.stats)

    def stop(self) -> None:
        self._ask("stop", self._drafter.stop)

    def _ask(self, method: str, call: Callable[[], Answer]) -> Answer:
        return _blaming(f"drafter {self.name}", method, call)

    def _checked(self, drafts: Iterable[Draft], lengths: Sequence[int], *, made: bool = False) -> list[Draft]:
        drafts = list(drafts)
        if len(drafts) != len(lengths):
            raise ValueError(f"{len(drafts)} answers for {len(lengths)} tracks")
        for draft, length in zip(drafts, lengths, strict=True):
            self._check(draft, length, made)
        return drafts

    def _check(self, draft: Draft, length: int, made: bool) -> None:
        """The rules of `drafters.contract`. It runs for every sequence at every step."""
        tokens, confidence = draft.tokens, draft.confidence
        if draft.source not in self.sources:
            raise ValueError(f"{draft.source!r} is not among its sources")
        if draft.pending and (made or tokens):
            raise ValueError("what is pending has no tokens, and propose computes")
        if len(tokens) != len(confidence) or len(tokens) > length:
            raise ValueError(f"{len(tokens)} tokens with {len(confidence)} confidences where {length} were asked for")
        if tokens:
            ids = list(map(index, tokens))
            if min(ids) < 0 or (self.vocab is not None and max(ids) >= self.vocab):
                raise ValueError(f"token {min(ids) if min(ids) < 0 else max(ids)} does not exist")
            if not (min(confidence) >= 0 and max(confidence) <= 1 and sum(confidence) >= 0):  # a NaN shows in the sum
                raise ValueError(f"confidences that are no probabilities: {confidence}")
        elif draft.pending:
            index(draft.behind)


class ContainedPolicy:
    """A policy whose every failure is a `Fault`. `most` tokens are the longest draft that a call can take."""

    def __init__(self, policy: AcceptancePolicy, most: int) -> None:
        self._policy, self._most, self.name = policy, most, type(policy).__name__

    @property
    def max_length(self) -> int:
        return self._ask("max_length", lambda: max(0, min(index(self._policy.max_length), self._most)))

    def choose(self, step: Step) -> list[Choice]:
        """One choice for each candidate. What is longer than remains of an answer is cut where drafts are (`verify.clip`)."""
        return self._ask("choose", lambda: self._checked(self._policy.choose(step), step))

    def _ask(self, method: str, call: Callable[[], Answer]) -> Answer:
        return _blaming(f"acceptance policy {self.name}", method, call)

    def _checked(self, choices: Iterable[Choice], step: Step) -> list[Choice]:
        choices = list(choices)
        if len(choices) != len(step.candidates):
            raise ValueError(f"{len(choices)} choices for {len(step.candidates)} candidates")
        for choice, candidate in zip(choices, step.candidates, strict=True):
            if not 0 <= index(choice.length) <= len(candidate.chances):
                raise ValueError(f"a length of {choice.length} where {len(candidate.chances)} can be drafted")
            if index(choice.wanted) < 0 or not isinstance(choice.reason, str):
                raise ValueError(f"{choice} is no choice")
        return choices


def _blaming(who: str, method: str, call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except Exception as error:
        raise Fault(f"{who}: {method}: {type(error).__name__}: {error}") from error
