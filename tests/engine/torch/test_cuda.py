"""What runs on a GPU, as far as a CPU can tell: shapes and padding of graphs, and both kernels' views of the slab.

Captured graphs are stood in for by passes that run at once on the same fixed buffers, the flash kernel by its definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.torch.support import Tensor, load, model, numbers, put, save, torch

from cachespec.engine.runtimes.base import Interrupted, Span
from cachespec.engine.runtimes.torch import TorchRuntime, cuda
from cachespec.engine.runtimes.torch.attention import Piece
from cachespec.engine.runtimes.torch.config import ModelConfig
from cachespec.engine.runtimes.torch.graphs import Graphs, Replay, Shape, rows_of, shape_of
from cachespec.engine.runtimes.torch.graphs import numbers as laid_out
from cachespec.engine.runtimes.torch.kv import Slab
from cachespec.engine.runtimes.torch.rope import rotation_table
from cachespec.engine.sampling import Sampling, draw

Forward = cuda.Forward


class Rerun:
    """Instead of a captured graph: the same pass, run again on the same input buffer."""

    def __init__(self, forward: Forward, shape: Shape, inputs: Tensor) -> None:
        self._forward, self._shape, self.inputs = forward, shape, inputs

    def __call__(self) -> Tensor:
        return self._forward(self._shape, self.inputs)


def rerun(forward: Forward) -> cuda.Capture:
    def capture(shape: Shape, inputs: Tensor) -> Replay:
        forward(shape, inputs)
        return Rerun(forward, shape, inputs)

    return capture


def flash(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, firsts: Tensor, ends: Tensor, most_rows: int, most_positions: int
) -> Tensor:
    """What a flash kernel for sequences of different lengths computes: each row sees all up to itself."""
    assert rows.dtype == firsts.dtype == ends.dtype == torch.int32
    assert len(rows) == len(firsts) == len(ends) + 1
    out: Tensor = torch.empty_like(q)
    groups = q.shape[1] // k.shape[1]
    for i in range(len(ends)):
        first, last, end = int(rows[i]), int(rows[i + 1]), int(ends[i])
        assert last - first <= most_rows
        assert end <= most_positions
        seen = slice(int(firsts[i]), int(firsts[i]) + end)
        keys, values = (part[seen].float().repeat_interleave(groups, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys)
        ahead = torch.arange(end) > torch.arange(end - (last - first), end).unsqueeze(1)
        probs = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", probs, values).to(q.dtype)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model("qwen2", num_attention_heads=6, hidden_size=96), tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[TorchRuntime]:
    runtime = load(folder, context=500, sequences=5)
    yield runtime
    runtime.close()


@pytest.fixture(params=["gather", "flash", "eager gather", "eager flash"])
def gpu(folder: Path, request: pytest.FixtureRequest) -> Iterator[TorchRuntime]:
    """A runtime whose step is the GPU's, in float32."""
    runtime = load(folder, context=500, sequences=5)
    decoder = runtime._decoder
    with torch.inference_mode():
        table = rotation_table(decoder.config, 516, None)
        slab = Slab(decoder.config, sequences=5, context=500, dtype=torch.float32, device=decoder.device)
        slab.cells.zero_()
    runtime._slab = slab
    runtime._step = cuda.CudaStep(
        decoder,
        slab,
        table,
        runtime._switch,
        flash=flash if "flash" in request.param else None,
        capture=None if "eager" in request.param else rerun,
    )
    yield runtime
    runtime.close()


def test_every_kind_of_call_gives_what_a_cpu_gives(gpu: TorchRuntime, plain: TorchRuntime) -> None:
    """Prompts, ragged verification with padded rows and sequences, decoding, at the end of the context too."""
    for runtime in (gpu, plain):
        for sequence in range(5):
            runtime.free(sequence)
    lengths = [40, 3, 497, 120]
    calls = [[(i, numbers(n, i)) for i, n in enumerate(lengths)][j : j + 1] for j in range(4)]
    calls += [
        [(3, [1, 2, 3]), (0, [5])],
        [(0, [7, 8]), (1, [1]), (3, [2, 2, 2, 2, 2])],
        [(2, [3, 4, 5])],
        [(1, [9])],
        [(4, numbers(16, 8)), (0, [1]), (1, [2]), (3, [4] * 9)],
    ]
    for call in calls:
        spans = [Span(sequence=s, start=plain.length(s), tokens=tokens, rows=min(3, len(tokens))) for s, tokens in call]
        found, wanted = gpu.rows(gpu.evaluate(spans)), plain.rows(plain.evaluate(spans))
        assert np.abs(found - wanted).max() < 1e-4
        assert [gpu.length(i) for i in range(5)] == [plain.length(i) for i in range(5)]
    for sequence in (0, 1, 3):  # what was written is what it should be
        assert np.abs(put(gpu, [6], sequence) - put(plain, [6], sequence)).max() < 1e-4


def test_rejected_tokens_leave_no_trace(gpu: TorchRuntime, plain: TorchRuntime) -> None:
    for runtime in (gpu, plain):
        runtime.free(0)
        put(runtime, numbers(30), 0)
        put(runtime, numbers(7, 5), 0)
        runtime.truncate(0, 32)
    assert np.abs(put(gpu, [1, 2], 0) - put(plain, [1, 2], 0)).max() < 1e-4


