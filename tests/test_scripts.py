"""The set-up script: clear when something is missing, quick when nothing is to do. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up reads of a checkout, without a .venv."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.fixture
def setup(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("cachespec_setup", checkout / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(checkout: Path, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "scripts" / "setup.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": path}, timeout=60)


def test_a_missing_compiler_is_told_before_anything_is_made(checkout: Path) -> None:
    done = run(checkout, path=str(checkout / "nothing"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "No C++ compiler was found" in done.stderr
    assert "llama-cpp-python==" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_unknown_argument_is_refused(checkout: Path) -> None:
    done = run(checkout, "--fast", path="")
    assert (done.returncode, done.stderr) == (1, "usage: setup.py [--dev]\n")


def test_an_old_python_is_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "OLDEST", (99, 0))
    with pytest.raises(SystemExit):
        setup.main([])
    assert "cachespec needs Python 99.0 or newer" in capsys.readouterr().err


def test_a_compiler_is_one_that_runs(setup: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkout / "bin"
    folder.mkdir()
    for name, code in (("c++", 1), ("g++", 0)):
        (folder / name).write_text(f"#!/bin/sh\nexit {code}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    assert setup.compiler() == "g++"


def test_a_finished_setup_is_known_until_something_changes(setup: ModuleType, checkout: Path) -> None:
    venv = checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n", encoding="utf-8")
    assert not setup.is_done("run")
    setup.STAMP.write_text(json.dumps({kind: setup.key_of(kind) for kind in ("run", "dev")}), encoding="utf-8")
    assert setup.is_done("run")
    assert setup.main([]) == 0
    with (checkout / "requirements" / "dev.lock").open("a", encoding="utf-8") as lock:
        lock.write("# changed\n")
    assert setup.is_done("run")
    assert not setup.is_done("dev")
    setup.STAMP.write_text("{broken", encoding="utf-8")
    assert not setup.is_done("run")
