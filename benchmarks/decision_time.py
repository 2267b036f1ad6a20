"""How long a decision takes: 100 messages, 117 tools, six backends, 10,000 known prefixes, everything from equal copies.

    python benchmarks/decision_time.py [--rounds 400] [--tools FILE] [--json]

Each round parses a request's JSON anew, so that no object is known, and times `Client.plan` on it: once as it is, and once in
two parts (reading, and cutting and deciding). All but the last two messages were seen in the round before, and were sent to
the first backend, as were the other conversations; "cold" is the first time in a fresh client. Beside them, in the same rounds
and on copies of their own, stands what cannot be avoided by anyone who must notice that something in 117 tools has changed: a
bare ``==`` with the tools known, which even takes ``True`` for ``1``.
Times are microseconds, by the clock and of the processor: where others compute, too, the clock tells of them. `--tools` is a
JSON list in Chat Completions' shape; without it such a list is made up.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from cachespec.client import Client
from cachespec.request import build_request
from cachespec.usage import Usage

MESSAGES, TOOLS, CONVERSATIONS, TURNS = 100, 117, 500, 20
WORDS = "the request was read and the answer came back with what had been asked for in the first place "
BACKENDS: dict[str, dict[str, str]] = {
    "claude": {"use": "anthropic", "model": "claude-sonnet-4-5", "api_key": "k"},
    "opus": {"use": "anthropic", "model": "claude-opus-4-5", "api_key": "k"},
    "gpt": {"use": "openai", "model": "gpt-5.2", "api_key": "k"},
    "gpt-chat": {"use": "openai", "model": "gpt-4.1", "api": "chat", "api_key": "k"},
    "groq": {"use": "compatible", "server": "groq", "model": "llama-3.3-70b-versatile", "api_key": "k"},
    "vllm": {"use": "compatible", "server": "vllm", "model": "m", "base_url": "http://127.0.0.1:9/v1"},
}


def made_up_tools() -> list[dict[str, Any]]:
    def tool(i: int) -> dict[str, Any]:
        properties = {
            f"argument_{j}": {"type": "string", "description": f"{WORDS[: 40 + 5 * j]}", "enum": ["one", "two"]}
            for j in range(2 + i % 9)
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)[:2]}
        return {"type": "function", "function": {"name": f"tool_{i}", "description": WORDS * 2, "parameters": schema}}

    return [tool(i) for i in range(TOOLS)]


def history(name: str, count: int, last: str) -> list[dict[str, Any]]:
    """A conversation with tools: of four messages one calls a tool and one brings its result; the last two hold `last`."""
    said: list[dict[str, Any]] = []
    for i in range(count):
        text = f"{name} {i} {last if i >= count - 2 else ''}: {WORDS * (4 + i % 13)}"
        call = {"id": f"call_{i - i % 4}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"q": text})}}
        said.append(
            (
                {"role": "user", "content": text},
                {"role": "assistant", "content": None, "tool_calls": [{**call, "id": f"call_{i}"}]},
                {"role": "tool", "tool_call_id": f"call_{i - 1}", "content": text},
                {"role": "assistant", "content": text},
            )[i % 4]
        )
    return said


def make_client() -> Client:
    return Client(backends=BACKENDS, models={"any": list(BACKENDS)}, model="any", max_output_tokens=1_000)


def send(client: Client, **asked: Any) -> None:
    """Have the first backend answer a request, as far as planning can tell: what was in it is known, and believed cached."""
    verdict = client.plan_request(build_request(model=next(iter(BACKENDS)), memory=client._memory, **asked))
    caching, now, planned = client._now.caching, client._clock.time(), verdict.planned
    assert planned is not None
    assert planned.tokens is not None
    tokens, sent = planned.tokens, caching.sent(planned, now)
    caching.began(sent, now)
    usage = Usage(uncached=tokens.uncached, cache_read=tokens.cache_read, cache_write=tokens.writes, output=100)
    caching.ended(sent, usage=usage, stop="tool_calls", now=now)


Times: TypeAlias = tuple[float, float]
"""Microseconds by the clock, and of the processor."""


def spread(times: list[Times]) -> dict[str, float]:
    clock = sorted(clock for clock, _ in times)
    last = clock[min(len(clock) - 1, int(len(clock) * 0.99))]
    return {"p50": statistics.median(clock), "p99": last, "cpu p50": statistics.median(cpu for _, cpu in times)}


def timed(work: Callable[..., Any], *given: Any, **named: Any) -> tuple[Times, Any]:
    start, cpu = time.perf_counter(), time.thread_time()
    result = work(*given, **named)
    used = time.thread_time() - cpu
    return ((time.perf_counter() - start) * 1e6, used * 1e6), result


def measure(rounds: int, tools: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    def text(i: int) -> str:
        return json.dumps({"messages": history("main", MESSAGES, f"round {i}"), "tools": tools, "system": WORDS * 80})

    first = text(-1)
    cold = [timed(client.plan, **json.loads(first))[0] for client in [make_client() for _ in range(5)]]
    client = make_client()
    for n in range(CONVERSATIONS):
        send(client, messages=history(f"other {n}", TURNS, ""), tools=json.loads(json.dumps(tools)), session_id=f"s{n}")
    send(client, **json.loads(first))
    client.plan(**json.loads(first))
    known = json.loads(first)
    seen = known["messages"][: MESSAGES - 2]
    found: dict[str, list[Times]] = {}

    def note(name: str, value: Times) -> None:
        found.setdefault(name, []).append(value)

    for i in range(rounds):
        whole, decision = timed(client.plan, **json.loads(text(2 * i)))
        note("plan, whole", whole)
        note("decided_in_us", (decision.decided_in_us, decision.decided_in_us))
        send(client, **json.loads(text(2 * i)))
        reading, request = timed(build_request, **json.loads(text(2 * i + 1)), memory=client._memory)
        note("reading the request", reading)
        note("from the built request on", timed(client.plan_request, request)[0])
        body = json.loads(first)
        note("floor: == over the tools", timed(operator.eq, body["tools"], known["tools"])[0])
        note("floor: == over the messages", timed(operator.eq, body["messages"][: MESSAGES - 2], seen)[0])
    return {"plan, cold": spread(cold), **{name: spread(times) for name, times in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--tools", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tools = made_up_tools() if options.tools is None else json.loads(options.tools.read_text())
    found = measure(options.rounds, tools)
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{len(tools)} tools, {MESSAGES} messages, {len(BACKENDS)} backends, {CONVERSATIONS * TURNS} known prefixes\n")
    print(f"| {'microseconds':30} | {'p50':>8} | {'p99':>8} | {'cpu p50':>8} |\n| --- | --- | --- | --- |")
    for name, row in found.items():
        print(f"| {name:30} | {row['p50']:8.0f} | {row['p99']:8.0f} | {row['cpu p50']:8.0f} |")


if __name__ == "__main__":
    main()
