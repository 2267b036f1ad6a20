"""Rotary positions as complex numbers.

A head's dimensions are kept in pairs: dimension i of the checkpoint's first half beside dimension i of its second half
(`interleaved`). Turning a pair by its angle is then one complex multiplication, in place, for a whole token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cachespec.engine.runtimes.torch.config import ModelConfig, Rope


def interleaved(head_dim: int) -> Tensor:
    """For each dimension of a head as it is kept here, the dimension of the checkpoint it comes from."""
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


def frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, float32 [head_dim / 2], and what cosines and sines are multiplied by.

    Computed in float32 in the order transformers does, so that angles at far positions agree to the last bit.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        # Wavelengths longer than original / low are stretched, those shorter than original / high left alone.
        turns = rope.original * plain / (2 * math.pi)
        part = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
        return (1 - part) * plain / rope.factor + part * plain, 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim), rope.attention if rope.attention is not None else _mscale(rope.factor)
    return plain, 1.0


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Peng et al., "YaRN" (arXiv 2309.00071), section 3.2, with the ramp over dimensions that its authors' code uses."""

    def dimension(turns: float) -> float:
        """The pair that turns that often within the original context."""
        return head_dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.high), dimension(rope.low)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    slow = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / rope.factor * slow + plain * (1 - slow)


def _mscale(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotation_table(config: ModelConfig, positions: int, factors: Tensor | None) -> Tensor:
    """e^(i angle) for each position and pair, complex64 [positions, head_dim / 2]; `factors` divide the frequencies."""
    inverse, scale = frequencies(config.rope, config.head_dim)
    if factors is not None:
        inverse = inverse / factors.float()
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    return torch.complex(angles.cos() * scale, angles.sin() * scale)


def rotations(table: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """What the packed heads of tokens at `positions` are multiplied by, complex64 [tokens, packed heads * head_dim / 2].

    Queries also take the softmax scale, which saves a pass over the scores; values are left as they are.
    """
    turns = table[positions]
    count, pairs = turns.shape
    queries = (turns * config.head_dim**-0.5).unsqueeze(1).expand(count, config.heads, pairs)
    keys = turns.unsqueeze(1).expand(count, config.kv_heads, pairs)
    values = torch.ones_like(turns).unsqueeze(1).expand(count, config.kv_heads, pairs)
    return torch.cat((queries, keys, values), dim=1).view(count, -1)
