"""The script that checks and measures a GPU, on a CPU and with small shapes: everything it does but the speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import _gpu_checks, gpu
from benchmarks._random_model import SHAPES, RandomCheckpoint, chain
from tests.engine.torch.support import torch
from tests.engine.torch.test_cuda import flash, rerun

from cachespec.engine.runtimes.torch import TorchRuntime, cuda
from cachespec.engine.sampling import Sampling

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds to it


def test_the_whole_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--device", "cpu", "--models", "small-llama", "--json", "--save", str(tmp_path / "report.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert [(c["model"], c["dtype"]) for c in report["checks"]] == [
        (model, dtype) for model in ("small-llama", "small-qwen3") for dtype in ("float32", "bfloat16", "int8")
    ]
    assert all(c["right"] and c["draws"] for c in report["checks"])
    (row,) = report["models"]
    assert row["parameters"] > 100_000
    assert 0 < row["share"] < 1
    assert row["eager_ms"] is None
    assert row["int8_ms"] > 0
    assert sorted(map(int, row["verify"])) == list(range(1, 17))
    assert row["prefix"]["hit_tokens"] >= row["prefix"]["tokens"] - 16
    assert row["copy"]["texts_are_right"]
    lines = gpu.tables(report | {"models": [row | {"verify": {int(n): ms for n, ms in row["verify"].items()}}]}).splitlines()
    assert sum("small-llama" in line for line in lines) == 3 + 3
    assert len({line.count("|") for line in lines if line.startswith("| model | first")}) == 1


def gpu_like(runtime: TorchRuntime, kernel: cuda.FlashKernel | None) -> TorchRuntime:
    """With the step of a GPU, whose graphs are passes that run at once."""
    step = runtime._step
    runtime._slab.cells.zero_()
    runtime._step = cuda.CudaStep(
        runtime._decoder, runtime._slab, step._table, runtime._switch, flash=kernel, capture=rerun  # type: ignore[attr-defined]
    )  # fmt: skip
    return runtime


@pytest.mark.parametrize("kernel", [None, flash])
def test_steps_with_and_without_graphs_are_compared(kernel: cuda.FlashKernel | None) -> None:
    with _gpu_checks.loaded("small-qwen3", CPU, "float32", 256, sequences=8, made_on=CPU) as runtime, torch.inference_mode():
        gpu_like(runtime, kernel)
        assert 0 <= (_gpu_checks.eager_beside(runtime, list(range(200))) or 0) < 1e-4
        assert isinstance(runtime._step, cuda.CudaStep)
        assert runtime._step.graphs is not None
        assert len(runtime._step.graphs) == 1
        found = gpu.decode_rows(runtime, gpu.SMALL, 1e-9)
        assert found["graphs_gain"] > 0
        same = _gpu_checks.identity(runtime, list(range(200)), 4e-3)
        assert same["explained"]
        assert same["effect"] < 1e-3


def test_what_rounding_does_not_explain_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that mixes rows up in calls of several."""
    with _gpu_checks.loaded("small-llama", CPU, "float32", 256, sequences=8, made_on=CPU) as runtime:
        rows = runtime.rows
        monkeypatch.setattr(runtime, "rows", lambda wanted: rows(list(wanted)[::-1]))
        same = _gpu_checks.identity(runtime, list(range(200)), 4e-3)
        assert same["share"] < 0.6
        assert not same["explained"]
    assert _gpu_checks.gap(torch.tensor([1.0, 3.0]).numpy(), Sampling(seed=0, temperature=0.0), 0, 0, 1) == 2.0


def test_a_chained_model_says_the_chain() -> None:
    with _gpu_checks.loaded("small-llama", CPU, "bfloat16", 128, made_on=CPU, chained=True) as runtime:
        prompt = [3, 400, 7, 511]
        handles = _gpu_checks.put(runtime, prompt)
        assert runtime.draw(handles, [_gpu_checks.GREEDY] * 4, range(4)) == [4, 401, 8, 0]
    assert chain(510, 4, 512) == [510, 511, 0, 1]


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_are_those_of_the_models(name: str) -> None:
    config = RandomCheckpoint(name, device=CPU, dtype=torch.bfloat16).config
    size = config.hidden * (config.heads + config.kv_heads) * config.head_dim * 2 + 3 * config.hidden * config.intermediate
    total = config.layers * size + config.vocab * config.hidden * (1 if config.tied else 2)
    known = {"llama-3-8b": 8.03e9, "qwen3-1.7b": 1.72e9}
    assert total == pytest.approx(known.get(name, total), rel=0.005)
