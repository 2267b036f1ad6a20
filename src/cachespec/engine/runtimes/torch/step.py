"""One forward pass on a CPU: from tokens and where they belong to logits of the wanted rows, and tokens drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cachespec.engine.runtimes.base import Interrupted
from cachespec.engine.runtimes.torch.attention import Piece, PieceAttention
from cachespec.engine.runtimes.torch.kv import Slab
from cachespec.engine.runtimes.torch.model import Decoder
from cachespec.engine.runtimes.torch.rope import rotations
from cachespec.engine.sampling import Sampling, draw


class Switch:
    """Stops a running pass, from any thread: `check` is called between its steps."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def check(self) -> None:
        """Raise `Interrupted` when the switch is on."""
        if self.on:
            raise Interrupted


class Step(Protocol):
    """Runs the model on a device. `kernel` names the attention kernel, for people."""

    kernel: str

    def run(self, tokens: Sequence[int], pieces: Sequence[Piece], wanted: Sequence[int]) -> Tensor:
        """Logits of the wanted rows, float32 [wanted, vocab] on the device; writes the KV. May raise `Interrupted`."""

    def draw(self, logits: Tensor, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        """A token for each of these rows of logits. Raises ArithmeticError for a row without a number."""


class CpuStep:
    """See `Step`. `table`: `rope.rotation_table`."""

    kernel = "sdpa"

    def __init__(self, decoder: Decoder, slab: Slab, table: Tensor, switch: Switch) -> None:
        self._decoder, self._table, self._check = decoder, table, switch.check
        self._attention = PieceAttention(decoder.config, slab, decoder.dtype, switch.check)

    def run(self, tokens: Sequence[int], pieces: Sequence[Piece], wanted: Sequence[int]) -> Tensor:
        padding = [0] * max(0, self._decoder.pad - len(tokens))
        positions = [p for piece in pieces for p in range(piece.start, piece.start + piece.count)]
        ids = torch.tensor([*tokens, *padding])
        turns = rotations(self._table, torch.tensor([*positions, *padding]), self._decoder.config)
        self._attention.begin(pieces, len(ids))
        hidden = self._decoder.hidden(ids, turns, self._attention, self._check)
        if not wanted:
            return hidden.new_empty(0, self._decoder.words)
        rows = [*wanted, *[wanted[-1]] * (self._decoder.head.pad - len(wanted))]
        return self._decoder.logits(hidden[rows])[: len(wanted)]

    def draw(self, logits: Tensor, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        table = logits.numpy()
        return [draw(table[row], how, at) for row, how, at in zip(rows, sampling, positions, strict=True)]
