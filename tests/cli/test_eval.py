"""``cachespec eval``: its document, table, page and policy file, and what is told of wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.backends.test_llamacpp import available
from tests.cli.conftest import Run, document, failure

LOCAL = '[backends.laptop]\nuse = "llamacpp"\nmodel = "smollm2"\ncontext = 256\nthreads = 1\ndraft = { use = "suffix" }\n'
KEYS = {"backend", "groups", "prefix", "policies", "recommendation"}
COPY = "Repeat exactly three times: The harbour master keeps the keys of the lighthouse in a blue tin box."
ASKED = [{"prompt": f"Question {i}: why is the sky blue?", "category": "ab"[i % 2], "t": i, "id": i} for i in range(4)]


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., str]:
    """Write lines and return the file's path."""

    def write(*lines: Any) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(json.dumps(line) if not isinstance(line, str) else line for line in lines or ASKED))
        return str(path)

    return write


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        if tag not in ("meta", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag


def test_the_document_of_a_hosted_backend(run: Run, prompts: Callable[..., str], app: Callable[..., str]) -> None:
    found = document(run("eval", prompts(), "--backend", "wire", "-c", app(), "--json"))
    assert found.keys() == KEYS
    assert [(group["category"], group["requests"]) for group in found["groups"]] == [("a", 2), ("b", 2)]
    assert {group["recommended"] for group in found["groups"]} == {"vendor_optimises"}
    assert found["prefix"].keys() == {"shared_tokens", "total_tokens", "by_lifetime"}
    assert found["prefix"]["by_lifetime"].keys() == {"5m", "1h", "any"}
    assert all(isinstance(cost, str) for cost in found["policies"].values())


def test_the_table_the_page_and_the_policy_file(
    run: Run, prompts: Callable[..., str], app: Callable[..., str], tmp_path: Path
) -> None:
    page, policy = tmp_path / "out.html", tmp_path / "out.toml"
    result = run("eval", prompts(), "--backend", "wire", "-c", app(), "--html", str(page), "--write-policy", str(policy))
    assert result.exit_code == 0, result.output
    assert "vendor_optimises" in result.stdout
    assert "off" in result.stdout
    assert "not used: id" in result.stderr
    tags = Tags(page.read_text())
    assert not tags.open
    assert "svg" in tags.found
    assert document(run("config", "check", str(policy), "--json"))["ok"] is True
    shown = run("eval", "-", "--backend", "wire", "-c", app(), "--html", "-", text=json.dumps(ASKED[0]))
    assert shown.stdout.startswith("<!doctype html>")
    assert shown.stdout.rstrip().endswith("</html>")


@pytest.mark.model
def test_a_local_backend_from_one_process_to_the_next(
    run: Run, prompts: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "cache"))
    config, policy = tmp_path / "app.toml", tmp_path / "policy.toml"
    config.write_text(LOCAL + "require_eval = 0.05\n")
    line = {"turns": [COPY], "category": "copy"}
    sizes = ("--limit", "1", "--max-output-tokens", "32")
    command = ("eval", prompts(line, line), "--backend", "laptop", "-c", str(config), *sizes)
    before = document(run("explain", "-", "-c", str(config), "--json", text='{"prompt": "Hi"}'))
    assert before["candidates"][0]["speculation"]["reason"] == "eval_required"
    result = run(*command, "--json", "--write-policy", str(policy))
    found = document(result)
    assert found.keys() == KEYS
    (group,) = found["groups"]
    assert (group["category"], group["requests"]) == ("copy", 1)
    assert group["drafters"]["suffix"]["acceptance"] > 0.05
    assert "answers: 1 of 1" in result.stderr
    assert document(run("config", "check", str(policy), "--json"))["ok"] is True
    after = document(run("explain", "-", "-c", str(config), "--json", text='{"prompt": "Hi"}'))
    assert after["candidates"][0]["speculation"]["drafter"] == "suffix"


