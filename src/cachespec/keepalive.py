"""Requests that only have a prompt read and cached: prewarming before the first use, and keep-alives between two uses (P6).

Both are real requests that cost money, so both go through the ledger like any other, under the same budgets, and are sent only
where the caching policy expects them to save more than they cost. A keep-alive is planned when a request ends, and dropped when
another one uses the prefix before its time, since a read renews it for nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal

from cachespec.backends.base import Backend, Warmed, Warming
from cachespec.background import Background
from cachespec.cache_learning import Caching, Sent, seconds_of
from cachespec.cache_plan import Planned
from cachespec.cache_view import as_warm
from cachespec.caching import CacheAsk, Held, KeepAlive, Outcome
from cachespec.clock import Clock
from cachespec.decide import Asked
from cachespec.decision import Mark, Plan
from cachespec.errors import CachespecError
from cachespec.finishing import to_the_end
from cachespec.holds import hold_for
from cachespec.ledger.base import Ledger, Settlement
from cachespec.messages import Message, TextPart
from cachespec.policies.budgets import applied
from cachespec.pricing import Rates
from cachespec.quotes import estimated_cost
from cachespec.request import Request
from cachespec.settling import believable
from cachespec.telemetry import KeptAlive, Telemetry
from cachespec.usage import WRITE_TTLS, Cost, Usage

MOST = 1_000
"""Keep-alives planned at a time; past that, none is added."""
TIMEOUT_S = 60.0
_RENEWED_S = 1.0
_log = logging.getLogger("cachespec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewarmed:
    """What `Client.prewarm` did: `sent` or not, and why (`reason`). `tokens` is the prefix, `cost` USD; None: not known."""

    backend: str | None
    sent: bool
    reason: str
    tokens: int | None = None
    usage: Usage | None = None
    cost: Decimal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A prefix that may be kept alive: the request that left it, and how often that was done already."""

    asked: Asked
    planned: Planned
    backend: Backend
    caching: Caching
    ask: CacheAsk
    outcome: Outcome
    pings: int = 0


