"""What the commands share: reading documents, writing documents, and the options they have in common."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from cachespec.errors import InputError
from cachespec.usage import Usage, money_text

if TYPE_CHECKING:
    from rich.console import Console

    from cachespec.client import Client
    from cachespec.events import Completion

STDIN = "<stdin>"
F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """``--json``: one JSON document on stdout, and nothing else there."""
    return click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON document.")(command)


def config_option(command: F) -> F:
    """``-c FILE``; ``-`` is stdin."""
    what = "The configuration; without it, whatever keys the environment has and a local model."
    return click.option("-c", "--config", "config", type=click.Path(allow_dash=True), metavar="FILE", help=what)(command)


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


def read_text(path: str) -> str:
    """A file's text, or stdin's for ``-``. Raises InputError when it cannot be read or is no UTF-8."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{_named(path)}: cannot be read: {error.strerror or error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{_named(path)}:{line}: is not UTF-8 text") from None


def read_object(path: str) -> Mapping[str, Any]:
    """The JSON object in a file or, for ``-``, on stdin. Raises InputError that gives file, line and column."""
    name, text = _named(path), read_text(path)
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


def _named(path: str) -> str:
    return STDIN if path == "-" else path


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
    """USD for a person, rounded to what can be told apart; the exact amount is in the JSON."""
    if amount is None:
        return "price not known"
    exact = amount if amount == amount.to_integral() else amount.quantize(Decimal("0.000001"))
    return f"{'about ' if estimated else ''}${money_text(exact)}"


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)
