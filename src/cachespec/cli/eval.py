"""``cachespec eval``: what speculation, prefix sharing and policies would give on a slice of real traffic."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cachespec.cli._io import config_option, console, json_option, keep_inputs, print_table, write_json
from cachespec.errors import InputError
from cachespec.text_source import STDIN, read_text

if TYPE_CHECKING:
    from cachespec.config import Config
    from cachespec.evaluation.result import Evaluation, Progress

_EVERY_S = 10.0  # between lines of progress, where there is no terminal


@click.command()
@click.argument("prompts", type=click.Path(allow_dash=True))
@click.option("--backend", required=True, metavar="B", help="The backend to evaluate, by its name in the configuration.")
@config_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    metavar="N",
    help="Lines of each category to answer, of a local backend, spread over the file; 0 takes all.",
)
@click.option(
    "--max-output-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens of an answer that is generated, at most.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="T",
    help="Where a line names none. Without it 1, as live, and 0 for lines with turns, as benchmarks are answered.",
)
@click.option("--write-policy", "policy", type=click.Path(), metavar="OUT", help="Write the configuration it recommends.")
@click.option("--force", is_flag=True, help="Let --write-policy replace a file that is there.")
@click.option("--html", "page", type=click.Path(allow_dash=True), metavar="OUT", help="Write a page with plots.")
@json_option
def command(
    prompts: str,
    backend: str,
    config: str | None,
    limit: int,
    max_output_tokens: int,
    temperature: float | None,
    policy: str | None,
    force: bool,
    page: str | None,
    as_json: bool,
) -> None:
    """What speculation, prefix sharing and policies would give on a slice of real traffic.

    PROMPTS has a request a line (JSON), or an object with a prompt or with turns; its category groups it, and t, session_id,
    tenant and a recorded answer are used where they are there. A local backend answers the slice and every drafter is scored
    on the answers; what is found counts as evidence for its require_eval. For a hosted backend nothing is sent.
    """
    import anyio

    from cachespec.evaluation.page import html
    from cachespec.evaluation.policy_file import policy_file
    from cachespec.evaluation.prompts import read_prompts
    from cachespec.evaluation.run import evaluate

    if prompts == config == "-":
        raise click.UsageError("stdin can hold the prompts or the configuration, not both")
    if as_json and page == "-":
        raise click.UsageError("only one of --json and --html - can have stdout")
    if policy is not None and not force and Path(policy).is_file():
        raise InputError(f"{policy}: is there already; name another file, or say --force to replace it", field="--write-policy")
    keep_inputs("--write-policy", policy, prompts, page)
    keep_inputs("--html", page, prompts, config)
    settings = _config(config)
    read = read_prompts(prompts)
    if read.ignored:
        click.echo(f"{read.name}: not used: {', '.join(read.ignored)}", err=True)
    with ExitStack() as stack:
        progress = stack.enter_context(_progress())
        done = anyio.run(
            partial(
                evaluate,
                read,
                settings,
                backend,
                progress=progress,
                limit=limit or None,
                max_output_tokens=max_output_tokens,
                temperature=temperature,
            )
        )
    found = done.evaluation
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if policy is not None:
        _write(policy, policy_file(settings, found, done.draft, done.caching))
    if page == "-":
        click.echo(html(found, read.name), nl=False)
    elif page is not None:
        _write(page, html(found, read.name))
    if as_json:
        write_json(found.to_dict())
    elif page != "-":
        _print(found)


def _config(path: str | None) -> Config:
    from cachespec.config import auto_config, load_config, parse_config

    if path == "-":
        return parse_config(read_text("-"), STDIN)
    return auto_config() if path is None else load_config(path)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _progress() -> Iterator[Progress]:
    """Progress on stderr, with the time that is left: bars on a terminal, else now and then a line."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    tasks: dict[str, TaskID] = {}
    began: dict[str, float] = {}
    said = time.monotonic()
    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as shown:

        def tell(what: str, done: int, total: int) -> None:
            nonlocal said
            now = time.monotonic()
            if what not in tasks:
                tasks[what], began[what] = shown.add_task(what, total=total), now
            shown.update(tasks[what], completed=done)
            if out.is_terminal or (done < total and now - said < _EVERY_S):
                return
            said, took = now, now - began[what]
            left = f"about {took / done * (total - done):.0f} s left" if 0 < done < total else f"after {took:.1f} s"
            click.echo(f"{what}: {done} of {total}, {left}", err=True)

        yield tell


def _print(found: Evaluation) -> None:
    from rich.table import Table
    from rich.text import Text

    from cachespec.evaluation.page import HEADER, rows
    from cachespec.usage import money_text

    out = console()
    table = Table(box=None, pad_edge=False)
    for name in HEADER:
        text = name in ("category", "drafter", "recommended")
        table.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    groups = (*found.groups, found.overall) if len(found.groups) > 1 else found.groups
    for group in groups:
        for row in rows(group):
            table.add_row(*(Text(cell) for cell in row))  # categories are data, not markup
    print_table(table)
    for name, error in found.failed.items():
        out.print(f"\n{name}: FAILED, no figures: {error}", markup=False)
    prefix = found.prefix
    total = max(1, prefix.total_tokens)
    kept = ", ".join(f"{n} {c / total:.1%}" for n, c in prefix.by_lifetime.items() if c is not None)
    out.print(f"\n{prefix.total_tokens:,} prompt tokens; shared with an earlier prompt, by lifetime: {kept}", markup=False)
    if found.policies:
        costs = Table(box=None, pad_edge=False)
        costs.add_column("policy", overflow="fold")
        costs.add_column("USD for the slice", justify="right", no_wrap=True)
        for name, cost in sorted(found.policies.items(), key=lambda item: (item[1] is None, item[1] or 0)):
            costs.add_row(Text(name), money_text(cost) or "not known")
        print_table(costs)
    out.print(f"\n{found.recommendation}", markup=False)