def test_draws_and_interrupts(gpu: TorchRuntime) -> None:
    handles = gpu.evaluate([Span(sequence=0, start=0, tokens=[4, 5, 6], rows=3)])
    ways = [Sampling(seed=1, top_k=9), Sampling(seed=2, temperature=0.0), Sampling(seed=3)]
    wanted = [draw(row, how, at) for at, (row, how) in enumerate(zip(gpu.rows(handles), ways, strict=True))]
    assert gpu.draw(handles, ways, [0, 1, 2]) == wanted
    gpu.interrupt()
    with pytest.raises(Interrupted):
        put(gpu, [1])
    gpu.resume()
    assert gpu.length(0) == 3


def test_shapes_of_graphs() -> None:
    def shape(*pieces: tuple[int, int]) -> Shape | None:
        made = [Piece(i, 0, count, start) for i, (count, start) in enumerate(pieces)]
        return shape_of(made, batch_limit=6, room=1100)

    assert shape((1, 0)) == Shape(1, 1, 512)
    assert shape((1, 511)) == Shape(1, 1, 512)
    assert shape((1, 512)) == Shape(1, 1, 1024)
    assert shape((3, 509), (1, 2)) == Shape(2, 4, 1024)  # the padded row reaches farther
    assert shape((1, 1030), (9, 4), (2, 4)) == Shape(4, 16, 1100)
    assert shape(*[(1, 0)] * 5) == Shape(6, 1, 512)
    assert shape(*[(1, 0)] * 7) is None
    assert shape((17, 0)) is None
    assert Shape(4, 8, 512).numbers == 72


def test_numbers_and_rows_of_a_padded_call() -> None:
    pieces = [Piece(7, 0, 2, 100), Piece(3, 2, 1, 5)]
    shape = Shape(4, 2, 512)
    ids, positions, slots, ends = np.split(laid_out(shape, [11, 12, 13], pieces, spare=9), [8, 16, 20])
    assert ids.tolist() == [11, 12, 13, 0, 0, 0, 0, 0]
    assert positions.tolist() == [100, 101, 5, 6, 0, 1, 0, 1]
    assert slots.tolist() == [7, 3, 9, 9]
    assert ends.tolist() == [102, 7, 2, 2]
    assert rows_of(shape, pieces, [0, 1, 2]) == [0, 1, 2]
    assert rows_of(Shape(2, 8, 512), pieces, [1, 2]) == [1, 8]


def test_a_graph_is_captured_once_for_each_shape() -> None:
    captured: list[Shape] = []

    def capture(shape: Shape, inputs: Tensor) -> Replay:
        captured.append(shape)
        return Rerun(lambda _, given: given.double(), shape, inputs)

    graphs = Graphs(capture, torch.device("cpu"))
    one, two = Shape(1, 1, 512), Shape(1, 2, 512)
    assert graphs.run(one, [1, 2, 3, 4]).tolist() == [1, 2, 3, 4]
    assert graphs.run(two, [1, 2, 3, 4, 5, 6]).tolist() == [1, 2, 3, 4, 5, 6]
    assert graphs.run(one, [9, 2, 3, 4]).tolist() == [9, 2, 3, 4]
    assert captured == [one, two]
    assert len(graphs) == 2


def test_a_flash_kernel_is_believed_only_when_it_is_right(plain: TorchRuntime) -> None:
    config: ModelConfig = plain._decoder.config
    with torch.inference_mode():
        slab = Slab(config, sequences=2, context=64, dtype=torch.bfloat16, device=torch.device("cpu"))
        assert cuda.working_flash(config, slab, flash) is flash
        assert cuda.working_flash(config, slab, lambda *given: flash(*given) * 1.2) is None
        assert cuda.working_flash(config, slab) is None  # torch has it for CUDA only
        exact = Slab(config, sequences=2, context=64, dtype=torch.float32, device=torch.device("cpu"))
        assert cuda.working_flash(config, exact, flash) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_on_a_real_gpu(folder: Path, dtype: str) -> None:
    cpu, gpu = load(folder, dtype=dtype), load(folder, dtype=dtype, device="cuda")
    limit = 1e-3 if dtype == "float32" else 1.0
    calls = [[(0, numbers(100))], [(0, [1]), (1, [2, 3])], [(0, [4, 5, 6, 7])], [(0, [8])], [(0, [9])]]
    for call in calls:
        spans = [Span(sequence=s, start=cpu.length(s), tokens=tokens, rows=1) for s, tokens in call]
        handles = gpu.evaluate(spans)
        assert np.abs(gpu.rows(handles) - cpu.rows(cpu.evaluate(spans))).max() < limit
        ways = [Sampling(seed=3, top_p=0.9)] * len(handles)
        wanted = [draw(row, how, 5) for row, how in zip(gpu.rows(handles), ways, strict=True)]
        assert gpu.draw(handles, ways, [5] * len(handles)) == wanted
    state = gpu.export_state(0)
    assert gpu.import_state(2, state)
    assert np.allclose(put(gpu, [1], 2), put(gpu, [1], 0), atol=1e-3 if dtype == "float32" else 0.2)
