"""Many streams at once beside one: tokens a second of eight together, and of llama.cpp's own server with eight slots.

    python -m benchmarks.batching {llamacpp,float32,bfloat16,int8} [--threads 1] [--streams 8] [--tokens 64] [--rounds 5]
    python -m benchmarks.batching llamacpp --server [--peer-python PEER/bin/python]

Each round runs one stream alone and all together, in turning order; with --server the same against llama.cpp's server
(xllamacpp, in a process of its own, reached over loopback), with the same file and number of threads. Greedy, without a
drafter; no token ends an answer. The rate of many is that of the time in which all of them run. *Scale* is the rate together
over the rate alone. `bare` is the runtime without an engine: calls of one token, and of one of each sequence, draws included.
How much of a core other processes had meanwhile is told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Any

import anyio
from benchmarks._local import machine, middle
from benchmarks._speculation import undisturbed
from benchmarks._streams import OPENINGS, Server, at_once, endless, server, stream, together

from cachespec.engine.loop import Engine
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.sampling import Sampling

RUNTIMES = ("llamacpp", "float32", "bfloat16", "int8")
CONTEXT = 512
GREEDY = Sampling(seed=0, temperature=0.0)


def load(
    name: str, *, threads: int, streams: int, context: int = CONTEXT, width: int = 256, flash_attention: bool | None = None
) -> Runtime:
    """A runtime with room for so many streams, all of them as long as the context. `flash_attention`: of llama.cpp alone."""
    path = find_model("smollm2")
    if name == "llamacpp":
        from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime

        return LlamaCppRuntime(
            path,
            context=context,
            threads=threads,
            sequences=streams,
            room=streams * context,
            width=width,
            flash_attention=flash_attention,
        )
    from cachespec.engine.runtimes.torch import TorchRuntime

    dtype: Any = name
    return TorchRuntime.load(path, context=context, sequences=streams, device="cpu", dtype=dtype, threads=threads, width=width)


def bare(runtime: Runtime, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens a second of a loop around the runtime."""
    numbers = range(len(prompts))
    for i in numbers:
        runtime.free(i)
        runtime.evaluate([Span(sequence=i, start=0, tokens=prompts[i])])
    last = [prompt[-1] for prompt in prompts]
    start = perf_counter()
    for _ in range(tokens):
        spans = [Span(sequence=i, start=runtime.length(i), tokens=[last[i]], rows=1) for i in numbers]
        rows = runtime.evaluate(spans)
        last = runtime.draw(rows, [GREEDY] * len(rows), [span.start + 1 for span in spans])
    took = perf_counter() - start
    for i in numbers:
        runtime.free(i)
    return len(prompts) * tokens / took


def rounds_of(candidates: dict[str, Callable[[], float]], rounds: int, cpu_s: Callable[[], float]) -> dict[str, Any]:
    """Rates of all candidates, and what others had of a core meanwhile."""

    def measure(name: str) -> tuple[float, float]:
        before = cpu_s()
        return candidates[name](), cpu_s() - before

    found: dict[str, list[float]] = {name: [] for name in candidates}
    others: list[float] = []
    order = list(candidates)
    for turn in range(rounds + 1):
        for name in order:
            rate, share = undisturbed(partial(measure, name), tries=1)
            if turn:  # the first is to warm up
                found[name].append(rate)
                others.append(share)
        order = order[1:] + order[:1]
    return {"rates": found, "others": others}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    runtime = load(given.runtime, threads=given.threads, streams=given.streams)
    texts = [OPENINGS[i % len(OPENINGS)] for i in range(given.streams)]
    prompts = [runtime.tokenize(text, special=False) for text in texts]
    engine = Engine(endless(runtime), parallel=given.streams)
    engine.start()

    def ours(count: int) -> float:
        return together(anyio.run(at_once, [partial(stream, engine, prompt, given.tokens) for prompt in prompts[:count]]))

    async def theirs(peer: Server, count: int) -> float:
        return together(await at_once([partial(peer.stream, text, given.tokens) for text in texts[:count]]))

    candidates: dict[str, Callable[[], float]] = {
        "one": partial(ours, 1),
        "many": partial(ours, given.streams),
        "bare one": partial(bare, runtime, prompts[:1], given.tokens),
        "bare many": partial(bare, runtime, prompts, given.tokens),
    }
    try:
        if not given.server:
            return rounds_of(candidates, given.rounds, process_time)

        async def beside() -> dict[str, Any]:
            slots = {"threads": given.threads, "slots": given.streams, "context": CONTEXT}
            async with server(given.peer_python, **slots) as peer:
                return await anyio.to_thread.run_sync(with_peer, peer)

        def with_peer(peer: Server) -> dict[str, Any]:
            more = {"server one": 1, "server many": given.streams}
            asked = {name: partial(anyio.from_thread.run, theirs, peer, count) for name, count in more.items()}
            return rounds_of({**candidates, **asked}, given.rounds, lambda: process_time() + peer.cpu_s)

        return anyio.run(beside)
    finally:
        engine.close()
        runtime.close()


def table(given: argparse.Namespace, report: dict[str, Any]) -> str:
    rates = report["rates"]
    what = f"{given.streams} streams of {given.tokens} tokens, {given.rounds} rounds"
    lines = [f"{machine()}; {given.runtime}, {given.threads} threads, {what}"]
    lines += ["", "| | tokens a second, one | all together | scale |", "| --- | --- | --- | --- |"]
    scales = {}
    for name, prefix in (("engine", ""), ("bare runtime", "bare "), ("llama.cpp server", "server ")):
        if f"{prefix}one" in rates:
            one, many = rates[f"{prefix}one"], rates[f"{prefix}many"]
            scales[name] = [b / a for a, b in zip(one, many, strict=True)]
            lines.append(f"| {name} | {middle(one, digits=1)} | {middle(many, digits=1)} | {middle(scales[name])} |")
    lines += ["", f"- engine's scale / bare runtime's: {_ratio(scales, 'bare runtime')}"]
    if "llama.cpp server" in scales:
        lines.append(f"- engine's scale / the server's (target >= 0.9): {_ratio(scales, 'llama.cpp server')}")
    lines.append(f"- of a core, others had {middle(report['others'])}")
    return "\n".join(lines)


def _ratio(scales: dict[str, list[float]], name: str) -> str:
    return f"{statistics.median(scales['engine']) / statistics.median(scales[name]):.2f}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("runtime", choices=RUNTIMES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    report = measure(given)
    print(json.dumps(report) if given.json else table(given, report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
