"""Prices behind one interface, exact and dated.

`Rates` is what a backend carries: resolved once per model, then pure arithmetic on decimals. An unknown price is None,
never 0 and never another model's (contract M2).

- `hosted_rates`: a vendor's price list, from genai-prices or from the configuration.
- `local_rates`: what a local engine's time or tokens cost, from the configuration.

`cachespec._rates` says how a token without a price of its own class is billed, and when that makes a cost `estimated`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from cachespec._rates import INPUT, OUTPUT, OVERRIDE, READ, WRITE, PriceList, Tiers, TokenRates
from cachespec.annotations import MONEY, nearest
from cachespec.errors import ConfigError
from cachespec.shown import shown
from cachespec.usage import WRITE_TTLS, Cost, Usage, exact

__all__ = ["HourlyRates", "Rates", "TokenRates", "hosted_rates", "local_rates"]

_LONGEST = 40  # characters of an amount
_TINY = Decimal("1e-12")
_RELEASE = r"[-@](?:20\d\d-?[01]\d-?[0-3]\d|[01]\d-?[0-3]\d|2\d[01]\d)"
"""How vendors date a release: 2026-04-01, 20260401, 04-01 or 0401, or 2604 without a day."""
_SILENT_VENDORS = ("google", "gemini", "vertex", "cohere")


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
        """The exact price of `usage`. `busy_s` is a local engine's seconds; `billing` what the response said of its tier, and
        under ``model`` the model that answered, which may be another than was asked for."""

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

        `billing` is the tier that the *request* asks for (``{"service_tier": "priority"}``), besides the standard one. A
        vendor may serve in another than was asked for, as OpenAI does where ``"auto"`` follows a project's setting: whoever
        has set a project so names the tier in the request, or gives its prices in the configuration. None: not known,
        which is also so for a tier without a price, and for a price per hour without `seconds`.
        """


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
        """See `Rates.worst`: `seconds` is the longest the request may run; None while nobody can say."""
        return self._price(seconds, ROUND_CEILING)

    def _price(self, seconds: float | None, rounding: str = ROUND_HALF_EVEN) -> Decimal | None:
        if not self.per_hour:
            return Decimal(0)
        if seconds is None or not math.isfinite(seconds) or seconds < 0:
            return None
        with exact():
            return (Decimal(repr(float(seconds))) * self.per_hour / 3600).quantize(_TINY, rounding)


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
    if prices is not None:
        rates = TokenRates(source=OVERRIDE, price_date=None, lists=(PriceList(prices=_price_list(prices, "prices")),))
        return replace(rates, silent_reads=_silent(provider or ""))
    from cachespec._price_table import table_rates

    found = table_rates(provider, model, base_url)
    if found is None:
        return None
    vendor, rates = found
    rates = replace(rates, silent_reads=_silent(vendor))
    return replace(rates, others=partial(_of_answered, vendor, model, rates))


def _silent(vendor: str) -> bool:
    return vendor.lower().startswith(_SILENT_VENDORS)


def _of_answered(vendor: str, model: str, rates: TokenRates, answered: str) -> TokenRates | None:
    """The prices of the model that answered, by its own name; those of the one that was asked where it is a release of that,
    or the same with a path before it (``models/gemini-2.5-flash``), which no table can list beforehand."""
    listed = hosted_rates(vendor, answered)
    if isinstance(listed, TokenRates):
        return listed
    return rates if re.fullmatch(f"(?:.*/)?{re.escape(model)}(?:{_RELEASE})?", answered, re.IGNORECASE) else None


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
        table = dict(_price_list(per_mtok, "cost.per_mtok"))
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
        raise ConfigError(f"money is written as a string, not {shown(value)}", key=key)
    if len(value) > _LONGEST or not re.fullmatch(MONEY, value):
        raise ConfigError(f'must be a plain amount >= 0 such as "0.40", not {shown(value)}', key=key)
    return Decimal(value)


def _price_list(prices: Mapping[str, Any], key: str) -> Mapping[str, Tiers]:
    if not isinstance(prices, Mapping):
        raise ConfigError(f"must be a table of prices, not {shown(prices)}", key=key)
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
            known = (INPUT, READ, WRITE, OUTPUT)
            near = nearest(str(name), known)
            hint = None if near is None else f"did you mean {near!r}?"
            raise ConfigError(f"unknown price; known: {', '.join(known)}", key=where, hint=hint)
    return MappingProxyType(table)
