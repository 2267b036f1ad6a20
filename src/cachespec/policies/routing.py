"""Routing policies: the order in which eligible offers are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from cachespec.annotations import BackendName
from cachespec.decision import Ask, Offer, Reason
from cachespec.durations import Duration
from cachespec.usage import money_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """The lowest expected price first, among those that keep the latency limits.

    An offer whose price is not known comes after all priced ones; one whose time is not known is taken to keep the
    limit. Equal prices go to the faster, then to the one configured first. When no offer keeps the limits, the fastest
    comes first, since someone has to answer.

    Attributes:
        max_ttft: longest time to first token, in seconds.
        max_total: longest total time, in seconds.
    """

    max_ttft: Duration | None = None
    max_total: Duration | None = None

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        late = {o.backend: self._late(o) for o in offers}
        ordered = sorted(offers, key=lambda o: (late[o.backend] is not None, _price(o), _ttft(o)))
        if ordered and all(late.values()):
            ordered = sorted(offers, key=_ttft)
        result = [_with(o, late[o.backend]) for o in ordered]
        priced = [o.quote.expected for o in result if o.quote is not None and o.quote.expected is not None]
        if len(result) > 1 and not _price(result[0])[0]:
            known = f"the lowest of {len(priced)}" if len(priced) > 1 else "the only one whose price is known"
            result[0] = _with(result[0], Reason("cheapest", f"expected {money_text(_price(result[0])[1])} USD, {known}"))
        return result

    def _late(self, offer: Offer) -> Reason | None:
        for limit, ms, what in (
            (self.max_ttft, offer.latency.ttft_ms, "first token"),
            (self.max_total, offer.latency.total_ms, "whole answer"),
        ):
            if limit is not None and ms is not None and ms > limit * 1000:
                return Reason("latency_limit", f"{what} expected after {ms:.0f} ms, limit {limit * 1000:.0f} ms")
        return None


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
    """Keep a session where it was: its cache is there. The order of the others is left as it is."""
    if ask.previous_backend is None:
        return offers
    here = [o for o in offers if o.backend == ask.previous_backend]
    if not here or here[0] is offers[0]:
        return offers
    kept = _with(here[0], Reason("sticky", f"session {ask.session_id} was answered here before"))
    return [kept, *(o for o in offers if o.backend != ask.previous_backend)]


def _with(offer: Offer, reason: Reason | None) -> Offer:
    return offer if reason is None else replace(offer, reasons=(*offer.reasons, reason))


def _price(offer: Offer) -> tuple[bool, Decimal]:
    quote = offer.quote
    if quote is None or quote.expected is None:
        return True, Decimal(0)
    return False, quote.expected


def _ttft(offer: Offer) -> float:
    return float("inf") if offer.latency.ttft_ms is None else offer.latency.ttft_ms
