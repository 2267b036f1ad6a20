"""``cachespec ledger``: what was spent, in total and by the last requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio
import click

from cachespec.cli._io import config_option, console, json_option, print_table, write_json
from cachespec.errors import InputError
from cachespec.ledger.base import Entry, Totals
from cachespec.usage import money_text

if TYPE_CHECKING:
    from rich.table import Table


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
        "uncounted": totals.uncounted,
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


COLUMNS = ("at (UTC)", "backend", "tenant", "in", "read", "written", "out", "USD", "outcome")
SPARED = ("written", "read", "tenant", "in")
"""What is left out, in this order, where the window is too narrow for all columns."""


def _print(totals: Totals, entries: tuple[Entry, ...]) -> None:
    from rich.measure import Measurement

    out = console()
    if entries:
        unbounded = out.options.update(width=10_000)
        rows = [_row(entry) for entry in entries]
        # Nobody needs a column that is empty.
        names = [name for i, name in enumerate(COLUMNS) if name != "tenant" or any(row[i] for row in rows)]
        table = _table(names, rows)
        for spared in SPARED:
            if Measurement.get(out, unbounded, table).maximum <= out.width:
                break
            names = [name for name in names if name != spared]
            table = _table(names, rows)
        print_table(table, out)
        left_out = [name for name in SPARED if name not in names and name != "tenant"]
        if left_out:
            out.print(f"left out for want of room: {', '.join(left_out)} (--json has all)", markup=False)
    partly = f" (without {totals.uncounted} whose tokens were not reported in full)" if totals.uncounted else ""
    out.print(
        f"{totals.requests} requests, ${money_text(totals.amount)} ({totals.estimated} estimated, {totals.unpriced} without a "
        f"known price); tokens{partly}: {totals.uncached:,} uncached, {totals.cache_read:,} read, "
        f"{totals.cache_write:,} written, {totals.output:,} output",
        markup=False,
    )


def _row(entry: Entry) -> list[str]:
    usage = entry.usage
    counts = (None,) * 4 if usage is None else (usage.input_tokens, usage.cache_read, usage.written, usage.output)
    amount = "unknown" if entry.amount is None else f"{'~' if entry.estimated else ''}{money_text(entry.amount)}"
    shown = ["?" if n is None else str(n) for n in counts]
    return [f"{entry.at:%y-%m-%d %H:%M}", entry.backend, entry.tenant or "", *shown, amount, entry.outcome]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in names:
        text = name in ("backend", "tenant", "outcome")  # may be cut; a date or a number says nothing then
        width = 4 if text else max(len(name), *(len(row[COLUMNS.index(name)]) for row in rows))
        table.add_column(name, no_wrap=True, min_width=width, justify="left" if text or name == COLUMNS[0] else "right")
    for row in rows:
        table.add_row(*(Text(row[COLUMNS.index(name)]) for name in names))  # names are data, not markup
    return table
