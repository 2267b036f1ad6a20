"""Every Python block of README and docs runs, every TOML block is a valid configuration, every example works."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

import cachespec
from cachespec.config import parse_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = """
[client]
model = "assistant"
[backends.claude]
use = "tests.docs_support:{answers}"
model = "claude-sonnet-5-5"
[models]
assistant = {{ backends = ["claude"] }}
"""


def blocks(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(match[1], id=f"{page.name}:{line}"))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a `cachespec.toml` whose backend answers from a script."""
    (tmp_path / "cachespec.toml").write_text(CONFIG.format(answers="talker"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.anyio
@pytest.mark.parametrize("code", blocks("python"))
async def test_python_blocks_run(code: str, folder: Path) -> None:
    compiled = compile(code, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    async with cachespec.connect("cachespec.toml") as client:
        scope: dict[str, Any] = {"cachespec": cachespec, "client": client}
        if compiled.co_flags & inspect.CO_COROUTINE:
            await eval(compiled, scope)  # noqa: S307
        else:
            await anyio.to_thread.run_sync(exec, compiled, scope)


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_blocks_are_valid(text: str) -> None:
    if "[models" not in text:
        text += '\n[models]\nx = { backends = ["laptop"] }\n'
    parse_config(text, "block.toml")


@pytest.mark.parametrize("text", blocks("sh"))
def test_shell_blocks_name_what_is_there(text: str) -> None:
    for script in re.findall(r"\./(scripts/\w+)", text):
        assert (ROOT / script).is_file()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if path.name == "tools.py":
        (folder / "cachespec.toml").write_text(CONFIG.format(answers="tool_user"), encoding="utf-8")
    monkeypatch.setattr("sys.argv", [path.name, "cachespec.toml"])
    runpy.run_path(str(path), run_name="__main__")
    assert {"stream.py": "Rhine", "tools.py": "31,000", "many_at_once.py": "100 answered"}[path.name] in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
