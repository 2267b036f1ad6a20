"""The torch runtime on one CUDA device, in less than eight minutes: is it right, and how close to the memory's speed is it.

    python benchmarks/gpu.py [--device cuda] [--models llama-3-8b qwen3-1.7b] [--json] [--save FILE]
    python benchmarks/gpu.py --device cpu        # the same with small shapes, in seconds; says nothing of speed

Checks, on small random models of both families, float32, bfloat16 and int8:
  oracle     logits beside those of the CPU runtime, which the tests compare with transformers
  graphs     captured graphs beside single kernels: logits
  draws      tokens drawn on the device beside those that the rule draws from the same logits
  identity   the token drawn at each position of a text, at temperatures 0 and 1, in calls of 1, 2, 4, 8 and 16 tokens and in a
             batch of 8: where one differs from that of single tokens, the two must be closer than the width moves logits

Measured, with random bfloat16 weights in the shapes of published models: plain decoding as a share of the bandwidth that
copying reaches in the same run (bytes of weights a token reads over its time, over bytes read and written), graphs beside
eager, int8 weights, the cost of verifying 1 to 16 tokens, the first token on a warm and on a cold prefix, and suffix
speculation on a copy with typos (the model's chain of tokens, every twelfth of the prompt's replaced).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
from benchmarks._gpu_checks import DTYPES, check, empty, loaded, put, some, without_graphs  # noqa: E402 - however it is started
from benchmarks._random_model import SHAPES, chain  # noqa: E402

from cachespec.backends._startup import EngineSettings, start_engine  # noqa: E402
from cachespec.engine.costs import CalibrationStore  # noqa: E402
from cachespec.engine.loop import Engine  # noqa: E402
from cachespec.engine.runtimes.base import Runtime  # noqa: E402
from cachespec.engine.runtimes.torch import TorchRuntime  # noqa: E402
from cachespec.engine.runtimes.torch.cuda import CudaStep  # noqa: E402
from cachespec.engine.runtimes.torch.devices import pick_device  # noqa: E402
from cachespec.engine.sampling import Sampling  # noqa: E402
from cachespec.engine.sequence import Job  # noqa: E402

GREEDY: Final = Sampling(seed=0, temperature=0.0)
TYPO: Final = 12
"""Every so many tokens of the text that is copied, one is wrong."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `prefix`, `context`, `answer` in tokens; `copied` bytes for the bandwidth."""

    models: tuple[str, ...]
    prefix: int
    context: int
    answer: int
    rounds: int
    copied: int


FULL: Final = Scale(("llama-3-8b", "qwen3-1.7b"), prefix=8192, context=9216, answer=128, rounds=5, copied=1 << 30)
SMALL: Final = Scale(("small-llama", "small-qwen3"), prefix=192, context=288, answer=24, rounds=2, copied=1 << 20)


class Kept:
    """A runtime that is emptied, not closed, when an engine ends."""

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def close(self) -> None:
        empty(self._runtime)


def copy_bandwidth(device: torch.device, size: int, rounds: int) -> float:
    """Bytes a second that are read and written when `size` bytes are copied on the device; the median."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def once() -> None:
        target.copy_(source)
        target[-1].item()  # waits for it

    return 2 * size / statistics.median(timed(once, 2 * rounds))


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round; one before them is to warm up."""
    found = []
    for _ in range(rounds + 1):
        begin = perf_counter()
        work()
        found.append(perf_counter() - begin)
    return found[1:]


def decoding(runtime: TorchRuntime, count: int) -> Callable[[], float]:
    """Seconds a token of greedy decoding behind a prompt of 64 tokens, drawn on the device, by one step after the other."""

    def run() -> float:
        runtime.truncate(0, 64)
        token = 1
        begin = perf_counter()
        for at in range(64, 64 + count):
            (token,) = runtime.draw(put(runtime, [token]), [GREEDY], [at + 1])
        return (perf_counter() - begin) / count

    empty(runtime)
    put(runtime, some(64, runtime.info.vocab), rows=0)
    run()
    return run


