"""What the command-line tests share: a runner, a process, and a configuration whose backend is the loopback server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.wire.server import WireServer

from cachespec.cli.main import cli

SECRET = "sk-very-secret-0123456789"
Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run a command in this process: ``run("complete", "-", "-c", path, text="...")``."""

    def invoke(*args: str, text: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, args, input=text)

    return invoke


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as running:
        yield running


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TEST_KEY", SECRET)


@pytest.fixture
def app(tmp_path: Path, server: WireServer) -> Callable[..., str]:
    """Write a configuration with one backend and return its path: ``app("ok-5")``, by the wire model's name."""

    def write(model: str = "ok-5", *, more: str = "") -> str:
        path = tmp_path / "app.toml"
        path.write_text(
            f'[backends.wire]\nuse = "anthropic"\nmodel = "{model}"\nbase_url = "{server.url}"\n'
            f'api_key = {{ env = "TEST_KEY" }}\nprices = {{ input = "1", cache_read = "0.1", output = "10" }}\n'
            f'[policies]\nretries = {{ attempts = 2, first_delay = "10ms" }}\n{more}'
        )
        return str(path)

    return write


@pytest.fixture
def request_file(tmp_path: Path) -> Callable[[Any], str]:
    """Write a value as JSON (or a text as it is) and return the file's path."""

    def write(value: Any) -> str:
        path = tmp_path / "request.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return write


# A shell's background job hands on that Ctrl-C is ignored, and so may a CI runner; a terminal's user has it.
RUN = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('cachespec', run_name='__main__', alter_sys=True)"
)


def process(*args: str, **more: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    environment = {**os.environ, "TEST_KEY": SECRET, **more.pop("env", {})}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([sys.executable, "-c", RUN, *args], env=environment, **pipes)


def document(result: Result) -> Any:
    """The one JSON document on stdout."""
    value, end = json.JSONDecoder().raw_decode(result.stdout)
    assert result.stdout[end:] == "\n"
    return value


def failure(result: Result) -> Any:
    """The error in the one document of a command that failed with ``--json``; its line is on stderr as well."""
    assert result.exit_code in (1, 2), result.output
    error = document(result)["error"]
    assert result.stderr.startswith(f"error: {error['message']}\n")
    return error
