"""Attention piece by piece: each sequence over its own part of the slab, all heads that share keys in one product.

One token: two batched matrix products and a softmax over views of the slab, nothing copied. Several: torch's blocked
kernel, with the queries of a group as rows (token by token), so keys are never repeated, and in blocks of `_BLOCK` tokens,
so a long prefill neither computes much that the causal mask discards nor runs long without looking whether to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from cachespec.engine.runtimes.torch.config import ModelConfig
from cachespec.engine.runtimes.torch.kv import Slab

_BLOCK: Final = 128


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence in a call: rows `row` to `row + count` of the call, positions from `start` on."""

    slot: int
    row: int
    count: int
    start: int


class PieceAttention:
    """`model.Attend` for the pieces given to `begin`, on any device. What it is for is the CPU."""

    def __init__(self, config: ModelConfig, slab: Slab, dtype: torch.dtype, stopped: Callable[[], None]) -> None:
        c = config
        self._config, self._dtype, self._stopped = c, dtype, stopped
        self._width, self._size = c.packed_heads * c.head_dim, c.head_dim
        slots = range(slab.cells.shape[1])
        # Views of every layer and slot, made once: making one costs as much as a small product.
        self._cells = [[slab.cells[i, s] for s in slots] for i in range(c.layers)]
        self._keys = [[cell[: c.kv_heads].transpose(1, 2) for cell in layer] for layer in self._cells]
        self._values = [[cell[c.kv_heads :] for cell in layer] for layer in self._cells]
        self._mask = slab.cells.new_empty(0, 0)
        self._pieces: Sequence[Piece] = ()
        self._out = torch.empty(0)
        self._parts: list[Tensor] = []

    def begin(self, pieces: Sequence[Piece], rows: int) -> None:
        """Get ready for a call of `rows` rows, of which those that belong to no piece are padding."""
        c = self._config
        self._pieces = pieces
        self._out = self._mask.new_zeros(rows, c.heads * c.head_dim, dtype=self._dtype)
        views = self._out.view(rows, c.kv_heads, c.groups, c.head_dim)
        self._parts = [views[p.row] if p.count == 1 else views[p.row : p.row + p.count].transpose(0, 1) for p in pieces]
        longest = max((p.start + p.count for p in pieces if p.count > 1), default=0)
        if longest > self._mask.shape[1]:
            self._mask = causal_mask(_BLOCK, c.groups, max(longest, 2 * self._mask.shape[1])).to(self._mask)

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        for piece, out in zip(self._pieces, self._parts, strict=True):
            if piece.count == 1:
                self._one(layer, heads, piece, out)
            else:
                self._several(layer, heads, piece, out)
        return self._out

    def _one(self, layer: int, heads: Tensor, piece: Piece, out: Tensor) -> None:
        c, size, first = self._config, self._size, piece.row * self._width
        end = piece.start + 1
        new = heads.as_strided((2 * c.kv_heads, 1, size), (size, size, 1), first + c.heads * size)
        self._cells[layer][piece.slot].narrow(1, piece.start, 1).copy_(new)
        queries = heads.as_strided((c.kv_heads, c.groups, size), (c.groups * size, size, 1), first)
        scores = torch.bmm(queries.to(self._mask.dtype), self._keys[layer][piece.slot].narrow(2, 0, end))
        out.copy_(torch.bmm(torch.softmax(scores, -1), self._values[layer][piece.slot].narrow(1, 0, end)))

    def _several(self, layer: int, heads: Tensor, piece: Piece, out: Tensor) -> None:
        c, size, width = self._config, self._size, self._width
        first, count = piece.row * width, piece.count
        new = heads.as_strided((2 * c.kv_heads, count, size), (size, width, 1), first + c.heads * size)
        self._cells[layer][piece.slot].narrow(1, piece.start, count).copy_(new)
        queries = heads.as_strided((c.kv_heads, count, c.groups, size), (c.groups * size, width, size, 1), first)
        keys, values = self._keys[layer][piece.slot].transpose(1, 2), self._values[layer][piece.slot]
        for at in range(0, count, _BLOCK):
            if at:
                self._stopped()
            some = min(_BLOCK, count - at)
            end = piece.start + at + some
            mask = self._mask[(_BLOCK - some) * c.groups :, self._mask.shape[1] - end :]
            block = queries[:, at : at + some].reshape(1, c.kv_heads, some * c.groups, size).to(self._mask.dtype)
            near, worth = keys.narrow(1, 0, end).unsqueeze(0), values.narrow(1, 0, end).unsqueeze(0)
            got = F.scaled_dot_product_attention(block, near, worth, attn_mask=mask, scale=1.0)
            out[:, at : at + some].copy_(got.view(c.kv_heads, some, c.groups, size))


def causal_mask(block: int, groups: int, length: int) -> Tensor:
    """0 where a query may look and -inf where not, [block * groups, length], for the last `block` of `length` tokens.

    The mask of fewer tokens, or of a shorter sequence, is its lower right corner.
    """
    mask = torch.zeros(block, groups, max(length, block))
    mask[:, :, -block:] = torch.full((block, block), float("-inf")).triu_(1).unsqueeze(1)
    return mask.view(block * groups, -1)
