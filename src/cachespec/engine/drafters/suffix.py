"""The training-free drafter: what followed the same tokens before, in this request or in earlier answers.

The longest match of the text's end decides. Within the request a suffix automaton finds it, across requests the history of
the namespace. From there the most frequent continuation is followed, token by token, for as long as the product of their
confidences stays above a floor: so the draft is as long as the match deserves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from cachespec.annotations import PositiveInt, Share
from cachespec.engine.drafters.automaton import SuffixAutomaton
from cachespec.engine.drafters.base import Draft
from cachespec.engine.drafters.history import History
from cachespec.engine.drafters.limits import Bytes, check_option
from cachespec.engine.sampling import Sampling

CATCH_UP: Final = 512
"""Tokens of a prompt learned a step, one or two milliseconds, so that a long one delays nothing."""
DOUBT: Final = 2.0
"""Over a match's length: how many continuations it is believed to have that were not seen."""
_SURE = 16  # a match this long inside the request is not compared with other requests


class SuffixTrack:
    """One request: its committed tokens, and the automaton, which may be behind them for a while."""

    __slots__ = ("automaton", "drafts", "namespace", "prompt", "tokens")

    def __init__(self, prompt: Sequence[int], namespace: bytes | None) -> None:
        self.tokens = array("i", prompt)
        self.prompt = len(prompt)
        self.namespace = namespace
        self.automaton = SuffixAutomaton()
        self.drafts: tuple[int, Draft] | None = None  # the last answer, with the limit it was asked for


class SuffixDrafter:
    """See the module's docstring.

    Args:
        min_match: shortest match that is used.
        min_probability: floor of the product of confidences.
        history_bytes: memory for earlier answers of all namespaces; 0 remembers none.
        max_tokens: of one request; beyond that it learns no more, which bounds its memory.
    """

    def __init__(
        self,
        *,
        min_match: PositiveInt = 1,
        min_probability: Share = 0.1,
        history_bytes: Bytes = 64 << 20,
        max_tokens: PositiveInt = 131_072,
        name: str = "suffix",
    ) -> None:
        check_option("min_match", min_match, least=1)
        check_option("min_probability", min_probability, least=0, most=1)
        check_option("history_bytes", history_bytes, least=0)
        check_option("max_tokens", max_tokens, least=1)
        self.name = name
        self.sources: tuple[str, ...] = (name,)
        self._min_match, self._floor, self._max_tokens = min_match, min_probability, max_tokens
        self._nothing = Draft(source=name)
        self._history = History(history_bytes)
        self._open: set[SuffixTrack] = set()

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None) -> SuffixTrack:
        track = SuffixTrack(prompt, namespace)
        self._open.add(track)
        return track

    def prospects(self, tracks: Sequence[SuffixTrack], limit: int) -> list[Draft]:
        return self.propose(tracks, [limit] * len(tracks))

    def propose(self, tracks: Sequence[SuffixTrack], lengths: Sequence[int]) -> list[Draft]:
        return [self._draft(track, length) for track, length in zip(tracks, lengths, strict=True)]

    def _draft(self, track: SuffixTrack, length: int) -> Draft:
        if length < 1 or not self._caught_up(track):
            return self._nothing
        if track.drafts is not None and track.drafts[0] >= length:
            return track.drafts[1].first(length)
        _, size = track.automaton.match()
        found = None
        if size < _SURE and track.namespace is not None:
            found = self._history.find(track.namespace, track.tokens, length)
        if found is not None and found[0] > size:
            draft = self._recall(found)
        elif size >= self._min_match:
            tokens, confidence = track.automaton.follow(length, floor=self._floor, doubt=DOUBT)
            draft = Draft(source=self.name, tokens=tuple(tokens), confidence=tuple(confidence)) if tokens else self._nothing
        else:
            draft = self._nothing
        track.drafts = length, draft
        return draft

    def _caught_up(self, track: SuffixTrack) -> bool:
        automaton, tokens = track.automaton, track.tokens
        seen, end = len(automaton.text), len(tokens)
        if seen < end:
            for token in tokens[seen : min(seen + CATCH_UP, end, self._max_tokens)]:
                automaton.append(token)
        return len(automaton.text) == end

    def _recall(self, found: tuple[int, int, int, Sequence[int]]) -> Draft:
        size, agree, total, following = found
        confidence, path = [], 1.0
        for i in range(len(following)):
            sure = agree / ((agree if i else total) + DOUBT / (size + i))
            path *= sure
            if path < self._floor:
                break
            confidence.append(sure)
        return Draft(source=self.name, tokens=tuple(following[: len(confidence)]), confidence=tuple(confidence))

    def accept(self, track: SuffixTrack, tokens: Sequence[int]) -> None:
        if track.drafts is not None and track.namespace is not None:
            draft = track.drafts[1].tokens
            if draft and tokens and draft[0] == tokens[0]:
                self._history.used(track.namespace, track.tokens)
        track.tokens.extend(tokens)
        track.drafts = None

    def close(self, track: SuffixTrack, *, learn: bool) -> None:
        if learn and track.namespace is not None:
            self._history.add(track.namespace, track.tokens[: track.prompt], track.tokens[track.prompt :])
        self._open.discard(track)

    def stats(self) -> dict[str, int]:
        tracks = sum(track.automaton.bytes + 4 * len(track.tokens) for track in self._open)
        return {
            "tracks": len(self._open),
            "answers": len(self._history),
            "bytes": tracks + self._history.bytes,
        }

    def stop(self) -> None:
        self._open.clear()
        self._history = History(0)
