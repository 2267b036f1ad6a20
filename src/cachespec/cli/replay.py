"""``cachespec replay``: what caching policies would have cost on recorded traffic."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from cachespec.cli._io import console, json_option, keep_inputs, own_plugins, print_table, write_json
from cachespec.errors import InputError

if TYPE_CHECKING:
    from cachespec.replay.compare import Comparison, Progress
    from cachespec.replay.simulate import Line

VENDORS = ("anthropic", "openai-5.6")
WHICH = "A policy; may be repeated. Without it, all of them."


def _own(ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Policies of one's own are found in the current folder."""
    own_plugins(ctx, parameter, None)
    return names


@click.command()
@click.argument("trace", type=click.Path(allow_dash=True))
@click.option("--policy", "names", multiple=True, metavar="P", callback=_own, help=WHICH)
@click.option("--vendor", type=click.Choice(VENDORS), default=VENDORS[0], show_default=True, help="Whose rules and prices.")
@click.option(
    "--decisions", type=click.Path(allow_dash=True), metavar="OUT", help="Write what the one policy decided, as JSON lines."
)
@click.option("--html", "page", type=click.Path(allow_dash=True), metavar="OUT", help="Write a page with plots.")
@json_option
def command(trace: str, names: tuple[str, ...], vendor: str, decisions: str | None, page: str | None, as_json: bool) -> None:
    """What caching policies would have cost on recorded traffic.

    TRACE is in the Mooncake or the coding-agent format, JSON lines, gzipped or not. P is a fixed policy (always:5m,
    last-message:1h, ...), an installed one (expected-cost), or one of your own (module:attribute). Costs are those of input
    tokens, relative to no caching; bounds are what no policy can beat, without and with keep-alives.
    """
    from cachespec.replay.compare import compare, policies
    from cachespec.replay.page import html
    from cachespec.replay.traces import read_trace
    from cachespec.replay.vendor import VENDORS as TERMS

    if decisions is not None and len(names) != 1:
        raise click.UsageError("--decisions goes with exactly one --policy")
    if [as_json, decisions == "-", page == "-"].count(True) > 1:
        raise click.UsageError("only one of --json, --decisions - and --html - can have stdout")
    keep_inputs("--decisions", decisions, trace, page)
    keep_inputs("--html", page, trace)
    terms = TERMS[vendor]
    wanted = policies(names, terms)
    read = read_trace(trace)
    with ExitStack() as stack:
        lines = stack.enter_context(_output(decisions)) if decisions is not None else None
        drawn = stack.enter_context(_output(page)) if page is not None else None
        progress = stack.enter_context(_progress(read.requests))

        def write(line: Line) -> None:
            if lines is not None:
                lines.write(json.dumps(line, separators=(",", ":")) + "\n")

        found = compare(read, wanted, terms, decided=None if lines is None else write, progress=progress)
        if drawn is not None:
            drawn.write(html(found, vendor))
    if as_json:
        write_json(found.to_dict())
    elif decisions != "-" and page != "-":
        _print(found)


@contextmanager
def _output(path: str) -> Iterator[TextIO]:
    """A file to write, or stdout for ``-``. Raises InputError when it cannot be written."""
    if path == "-":
        yield sys.stdout
        return
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _progress(requests: int) -> Iterator[Progress]:
    """Progress on stderr: a bar for what is going on on a terminal, else a line for each thing done."""
    from rich.progress import Progress, TaskID

    started = time.monotonic()
    tasks: dict[str, TaskID] = {}
    out = console(stderr=True)
    with Progress(console=out, transient=True, disable=not out.is_terminal) as shown:

        def tell(what: str, done: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=requests)
            shown.update(tasks[what], completed=done)
            if done == requests and not out.is_terminal:
                click.echo(f"{what}: done after {time.monotonic() - started:.1f} s", err=True)

        yield tell


def _print(found: Comparison) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("policy", "cost", "read", "written", "uncached", "keep-alives"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    total = found.trace.input_tokens or 1
    for name, result in sorted(found.results.items(), key=lambda item: item[1].cost):
        parts = (result.read, sum(result.writes.values()), result.uncached)
        table.add_row(name, f"{result.relative:.4f}", *(f"{part / total:.1%}" for part in parts), f"{result.pings:,}")
    best, least = found.best_fixed, found.bounds
    out = console()
    out.print(
        f"{found.trace.requests:,} requests, {found.trace.input_tokens:,} input tokens; cost relative to no caching",
        markup=False,
    )
    print_table(table)
    out.print(f"best fixed policy: {best.policy}, {best.relative:.4f}", markup=False)
    out.print(f"bound: {least.without_pings:.4f} without keep-alives, {least.with_pings:.4f} with", markup=False)
