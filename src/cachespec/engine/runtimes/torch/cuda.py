"""The forward pass on a GPU: whole calls as captured graphs where their shape allows, attention over the slab in place.

Two attention kernels. Flash attention for sequences of different lengths reads keys where they lie: it is told where each
sequence begins and how many tokens it has, and both stand in device memory, so a graph serves any slots and lengths. It
takes 16-bit floats only and is tried against the other one before it is relied on. The other copies the slots of a call
together and uses torch's general kernel with a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from cachespec.engine.runtimes.torch.attention import Piece, PieceAttention
from cachespec.engine.runtimes.torch.config import ModelConfig
from cachespec.engine.runtimes.torch.draws import draw_rows
from cachespec.engine.runtimes.torch.graphs import CudaCapture, Graphs, Replay, Shape, numbers, rows_of, shape_of
from cachespec.engine.runtimes.torch.kv import Slab
from cachespec.engine.runtimes.torch.model import Attend, Decoder
from cachespec.engine.runtimes.torch.rope import rotations
from cachespec.engine.runtimes.torch.step import Switch
from cachespec.engine.sampling import Sampling

_BATCH_LIMIT: Final = 32  # sequences in one graph
_FLASH_GROWTH: Final = 4  # of a graph's reach: the kernel looks no farther than a sequence is long, so that few will do

Forward = Callable[[Shape, Tensor], Tensor]
Capture = Callable[[Shape, Tensor], Replay]
FlashKernel = Callable[..., Tensor]
"""(queries [tokens, heads, head_dim], keys, values [positions, kv_heads, head_dim], first row of each sequence and the
end of the last, first position of each sequence, positions it has, most rows, most positions) -> like queries. Causal:
the last row of a sequence sees all its positions."""


def flash_kernel(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, firsts: Tensor, ends: Tensor, most_rows: int, most_positions: int
) -> Tensor:
    """`FlashKernel` as torch has it for CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    # A window of everything before and nothing behind is the library's way to say causal. One row sees everything anyway, and
    # without a window the library reads keys once for all heads that share them, split over the whole GPU.
    window = (-1, -1) if most_rows == 1 else (-1, 0)
    options: dict[str, Any] = {"scale": 1.0, "window_size": window, "enable_gqa": True, "seqused_k": ends}
    found = varlen_attn(q, k, v, rows, firsts, most_rows, most_positions, **options)
    return found if isinstance(found, Tensor) else found[0]


class Layout:
    """Where the tokens of one call belong: int32 and int64 tensors on the device, the same for all layers.

    rows: first row of each sequence, and the number of rows. slots, ends: of each sequence. slot_of, positions: of each
    row. most_rows, reach: bounds that do not depend on the numbers in the tensors.
    """

    __slots__ = ("ends", "most_rows", "positions", "reach", "rows", "slot_of", "slots")

    def __init__(
        self, *, rows: Tensor, slots: Tensor, ends: Tensor, slot_of: Tensor, positions: Tensor, most_rows: int, reach: int
    ) -> None:
        self.rows, self.slots, self.ends, self.slot_of, self.positions = rows, slots, ends, slot_of, positions
        self.most_rows, self.reach = most_rows, reach


class FlashAttention:
    """`model.Attend` with a kernel for sequences of different lengths that reads the slab in place."""

    def __init__(self, config: ModelConfig, slab: Slab, layout: Layout, kernel: FlashKernel) -> None:
        self._config, self._slab, self._layout, self._kernel = config, slab, layout, kernel
        room = slab.cells.shape[3]
        self._firsts = F.pad(layout.slots * (2 * config.kv_heads * room), (0, 1)).int()
        self._ends, self._rows = layout.ends.int(), layout.rows.int()

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        c, layout = self._config, self._layout
        cells = self._slab.cells[layer]
        _write(cells, heads[:, c.heads :], layout)
        keys, values = _flat(cells, c.kv_heads)
        queries = heads[:, : c.heads].to(cells.dtype)
        out = self._kernel(queries, keys, values, self._rows, self._firsts, self._ends, layout.most_rows, layout.reach)
        return out.flatten(1)


