"""A simulated day: what routing saves, against every single backend, against chance, and against greedy hindsight.

    python benchmarks/day.py [--data ../shared/data] [--coding 25] [--support 100] [--max-ttft 6] [--json]

Support conversations with tools and coding-agent sessions start at random moments of a day; each goes on at its own pace. A
real client decides for each request between two hosted vendors, with different prices, minimum lengths and lifetimes, and a
local engine with a queue (`_simulated.py`). Each run is the same day under another routing: `cheapest` within a limit of time
to the first token and without one, each backend alone, the engine wherever it keeps the limit, chance, and greedy hindsight:
at each request, from the state that is there, the cheapest candidate by true cost that keeps the limit by its true time.
`cheapest` is held against it twice: against the day that hindsight lives, and request by request from the states that it
came to (where paying more now to pay less later counts against it). The coding sessions hold an eighth of their tokens.

Without `--data` both kinds of traffic are made up.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import trio
import trio.testing

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._simulated import Pace, SimulatedClock, SimulatedEngine, SimulatedVendor, Truth

from cachespec.cache_terms import PromptCache
from cachespec.caching import CacheTerms, Lifetime
from cachespec.client import Client
from cachespec.decision import Ask, Offer
from cachespec.ledger.memory import MemoryLedger
from cachespec.messages import Message, TextPart
from cachespec.pricing import hosted_rates, local_rates
from cachespec.request import Request, build_request

DAY_S = 86_400.0
SCALE = 8
"""The coding sessions' tokens are divided by this: deciding costs the same, and hashing a day's prompts does not take one."""
NAMES = ("claude", "gpt", "laptop")
WORDS = ("flight", "ticket", "seat", "change", "refund", "date", "card", "name", "passport", "hotel", "bag", "meal", "gate")


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session, `gap_s` after the answer to the one before, and how long its answer will be."""

    request: Request
    gap_s: float
    output: int


@dataclass(frozen=True, slots=True)
class Conversation:
    name: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(slots=True)
class Result:
    """What a day cost, in USD, and how it went."""

    routing: str
    requests: int = 0
    cost: Decimal = Decimal(0)
    hindsight: Decimal = Decimal(0)
    late: int = 0
    slow: int = 0
    possible: int = 0
    chosen: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "routing": self.routing,
            "requests": self.requests,
            "cost": str(round(self.cost, 6)),
            "greedy_hindsight": str(round(self.hindsight, 6)),
            "over_hindsight": None if not self.hindsight else round(float(self.cost / self.hindsight) - 1, 4),
            "slower_than_limit": self.slow,
            "kept_limit": None if not self.possible else round(1 - self.late / self.possible, 4),
            "chosen": self.chosen,
        }


