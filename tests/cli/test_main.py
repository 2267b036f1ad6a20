"""The command group: help, exit codes, and how errors end a command."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from tests.cli.conftest import Run, process
from tests.wire.server import WireServer

from cachespec.cli.main import COMMANDS, _command, cli


def test_help_lists_every_command_and_imports_none(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout
    code = (
        "import sys\nfrom cachespec.cli.main import cli\n"
        "try:\n    cli(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "print([m for m in ('rich', 'anyio', 'openai', 'anthropic', 'httpx2', 'cachespec.client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_says_of_itself_what_the_group_says(name: str, run: Run) -> None:
    command = _command(name)
    assert isinstance(command, click.Command)
    assert (command.help or "").splitlines()[0] == COMMANDS[name][1]
    result = run(name, "--help")
    assert result.exit_code == 0
    assert result.stderr == ""


def test_version(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("cachespec ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["complet"], "did you mean 'complete'"),
        (["complete"], "Missing argument"),
        (["complete", "x", "--nope"], "No such option"),
        (["complete", "/no/such/request.json"], "cannot be read: No such file"),
        (["complete", "/no/such"], "error: "),
        (["config", "chek"], "chek"),
        (["demo", "--threads", "0"], "--threads"),
    ],
)
def test_bad_input_is_two(run: Run, args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_bare_command_shows_help(run: Run) -> None:
    assert "Commands" in run().output


def test_a_fault_of_ours_is_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise ExceptionGroup("two", [ValueError("a"), ValueError("b")])

    monkeypatch.setattr("cachespec.cli.main._command", lambda name: broken)
    result = run("doctor")
    assert isinstance(result.exception, ExceptionGroup)


def test_a_single_error_in_a_group_is_told_as_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from cachespec.errors import InputError, LedgerError

    raised: list[Exception] = []

    @click.command()
    def failing() -> None:
        raise ExceptionGroup("one", [ExceptionGroup("inner", [raised[-1]])])

    monkeypatch.setattr("cachespec.cli.main._command", lambda name: failing)
    for error, code in ((InputError("is odd", field="x"), 2), (LedgerError("disk full"), 1)):
        raised.append(error)
        result = run("doctor")
        assert (result.exit_code, result.stderr) == (code, f"error: {error}\n")


def test_a_reader_that_leaves_is_no_error(app: Callable[..., str], request_file: Callable[[Any], str]) -> None:
    command = process("complete", request_file({"prompt": "hi"}), "-c", app("ok-20000"))
    assert command.stdout is not None
    assert command.stderr is not None
    assert command.stdin is not None
    command.stdin.close()
    command.stdout.read(1)
    command.stdout.close()
    told = command.stderr.read()
    command.stderr.close()
    assert command.wait(30) == 1
    assert told == b""


def test_interrupt(app: Callable[..., str], request_file: Callable[[Any], str], server: WireServer) -> None:
    server.reset()
    command = process("complete", request_file({"prompt": "hi"}), "-c", app("stall-3"))
    assert server.wait_for(lambda: bool(server.requests) and server.requests[0].events_sent >= 3, 30)
    command.send_signal(signal.SIGINT)
    _, told = command.communicate(timeout=30)
    assert command.returncode == 130
    assert b"Traceback" not in told
    assert server.wait_for(lambda: server.connections == 0), "the upstream was left open"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full:
        command = process("config", "schema", stdout=full)
        _, told = command.communicate(timeout=60)
    assert command.returncode == 1
    assert b"Traceback" not in told
    assert b"No space left" in told


def test_the_console_script_is_there() -> None:
    script = Path(sys.executable).with_name("cachespec")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cachespec ")
    assert cli.name == "cli"
