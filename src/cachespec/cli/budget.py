"""``cachespec budget``: what is left of the budgets of a configuration, and how to begin one anew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import click

from cachespec.cli._io import config_option, console, json_option, print_table, write_json
from cachespec.errors import InputError
from cachespec.usage import money_text

if TYPE_CHECKING:
    from cachespec.config import Config
    from cachespec.decision import BudgetState
    from cachespec.ledger.base import Ledger
    from cachespec.policies.budgets import Applied


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    budget: Applied
    state: BudgetState


@click.group()
def command() -> None:
    """What is left of the budgets of a configuration, and how to begin one anew."""


budget = command


@command.command()
@config_option
@json_option
def show(config: str | None, as_json: bool) -> None:
    """Every budget with what is spent and reserved now.

    A budget of each tenant, session, tag or alias is shown for every one that the ledger knows.
    """
    rows = anyio.run(_show, config)
    if as_json:
        write_json({"budgets": [_row_dict(row) for row in rows]})
    else:
        _print(rows)


@command.command()
@click.argument("scopes", nargs=-1, required=True, metavar="SCOPE...")
@config_option
@json_option
def reset(scopes: Sequence[str], config: str | None, as_json: bool) -> None:
    """Count a budget's window from nothing again.

    SCOPE is as `show` names it: "tenant:acme per day", or only "tenant:acme" for all its windows. What was spent stays in the
    ledger, and open reservations keep their room.
    """
    rows = anyio.run(_reset, config, tuple(scopes))
    if as_json:
        write_json({"reset": [_row_dict(row) for row in rows]})
        return
    for row in rows:
        console().print(f"{row.budget.limit.scope}: counted from nothing again", markup=False)


async def _show(config: str | None) -> list[_Row]:
    loaded, ledger = _open(config)
    try:
        return await _rows(loaded, ledger)
    finally:
        await ledger.aclose()


async def _reset(config: str | None, scopes: Sequence[str]) -> list[_Row]:
    loaded, ledger = _open(config)
    try:
        rows = await _rows(loaded, ledger)
        chosen: list[_Row] = []
        for scope in scopes:
            # A tenant may be called "acme per day": what is called so in full goes first.
            found = [r for r in rows if scope == r.budget.limit.scope] or [r for r in rows if scope == r.budget.limit.account]
            if not found:
                from cachespec.annotations import suggestion

                hint = suggestion(scope, [r.budget.limit.scope for r in rows], label="known")
                raise InputError(f"no budget is called {scope!r}" + (f"; {hint}" if hint else ""), field="scope")
            chosen += [r for r in found if r not in chosen]
        await ledger.reset([r.budget.limit for r in chosen])
        return chosen
    finally:
        await ledger.aclose()


def _open(path: str | None) -> tuple[Config, Ledger]:
    from cachespec.config import load_config
    from cachespec.ledger.sqlite import SqliteLedger
    from cachespec.registry import create

    if path is None:
        raise InputError("name the configuration with -c", field="config")
    config = load_config(path)
    if not config.budgets:
        raise InputError("this configuration has no budgets", field="policies.budgets")
    if config.ledger.use == "memory":
        text = "this configuration keeps its ledger in memory: nothing outlives the process"
        raise InputError(text, field="client.ledger")
    ledger: Any = create("ledgers", config.ledger.use, config.ledger.options, where="client.ledger")
    if isinstance(ledger, SqliteLedger) and not ledger.path.exists():
        raise InputError(f"no ledger at {ledger.path}", field="client.ledger")
    return config, ledger


async def _rows(config: Config, ledger: Ledger) -> list[_Row]:
    from cachespec.policies.budgets import known

    found = known(config.budgets, await ledger.accounts(), time.time())
    states = await ledger.refresh([b.limit for b in found]) if found else ()
    return [_Row(budget=b, state=s) for b, s in zip(found, states, strict=True)]


def _row_dict(row: _Row) -> dict[str, Any]:
    limit, rule = row.budget.limit, row.budget.rule
    return {
        **row.state.to_dict(),
        "account": limit.account,
        "mode": rule.mode,
        "per": rule.per,
        "since": None if limit.since is None else limit.since.isoformat(),
        "resets_at": None if limit.resets_at is None else limit.resets_at.isoformat(),
    }


def _print(rows: Sequence[_Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        console().print("Nothing was spent yet under any budget of this configuration.")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("budget", "mode", "spent", "reserved", "limit", "left", "resets (UTC)"):
        text = name in ("budget", "mode", "resets (UTC)")
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=name != "budget")
    for row in rows:
        state, limit = row.state, row.budget.limit
        amounts = (state.spent, state.reserved, state.limit, max(state.limit - state.spent - state.reserved, state.limit * 0))
        until = "never" if limit.resets_at is None else f"{limit.resets_at:%Y-%m-%d %H:%M}"
        cells = [limit.scope, row.budget.rule.mode, *(money_text(a) or "" for a in amounts), until]
        table.add_row(*(Text(cell) for cell in cells))  # names are data, not markup
    print_table(table)  # names fold, and amounts do not: half an amount reads as another one
