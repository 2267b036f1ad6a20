"""The rule of `engine.sampling` in torch operations, for rows that are on a GPU: drawn there, and only ids copied back.

The noise is the same: its words are integers and equal bit for bit; uniform numbers are exact in float64; only the last
bit of a logarithm may differ between libraries. Integers here are signed, so shifts to the right are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from cachespec.engine.sampling import Sampling, key

_GAMMA: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2: Final = 0x94D049BB133111EB - (1 << 64)


def words(keys: Tensor, vocab: int) -> Tensor:
    """`word(x)` of `engine.sampling` for every token id, int64 [rows, vocab] with the bits of the unsigned numbers."""
    z = torch.arange(1, vocab + 1, device=keys.device) * _GAMMA + keys.unsqueeze(1)
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def uniform(word: Tensor) -> Tensor:
    """`u(x)`, float64, exact."""
    return (_shifted(word, 12).double() + 0.5) * 2.0**-52


def signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one of the same bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


def draw_rows(logits: Tensor, sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """A token for each row of float32 [rows, vocab]. Raises ArithmeticError when a row has no finite maximum."""
    vocab = logits.shape[1]
    if all(how.temperature == 0 for how in sampling):
        best, tokens = logits.max(dim=1)
    else:
        scores = logits.double()
        best = scores.amax(dim=1)
        keys = [signed(key(how.seed, at)) for how, at in zip(sampling, positions, strict=True)]
        noise = -torch.log(-torch.log(uniform(words(_column(keys, logits).long(), vocab))))
        hot = _column([how.temperature > 0 for how in sampling], logits).bool()
        heat = _column([how.temperature or 1.0 for how in sampling], logits)
        law = (scores - best.unsqueeze(1)) / heat.unsqueeze(1)
        law = _kept(law, sampling)
        tokens = torch.where(hot.unsqueeze(1), law + noise, scores).argmax(dim=1)
    # One copy to the host: a row that holds NaN, or nothing finite, says so by a token that does not exist.
    found: list[int] = torch.where(torch.isfinite(best), tokens, -1).tolist()
    if -1 in found:
        raise ArithmeticError("the model returned logits without a finite maximum")
    return found


def _kept(law: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """-inf where top-k, top-p or min-p leave a token out; each acts on what the one before it left."""
    vocab = law.shape[1]
    limits = [min(how.top_k or vocab, vocab) for how in sampling]
    masses = [1.0 if how.top_p is None else how.top_p for how in sampling]
    if min(limits) < vocab or min(masses) < 1:
        # Stable, so that of equal tokens the one with the lower id comes first.
        ordered, ids = torch.sort(law, dim=1, descending=True, stable=True)
        rank = torch.arange(vocab, device=law.device).unsqueeze(0)
        within = rank < _column(limits, law).unsqueeze(1)
        weights = torch.where(within, ordered.exp(), 0.0)
        mass = _column(masses, law).unsqueeze(1)
        goal = mass * weights.sum(dim=1, keepdim=True)
        before = weights.cumsum(dim=1).roll(1, dims=1)
        before[:, 0] = -1.0
        within &= (before < goal) | (mass >= 1)
        law = law.masked_fill(torch.zeros_like(within).scatter_(1, ids, ~within), -math.inf)
    floors = [math.log(how.min_p) if how.min_p else -math.inf for how in sampling]
    if max(floors) > -math.inf:
        law = law.masked_fill(law < _column(floors, law).unsqueeze(1), -math.inf)
    return law


def _column(values: Sequence[float] | Sequence[int] | Sequence[bool], like: Tensor) -> Tensor:
    whole = all(isinstance(value, int) for value in values)
    return torch.tensor(values, dtype=torch.int64 if whole else torch.float64, device=like.device)


def _shifted(z: Tensor, by: int) -> Tensor:
    """z >> by as of an unsigned number."""
    return (z >> by) & ((1 << (64 - by)) - 1)