def support(path: Path | None, count: int, draw: random.Random) -> Iterator[Conversation]:
    """Support conversations: a request before each answer; a person takes half a minute, a tool a second."""
    if path is not None:
        sessions = [task["traj"] for task in json.loads(gzip.decompress(path.read_bytes()))]
    else:
        sessions = [_made_up(draw, i) for i in range(count)]
    for i, messages in enumerate(sessions[:count]):
        turns = []
        for j, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            request = build_request(messages=[_clean(m) for m in messages[:j]], session_id=f"support-{i}", tags=["support"])
            person = messages[j - 1]["role"] == "user"
            gap = draw.lognormvariate(3.4, 0.9) if person else draw.uniform(0.3, 2.0)
            size = len(json.dumps(message.get("tool_calls") or message.get("content") or ""))
            turns.append(Turn(replace(request, max_output_tokens=1_000), gap, max(size // 4, 8)))
        yield Conversation(f"support-{i}", draw.uniform(0, DAY_S * 0.8), tuple(turns))


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None and key != "function_call"}


def _made_up(draw: random.Random, number: int) -> list[dict[str, Any]]:
    words = WORDS

    def text(n: int) -> str:
        return " ".join(draw.choices(words, k=n))

    policy = " ".join(random.Random(7).choices(words, k=1_500))
    messages: list[dict[str, Any]] = [{"role": "system", "content": policy}]
    for i in range(draw.randint(2, 8)):
        call = {"id": f"c{number}-{i}", "type": "function", "function": {"name": "look_up", "arguments": '{"id":1}'}}
        messages += [
            {"role": "user", "content": text(draw.randint(5, 60))},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": text(draw.randint(20, 200))},
            {"role": "assistant", "content": text(draw.randint(10, 120))},
        ]
    return messages


def coding(path: Path | None, count: int, draw: random.Random) -> Iterator[Conversation]:
    """Coding-agent sessions: prompts of the recorded shape, each block a line of text of its own."""
    for i, rows in enumerate(_sessions(path, count, draw)):
        turns: list[tuple[Turn, list[int]]] = []
        ends: list[int] = []
        before = 0.0
        for row in rows:
            blocks = [b for first, n in row["blocks"] for b in range(first, first + n)]
            ends = [end for end in ends if end < len(blocks) and _same(turns[-1][1], blocks, end)] if turns else []
            bounds = [0, *ends, len(blocks)]
            messages = tuple(
                Message(role="user", parts=(TextPart(text="".join(f"{i}:{b:<{256 // SCALE}}" for b in blocks[x:y])),))
                for x, y in itertools.pairwise(bounds)
                if y > x
            )
            request = Request(messages=messages, session_id=f"coding-{i}", tags=("coding",), max_output_tokens=1_000)
            gap = min(max(row["t"] - before, 0.5), 7_200.0)
            before = row["t"] + (row.get("api_time") or 5.0)
            turns.append((Turn(request, gap, max(row["output"] // SCALE, 8)), blocks))
            ends.append(len(blocks))
        yield Conversation(f"coding-{i}", draw.uniform(0, DAY_S * 0.6), tuple(turn for turn, _ in turns))


def _same(a: Sequence[int], b: Sequence[int], end: int) -> bool:
    return list(a[:end]) == list(b[:end])


def _sessions(path: Path | None, count: int, draw: random.Random) -> Iterator[list[dict[str, Any]]]:
    if path is None:
        for _ in range(count):
            rows, t, size = [], 0.0, draw.randint(150, 400)
            for _ in range(draw.randint(5, 40)):
                rows.append({"t": t, "blocks": [[1, 120], [1_000, size]], "output": draw.randint(50, 1_500), "api_time": 6.0})
                size += draw.randint(2, 40)
                t += draw.choice([8.0, 15.0, 20.0, 30.0, 400.0])
            yield rows
        return
    found: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            found.setdefault(row["trace"], []).append(row)
    fit = [rows for rows in found.values() if 10 <= len(rows) <= 80]
    yield from draw.sample(fit, min(count, len(fit)))


def world(lengths: dict[tuple[str, int], int]) -> dict[str, Any]:
    """Three backends: a dear vendor with a long lifetime, a cheap one with a high minimum and one lifetime, an engine."""

    def length(request: Request) -> int:
        return lengths.get((request.session_id or "", len(request.messages)), 100)

    def lifetime(name: str, seconds: float, write: float) -> Lifetime:
        return Lifetime(name=name, seconds=seconds, write=write)

    dear = CacheTerms(lifetimes=(lifetime("5m", 300, 1.25), lifetime("1h", 3_600, 2.0)), read=0.1, minimum=512, slots=4)
    cheap = CacheTerms(lifetimes=(lifetime("5m", 240, 1.25),), read=0.25, minimum=2_048, slots=4)
    prices = {"input": "2", "cache_read": "0.2", "cache_write": {"5m": "2.5", "1h": "4"}, "output": "10"}
    lower = {"input": "1.4", "cache_read": "0.35", "cache_write": {"5m": "1.75"}, "output": "7"}
    return {
        "claude": SimulatedVendor(
            cache=PromptCache(terms=dear, control="blocks", api="messages"),
            name="claude",
            model="dear-1",
            provider="anthropic",
            rates=hosted_rates(None, "dear-1", prices=prices),
            pace=Pace(first_s=0.6, prefill=9_000, cached=90_000, decode=70),
            lengths=length,
            bytes_per_token=3.6,
        ),
        "gpt": SimulatedVendor(
            cache=PromptCache(terms=cheap, control="blocks", api="messages"),
            name="gpt",
            model="cheap-1",
            provider="anthropic",
            rates=hosted_rates(None, "cheap-1", prices=lower),
            pace=Pace(first_s=0.9, prefill=6_000, cached=60_000, decode=50),
            lengths=length,
            bytes_per_token=4.3,
        ),
        "laptop": SimulatedEngine(
            context=16_384,
            kept=60_000,
            name="laptop",
            model="local-1",
            rates=local_rates({"per_hour": "3.00"}),
            pace=Pace(first_s=0.05, prefill=900, cached=1e9, decode=45, scatter=0.05),
            lengths=length,
            bytes_per_token=4.0,
        ),
    }


@dataclass(frozen=True, slots=True)
class Preferred:
    """A policy of one's own: the first of these that keeps the limit."""

    names: tuple[str, ...]
    max_ttft: float

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        def late(offer: Offer) -> bool:
            expected = offer.latency.ttft_high_ms or offer.latency.ttft_ms
            return expected is not None and expected > self.max_ttft * 1_000

        return sorted(offers, key=lambda o: (late(o), self.names.index(o.backend)))


async def day(
    routing: Any, label: str, sessions: Sequence[Conversation], max_ttft: float, *, watch: bool = False, follow: bool = False
) -> Result:
    """Live one day. With `watch` every decision is held against greedy hindsight, which costs three more of them; with
    `follow` it is hindsight that decides."""
    lengths = {(s.name, len(t.request.messages)): t.output for s in sessions for t in s.turns}
    backends, clock, result = world(lengths), SimulatedClock(), Result(label)
    ledger = MemoryLedger(clock=clock.time)
    models = {"main": list(NAMES)}
    async with Client(
        backends=backends, models=models, policies={"routing": routing}, model="main", ledger=ledger, clock=clock
    ) as client:

        async def live(session: Conversation) -> None:
            await anyio.sleep(session.start_s)
            for turn in session.turns:
                await anyio.sleep(turn.gap_s)
                request = turn.request
                best = hindsight(client, backends, request, max_ttft) if watch or follow else None
                if follow and best is not None:
                    request = replace(request, model=best[2])
                async with client.stream_request(request) as stream:
                    done = await stream.get_final_completion()
                result.requests += 1
                result.slow += (done.ttft_ms or 0) > max_ttft * 1_000
                result.chosen[done.backend] = result.chosen.get(done.backend, 0) + 1
                if watch and best is not None:
                    result.hindsight += best[0]
                    result.possible += best[1]
                    result.late += best[1] and (done.ttft_ms or 0) > max_ttft * 1_000

        async with anyio.create_task_group() as tasks:
            for session in sessions:
                tasks.start_soon(live, session)
        result.cost = (await ledger.totals()).amount
    return result


def hindsight(client: Client, backends: dict[str, Any], request: Request, max_ttft: float) -> tuple[Decimal, bool, str]:
    """The least that this request could truly cost now within the limit, whether any candidate keeps it, and whose cost it is.

    A tool loop has one candidate, where it began.
    """
    truths: list[tuple[Truth, str]] = []
    first = client.plan_request(request)
    loop = any(reason.code == "tool_loop" for c in first.decision.candidates for reason in c.reasons)
    for name in [first.decision.chosen] if loop else NAMES:
        verdict = client.plan_request(replace(request, model=name))
        plan = verdict.decision.plan
        if plan is not None:
            truths.append((backends[plan.backend].truth(request, plan, SimulatedClock().time()), plan.backend))
    kept = [(truth, name) for truth, name in truths if truth.ttft_s <= max_ttft]
    chosen, whose = min(kept or truths, key=lambda pair: pair[0].cost)
    return chosen.cost, bool(kept), whose


def traffic(data: Path | None, *, support_count: int, coding_count: int, seed: int) -> list[Conversation]:
    draw = random.Random(seed)
    airline = None if data is None else data / "agents/airline_support.json.gz"
    agents = None if data is None else data / "traces/coding_agent.jsonl.gz"
    return [*support(airline, support_count, draw), *coding(agents, coding_count, draw)]


def run(sessions: Sequence[Conversation], max_ttft: float) -> list[Result]:
    """The same day under every routing."""
    cheapest = {"use": "cheapest", "max_ttft": max_ttft}
    routings: dict[str, Any] = {
        "cheapest": cheapest,
        "cheapest, no limit": {"use": "cheapest"},
        **{f"only {name}": {"use": "pinned", "backend": name} for name in NAMES},
        "laptop in time": Preferred(("laptop", "claude", "gpt"), max_ttft),
        "random": {"use": "weighted", "weights": dict.fromkeys(NAMES, 1.0)},
        "greedy hindsight": cheapest,
    }
    results = []
    for label, routing in routings.items():
        clock = trio.testing.MockClock(autojump_threshold=0)
        results.append(trio.run(_day, routing, label, sessions, max_ttft, clock=clock))
    return results


async def _day(routing: Any, label: str, sessions: Sequence[Conversation], max_ttft: float) -> Result:
    return await day(routing, label, sessions, max_ttft, watch=label == "cheapest", follow=label == "greedy hindsight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--support", type=int, default=100)
    parser.add_argument("--coding", type=int, default=25)
    parser.add_argument("--max-ttft", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sessions = traffic(options.data, support_count=options.support, coding_count=options.coding, seed=options.seed)
    results = run(sessions, options.max_ttft)
    if options.json:
        print(json.dumps([r.to_dict() for r in results], indent=2))
        return
    for r in results:
        told = r.to_dict()
        print(f"{r.routing:18} {r.requests} requests  ${r.cost:.4f}  {r.slow} slower than the limit  {r.chosen}")
        if r.hindsight:
            beside = f"{told['over_hindsight']:+.1%} beside greedy hindsight, request by request"
            print(f"{'':18} {beside}; limit kept {told['kept_limit']:.2%}")


if __name__ == "__main__":
    main()
