"""A suffix automaton that grows with a text of tokens: the longest earlier match of the text's end, at every moment.

The automaton of Blumer et al. (1985), built online: amortised constant time a token, at most two states a token. A state
stands for the contexts that end at the same places. Beside its suffix link and length, each knows how many places those
are, and the last of them; to keep a token's cost constant these two are brought up to date for the `DEPTH` longest contexts
only, which misses something in texts such as "a a a a a ..." alone.

Nearly all states have one transition. So the first one of each stands in flat arrays, and only more need a dict.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

DEPTH: Final = 8
STATE_BYTES: Final = 84
"""Memory of a state, measured, dicts of branching states spread over all."""


class SuffixAutomaton:
    """States are numbers, 0 the empty context. `text` are the tokens so far."""

    __slots__ = ("_length", "_link", "_more", "_next", "_token", "count", "last", "recent", "text")

    def __init__(self) -> None:
        self.text = array("i")
        self.last = 0
        self._length, self._link = array("i", [0]), array("i", [-1])
        self._token, self._next = array("i", [-1]), array("i", [-1])  # the first transition of each state
        self._more: dict[int, dict[int, int]] = {}
        self.count, self.recent = array("i", [0]), array("i", [0])

    @property
    def bytes(self) -> int:
        """An estimate of its memory."""
        return len(self._length) * STATE_BYTES

    def append(self, token: int) -> None:
        """Extend the text. Written out flat: it runs for every token of every prompt."""
        length, link, first, after, more = self._length, self._link, self._token, self._next, self._more
        count, recent = self.count, self.recent
        position, at, new = len(self.text), self.last, len(length)
        self.text.append(token)
        self._add(length[at] + 1, 0, -1, -1, 0, position)
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
                more[at] = {token: new}
            at = link[at]
        if found >= 0:
            link[new] = found if length[found] == length[at] + 1 else self._split(at, token, found)
        self.last = at = new
        for _ in range(DEPTH):
            count[at] += 1
            recent[at] = position
            at = link[at]
            if at <= 0:
                break

    def _add(self, length: int, link: int, token: int, after: int, count: int, recent: int) -> None:
        self._length.append(length)
        self._link.append(link)
        self._token.append(token)
        self._next.append(after)
        self.count.append(count)
        self.recent.append(recent)

    def _split(self, at: int, token: int, found: int) -> int:
        """Cut a successor of `at` that stands for longer contexts too down to what is one token longer than `at`."""
        link, first, after, more = self._link, self._token, self._next, self._more
        clone = len(link)
        self._add(self._length[at] + 1, link[found], first[found], after[found], self.count[found], self.recent[found])
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
            yield from self._more.get(state, {}).items()

    def best(self, state: int) -> tuple[int, int, int, int] | None:
        """What followed a context most often, of equals the latest: token, its state, how often, and how often any did."""
        token = self._token[state]
        if token < 0:
            return None
        follower, more = self._next[state], self._more.get(state)
        times = total = self.count[follower]
        if more is not None:
            for other, reached in more.items():
                n = self.count[reached]
                total += n
                if n > times or (n == times and self.recent[reached] > self.recent[follower]):
                    token, follower, times = other, reached, n
        return token, follower, times, total
