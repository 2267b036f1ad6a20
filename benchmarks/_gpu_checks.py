"""Whether the torch runtime is right on a device: beside the CPU, beside itself without graphs, at every width of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
from benchmarks._random_model import RandomCheckpoint

from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.runtimes.torch import TorchRuntime
from cachespec.engine.runtimes.torch.cuda import CudaStep
from cachespec.engine.sampling import Sampling, draw, gumbel, key, words

GREEDY: Final = Sampling(seed=0, temperature=0.0)
WARM: Final = Sampling(seed=7, temperature=1.0)
CUT: Final = Sampling(seed=3, top_p=0.9, top_k=40, temperature=0.8)
WIDTHS: Final = (1, 2, 4, 8, 16)
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
LIMITS: Final = {"float32": 1e-3, "bfloat16": 1.0, "int8": 1.0}
"""Largest difference of a logit, of those that reach 9 here and have a deviation of 2. A residual stream of 16 bits, which a
GPU has and a CPU not, moves them by up to 0.5; rows that are mixed up would differ by 10."""

Row: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


@contextmanager
def loaded(
    name: str,
    device: torch.device,
    dtype: str,
    context: int,
    *,
    sequences: int = 4,
    made_on: torch.device,
    chained: bool = False,
) -> Iterator[TorchRuntime]:
    checkpoint = RandomCheckpoint(name, device=made_on, dtype=DTYPES[dtype], chained=chained)
    runtime = TorchRuntime.load(
        checkpoint, context=context, sequences=sequences, device=str(device), dtype=cast("Any", dtype), threads=threads(device)
    )
    try:
        yield runtime
    finally:
        runtime.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def threads(device: torch.device) -> int | None:
    return 1 if device.type == "cpu" else None


def empty(runtime: Runtime) -> None:
    for sequence in range(runtime.sequences):
        runtime.free(sequence)


def put(runtime: Runtime, tokens: Sequence[int], sequence: int = 0, rows: int | None = None) -> list[int]:
    """Evaluate at the end of a sequence; handles of the last rows, of all by default."""
    span = Span(sequence=sequence, start=runtime.length(sequence), tokens=tokens, rows=len(tokens) if rows is None else rows)
    return runtime.evaluate([span])


def some(count: int, vocab: int, seed: int = 0) -> list[int]:
    return [key(seed, i) % vocab for i in range(count)]


def check(name: str, dtype: str, device: torch.device) -> dict[str, Any]:
    """One model in one precision. `right` says whether all of it is as it should be."""
    home = torch.device("cpu")
    with loaded(name, home, dtype, 256, sequences=8, made_on=home) as there:
        tokens = some(150, there.info.vocab)
        calls = [tokens[:100], tokens[100:101], tokens[101:104], tokens[104:120], tokens[120:121], tokens[121:]]
        wanted = np.concatenate([there.rows(put(there, call)) for call in calls])
    with loaded(name, device, dtype, 256, sequences=8, made_on=home) as here:
        found = np.concatenate([here.rows(put(here, call)) for call in calls])
        graphs, drawn = eager_beside(here, tokens), True
        handles = put(here, tokens[:16], 1)
        for ways in ([GREEDY] * 16, [WARM] * 16, [CUT] * 16):
            rule = [draw(row, how, at) for at, (row, how) in enumerate(zip(here.rows(handles), ways, strict=True))]
            drawn = drawn and here.draw(handles, ways, range(16)) == rule
        same = identity(here, tokens, LIMITS[dtype])
        kernel = here.facts()["attention"]
    oracle = float(np.abs(found - wanted).max())
    right = oracle <= LIMITS[dtype] and drawn and same["explained"] and (graphs or 0.0) <= LIMITS[dtype]
    row = {"model": name, "dtype": dtype, "attention": kernel, "oracle": oracle, "graphs": graphs, "draws": drawn}
    return row | {"identity": same, "right": bool(right)}


def eager_beside(runtime: TorchRuntime, tokens: list[int]) -> float | None:
    """The largest difference of a logit between a step made of graphs and one without; None where there are no graphs."""
    if not isinstance(runtime._step, CudaStep):
        return None
    graphs, rows = runtime._step, []
    for step in (graphs, without_graphs(runtime)):
        runtime._step = step
        runtime.free(2)
        rows.append(np.concatenate([runtime.rows(put(runtime, tokens[i : i + 4], 2)) for i in range(0, 60, 4)]))
    runtime._step = graphs
    runtime.free(2)
    return float(np.abs(rows[0] - rows[1]).max())


def without_graphs(runtime: TorchRuntime) -> CudaStep:
    step = cast("CudaStep", runtime._step)
    return CudaStep(step._decoder, step._slab, step._table, runtime._switch, flash=step._flash, capture=None)


def identity(runtime: TorchRuntime, tokens: list[int], limit: float) -> dict[str, Any]:
    """Whether the width of calls, or company in them, changes what is drawn, and whether rounding, of which `limit` is the
    most, explains it."""
    count = 96
    seen: dict[str, Row] = {}
    for width in WIDTHS:
        empty(runtime)
        seen[f"width {width}"] = np.concatenate(
            [runtime.rows(put(runtime, tokens[i : i + width])) for i in range(0, count, width)]
        )
    empty(runtime)
    together = []
    for i in range(count):  # eight sequences one token apart
        spans = [Span(sequence=s, start=i, tokens=tokens[i : i + 1], rows=1) for s in range(runtime.sequences)]
        together.append(runtime.rows(runtime.evaluate(spans)[-1:]))
    seen["batch"] = np.concatenate(together)
    empty(runtime)
    plain = seen["width 1"]
    effect = max(float(np.abs(rows - plain).max()) for rows in seen.values())
    equal = total = 0
    widest = 0.0
    for how in (GREEDY, WARM):
        base = [draw(row, how, at + 1) for at, row in enumerate(plain)]
        for rows in seen.values():
            for at, row in enumerate(rows):
                other = draw(row, how, at + 1)
                total, equal = total + 1, equal + (other == base[at])
                if other != base[at]:
                    widest = max(widest, gap(plain[at], how, at + 1, base[at], other))
    return {"share": equal / total, "effect": effect, "widest_gap": widest, "explained": widest <= 2 * effect <= 2 * limit}


def gap(row: Row, how: Sampling, position: int, first: int, second: int) -> float:
    """By how much one token's score is above another's, the noise that both get included."""
    ids = np.array([first, second])
    scores = row[ids].astype(np.float64)
    if how.temperature:
        scores = scores / how.temperature + gumbel(words(how.seed, position, ids))
    return float(abs(scores[0] - scores[1]))
