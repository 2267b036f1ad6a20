"""The ``cachespec`` command: a group that imports a command only when it runs, and turns our errors into one clear line.

Exit codes: 0 done, 2 bad input (arguments, files, configuration), 1 anything else that failed, 130 interrupted. With
``--json`` a failure is the one document on stdout, beside the line on stderr.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from cachespec.cli._io import AS_JSON, error_dict, write_json
from cachespec.errors import CachespecError, ConfigError, InputError, UnknownPluginError

BAD_INPUT = (InputError, ConfigError, UnknownPluginError)
COMMANDS = {
    # name: module, what `--help` says (the command's own first line, so that help imports none of them)
    "budget": ("cachespec.cli.budget", "What is left of the budgets of a configuration, and how to begin one anew."),
    "chat": ("cachespec.cli.chat", "Talk to the configured client, line by line."),
    "complete": ("cachespec.cli.complete", "Answer one request."),
    "config": ("cachespec.cli.config", "Check a configuration file, or print its JSON schema."),
    "cost": ("cachespec.cli.cost", "Usage and price of one vendor usage object."),
    "demo": ("cachespec.cli.demo", "A real small model answers twice over one long prefix: no key, no configuration."),
    "doctor": ("cachespec.cli.doctor", "What is installed, what hardware is seen, which backends can start."),
    "eval": ("cachespec.cli.eval", "What speculation, prefix sharing and policies would give on a slice of real traffic."),
    "explain": ("cachespec.cli.explain", "Which backend a request would go to and why; sends nothing."),
    "ledger": ("cachespec.cli.ledger", "What was spent, by whom, on what: totals and the last requests."),
    "plugins": ("cachespec.cli.plugins", "Every installed plug-in, and whether it can be loaded."),
    "replay": ("cachespec.cli.replay", "What caching policies would have cost on recorded traffic."),
    "why": ("cachespec.cli.why", "Where one request stopped sharing another's prefix, and why."),
}


class Commands(click.Group):
    """Finds commands in `COMMANDS` and ends the process the same way for all of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return _command(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            from cachespec.annotations import suggestion

            raise click.UsageError(f"no command is called {name!r}; {suggestion(name, COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (CachespecError, click.ClickException, BaseExceptionGroup) as raised:
            error = _single(raised)
            if ctx.meta.get(AS_JSON) and isinstance(error, CachespecError | click.ClickException):
                write_json({"error": error_dict(error)})
            raise

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **extra)
        return self._run(args, prog_name, extra)

    def _run(self, args: Sequence[str] | None, prog_name: str | None, extra: Mapping[str, Any]) -> NoReturn:
        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.exceptions.Abort:
            _end(130, "interrupted")
        except click.ClickException as error:
            error.show()
            _end(error.exit_code)
        except BrokenPipeError:
            # Whoever read us has enough. Python would complain once more when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _end(1)
        except KeyboardInterrupt:
            _end(130, "interrupted")
        except CachespecError as error:
            _end(*_verdict(error))
        except OSError as error:
            _end(1, f"error: {error}")  # stdout on a full disk, for one
        except BaseExceptionGroup as group:
            inner = _single(group)
            if not isinstance(inner, KeyboardInterrupt | CachespecError):
                raise  # a fault of ours
            _end(*_verdict(inner))
        _end(code if isinstance(code, int) else 0)


def _single(error: BaseException) -> BaseException:
    """One error out of a group, when it is alone in there."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _verdict(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    told = "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
    return (2 if isinstance(error, BAD_INPUT) else 1), told


def _end(code: int, message: str | None = None) -> NoReturn:
    if message is not None:
        click.echo(message, err=True)
    raise SystemExit(code)


def _command(name: str) -> click.Command:
    command: click.Command = importlib.import_module(COMMANDS[name][0]).command
    return command


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"cachespec {version('cachespec')}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version.")
def cli() -> None:
    """One client for hosted and local language models: never pays twice for the same tokens, and says why."""


def main() -> None:
    """The console script."""
    cli(prog_name="cachespec")
