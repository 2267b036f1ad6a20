"""Many streams at once, paced streams beside a bare client's, and memory after ten thousand cancelled ones.

    python benchmarks/soak.py [--streams 1000] [--cancelled 10000] [--json]

One client process against one loopback server process. Prints what was lost or mixed up (must be nothing), the gaps between
chunks of 100 streams paced at 20 ms for cachespec and for bare httpx2 (interleaved), and the resident memory after 1,000
and after all cancelled streams (Linux only).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

from cachespec import Client, TextDelta

ROOT = Path(__file__).resolve().parents[1]


def client_of(url: str, model: str) -> Client:
    table = {
        "use": "openai",
        "api": "chat",
        "model": model,
        "api_key": "none",
        "base_url": f"{url}/v1",
    }
    return Client(backends={"b": table})


async def at_once(url: str, count: int) -> dict[str, Any]:
    wrong = 0
    async with client_of(url, "echo") as client:

        async def one(number: int) -> None:
            nonlocal wrong
            text = f"number {number} " * 20
            wrong += (await client.complete(text)).text != text

        start = time.perf_counter()
        await asyncio.gather(*(one(n) for n in range(count)))
        return {"streams": count, "wrong": wrong, "seconds": time.perf_counter() - start}


def spread(gaps: list[float]) -> dict[str, float]:
    gaps.sort()
    return {name: gaps[int(q * (len(gaps) - 1))] * 1000 for name, q in {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}.items()}


async def paced(url: str, rounds: int = 3) -> dict[str, Any]:
    ours: list[float] = []
    bare: list[float] = []
    model = "ok-50+drip-20"
    async with client_of(url, model) as client, httpx2.AsyncClient(timeout=60, limits=httpx2.Limits()) as http:

        async def one() -> None:
            async with client.stream("Hi") as stream:
                last = None
                async for event in stream:
                    if type(event) is TextDelta:
                        now = time.perf_counter()
                        if last is not None:
                            ours.append(now - last)
                        last = now

        async def other() -> None:
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                last = None
                async for _ in response.aiter_bytes():
                    now = time.perf_counter()
                    if last is not None:
                        bare.append(now - last)
                    last = now

        for _ in range(rounds):
            await asyncio.gather(*(one() for _ in range(100)))
            await asyncio.gather(*(other() for _ in range(100)))
    return {"cachespec": spread(ours), "httpx2": spread(bare)}


def resident() -> int | None:
    gc.collect()
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return int(status.split("VmRSS:")[1].split()[0])


async def cancelled(url: str, count: int) -> dict[str, Any]:
    first = min(1000, count)
    async with client_of(url, "ok-50+drip-1") as client:

        async def many(number: int) -> int | None:
            limit = asyncio.Semaphore(50)

            async def leave() -> None:
                async with limit, client.stream("Hi") as stream:
                    async for _ in stream.text_stream:
                        return

            await asyncio.gather(*(leave() for _ in range(number)))
            return resident()

        base = await many(first)
        grown = await many(count - first)
        totals = await client.ledger.totals()
    ratio = None if base is None or grown is None else grown / base
    return {"cancelled": count, "settled": totals.requests, "kib_after_1000": base, "kib_after_all": grown, "ratio": ratio}


async def run(url: str, streams: int, count: int) -> dict[str, Any]:
    return {
        "at_once": await at_once(url, streams),
        "paced_20_ms_x100": await paced(url),
        "cancelled": await cancelled(url, count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--cancelled", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    command = [sys.executable, "-m", "tests.wire.server", "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        report = asyncio.run(run(server.stdout.readline().strip(), args.streams, args.cancelled))
        server.terminate()
    print(json.dumps(report, indent=2) if args.json else "\n".join(f"{name}: {value}" for name, value in report.items()))


if __name__ == "__main__":
    main()
