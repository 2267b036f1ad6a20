"""Two drafters in one: the first where it is sure of itself, else the second. Both learn from everything.

Meant for the suffix drafter before a draft model: copying costs nothing, and where nothing is copied the model guesses. While
the model has yet to read the prompt, which takes its time, a guess of the first is better than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cachespec.annotations import Share
from cachespec.engine.drafters.base import MUCH_BEHIND, Draft, Drafter
from cachespec.engine.drafters.limits import check_option
from cachespec.engine.sampling import Sampling
from cachespec.errors import InputError


class HybridDrafter:
    """See the module's docstring.

    Args:
        confidence: how sure the first must be of its next token; the suffix drafter is, about, after a match of eight.
    """

    def __init__(self, first: Drafter[Any], second: Drafter[Any], *, confidence: Share = 0.75, name: str = "hybrid") -> None:
        check_option("confidence", confidence, least=0, most=1)
        self.name, self.sources = name, (*first.sources, *second.sources)
        if len(set(self.sources)) < len(self.sources):
            raise InputError(f"two parts of one name: {', '.join(self.sources)}", field="draft")
        self._first, self._second, self._confidence = first, second, confidence

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None) -> tuple[Any, Any]:
        first = self._first.open(prompt, sampling=sampling, namespace=namespace)
        return first, self._second.open(prompt, sampling=sampling, namespace=namespace)

    def prospects(self, tracks: Sequence[tuple[Any, Any]], limit: int) -> list[Draft]:
        sure = self._first.prospects([a for a, _ in tracks], limit)
        rest = [i for i, draft in enumerate(sure) if not self._takes(draft)]
        for i, draft in zip(rest, self._second.prospects([tracks[i][1] for i in rest], limit), strict=True):
            if self._rather(draft, sure[i]):
                sure[i] = draft
        return sure

    def propose(self, tracks: Sequence[tuple[Any, Any]], lengths: Sequence[int]) -> list[Draft]:
        drafts = self._first.propose([a for a, _ in tracks], lengths)
        rest = [i for i, draft in enumerate(drafts) if lengths[i] and not self._takes(draft)]
        hints = self._second.prospects([tracks[i][1] for i in rest], max(lengths, default=0)) if rest else []
        rest = [i for i, hint in zip(rest, hints, strict=True) if self._rather(hint, drafts[i])]
        others = self._second.propose([tracks[i][1] for i in rest], [lengths[i] for i in rest]) if rest else []
        for i, draft in zip(rest, others, strict=True):
            if draft.tokens:
                drafts[i] = draft
        return drafts

    @staticmethod
    def _rather(second: Draft, first: Draft) -> bool:
        """Whether the second's guess is to be had rather than one that the first is not sure of."""
        return bool(second.tokens) or (second.pending and not (first.tokens and second.behind >= MUCH_BEHIND))

    def _takes(self, draft: Draft) -> bool:
        return bool(draft.confidence) and draft.confidence[0] >= self._confidence

    def accept(self, track: tuple[Any, Any], tokens: Sequence[int]) -> None:
        self._first.accept(track[0], tokens)
        self._second.accept(track[1], tokens)

    def close(self, track: tuple[Any, Any], *, learn: bool) -> None:
        self._first.close(track[0], learn=learn)
        self._second.close(track[1], learn=learn)

    def stats(self) -> dict[str, int]:
        first, second = self._first.stats(), self._second.stats()
        return {key: first.get(key, 0) + second.get(key, 0) for key in first | second} | {"tracks": first["tracks"]}

    def stop(self) -> None:
        try:
            self._first.stop()
        finally:
            self._second.stop()
