"""A second simulator, plain and slow, that shares no code with the package: it reads a trace and a decisions file and recounts.

Written from the format ``replay`` of docs/replay.md. Every line is checked for what a vendor would take and for what a client
could know, and its numbers are computed again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

ANTHROPIC = {"5m": (300.0, 1.25), "1h": (3600.0, 2.0)}
OPENAI = {"30m": (1800.0, 1.25)}
READ = 0.1


class IllegalDecision(Exception):
    """A line that no vendor would take, or that is not what the rules give."""


class Request:
    """One line of a trace."""

    def __init__(self, i: int, line: dict[str, Any]) -> None:
        self.i = i
        self.size: int = 512 if "hash_ids" in line else int(line["block_size"])
        self.mooncake = "hash_ids" in line
        self.input: int = line["input_length" if self.mooncake else "input"]
        if self.mooncake:
            self.session, self.t = "", line["timestamp"] / 1000
            self.ids = line["hash_ids"][: self.input // 512]
            self.end, self.fixed = self.t + 2, 0
        else:
            self.session, self.t = line["trace"], line["t"]
            self.ids = [first + k for first, count in line["blocks"] for k in range(count)]
            self.end = self.t + (2 if line["api_time"] is None else line["api_time"])
            self.fixed = min(self.input, line["tool_tokens"] + line["system_tokens"]) // self.size

    def whole(self, tokens: int) -> int:
        """How many whole blocks a legal length stands for."""
        return tokens // self.size

    def length(self, blocks: int) -> int:
        return min(blocks * self.size, self.input)


class Plain:
    """Recounts a decisions file."""

    def __init__(
        self, trace: Iterable[str], *, lifetimes: dict[str, tuple[float, float]] = ANTHROPIC, exact: bool = False
    ) -> None:
        self.requests = [Request(i, json.loads(line)) for i, line in enumerate(trace) if line.strip()]
        self.lifetimes = lifetimes
        self.entries: dict[int, dict[str, Any]] = {}
        self.ends: set[int] = set()
        self.exact = exact  # only entries that end exactly at a mark are found
        self.order = sorted(lifetimes, key=lambda name: -lifetimes[name][0])

    def cost(self, decisions: Iterable[str]) -> float:
        """The whole cost in input tokens. Raises IllegalDecision."""
        seen: list[int] = []
        session: str | None = None
        cost = now = 0.0
        for text in decisions:
            line = json.loads(text)
            request = self.requests[line["ping"] if "ping" in line else line["i"]]
            t = line["t"] if "ping" in line else request.t
            if request.session != session:
                if "ping" in line or any(self.requests[i].session == request.session for i in seen):
                    raise IllegalDecision(f"{text}: sessions are mixed up")
                session, now, self.entries, self.ends = request.session, 0.0, {}, set()
            if t < now:
                raise IllegalDecision(f"{text}: goes back in time")
            now = t
            if "ping" in line:
                if request.i not in seen or t < request.end:
                    raise IllegalDecision(f"{text}: its request has not ended")
                cost += self.ping(request, line)
            else:
                seen.append(request.i)
                cost += self.request(request, line)
        if sorted(seen) != list(range(len(self.requests))):
            raise IllegalDecision("not every request once")
        return cost

    def legal(self, request: Request) -> set[int]:
        """Every length that may be marked, in tokens."""
        places = range(1, len(request.ids) + 1) if request.mooncake else {*self.ends, request.fixed}
        return {request.length(n) for n in places if 0 < n <= len(request.ids)} | {request.input}

    def alive(self, request: Request, blocks: int, t: float) -> dict[str, Any] | None:
        found = self.entries.get(request.ids[blocks - 1])
        return found if found and t <= found["touched"] + self.lifetimes[found["ttl"]][0] else None

    def request(self, request: Request, line: dict[str, Any]) -> float:
        t, marks = request.t, line["marks"]
        lengths = [tokens for tokens, _ in marks]
        ranks = [self.order.index(ttl) for _, ttl in marks]
        if len(marks) > 4 or lengths != sorted(set(lengths)) or ranks != sorted(ranks):
            raise IllegalDecision(f"{line}: too many marks, or out of order")
        if not set(lengths) <= self.legal(request):
            raise IllegalDecision(f"{line}: a mark where none may be")
        marked = [request.whole(tokens) for tokens in lengths]
        read = 0
        for n in range(1, max(marked, default=0) + 1):
            entry = self.alive(request, n, t)
            if entry and entry["ready"] <= t and (not self.exact or n in marked):
                read = n
        for n in range(1, read + 1):
            if entry := self.alive(request, n, t):
                entry["touched"] = t
        counted = {"i": request.i, "read": request.length(read), "writes": {}, "marks": marks}
        reached = counted["read"]
        for tokens, ttl in marks:
            n = request.whole(tokens)
            entry = self.alive(request, n, t) if n else None
            if tokens > reached:
                counted["writes"][ttl] = counted["writes"].get(ttl, 0) + tokens - reached
                reached = tokens
                ready = entry["ready"] if entry else t + 2
            elif entry:
                continue
            else:
                ready = t + 2
            if n:
                self.entries[request.ids[n - 1]] = {"ttl": ttl, "ready": ready, "touched": t}
        counted["uncached"] = request.input - reached
        if counted != line:
            raise IllegalDecision(f"{line}: should be {counted}")
        self.ends.add(len(request.ids))
        return self.paid(counted)

    def paid(self, counted: dict[str, Any]) -> float:
        writes: float = sum(tokens * self.lifetimes[ttl][1] for ttl, tokens in counted["writes"].items())
        return float(counted["read"] * READ + writes + counted["uncached"])

    def ping(self, request: Request, line: dict[str, Any]) -> float:
        n, t = request.whole(line["tokens"]), line["t"]
        if n < 1 or line["tokens"] not in self.legal(request):
            raise IllegalDecision(f"{line}: not a prefix that may be marked")
        if self.alive(request, n, t):
            for k in range(1, n + 1):
                if entry := self.alive(request, k, t):
                    entry["touched"] = t
            return float(line["tokens"] * READ)
        self.entries[request.ids[n - 1]] = {"ttl": line["ttl"], "ready": t + 2, "touched": t}
        return float(line["tokens"] * self.lifetimes[line["ttl"]][1])
