"""What a request and the turns after it are expected to cost, worked out by hand."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest

from cachespec.backends.base import Estimate
from cachespec.caching import Lifetime
from cachespec.decision import Ask, Belief, Latency, Quote, TokenEstimate
from cachespec.pricing import hosted_rates, local_rates
from cachespec.quotes import quote
from cachespec.turns import Outlook, Turns

PRICES = {"input": "2", "cache_read": "0.2", "cache_write": {"5m": "2.5", "1h": "4"}, "output": "10"}
SHORT, LONG = Lifetime(name="5m", seconds=300.0, write=1.25), Lifetime(name="1h", seconds=3_600.0, write=2.0)
KV = Lifetime(name="kv", seconds=math.inf, write=1.0)
LATENCY = Latency(ttft_ms=1_000.0, total_ms=3_000.0)


def tokens(fresh: int = 1_000, read: int = 0) -> TokenEstimate:
    return TokenEstimate(
        input=fresh + read,
        cache_read=read,
        cache_write=0,
        uncached=fresh,
        output_expected=100,
        output_max=500,
        worst_input=5_000,
    )


def priced(outlook: Outlook, kept: tuple[Lifetime, ...]) -> Quote:
    estimate = Estimate(tokens=tokens(), belief=Belief(state="cold"), latency=LATENCY)
    rates = hosted_rates(None, "m", prices=PRICES)
    made = quote(rates, estimate, tokens(), LATENCY, at_most_s=None, outlook=outlook, kept=kept, read=0.1)
    assert made is not None
    return made


def paced(gap: float, growth: int) -> Outlook:
    """What is expected where a great many turns have always come after this gap, and added this much."""
    turns = Turns()
    ask = Ask(alias="m", tenant=None, session_id="s", tags=(), tools=False, max_output_tokens=None, timeout_s=None, now=0.0)
    for i in range(2_000):
        before = "a" if i % 4 else None
        name = f"s{i // 4}"
        turn = Ask(
            alias="m",
            tenant=None,
            session_id=name,
            tags=(),
            tools=False,
            max_output_tokens=None,
            timeout_s=None,
            now=i * gap,
            previous_backend=before,
        )
        turns.learn(turn, backend="a", tokens=1_000 + growth * (i % 4))
    return turns.outlook(ask)


def test_nothing_follows_costs_nothing() -> None:
    assert priced(Outlook(), (SHORT,)).ahead is None
    assert priced(Outlook(), ()).expected == Decimal("0.003")


def test_without_a_cache_every_turn_pays_for_all_there_is() -> None:
    ahead = priced(Outlook(turns=3.0, growth=200.0), ()).ahead
    # The middle one of three has grown once; the turn's own growth is new as well.
    assert ahead == 3 * Decimal((1_000 + 200 + 200) * 2 + 100 * 10) / 1_000_000


def test_what_is_cached_is_read_and_what_was_added_is_written() -> None:
    ahead = priced(Outlook(turns=3.0, growth=200.0), (SHORT,)).ahead
    assert ahead == 3 * (Decimal(1_200) * Decimal("0.2") + Decimal(200) * Decimal("2.5") + 1_000) / 1_000_000
    least = priced(Outlook(turns=3.0), (SHORT,)).ahead  # nothing known of growth: the answer at least
    assert least == 3 * (Decimal(1_100) * Decimal("0.2") + Decimal(100) * Decimal("2.5") + 1_000) / 1_000_000


def test_what_a_vendor_keeps_by_itself_is_plain_input() -> None:
    kept = Lifetime(name="in_memory", seconds=300.0, write=1.0)
    ahead = priced(Outlook(turns=3.0, growth=200.0), (kept,)).ahead
    assert ahead == 3 * (Decimal(1_200) * Decimal("0.2") + Decimal(200) * 2 + 1_000) / 1_000_000


def test_the_lifetime_that_serves_best_is_taken() -> None:
    soon, late = paced(20.0, 200), paced(800.0, 200)
    assert soon.turns == pytest.approx(3.0, rel=0.05)

    def each(outlook: Outlook, *kept: Lifetime) -> float:
        ahead = priced(outlook, kept).ahead
        assert ahead is not None
        return float(ahead) / outlook.turns

    assert each(soon, SHORT, LONG) == each(soon, SHORT) < each(soon, LONG)
    assert each(late, SHORT, LONG) == each(late, LONG) < each(late)
    # Nothing is marked for a lifetime that all turns would miss.
    assert each(late, SHORT) == each(late)


def test_a_local_engine_reads_what_was_added_and_answers() -> None:
    rates = local_rates({"per_hour": "3.60"})
    estimate = Estimate(tokens=tokens(), belief=Belief(state="cold"), latency=LATENCY, busy_s=3.0)
    made = quote(
        rates, estimate, tokens(), LATENCY, at_most_s=None, busy_s=3.0, outlook=Outlook(turns=2.0, growth=600.0), kept=(KV,)
    )
    assert made is not None
    assert made.expected == Decimal("0.003")
    # 2 s for an answer; 500 of the 600 added tokens are not its own, at the second that 1,000 take.
    assert made.ahead == Decimal("0.005")
    warm = tokens(fresh=10, read=990)  # too few to tell how long a token takes
    made = quote(
        rates, estimate, warm, LATENCY, at_most_s=None, busy_s=2.1, outlook=Outlook(turns=2.0, growth=600.0), kept=(KV,)
    )
    assert made is not None
    assert made.ahead == Decimal("0.004")