class KeepAlives:
    """Plans and sends keep-alives for one client, in the background. Used by the tasks of one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        background: Background,
        clock: Clock,
        telemetry: Telemetry,
        in_use: Callable[[Backend], bool],
    ) -> None:
        """`in_use` says whether a backend is still one of the configuration's: what is gone is not kept alive."""
        self._in_use = in_use
        self._ledger, self._background, self._clock, self._telemetry = ledger, background, clock, telemetry
        self._planned: set[tuple[bytes, bytes]] = set()

    def used(self, planned: Planned) -> None:
        """A request goes out: what it reads needs no keep-alive any more."""
        for place, _ in planned.found:
            self._forget(planned.filed(planned.places.keys[place]))

    def ended(self, asked: Asked, sent: Sent, backend: Backend, caching: Caching, outcome: Outcome) -> None:
        """A request was answered: have the policy say whether what it left is worth keeping, and until when."""
        planned = sent.planned
        if planned.ask is None or not sent.began or caching.policy is None or not isinstance(backend, Warming):
            return
        if backend.cannot_warm(planned.prompt.request) is None:
            ask = replace(planned.ask, now=sent.start)
            self._consider(Kept(asked=asked, planned=planned, backend=backend, caching=caching, ask=ask, outcome=outcome))

    async def prewarm(self, asked: Asked, planned: Planned, backend: Backend, caching: Caching) -> Prewarmed:
        """Have the deepest prefix that the plan marks before the newest message cached now, where that pays.

        Raises what `warm` raises.
        """
        name = planned.backend
        if not isinstance(backend, Warming):
            return Prewarmed(backend=name, sent=False, reason="it has no request that only reads a prompt")
        if (problem := backend.cannot_warm(planned.prompt.request)) is not None:
            return Prewarmed(backend=name, sent=False, reason=problem)
        last = len(planned.prompt.segments) - 1
        spots = [spot for spot in planned.spots if spot.place is not None and spot.index < last]
        if not spots:
            why = "; ".join(reason.detail for reason in planned.plan.reasons) or "nothing that is expected to be read again"
            return Prewarmed(backend=name, sent=False, reason=f"nothing to mark: {why}")
        spot, now = spots[-1], self._clock.time()
        entry = caching.warmth.get(*planned.filed(spot.key))
        if entry is not None and entry.live(now):
            left = entry.expires_at - now
            return Prewarmed(backend=name, sent=False, reason=f"warm already, for {left:.0f} s", tokens=spot.tokens)
        sent = caching.sent(replace(planned, spots=(spot,), ask=None), now)
        warmed: Warmed | None = None
        try:
            warmed, cost = await self.warm(asked, planned, backend, spot.place or 0, spot.ttl, warm=False)
            caching.began(sent, self._clock.time())
        finally:
            caching.ended(sent, usage=None if warmed is None else warmed.usage, stop=None, now=self._clock.time())
        return Prewarmed(backend=name, sent=True, reason="cached", tokens=spot.tokens, usage=warmed.usage, cost=cost.amount)

    def _consider(self, kept: Kept) -> None:
        now, planned, warmth = self._clock.time(), kept.planned, kept.caching.warmth
        live = [
            (place, entry)
            for place in sorted({spot.place for spot in planned.spots if spot.place is not None}, reverse=True)
            if (entry := warmth.get(*planned.filed(planned.places.keys[place]))) is not None and entry.expires_at > now
        ]
        if not live or len(self._planned) >= MOST:
            return
        place, entry = live[0]
        warm = as_warm(entry, kept.ask.terms)
        chosen = kept.caching.held(Held(ask=kept.ask, outcome=kept.outcome, index=place, warm=warm, pings=kept.pings), now)
        if chosen is None or not 0 <= chosen.index < len(planned.places.keys):
            return
        key = planned.filed(planned.places.keys[chosen.index])
        found = warmth.get(*key)
        if found is None or cut(planned.prompt.request, planned.places.prefixes[chosen.index].at) is None:
            return
        self._planned.add(key)
        self._background.at(chosen.at, ("keep-alive", *key), lambda: self._send(kept, chosen, found.expires_at))

    def _forget(self, key: tuple[bytes, bytes]) -> None:
        if key in self._planned:
            self._planned.discard(key)
            self._background.cancel(("keep-alive", *key))

    async def _send(self, kept: Kept, chosen: KeepAlive, expires_at: float) -> None:
        planned, caching = kept.planned, kept.caching
        key = planned.filed(planned.places.keys[chosen.index])
        self._planned.discard(key)
        now = self._clock.time()
        entry = caching.warmth.get(*key)
        if not self._in_use(kept.backend) or entry is None or entry.expires_at <= now:
            return  # nobody comes back, too late, or nothing there: writing it anew is the next request's to decide
        if entry.expires_at > expires_at + _RENEWED_S:
            self._consider(kept)  # somebody read it since
            return
        try:
            warmed, cost = await self.warm(kept.asked, planned, kept.backend, chosen.index, chosen.ttl, warm=True)
        except CachespecError as error:
            _log.info("a keep-alive on %s was not sent, or failed: %s", planned.backend, error)
            return
        read = None if warmed.usage is None else warmed.usage.cache_read
        written = None if warmed.usage is None else warmed.usage.written
        self._telemetry.tell(
            KeptAlive(backend=planned.backend, model=planned.model, read=read, written=written, cost=cost.amount)
        )
        if read == 0 and not written:
            caching.warmth.drop(*key)
            return
        until = now + seconds_of(planned, entry.ttl)
        caching.warmth.put(*key, replace(entry, expires_at=max(entry.expires_at, until), sure=1.0 if read else entry.sure))
        self._consider(replace(kept, pings=kept.pings + 1))

    async def warm(
        self, asked: Asked, planned: Planned, backend: Backend, place: int, ttl: str, *, warm: bool
    ) -> tuple[Warmed, Cost]:
        """Send a request that only has the prefix at `place` read and cached, and book what it cost.

        What nobody counted is booked as it was expected: to be read where the prefix is believed `warm`, else written. So is
        what may have been worked on although nothing came back.
        Raises BudgetExceededError where it does not fit, PriceUnknownError's kin, and what the backend raises.
        """
        prefix = planned.places.prefixes[place]
        request = cut(planned.prompt.request, prefix.at)
        if request is None or not isinstance(backend, Warming):
            raise CachespecError(f"{prefix.at} cannot be sent by itself")
        options = {name: value for name, value in planned.plan.options.items() if name != "cache_control"}
        plan = Plan(
            backend=backend.name,
            marks=(Mark(at=prefix.at, tokens=prefix.tokens, ttl=ttl),),
            options=options,
            ignore=planned.plan.ignore,
            prewarm=True,
        )
        ask = replace(asked.ask, now=self._clock.time())
        budgets = applied([b.rule for b in asked.budgets if b.rule.mode != "soft" and b.rule.scope != "request"], ask)
        worst = _worst(backend.rates, backend.estimate(planned.prompt).tokens.worst_input)
        limits = [b.limit for b in budgets]
        hold = hold_for(ask, limits, backend=backend.name, model=backend.model, worst=worst, lease_s=2 * TIMEOUT_S)
        reservation = await self._ledger.reserve(hold)
        expected = estimated_cost(backend.rates, _expected(prefix.tokens, ttl, warm=warm), busy_s=None, billing=None)
        try:
            warmed = await backend.warm(request, plan, timeout=TIMEOUT_S)
        except BaseException as error:
            if isinstance(error, CachespecError) and not getattr(error, "begun", False):
                await to_the_end(lambda: self._ledger.release(reservation))
            else:
                ending = "failed" if isinstance(error, Exception) else "cancelled"
                await to_the_end(lambda: self._ledger.settle(reservation, _settlement(expected, ending)))
            raise
        cost = _cost(backend.rates, warmed) or expected
        if not believable(cost):
            warmed, cost = replace(warmed, usage=None), expected
        await to_the_end(lambda: self._ledger.settle(reservation, _settlement(cost, "kept", warmed)))
        return warmed, cost


