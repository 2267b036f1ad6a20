"""How a token is drawn, for every runtime, drafter and batch (contract E2).

A token is ``argmax over x of log target_prob(x) + noise(seed, position, x)``. With standard Gumbel noise that is an exact
draw from the target law, and a draft token is right exactly when it equals the draw, so the text for a seed does not
depend on speculation (arXiv 2408.07978). At temperature 0 there is no noise. Ties go to the lowest token id.

The noise comes from a counter, so that position 700 needs no draw before it. All of it is exact arithmetic on unsigned
64-bit integers that wrap, up to the last line::

    mix(z)  = z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31   (SplitMix64)
    G       = 0x9E3779B97F4A7C15
    key     = mix(mix(seed + G) + (position + 1) * G)
    word(x) = mix(key + (x + 1) * G)
    u(x)    = ((word(x) >> 12) + 0.5) * 2**-52            in float64, exact, never 0 or 1
    noise   = -log(-log(u(x)))

`position` is the place of the drawn token in its sequence, prompt included. Noise is keyed by token id, so the draw
depends neither on the order of the candidates nor on which others were kept.

The target law is made in float64, each step acting on the law the step before it left: temperature; top-k (exactly k,
ties to the lower id); top-p (the fewest tokens, most probable first, whose mass reaches p); min-p (at least that part of
the greatest probability).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cachespec.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of one request's draws. None leaves a step out; `temperature` 0 takes the most probable token.

    Raises InputError, naming the field, for a value outside its range.
    """

    seed: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= sys.float_info.max:  # an integer may be greater than any float
            raise InputError(f"must be a number from 0 on, not {self.temperature!r}", field="temperature")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"must be at least 1, not {self.top_k!r}", field="top_k")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"must be above 0 and at most 1, not {self.top_p!r}", field="top_p")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"must be from 0 to 1, not {self.min_p!r}", field="min_p")


def key(seed: int, position: int) -> int:
    """The 64-bit key of one position (module docstring). Any integer is a seed; it is taken modulo 2**64."""
    return _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)


def words(seed: int, position: int, ids: NDArray[np.integer]) -> NDArray[np.uint64]:
    """`word(x)` of the module docstring, for each token id."""
    import numpy as np

    z = ids.astype(np.uint64)
    z += np.uint64(1)
    z *= np.uint64(_GAMMA)
    z += np.uint64(key(seed, position))
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return z


def gumbel(word: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard Gumbel noise from 64-bit words; never decreasing in the word."""
    import numpy as np

    uniform = ((word >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def target(row: NDArray[np.floating], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The target law at a temperature above 0: kept token ids, ascending, and their log probabilities up to a constant.

    Raises ArithmeticError when the row holds NaN or has no finite maximum.
    """
    import numpy as np

    logits = row.astype(np.float64)
    highest = logits.max()
    if not np.isfinite(highest):
        raise ArithmeticError("the model returned logits without a finite maximum")
    with np.errstate(over="ignore"):  # next to temperature 0 all but the greatest leave the range, rightly to -inf
        logits -= highest
        logits /= sampling.temperature
    ids = np.arange(len(logits), dtype=np.int64)
    if sampling.top_k is not None and sampling.top_k < len(ids):
        ids = np.sort(largest(logits, sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        ids = ids[_nucleus(logits[ids], sampling.top_p)]
    if sampling.min_p:
        ids = ids[logits[ids] >= np.log(sampling.min_p)]  # the greatest probability stands at 0 here
    return ids, logits[ids]


def draw(row: NDArray[np.floating], sampling: Sampling, position: int) -> int:
    """The token for `position`: the rule of the module docstring.

    Noise is computed only where it can matter: a token that would not win even with the largest noise any kept token
    got cannot win. That gives the same token as computing it everywhere.
    """
    import numpy as np

    if sampling.temperature == 0:
        best = int(row.argmax())
        if not np.isfinite(row[best]):
            raise ArithmeticError("the model returned logits without a finite maximum")
        return best
    ids, scores = target(row, sampling)
    word = words(sampling.seed, position, ids)
    first = int(scores.argmax())
    reachable = gumbel(word[[int(word.argmax()), first]])
    able = np.flatnonzero(scores + (reachable[0] + 1e-9) >= scores[first] + reachable[1])
    return int(ids[able[int((scores[able] + gumbel(word[able])).argmax())]])


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, largest first, equal ones by index."""
    import numpy as np

    if count < len(values):
        cut = np.partition(values, len(values) - count)[len(values) - count]
        found = np.flatnonzero(values >= cut)
    else:
        found = np.arange(len(values))
    return found[np.argsort(-values[found], kind="stable")][:count]


def _nucleus(logits: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest most probable values whose share reaches `mass`; at least one.

    They are ordered by logits: at a very high temperature weights that differ are rounded to the same number.
    """
    import numpy as np

    weights = np.exp(logits)
    goal = mass * weights.sum()
    count = 256  # a nucleus is small as a rule; sorting the whole vocabulary is slow
    while True:
        order = largest(logits, min(count, len(logits)))
        reached = np.cumsum(weights[order])
        if reached[-1] >= goal or count >= len(weights):
            return np.sort(order[: int(np.searchsorted(reached, goal)) + 1])
        count *= 16