@pytest.mark.parametrize(
    ("line", "backend", "told"),
    [
        ('{"prompt": "Hi", "temperature": "hot"}', "wire", "prompts.jsonl:1: temperature"),
        ("nothing", "wire", "prompts.jsonl:1: is no JSON"),
        ('{"prompt": "Hi"}', "wired", "wire"),
    ],
)
def test_what_is_wrong(
    run: Run, prompts: Callable[..., str], app: Callable[..., str], line: str, backend: str, told: str
) -> None:
    result = run("eval", prompts(line), "--backend", backend, "-c", app(), "--json")
    error = failure(result)
    assert result.exit_code != 0
    assert told in json.dumps(error)


@pytest.mark.parametrize("t", ["1e400", "-1e400", "1" + "0" * 400, "1e13", "NaN"])
def test_a_time_that_is_none(run: Run, prompts: Callable[..., str], app: Callable[..., str], t: str) -> None:
    result = run("eval", prompts(f'{{"prompt": "Hi", "t": {t}}}'), "--backend", "wire", "-c", app(), "--json")
    assert result.exit_code == 2
    error = failure(result)
    assert error["type"] == "InputError"
    assert "prompts.jsonl:1: " in error["message"]


def test_no_file_is_lost(run: Run, prompts: Callable[..., str], app: Callable[..., str], tmp_path: Path) -> None:
    slice_, config, there = prompts(), app(), tmp_path / "there.toml"
    there.write_text("mine")
    before = Path(slice_).read_bytes(), Path(config).read_bytes()
    command = ("eval", slice_, "--backend", "wire", "-c", config)
    for path in (there, config, slice_):
        refused = run(*command, "--write-policy", str(path))
        assert (refused.exit_code, "--force" in refused.stderr) == (2, True)
    (tmp_path / "link.html").symlink_to(config)
    wrong = [("--html", slice_), ("--html", config), ("--html", str(tmp_path / "link.html"))]
    wrong += [("--write-policy", slice_)]
    for option, path_ in wrong:
        refused = run(*command, option, path_, "--force")
        assert (refused.exit_code, "would be overwritten" in refused.stderr) == (2, True)
    both = str(tmp_path / "new")
    assert run(*command, "--html", both, "--write-policy", f"{tmp_path}/./new").exit_code == 2
    assert not Path(both).exists()
    assert there.read_text() == "mine"
    assert (Path(slice_).read_bytes(), Path(config).read_bytes()) == before
    assert run(*command, "--write-policy", str(there), "--force").exit_code == 0
    assert document(run("config", "check", str(there), "--json"))["ok"] is True
    assert run(*command, "--write-policy", config, "--force").exit_code == 0
    assert document(run("config", "check", config, "--json"))["ok"] is True


def test_options_that_do_not_go_together(run: Run, prompts: Callable[..., str], app: Callable[..., str]) -> None:
    assert run("eval", "-", "--backend", "wire", "-c", "-").exit_code == 2
    assert run("eval", prompts(), "--backend", "wire", "-c", app(), "--json", "--html", "-").exit_code == 2
    assert run("eval", prompts(), "-c", app()).exit_code == 2
    result = run("eval", prompts(), "--backend", "wire", "-c", app(), "--write-policy", "/nowhere/at/all.toml")
    assert "cannot be written" in result.output


@pytest.mark.model
def test_a_drafter_that_fails_is_shown(
    run: Run, prompts: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("cachespec.engine.drafters.suffix.SuffixDrafter.accept", lambda self, track, tokens: 1 / 0)
    config = tmp_path / "app.toml"
    config.write_text(LOCAL)
    line = {"prompt": "a", "answer": "b c d"}
    command = ("eval", prompts(line), "--backend", "laptop", "-c", str(config))
    shown = run(*command)
    assert shown.exit_code == 0, shown.output
    assert "suffix: FAILED, no figures: drafter suffix: accept: ZeroDivisionError" in " ".join(shown.stdout.split())
    found = document(run(*command, "--json"))
    assert found.keys() == KEYS | {"failed"}
    assert found["groups"][0]["drafters"] == {}
    assert found["groups"][0]["recommended"] == "eval_required"
