"""What a simulated run was billed, and the tally that adds it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cachespec.caching import CacheTerms
from cachespec.replay.vendor import Billed


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a policy's requests and keep-alives were billed. Tokens; `cost` in input tokens at the full price.

    `curve` has, for some numbers of requests done, input tokens and tokens read since the point before.
    """

    policy: str
    terms: CacheTerms
    requests: int
    input_tokens: int
    read: int
    uncached: int
    writes: Mapping[str, int]
    pings: int
    ping_read: int
    ping_writes: Mapping[str, int]
    curve: tuple[tuple[int, int, int], ...]

    @property
    def parts(self) -> dict[str, float]:
        """The cost by what it went for, in input tokens at the full price."""
        written = {f"write {ttl}": n * self.terms.lifetime(ttl).write for ttl, n in self.writes.items()}
        again = sum(n * self.terms.lifetime(ttl).write for ttl, n in self.ping_writes.items())
        return {
            "uncached": float(self.uncached),
            **written,
            "read": self.read * self.terms.read,
            "keep-alives": self.ping_read * self.terms.read + again,
        }

    @property
    def cost(self) -> float:
        return sum(self.parts.values())

    @property
    def relative(self) -> float:
        """Cost relative to no caching."""
        return self.cost / self.input_tokens if self.input_tokens else 1.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """Adds up. Every `every` requests it makes a point of the curve, and tells `progress` how many there were."""

    every: int
    progress: Callable[[int], None] | None
    requests: int = 0
    input_tokens: int = 0
    read: int = 0
    uncached: int = 0
    writes: dict[str, int] = field(default_factory=dict)
    pings: int = 0
    ping_read: int = 0
    ping_writes: dict[str, int] = field(default_factory=dict)
    curve: list[tuple[int, int, int]] = field(default_factory=list)

    def request(self, tokens: int, billed: Billed) -> None:
        self.requests += 1
        self.input_tokens += tokens
        self.read += billed.read
        self.uncached += billed.uncached
        for ttl, count in billed.writes:
            self.writes[ttl] = self.writes.get(ttl, 0) + count
        if self.requests % self.every == 0:
            self.curve.append((self.requests, self.input_tokens, self.read))
            if self.progress is not None:
                self.progress(self.requests)

    def ping(self, billed: Billed) -> None:
        self.pings += 1
        self.ping_read += billed.read
        for ttl, count in billed.writes:
            self.ping_writes[ttl] = self.ping_writes.get(ttl, 0) + count

    def _points(self) -> tuple[tuple[int, int, int], ...]:
        """The curve as differences."""
        ends = (
            self.curve
            if self.curve and self.curve[-1][0] == self.requests
            else [*self.curve, (self.requests, self.input_tokens, self.read)]
        )
        starts = [(0, 0, 0), *ends]
        return tuple((b[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(starts, ends, strict=False))

    def result(self, policy: str, terms: CacheTerms) -> Result:
        """All of it."""
        return Result(
            policy=policy,
            terms=terms,
            requests=self.requests,
            input_tokens=self.input_tokens,
            read=self.read,
            uncached=self.uncached,
            writes=self.writes,
            pings=self.pings,
            ping_read=self.ping_read,
            ping_writes=self.ping_writes,
            curve=self._points(),
        )
