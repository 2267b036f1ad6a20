"""The contract test of drafters. A drafter is finished when ``check_drafter(make, vocab=...)`` returns."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

from cachespec.engine.drafters.base import Draft, Drafter
from cachespec.engine.sampling import Sampling, key

_LIMIT = 8
_NAMESPACE = b"n" * 16


def check_drafter(make: Callable[[], Drafter[Any]], *, vocab: int, steps: int = 60, max_bytes: int = 1 << 30) -> None:
    """Hold a drafter against its contract: AssertionError says what it broke. `make` is called twice.

    `max_bytes` bounds what it may say it holds, after some hundred requests.
    """
    first, second = make(), make()
    try:
        _check_answers(first, second, vocab, steps)
        _check_bounds(first, vocab, max_bytes)
    finally:
        first.stop()
        second.stop()


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def _numbers(below: int) -> Callable[[], int]:
    """The same arbitrary numbers each time, without any random state."""
    counter = count()
    return lambda: key(7, next(counter)) % below


def _check_answers(first: Drafter[Any], second: Drafter[Any], vocab: int, steps: int) -> None:
    token, pick = _numbers(vocab), _numbers(_LIMIT + 1)
    pattern = [token() for _ in range(12)]
    prompts = [pattern * 3, [token() for _ in range(5)], [0]]
    how = [Sampling(seed=5, temperature=t) for t in (0.0, 1.0, 0.7)]
    opened = [
        [drafter.open(p, sampling=s, namespace=_NAMESPACE) for p, s in zip(prompts, how, strict=True)]
        for drafter in (first, second)
    ]
    state = random.getstate()
    for step in range(steps):
        lengths = [pick() for _ in prompts]
        drafts = _ask(first, opened[0], lengths, vocab)
        second.prospects(opened[1], _LIMIT)  # asked other questions before, it still answers this one alike
        second.propose(opened[1], [length // 2 for length in lengths])
        _require(second.propose(opened[1], lengths) == drafts, "the answer depends on committed tokens only")
        for i, draft in enumerate(drafts):
            tokens = [*draft.tokens[: pick() % (len(draft.tokens) + 1)], token() if i else pattern[step % 12]]
            first.accept(opened[0][i], tokens)
            for one in tokens:  # in other pieces: the same
                second.accept(opened[1][i], [one])
    _require(random.getstate() == state, "no random state of others is touched")
    for drafter, tracks in zip((first, second), opened, strict=True):
        for i, track in enumerate(tracks):
            drafter.close(track, learn=i == 0)
        _require(drafter.stats()["tracks"] == 0, "closing releases the track")


def _ask(drafter: Drafter[Any], tracks: list[Any], lengths: list[int], vocab: int) -> list[Draft]:
    hints = drafter.prospects(tracks, _LIMIT)
    drafts = drafter.propose(tracks, lengths)
    _require(len(hints) == len(drafts) == len(tracks), "there is one answer for each track")
    for hint, draft, length in zip(hints, drafts, lengths, strict=True):
        _check_draft(hint, drafter, _LIMIT, vocab)
        _check_draft(draft, drafter, length, vocab)
        _require(not draft.pending, "propose computes")
    _require(drafter.propose(tracks, lengths) == drafts, "asking twice gives the same answer")
    _require(drafter.propose([], []) == drafter.prospects([], 1) == [], "nothing may be asked")
    return drafts


def _check_draft(draft: Draft, drafter: Drafter[Any], length: int, vocab: int) -> None:
    _require(draft.source in drafter.sources, f"{draft.source} is not among the sources")
    _require(len(draft.tokens) == len(draft.confidence) <= length, "there is a confidence for each token, none too many")
    _require(all(0 <= token < vocab for token in draft.tokens), "tokens are of the vocabulary")
    _require(all(0 <= c <= 1 for c in draft.confidence), "confidences are probabilities")
    _require(not (draft.pending and draft.tokens), "what is pending has no tokens yet")


def _check_bounds(drafter: Drafter[Any], vocab: int, max_bytes: int) -> None:
    token, sampling = _numbers(vocab), Sampling(seed=0)
    for i in range(200):
        track = drafter.open([token() for _ in range(20)], sampling=sampling, namespace=b"%016d" % (i % 3))
        for _ in range(5):
            drafter.prospects([track], _LIMIT)
            drafter.accept(track, [token() for _ in range(4)])
        drafter.close(track, learn=i % 2 == 0)
    many = [drafter.open([1, 2], sampling=sampling, namespace=None) for _ in range(50)]
    drafter.propose(many, [2] * len(many))
    for track in many:
        drafter.close(track, learn=True)
    _require(drafter.stats()["tracks"] == 0, "closing releases the track")
    _require(drafter.stats()["bytes"] <= max_bytes, "memory is bounded")