def measure(name: str, device: torch.device, scale: Scale) -> dict[str, Any]:
    """Everything that is measured of a shape."""
    row: dict[str, Any] = {"model": name}
    began = perf_counter()
    with loaded(name, device, "bfloat16", scale.context, made_on=device) as runtime:
        bandwidth = copy_bandwidth(device, scale.copied, scale.rounds)
        reads = runtime._decoder.token_reads
        row |= {"parameters": runtime.info.parameters, "attention": runtime.facts()["attention"], "copy_bandwidth": bandwidth}
        row |= decode_rows(runtime, scale, reads / bandwidth)
        row["verify"] = verify_costs(runtime, scale.rounds)
        row["prefix"] = prefix_times(runtime, scale)
    with loaded(name, device, "bfloat16", scale.context, made_on=device, chained=True) as runtime:
        row["copy"] = copy_task(runtime, scale)
    with loaded(name, device, "int8", scale.context, made_on=device) as runtime:
        run = decoding(runtime, scale.answer)
        row["int8_ms"] = statistics.median(run() for _ in range(scale.rounds)) * 1e3
    if device.type == "cuda":
        row["memory"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return row | {"seconds": perf_counter() - began}


def decode_rows(runtime: TorchRuntime, scale: Scale, fastest: float) -> dict[str, Any]:
    """Plain decoding, with and without graphs, in turns. `fastest`: seconds to read all weights as fast as memory is copied."""
    run, usual = decoding(runtime, scale.answer), runtime._step
    bare = without_graphs(runtime) if isinstance(usual, CudaStep) else None
    times: dict[str, list[float]] = {"graphs": [], "eager": []}
    for turn in range(scale.rounds + 1):  # the first is to warm up
        for kind, step in (("graphs", usual), ("eager", bare)):
            if step is not None:
                runtime._step = step
                took = run()
                times[kind] += [took] if turn else []
    runtime._step = usual
    ours = statistics.median(times["graphs"])
    eager = statistics.median(times["eager"]) if bare is not None else None
    return {
        "decode_ms": ours * 1e3,
        "decode_ms_range": [min(times["graphs"]) * 1e3, max(times["graphs"]) * 1e3],
        "share": fastest / ours,
        "eager_ms": None if eager is None else eager * 1e3,
        "graphs_gain": None if eager is None else eager / ours,
    }


def verify_costs(runtime: TorchRuntime, rounds: int) -> dict[int, float]:
    """Milliseconds of a call of 1 to 16 tokens behind 64, every row drawn from, by turns; medians."""
    empty(runtime)
    tokens = some(80, runtime.info.vocab)
    put(runtime, tokens[:64], rows=0)
    times: dict[int, list[float]] = {width: [] for width in range(1, 17)}
    for turn in range(4 * rounds + 1):
        for width in times:
            begin = perf_counter()
            rows = put(runtime, tokens[64 : 64 + width])
            runtime.draw(rows, [GREEDY] * width, range(65, 65 + width))
            took = perf_counter() - begin
            runtime.truncate(0, 64)
            times[width] += [took] if turn else []
    return {width: statistics.median(found) * 1e3 for width, found in times.items()}


@contextmanager
def engine_on(runtime: TorchRuntime, scale: Scale, folder: Path, *, drafts: bool) -> Iterator[Engine]:
    """The engine as a backend starts it."""
    empty(runtime)
    settings = EngineSettings(
        name="gpu", context=scale.context, parallel=1, prefill_chunk=min(512, scale.prefix), max_gap=4.0, kv_tokens=None,
        host_cache_mb=0, keep_warm=300.0, deterministic=False, draft={"use": "suffix"} if drafts else None, acceptance=None,
    )  # fmt: skip
    started = start_engine(cast("Runtime", Kept(runtime)), settings, _no_draft_model, store=CalibrationStore(folder))
    try:
        yield started.engine
    finally:
        started.engine.close()


def _no_draft_model(model: str, runtime: str | None) -> Runtime:
    raise ValueError("the suffix drafter needs none")


def ask(engine: Engine, prompt: Sequence[int], output: int) -> tuple[float, float, list[int], int]:
    """Seconds to the first token and from there to the end, the answer, and how much of the prompt was there."""
    begin, first = perf_counter(), None
    running = engine.submit(Job(prompt=tuple(prompt), sampling=GREEDY, output=output))
    while True:
        ready, ended, events = threading.Event(), running.done, running.take()
        if events and first is None:
            first = perf_counter()
        if ended and not events:
            break
        if not events and running.when_ready(ready.set):
            ready.wait()
    if running.error is not None:
        raise running.error
    end = perf_counter()
    usage = running.usage
    return (first or end) - begin, end - (first or end), running.tokens[len(prompt) :], (usage.cache_read or 0) if usage else 0


def prefix_times(runtime: TorchRuntime, scale: Scale) -> dict[str, Any]:
    """Time to the first token with a prefix that nobody saw before, and with the same and another end."""
    cold, warm, hits = [], [], []
    vocab = runtime.info.vocab
    with tempfile.TemporaryDirectory() as folder, engine_on(runtime, scale, Path(folder), drafts=False) as engine:
        for turn in range(4):
            prefix = some(scale.prefix, vocab, seed=100 + turn)
            first = ask(engine, [*prefix, *some(16, vocab, seed=1)], 4)[0]
            second, _, _, hit = ask(engine, [*prefix, *some(16, vocab, seed=2)], 4)
            if turn:
                cold.append(first)
                warm.append(second)
                hits.append(hit)
    ours, theirs = statistics.median(warm), statistics.median(cold)
    found = {"tokens": scale.prefix, "cold_ms": theirs * 1e3, "warm_ms": ours * 1e3, "share": ours / theirs}
    return found | {"hit_tokens": min(hits)}


def copy_task(runtime: TorchRuntime, scale: Scale) -> dict[str, Any]:
    """A text with typos is written again without them: plainly and with suffix drafts, in turns."""
    vocab, count = runtime.info.vocab, 2 * scale.answer
    times: dict[bool, list[float]] = {False: [], True: []}
    right = True
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(scale.rounds + 1):
            for drafts in (False, True):
                start = 17 + turn * 31
                clean = chain(start, count + 1, vocab)
                prompt = [(t + vocab // 2) % vocab if i % TYPO == TYPO - 1 else t for i, t in enumerate(clean)]
                with engine_on(runtime, scale, Path(folder), drafts=drafts) as engine:
                    _, took, answer, _ = ask(engine, [*prompt[: scale.context // 2 - 1], start], count)
                right = right and answer == clean[1:]
                times[drafts] += [took / (count - 1)] if turn else []
    told = {str(key): statistics.median(found) * 1e3 for key, found in times.items()}
    return {
        "plain_ms": told["False"],
        "suffix_ms": told["True"],
        "gain": told["False"] / told["True"],
        "repeats": 1 - 1 / TYPO,
        "texts_are_right": right,
    }


def tables(report: dict[str, Any]) -> str:
    lines = [f"{report['device']}, torch {report['torch']}, {report['seconds']:.0f} s in all", ""]
    lines += [
        "| model | dtype | attention | oracle | graphs | draws | equal draws | widest gap / effect | right |",
        "| --- " * 9 + "|",
    ]
    for c in report["checks"]:
        graphs = "-" if c["graphs"] is None else f"{c['graphs']:.1e}"
        same = c["identity"]
        gaps = f"{same['widest_gap']:.1e} / {same['effect']:.1e}"
        lines.append(
            f"| {c['model']} | {c['dtype']} | {c['attention']} | {c['oracle']:.1e} | {graphs} | {c['draws']} "
            f"| {same['share']:.4f} | {gaps} | {c['right']} |"
        )
    lines += [
        "",
        "| model | attention | copy GB/s | ms a token | share of it | eager ms | graphs' gain | peak GB |",
        "| --- " * 8 + "|",
    ]
    for m in report["models"]:
        eager = "-" if m["eager_ms"] is None else f"{m['eager_ms']:.2f}"
        gain = "-" if m["graphs_gain"] is None else f"{m['graphs_gain']:.2f}x"
        memory = f"{m['memory'] / 1e9:.1f}" if "memory" in m else "-"
        lines.append(
            f"| {m['model']} | {m['attention']} | {m['copy_bandwidth'] / 1e9:.0f} | {m['decode_ms']:.2f} | {m['share']:.0%} "
            f"| {eager} | {gain} | {m['int8_ms']:.2f} | {memory} |"
        )
    lines += ["", "| model | " + " | ".join(f"t({n})/t(1)" for n in range(2, 17)) + " |", "| --- " * 16 + "|"]
    for m in report["models"]:
        costs = [m["verify"][n] / m["verify"][1] for n in range(2, 17)]
        lines.append(f"| {m['model']} | " + " | ".join(f"{cost:.2f}" for cost in costs) + " |")
    lines += ["", "| model | first token cold ms | warm ms | warm / cold | hit | copy: plain ms | suffix ms | gain | right |"]
    lines += ["| --- " * 9 + "|"]
    for m in report["models"]:
        p, c = m["prefix"], m["copy"]
        lines.append(
            f"| {m['model']} | {p['cold_ms']:.1f} ({p['tokens']} tokens) | {p['warm_ms']:.1f} | {p['share']:.1%} "
            f"| {p['hit_tokens']} | {c['plain_ms']:.2f} | {c['suffix_ms']:.2f} | {c['gain']:.2f}x | {c['texts_are_right']} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all checks are right, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args(arguments)
    device = pick_device(given.device)
    scale = FULL if device.type == "cuda" else SMALL
    began = perf_counter()
    report: dict[str, Any] = {"device": str(device), "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        report["device"] = torch.cuda.get_device_name(device)
    report["checks"] = [check(name, dtype, device) for name in ("small-llama", "small-qwen3") for dtype in DTYPES]
    report["models"] = [measure(name, device, scale) for name in given.models or scale.models]
    report["seconds"] = perf_counter() - began
    if given.save is not None:
        given.save.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1) if given.json else tables(report))
    texts = all(m["copy"]["texts_are_right"] for m in report["models"])
    return 0 if texts and all(c["right"] for c in report["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
