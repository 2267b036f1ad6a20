"""What an attempt used and what it cost, once it is over."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING

import anyio

from cachespec._rates import MODEL
from cachespec.assembly import Assembly
from cachespec.decision import TokenEstimate
from cachespec.ledger.base import MOST_USD
from cachespec.quotes import cut_usage, estimated_cost
from cachespec.usage import Cost, Usage

if TYPE_CHECKING:
    from cachespec.backends.base import Attempt, Backend


def spent(
    backend: Backend, attempt: Attempt | None, assembly: Assembly, tokens: TokenEstimate, *, since: float
) -> tuple[Usage | None, Cost]:
    """What an attempt used, as the vendor counted it where it did, and its price.

    `tokens` were expected; what nobody counted is estimated by them. `since`, on the event loop's clock, it was under way. A
    count that nobody can believe, since no ledger holds its price, is None, as if it had not come.
    """
    usage, cost = _reported(backend, attempt, assembly, tokens, since=since)
    if believable(cost):
        return usage, cost
    estimate = cut_usage(tokens, deltas=assembly.deltas, size=assembly.size)
    cost = estimated_cost(backend.rates, estimate, busy_s=assembly.busy_s, billing=_facts(assembly))
    return None, cost if believable(cost) else Cost(amount=None, estimated=True, source=None, price_date=None)


def believable(cost: Cost) -> bool:
    """Whether one request may have cost that. What is not known may."""
    return (cost.amount or Decimal(0)) <= MOST_USD


def _reported(
    backend: Backend, attempt: Attempt | None, assembly: Assembly, tokens: TokenEstimate, *, since: float
) -> tuple[Usage | None, Cost]:
    rates = backend.rates
    busy, usage, counted = assembly.busy_s, assembly.usage, assembly.finished is not None
    if backend.capabilities.local and not counted:
        # An engine of ours knows what it did for an attempt that was left, and how long it took; a local server does not say.
        busy, own = getattr(attempt, "busy_s", None), getattr(attempt, "usage", None)
        busy = anyio.current_time() - since if busy is None else busy
        usage, counted = own or usage, own is not None
    if usage is not None and counted and usage.uncached is not None and usage.output is not None:
        if rates is None:
            return usage, Cost(amount=None, estimated=False, source=None, price_date=None)
        return usage, rates.cost(usage, busy_s=busy, billing=_facts(assembly))
    estimate = cut_usage(tokens, deltas=assembly.deltas, size=assembly.size)
    if usage is not None:
        # Counted in part (a cut after the first counts came): what is known stands, the rest is estimated.
        estimate = Usage(
            uncached=estimate.uncached if usage.uncached is None else usage.uncached,
            cache_read=usage.cache_read if usage.uncached is not None else estimate.cache_read,
            cache_write=usage.cache_write if usage.uncached is not None else estimate.cache_write,
            output=max(usage.output or 0, estimate.output or 0),
        )
    return usage, estimated_cost(rates, estimate, busy_s=busy, billing=_facts(assembly))


def _facts(assembly: Assembly) -> Mapping[str, str] | None:
    """What the price depends on beside the counts: what was said of the tier, and the model that answered."""
    model = None if assembly.started is None else assembly.started.model
    return assembly.billing if model is None else {**(assembly.billing or {}), MODEL: model}
