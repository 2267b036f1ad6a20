"""Attention piece by piece: each sequence over its own part of the slab, all heads that share keys in one product.

Rows come out bit for bit the same however many are computed together, which makes a text independent of drafts, of the
batch and of how its prompt was cut. Matrix products give each row the same sum from four rows on; but where a sum over
keys is split depends on how many keys there are. So a token at position p looks at the keys up to the end of p's tile,
those behind it masked, whoever else is in the call, and rows are padded to a multiple of four. `TILE` positions make a
tile; what of it nobody wrote yet is zero.

The queries of a group are rows of one product (token by token), so keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from cachespec.engine.runtimes.torch.config import ModelConfig
from cachespec.engine.runtimes.torch.kv import TILE, Slab

_ROWS: Final = 4  # a row's sums do not depend on the number of rows if that is a multiple of this


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence in a call: rows `row` to `row + count` of the call, positions from `start` on."""

    slot: int
    row: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The tokens of a piece that are in one tile. `padding`: rows to add; `mask`, `out`: what belongs to them."""

    row: int
    count: int
    end: int
    padding: int
    mask: Tensor
    out: Tensor


class PieceAttention:
    """`model.Attend` for the pieces given to `begin`, on any device. What it is for is the CPU."""

    def __init__(self, config: ModelConfig, slab: Slab, dtype: torch.dtype, stopped: Callable[[], None]) -> None:
        c = config
        self._config, self._slab, self._dtype, self._stopped = c, slab, dtype, stopped
        self._width, self._size = c.packed_heads * c.head_dim, c.head_dim
        slots = range(slab.cells.shape[1])
        # Views of every layer and slot, made once: making one costs as much as a small product.
        self._cells = [[slab.cells[i, s] for s in slots] for i in range(c.layers)]
        self._keys = [[cell[None, : c.kv_heads] for cell in layer] for layer in self._cells]
        self._values = [[cell[None, c.kv_heads :] for cell in layer] for layer in self._cells]
        self._mask = slab.cells.new_empty(0, 0)
        self._pieces: list[tuple[Piece, list[_Part]]] = []
        self._out = torch.empty(0)

    def begin(self, pieces: Sequence[Piece], rows: int) -> None:
        """Get ready for a call of `rows` rows, of which those that belong to no piece are padding."""
        c = self._config
        self._out = self._mask.new_zeros(rows, c.heads * c.head_dim, dtype=self._dtype)
        farthest = max(piece.start + piece.count for piece in pieces)
        if farthest > self._mask.shape[1]:
            length = min(max(farthest, 2 * self._mask.shape[1]), self._slab.cells.shape[3])
            self._mask = tile_mask(c.groups, -(-length // TILE) * TILE).to(self._mask)
        self._pieces = [(piece, self._parts(piece)) for piece in pieces]
        for piece in pieces:
            self._slab.enter(piece.slot, piece.start, piece.start + piece.count)

    def _parts(self, piece: Piece) -> list[_Part]:
        c, mask = self._config, self._mask
        views = self._out.view(-1, c.kv_heads, c.groups, c.head_dim)
        found, at, last = [], piece.start, piece.start + piece.count
        while at < last:
            end = (at // TILE + 1) * TILE
            count = min(end, last) - at
            row, rows = piece.row + at - piece.start, count * c.groups
            padding = -rows % _ROWS
            first = at % TILE * c.groups
            seen = mask[first : first + rows + padding, mask.shape[1] - end :]
            found.append(_Part(row, count, end, padding, seen, views[row : row + count].transpose(0, 1)))
            at += count
        return found

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        c, size, width = self._config, self._size, self._width
        for piece, parts in self._pieces:
            base, count = piece.row * width, piece.count
            new = heads.as_strided((2 * c.kv_heads, count, size), (size, width, 1), base + c.heads * size)
            self._cells[layer][piece.slot].narrow(1, piece.start, count).copy_(new)
            keys, values = self._keys[layer][piece.slot], self._values[layer][piece.slot]
            for part in parts:
                if len(parts) > 1:
                    self._stopped()
                near, worth = keys.narrow(2, 0, part.end), values.narrow(2, 0, part.end)
                queries = self._queries(heads, part)
                got = F.scaled_dot_product_attention(queries, near, worth, attn_mask=part.mask, scale=1.0)
                if part.padding:
                    got = got.narrow(2, 0, part.count * c.groups)
                part.out.copy_(got.view(c.kv_heads, part.count, c.groups, size))
        return self._out

    def _queries(self, heads: Tensor, part: _Part) -> Tensor:
        """[1, kv_heads, rows, head_dim] of the slab's dtype."""
        c, size, width = self._config, self._size, self._width
        base = part.row * width
        if part.count == 1 and part.padding <= 2 * c.kv_heads:
            # The rows that pad a group are the next one's, those of the last are keys: nothing is copied.
            rows = c.groups + part.padding
            queries = heads.as_strided((1, c.kv_heads, rows, size), (0, c.groups * size, size, 1), base)
        else:
            shape, strides = (c.kv_heads, part.count, c.groups, size), (c.groups * size, width, size, 1)
            queries = heads.as_strided(shape, strides, base).reshape(1, c.kv_heads, part.count * c.groups, size)
            if part.padding:
                queries = F.pad(queries, (0, 0, 0, part.padding))
        return queries.to(self._mask.dtype)


def tile_mask(groups: int, length: int) -> Tensor:
    """0 where a query may look and -inf where not, for the queries of the last tile of `length` positions: float32
    [TILE * groups and some rows for padding, length]. That of a shorter sequence is its right part."""
    mask = torch.zeros(TILE, groups, length)
    mask[:, :, -TILE:] = torch.full((TILE, TILE), float("-inf")).triu_(1).unsqueeze(1)
    return torch.cat((mask.view(TILE * groups, length), torch.zeros(_ROWS - 1, length)))
