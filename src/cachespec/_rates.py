"""Prices of tokens as frozen values, and the arithmetic on them: microseconds, no I/O.

How a token without a price of its own class is billed, and when that makes a cost `estimated`:

====================================  ===========================================================  =========
tokens                                billed as                                                    estimated
====================================  ===========================================================  =========
reads, no read price                  input                                                        yes
reads not reported, a read is cheaper input (an upper bound)                                       yes [1]_
writes, no write price                input                                                        yes
writes ``"unspecified"``              5m (Anthropic's default lifetime)                            yes
writes ``"12h"``, no such price       30m (OpenAI publishes no other)                              yes
writes of another unpriced lifetime   the dearest write that is listed                             yes
searches, no price of their own       nothing                                                      yes
media, at their own price             that, as if none of them were read or written                where any was
sound, no price of its own            text                                                         yes
images, films, no price of their own  text                                                         no
what is `unread` in the usage         nothing                                                      yes
a release of the model, not listed    the model                                                    no
another model, not listed             the one that was asked for                                   yes
a service tier that is not listed     the standard price (its worst case: unknown)                 yes
all, in dearer hours, on a weekend    those hours' price [2]_                                      yes
input or output, no price             the cost is None                                             no
====================================  ===========================================================  =========

A worst case covers the standard price and the tier that the request asks for, whichever is dearer, since a vendor may serve
in either. It is unknown when that tier has no price, except for the tiers that are never dearer, and under prices of one's
own, which stand for whatever was asked for.

.. [1] Not where silence is an answer: Gemini leaves the count out on a miss, Cohere's billed units are all it bills.
.. [2] An upper bound: the table's hours of the day know no days of the week, and DeepSeek's peak is from Monday to Friday.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from time import time as unix_time

from cachespec.errors import InputError
from cachespec.usage import EXACT, MEDIA, WEB_SEARCH, WRITE_TTLS, Cost, Made, Usage

Tiers = tuple[tuple[int, Decimal], ...]
"""USD per million tokens by size of the request: the price of the last tier whose start its input tokens exceed."""

INPUT, READ, WRITE, OUTPUT, REASONING, REQUEST = "input", "cache_read", "cache_write", "output", "reasoning", "request"
_SOUND = "audio"
_SEEN = tuple(medium for medium in MEDIA if medium != _SOUND)
_MILLION = Decimal(1_000_000)
_ZERO = Decimal(0)
_FREE: Tiers = ((0, _ZERO),)

MODEL = "model"
"""The billing fact that is no tier: which model answered, as the vendor names it."""
_LONGEST_NAME = 128

_NEUTRAL = frozenset({"default", "standard", "standard_only", "auto", "on_demand", "global", "not_available", ""})
"""Values of billing facts that mean the standard price."""

_CHEAPER = frozenset({"flex", "batch"})
"""Values of billing facts that are never dearer than the standard price."""

_WEEKEND = (5, 6)  # days of `datetime.weekday`

_NO_FACTS: frozenset[tuple[str, str]] = frozenset()
_FACTS_KEPT = 64  # sets of billing facts, and models that answered

OVERRIDE = "override"
"""The source of prices that the configuration gives."""


def _at_size(tiers: Tiers, input_tokens: int) -> Decimal:
    price = tiers[0][1]
    for start, tier in tiers[1:]:
        if input_tokens > start:
            price = tier
    return price


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Prices by class (`input`, `cache_read`, a write lifetime, `output`...), valid from a date or at a time of day (UTC)."""

    prices: Mapping[str, Tiers]
    start: date | None = None
    hours: tuple[time, time] | None = None
    when: tuple[tuple[str, str], ...] = ()

    def active(self, at: datetime) -> bool:
        if self.start is not None:
            return at.date() >= self.start
        if self.hours is not None:
            begin, end = self.hours
            now = at.time()
            return begin <= now < end if begin <= end else now >= begin or now < end
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dearest:
    """The dearest prices that a list has for a token of input, one of output, and a request. None: it has none."""

    input: Tiers | None
    output: Tiers | None
    request: Tiers | None

    def of(self, input_tokens: int, output_tokens: int) -> Decimal:
        """The price of a request in millionths of a USD, for prices that are there."""
        amount = _ZERO if self.input is None else EXACT.multiply(_at_size(self.input, input_tokens), input_tokens)
        if output_tokens and self.output is not None:
            amount = EXACT.fma(_at_size(self.output, input_tokens), output_tokens, amount)
        return amount if self.request is None else EXACT.add(amount, _at_size(self.request, input_tokens))


