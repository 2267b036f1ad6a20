"""Streams of a local engine, and of llama.cpp's server beside it, as one event loop reads them; when their tokens came."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import anyio
import httpx2
from benchmarks._local import Kept

from cachespec.backends._engine_attempt import EngineAttempt
from cachespec.engine.loop import Engine
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job
from cachespec.events import TextDelta

OPENINGS = (
    "The harbour was quiet in the early morning, and the fishermen were mending their nets",
    "Snow had fallen over the pass during the night, so the mail coach could not leave before",
    "The history of the clock begins long before there were gears, with water and with",
    "In the north of the country there is a lake whose name nobody remembers, because",
    "A good loaf of bread needs very little: flour, water, salt and the patience to",
    "The engine of the old ferry was built by two brothers who had never before seen",
    "When the railway came to the valley the farmers were divided over the question whether",
    "Of all the birds that visit the island in the spring, the smallest one is",
)
"""Prose to go on with, for as long as one likes."""


class Endless(Kept):
    """A runtime of which no token ends an answer, so that all streams run for as long as they are wanted.

    Every token is a letter: one that is no text, or half a character, would make two gaps look like one.
    """

    def is_end(self, token: int) -> bool:
        return False

    def piece(self, token: int) -> bytes:
        return b"x"


def endless(runtime: Runtime) -> Runtime:
    """See `Endless`."""
    return cast("Runtime", Endless(runtime))


@dataclass(slots=True)
class Times:
    """When a stream's text came: the times of its reads, and how many tokens there were by then."""

    began: float = field(default_factory=perf_counter)
    at: list[float] = field(default_factory=list)
    count: list[int] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        self.at.append(perf_counter())
        self.count.append(tokens + (self.count[-1] if self.count else 0))

    def by(self, moment: float) -> int:
        """Tokens that had come."""
        found = bisect_right(self.at, moment)
        return self.count[found - 1] if found else 0

    def gaps(self, begin: float, end: float) -> list[float]:
        """Times between reads that ended after `begin` and began before `end`."""
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False) if b > begin and a < end]


def together(streams: Sequence[Times]) -> float:
    """Tokens a second of all streams while all of them ran."""
    begin, end = max(s.at[0] for s in streams), min(s.at[-1] for s in streams)
    return sum(s.by(end) - s.by(begin) for s in streams) / (end - begin)


async def stream(engine: Engine, prompt: Sequence[int], output: int, times: Times | None = None) -> Times:
    """One greedy request without any KV of others, read to its end."""
    found = Times() if times is None else times
    job = Job(prompt=tuple(prompt), sampling=Sampling(seed=0, temperature=0.0), output=output, cache="off")
    attempt = EngineAttempt(engine.submit(job), backend="bench", model="bench", deadline=None)
    try:
        while events := await attempt.read():
            tokens = sum(isinstance(event, TextDelta) for event in events)
            if tokens:
                found.add(tokens)
    finally:
        await attempt.aclose()
    return found


async def at_once(starts: Sequence[Callable[[], Awaitable[Times]]]) -> list[Times]:
    """All of them, in one event loop."""
    found: dict[int, Times] = {}

    async def one(number: int) -> None:
        found[number] = await starts[number]()

    async with anyio.create_task_group() as tasks:
        for number in range(len(starts)):
            tasks.start_soon(one, number)
    return [found[number] for number in range(len(starts))]


class Server:
    """llama.cpp's server in its own process. `cpu_s` is what it used until now."""

    def __init__(self, process: subprocess.Popen[str], client: httpx2.AsyncClient) -> None:
        self._process, self._client = process, client

    @property
    def cpu_s(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def stream(self, prompt: str, output: int) -> Times:
        body: dict[str, Any] = {"prompt": prompt, "n_predict": output, "stream": True, "temperature": 0.0}
        body |= {"ignore_eos": True, "cache_prompt": False}
        found = Times()
        async with self._client.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: ") and json.loads(line[6:]).get("content"):
                    found.add(1)
        return found


@asynccontextmanager
async def server(python: str, *, threads: int, slots: int, context: int, model: str = "smollm2") -> AsyncIterator[Server]:
    """The server, for as long as it is needed. `python` is an interpreter that has xllamacpp."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "peers" / "llamacpp_server.py"
    command = [python or sys.executable, str(script), str(find_model(model)), *map(str, (port, threads, slots, context))]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=null) as process:
        try:
            assert process.stdout is not None
            if "ready" not in process.stdout.readline():
                raise RuntimeError("the server did not start")
            fresh = httpx2.Limits(max_keepalive_connections=0)  # it closes idle connections when it likes
            base = f"http://127.0.0.1:{port}"
            async with httpx2.AsyncClient(base_url=base, timeout=300, trust_env=False, limits=fresh) as client:
                yield Server(process, client)
        finally:
            process.kill()
