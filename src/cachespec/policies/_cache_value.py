"""What marks and keep-alives are worth: pure arithmetic for caching policies. Prices are multiples of the input price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachespec.caching import CacheTerms, Choice, Lifetime, Prefix
from cachespec.reuse import Outlook
from cachespec.values import quick


@quick
@dataclass(frozen=True, slots=True)
class Candidate:
    """A place where a mark would write. `chances` are, per lifetime, P(a request that shares this prefix comes within it)."""

    index: int
    tokens: int
    chances: Sequence[float]


Marks = list[tuple[Candidate, int]]
"""Marks, shallowest first, with the index of each one's lifetime."""
_Path = tuple[tuple[Candidate, int], ...]


@quick
@dataclass(frozen=True, slots=True)
class Covered:
    """Tokens that what is cached already keeps for the lifetime of this index (ascending)."""

    tokens: int
    lifetime: int


def best_marks(
    candidates: Sequence[Candidate],
    covered: Sequence[Covered],
    lifetimes: Sequence[Lifetime],
    *,
    read_tokens: int,
    read: float,
    trust: float,
    patience: float,
) -> Marks:
    """The marks with the highest expected saving over their premium; empty: none pays.

    A token between two marks is written at the deeper one's price, and read again when a request comes that shares it up to
    that mark within its lifetime, which saves 1 - `read`. So for one mark alone, the rule is the classic one: it pays when the
    expected re-reads exceed (w - 1) / (1 - r). Since neither lifetimes nor chances rise with depth, each token has one
    mark that counts, and a dynamic program over (mark, lifetime) finds the best set.

    Two things come on top. What a lifetime adds to the shortest one counts for each of the gaps that are expected to follow, as
    the entry lives on over them too, but at most `patience` times: by then a later request has renewed it. And a mark keeps all
    that stands before it: one that outlives what is cached now (`covered`) saves those tokens too, for the price of the new
    ones alone (a vendor bills "read A, write B - A"); `trust` is how far that is believed.
    """
    saving = 1.0 - read
    # Where another request is just writing, more is kept than can be read: it is paid for again, and saves nothing again.
    kept = max(read_tokens, sum(part.tokens for part in covered))
    best: list[tuple[int, list[tuple[float, _Path]]]] = []  # by candidate: its tokens, and what ends with it, by lifetime
    top: tuple[float, _Path] = (0.0, ())
    for candidate in candidates:
        chances, tokens = candidate.chances, candidate.tokens
        row: list[tuple[float, _Path]] = []
        gaps = min(patience, 1.0 / max(1.0 - chances[-1], 1e-9))
        new, beyond = tokens - read_tokens, max(tokens - kept, 0)
        for number, lifetime in enumerate(lifetimes):
            saved = (chances[0] + gaps * (chances[number] - chances[0])) * saving
            premium = lifetime.write - 1.0
            value = beyond * saved - new * premium
            for part in covered:
                if part.lifetime < number:
                    value += part.tokens * trust * gaps * (chances[number] - chances[part.lifetime]) * saving
            path: _Path = ()
            for start, earlier in best:
                between = tokens - start
                step = (between if between < beyond else beyond) * saved - between * premium
                for found, before in earlier[number:]:
                    if found + step >= value:
                        value, path = found + step, before
            chosen = (value, (*path, (candidate, number)))
            row.append(chosen)
            if value > top[0] or (value >= top[0] and lifetime.write <= 1.0):
                top = chosen
        best.append((tokens, row))
    return list(top[1])


def thinned(marks: Marks, room: int, read_tokens: int) -> Marks:
    """At most `room` marks, the deepest among them. The one goes first that is read least for its own sake: by those who share
    it and not the next one, times the tokens that only it would save them."""
    marks = list(marks)
    while len(marks) > room > 1:
        before = [read_tokens, *(candidate.tokens for candidate, _ in marks)]
        losses = [
            (candidate.tokens - before[i]) * (candidate.chances[number] - marks[i + 1][0].chances[marks[i + 1][1]])
            for i, (candidate, number) in enumerate(marks[:-1])
        ]
        del marks[losses.index(min(losses))]
    return marks[-room:] if room > 0 else []


def reaching(marks: list[Choice], prefixes: Sequence[Prefix], readable: int, terms: CacheTerms) -> list[Choice]:
    """The marks with one that a lookup finds the entry at `readable` from: by themselves, or with one more, or cut to its
    lifetime. `readable` -1: there is none."""
    if readable < 0 or not marks:
        return marks
    at, warm = prefixes[readable].position, prefixes[readable].warm

    def reads(index: int) -> bool:
        distance = prefixes[index].position - at
        return index == readable or (index > readable and (terms.lookback is None or distance < terms.lookback))

    if warm is None or any(reads(mark.index) for mark in marks):
        return marks
    own = Choice(index=readable, ttl=warm.ttl)
    if terms.lifetime(warm.ttl).seconds >= terms.lifetime(marks[0].ttl).seconds:
        return [own, *marks]
    for index in range(marks[0].index - 1, readable, -1):
        if reads(index) and prefixes[index].tokens > prefixes[readable].tokens:
            return [Choice(index=index, ttl=marks[0].ttl), *marks]
    return [own, *(Choice(index=mark.index, ttl=warm.ttl) for mark in marks)]


def keeping(outlook: Outlook, *, since: float, seconds: float, cost: float, saved: float, most: int) -> float:
    """What keeping an entry alive from `since` seconds after its last use on is worth, if it is done as long as it pays.

    Optimal stopping: each keep-alive costs `cost` and buys `seconds`; a request that comes meanwhile saves `saved`. Worked out
    backwards from the last of the `most` that are allowed.
    """
    value = 0.0
    for step in range(most - 1, -1, -1):
        chance = outlook.within(seconds, after=since + step * seconds)
        value = max(0.0, chance * saved + (1.0 - chance) * value - cost)
    return value
