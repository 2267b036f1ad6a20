"""Backends of a simulated world: hosted vendors and a local engine that obey their rules to the token, in simulated time.

They implement the whole `Backend` contract, so a real `Client` runs on them: real decisions, real cache planning, real
learning, a real ledger. Time is trio's mock clock: a day takes as long as deciding takes. What they know and the client does
not: how many bytes a token has there, how fast they are, what their caches hold, and how long each answer will be.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b

import anyio

from cachespec.backends.base import Attempt, Capabilities, Estimate, Wire
from cachespec.cache_terms import PromptCache
from cachespec.decision import Belief, Latency, Plan, Reason, TokenEstimate
from cachespec.events import Event, Finished, ResponseStarted, TextDelta, UsageReported
from cachespec.pricing import Rates
from cachespec.prompt import Prompt, build_prompt
from cachespec.request import Request
from cachespec.testing import ALL_PARAMETERS
from cachespec.usage import Usage

START = 1_800_000_000.0
"""Unix time at which a simulated day begins."""


class SimulatedClock:
    """Unix time that goes with the event loop's own clock. Other threads, which see no loop, get what was last asked on it."""

    def __init__(self) -> None:
        self._last = START

    def time(self) -> float:
        with suppress(anyio.NoEventLoopError):
            self._last = START + anyio.current_time()
        return self._last

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a request would really be counted as, cost and take, were it sent now."""

    usage: Usage
    cost: Decimal
    ttft_s: float
    total_s: float


@dataclass(slots=True, kw_only=True)
class Pace:
    """How fast a backend is: seconds to a first token for nothing, tokens a second read, read from cache, and produced."""

    first_s: float
    prefill: float
    cached: float
    decode: float
    scatter: float = 0.2

    def seconds(self, usage: Usage, noise: random.Random) -> tuple[float, float]:
        read = usage.cache_read or 0
        fresh = (usage.input_tokens or 0) - read
        first = (self.first_s + fresh / self.prefill + read / self.cached) * noise.lognormvariate(0, self.scatter)
        return first, first + (usage.output or 0) / self.decode * noise.lognormvariate(0, self.scatter / 2)


@dataclass(slots=True, kw_only=True)
class Simulated:
    """What both kinds share. `lengths` gives the true output tokens of a request."""

    name: str
    model: str
    rates: Rates | None
    pace: Pace
    lengths: Callable[[Request], int]
    bytes_per_token: float = 4.0
    provider: str | None = None
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(parameters=ALL_PARAMETERS))

    async def start(self) -> None: ...

    def check(self, request: Request) -> Sequence[Reason]:
        return ()

    def wire(self, request: Request, plan: Plan) -> Wire | None:
        return None

    async def aclose(self) -> None: ...

    def tokens_to(self, prompt: Prompt, index: int) -> int:
        """True tokens of the prompt up to and with segment `index`."""
        return round(sum(s.size for s in prompt.segments[1 : index + 1]) / self.bytes_per_token) + 4 * index

    def noise(self, prompt: Prompt) -> random.Random:
        """The luck of this request here: the same whenever it is asked."""
        return random.Random(blake2b(prompt.digest + self.name.encode(), digest_size=8).digest())


class SimulatedVendor(Simulated):
    """A vendor that caches what is marked: reads the deepest live entry, writes what lies between it and deeper marks."""

    def __init__(self, *, cache: PromptCache, **known: object) -> None:
        super().__init__(**known)  # type: ignore[arg-type]
        self.capabilities = Capabilities(parameters=ALL_PARAMETERS, marks="anthropic", caching=cache)
        self.terms = cache.terms
        self.entries: dict[bytes, tuple[float, float, str]] = {}  # digest: readable from, dies at, lifetime

    def estimate(self, prompt: Prompt) -> Estimate:
        count = -(-prompt.size // 4)
        tokens = TokenEstimate(
            input=count,
            cache_read=None,
            cache_write=None,
            uncached=count,
            output_expected=None,
            output_max=None,
            worst_input=prompt.size + 100 * len(prompt.segments),
        )
        return Estimate(tokens=tokens, belief=Belief(state="unknown"), latency=Latency(ttft_ms=800.0, total_ms=6_000.0))

    def truth(self, request: Request, plan: Plan, now: float) -> Truth:
        prompt = build_prompt(request)
        usage = self._usage(prompt, plan, now)[0]
        assert self.rates is not None
        cost = self.rates.cost(usage, busy_s=None, billing=None).amount
        assert cost is not None
        first, total = self.pace.seconds(usage, self.noise(prompt))
        return Truth(usage=usage, cost=cost, ttft_s=first, total_s=total)

    def _usage(self, prompt: Prompt, plan: Plan, now: float) -> tuple[Usage, list[tuple[bytes, str]], list[bytes]]:
        """The counts, the entries that are made, and those that are renewed."""
        index = {segment.name: i for i, segment in enumerate(prompt.segments)}
        total = self.tokens_to(prompt, len(prompt.segments) - 1)
        marks = [(index[mark.at], mark.ttl or "5m") for mark in plan.marks if mark.at in index]
        marks = [(i, ttl) for i, ttl in marks if self.tokens_to(prompt, i) >= self.terms.minimum]
        last = marks[-1][0] if marks else -1
        live = [i for i in range(last + 1) if self._live(prompt.segments[i].digest, now)]
        depth = live[-1] if live else -1
        read = self.tokens_to(prompt, depth) if live else 0
        writes: dict[str, int] = {}
        made: list[tuple[bytes, str]] = []
        at = read
        for i, ttl in marks:
            made.append((prompt.segments[i].digest, ttl))
            if i > depth:
                writes[ttl] = writes.get(ttl, 0) + self.tokens_to(prompt, i) - at
                at = self.tokens_to(prompt, i)
        usage = Usage(
            uncached=total - read - sum(writes.values()),
            cache_read=read,
            cache_write=writes,
            output=self.lengths(prompt.request),
        )
        return usage, made, [prompt.segments[i].digest for i in live]

    def _live(self, digest: bytes, now: float) -> bool:
        found = self.entries.get(digest)
        return found is not None and found[0] <= now < found[1]

    async def open(self, request: Request, plan: Plan, *, timeout: float | None) -> Attempt:
        now = SimulatedClock().time()
        prompt = build_prompt(request)
        usage, made, renewed = self._usage(prompt, plan, now)
        for digest in renewed:
            ready, dies, ttl = self.entries[digest]
            self.entries[digest] = ready, max(dies, now + self.terms.lifetime(ttl).seconds), ttl
        first, total = self.pace.seconds(usage, self.noise(prompt))
        for digest, ttl in made:
            if not self._live(digest, now):
                self.entries[digest] = now + first, now + self.terms.lifetime(ttl).seconds, ttl
        return SimulatedAttempt(usage, first, total, model=self.model)


class SimulatedEngine(Simulated):
    """A local engine: one request at a time, the others wait; KV of the last prompts is kept up to a number of tokens."""

    def __init__(self, *, context: int, kept: int, **known: object) -> None:
        super().__init__(**known)  # type: ignore[arg-type]
        self.capabilities = Capabilities(parameters=ALL_PARAMETERS, local=True, context=context)
        self.kept = kept
        self.kv: OrderedDict[bytes, int] = OrderedDict()
        self.free_at = 0.0

    def _warm(self, prompt: Prompt) -> int:
        warm = [i for i, segment in enumerate(prompt.segments) if i and segment.digest in self.kv]
        return self.tokens_to(prompt, warm[-1]) if warm else 0

    def _usage(self, prompt: Prompt) -> Usage:
        total, read = self.tokens_to(prompt, len(prompt.segments) - 1), self._warm(prompt)
        output = self.lengths(prompt.request)
        return Usage(uncached=0, cache_read=read, cache_write={"kv": total - read}, output=output)

    def estimate(self, prompt: Prompt) -> Estimate:
        """Exact in tokens and in what is warm, as a real engine is; times from its measured speeds and its queue."""
        total, read = self.tokens_to(prompt, len(prompt.segments) - 1), self._warm(prompt)
        first = self._queue(SimulatedClock().time()) + self.pace.first_s + (total - read) / self.pace.prefill
        expected = min(400, prompt.request.max_output_tokens or 400)
        tokens = TokenEstimate(
            input=total,
            cache_read=read,
            cache_write=total - read,
            uncached=0,
            output_expected=expected,
            output_max=None,
            worst_input=total,
        )
        latency = Latency(ttft_ms=first * 1000, total_ms=(first + expected / self.pace.decode) * 1000, evidence="measured")
        belief = Belief(state="warm" if read else "cold", tokens=read, evidence="KV that is there")
        busy = self.pace.first_s + (total - read) / self.pace.prefill + expected / self.pace.decode
        return Estimate(tokens=tokens, belief=belief, latency=latency, busy_s=busy)

    def _queue(self, now: float) -> float:
        return max(self.free_at - now, 0.0)

    def truth(self, request: Request, plan: Plan, now: float) -> Truth:
        prompt = build_prompt(request)
        usage = self._usage(prompt)
        first, total = self.pace.seconds(usage, self.noise(prompt))
        assert self.rates is not None
        cost = self.rates.cost(usage, busy_s=total, billing=None).amount
        assert cost is not None
        wait = self._queue(now)
        return Truth(usage=usage, cost=cost, ttft_s=wait + first, total_s=wait + total)

    async def open(self, request: Request, plan: Plan, *, timeout: float | None) -> Attempt:
        now, prompt = SimulatedClock().time(), build_prompt(request)
        usage = self._usage(prompt)
        first, total = self.pace.seconds(usage, self.noise(prompt))
        wait = self._queue(now)
        self.free_at = now + wait + total
        for i, segment in enumerate(prompt.segments):
            if i:
                self.kv[segment.digest] = self.tokens_to(prompt, i) - self.tokens_to(prompt, i - 1)
                self.kv.move_to_end(segment.digest)
        while sum(self.kv.values()) > self.kept:
            self.kv.popitem(last=False)
        return SimulatedAttempt(usage, wait + first, wait + total, model=self.model, busy_s=total)


class SimulatedAttempt:
    """An answer that comes in its time: the first token, then all the rest."""

    def __init__(self, usage: Usage, first_s: float, total_s: float, *, model: str, busy_s: float | None = None) -> None:
        self._usage, self._busy_s = usage, busy_s
        begun = (ResponseStarted(request_id="simulated", model=model),)
        ended = (Finished(reason="stop", busy_s=busy_s), UsageReported(usage))
        self._steps: list[tuple[float, tuple[Event, ...]]] = [
            (first_s, (*begun, TextDelta("a"))),
            (max(total_s - first_s, 0.0), ended),
        ]

    async def read(self) -> Sequence[Event]:
        if not self._steps:
            return ()
        seconds, events = self._steps.pop(0)
        await anyio.sleep(seconds)
        return events

    async def aclose(self) -> None:
        self._steps.clear()
