"""What was answered before, by namespace: a store of answers under one budget, found again by their last tokens.

An answer is kept whole with the end of its prompt, and every place in it is indexed by a hash of the `GRAM` tokens before it;
what is found is compared token by token. When the budget is full the answer that was of use least recently goes, with all
its index entries.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final, TypeAlias

GRAM: Final = 4
CONTEXT: Final = 32
"""Tokens before a place that are compared; as many of the prompt's end are kept with an answer."""
PLACES: Final = 8
"""Places kept for each run of `GRAM` tokens; the oldest go first."""
TOKEN_BYTES: Final = 190
"""Memory of one indexed token: its hash, its place, its entry in a dict that may have just grown. Measured: 130 to 180."""

_Place: TypeAlias = tuple[int, int]
_HASH: Final = (1 << 60) - 1  # sixty bits make a smaller integer than 64
_SHIFT: Final = 24  # a place is the answer's number and the position in it, in one integer


class History:
    """Answers of all namespaces. `budget` is in bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = min(budget, TOKEN_BYTES << _SHIFT)
        self._answers: OrderedDict[int, tuple[bytes, array[int], int]] = OrderedDict()  # namespace, tokens, first place
        # One place for most runs of tokens, so that these need no list.
        self._places: dict[bytes, dict[int, int | list[int]]] = {}
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
        for at, gram in enumerate(_grams(tokens, start), start=start):
            found, place = places.get(gram), self._made << _SHIFT | at
            if found is None:
                places[gram] = place
            elif isinstance(found, int):
                places[gram] = [found, place]
            else:
                found.append(place)
                if len(found) > PLACES:
                    del found[0]

    def _forget(self, number: int) -> None:
        namespace, tokens, start = self._answers.pop(number)
        self.bytes -= len(tokens) * TOKEN_BYTES
        places = self._places[namespace]
        for gram in _grams(tokens, start):
            left = [place for place in _all(places.get(gram)) if place >> _SHIFT != number]
            if left:
                places[gram] = left if len(left) > 1 else left[0]
            else:
                places.pop(gram, None)
        if not places:
            del self._places[namespace]

    def _look(self, namespace: bytes, text: Sequence[int]) -> list[_Place]:
        """Places that the end of a text may lead to; it has to be compared yet."""
        places = self._places.get(namespace)
        if places is None or len(text) < GRAM:
            return []
        found = places.get(hash(array("i", text[-GRAM:]).tobytes()) & _HASH)
        return [] if found is None else [(place >> _SHIFT, place & (1 << _SHIFT) - 1) for place in _all(found)]

    def find(self, namespace: bytes, text: Sequence[int], limit: int) -> tuple[int, int, int, Sequence[int]] | None:
        """What followed the end of `text` in earlier answers, at most `limit` tokens.

        The longest match of it decides; of several the continuation most of them have, then the latest. None, or: the
        length of the match, how many of the longest agree on the next token, how many there are, and the tokens.
        """
        places = self._look(namespace, text)
        if not places:
            return None
        best = GRAM
        longest: list[_Place] = []
        for number, at in places:
            tokens = self._answers[number][1]
            size, most = 0, min(CONTEXT, at, len(text))
            while size < most and tokens[at - size - 1] == text[-size - 1]:
                size += 1
            if size >= best:
                longest = [*longest, (number, at)] if size == best else [(number, at)]
                best = size
        if not longest:
            return None
        votes = Counter(self._answers[number][1][at] for number, at in longest)
        most_often = max(votes.values())
        number, at = next(p for p in reversed(longest) if votes[self._answers[p[0]][1][p[1]]] == most_often)
        return best, most_often, len(longest), self._answers[number][1][at : at + limit]

    def used(self, namespace: bytes, text: Sequence[int]) -> None:
        """What is known for the end of this text was of use: keep it longer."""
        for number, _ in self._look(namespace, text):
            self._answers.move_to_end(number)


def _grams(tokens: array[int], start: int) -> list[int]:
    """Hashes of the `GRAM` tokens before each place from `start` on."""
    data, width = tokens.tobytes(), GRAM * tokens.itemsize
    first = (start - GRAM) * tokens.itemsize
    ends = range(first, first + (len(tokens) - start) * tokens.itemsize, tokens.itemsize)
    return [hash(data[at : at + width]) & _HASH for at in ends]


def _all(found: int | list[int] | None) -> list[int]:
    if found is None:
        return []
    return [found] if isinstance(found, int) else found
