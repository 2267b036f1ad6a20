"""Prices one candidate: what a request is expected to cost there, and what it can cost at most.

Pure arithmetic on what the backend estimates and its rates; no I/O (contract D3). The worst case is what is reserved:
every input token at the dearest class that could apply and the whole output allowance, with input bounded by bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING

from cachespec.caching import Lifetime
from cachespec.decision import Latency, Quote, TokenEstimate
from cachespec.pricing import Rates
from cachespec.turns import Outlook
from cachespec.usage import EXACT, WRITE_TTLS, Cost, Usage

if TYPE_CHECKING:
    from cachespec.backends.base import Estimate

EXPECTED_OUTPUT = 400
"""Output tokens expected of a request about which nothing was learned; never above its own limit."""
_ENOUGH = 64  # tokens that were read, to tell how long one takes
_NOTHING_FOLLOWS = Outlook()


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
    outlook: Outlook = _NOTHING_FOLLOWS,
    kept: Sequence[Lifetime] = (),
    read: float = 1.0,
) -> Quote | None:
    """Expected and worst cost in USD; None when the price or the size of the input is not known, or there is no bound.

    `tokens` and `latency` are the estimate's with what was learned; a local engine's expected time is its latency. `at_most_s`
    is the request's deadline: whatever else happens on the machine, it cannot be busy with the request for longer, so that is
    the worst case of a price per hour. `busy_s` is the part of that time that is spent on the request itself. `outlook` is what
    is expected to follow in the conversation; turns within the best of the lifetimes `kept` find the one before them cached,
    and read that at `read` times the price of input.
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
    if outlook.turns and expected.amount is not None:
        each = _turn(rates, estimate, tokens, _turn_s(tokens, latency, seconds, outlook), outlook, kept, read)
        ahead = None if each is None else EXACT.multiply(each, Decimal(repr(round(outlook.turns, 3))))
    return Quote(
        expected=expected.amount,
        worst=worst,
        source=rates.source,
        price_date=rates.price_date,
        ahead=ahead,
        turns=outlook.turns,
    )


def _turn(
    rates: Rates,
    estimate: Estimate,
    tokens: TokenEstimate,
    busy_s: float | None,
    outlook: Outlook,
    kept: Sequence[Lifetime],
    read: float,
) -> Decimal | None:
    """What a further turn is expected to cost, in the mean over all of them, with the lifetime that makes it cheapest,
    or with none.

    The prompt of the turn before is read, if it is still there, and what was added since is new. The mean turn is the middle
    one, by when the prompt has grown as far as that.
    """
    answer = tokens.output_expected or 0
    growth = _growth(tokens, outlook)
    before = (tokens.input or 0) + round(growth * max(outlook.turns - 1.0, 0.0) / 2)
    added = round(growth)
    best, found, least = "", 0, float(before + added)
    for lifetime in kept:
        there = round(before * outlook.within(lifetime.seconds))
        weight = there * read + (before - there + added) * lifetime.write
        if weight < least:
            best, found, least = lifetime.name, there, weight
    new = before - found + added
    written = {best: new} if best in WRITE_TTLS and new else {}  # where a vendor caches by itself, that is plain input
    usage = Usage(uncached=0 if written else new, cache_read=found, cache_write=written, output=answer)
    return rates.cost(usage, busy_s=busy_s, billing=estimate.billing).amount


def _growth(tokens: TokenEstimate, outlook: Outlook) -> float:
    """Tokens that each further turn adds to the prompt: the answer before it at least."""
    answer = float(tokens.output_expected or 0)
    return answer if outlook.growth is None else max(outlook.growth, answer)


def _turn_s(tokens: TokenEstimate, latency: Latency, busy_s: float | None, outlook: Outlook) -> float | None:
    """How long a local engine is busy with a further turn: with its answer, and with reading what else was added."""
    if latency.ttft_ms is None or latency.total_ms is None:
        return None
    answer_s = (latency.total_ms - latency.ttft_ms) / 1000
    fresh = (tokens.uncached or 0) + (tokens.cache_write or 0)
    if busy_s is None or fresh < _ENOUGH:
        return answer_s  # what so few tokens took is mostly what any request takes
    return answer_s + max(busy_s - answer_s, 0.0) / fresh * (_growth(tokens, outlook) - (tokens.output_expected or 0))


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
