"""How long it takes to plan a request's use of a prompt cache, from the cut prompt to the plan.

    python benchmarks/planner.py [--rounds 400] [--tools FILE] [--json]

Each round is a conversation of its own with 117 tools, whose first 98 messages were sent and answered; timed is the request
with 100, made of new objects and read as a client reads it (reading is not in the time: `decision_time.py` has it). The
planner knows 10,000 other prefixes. "first" is a client that knows nothing. The policies are the default one and the fixed
ones. `--tools` is a JSON list of tools; without it such a list is made up. Times are microseconds by the clock and, in
brackets, of the processor, which others on the machine disturb less.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from cachespec.backends.anthropic import AnthropicBackend
from cachespec.backends.base import Backend
from cachespec.backends.openai import OpenAIBackend
from cachespec.cache_learning import Caching
from cachespec.cache_plan import Planned
from cachespec.decision import Ask
from cachespec.learned import Learned
from cachespec.prompt import Prompt, build_prompt
from cachespec.registry import create
from cachespec.request import Memory, build_request
from cachespec.telemetry import Telemetry
from cachespec.usage import Usage
from cachespec.warmth import Entry, scope_of

MESSAGES, TOOLS, KNOWN = 100, 117, 10_000
WORDS = "the request was read and the answer came back with what had been asked for in the first place "
POLICIES = ("expected-cost", "always", "last-message", "off", "caller")


def made_up_tools() -> list[dict[str, Any]]:
    def tool(i: int) -> dict[str, Any]:
        properties = {f"a{j}": {"type": "string", "description": WORDS[: 40 + 5 * j]} for j in range(2 + i % 9)}
        return {"name": f"tool_{i}", "description": WORDS * 2, "input_schema": {"type": "object", "properties": properties}}

    return [tool(i) for i in range(TOOLS)]


def conversation(name: int, count: int) -> list[dict[str, Any]]:
    """Turns of an agent: a question, a call, its result, an answer."""
    said: list[dict[str, Any]] = []
    for i in range(count):
        text = f"{name} {i}: {WORDS * (4 + i % 13)}"
        call = {"type": "tool_use", "id": f"call_{i}", "name": "tool_0", "input": {"q": text}}
        result = {"type": "tool_result", "tool_use_id": f"call_{i - 1}", "content": text}
        said.append(
            (
                {"role": "user", "content": text},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
                {"role": "assistant", "content": text},
            )[i % 4]
        )
    return said


def planner(policy: str) -> Caching:
    caching = Caching(create("caching", policy, {}, where="policies.caching"), Telemetry(), Learned())
    scope = scope_of("other")
    for _ in range(KNOWN):
        caching.warmth.put(scope, os.urandom(16), Entry("5m", 5_000, 0.0, 1e12))
    return caching


def asked(now: float) -> Ask:
    return Ask(
        alias="assistant",
        tenant="acme",
        session_id="s",
        tags=("agent",),
        tools=True,
        max_output_tokens=1_000,
        timeout_s=60.0,
        now=now,
    )


def prompt(name: int, count: int, tools: list[dict[str, Any]], memory: Memory) -> Prompt:
    said = conversation(name, count)
    return build_prompt(build_request(messages=said, tools=copy.deepcopy(tools), system=WORDS * 80, memory=memory))


def send(caching: Caching, backend: Backend, made: Prompt, now: float) -> None:
    """Plan, send and end a request that is answered as it was expected."""
    planned = caching.planner.plan(backend, made, asked(now))
    assert planned.tokens is not None
    sent = caching.sent(planned, now)
    caching.began(sent, now + 1)
    tokens = planned.tokens
    usage = Usage(uncached=tokens.uncached, cache_read=tokens.cache_read, cache_write=tokens.writes, output=100)
    caching.ended(sent, usage=usage, stop="tool_calls", now=now + 2)


def measure(backend: Backend, policy: str, rounds: int, tools: list[dict[str, Any]]) -> dict[str, float]:
    now = 1_800_000_000.0
    first: list[tuple[float, float]] = []
    for _ in range(10):
        fresh, made = planner(policy), prompt(0, MESSAGES, tools, Memory())
        first.append(timed(fresh, backend, made, now)[0])
    caching, memory = planner(policy), Memory()
    times: list[tuple[float, float]] = []
    for i in range(rounds):
        for count in (MESSAGES - 4, MESSAGES - 2):
            send(caching, backend, prompt(i, count, tools, memory), now)
            now += 10
        took, planned = timed(caching, backend, prompt(i, MESSAGES, tools, memory), now)
        times.append(took)
    found = {"marks": float(len(planned.plan.marks))}
    for i, name in enumerate(("", " cpu")):
        own, cold = sorted(pair[i] for pair in times), [pair[i] for pair in first]
        found |= {f"p50{name}": statistics.median(own), f"p99{name}": own[int(len(own) * 0.99)]}
        found |= {f"first{name}": statistics.median(cold)}
    return found


def timed(caching: Caching, backend: Backend, made: Prompt, now: float) -> tuple[tuple[float, float], Planned]:
    """Microseconds by the clock and of the processor, and the plan."""
    ask, begin, begin_cpu = asked(now), time.perf_counter(), time.thread_time()
    planned = caching.planner.plan(backend, made, ask)
    cpu, took = time.thread_time() - begin_cpu, time.perf_counter() - begin
    return (took * 1e6, cpu * 1e6), planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--tools", type=Path)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tools = made_up_tools() if options.tools is None else json.loads(options.tools.read_text())
    backends: dict[str, Backend] = {
        "anthropic": AnthropicBackend(name="b", model="claude-sonnet-5", api_key="k"),
        "openai 5.6": OpenAIBackend(name="b", model="gpt-5.6-sol", api_key="k"),
        "openai 5.4": OpenAIBackend(name="b", model="gpt-5.4", api_key="k"),
    }
    found = {
        f"{name}, {policy}": measure(backend, policy, options.rounds, tools)
        for name, backend in backends.items()
        for policy in options.policy or POLICIES
    }
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{len(tools)} tools, {MESSAGES} messages, {KNOWN} other prefixes known; microseconds\n")
    print(f"| {'vendor, policy':26} | {'p50':>12} | {'p99':>12} | {'first':>12} |\n| --- | --- | --- | --- |")
    for name, row in found.items():
        cells = [f"{row[column]:.0f} ({row[f'{column} cpu']:.0f})" for column in ("p50", "p99", "first")]
        print(f"| {name:26} | " + " | ".join(f"{cell:>12}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
