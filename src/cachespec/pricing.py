"""Prices behind one interface, exact and dated.

`Rates` is what a backend carries: resolved once per model, then pure arithmetic on decimals. An unknown price is None,
never 0 and never another model's (contract M2).

- `hosted_rates`: a vendor's price list, from genai-prices or from the configuration.
- `local_rates`: what a local engine's time or tokens cost, from the configuration.

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
a service tier that is not listed     the standard price                                           yes
input or output, no price             the cost is None                                             no
====================================  ===========================================================  =========

.. [1] Not where silence is an answer: Gemini leaves the count out on a miss, Cohere's billed units are all it bills.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from cachespec.errors import ConfigError
from cachespec.usage import WRITE_TTLS, Cost, Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice


class Rates(Protocol):
    """Prices of one model on one provider, or the price of a local engine's time."""

    @property
    def source(self) -> str: ...

    @property
    def price_date(self) -> str | None: ...

    def cost(
        self,
        usage: Usage,
        *,
        busy_s: float | None = None,
        billing: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> Cost:
        """The exact price of `usage`. `busy_s` is a local engine's seconds; `billing` what the response said of its tier."""

    def worst(
        self,
        *,
        input_tokens: int,
        output_tokens: int,
        seconds: float | None = None,
        billing: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> Decimal | None:
        """An upper bound in USD: every input token at the dearest class that could apply, and all of the output.

        `billing` is the tier that the *request* asks for (``{"service_tier": "priority"}``); without it the standard one.
        """


Tiers = tuple[tuple[int, Decimal], ...]
"""USD per million tokens by size of the request: the price of the last tier whose start its input tokens exceed."""

INPUT, READ, WRITE, OUTPUT, REASONING, REQUEST = "input", "cache_read", "cache_write", "output", "reasoning", "request"
_MILLION = Decimal(1_000_000)
_TINY = Decimal("1e-12")
_SILENT_PROVIDERS = ("google", "gemini", "vertex", "cohere")
_NEUTRAL = frozenset({"default", "standard", "standard_only", "auto", "on_demand", "global", "not_available", ""})
"""Values of billing facts that mean the standard price."""


def _at_size(tiers: Tiers, input_tokens: int) -> Decimal:
    price = tiers[0][1]
    for start, tier in tiers[1:]:
        if input_tokens > start:
            price = tier
    return price


def _dearest(tiers: Tiers, input_tokens: int) -> Decimal:
    return max(price for i, (start, price) in enumerate(tiers) if i == 0 or input_tokens > start)


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
class TokenRates:
    """Prices per token. `lists` in order of precedence, the last one always valid; `variants` for tiers of the response."""

    source: str
    price_date: str | None
    lists: tuple[PriceList, ...]
    variants: tuple[PriceList, ...] = ()
    silent_reads: bool = False
    """Reads that were not reported did not happen (see the module's footnote)."""

    def cost(
        self,
        usage: Usage,
        *,
        busy_s: float | None = None,
        billing: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> Cost:
        """See `Rates.cost`. `busy_s` plays no part in a price per token."""
        moment = _utc(at)
        prices, estimated, day = self._prices(moment, billing)
        total = usage.input_tokens
        unknown = Cost(amount=None, estimated=False, source=self.source, price_date=day)
        if total is None or usage.output is None:
            return unknown
        amount = Decimal(0)
        for count, tiers, assumed in _billed(usage, prices):
            if tiers is None:
                return unknown
            amount += count * _at_size(tiers, total)
            estimated |= assumed
        if usage.cache_read is None and usage.uncached and not self.silent_reads:
            estimated |= READ in prices and _at_size(prices[READ], total) < _at_size(prices[INPUT], total)
        return Cost(amount=amount / _MILLION, estimated=estimated, source=self.source, price_date=day)

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
        moment = _utc(at)
        moments = [moment, moment + timedelta(days=1)]
        moments += [datetime.combine(moment.date(), p.hours[0], UTC) for p in self.lists if p.hours]
        bounds = [_worst(self._prices(m, billing)[0], input_tokens, output_tokens) for m in moments]
        known = [b for b in bounds if b is not None]
        return max(known) if len(known) == len(bounds) else None

    def _prices(self, at: datetime, billing: Mapping[str, str] | None) -> tuple[Mapping[str, Tiers], bool, str | None]:
        """The prices in force, whether a billing fact could not be priced, and since when they are valid."""
        base = next((p for p in self.lists if p.active(at)), self.lists[-1])
        day = base.start.isoformat() if base.start and base.active(at) else self.price_date
        facts = _facts(billing)
        if not facts:
            return base.prices, False, day
        prices, known = dict(base.prices), {key for key, value in facts.items() if value in _NEUTRAL}
        chosen: dict[str, Tiers] = {}
        for variant in self.variants:
            if variant.active(at) and all(facts.get(key) == value for key, value in variant.when):
                known.update(key for key, _ in variant.when)
                chosen = {**variant.prices, **chosen}
        prices.update(chosen)
        return prices, len(known) < len(facts), day


def _facts(billing: Mapping[str, str] | None) -> Mapping[str, str]:
    """Billing facts that may change a price. Anthropic's and Gemini's batch tier is the table's `processing`."""
    facts = {key: value for key, value in (billing or {}).items() if isinstance(value, str)}
    if facts.get("service_tier") == "batch":
        facts["processing"] = facts.pop("service_tier")
    return facts


def _billed(usage: Usage, prices: Mapping[str, Tiers]) -> Iterator[tuple[int, Tiers | None, bool]]:
    """(count, price, assumed) of every class that has tokens."""
    plain = prices.get(INPUT)
    if usage.uncached:
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
    if output > reasoning:
        yield output - reasoning, prices.get(OUTPUT), False
    if REQUEST in prices:
        yield 1, prices[REQUEST], False


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


def _worst(prices: Mapping[str, Tiers], input_tokens: int, output_tokens: int) -> Decimal | None:
    if INPUT not in prices or (output_tokens and OUTPUT not in prices):
        return None
    inputs = [prices[name] for name in (INPUT, READ, WRITE, *WRITE_TTLS) if name in prices]
    outputs = [prices[name] for name in (OUTPUT, REASONING) if name in prices]
    amount = input_tokens * max(_dearest(t, input_tokens) for t in inputs)
    if output_tokens:
        amount += output_tokens * max(_dearest(t, input_tokens) for t in outputs)
    if REQUEST in prices:
        amount += _dearest(prices[REQUEST], input_tokens)
    return amount / _MILLION


def _utc(at: datetime | None) -> datetime:
    """Naive times are UTC."""
    if at is None:
        return datetime.now(UTC)
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class HourlyRates:
    """A local engine billed by busy time: seconds x price per hour / 3600, to 12 decimals."""

    per_hour: Decimal
    source: str = field(default="config", init=False)
    price_date: str | None = field(default=None, init=False)

    def cost(
        self,
        usage: Usage,
        *,
        busy_s: float | None = None,
        billing: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> Cost:
        """See `Rates.cost`: None while the seconds are not known."""
        return Cost(amount=self._price(busy_s), estimated=False, source=self.source, price_date=None)

    def worst(
        self,
        *,
        input_tokens: int,
        output_tokens: int,
        seconds: float | None = None,
        billing: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> Decimal | None:
        """See `Rates.worst`: `seconds` is the longest the request may run."""
        return self._price(seconds)

    def _price(self, seconds: float | None) -> Decimal | None:
        if not self.per_hour:
            return Decimal(0)
        if seconds is None:
            return None
        return (Decimal(repr(float(seconds))) * self.per_hour / 3600).quantize(_TINY, ROUND_HALF_EVEN)


def hosted_rates(
    provider: str | None,
    model: str,
    *,
    base_url: str | None = None,
    prices: Mapping[str, Any] | None = None,
) -> Rates | None:
    """Prices of `model` at a vendor, or None when they are not known.

    `provider` is a vendor's id or a name of it (``anthropic``, ``bedrock``); else `base_url` tells the vendor. `prices`
    replaces the whole price list (USD per million tokens, as strings): ``{input, cache_read, cache_write: {ttl: price},
    output}``. Raises ConfigError for a wrong `prices`. Loads genai-prices, only when `prices` is None.
    """
    silent = (provider or "").lower().startswith(_SILENT_PROVIDERS)
    if prices is not None:
        own_list = PriceList(prices=_override(prices, "prices"))
        return TokenRates(source="override", price_date=None, lists=(own_list,), silent_reads=silent)
    from genai_prices import __version__
    from genai_prices.data_snapshot import get_snapshot

    found = _find(model, provider, base_url)
    if found is None:
        return None
    provider_id, info, own = found
    conditional = (
        [(info.prices, None)] if not isinstance(info.prices, list) else [(p.prices, p.constraint) for p in info.prices]
    )
    lists = tuple(_price_list(p, constraint) for p, constraint in reversed(conditional))
    if not any(INPUT in p.prices for p in lists):
        return None
    variants = tuple(_price_list(v.prices, v.constraint, v.when) for v in (info.price_variants or ()) if own)
    return TokenRates(
        source=f"genai-prices {__version__}",
        price_date=_table_date(get_snapshot().providers),
        lists=lists,
        variants=variants,
        silent_reads=silent or provider_id.startswith(_SILENT_PROVIDERS),
    )


def local_rates(cost: Mapping[str, Any] | str | None) -> Rates | None:
    """What a local engine costs, from its `cost` key; None when that is absent (not known).

    ``"0"``: already paid. ``{per_hour = "0.40"}``: busy seconds. ``{per_mtok = "0.10"}``: every token alike, or
    ``{per_mtok = {input, cache_read, cache_write, output}}``, where reads and new pages cost nothing unless priced.
    Amounts are strings. Raises ConfigError naming the key.
    """
    if cost is None:
        return None
    if not isinstance(cost, Mapping):
        amount = _money(cost, "cost")
        if amount:
            raise ConfigError('an amount needs its unit: { per_hour = "..." } or { per_mtok = "..." }', key="cost")
        return HourlyRates(per_hour=amount)
    if len(cost) != 1 or not set(cost) <= {"per_hour", "per_mtok"}:
        names = ", ".join(map(str, cost)) or "nothing"
        raise ConfigError(f"takes either per_hour or per_mtok, not {names}", key="cost")
    if "per_hour" in cost:
        return HourlyRates(per_hour=_money(cost["per_hour"], "cost.per_hour"))
    per_mtok = cost["per_mtok"]
    if isinstance(per_mtok, Mapping):
        table = dict(_override(per_mtok, "cost.per_mtok"))
        table.setdefault(READ, _flat(Decimal(0)))
        table.setdefault("kv", table.get(INPUT, _flat(Decimal(0))))
    else:
        price = _flat(_money(per_mtok, "cost.per_mtok"))
        table = {INPUT: price, READ: _flat(Decimal(0)), "kv": price, OUTPUT: price}
    return TokenRates(source="config", price_date=None, lists=(PriceList(prices=MappingProxyType(table)),))


def _flat(price: Decimal) -> Tiers:
    return ((0, price),)


def _money(value: object, key: str) -> Decimal:
    """An amount written as a string; floats and numbers are refused because they are not exact."""
    if not isinstance(value, str):
        raise ConfigError(f"money is written as a string, not {value!r}", key=key)
    try:
        amount = Decimal(value)
    except InvalidOperation:
        raise ConfigError(f"not an amount: {value!r}", key=key) from None
    if not amount.is_finite() or amount < 0:
        raise ConfigError(f"must be a finite amount >= 0, not {value!r}", key=key)
    return amount


def _override(prices: Mapping[str, Any], key: str) -> Mapping[str, Tiers]:
    if not isinstance(prices, Mapping):
        raise ConfigError(f"must be a table of prices, not {prices!r}", key=key)
    table: dict[str, Tiers] = {}
    for name, value in prices.items():
        where = f"{key}.{name}"
        if name == WRITE:
            if not isinstance(value, Mapping):
                raise ConfigError("must be a table of prices by lifetime", key=where, hint='{ "5m" = "3.75" }')
            for ttl, price in value.items():
                if ttl not in WRITE_TTLS:
                    raise ConfigError(f"unknown lifetime; known: {', '.join(WRITE_TTLS)}", key=f"{where}.{ttl}")
                table[ttl] = _flat(_money(price, f"{where}.{ttl}"))
        elif name in (INPUT, READ, OUTPUT):
            table[name] = _flat(_money(value, where))
        else:
            raise ConfigError(f"unknown price; known: {INPUT}, {READ}, {WRITE}, {OUTPUT}", key=where)
    return MappingProxyType(table)


_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "input_mtok": INPUT,
        "cache_read_mtok": READ,
        "cache_write_mtok": WRITE,
        "cache_write_5m_mtok": "5m",
        "cache_write_1h_mtok": "1h",
        "output_mtok": OUTPUT,
        "output_reasoning_mtok": REASONING,
        "requests_kcount": REQUEST,
    }
)


def _price_list(prices: ModelPrice, constraint: Any, when: Mapping[str, str] | None = None) -> PriceList:
    """Our own value of one of genai-prices' price lists."""
    table: dict[str, Tiers] = {}
    for key, name in _CLASSES.items():
        value = prices.__dict__.get(key)
        if value is None:
            continue
        scale = 1000 if name == REQUEST else 1  # priced per thousand requests, counted in millions here
        tiers = [(0, value)] if isinstance(value, Decimal) else [(0, value.base), *((t.start, t.price) for t in value.tiers)]
        table[name] = tuple((start, price * scale) for start, price in tiers)
    begin, end = getattr(constraint, "start_time", None), getattr(constraint, "end_time", None)
    return PriceList(
        prices=MappingProxyType(table),
        start=getattr(constraint, "start_date", None),
        hours=None if begin is None or end is None else (_utc_time(begin), _utc_time(end)),
        when=tuple((when or {}).items()),
    )


def _utc_time(value: time) -> time:
    if value.tzinfo is None:
        return value
    return datetime.combine(date(1970, 1, 1), value).astimezone(UTC).time()


def _table_date(providers: Iterable[Any]) -> str | None:
    """The newest dated change that the table knows of and that is in force: the table is at least as new as that."""
    today = datetime.now(UTC).date()
    starts = (
        getattr(p.constraint, "start_date", None)
        for provider in providers
        for model in provider.models
        for p in (*(model.prices if isinstance(model.prices, list) else ()), *(model.price_variants or ()))
    )
    return max((s.isoformat() for s in starts if s is not None and s <= today), default=None)


def _find(model: str, provider: str | None, base_url: str | None) -> tuple[str, ModelInfo, bool] | None:
    """(provider id, model, whether the model is the provider's own), or None when genai-prices does not know it."""
    from genai_prices.data_snapshot import get_snapshot

    if not provider and not base_url:
        return None
    snapshot = get_snapshot()
    for provider_id, url in ((provider or None, None), (None, base_url)):
        if provider_id is None and url is None:
            continue
        try:
            vendor, info = snapshot.find_provider_model(model, None, provider_id, url)
        except LookupError:
            continue
        own = any(info is m for m in vendor.models)  # a model borrowed from another vendor has no variants there
        ref = model.lower()
        named = ref == info.id.lower() or _names(info.match, ref) or _names(info.match, _COMPACT_DATE.sub(r"-\1-\2-\3", ref))
        return (vendor.id, info, own) if named else None
    return None


# The table matches many models by a prefix or a part of the name, and so would price `gemini-3.7-flash-lite` as
# `gemini-3.7-flash`. What a clause does not spell out may only be a release: a date, `latest`, a revision, a region.
_COMPACT_DATE = re.compile(r"-(20\d\d)(\d\d)(\d\d)(?=-|:|$)")
_DATE = r"(?:20\d\d-?[01]\d-?[0-3]\d|\d\d-\d\d(?:-20\d\d)?|\d\d-20\d\d|\d{3,4})"
_RELEASE = re.compile(rf"(?:[-@]{_DATE}|[-@](?:latest|preview|exp|default)|-v[0-2](?::\d+)?|:0)*")
_CUT_DATE = re.compile(r"[-@](?:20\d\d-?)?$")


def _names(clause: Any, ref: str) -> bool:
    """Whether a match clause of genai-prices spells out this model, up to the release."""
    if not clause.is_match(ref):
        return False
    kind = type(clause).__name__
    if kind == "ClauseOr":
        return any(_names(c, ref) for c in clause.or_)
    if kind == "ClauseAnd":
        return any(_names(c, ref) for c in clause.and_)
    if kind == "ClauseEquals":
        return True
    if kind == "ClauseRegex":
        found = re.search(clause.regex, ref)
        if found is None or not found.group():
            return False
        start, end = found.span()
        if clause.regex.endswith(r"\d"):  # the start of a date
            end -= 1
    else:
        text = next(getattr(clause, name) for name in ("starts_with", "ends_with", "contains") if hasattr(clause, name)).lower()
        start = ref.rfind(text) if kind == "ClauseEndsWith" else ref.find(text)
        end = start + len(text)
    spelled, rest = ref[start:end], ref[end:]
    if spelled.startswith("ft:") or spelled.endswith(".ft-"):  # a fine-tuned model: its base, then the owner's own name
        return True
    cut = _CUT_DATE.search(spelled)
    if cut:
        spelled, rest = spelled[: cut.start()], spelled[cut.start() :] + rest
    return bool(_RELEASE.fullmatch(rest)) and (start == 0 or ref[start - 1] in "/.:")