class GatherAttention:
    """`model.Attend` for calls in which every sequence has the same number of rows, with torch's general kernel."""

    def __init__(self, config: ModelConfig, slab: Slab, layout: Layout) -> None:
        self._config, self._slab, self._layout = config, slab, layout
        width = layout.most_rows
        seen = torch.arange(layout.reach, device=layout.positions.device) <= layout.positions.view(-1, width, 1)
        mask = torch.zeros(seen.shape, dtype=slab.dtype, device=seen.device).masked_fill(~seen, float("-inf"))
        self._mask = mask.repeat_interleave(config.groups, dim=1).unsqueeze(1)  # [batch, 1, width * groups, reach]

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        c, layout, width = self._config, self._layout, self._layout.most_rows
        cells = self._slab.cells[layer]
        _write(cells, heads[:, c.heads :], layout)
        near = cells[:, :, : layout.reach].index_select(0, layout.slots)
        keys, values = near[:, : c.kv_heads], near[:, c.kv_heads :]
        queries = heads[:, : c.heads].to(cells.dtype).view(-1, width, c.kv_heads, c.groups, c.head_dim)
        queries = queries.transpose(1, 2).reshape(-1, c.kv_heads, width * c.groups, c.head_dim)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask, scale=1.0)
        out = out.view(-1, c.kv_heads, width, c.groups, c.head_dim).transpose(1, 2)
        return out.reshape(heads.shape[0], -1)


def _write(cells: Tensor, new: Tensor, layout: Layout) -> None:
    cells[layout.slot_of, :, layout.positions] = new.to(cells.dtype)


