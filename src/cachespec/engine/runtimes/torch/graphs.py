"""Captured CUDA graphs: one for each shape of call that is frequent enough to deserve it.

Launching the hundreds of kernels of a pass one by one takes longer than running them for one token. A captured graph is
launched as one, but its shapes and addresses are fixed, so calls are padded to the next shape of a short list, and all
their numbers go through one buffer that the graph reads from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from cachespec.engine.runtimes.torch.attention import Piece

WIDTHS: Final = (1, 2, 4, 8, 16)
"""Tokens of each sequence: one for decoding, more for verifying drafts."""

_FIRST_BUCKET: Final = 512
_GROWTH: Final = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What is fixed in a graph: sequences, tokens of each, and how far back any of them looks at most."""

    batch: int
    width: int
    reach: int

    @property
    def rows(self) -> int:
        return self.batch * self.width

    @property
    def numbers(self) -> int:
        """Integers a call of this shape takes: a token and a position for each row, a slot and an end for each sequence."""
        return 2 * self.rows + 2 * self.batch


def shape_of(pieces: Sequence[Piece], *, batch_limit: int, room: int, growth: int = _GROWTH) -> Shape | None:
    """The smallest shape that holds these pieces; None when there is none, as for a chunk of a prompt.

    `room`: positions a slot has, those for padding included. `growth`: each reach is so many times the one before.
    """
    widest = max(piece.count for piece in pieces)
    if widest > WIDTHS[-1] or len(pieces) > batch_limit:
        return None
    width = next(w for w in WIDTHS if w >= widest)
    reach = _FIRST_BUCKET
    while reach < max(piece.start for piece in pieces) + width:
        reach *= growth
    batch = min(_power_above(len(pieces)), batch_limit)
    return Shape(batch, width, min(reach, room))


def numbers(shape: Shape, tokens: Sequence[int], pieces: Sequence[Piece], *, spare: int) -> list[int]:
    """The integers of a padded call: tokens, positions, slots, ends.

    Rows a piece does not fill stand behind its last token, where nothing is yet; sequences that do not exist live in the
    `spare` slot. What they write is never read.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    for piece in pieces:
        fill = shape.width - piece.count
        ids += [*tokens[piece.row : piece.row + piece.count], *[0] * fill]
        positions += range(piece.start, piece.start + shape.width)
        slots.append(piece.slot)
        ends.append(piece.start + shape.width)
    missing = shape.batch - len(pieces)
    return [
        *ids,
        *[0] * (missing * shape.width),
        *positions,
        *list(range(shape.width)) * missing,
        *slots,
        *[spare] * missing,
        *ends,
        *[shape.width] * missing,
    ]


def rows_of(shape: Shape, pieces: Sequence[Piece], wanted: Sequence[int]) -> list[int]:
    """Where the wanted rows of a call lie once it is padded."""
    place = {}
    for index, piece in enumerate(pieces):
        for offset in range(piece.count):
            place[piece.row + offset] = index * shape.width + offset
    return [place[row] for row in wanted]


class Replay(Protocol):
    """A captured pass: reads `inputs`, int64 [numbers], when called, and returns logits [rows, vocab], which the next
    call overwrites."""

    inputs: Tensor

    def __call__(self) -> Tensor: ...


class Graphs:
    """Graphs by shape, captured when first needed. `capture` runs and records a pass of a shape on given inputs."""

    def __init__(self, capture: Callable[[Shape, Tensor], Replay], device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._known: dict[Shape, Replay] = {}

    def __len__(self) -> int:
        return len(self._known)

    def run(self, shape: Shape, values: Sequence[int]) -> Tensor:
        """Logits [rows, vocab] of a call with these numbers."""
        given = torch.tensor(values, dtype=torch.int64)
        replay = self._known.get(shape)
        if replay is None:
            # What the warm-up of a capture writes to the KV, the run after it writes again.
            replay = self._known[shape] = self._capture(shape, given.to(self._device))
        replay.inputs.copy_(given)
        return replay()


class CudaCapture:
    """Captures passes as CUDA graphs. All share one pool of memory, since they never run at the same time.

    What they return lies outside of it, in one tensor for each number of rows: logits of many rows are the largest thing that
    a pass makes, and each graph would keep its own.
    """

    def __init__(self, forward: Callable[[Shape, Tensor], Tensor], device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._logits: dict[int, Tensor] = {}

    def __call__(self, shape: Shape, inputs: Tensor) -> Replay:
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):  # lazy set-up of libraries must not fall into the capture
                for _ in range(2):
                    logits = self._forward(shape, inputs)
            here.wait_stream(self._stream)
            out = self._logits.get(shape.rows)
            if out is None:
                out = self._logits[shape.rows] = torch.empty_like(logits)
            del logits
            graph = torch.cuda.CUDAGraph()
            # What other threads do on a GPU meanwhile is their own affair.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                out.copy_(self._forward(shape, inputs))
        return _CudaReplay(graph, inputs, out)


class _CudaReplay:
    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: Tensor, logits: Tensor) -> None:
        self._graph, self.inputs, self._logits = graph, inputs, logits

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._logits


def _power_above(count: int) -> int:
    return 1 << (count - 1).bit_length()