def _worst(rates: Rates | None, input_tokens: int | None) -> Decimal:
    if rates is None or input_tokens is None:
        return Decimal(0)
    return rates.worst(input_tokens=input_tokens, output_tokens=0, seconds=None, billing=None) or Decimal(0)


def _expected(tokens: int, ttl: str, *, warm: bool) -> Usage:
    written = {} if warm else {ttl if ttl in WRITE_TTLS else "unspecified": tokens}
    return Usage(uncached=0, cache_read=tokens if warm else 0, cache_write=written, output=0)


def _cost(rates: Rates | None, warmed: Warmed) -> Cost | None:
    """What was counted, priced; None where nothing was, or there is no price."""
    usage = warmed.usage
    if rates is None or usage is None or usage.uncached is None:
        return None
    return rates.cost(replace(usage, output=usage.output or 0), busy_s=None, billing=warmed.billing)


def _settlement(cost: Cost, outcome: str, warmed: Warmed | None = None) -> Settlement:
    return Settlement(
        amount=cost.amount,
        estimated=cost.estimated,
        usage=None if warmed is None else warmed.usage,
        outcome=outcome,
        request_id=None if warmed is None else warmed.request_id,
        price_source=cost.source,
    )


def cut(request: Request, at: str) -> Request | None:
    """The request up to the end of segment `at`, fit to be sent; None where no request ends there.

    The vendors want a message of the user at the end. Where the prefix has none a full stop is added behind it, which changes
    nothing before it.
    """
    numbers = [int(n) for n in re.findall(r"\d+", at)]
    stop = Message(role="user", parts=(TextPart(text="."),))
    if at.startswith("tools["):
        return replace(request, system=(), messages=(stop,))
    if at.startswith("system["):
        kept = numbers[0] + 1
        return None if kept > len(request.system) else replace(request, system=request.system[:kept], messages=(stop,))
    messages: list[Message] = []
    number = -1
    for message in request.messages:
        number += message.role not in ("system", "developer")
        if number > numbers[0]:
            break
        ends = number == numbers[0] and message.role not in ("system", "developer")
        messages.append(replace(message, parts=message.parts[: numbers[1] + 1]) if ends else message)
    last = messages[-1] if messages else stop
    if last.tool_calls:
        return None  # a call without its result is refused
    if last.role not in ("user", "tool"):
        messages.append(stop)
    return replace(request, messages=tuple(messages))
