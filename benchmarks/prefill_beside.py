"""A long prompt that comes in while streams run: what they feel of it, and what it loses.

    python -m benchmarks.prefill_beside {llamacpp,float32,bfloat16,int8} [--threads 1] [--max-gap 4 ...] [--prompt 4000]

The long prompt is first evaluated alone. Then --streams streams run, quiet for --quiet tokens each, and the prompt comes in.
Gaps are times between two reads of a stream; those of the prompt's time are compared with the quiet ones, p99 with p99.
`max_gap` and `prefill_chunk` are the engine's policy (options of a backend): how many times longer than a quiet step one may
take that prefills beside running streams, and the most prompt tokens of a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from time import perf_counter, process_time
from typing import Any

import anyio
from benchmarks._local import machine, prompts, quantile
from benchmarks._speculation import busy_s
from benchmarks._streams import OPENINGS, Times, endless, stream
from benchmarks.batching import RUNTIMES, load

from cachespec.engine.loop import Engine
from cachespec.engine.runtimes.base import Runtime

ROOM = 768
"""Tokens of a stream, its prompt included; they end with the prefill in any case."""


async def alone(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds to the first token."""
    times = await stream(engine, prompt, 1)
    return times.at[0] - times.began


async def beside(engine: Engine, openings: Sequence[Sequence[int]], prompt: Sequence[int], quiet: int) -> dict[str, Any]:
    """Gaps before the prompt comes and while it is evaluated, and how long that takes."""
    streams = [Times() for _ in openings]
    output = ROOM - max(map(len, openings))
    async with anyio.create_task_group() as tasks:
        for opening, times in zip(openings, streams, strict=True):
            tasks.start_soon(stream, engine, opening, output, times)
        while min((s.count[-1] if s.count else 0) for s in streams) < 2:
            await anyio.sleep(0.005)
        begin = perf_counter()
        while min(s.by(perf_counter()) - s.by(begin) for s in streams) < quiet:
            await anyio.sleep(0.005)
        end = perf_counter()
        took = await alone(engine, prompt)
        after = perf_counter()
        ran = all(s.count[-1] < output for s in streams)
        tasks.cancel_scope.cancel()
    return {
        "quiet": [gap for s in streams for gap in s.gaps(begin, end)],
        "loaded": [gap for s in streams for gap in s.gaps(end, after)],
        "seconds": took,
        "ran": ran,
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    flash = {"auto": None, "on": True, "off": False}[given.flash_attention]
    size = given.prompt + ROOM
    runtime = load(
        given.runtime, threads=given.threads, streams=given.streams + 1, context=size, width=given.chunk, flash_attention=flash
    )
    openings = [runtime.tokenize(OPENINGS[i % len(OPENINGS)], special=False) for i in range(given.streams)]
    text = runtime.tokenize("\n\n".join(prompts(200)), special=False)
    prompt = (text * (1 + given.prompt // len(text)))[: given.prompt]
    found = []
    try:
        for max_gap in given.max_gap:
            busy, own, began = busy_s(), process_time(), perf_counter()
            result = one(runtime, openings, prompt, max_gap, given)
            others = (busy_s() - busy - (process_time() - own)) / (perf_counter() - began)
            found.append({"max_gap": max_gap, "others": max(0.0, others), **result})
    finally:
        runtime.close()
    return {"runs": found}


def one(
    runtime: Runtime, openings: Sequence[Sequence[int]], prompt: Sequence[int], max_gap: float, given: argparse.Namespace
) -> dict[str, Any]:
    """One policy, on an engine of its own."""
    engine = Engine(endless(runtime), parallel=given.streams + 1, prefill_chunk=given.chunk, max_gap=max_gap)
    engine.start()
    try:
        plain = [anyio.run(alone, engine, prompt)]
        found = anyio.run(beside, engine, openings, prompt, given.quiet)
        plain.append(anyio.run(alone, engine, prompt))
    finally:
        engine.close()
    return {"alone": statistics.mean(plain), **found}


def table(given: argparse.Namespace, report: dict[str, Any]) -> str:
    what = f"{given.threads} threads, {given.streams} streams, a prompt of {given.prompt:,} tokens, chunks of {given.chunk}"
    kernel = f", flash attention {given.flash_attention}" if given.runtime == "llamacpp" else ""
    lines = [f"{machine()}; {given.runtime}, {what}{kernel}", ""]
    head = ("max_gap", "quiet p50, p99, ms", "beside p50, p99, ms", "p99 (target <= 5)", "prompt alone, beside, s")
    lines += ["| " + " | ".join([*head, "speed (target >= 0.5)", "others"]) + " |", "| --- |" + " --- |" * 6]
    for run in report["runs"]:
        quiet, loaded = ([quantile(run[name], q) * 1e3 for q in (0.5, 0.99)] for name in ("quiet", "loaded"))
        cells = [f"{run['max_gap']:g}", f"{quiet[0]:.0f}, {quiet[1]:.0f}", f"{loaded[0]:.0f}, {loaded[1]:.0f}"]
        cells += [f"{loaded[1] / quiet[1]:.2f}", f"{run['alone']:.1f}, {run['seconds']:.1f}"]
        cells += [
            f"{run['alone'] / run['seconds']:.2f}{'' if run['ran'] else ' (streams ended early)'}",
            f"{run['others']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("runtime", choices=RUNTIMES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--quiet", type=int, default=40)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--max-gap", type=float, nargs="+", default=[4.0])
    parser.add_argument("--flash-attention", choices=("auto", "on", "off"), default="auto", help="of llama.cpp")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    report = measure(given)
    print(json.dumps(report) if given.json else table(given, report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
