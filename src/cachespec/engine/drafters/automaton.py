"""A suffix automaton that grows with a text of tokens: the longest earlier match of the text's end, at every moment.

The automaton of Blumer et al. (1985), built online: amortised constant time a token, at most two states a token. A state
stands for the contexts that end at the same places. Beside its suffix link and length, each knows how many places those
are, and what followed most often, of equals the latest; to keep a token's cost constant these are brought up to date for
the `DEPTH` longest contexts only, which misses something in texts such as "a a a a a ..." alone.

Nearly all states have one transition. So the first one of each stands in flat arrays, and only more need a dict.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

DEPTH: Final = 8
STATE_BYTES: Final = 84
"""Memory of a state, measured, dicts of branching states spread over all."""
_BEST: Final = -1  # among further transitions: the token that followed most often


class SuffixAutomaton:
    """States are numbers, 0 the empty context. `text` are the tokens so far, `count` how often each state occurred."""

    __slots__ = ("_length", "_link", "_more", "_next", "_token", "count", "last", "text")

    def __init__(self) -> None:
        self.text = array("i")
        self.last = 0
        self._length, self._link = array("i", [0]), array("i", [-1])
        self._token, self._next = array("i", [-1]), array("i", [-1])  # the first transition of each state
        self._more: dict[int, dict[int, int]] = {}
        self.count = array("i", [0])

    @property
    def bytes(self) -> int:
        """An estimate of its memory."""
        return len(self._length) * STATE_BYTES

    def append(self, token: int) -> None:
        """Extend the text. Written out flat: it runs for every token of every prompt."""
        length, link, first, after = self._length, self._link, self._token, self._next
        more, count = self._more, self.count
        before = at = self.last
        new = len(length)
        self.text.append(token)
        length.append(length[at] + 1)
        link.append(0)
        first.append(-1)
        after.append(-1)
        count.append(0)
        found = -1
        while at >= 0:
            known = first[at]
            if known == token:
                found = after[at]
                break
            if known < 0:
                first[at], after[at] = token, new
            elif at in more:
                found = more[at].get(token, -1)
                if found >= 0:
                    break
                more[at][token] = new
            else:
                more[at] = {token: new, _BEST: known}
            at = link[at]
        if found >= 0:
            link[new] = found if length[found] == length[at] + 1 else self._split(at, token, found)
        self.last = at = new
        for _ in range(DEPTH):
            count[at] += 1
            at = link[at]
            if at <= 0:
                break
        for _ in range(DEPTH):
            if before <= 0:
                break
            if before in more:
                others = more[before]
                best = others[_BEST]
                if best != token:
                    common = first[before]
                    now = after[before] if common == token else others[token]
                    then = after[before] if common == best else others[best]
                    if count[now] >= count[then]:
                        others[_BEST] = token
            before = link[before]

    def _split(self, at: int, token: int, found: int) -> int:
        """Cut a successor of `at` that stands for longer contexts too down to what is one token longer than `at`."""
        link, first, after, more = self._link, self._token, self._next, self._more
        clone = len(link)
        self._length.append(self._length[at] + 1)
        link.append(link[found])
        first.append(first[found])
        after.append(after[found])
        self.count.append(self.count[found])
        if found in more:
            more[clone] = dict(more[found])
        link[found] = clone
        while at >= 0 and self.step(at, token) == found:
            if first[at] == token:
                after[at] = clone
            else:
                more[at][token] = clone
            at = link[at]
        return clone

    def step(self, state: int, token: int) -> int:
        """The state after a token, -1 when it never followed."""
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def match(self) -> tuple[int, int]:
        """The longest end of the text that was there before, as a state, and its length."""
        state = self._link[self.last]
        return (state, self._length[state]) if state > 0 else (0, 0)

    def following(self, state: int) -> Iterator[tuple[int, int]]:
        """What followed a context: tokens, and the states they lead to."""
        if self._token[state] >= 0:
            yield self._token[state], self._next[state]
            yield from ((token, after) for token, after in self._more.get(state, {}).items() if token != _BEST)

    def follow(self, limit: int, *, floor: float, doubt: float) -> tuple[list[int], list[float]]:
        """What followed the longest match of the text's end most often, and what followed that, at most `limit` tokens.

        With each its confidence, ``n / (N + doubt / size)``: it came n of N times after a context of `size` tokens, and
        `doubt / size` is how many other continuations such a context is believed to have that were not seen: long matches
        seldom go on otherwise. It ends where the product of confidences falls below `floor`.

        Where it comes to the text's end it goes on as after the longest end of that which came before, which is how a text that
        repeats itself is drafted beyond its period.
        """
        first, after, more, count = self._token, self._next, self._more, self.count
        state, size = self.match()
        tokens: list[int] = []
        confidence: list[float] = []
        path, here = 1.0, 1  # the text ends with the matched context, after which nothing came yet
        while size and len(tokens) < limit:
            token = first[state]
            if token < 0:
                state = self._link[state]
                if state <= 0:
                    break
                size, here, token = self._length[state], 1, first[state]
            total, reached = count[state] - here, after[state]
            if state in more:
                best = more[state][_BEST]
                if best != token:
                    token, reached = best, more[state][best]
            times = count[reached]
            sure = times / ((total if total > times else times) + doubt / size)
            path *= sure
            if path < floor:
                break
            tokens.append(token)
            confidence.append(sure)
            state, here = reached, 0
            size += 1
        return tokens, confidence
