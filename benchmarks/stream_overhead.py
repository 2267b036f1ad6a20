"""CPU per streamed chunk and added time to first token: cachespec, bare httpx2, the OpenAI SDK and any-llm-sdk.

    python benchmarks/stream_overhead.py [--rounds 5] [--chunks 10000] [--peer-python VENV/bin/python] [--json]

Every contender reads the same bytes from the same loopback server. Each measurement is a process of its own; rounds are
interleaved (a, b, c, a, b, c...) and medians with the spread are printed, so a busy machine disturbs all of them alike.
CPU is the client process's own (`time.process_time`), which leaves the server out. any-llm-sdk needs its own virtual
environment (``pip install 'any-llm-sdk[openai]'``), given by --peer-python; without it that row is left out, and said so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = ("cachespec", "cachespec-sqlite", "httpx2", "openai", "any-llm")


# ---- contenders: each reads one stream to its end and returns (chunks of text, seconds to the first) ----------------


async def bare_httpx2(url: str) -> tuple[Callable[[str], Awaitable[tuple[int, float]]], Callable[[], Awaitable[None]]]:
    import httpx2

    client = httpx2.AsyncClient(timeout=60)

    async def once(model: str) -> tuple[int, float]:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        start, first, size = time.perf_counter(), 0.0, 0
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            async for data in response.aiter_bytes():
                first = first or time.perf_counter() - start
                size += data.count(b'"delta"')
        return size, first

    return once, client.aclose


async def openai_sdk(url: str) -> tuple[Callable[[str], Awaitable[tuple[int, float]]], Callable[[], Awaitable[None]]]:
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def once(model: str) -> tuple[int, float]:
        start, first, count = time.perf_counter(), 0.0, 0
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async with stream:
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    first = first or time.perf_counter() - start
                    count += 1
        return count, first

    return once, client.close


async def any_llm(url: str) -> tuple[Callable[[str], Awaitable[tuple[int, float]]], Callable[[], Awaitable[None]]]:
    from any_llm import AnyLLM

    client = AnyLLM.create("openai", api_key="none", api_base=f"{url}/v1")

    async def once(model: str) -> tuple[int, float]:
        start, first, count = time.perf_counter(), 0.0, 0
        stream: Any = await client.acompletion(model=model, messages=[{"role": "user", "content": "Hi"}], stream=True)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter() - start
                count += 1
        return count, first

    async def close() -> None:
        return None

    return once, close


async def cachespec_client(
    url: str, ledger: dict[str, Any] | None = None
) -> tuple[Callable[[str], Awaitable[tuple[int, float]]], Callable[[], Awaitable[None]]]:
    from cachespec.client import Client
    from cachespec.events import TextDelta

    clients: dict[str, Client] = {}

    def client_for(model: str) -> Client:
        if model not in clients:
            backend = {
                "use": "openai",
                "api": "chat",
                "model": model,
                "api_key": "none",
                "base_url": f"{url}/v1",
            }
            clients[model] = Client(backends={"b": backend}, ledger=ledger)
        return clients[model]

    async def once(model: str) -> tuple[int, float]:
        client = client_for(model)
        start, first, count = time.perf_counter(), 0.0, 0
        async with client.stream("Hi") as stream:
            async for event in stream:
                if type(event) is TextDelta:
                    first = first or time.perf_counter() - start
                    count += 1
        return count, first

    async def close() -> None:
        for client in clients.values():
            await client.aclose()

    return once, close


async def worker(name: str, url: str, model: str, repeat: int, expected: int, scratch: str) -> dict[str, Any]:
    makers: dict[str, Callable[[], Any]] = {
        "cachespec": lambda: cachespec_client(url),
        "cachespec-sqlite": lambda: cachespec_client(url, {"use": "sqlite", "path": f"{scratch}/ledger.db"}),
        "httpx2": lambda: bare_httpx2(url),
        "openai": lambda: openai_sdk(url),
        "any-llm": lambda: any_llm(url),
    }
    once, close = await makers[name]()
    # Imports, connections and the parser's first use are paid before the clock starts.
    await once("ok-10")
    await once(model)
    firsts: list[float] = []
    start = time.process_time()
    for _ in range(repeat):
        count, first = await once(model)
        if count < expected:
            raise SystemExit(f"{name} saw {count} chunks of {expected}")
        firsts.append(first)
    cpu = time.process_time() - start
    await close()
    return {"us_per_chunk": cpu / repeat / expected * 1e6, "ttft_ms": [f * 1000 for f in firsts]}


# ---- the harness ----------------------------------------------------------------------------------------------------


def run_worker(python: str, name: str, url: str, model: str, repeat: int, expected: int, scratch: str) -> dict[str, Any]:
    command = [python, __file__, "--worker", name, "--url", url, "--model", model]
    command += ["--repeat", str(repeat), "--expected", str(expected), "--scratch", scratch]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=10_000, help="chunks of a coalesced stream")
    parser.add_argument("--paced", type=int, default=1_000, help="chunks of a stream at 1 ms pacing")
    parser.add_argument("--first", type=int, default=300, help="short streams for the time to first token, a round")
    parser.add_argument("--peer-python", help="the python of a virtual environment with any-llm-sdk[openai]")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--repeat", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--expected", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(asyncio.run(worker(args.worker, args.url, args.model, args.repeat, args.expected, args.scratch))))
        return
    import tempfile

    command = [sys.executable, "-m", "tests.wire.server", "--port", "0"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    pythons = dict.fromkeys(CONTENDERS, sys.executable)
    if args.peer_python:
        pythons["any-llm"] = args.peer_python
    else:
        del pythons["any-llm"]
        print("any-llm-sdk left out: no --peer-python given", file=sys.stderr)
    modes = {
        "coalesced": (f"ok-{args.chunks}", 1, args.chunks),
        "coalesced/10": (f"ok-{args.chunks // 10}", 10, args.chunks // 10),
        "paced 1 ms": (f"ok-{args.paced}+drip-1", 1, args.paced),
        "short": ("ok-5", args.first, 5),
    }
    results: dict[str, dict[str, list[dict[str, Any]]]] = {m: {c: [] for c in pythons} for m in modes}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for _ in range(args.rounds):
                for mode, (model, repeat, expected) in modes.items():
                    for name, python in pythons.items():
                        results[mode][name].append(run_worker(python, name, url, model, repeat, expected, scratch))
    finally:
        server.terminate()
        server.wait()
    report: dict[str, Any] = {"rounds": args.rounds, "cpu_us_per_chunk": {}, "ttft_ms": {}, "checks": {}}
    for mode in modes:
        for name in pythons:
            values = [r["us_per_chunk"] for r in results[mode][name]]
            entry = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            report["cpu_us_per_chunk"].setdefault(mode, {})[name] = entry
    for name in pythons:
        firsts = [f for r in results["short"][name] for f in r["ttft_ms"]]
        report["ttft_ms"][name] = {q: quantile(firsts, v) for q, v in {"p50": 0.5, "p90": 0.9, "p99": 0.99}.items()}
    report["checks"] = checks(report)
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for mode, rows in report["cpu_us_per_chunk"].items():
        if mode == "short":
            continue
        print(f"\nCPU per chunk, {mode}: microseconds, median [min, max] of {args.rounds} rounds")
        for name, entry in rows.items():
            print(f"  {name:18} {entry['median']:8.2f}  [{entry['min']:.2f}, {entry['max']:.2f}]")
    print(f"\ntime to first token of a short stream: ms over {args.rounds * args.first} requests each")
    for name, entry in report["ttft_ms"].items():
        print(f"  {name:18} p50 {entry['p50']:6.2f}   p90 {entry['p90']:6.2f}   p99 {entry['p99']:6.2f}")
    print()
    for text, value in report["checks"].items():
        print(f"  {text}: {value:.3f}")


def checks(report: dict[str, Any]) -> dict[str, float]:
    cpu, ttft = report["cpu_us_per_chunk"], report["ttft_ms"]

    def median(mode: str, name: str) -> float:
        return float(cpu[mode][name]["median"])

    return {
        "cachespec minus httpx2, coalesced (us, target <= 20)": median("coalesced", "cachespec")
        - median("coalesced", "httpx2"),
        "cachespec minus httpx2, paced (us, target <= 20)": median("paced 1 ms", "cachespec") - median("paced 1 ms", "httpx2"),
        "cachespec / openai, coalesced (target <= 0.35)": median("coalesced", "cachespec") / median("coalesced", "openai"),
        "per chunk at 10x the chunks / at 1x (linear: about 1)": median("coalesced", "cachespec")
        / median("coalesced/10", "cachespec"),
        "added time to first token, memory ledger, p50 (ms, target < 0.5)": ttft["cachespec"]["p50"] - ttft["openai"]["p50"],
        "added time to first token, memory ledger, p99 (ms, target < 2)": ttft["cachespec"]["p99"] - ttft["openai"]["p99"],
        "added time to first token, sqlite ledger, p50 (ms)": ttft["cachespec-sqlite"]["p50"] - ttft["openai"]["p50"],
        "added time to first token, sqlite ledger, p99 (ms)": ttft["cachespec-sqlite"]["p99"] - ttft["openai"]["p99"],
    }


if __name__ == "__main__":
    main()
