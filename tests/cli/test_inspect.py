"""``config``, ``plugins`` and ``doctor``: they look and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import SECRET, Run, document

from cachespec.cli import doctor

App = Callable[..., str]


def test_config_check(run: Run, app: App) -> None:
    path = app()
    result = run("config", "check", path)
    assert (result.exit_code, result.stdout) == (0, f"{path}: valid\n")
    found = document(run("config", "check", path, "--json"))
    assert found == {"path": path, "ok": True, "findings": []}


def test_config_check_of_a_bad_file(run: Run, app: App) -> None:
    path = app(more="rooting = 1\nbudgets = 3\n")
    before = Path(path).read_bytes()
    result = run("config", "check", path)
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [
        f"{path}:9: error: policies.rooting: unknown key (did you mean 'routing'?)",
        f"{path}:10: error: policies.budgets: must be a list (a table each), not 3 "
        '(such as budgets = [{ scope = "request", limit = "0.40" }])',
    ]
    result = run("config", "check", path, "--json")
    assert result.exit_code == 2
    found = document(result)
    assert not found["ok"]
    assert found["findings"][0] == {
        "level": "error",
        "path": path,
        "line": 9,
        "key": "policies.rooting",
        "message": "unknown key",
        "hint": "did you mean 'routing'?",
    }
    assert Path(path).read_bytes() == before


def test_config_on_stdin(run: Run, app: App) -> None:
    text = Path(app()).read_text()
    assert run("config", "check", "-", text=text).stdout == "-: valid\n"
    bad = run("config", "check", "-", "--json", text=text + "rooting = 1\n")
    assert (bad.exit_code, document(bad)["findings"][0]["line"]) == (2, 9)
    assert [b["name"] for b in document(run("doctor", "-c", "-", "--json", text=text))["backends"]] == ["wire"]


def test_config_check_warns(run: Run, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY")
    result = run("config", "check", app())
    assert result.exit_code == 0
    assert "warning: backends.wire.api_key: the environment variable TEST_KEY is not set" in result.stdout
    assert result.stdout.endswith("valid\n")


def test_config_schema(run: Run) -> None:
    schema = document(run("config", "schema"))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert document(run("config", "schema", "--json")) == schema


def test_plugins(run: Run) -> None:
    found = document(run("plugins", "--json"))["plugins"]
    assert {"family": "routing", "name": "cheapest", "loadable": True}.items() <= next(
        p for p in found if p["name"] == "cheapest"
    ).items()
    shown = run("plugins")
    assert shown.exit_code == 0
    assert "llamacpp" in shown.stdout


def test_doctor_names_keys_and_shows_none(run: Run, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    path = app(more='[backends.local]\nuse = "llamacpp"\nmodel = "no/such.gguf"\n')
    result = run("doctor", "-c", path, "--json")
    assert result.exit_code == 0
    report = document(result)
    assert report["keys"]["OPENAI_API_KEY"] is True
    assert report["keys"]["ANTHROPIC_API_KEY"] is False
    assert report["keys"]["TEST_KEY"] is True
    assert [(b["name"], b["ok"]) for b in report["backends"]] == [("wire", True), ("local", False)]
    assert "no such file" in report["backends"][1]["detail"]
    assert report["hardware"]["cores"] >= 1
    assert {e["name"] for e in report["extras"]} == {"openai", "anthropic", "llamacpp", "torch"}
    shown = run("doctor", "-c", path)
    assert "OPENAI_API_KEY" in shown.stdout
    assert SECRET not in result.output + shown.output


def test_doctor_without_anything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.config.installed", lambda name: False)
    result = run("doctor", "--json")
    report = document(result)
    assert (result.exit_code, report["backends"]) == (1, [])
    assert "set ANTHROPIC_API_KEY or OPENAI_API_KEY" in report["notes"][0]
    assert run("doctor").exit_code == 1


def test_doctor_of_a_bad_file(run: Run, app: App) -> None:
    result = run("doctor", "-c", app(more="rooting = 1\n"))
    assert result.exit_code == 2
    assert "policies.rooting" in result.stderr


def test_cuda_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.1'\n")
    tool.chmod(0o755)
    assert doctor.hardware()["cuda"] == [{"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "580.1"}]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert doctor.hardware()["cuda"] == []
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.hardware()["cuda"] == []
