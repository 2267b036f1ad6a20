"""What changes a row of logits before the target law is made of it: penalties, logit bias, grammar (contract E3).

These depend on the tokens before a position, so at every verified position they act with the drafts before it appended,
exactly as they would without speculation; what a request's processor remembers moves on with committed tokens only.

In this order, each on what the one before left::

    repetition   every token of prompt and answer: a positive logit is divided by the penalty, a negative one multiplied
    frequency    every token of the answer: minus the penalty times how often it was there
    presence     every token of the answer: minus the penalty
    bias         plus the bias of that token
    grammar      what the grammar does not allow: minus infinity

The result is a row as `engine.sampling` takes it. It is made on the host, in float64, whatever the runtime is.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from cachespec.engine.sampling import largest
from cachespec.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_GREATEST: Final = sys.float_info.max
"""An integer may be greater, and then no float stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """What a request asks for beside `Sampling`. The defaults change nothing.

    Raises InputError, naming the field, for a value outside its range.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.repetition_penalty <= _GREATEST:
            raise InputError(f"must be a number above 0, not {self.repetition_penalty!r}", field="repetition_penalty")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -_GREATEST <= getattr(self, name) <= _GREATEST:
                raise InputError(f"must be a number, not {getattr(self, name)!r}", field=name)
        for token, bias in self.logit_bias.items():
            if token < 0 or not (bias == -math.inf or -_GREATEST <= bias <= _GREATEST):
                raise InputError(f"token {token!r} cannot have the bias {bias!r}", field="logit_bias")

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return self != NOTHING

    def check(self, vocab: int) -> None:
        """Raises InputError for a bias of a token that a vocabulary of this size does not have."""
        unknown = [token for token in self.logit_bias if token >= vocab]
        if unknown:
            raise InputError(f"token {unknown[0]} is not in a vocabulary of {vocab}", field="logit_bias")


NOTHING = Processing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjust:
    """What to do to the row of one position. Arrays are shared: read only.

    Attributes:
        repeated: token ids that `repetition` acts on, each once.
        ids, added: token ids, each once, and what is added to their logits.
        allowed: a bit for each token id, lowest first, in 32-bit words; None allows all of them.
    """

    repetition: float = 1.0
    repeated: NDArray[np.int64] | None = None
    ids: NDArray[np.int64] | None = None
    added: NDArray[np.float64] | None = None
    allowed: NDArray[np.uint32] | None = None

    def apply(self, row: NDArray[np.floating]) -> NDArray[np.float64]:
        """The adjusted row, a new one."""
        import numpy as np

        logits = row.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # extreme penalties leave the range: -inf bans, the rest is no law
            if self.repeated is not None:
                old = logits[self.repeated]
                logits[self.repeated] = np.where(old > 0, old / self.repetition, old * self.repetition)
            if self.ids is not None and self.added is not None:
                logits[self.ids] += self.added
        if self.allowed is not None:
            bits = np.unpackbits(self.allowed.view(np.uint8), bitorder="little")[: len(logits)]
            logits[: len(bits)][bits == 0] = -np.inf
            logits[len(bits) :] = -np.inf
        return logits


class Mask(Protocol):
    """A grammar on its way through an answer; `engine.structured.GrammarState` is one."""

    def valid(self, drafts: Sequence[int]) -> int:
        """How many leading drafts the grammar allows, end tokens never."""

    def masks(self, drafts: Sequence[int]) -> list[NDArray[np.uint32]]:
        """What is allowed at each position before and after these drafts, all of them valid; changes nothing."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on over committed tokens, end tokens not among them."""


class Processor:
    """One request's processing on its way through the answer. `prompt` are its tokens, `vocab` the length of a row.

    Raises InputError for a bias of a token that does not exist.
    """

    def __init__(self, processing: Processing, *, prompt: Sequence[int], vocab: int, mask: Mask | None = None) -> None:
        processing.check(vocab)
        self._how, self._mask = processing, mask
        self._repeats = processing.repetition_penalty != 1
        self._counts_tokens = bool(processing.presence_penalty or processing.frequency_penalty)
        # What rows are adjusted by stands in arrays that grow with the text, so that a position costs a copy of them.
        self._seen = dict.fromkeys(prompt) if self._repeats else {}
        self._repeated = array("q", self._seen)
        self._counts: Counter[int] = Counter()
        self._places = {token: place for place, token in enumerate(processing.logit_bias)}
        self._ids, self._added = array("q", self._places), array("d", processing.logit_bias.values())

    def valid(self, drafts: Sequence[int]) -> int:
        """How many leading drafts can be right at all."""
        return len(drafts) if self._mask is None else self._mask.valid(drafts)

    def adjusts(self, drafts: Sequence[int]) -> list[Adjust | None]:
        """For the position before the first draft and that after each, as if the drafts before it were the answer.

        All drafts must be valid. None where nothing changes. Changes nothing itself.
        """
        allowed = None if self._mask is None else self._mask.masks(drafts)
        if not self._how.active:
            return [None] * (len(drafts) + 1) if allowed is None else [Adjust(allowed=bits) for bits in allowed]
        result: list[Adjust | None] = [self._adjust(None if allowed is None else allowed[0])]
        noted: list[tuple[int, bool]] = []
        for i, token in enumerate(drafts, start=1):
            noted.append((token, self._note(token)))
            result.append(self._adjust(None if allowed is None else allowed[i]))
        for token, new in reversed(noted):
            self._take_back(token, new)
        return result

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on over committed tokens, end tokens not among them."""
        if self._mask is not None:
            self._mask.accept(tokens)
        for token in tokens:
            self._note(token)

    def _note(self, token: int) -> bool:
        """The text goes on with this token; whether it was not there before, as far as repetition is looked at."""
        new = self._repeats and token not in self._seen
        if new:
            self._seen[token] = None
            self._repeated.append(token)
        if self._counts_tokens:
            self._count(token, 1)
        return new

    def _take_back(self, token: int, new: bool) -> None:
        if new:
            del self._seen[token]
            self._repeated.pop()
        if self._counts_tokens:
            self._count(token, -1)

    def _count(self, token: int, change: int) -> None:
        how, n = self._how, self._counts[token] + change
        self._counts[token] = n
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._ids)
            self._ids.append(token)
            self._added.append(0.0)
        penalty = -n * how.frequency_penalty - how.presence_penalty if n else 0.0
        self._added[place] = penalty + how.logit_bias.get(token, 0.0)

    def _adjust(self, allowed: NDArray[np.uint32] | None) -> Adjust:
        import numpy as np

        return Adjust(
            repetition=self._how.repetition_penalty,
            repeated=np.array(self._repeated) if self._repeated else None,
            ids=np.array(self._ids) if self._ids else None,
            added=np.array(self._added) if self._ids else None,
            allowed=allowed,
        )


def log_probabilities(row: NDArray[np.floating], token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """The log probability of `token`, and the `top` most probable tokens with theirs, most probable first.

    In the model's own law: of the row as it was computed, before temperature, filters, penalties and grammar. For a
    verified position that is the row that its token was drawn from.
    """
    import numpy as np

    logits = row.astype(np.float64)
    logits -= logits.max()
    logits -= np.log(np.exp(logits).sum())
    best = largest(logits, top).tolist() if top else []
    return float(logits[token]), [(i, float(logits[i])) for i in best]
