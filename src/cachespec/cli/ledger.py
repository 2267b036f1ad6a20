"""``cachespec ledger``: what was spent, in total and by the last requests."""

from __future__ import annotations

from typing import Any

import anyio
import click

from cachespec.cli._io import config_option, console, json_option, write_json
from cachespec.errors import InputError
from cachespec.ledger.base import Entry, Totals
from cachespec.usage import money_text


@click.command()
@click.argument("path", required=False, type=click.Path())
@config_option
@click.option("--tenant", help="Only the requests of this tenant.")
@click.option("-n", "--last", type=click.IntRange(min=0), default=20, show_default=True, help="How many requests to show.")
@json_option
def command(path: str | None, config: str | None, tenant: str | None, last: int, as_json: bool) -> None:
    """What was spent, by whom, on what: totals and the last requests.

    PATH is an SQLite ledger; or -c names the configuration that keeps one.
    """
    totals, entries = anyio.run(_read, path, config, tenant, last)
    if as_json:
        write_json({"totals": totals_dict(totals), "entries": [entry_dict(e) for e in entries]})
    else:
        _print(totals, entries)


ledger = command


async def _read(path: str | None, config: str | None, tenant: str | None, last: int) -> tuple[Totals, tuple[Entry, ...]]:
    from cachespec.ledger.sqlite import SqliteLedger

    if (path is None) == (config is None):
        raise InputError("give the ledger's file, or a configuration with -c", field="path")
    if path is not None:
        store: Any = SqliteLedger(path)
    else:
        from cachespec.config import load_config
        from cachespec.registry import create

        spec = load_config(config or "").ledger
        if spec.use == "memory":
            raise InputError(
                "this configuration keeps its ledger in memory: nothing outlives the process", field="client.ledger"
            )
        store = create("ledgers", spec.use, spec.options, where="client.ledger")
    if isinstance(store, SqliteLedger) and not store.path.exists():
        raise InputError(f"no ledger at {store.path}", field="path")
    try:
        return await store.totals(tenant=tenant), await store.entries(limit=last, tenant=tenant)
    finally:
        await store.aclose()


def totals_dict(totals: Totals) -> dict[str, Any]:
    """Counts and USD as the command prints them."""
    return {
        "requests": totals.requests,
        "amount": money_text(totals.amount),
        "estimated": totals.estimated,
        "unpriced": totals.unpriced,
        "uncached": totals.uncached,
        "cache_read": totals.cache_read,
        "cache_write": totals.cache_write,
        "output": totals.output,
    }


def entry_dict(entry: Entry) -> dict[str, Any]:
    """One settled request as the command prints it; `amount` null: the price was not known."""
    return {
        "id": entry.id,
        "at": entry.at.isoformat(),
        "backend": entry.backend,
        "model": entry.model,
        "tenant": entry.tenant,
        "session_id": entry.session_id,
        "tags": list(entry.tags),
        "amount": money_text(entry.amount),
        "estimated": entry.estimated,
        "usage": None if entry.usage is None else entry.usage.to_dict(),
        "outcome": entry.outcome,
        "request_id": entry.request_id,
    }


def _print(totals: Totals, entries: tuple[Entry, ...]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "at (UTC)", "backend", "tenant", "in", "read", "written", "out", "USD", "outcome", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    for column in table.columns[3:8]:
        column.justify, column.no_wrap = "right", True
    for e in entries:
        usage = e.usage
        counts = (None,) * 4 if usage is None else (usage.input_tokens, usage.cache_read, usage.written, usage.output)
        amount = "unknown" if e.amount is None else f"{'~' if e.estimated else ''}{money_text(e.amount)}"
        shown = ["?" if n is None else str(n) for n in counts]
        row = [f"{e.at:%y-%m-%d %H:%M}", e.backend, e.tenant or "", *shown, amount, e.outcome]
        table.add_row(*map(Text, row))  # names are data, not markup
    out = console()
    if entries:
        out.print(table)
    out.print(
        f"{totals.requests} requests, ${money_text(totals.amount)} ({totals.estimated} estimated, {totals.unpriced} without a "
        f"known price); tokens: {totals.uncached:,} uncached, {totals.cache_read:,} read, {totals.cache_write:,} written, "
        f"{totals.output:,} output",
        markup=False,
    )