def _flat(cells: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """A layer's keys, and its values, as [positions, kv_heads, head_dim] over all slots.

    Position p of slot s is row s * 2 * kv_heads * room + p: the rows of other heads lie between the slots and are never
    in a sequence's range. The view overlaps itself, which a reader does not mind.
    """
    _, both, room, size = cells.shape
    count = cells.numel() // size - (kv_heads - 1) * room
    shape, strides = (count, kv_heads, size), (size, room * size, 1)
    values = (count - kv_heads * room, kv_heads, size)
    base = cells.storage_offset()
    return cells.as_strided(shape, strides, base), cells.as_strided(values, strides, base + (both // 2) * room * size)


class CudaStep:
    """See `step.Step`. `flash`: the kernel for it, or None. `capture` makes graphs; None: every pass runs eagerly."""

    def __init__(
        self,
        decoder: Decoder,
        slab: Slab,
        table: Tensor,
        switch: Switch,
        *,
        flash: FlashKernel | None,
        capture: Callable[[Forward], Capture] | None,
    ) -> None:
        self._check = switch.check
        self.kernel = "flash" if flash is not None else "sdpa"
        self._decoder, self._slab, self._table, self._flash = decoder, slab, table, flash
        self._pieces = PieceAttention(decoder.config, slab, decoder.dtype, switch.check)
        self._spare = len(slab.lengths)
        self.graphs = None if capture is None else Graphs(capture(self.forward), decoder.device)
        self._growth = 2 if flash is None else _FLASH_GROWTH

    def run(self, tokens: Sequence[int], pieces: Sequence[Piece], wanted: Sequence[int]) -> Tensor:
        self._check()
        if self.graphs is not None:
            limit, room = min(len(self._slab.lengths), _BATCH_LIMIT), self._slab.cells.shape[3]
            shape = shape_of(pieces, batch_limit=limit, room=room, growth=self._growth)
            if shape is not None:
                logits = self.graphs.run(shape, numbers(shape, tokens, pieces, spare=self._spare))
                return _picked(logits, rows_of(shape, pieces, wanted))
        hidden = self._eager(tokens, pieces)
        if not wanted:
            return hidden.new_empty(0, self._decoder.words, dtype=torch.float32)
        return self._decoder.logits(_picked(hidden, wanted))

    def draw(self, logits: Tensor, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        return draw_rows(_picked(logits, rows), sampling, positions)

    def forward(self, shape: Shape, inputs: Tensor) -> Tensor:
        """The pass that is captured: logits of all rows, from the numbers that `graphs.numbers` lays out."""
        ids, positions, slots, ends = torch.split(inputs, [shape.rows, shape.rows, shape.batch, shape.batch])
        layout = Layout(
            rows=torch.arange(0, shape.rows + 1, shape.width, device=inputs.device),
            slots=slots,
            ends=ends,
            slot_of=slots.repeat_interleave(shape.width, output_size=shape.rows),
            positions=positions,
            most_rows=shape.width,
            reach=shape.reach,
        )
        config = self._decoder.config
        attend: Attend = (
            GatherAttention(config, self._slab, layout)
            if self._flash is None
            else FlashAttention(config, self._slab, layout, self._flash)
        )
        turns = rotations(self._table, positions, config)
        return self._decoder.logits(self._decoder.hidden(ids, turns, attend, _never))

    def _eager(self, tokens: Sequence[int], pieces: Sequence[Piece]) -> Tensor:
        """A pass of any shape: prompts, and what no graph fits."""
        device, config = self._decoder.device, self._decoder.config
        layout = _layout(pieces, device)
        attend: Attend
        if self._flash is None:
            self._pieces.begin(pieces, len(tokens))
            attend = self._pieces
        else:
            attend = FlashAttention(config, self._slab, layout, self._flash)
        turns = rotations(self._table, layout.positions, config)
        return self._decoder.hidden(torch.tensor(list(tokens), device=device), turns, attend, self._check)


def _picked(table: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, without a copy when they are all: a list of indices is a transfer to the GPU, and waits for it."""
    return table if list(rows) == list(range(len(table))) else table[list(rows)]


def _never() -> None:
    """Nothing stops a graph: it is over in milliseconds."""


def working_flash(config: ModelConfig, slab: Slab, kernel: FlashKernel = flash_kernel) -> FlashKernel | None:
    """`kernel`, if it runs here and agrees with plain attention on small sequences of this model's shape; else None."""
    if slab.dtype not in (torch.float16, torch.bfloat16):
        return None
    ragged = [Piece(2, 0, 1, 40), Piece(0, 1, 5, 0), Piece(1, 6, 3, 17)]
    single = [Piece(1, 0, 1, 29), Piece(2, 1, 1, 0), Piece(0, 2, 1, 63)]  # kernels for one row each are others
    try:
        return kernel if all(_agrees(config, slab, kernel, pieces) for pieces in (ragged, single)) else None
    except (RuntimeError, NotImplementedError, TypeError, ValueError, ImportError):
        return None


def _agrees(config: ModelConfig, slab: Slab, kernel: FlashKernel, pieces: Sequence[Piece]) -> bool:
    device = slab.cells.device
    dice = torch.Generator(device).manual_seed(0)
    small = Slab(config, sequences=3, context=64, dtype=slab.dtype, device=device)
    small.cells.normal_(generator=dice)
    layout = _layout(pieces, device)
    heads = torch.randn(len(layout.positions), config.packed_heads, config.head_dim, device=device, generator=dice)
    heads[:, : config.heads] *= config.head_dim**-0.5
    plain = PieceAttention(config, small, slab.dtype, _never)
    plain.begin(pieces, len(heads))
    found = FlashAttention(config, small, layout, kernel)(0, heads)
    return torch.allclose(found.float(), plain(0, heads).float(), atol=2e-2, rtol=2e-2)


def _layout(pieces: Sequence[Piece], device: torch.device) -> Layout:
    """That of an eager pass."""
    total = sum(x.count for x in pieces)
    return Layout(
        rows=torch.tensor([*(x.row for x in pieces), total], device=device),
        slots=torch.tensor([x.slot for x in pieces], device=device),
        ends=torch.tensor([x.start + x.count for x in pieces], device=device),
        slot_of=torch.tensor([x.slot for x in pieces for _ in range(x.count)], device=device),
        positions=torch.tensor([p for x in pieces for p in range(x.start, x.start + x.count)], device=device),
        most_rows=max(x.count for x in pieces),
        reach=max(x.start + x.count for x in pieces),
    )


def make_step(decoder: Decoder, slab: Slab, table: Tensor, switch: Switch) -> CudaStep:
    """The fastest way this GPU has."""

    def capture(forward: Forward) -> Capture:
        return CudaCapture(forward, decoder.device)

    return CudaStep(decoder, slab, table, switch, flash=working_flash(decoder.config, slab), capture=capture)
