"""Prices one candidate: what a request is expected to cost there, and what it can cost at most.

Pure arithmetic on what the backend estimates and its rates; no I/O (contract D3). The worst case is what is reserved:
every input token at the dearest class that could apply and the whole output allowance, with input bounded by bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING

from cachespec.decision import Latency, Quote, TokenEstimate
from cachespec.pricing import Rates
from cachespec.usage import EXACT, Cost, Usage

if TYPE_CHECKING:
    from cachespec.backends.base import Estimate

EXPECTED_OUTPUT = 400
"""Output tokens expected of a request about which nothing was learned; never above its own limit."""


def with_output(
    tokens: TokenEstimate,
    output_max: int | None,
    expected: int | None,
    worst_input: int | None,
    error: float | None = None,
) -> TokenEstimate:
    """The estimate with its output side, what may come at most and what is expected, and with the bound on its input."""
    if expected is None:
        expected = EXPECTED_OUTPUT
    if output_max is not None:
        expected = min(expected, output_max)
    return TokenEstimate(
        input=tokens.input,
        cache_read=tokens.cache_read,
        cache_write=tokens.cache_write,
        uncached=tokens.uncached,
        output_expected=expected,
        output_max=output_max,
        worst_input=worst_input,
        writes=tokens.writes,
        error=error,
    )


def quote(
    rates: Rates | None,
    estimate: Estimate,
    tokens: TokenEstimate,
    latency: Latency,
    *,
    at_most_s: float | None,
    busy_s: float | None = None,
    turns: float = 0.0,
    reads: bool = False,
) -> Quote | None:
    """Expected and worst cost in USD; None when the price or the size of the input is not known, or there is no bound.

    `tokens` and `latency` are the estimate's with what was learned; a local engine's expected time is its latency. `at_most_s`
    is the request's deadline: whatever else happens on the machine, it cannot be busy with the request for longer, so that is
    the worst case of a price per hour. `busy_s` is the part of that time that is spent on the request itself. `turns` are
    expected to follow in the conversation; with `reads` they find the prompt of the one before them cached.
    """
    if rates is None or tokens.input is None:
        return None
    seconds = _seconds(latency) if busy_s is None else busy_s
    usage = Usage(
        uncached=tokens.uncached if tokens.uncached is not None else tokens.input,
        cache_read=tokens.cache_read or 0,
        cache_write=_writes(tokens) or {},
        output=tokens.output_expected or 0,
    )
    expected = rates.cost(usage, busy_s=seconds, billing=estimate.billing)
    worst = None
    if tokens.worst_input is not None and tokens.output_max is not None and not estimate.unbounded:
        worst = rates.worst(
            input_tokens=tokens.worst_input,
            output_tokens=tokens.output_max,
            seconds=at_most_s,
            billing=estimate.billing,
        )
    ahead = None
    if turns and expected.amount is not None:
        each = _turn(rates, estimate, tokens, latency, reads=reads)
        ahead = None if each is None else EXACT.multiply(each, Decimal(repr(round(turns, 3))))
    return Quote(
        expected=expected.amount,
        worst=worst,
        source=rates.source,
        price_date=rates.price_date,
        ahead=ahead,
        turns=turns,
    )


def _turn(rates: Rates, estimate: Estimate, tokens: TokenEstimate, latency: Latency, *, reads: bool) -> Decimal | None:
    """What one further turn is expected to cost: all there is by then is read, and what was answered is new."""
    before, answer = tokens.input or 0, tokens.output_expected or 0
    seconds = None
    if latency.ttft_ms is not None and latency.total_ms is not None:
        seconds = (latency.total_ms - latency.ttft_ms) / 1000  # with all but a little cached, it is the answer that takes time
    ttl = next(iter(tokens.writes), "unspecified") if tokens.writes else "unspecified"
    usage = Usage(
        uncached=0 if reads else before + answer,
        cache_read=before if reads else 0,
        cache_write={ttl: answer} if reads and answer else {},
        output=answer,
    )
    return rates.cost(usage, busy_s=seconds, billing=estimate.billing).amount


def cut_usage(tokens: TokenEstimate, *, deltas: int, size: int) -> Usage:
    """What a stream that ended without usage is taken to have used: its estimated input, and the output counted.

    A delta is at least one token on every known protocol, and four bytes a token is the usual density, so the larger of
    both is used. Marked as an estimate wherever it is shown (case A14).
    """
    return Usage(
        uncached=tokens.uncached if tokens.uncached is not None else tokens.input,
        cache_read=tokens.cache_read,
        cache_write=_writes(tokens),
        output=max(deltas, -(-size // 4)),
    )


def estimated_cost(rates: Rates | None, usage: Usage, *, busy_s: float | None, billing: Mapping[str, str] | None) -> Cost:
    """The price of an estimated usage; never above nothing when the price is unknown: then the amount is None."""
    if rates is None or usage.uncached is None:
        return Cost(amount=None, estimated=True, source=None, price_date=None)
    return replace(rates.cost(usage, busy_s=busy_s, billing=billing), estimated=True)


def _writes(tokens: TokenEstimate) -> Mapping[str, int] | None:
    """Expected writes by lifetime; None where there are none, or nobody can tell."""
    if tokens.writes:
        return tokens.writes
    return {"unspecified": tokens.cache_write} if tokens.cache_write else None


def _seconds(latency: Latency) -> float | None:
    return None if latency.total_ms is None else latency.total_ms / 1000
