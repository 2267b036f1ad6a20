"""Routing policies: the order in which eligible offers are tried.

Each is a pure function of what was asked and what is offered. Prices are the expected ones, of this request and of the turns
that are expected to follow it; what is believed cached is in them, so moving a session to where its prompt is cold costs what
it costs. Limits of time are held against the slow answers
(`Latency.ttft_high_ms`), where those are known. Offers that break a limit come after all that keep it, the fastest first,
since someone has to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from cachespec.annotations import BackendName
from cachespec.decision import Ask, Offer, Reason
from cachespec.durations import Duration
from cachespec.errors import InputError
from cachespec.usage import money_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """The lowest expected price first, among those that keep the latency limits and the request's deadline.

    An offer whose price is not known comes after all priced ones; one whose time is not known is taken to keep the
    limit. Equal prices go to the one that answered the session before, then to the faster, then to the one configured first.

    Attributes:
        max_ttft: longest time to first token, in seconds.
        max_total: longest total time, in seconds.
    """

    max_ttft: Duration | None = None
    max_total: Duration | None = None

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        late = {o.backend: _late(o, ask, self.max_ttft, self.max_total) for o in offers}
        return _cheapest_praised(_in_limits(offers, late, lambda o: (_price(o), o.backend != ask.previous_backend, _ttft(o))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The shortest expected time first, among those that cost no more than `max_cost` USD.

    Attributes:
        by: ``total`` (the whole answer) or ``ttft`` (the first token).
        max_cost: the most that a request may be expected to cost, in USD; offers of unknown price come after all others.
    """

    by: str = "total"
    max_cost: Decimal | None = None

    def __post_init__(self) -> None:
        if self.by not in ("total", "ttft"):
            raise InputError("must be 'total' or 'ttft'", field="by")
        if self.max_cost is not None and not (self.max_cost.is_finite() and self.max_cost >= 0):
            raise InputError("must be an amount of USD, 0 or more", field="max_cost")

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        time = _ttft if self.by == "ttft" else _total
        dear = {o.backend: self._dear(o) for o in offers}
        # Where all are too dear the cheapest does the least harm.
        ordered = sorted(offers, key=lambda o: (True, _price(o)) if dear[o.backend] else (False, time(o)))
        result = [_with(o, dear[o.backend]) for o in ordered]
        if len(result) > 1 and dear[result[0].backend] is None and time(result[0]) < float("inf"):
            what = "first token" if self.by == "ttft" else "whole answer"
            result[0] = _with(result[0], Reason("fastest", f"{what} expected after {time(result[0]):.0f} ms"))
        return result

    def _dear(self, offer: Offer) -> Reason | None:
        price = None if offer.quote is None else offer.quote.expected
        if self.max_cost is None or (price is not None and price <= self.max_cost):
            return None
        said = "its price is not known" if price is None else f"expected {money_text(price)} USD"
        return Reason("price_unknown" if price is None else "budget", f"{said}, limit {money_text(self.max_cost)} USD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Money and time in one: the lowest sum of the expected price and the expected time at a price per second.

    Attributes:
        per_second: what a second of waiting for the whole answer is worth, in USD.
        max_ttft, max_total: limits as of `Cheapest`, in seconds.
    """

    per_second: Decimal = Decimal("0.001")
    max_ttft: Duration | None = None
    max_total: Duration | None = None

    def __post_init__(self) -> None:
        if not (self.per_second.is_finite() and self.per_second >= 0):
            raise InputError("must be an amount of USD, 0 or more", field="per_second")

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        late = {o.backend: _late(o, ask, self.max_ttft, self.max_total) for o in offers}
        slowest = max((t for o in offers if (t := _total(o)) < float("inf")), default=0.0)

        def score(offer: Offer) -> tuple[bool, Decimal]:
            unknown, price = _price(offer)
            # A time that is not known is taken for the longest of the others: neither praised nor ruled out.
            return unknown, price + self.per_second * Decimal(min(_total(offer), slowest)) / 1000

        result = _in_limits(offers, late, lambda o: (score(o), o.backend != ask.previous_backend))
        if len(result) > 1 and not score(result[0])[0] and late[result[0].backend] is None:
            text = f"expected price and time together are worth {money_text(score(result[0])[1].quantize(Decimal('1e-9')))} USD"
            result[0] = _with(result[0], Reason("cheapest", text))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """By chance, in proportion to the weights; a session stays with its draw. Backends without a weight come last.

    Attributes:
        weights: a number of 0 or more by backend; 0 is asked only when all others are out.
    """

    weights: Mapping[BackendName, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not 0 <= weight < float("inf"):
                raise InputError(f"the weight of {name!r} must be 0 or more", field="weights")
        if not any(self.weights.values()):
            raise InputError("at least one weight must be more than 0", field="weights")

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        left = list(offers)
        ranked: list[Offer] = []
        draw = ask.draw
        while total := sum(self.weights.get(o.backend, 0.0) for o in left):
            point, i = draw * total, 0
            while i < len(left) - 1 and point >= self.weights.get(left[i].backend, 0.0):
                point -= self.weights.get(left[i].backend, 0.0)
                i += 1
            weight = self.weights.get(left[i].backend, 0.0)
            # What is left of the draw is as even as the draw was, and orders the rest.
            draw = min(point / weight, 0.999999999) if weight else 0.0
            ranked.append(left.pop(i))
        return [*ranked, *left]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sticky:
    """Where the session was answered before, as long as that is eligible; else, and at first, as `Cheapest` orders.

    Attributes:
        max_ttft, max_total: limits as of `Cheapest`, in seconds; they do not move a session that has its place.
    """

    max_ttft: Duration | None = None
    max_total: Duration | None = None

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        ranked = Cheapest(max_ttft=self.max_ttft, max_total=self.max_total).rank(ask, offers)
        return _moved_first(ask, ranked, "sticky", f"session {ask.session_id} was answered here before")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Always the named backend, as long as it is eligible; the rest stay in configured order unless `only`."""

    backend: BackendName
    only: bool = False

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        first = [_with(o, Reason("pinned", f"policy pins {self.backend}")) for o in offers if o.backend == self.backend]
        rest = [] if self.only else [o for o in offers if o.backend != self.backend]
        return [*first, *rest]


def stay(ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
    """What no policy may change (contract D2): a tool loop goes on where it began, as long as that backend is there."""
    if not ask.tool_loop:
        return offers
    return _moved_first(ask, offers, "tool_loop", "these are results of tools that it called")


def _moved_first(ask: Ask, offers: Sequence[Offer], code: str, detail: str) -> Sequence[Offer]:
    here = [o for o in offers if o.backend == ask.previous_backend]
    if not here:
        return offers
    return [_with(here[0], Reason(code, detail)), *(o for o in offers if o.backend != ask.previous_backend)]


def _late(offer: Offer, ask: Ask, max_ttft: float | None, max_total: float | None) -> Reason | None:
    """Why an offer breaks a limit of time, the deadline of the request among them."""
    latency = offer.latency
    first = latency.ttft_ms if latency.ttft_high_ms is None else latency.ttft_high_ms
    total = latency.total_ms if latency.total_high_ms is None else latency.total_high_ms
    for limit, ms, what in (
        (max_ttft, first, "first token"),
        (max_total, total, "whole answer"),
        (ask.timeout_s, total, "whole answer"),
    ):
        if limit is not None and ms is not None and ms > limit * 1000:
            return Reason("latency_limit", f"{what} expected after up to {ms:.0f} ms, limit {limit * 1000:.0f} ms")
    return None


def _in_limits(
    offers: Sequence[Offer], late: Mapping[str, Reason | None], key: Callable[[Offer], tuple[object, ...]]
) -> list[Offer]:
    """Those in their limits by `key`, then the others, the fastest first; each with why it is late."""
    kept = sorted((o for o in offers if late[o.backend] is None), key=key)
    rest = sorted((o for o in offers if late[o.backend] is not None), key=_slowness)
    return [_with(o, late[o.backend]) for o in (*kept, *rest)]


def _cheapest_praised(result: list[Offer]) -> list[Offer]:
    priced = [o for o in result if not _price(o)[0]]
    first = result[0] if result else None
    if first is None or len(result) < 2 or first not in priced or any(r.code == "latency_limit" for r in first.reasons):
        return result
    known = f"the lowest of {len(priced)}" if len(priced) > 1 else "the only one whose price is known"
    if any(r.code == "latency_limit" for o in priced for r in o.reasons):
        known += " in time"
    quote = first.quote
    amount = f"expected {money_text(None if quote is None else quote.expected)} USD"
    if quote is not None and quote.ahead:
        amount += f", and {money_text(quote.ahead.quantize(Decimal('1e-9')))} USD for about {quote.turns:.1f} further turns"
    result[0] = _with(first, Reason("cheapest", f"{amount}, {known}"))
    return result


def _with(offer: Offer, reason: Reason | None) -> Offer:
    return offer if reason is None else replace(offer, reasons=(*offer.reasons, reason))


def _price(offer: Offer) -> tuple[bool, Decimal]:
    """Whether the price is unknown, and what a request costs with the turns that are expected to follow it here."""
    quote = offer.quote
    if quote is None or quote.expected is None:
        return True, Decimal(0)
    return False, quote.expected if quote.ahead is None else quote.expected + quote.ahead


def _ttft(offer: Offer) -> float:
    return float("inf") if offer.latency.ttft_ms is None else offer.latency.ttft_ms


def _total(offer: Offer) -> float:
    return float("inf") if offer.latency.total_ms is None else offer.latency.total_ms


def _slowness(offer: Offer) -> float:
    high = offer.latency.ttft_high_ms
    return _ttft(offer) if high is None else high