@dataclass(frozen=True, slots=True)
class _Standing:
    """Prices at one moment, by class; the values of billing facts that have none; since when they are valid, and whether
    they are known to hold on that day."""

    prices: Mapping[str, Tiers]
    unpriced: frozenset[str]
    day: str | None
    sure: bool


@dataclass(frozen=True, slots=True)
class _InForce:
    """What holds from `since` until before `until` (Unix seconds), and the dearest of what may."""

    since: float
    until: float
    standing: _Standing
    dearest: tuple[_Dearest, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRates:
    """Prices per token. `lists` in order of precedence, the last one always valid; `variants` for tiers of the response."""

    source: str
    price_date: str | None
    lists: tuple[PriceList, ...]
    variants: tuple[PriceList, ...] = ()
    silent_reads: bool = False
    """Reads that were not reported did not happen (see the module's footnote)."""
    others: Callable[[str], TokenRates | None] | None = field(default=None, repr=False, compare=False)
    """The same vendor's prices of a model; None where these prices stand for whichever model answers."""
    _answered: dict[str, TokenRates | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The prices of models that answered."""
    _now: dict[frozenset[tuple[str, str]], _InForce] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What holds now, by billing facts."""

    def cost(
        self,
        usage: Usage,
        *,
        busy_s: float | None = None,
        billing: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> Cost:
        """See `Rates.cost`. `busy_s` plays no part in a price per token."""
        answered = None if billing is None else billing.get(MODEL)
        if answered is None and not usage.requests:  # a quote
            return self._cost(usage, billing, at)
        costs: list[Cost] = []
        for made in usage.requests or (Made(usage=usage),):
            name = made.model or answered
            rates = self if name is None else self._of(name)
            cost = (rates or self)._cost(made.usage, billing, at)
            costs.append(cost if rates is not None or cost.amount is None else replace(cost, estimated=True))
        amount: Decimal | None = _ZERO
        for cost in costs:
            amount = None if amount is None or cost.amount is None else EXACT.add(amount, cost.amount)
        estimated = amount is not None and (usage.unread or any(cost.estimated for cost in costs))
        return Cost(amount=amount, estimated=estimated, source=self.source, price_date=costs[0].price_date)

    def _of(self, model: str) -> TokenRates | None:
        """The prices of the model that answered; None where they are not known."""
        if self.others is None:
            return self
        if model not in self._answered:
            if len(self._answered) >= _FACTS_KEPT:
                self._answered.clear()
            self._answered[model] = self.others(model) if len(model) <= _LONGEST_NAME else None
        return self._answered[model]

    def _cost(self, usage: Usage, billing: Mapping[str, str] | None, at: datetime | None) -> Cost:
        """The price of one request of a vendor's."""
        standing = self._in_force(billing).standing if at is None else self._prices(_utc(at), billing)
        prices, day = standing.prices, standing.day
        estimated = bool(standing.unpriced) or not standing.sure or usage.unread
        total = usage.input_tokens
        if total is None or usage.output is None:
            return Cost(amount=None, estimated=False, source=self.source, price_date=day)
        amount = _ZERO
        for count, tiers, assumed in _billed(usage, prices):
            if tiers is None:
                return Cost(amount=None, estimated=False, source=self.source, price_date=day)
            amount = EXACT.fma(_at_size(tiers, total), count, amount)
            estimated |= assumed
        amount = EXACT.divide(amount, _MILLION)
        if usage.cache_read is None and usage.uncached and not self.silent_reads:
            estimated |= READ in prices and _at_size(prices[READ], total) < _at_size(prices[INPUT], total)
        return Cost(amount=amount, estimated=estimated, source=self.source, price_date=day)

    def worst(
        self,
        *,
        input_tokens: int,
        output_tokens: int,
        seconds: float | None = None,
        billing: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> Decimal | None:
        """See `Rates.worst`. Covers every time of day, and a dated change within a day."""
        dearest = self._in_force(billing).dearest if at is None else self._dearest(_utc(at), billing)
        if dearest is None or any(d.input is None or (output_tokens and d.output is None) for d in dearest):
            return None
        return EXACT.divide(max([d.of(input_tokens, output_tokens) for d in dearest]), _MILLION)

    def _in_force(self, billing: Mapping[str, str] | None) -> _InForce:
        """What holds now, worked out anew when the day ends, or the hours of a price begin or end."""
        key = frozenset(_facts(billing).items()) if billing else _NO_FACTS
        found, now = self._now.get(key), unix_time()
        if found is None or not found.since <= now < found.until:
            at = datetime.fromtimestamp(now, UTC)
            since, until = self._around(at)
            found = _InForce(since.timestamp(), until.timestamp(), self._prices(at, billing), self._dearest(at, billing))
            if len(self._now) >= _FACTS_KEPT:
                self._now.clear()
            self._now[key] = found
        return found

    def _around(self, at: datetime) -> tuple[datetime, datetime]:
        """From when to when the same prices hold as at this moment, looking no further than its day."""
        edges = {time(), *(edge for prices in (*self.lists, *self.variants) for edge in prices.hours or ())}
        since = max(edge for edge in edges if edge <= at.time())
        until = min((edge for edge in edges if edge > at.time()), default=None)
        tomorrow = datetime.combine(at.date(), time(), UTC) + timedelta(days=1)
        return datetime.combine(at.date(), since, UTC), tomorrow if until is None else datetime.combine(at.date(), until, UTC)

    def _dearest(self, at: datetime, billing: Mapping[str, str] | None) -> tuple[_Dearest, ...] | None:
        """The dearest prices of each list that may hold for a request sent at this time; None where one is not known."""
        moments = [at, at + timedelta(days=1) if at.date() < date.max else at]
        moments += [datetime.combine(at.date(), p.hours[0], UTC) for p in self.lists if p.hours]
        found: dict[_Dearest, None] = {}
        for asked in (None, billing) if billing else (None,):
            for when in moments:
                standing = self._prices(when, asked)
                if self.source != OVERRIDE and not standing.unpriced <= _CHEAPER:
                    return None
                found[_dearest(standing.prices)] = None
        return tuple(found)

    def _prices(self, at: datetime, billing: Mapping[str, str] | None) -> _Standing:
        base = next((p for p in self.lists if p.active(at)), self.lists[-1])
        day = base.start.isoformat() if base.start and base.active(at) else self.price_date
        sure = base.hours is None or at.weekday() not in _WEEKEND
        facts = _facts(billing)
        if not facts:
            return _Standing(base.prices, frozenset(), day, sure)
        prices, known = dict(base.prices), {key for key, value in facts.items() if value in _NEUTRAL}
        chosen: dict[str, Tiers] = {}
        for variant in self.variants:
            if variant.active(at) and all(facts.get(key) == value for key, value in variant.when):
                known.update(key for key, _ in variant.when)
                chosen = {**variant.prices, **chosen}
        prices.update(chosen)
        return _Standing(prices, frozenset(value for key, value in facts.items() if key not in known), day, sure)


def _facts(billing: Mapping[str, str] | None) -> Mapping[str, str]:
    """Billing facts that may change a price. Anthropic's and Gemini's batch tier is the table's `processing`."""
    facts = {key: value for key, value in (billing or {}).items() if isinstance(value, str) and key != MODEL}
    if facts.get("service_tier") == "batch":
        facts["processing"] = facts.pop("service_tier")
    return facts


def _billed(usage: Usage, prices: Mapping[str, Tiers]) -> Iterator[tuple[int, Tiers | None, bool]]:
    """(count, price, assumed) of every class that has tokens."""
    plain, apart = prices.get(INPUT), usage.apart
    if apart is not None:
        yield from _apart(usage, apart, prices)
    elif usage.uncached:
        yield usage.uncached, plain, False
    if usage.cache_read:
        yield usage.cache_read, prices.get(READ, plain), READ not in prices
    for ttl, count in (usage.cache_write or {}).items():
        if count:
            yield count, *_write_price(prices, ttl)
    output, reasoning = usage.output or 0, 0
    if REASONING in prices and usage.reasoning:
        reasoning = min(usage.reasoning, output)
        yield reasoning, prices[REASONING], False
    if apart is not None:
        yield from _media(output - reasoning, OUTPUT, apart, prices, sure=True)
    elif output > reasoning:
        yield output - reasoning, prices.get(OUTPUT), False
    if REQUEST in prices:
        yield 1, prices[REQUEST], False


def _apart(usage: Usage, apart: Mapping[str, int], prices: Mapping[str, Tiers]) -> Iterator[tuple[int, Tiers | None, bool]]:
    """Searches, and the input that was neither read nor written, by its media."""
    if searches := apart.get(WEB_SEARCH):
        yield searches, prices.get(WEB_SEARCH, _FREE), WEB_SEARCH not in prices
    yield from _media(usage.uncached or 0, INPUT, apart, prices, sure=not (usage.cache_read or usage.written))


def _media(
    count: int, side: str, apart: Mapping[str, int], prices: Mapping[str, Tiers], *, sure: bool
) -> Iterator[tuple[int, Tiers | None, bool]]:
    """The tokens of one side: those of each medium at its own price, where there is one, and the rest as text."""
    plain = prices.get(side)
    for medium in MEDIA:
        name = f"{side}_{medium}"
        if own := min(apart.get(name, 0), count):
            count -= own
            yield own, prices.get(name, plain), (not sure if name in prices else medium == _SOUND)
    if count:
        yield count, plain, False


def _write_price(prices: Mapping[str, Tiers], ttl: str) -> tuple[Tiers | None, bool]:
    """The price of a write and whether it is an assumption. `WRITE` is the table's price for the default lifetime."""
    if ttl in prices:
        return prices[ttl], False
    default = {"5m": WRITE, "unspecified": "5m", "12h": "30m"}.get(ttl, WRITE)
    if default != WRITE and default in prices:
        return prices[default], True
    if WRITE in prices:
        # A table with a one-hour price is Anthropic's, and its default lifetime is 5m; without one it is OpenAI's 30m.
        sure = ttl == "5m" or (ttl == "30m" and "1h" not in prices)
        return prices[WRITE], not sure
    listed = [prices[name] for name in WRITE_TTLS if name in prices]
    return (max(listed, key=lambda tiers: tiers[-1][1]) if listed else prices.get(INPUT)), True


def _dearest(prices: Mapping[str, Tiers]) -> _Dearest:
    # Not sound, which has no bound as input, nor has a request for it as output: what it may cost is not known before.
    inputs = [prices[name] for name in (INPUT, READ, WRITE, *WRITE_TTLS, *(f"{INPUT}_{m}" for m in _SEEN)) if name in prices]
    outputs = [prices[name] for name in (OUTPUT, REASONING, *(f"{OUTPUT}_{m}" for m in _SEEN)) if name in prices]
    return _Dearest(
        input=_rising(inputs) if INPUT in prices else None,
        output=_rising(outputs) if OUTPUT in prices else None,
        request=_rising([prices[REQUEST]]) if REQUEST in prices else None,
    )


def _rising(several: Sequence[Tiers]) -> Tiers:
    """The dearest of these at any size up to the given one: a larger request never costs less than a smaller one may."""
    price = max(tiers[0][1] for tiers in several)
    rising = [(0, price)]
    for start, tier in sorted(step for tiers in several for step in tiers[1:]):
        price = max(price, tier)
        rising.append((start, price))
    return tuple(rising)


def _utc(at: datetime | None) -> datetime:
    """Naive times are UTC. Raises InputError at the edges of the calendar, where a zone leaves it."""
    if at is None:
        return datetime.now(UTC)
    try:
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except OverflowError:
        raise InputError(f"is no time in UTC: {at.isoformat()}", field="at") from None
