"""``cachespec cost``: usage and price of one vendor usage object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

import click

from cachespec.cli._io import console, json_option, print_table, read_object, write_json
from cachespec.errors import ConfigError, InputError
from cachespec.pricing import hosted_rates
from cachespec.shown import shown
from cachespec.usage import WEB_SEARCH, Cost, Usage, money_text
from cachespec.usage_shapes import billing_from, usage_from

WRITTEN = {"unspecified": "written, for how long is not told", "kv": "newly kept by the local engine"}
FIELDS = ("provider", "model", "api", "usage", "at", "prices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One usage object, converted and priced. `warning` says why there is no cost."""

    usage: Usage
    cost: Cost
    warning: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "usage": self.usage.to_dict(),
            "cost": money_text(self.cost.amount),
            "estimated": self.cost.estimated,
            "source": self.cost.source,
            "price_date": self.cost.price_date,
        }


def price(document: Mapping[str, Any]) -> Priced:
    """Convert and price ``{provider, model, api, usage, at?, prices?}``. Raises InputError naming the field."""
    for name in document:
        if name not in FIELDS:
            close = get_close_matches(str(name), FIELDS, 1)
            raise InputError(f"unknown field{f'; did you mean {close[0]!r}?' if close else ''}", field=str(name))
    prices = document.get("prices")
    # With prices of one's own nobody needs to know whose model it was.
    provider, model = (_text(document, name, required=prices is None) for name in ("provider", "model"))
    api, payload = _text(document, "api", required=True), document.get("usage")
    if not isinstance(payload, Mapping):
        raise InputError("missing" if payload is None else f"must be an object, not {shown(payload)}", field="usage")
    at = _moment(document.get("at"))
    try:
        usage, billing = usage_from(api, payload), billing_from(api, payload)
    except InputError as error:
        inside = error.field is not None and error.field not in ("api", "usage")
        raise InputError(_reason(error), field=f"usage.{error.field}" if inside else error.field) from error
    try:
        rates = hosted_rates(provider, model, prices=prices)
    except ConfigError as error:
        raise InputError(error.message, field=error.key) from error
    if rates is None:
        unknown = Cost(amount=None, estimated=False, source=None, price_date=None)
        return Priced(usage=usage, cost=unknown, warning=f"no price is known for {provider}:{model}")
    cost = rates.cost(usage, billing=billing, at=at)
    warning = None
    if cost.amount is None:
        counted = usage.input_tokens is not None and usage.output is not None
        warning = "there are tokens of a class that has no price" if counted else "not every count was reported"
    return Priced(usage=usage, cost=cost, warning=warning)


def _reason(error: InputError) -> str:
    return str(error).removeprefix(f"{error.field}: ")


def _text(document: Mapping[str, Any], name: str, *, required: bool) -> str:
    value = document.get(name)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or not value:
        raise InputError("missing" if value is None else f"must be a string, not {shown(value)}", field=name)
    return value


def _moment(value: object) -> datetime:
    if value is None:
        return datetime.now(UTC)
    try:
        moment = datetime.fromisoformat(value if isinstance(value, str) else "")
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InputError(f"must be an ISO date or time, not {shown(value)}", field="at") from None


@click.command()
@click.argument("usage", type=click.Path(allow_dash=True))
@json_option
def command(usage: str, as_json: bool) -> None:
    """Usage and price of one vendor usage object.

    USAGE is a JSON file (- for stdin): {provider, model, api, usage, at?, prices?}. `api` is chat, responses, messages,
    converse, gemini or cohere, `usage` the vendor's own object, `at` an ISO time (default: now), `prices` USD per million
    tokens as strings: {input, cache_read, cache_write: {ttl: price}, output}; without it the known prices of the model.
    """
    priced = price(read_object(usage))
    if priced.warning:
        click.echo(f"warning: {priced.warning}; the cost is unknown", err=True)
    if as_json:
        write_json(priced.to_dict())
    else:
        _print(priced)


cost = command


def _print(priced: Priced) -> None:
    from rich.table import Table

    usage, apart = priced.usage, priced.usage.apart or {}
    table = Table()
    table.add_column("tokens", overflow="fold")
    table.add_column("count", justify="right", no_wrap=True)
    rows: list[tuple[str, int | None]] = [("input", usage.input_tokens), ("  uncached", usage.uncached)]
    rows.append(("  read from cache", usage.cache_read))
    if not usage.cache_write:
        rows.append(("  written to cache", usage.written))
    rows += [(f"  {WRITTEN.get(ttl, f'written for {ttl}')}", count) for ttl, count in (usage.cache_write or {}).items()]
    rows += [("output", usage.output), ("  reasoning", usage.reasoning)]
    rows += [(f"of that, {name.replace('_', ' ')}" if name != WEB_SEARCH else "searches", n) for name, n in apart.items()]
    for name, count in rows:
        table.add_row(name, "not reported" if count is None else f"{count:,}")
    out = console()
    print_table(table, out)
    amount = money_text(priced.cost.amount)
    text = "cost: unknown" if amount is None else f"cost: ${amount}{' (estimated)' if priced.cost.estimated else ''}"
    origin = ", ".join(x for x in (priced.cost.source, priced.cost.price_date) if x)
    out.print(f"{text}{f'; prices: {origin}' if origin else ''}", markup=False)
