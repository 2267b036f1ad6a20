"""``cachespec replay``: its document, its decisions, its page, and what is told of wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Run, document, failure
from tests.replay.plain import Plain
from tests.replay.test_bound import chat
from tests.replay.test_simulate import agent

AGENT = [agent(0, 3), agent(20, 5, extra=3), agent(500, 6), agent(0, 4, trace="b"), agent(9, 7, trace="b")]
FIXED = {f"{name}:{ttl}" for name in ("last-message", "always", "previous", "quarters") for ttl in ("5m", "1h")} | {
    "off",
    "caller",
}


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., str]:
    """Write lines and return the file's path."""

    def write(lines: list[str] | None = None) -> str:
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(AGENT if lines is None else lines) + "\n")
        return str(path)

    return write


def test_the_document(run: Run, trace: Callable[..., str]) -> None:
    found = document(run("replay", trace(), "--json"))
    assert set(found) == {"requests", "input_tokens", "relative_cost", "best_fixed", "bound", "bound_with_pings"}
    assert (found["requests"], found["input_tokens"]) == (5, 253)
    assert set(found["relative_cost"]) >= FIXED
    fixed = {name: found["relative_cost"][name] for name in FIXED}
    assert found["best_fixed"]["cost"] == min(fixed.values()) == fixed[found["best_fixed"]["policy"]]
    assert found["bound_with_pings"] <= found["bound"] <= min(found["relative_cost"].values())


def test_only_the_policies_that_are_named(run: Run, trace: Callable[..., str]) -> None:
    found = document(run("replay", trace(), "--policy", "off", "--policy", "last-message:5m", "--json"))
    assert list(found["relative_cost"]) == ["off", "last-message:5m"]
    assert found["best_fixed"]["cost"] <= found["relative_cost"]["last-message:5m"]


def test_the_table_and_progress(run: Run, trace: Callable[..., str]) -> None:
    result = run("replay", trace(), "--policy", "last-message:5m", "--policy", "off")
    assert result.exit_code == 0
    first, header, *rows = result.stdout.splitlines()
    assert first == "5 requests, 253 input tokens; cost relative to no caching"
    assert header.split() == ["policy", "cost", "read", "written", "uncached", "keep-alives"]
    assert [row.split()[0] for row in rows[:2]] in (["last-message:5m", "off"], ["off", "last-message:5m"])
    assert rows[2].startswith("best fixed policy: ")
    assert rows[3].startswith("bound: ")
    told = [line.split(":")[0] for line in result.stderr.splitlines()]
    assert told[:2] == ["last-message", "off"]
    assert told[-1] == "bound"
    assert len(told) == len(FIXED) + 1


@pytest.mark.parametrize("lines", [AGENT, [chat(0, 1, 2), chat(9, 1, 2, 3), chat(999, 1, 2, 3, 4)]])
@pytest.mark.parametrize("policy", ["previous:1h", "quarters:5m"])
def test_decisions_stand_up_to_the_plain_simulator(
    run: Run, trace: Callable[..., str], tmp_path: Path, lines: list[str], policy: str
) -> None:
    out = tmp_path / "decisions.jsonl"
    found = document(run("replay", trace(lines), "--policy", policy, "--decisions", str(out), "--json"))
    cost = Plain(lines).cost(out.read_text().splitlines())
    assert cost / found["input_tokens"] == pytest.approx(found["relative_cost"][policy])


def test_decisions_and_a_trace_through_pipes(run: Run) -> None:
    result = run("replay", "-", "--policy", "last-message:5m", "--decisions", "-", text="\n".join(AGENT))
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[1] == {"i": 1, "read": 30, "uncached": 0, "writes": {"5m": 23}, "marks": [[53, "5m"]]}
    assert [line["i"] for line in lines] == [0, 1, 2, 3, 4]


def test_openai(run: Run, trace: Callable[..., str]) -> None:
    found = document(run("replay", trace(), "--vendor", "openai-5.6", "--json"))
    assert set(found["relative_cost"]) >= {"off", "caller", "last-message:30m"}
    assert found["relative_cost"]["off"] == 1
    assert found["relative_cost"]["caller"] < 1


def test_a_policy_of_ones_own(run: Run, trace: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_replay.py").write_text(
        "from cachespec.replay.fixed import fixed_policies\n"
        "from cachespec.replay.vendor import VENDORS\n"
        "def policy():\n    return fixed_policies(VENDORS['anthropic'])['always:1h']\n"
    )
    path = trace()
    monkeypatch.chdir(tmp_path)
    found = document(run("replay", path, "--policy", "mine_for_replay:policy", "--policy", "always:1h", "--json"))
    assert found["relative_cost"]["mine_for_replay:policy"] == found["relative_cost"]["always:1h"]


class _Page(HTMLParser):
    """Counts tags, and sees that every one is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        assert not {"src", "href"} & {name for name, _ in attrs}, "fetches something"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1


def test_the_page(run: Run, trace: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = run("replay", trace(), "--html", str(out))
    assert result.exit_code == 0
    page, text = _Page(), out.read_text()
    page.feed(text)
    assert page.open == []
    assert page.count["svg"] == 3
    for title in ("Cost by policy", "Where the money went", "Hit ratio over time", "always:5m"):
        assert title in text
    assert "script" not in page.count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read: No such file or directory"),
        (["-"], "<stdin>:2: is no JSON"),
        (["-", "--policy", "always:2m"], "there is no fixed policy 'always:2m' (there is: off, "),
        (["-", "--policy", "alwys:5m"], "or do you mean the fixed policy 'always:5m'?"),
        (["-", "--policy", "nothing-like-it"], "no plug-in for caching is called 'nothing-like-it'"),
    ],
)
def test_wrong_input_is_named(run: Run, arguments: list[str], message: str) -> None:
    result = run("replay", *arguments, "--json", text=chat(0, 1) + "\n{")
    assert result.exit_code == 2
    assert message in failure(result)["message"]


def test_a_file_that_cannot_be_written(run: Run, trace: Callable[..., str], tmp_path: Path) -> None:
    result = run("replay", trace(), "--policy", "off", "--decisions", str(tmp_path / "no" / "x"), "--json")
    assert result.exit_code == 2
    assert "cannot be written" in failure(result)["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--decisions", "x"],
        ["--decisions", "x", "--policy", "off", "--policy", "caller"],
        ["--decisions", "-", "--policy", "off", "--json"],
        ["--html", "-", "--json"],
    ],
)
def test_options_that_do_not_go_together(run: Run, trace: Callable[..., str], arguments: list[str]) -> None:
    result = run("replay", trace(), *arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


def test_the_trace_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    for options in (("--decisions", str(trace), "--policy", "off"), ("--html", str(trace))):
        refused = run("replay", str(trace), *options)
        assert (refused.exit_code, "would be overwritten" in refused.stderr) == (2, True)
    assert trace.read_text() == "{}\n"
