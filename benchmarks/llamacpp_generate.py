"""Decoding speed of the llama.cpp runtime beside llama-cpp-python's own ``generate``: one sequence, the same file and threads.

    python -m benchmarks.llamacpp_generate [--model smollm2] [--threads 1] [--tokens 64] [--rounds 9] [--json]

Each round runs every candidate once, in turning order. The time is that between the first and the last token, so without
the prompt. `runtime` is the runtime alone; `engine` is one request through the engine, handed over to a reader in another
thread. Sampled runs use the defaults of llama-cpp-python: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05; there the two draw
other tokens by other rules, and only times are compared. Shares are medians of the rounds' ratios. llama-cpp-python runs as it
does by default, and with flash attention on, which is what llama.cpp chooses by itself and the runtime leaves to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import llama_cpp
from benchmarks._local import interleaved, machine, middle, read

from cachespec.engine.loop import Engine
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job

PROMPT = "The harbour was quiet in the early morning, and the fishermen were mending their nets while the gulls"
CONTEXT = 512
PEER, FLASH = "llama-cpp-python", "llama-cpp-python, flash attention"
HOW = {
    "greedy": Sampling(seed=1, temperature=0.0),
    "sampled": Sampling(seed=1, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
}
Timed = Callable[[], float]


def theirs(model: Any, prompt: Sequence[int], count: int, how: Sampling, made: list[int]) -> Timed:
    """Seconds a token of ``generate``; `made` gets the tokens."""

    def run() -> float:
        made.clear()
        start = 0.0
        for token in model.generate(
            list(prompt),
            temp=how.temperature,
            top_k=how.top_k or 0,
            top_p=how.top_p or 1.0,
            min_p=how.min_p or 0.0,
            repeat_penalty=1.0,
        ):
            made.append(token)
            if len(made) == 1:
                start = perf_counter()
            if len(made) == count:
                break
        return (perf_counter() - start) / (count - 1)

    return run


def bare(runtime: Runtime, prompt: Sequence[int], count: int, how: Sampling, made: list[int]) -> Timed:
    """The same of the runtime alone."""

    def run() -> float:
        runtime.free(0)
        row = runtime.evaluate([Span(sequence=0, start=0, tokens=prompt, rows=1)])
        made[:] = runtime.draw(row, [how], [len(prompt)])
        start = perf_counter()
        for at in range(len(prompt), len(prompt) + count - 1):
            row = runtime.evaluate([Span(sequence=0, start=at, tokens=made[-1:], rows=1)])
            made.extend(runtime.draw(row, [how], [at + 1]))
        took = (perf_counter() - start) / (count - 1)
        runtime.free(0)
        return took

    return run


def through_engine(engine: Engine, prompt: Sequence[int], count: int, how: Sampling, made: list[int]) -> Timed:
    """The same of one request through an engine, as its reader sees it."""

    def run() -> float:
        answer = read(engine.submit(Job(prompt=tuple(prompt), sampling=how, output=count, cache="off")))
        made[:] = answer.tokens
        return (answer.at[-1] - answer.at[0]) / (len(answer.at) - 1)

    return run


def measure(name: str, threads: int, tokens: int, rounds: int) -> dict[str, Any]:
    path = find_model(name)
    settings: dict[str, Any] = {"n_ctx": CONTEXT, "n_threads": threads, "n_threads_batch": threads, "seed": 1}
    peers = {
        PEER: llama_cpp.Llama(model_path=str(path), verbose=False, **settings),
        FLASH: llama_cpp.Llama(model_path=str(path), verbose=False, flash_attn=True, **settings),
    }
    runtime = LlamaCppRuntime(path, context=CONTEXT, threads=threads, sequences=2)
    prompt = runtime.tokenize(PROMPT, special=False)
    engine = Engine(LlamaCppRuntime(path, context=CONTEXT, threads=threads, sequences=2), parallel=1)
    engine.start()
    report: dict[str, Any] = {"threads": threads, "tokens": tokens, "rounds": rounds, "version": llama_cpp.__version__}
    try:
        for kind, how in HOW.items():
            made: dict[str, list[int]] = {name: [] for name in (*peers, "runtime", "engine")}
            times = interleaved(
                {
                    **{name: theirs(peer, prompt, tokens, how, made[name]) for name, peer in peers.items()},
                    "runtime": bare(runtime, prompt, tokens, how, made["runtime"]),
                    "engine": through_engine(engine, prompt, tokens, how, made["engine"]),
                },
                rounds,
            )
            shares = {
                name: {peer: statistics.median(a / b for a, b in zip(times[peer], own, strict=True)) for peer in peers}
                for name, own in times.items()
            }
            same = made["runtime"] == made["engine"] and (how.temperature > 0 or made["runtime"] == made[FLASH])
            report[kind] = {"ms": {n: [t * 1e3 for t in own] for n, own in times.items()}, "speed": shares, "same": same}
    finally:
        engine.close()
        runtime.close()
        for peer in peers.values():
            peer.close()
    return report


def table(report: dict[str, Any]) -> str:
    lines = [f"{machine()}, llama-cpp-python {report['version']}, {report['threads']} threads, {report['tokens']} tokens"]
    lines += ["", f"| | ms a token | speed beside {PEER} | beside that with flash attention |", "| --- | --- | --- | --- |"]
    for kind in HOW:
        for name, times in report[kind]["ms"].items():
            speeds = report[kind]["speed"][name]
            lines.append(f"| {kind}, {name} | {middle(times)} | {speeds[PEER]:.3f} | {speeds[FLASH]:.3f} |")
    lines += ["", f"- greedy, flash attention: the same tokens from all: {report['greedy']['same']}"]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    report = measure(given.model, given.threads, given.tokens, given.rounds)
    print(json.dumps(report, indent=2) if given.json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
