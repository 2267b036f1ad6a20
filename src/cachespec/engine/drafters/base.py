"""The contract of a drafter: something that guesses the next tokens of an answer.

A drafter never decides anything about the answer: a wrong guess costs time, never correctness (`engine.verify`). It sees
committed tokens only, in order, and it must not touch anything that sampling uses: no random state, no runtime of the target.

A step, for all running sequences at once, so that a draft model can evaluate them in one call:

1. ``prospects(tracks, limit)``: what would be proposed, as far as that is known for next to nothing. A policy chooses
   lengths by it, and where it chooses 0 the guess is still compared with the tokens that come (scored in shadow).
2. ``propose(tracks, lengths)``: the drafts.
3. ``accept(track, tokens)``: what was committed: the drafts that were right and the token drawn after them.

Between two `accept` the same question gets the same answer; asking changes nothing that can be seen. All methods are called on
the engine's thread. A plug-in is finished when `contract.check_drafter` passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cachespec.engine.sampling import Sampling

MUCH_BEHIND = 16
"""Tokens that a drafter must be behind for reading them to take a time of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A guess.

    Attributes:
        source: who made it: the name acceptance is counted under. A hybrid's drafts carry the name of its part.
        tokens: the guess; may be shorter than what was asked for, and empty.
        confidence: for each token the drafter's own probability, 0 to 1, that it is right if those before it are.
        pending: nothing is known yet, and `propose` would have to compute it (a draft model); `tokens` is then empty.
        behind: committed tokens that the drafter has yet to evaluate before it can compute its first, where it is pending.
    """

    source: str
    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    pending: bool = False
    behind: int = 0

    def first(self, length: int) -> Draft:
        """The first `length` tokens of it."""
        if length >= len(self.tokens) and not self.pending:
            return self
        return Draft(source=self.source, tokens=self.tokens[:length], confidence=self.confidence[:length])


Track = TypeVar("Track")


class Drafter(Protocol[Track]):
    """See the module's docstring. A track is one request's state; only its drafter looks inside."""

    name: str
    sources: tuple[str, ...]
    """The names its drafts may carry."""

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None) -> Track:
        """Begin a request. Takes next to no time: a long prompt is learned bit by bit in later steps.

        `sampling` is the target's: a draft model that draws by it, with the same noise, agrees most often. What is learned
        is shared within `namespace` only; None: with nobody.
        """

    def prospects(self, tracks: Sequence[Track], limit: int) -> list[Draft]:
        """What would be proposed, at most `limit` tokens each, as far as it costs next to nothing."""

    def propose(self, tracks: Sequence[Track], lengths: Sequence[int]) -> list[Draft]:
        """A draft for each, of at most that length; 0 asks for nothing and costs nothing."""

    def accept(self, track: Track, tokens: Sequence[int]) -> None:
        """These tokens were committed. Never drafts that were wrong, nothing of a stop string, no end token."""

    def close(self, track: Track, *, learn: bool) -> None:
        """The request is over; the track is not used again. `learn`: its answer is complete and may be remembered."""

    def stats(self) -> dict[str, int]:
        """Sizes worth showing, `bytes` among them: an estimate of what is held for tracks and memories, which is bounded."""

    def stop(self) -> None:
        """Release everything."""
