"""``cachespec chat``: a conversation, line by line."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from cachespec.cli._io import config_option, connection, echo_text, error_dict, json_option, usage_line, write_json
from cachespec.errors import CachespecError, InputError

if TYPE_CHECKING:
    from cachespec.events import Completion
    from cachespec.session import Session

HELP = "/new forgets the conversation, /quit (or end of input) leaves"


@click.command()
@config_option
@click.option("--model", help="An alias, a backend, or provider:model.")
@click.option("--system", help="The system prompt.")
@click.option("--tenant", help="On whose account.")
@click.option("--max-output-tokens", type=click.IntRange(min=1), help="At most this many tokens an answer.")
@json_option
def command(
    config: str | None,
    model: str | None,
    system: str | None,
    tenant: str | None,
    max_output_tokens: int | None,
    as_json: bool,
) -> None:
    """Talk to the configured client, line by line.

    Reads one message a line from stdin, which may be a pipe, and streams the answers to stdout; what each one took is told
    on stderr. With --json the answers come as one document, when the input has ended; a turn that failed has its error in it,
    and what had arrived of its answer.
    """
    import anyio

    if config == "-":
        raise click.UsageError("stdin holds the conversation: the configuration must be a file")

    async def run() -> bool:
        turns: list[dict[str, Any]] = []
        failed = False
        async with connection(config) as client:

            def begin() -> Session:
                return client.session(model=model, system=system, tenant=tenant)

            session = begin()
            if _at_terminal():
                click.echo(HELP, err=True)
            while (line := _next_line()) is not None:
                if line == "/quit":
                    break
                if line == "/new":
                    session = begin()
                    continue
                if not line:
                    continue
                if line.startswith("/"):
                    click.echo(f"no such command: {line}; {HELP}", err=True)
                    continue
                try:
                    turns.append((await _turn(session, line, max_output_tokens, quiet=as_json)).to_dict())
                except InputError:
                    raise  # the options of this command are wrong, and would be so on every line
                except CachespecError as error:
                    # The history is as it was; the next line may fare better.
                    click.echo(f"error: {error}", err=True)
                    turns.append({"error": error_dict(error)})
                    failed = True
        if as_json:
            write_json({"turns": turns})
        return failed

    if anyio.run(run):
        raise SystemExit(1)


async def _turn(session: Session, line: str, max_output_tokens: int | None, *, quiet: bool) -> Completion:
    async with session.stream(line, max_output_tokens=max_output_tokens) as stream:
        if not quiet:
            await echo_text(stream)
        done = await stream.get_final_completion()
    if not quiet:
        click.echo(click.style(usage_line(done), dim=True), err=True)
        for warning in done.warnings:
            click.echo(f"warning: {warning}", err=True)
    return done


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _next_line() -> str | None:
    """The next line without its end; None at the end of input.

    It blocks the event loop on purpose: between turns nothing runs in it, and a thread that waits for input could not be
    ended. The event loop's own handler of Ctrl-C would only take effect after the line, so Python's is put in its place.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if main else None
    try:
        return _read_line()
    except UnicodeDecodeError:
        raise InputError("the input is not UTF-8 text") from None
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def _read_line() -> str | None:
    if _at_terminal():
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its line editing
        try:
            return input("> ").strip()
        except EOFError:
            click.echo()
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None
