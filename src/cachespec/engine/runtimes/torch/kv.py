"""Keys and values of all sequences: one slab, allocated once.

``cells`` is [layers, slots, 2 * kv_heads, room, head_dim], keys before values, so that a token's keys and values are
written in one copy and a head's keys lie one after the other. A sequence's length is a number: to truncate is to lower
it, and what lies behind it is never read.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor

from cachespec.engine.runtimes.torch.config import ModelConfig

_HEADER: Final = struct.Struct("<16sI")
MARGIN: Final = 16
"""Positions behind the last that a padded GPU call may write to."""

TILE: Final = 64
"""Positions that attention reads together: what is not written yet of a tile is read too, and masked (`attention`)."""


class Slab:
    """KV of `sequences` of at most `context` tokens each. `lengths` are the truth about what is there,
    `token_bytes` is what a token takes.

    The last slot belongs to no sequence: padded GPU calls write there what nobody reads.
    """

    def __init__(self, config: ModelConfig, *, sequences: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kv_heads, self.context, self.dtype = config.kv_heads, context, dtype
        room = -(-(context + MARGIN) // TILE) * TILE
        shape = (config.layers, sequences + 1, 2 * config.kv_heads, room, config.head_dim)
        # Pages of a CPU slab cost memory once they are written to, and `enter` clears tiles. A GPU reads farther, what it
        # reads is masked and multiplied by zero, and must be numbers for that.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.cells: Tensor = make(shape, dtype=dtype, device=device)
        self.lengths = [0] * sequences
        self.token_bytes = config.layers * 2 * config.kv_heads * config.head_dim * self.cells.element_size()

    def enter(self, slot: int, start: int, end: int) -> None:
        """Clear what lies behind `end` in its tile, if positions `start` to `end` are the first to be written there."""
        behind = -end % TILE
        if behind and (end - start > (end - 1) % TILE):
            self.cells[:, slot, :, end : end + behind].zero_()

    def fork(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens: 46 KB a token for a model of 135M parameters, at memory speed."""
        self.cells[:, target, :, :length].copy_(self.cells[:, source, :, :length])
        self.lengths[target] = length
        self.enter(target, 0, length)

    def export(self, slot: int, mark: bytes) -> bytes:
        """The sequence's keys and values after a header of `mark` (16 bytes) and its length."""
        length = self.lengths[slot]
        raw = self.cells[:, slot, :, :length].contiguous().cpu().view(torch.uint8)
        return _HEADER.pack(mark, length) + raw.numpy().tobytes()

    def import_(self, slot: int, data: bytes, mark: bytes) -> bool:
        """Put exported bytes into an empty slot. False: another mark, damaged, or longer than there is room for."""
        if len(data) < _HEADER.size:
            return False
        found, length = _HEADER.unpack_from(data)
        part = self.cells[:, slot, :, :length]
        if found != mark or not 0 < length <= self.context or len(data) != _HEADER.size + part.nbytes:
            return False
        raw = torch.frombuffer(bytearray(memoryview(data)[_HEADER.size :]), dtype=self.dtype)
        part.copy_(raw.view(part.shape))
        self.lengths[slot] = length
        self.enter(slot, 0, length)
        return True
