"""What the commands share: reading and writing documents, the options they have in common, and errors as documents."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from cachespec.errors import InputError
from cachespec.text_source import STDIN, named, read_text
from cachespec.usage import Usage, money_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cachespec.client import Client
    from cachespec.events import Completion
    from cachespec.request import Request
    from cachespec.session import SessionStream
    from cachespec.stream import ResponseStream

AS_JSON = "cachespec.json"
_UNBOUNDED = 100_000
_FOLDED = 12  # characters of a line, at least, of a column that is folded
MILLIONTH = Decimal("0.000001")
F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """``--json``: one JSON document on stdout, of a failure as well, and nothing else there."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[AS_JSON] = value
        return value

    what = "Print exactly one JSON document."
    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=remember, help=what)(command)


def config_option(command: F) -> F:
    """``-c FILE``; ``-`` is stdin."""
    what = "The configuration; without it, whatever keys the environment has and a local model."
    kind = click.Path(allow_dash=True)
    return click.option("-c", "--config", "config", type=kind, metavar="FILE", callback=own_plugins, help=what)(command)


def own_plugins(ctx: click.Context, _: click.Parameter, config: str | None) -> str | None:
    """While the command runs, ``use = "module:attribute"`` finds modules beside the configuration, or here without one."""
    folder = Path() if config in (None, "-") else Path(config or "").parent
    ctx.with_resource(_importable(str(folder.resolve())))
    return config


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def request_options(command: F) -> F:
    """REQUEST, and what a vendor's body cannot say about it."""
    for option in (
        click.option("--tag", "tags", multiple=True, help="A tag of the request; may be repeated."),
        click.option("--session", "session_id", help="The session that the request belongs to."),
        click.option("--tenant", help="On whose account."),
        click.argument("request", type=click.Path(allow_dash=True)),
    ):
        command = option(command)
    return command


def read_request(path: str, config: str | None, **said: str | tuple[str, ...] | None) -> Request:
    """The request in a document; what the options of `request_options` say goes before what it says itself."""
    from cachespec.bodies import request_from_body

    if path == config == "-":
        raise click.UsageError("stdin can hold the request or the configuration, not both")
    return replace(request_from_body(read_object(path)), **{name: value for name, value in said.items() if value})  # type: ignore[arg-type]


@asynccontextmanager
async def connection(config: str | None) -> AsyncIterator[Client]:
    """A started client for ``-c FILE``, ``-c -`` or no file at all."""
    from cachespec.client import Client, connect
    from cachespec.config import parse_config

    opened = Client.from_config(parse_config(read_text("-"), STDIN)) if config == "-" else connect(config)
    async with opened as client:
        yield client


def write_json(value: Any) -> None:
    """One document, and a newline. ASCII alone where stdout cannot say more."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, allow_nan=False)
    click.echo(text)


def error_dict(error: BaseException) -> dict[str, Any]:
    """A failure as ``--json`` prints it: its class, its message, its own fields, and what there is of an answer."""
    own = {} if isinstance(error, click.ClickException) else vars(error)  # click's name its own objects
    fields = {name: _plain(value) for name, value in own.items() if not name.startswith("_")}
    return {"type": type(error).__name__, **fields, "message": str(error), "partial": fields.get("partial")}


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return money_text(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


async def echo_text(stream: ResponseStream | SessionStream) -> None:
    """Print an answer's text as it comes, and end its line however it ends."""
    begun = False
    try:
        async for text in stream.text_stream:
            begun = True
            click.echo(text, nl=False)
    finally:
        if begun:
            click.echo()


def read_object(path: str) -> Mapping[str, Any]:
    """The JSON object in a file or, for ``-``, on stdin. Raises InputError that gives file, line and column."""
    name, text = named(path), read_text(path)
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}:{error.colno}: is no JSON: {error.msg}") from None
    except RecursionError:
        raise InputError(f"{name}: is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{name}: must be a JSON object, not {type(value).__name__}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"is no JSON: {name}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def console(*, stderr: bool = False) -> Console:
    """A rich console: colours on a terminal, plain text elsewhere."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def print_table(table: Table, out: Console | None = None) -> None:
    """Print a table that loses nothing to a narrow window.

    Columns that wrap are folded; no number is cut and no column left out. Where even that is too wide, the terminal breaks the
    lines. In a pipe there is no window.
    """
    from rich.cells import cell_len
    from rich.measure import Measurement

    out = out or console()
    whole = Measurement.get(out, out.options.update(width=_UNBOUNDED), table).maximum
    spare = 0
    for column in table.columns:
        widest = max(cell_len(line) for cell in (column.header, *column.cells) for line in str(cell).split("\n"))
        least = column.min_width or (widest if column.no_wrap else min(widest, _FOLDED))
        spare += widest - least
    out.width = whole if not out.is_terminal else min(whole, max(out.width, whole - spare))
    out.print(table)


def keep_inputs(option: str, path: str | None, *inputs: str | None) -> None:
    """Raises InputError where what `option` writes to is one of the files that the command reads, or writes besides."""
    if path not in (None, "-") and any(given not in (None, "-") and _same(path, given) for given in inputs):
        raise InputError(f"{path}: is also another file of this command, and would be overwritten", field=option)


def _same(path: str, other: str) -> bool:
    try:
        return Path(path).samefile(other)
    except OSError:  # at least one of them is not there yet
        return Path(path).resolve() == Path(other).resolve()


def usage_line(done: Completion) -> str:
    """One line for a person: who answered, tokens and what of them came from a cache, price, times."""
    parts = [f"{done.backend} ({done.model})", tokens_text(done.usage), money(done.cost, estimated=done.estimated)]
    if done.ttft_ms is not None:
        parts.append(f"first token after {done.ttft_ms:.0f} ms")
    parts.append(f"{done.total_ms:.0f} ms in all")
    return " · ".join(parts)


def tokens_text(usage: Usage | None) -> str:
    """Input, how much of it was read from or written to a cache, and output; ``?`` is what nobody reported."""
    if usage is None:
        return "usage not reported"
    read = "" if usage.cache_read is None else f", {usage.cache_read} read from cache"
    wrote = f", {usage.written} written to cache" if usage.written else ""
    return f"{_count(usage.input_tokens)} tokens in{read}{wrote}, {_count(usage.output)} out"


def money(amount: Decimal | None, *, estimated: bool = False) -> str:
    """USD for a person, rounded to millionths; the exact amount is in the JSON."""
    if amount is None:
        return "price not known"
    rounded = amount if amount == amount.to_integral() else amount.quantize(MILLIONTH)
    about = "about " if estimated else ""
    return f"{about}${money_text(rounded)}" if rounded or not amount else f"{about}less than ${money_text(MILLIONTH)}"


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)
