"""A trace through one caching policy: the live policy code under a simulated clock, against a simulated vendor.

Sessions run one after another in file order, an hour apart on the policy's clock, whose origin is the first one's start;
within a session, requests, their ends and keep-alives happen in the order of time (at one time: ends, keep-alives,
requests). A policy sees of a request what a live client would know when it sends it, and the outcome only at its end. A
keep-alive is dropped when a later request read or wrote its entry before it was due. After a session's last request keep-alives
go on for as long as the policy wants them: it cannot know that nothing follows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cachespec.caching import CacheAsk, CachePlan, CacheTerms, CachingPolicy, Held, KeepAlive, Outcome, Warm
from cachespec.errors import InputError
from cachespec.replay.places import Asked, Places
from cachespec.replay.result import Result, Tally
from cachespec.replay.traces import Session, Trace, TraceRequest
from cachespec.replay.vendor import Billed, Place, VendorCache

SESSIONS_APART_S = 3600
PINGS_AT_MOST = 10_000
"""Keep-alives for one request after which a policy is taken never to stop."""
POINTS = 120
"""Points of a result's curve, about."""

Line: TypeAlias = dict[str, Any]
END, PING = 0, 1


def simulate(
    trace: Trace,
    policy: CachingPolicy,
    terms: CacheTerms,
    *,
    name: str = "policy",
    decided: Callable[[Line], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Run a trace through a policy. `decided` gets each line of the decisions file as it is taken, `progress` requests done.

    Raises InputError where the policy decides what no vendor takes.
    """
    total = Tally(every=max(1, trace.requests // POINTS), progress=progress)
    start = 0.0
    for number, session in enumerate(trace.sessions):
        run = _Run(
            trace=trace,
            session=session,
            policy=policy,
            terms=terms,
            name=name,
            total=total,
            decided=decided,
            number=number,
            base=start,
        )
        start += math.ceil(run.through()) + SESSIONS_APART_S
    if progress is not None and total.requests % total.every:
        progress(total.requests)
    return total.result(name, terms)


@dataclass(slots=True, kw_only=True, eq=False)
class _Sent:
    """A request under way or finished: what was asked, and the keep-alives it had."""

    number: int
    request: TraceRequest
    asked: Asked
    ask: CacheAsk
    billed: Billed
    outcome: Outcome | None = None
    pings: int = 0
    due: KeepAlive | None = None


@dataclass(slots=True, kw_only=True)
class _Run:
    """One session."""

    trace: Trace
    session: Session
    policy: CachingPolicy
    terms: CacheTerms
    name: str
    total: Tally
    decided: Callable[[Line], None] | None
    number: int
    base: float
    cache: VendorCache = field(init=False)
    places: Places = field(init=False)
    events: list[tuple[float, int, int, _Sent]] = field(default_factory=list)
    order: int = 0

    def through(self) -> float:
        """Run all of it. Returns the time of its last event."""
        self.cache = VendorCache(terms=self.terms)
        self.places = Places(
            block_size=self.trace.block_size, any_block=self.trace.any_block, offset=self.number << 64, base=self.base
        )
        last = 0.0
        for number, request in enumerate(self.session.requests):
            self._events(request.t)
            self._request(number, request)
            last = request.t
        return max(last, self._events(math.inf))

    def _events(self, upto: float) -> float:
        last = 0.0
        while self.events and self.events[0][0] <= upto:
            last, kind, _, sent = heapq.heappop(self.events)
            if kind == END:
                self._end(last, sent)
            else:
                self._ping(last, sent)
        return last

    def _push(self, t: float, kind: int, sent: _Sent) -> None:
        self.order += 1
        heapq.heappush(self.events, (t, kind, self.order, sent))

    def _request(self, number: int, request: TraceRequest) -> None:
        t = request.t
        asked = self.places.of(request, t, self.cache.entries)
        ask = CacheAsk(
            now=self.base + t,
            prefixes=asked.prefixes,
            input_tokens=request.input_tokens,
            terms=self.terms,
            session=self.session.name,
            traffic=request.traffic,
            input_types=request.input_types,
        )
        plan = self.policy.plan(ask)
        marks = self._marks(plan, asked, request)
        implicit = not marks and not plan.opt_out and self.terms.implicit is not None
        if implicit:
            marks = [(asked.legal[-1], self.terms.implicit or "")]
        billed = self.cache.request(t, number, asked.path, marks, request.input_tokens, implicit=implicit)
        self.policy.sent(ask, plan)
        self.total.request(request.input_tokens, billed)
        if self.decided is not None:
            shown = [[place.tokens, ttl] for place, ttl in marks]
            line = {"i": request.i, "read": billed.read, "uncached": billed.uncached, "writes": dict(billed.writes)}
            self.decided({**line, "marks": shown})
        self._push(request.ended, END, _Sent(number=number, request=request, asked=asked, ask=ask, billed=billed))

    def _marks(self, plan: CachePlan, asked: Asked, request: TraceRequest) -> list[tuple[Place, str]]:
        """The plan's marks as places. Raises InputError where they are not legal."""
        problem = None
        order = [lifetime.name for lifetime in self.terms.lifetimes]
        last, shortest = -1, len(order) - 1
        for mark in plan.marks:
            if not last < mark.index < len(asked.legal):
                problem = f"mark {mark.index} of {len(asked.legal)} after mark {last}"
            elif mark.ttl not in order:
                problem = f"no lifetime {mark.ttl!r} (there is: {', '.join(order)})"
            elif order.index(mark.ttl) > shortest:
                problem = f"{mark.ttl} after a shorter lifetime"
            if problem:
                break
            last, shortest = mark.index, order.index(mark.ttl)
        if len(plan.marks) > self.terms.slots:
            problem = f"{len(plan.marks)} marks where {self.terms.slots} are allowed"
        if plan.opt_out and (plan.marks or not self.terms.opt_out):
            problem = "opts out " + ("and marks" if plan.marks else "where nothing is written by default")
        if problem:
            raise InputError(f"policy {self.name}, request {request.i}: {problem}")
        return [(asked.legal[mark.index], mark.ttl) for mark in plan.marks]

    def _end(self, t: float, sent: _Sent) -> None:
        sent.outcome = Outcome(
            ended_at=self.base + t,
            stop=sent.request.stop,
            output_tokens=sent.request.output_tokens,
            read=sent.billed.read,
            written=sent.billed.written,
        )
        self.policy.ended(sent.ask, sent.outcome)
        self._hold(t, sent)

    def _hold(self, t: float, sent: _Sent) -> None:
        """Ask whether to keep the deepest live entry alive, unless a later request has taken it over."""
        entries = self.cache.entries
        for index in range(len(sent.asked.legal) - 1, -1, -1):
            place = sent.asked.legal[index]
            entry = entries.get(place.key) if place.blocks else None
            if entry is None or not entry.live(t):
                continue
            if entry.used > sent.number:
                return
            warm = Warm(
                ttl=entry.lifetime.name,
                ready_at=self.base + entry.ready_at,
                expires_at=self.base + entry.expires_at,
            )
            assert sent.outcome is not None  # noqa: S101
            held = Held(ask=sent.ask, outcome=sent.outcome, index=index, warm=warm, pings=sent.pings)
            wanted = self.policy.held(held, self.base + t)
            if wanted is not None:
                self._schedule(t, sent, wanted)
            return

    def _schedule(self, t: float, sent: _Sent, wanted: KeepAlive) -> None:
        names = [lifetime.name for lifetime in self.terms.lifetimes]
        problem = None
        if not 0 <= wanted.index < len(sent.asked.legal) or not sent.asked.legal[wanted.index].blocks:
            problem = f"index {wanted.index}"
        elif wanted.ttl not in names:
            problem = f"no lifetime {wanted.ttl!r} (there is: {', '.join(names)})"
        elif not self.base + t <= wanted.at < math.inf:
            problem = f"at {wanted.at:g} s, decided at {self.base + t:g} s"
        elif sent.pings >= PINGS_AT_MOST:
            problem = f"{PINGS_AT_MOST:,} were sent"
        if problem:
            raise InputError(f"policy {self.name}, keep-alive of request {sent.request.i}: {problem}")
        sent.due = wanted
        self._push(max(t, round(wanted.at - self.base, 6)), PING, sent)  # free of what adding the base lost

    def _ping(self, t: float, sent: _Sent) -> None:
        wanted = sent.due
        assert wanted is not None  # noqa: S101
        place = sent.asked.legal[wanted.index]
        entry = self.cache.entries.get(place.key)
        if entry is not None and entry.used > sent.number:
            return
        billed = self.cache.keep_alive(t, sent.number, sent.asked.path, place, wanted.ttl)
        self.total.ping(billed)
        if self.decided is not None:
            self.decided({"ping": sent.request.i, "t": t, "tokens": place.tokens, "ttl": wanted.ttl})
        sent.pings += 1
        self._hold(t, sent)
