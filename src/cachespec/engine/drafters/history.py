"""What was answered before, by namespace: a store of answers under one budget, found again by their last tokens.

An answer is kept whole with the end of its prompt, and every place in it is indexed by the `GRAM` tokens before it. When
the budget is full the answer that was of use least recently goes, with all its index entries.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

GRAM: Final = 4
CONTEXT: Final = 32
"""Tokens before a place that are compared; as many of the prompt's end are kept with an answer."""
PLACES: Final = 8
"""Places kept for each run of `GRAM` tokens; the oldest go first."""
TOKEN_BYTES: Final = 190
"""Memory of one indexed token (measured: 150), with room for a dict that has just grown."""

_Gram = tuple[int, ...]


class History:
    """Answers of all namespaces. `budget` is in bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._answers: OrderedDict[int, tuple[bytes, array[int], int]] = OrderedDict()  # namespace, tokens, first place
        self._places: dict[bytes, dict[_Gram, list[tuple[int, int]]]] = {}
        self._made = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, namespace: bytes, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer. One that is larger than the whole budget loses its end."""
        room = self._budget // TOKEN_BYTES - CONTEXT
        answer = answer[: max(0, room)]
        if not answer:
            return
        tail = list(prompt[-CONTEXT:])
        tokens, start = array("i", [*tail, *answer]), max(len(tail), GRAM)
        while self._answers and self.bytes + len(tokens) * TOKEN_BYTES > self._budget:
            self._forget(next(iter(self._answers)))
        self._made += 1
        self._answers[self._made] = namespace, tokens, start
        self.bytes += len(tokens) * TOKEN_BYTES
        places = self._places.setdefault(namespace, {})
        for at in range(start, len(tokens)):
            found = places.setdefault(tuple(tokens[at - GRAM : at]), [])
            found.append((self._made, at))
            if len(found) > PLACES:
                del found[0]

    def _forget(self, number: int) -> None:
        namespace, tokens, start = self._answers.pop(number)
        self.bytes -= len(tokens) * TOKEN_BYTES
        places = self._places[namespace]
        for at in range(start, len(tokens)):
            gram = tuple(tokens[at - GRAM : at])
            left = [place for place in places.get(gram, ()) if place[0] != number]
            if left:
                places[gram] = left
            else:
                places.pop(gram, None)
        if not places:
            del self._places[namespace]

    def find(self, namespace: bytes, text: Sequence[int], limit: int) -> tuple[int, int, int, Sequence[int]] | None:
        """What followed the end of `text` in earlier answers, at most `limit` tokens.

        The longest match of it decides; of several the continuation most of them have, then the latest. None, or: the
        length of the match, how many of the longest agree on the next token, how many there are, and the tokens.
        """
        places = self._places.get(namespace)
        found = places.get(tuple(text[-GRAM:])) if places is not None and len(text) >= GRAM else None
        if not found:
            return None
        best = GRAM
        longest: list[tuple[int, int]] = []
        for number, at in found:
            tokens = self._answers[number][1]
            size, most = GRAM, min(CONTEXT, at, len(text))
            while size < most and tokens[at - size - 1] == text[-size - 1]:
                size += 1
            if size >= best:
                longest = [*longest, (number, at)] if size == best else [(number, at)]
                best = size
        votes = Counter(self._answers[number][1][at] for number, at in longest)
        most_often = max(votes.values())
        number, at = next(p for p in reversed(longest) if votes[self._answers[p[0]][1][p[1]]] == most_often)
        return best, most_often, len(longest), self._answers[number][1][at : at + limit]

    def used(self, namespace: bytes, text: Sequence[int]) -> None:
        """What is known for the end of this text was of use: keep it longer."""
        for number, _ in self._places.get(namespace, {}).get(tuple(text[-GRAM:]), ()):
            self._answers.move_to_end(number)
