"""``complete``, ``explain`` and ``chat`` against the loopback server."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import SECRET, Run, document, failure, process
from tests.wire.frames import answer
from tests.wire.server import WireServer

from cachespec.cli.main import cli

App = Callable[..., str]
File = Callable[[Any], str]
COMPLETION = {"text", "tool_calls", "finish_reason", "usage", "cost", "estimated", "backend", "model", "request_id"}
COMPLETION |= {"ttft_ms", "total_ms", "decision", "warnings"}
DECISION = {"chosen", "candidates", "plan", "budgets", "generation", "decided_in_us"}
BODIES = [
    {"prompt": "hello", "system": "Be short."},
    {"messages": [{"role": "user", "content": "hello"}], "max_output_tokens": 50},
    {"model": "wire", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "hello"}]},
    {"model": "wire", "input": "hello", "max_output_tokens": 50},
]


@pytest.mark.parametrize("body", BODIES)
def test_complete_streams_the_answer(run: Run, app: App, request_file: File, body: Any) -> None:
    result = run("complete", request_file(body), "-c", app("ok-5"))
    assert result.exit_code == 0, result.output
    assert result.stdout == answer(5) + "\n"
    assert "wire (ok-5)" in result.stderr
    assert "1024 read from cache" in result.stderr


@pytest.mark.parametrize("body", BODIES)
def test_complete_as_json(run: Run, app: App, body: Any) -> None:
    result = run("complete", "-", "-c", app("ok-5"), "--json", text=json.dumps(body))
    assert result.exit_code == 0, result.output
    done = document(result)
    assert set(done) == COMPLETION
    assert done["text"] == answer(5)
    assert done["usage"]["cache_read"] == 1024
    assert isinstance(done["cost"], str)
    assert set(done["decision"]) == DECISION
    assert result.stderr == ""


def test_complete_shows_tool_calls(run: Run, app: App, request_file: File) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    result = run("complete", request_file({"prompt": "?", "tools": tools}), "-c", app("tool"))
    assert result.exit_code == 0, result.output
    assert 'get_weather({"city": "Zürich", "days":  3})' in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "<stdin>:1:2: is no JSON"),
        ("[]", "must be a JSON object, not list"),
        ('{"prompt": NaN}', "is no JSON: NaN"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is there twice"),
        ('{"prompt": "a", "temprature": 1}', "did you mean 'temperature'"),
        ('{"prompt": 3}', "must be a string or a list, not an integer"),
        ('{"prompt": "x", "model": "nothing"}', "no model 'nothing'"),
        (b"\xff\xfe", "<stdin>:1: is not UTF-8 text"),
        ("[" * 100_000, "<stdin>"),
    ],
)
@pytest.mark.parametrize("command", ["complete", "explain"])
def test_bad_requests(run: Run, app: App, command: str, text: str | bytes, message: str) -> None:
    result = run(command, "-", "-c", app(), "--json", text=text)
    assert result.exit_code == 2, result.output
    assert message in failure(result)["message"]
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("model", "kind"), [("401", "401"), ("500", "500"), ("cut-3", ""), ("context", "400"), ("refuse-9", "")]
)
def test_a_backend_that_fails_is_one(run: Run, app: App, request_file: File, model: str, kind: str) -> None:
    result = run("complete", request_file({"prompt": "x"}), "-c", app(model), "--json")
    assert result.exit_code == 1, result.output
    error = failure(result)
    assert kind in error["message"]
    assert error["backend"] == "wire"
    assert SECRET not in result.output


def test_a_cut_answer_is_not_lost(run: Run, app: App, request_file: File) -> None:
    path, request = app("cut-3"), request_file({"prompt": "x"})
    error = failure(run("complete", request, "-c", path, "--json"))
    assert error["type"] == "StreamInterruptedError"
    assert set(error["partial"]) == COMPLETION
    assert error["partial"]["text"] == answer(3)
    shown = run("complete", request, "-c", path)
    assert shown.exit_code == 1
    assert shown.stdout == answer(3) + "\n", "the line is ended before the error"
    turns = document(run("chat", "-c", path, "--json", text="one\n"))["turns"]
    assert turns[0]["error"]["partial"]["text"] == answer(3)


def test_an_error_as_a_document_has_its_fields(run: Run, app: App, request_file: File) -> None:
    path = app(
        more='budgets = [{ scope = "tenant", limit = "0.0000001" }]\nrules = [{ when = { tags = "x" }, exclude = ["wire"] }]\n'
    )
    request = request_file({"model": "wire", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]})
    error = failure(run("complete", request, "-c", path, "--tenant", "acme", "--json"))
    assert (error["type"], error["scope"], error["limit"]) == ("BudgetExceededError", "tenant:acme in total", "0.0000001")
    assert "limit 0.0000001 USD" in error["message"]
    assert error["partial"] is None
    error = failure(run("complete", request, "-c", path, "--tag", "y", "--tag", "x", "--json"))
    assert error["type"] == "NoRouteError"
    assert error["reasons"]["wire"][0]["code"] == "rule"
    error = document(run("complete", "-", "-c", "-", "--json"))["error"]
    assert error.keys() == {"type", "message", "partial"}
    assert error["type"] == "UsageError"


def test_what_a_body_cannot_say(run: Run, app: App, request_file: File, tmp_path: Path) -> None:
    ledger = tmp_path / "spent.db"
    path = app("ok-5", more=f'[client]\nledger = {{ use = "sqlite", path = "{ledger}" }}\n')
    request = request_file({"model": "wire", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]})
    assert (
        run("complete", request, "-c", path, "--tenant", "acme", "--session", "s1", "--tag", "a", "--tag", "b").exit_code == 0
    )
    entry = document(run("ledger", str(ledger), "--json"))["entries"][0]
    assert (entry["tenant"], entry["session_id"], entry["tags"]) == ("acme", "s1", ["a", "b"])


def test_plugins_beside_the_configuration(run: Run, app: App, request_file: File, tmp_path: Path) -> None:
    path = Path(app("ok-5", more='routing = { use = "my_policies_beside:Any" }\n'))
    missing = run("config", "check", str(path))
    assert f"no module 'my_policies_beside' in {path.parent.resolve()} or elsewhere" in missing.stdout
    (path.parent / "my_policies_beside.py").write_text("class Any:\n    def rank(self, ask, offers):\n        return offers\n")
    importlib.invalidate_caches()
    before = list(sys.path)
    assert run("config", "check", str(path)).exit_code == 0
    assert run("complete", request_file({"prompt": "x"}), "-c", str(path)).exit_code == 0
    assert sys.path == before


def test_the_first_of_several_problems_tells_of_the_others(run: Run, app: App, request_file: File) -> None:
    path = app(more="rooting = 1\nbudgets = 3\n")
    told = run("complete", request_file({"prompt": "x"}), "-c", path).stderr
    assert told.endswith(f"\nand another problem; to see all: cachespec config check {path}\n")


def test_bad_configurations(run: Run, app: App, request_file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    request, path = request_file({"prompt": "x"}), app(more="rooting = 1\n")
    for command in ("complete", "explain"):
        result = run(command, request, "-c", path)
        assert result.exit_code == 2
        assert f"error: {path}:9: policies.rooting: unknown key (did you mean 'routing'?)" in result.stderr
        assert run(command, request, "-c", "/no/such.toml").exit_code == 2
    monkeypatch.delenv("TEST_KEY")
    result = run("complete", request, "-c", app())
    assert result.exit_code == 2
    assert "TEST_KEY is not set" in result.stderr


def test_explain_sends_nothing_and_shows_the_exact_bytes(run: Run, app: App, request_file: File, server: WireServer) -> None:
    path, request = app("ok-5"), request_file({"prompt": "naïve 🙂", "system": "S"})
    server.reset()
    plain = document(run("explain", request, "-c", path, "--json"))
    assert set(plain) == DECISION
    assert plain["chosen"] == "wire"
    result = run("explain", request, "-c", path, "--wire", "--json")
    shown = document(result)
    assert set(shown) == DECISION | {"wire"}
    assert server.requests == []
    assert SECRET not in result.output
    assert run("complete", request, "-c", path).exit_code == 0
    sent = server.requests[0]
    assert sent.body.decode() == shown["wire"]["body"]
    assert shown["wire"]["url"] == server.url + sent.path


def test_explain_for_people(run: Run, app: App, request_file: File, server: WireServer) -> None:
    server.reset()
    result = run("explain", request_file({"prompt": "x"}), "-c", app("ok-5"), "--wire")
    assert result.exit_code == 0
    assert result.stdout.startswith("chosen: wire")
    assert f"POST {server.url}/v1/messages" in result.stdout
    assert server.requests == []


def test_explain_when_nobody_can(run: Run, app: App, request_file: File) -> None:
    path = app(more='rules = [{ exclude = ["wire"] }]\n')
    result = run("explain", request_file({"prompt": "x"}), "-c", path, "--wire", "--json")
    assert result.exit_code == 1
    found = document(result)
    assert found["chosen"] is None
    assert found["wire"] is None
    assert found["candidates"][0]["reasons"][0]["code"] == "rule"
    result = run("complete", request_file({"prompt": "x"}), "-c", path)
    assert result.exit_code == 1


def test_chat_through_a_pipe(run: Run, app: App, server: WireServer) -> None:
    server.reset()
    result = run("chat", "-c", app("ok-4"), "--system", "Be kind.", text="hello\n\nmore\n/quit\nnever sent\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == (answer(4) + "\n") * 2
    assert result.stderr.count("1024 read from cache") == 2
    assert [len(r.json["messages"]) for r in server.requests] == [1, 3], "the history grows"


def test_chat_forgets(run: Run, app: App, server: WireServer) -> None:
    server.reset()
    result = run("chat", "-c", app("ok-4"), text="one\n/new\ntwo\n/what\n")
    assert result.exit_code == 0, result.output
    assert [len(r.json["messages"]) for r in server.requests] == [1, 1]
    assert "no such command: /what" in result.stderr


def test_chat_as_json(run: Run, app: App) -> None:
    result = run("chat", "-c", app("ok-4"), "--json", text="one\ntwo\n")
    turns = document(result)["turns"]
    assert [turn["text"] for turn in turns] == [answer(4)] * 2
    assert result.stderr == ""


def test_chat_goes_on_after_an_error(run: Run, app: App, server: WireServer) -> None:
    server.reset()
    result = run("chat", "-c", app("400"), text="one\ntwo\n")
    assert result.exit_code == 1
    assert result.stderr.count("error: ") == 2
    assert [len(r.json["messages"]) for r in server.requests] == [1, 1], "a failed turn leaves the history as it was"


def test_chat_with_a_model_that_is_not_there(run: Run, app: App) -> None:
    result = run("chat", "-c", app(), "--model", "wier", text="one\n")
    assert result.exit_code == 2
    assert "'wier'" in result.stderr


def test_chat_as_a_process(app: App) -> None:
    command = process("chat", "-c", app("ok-3"))
    out, err = command.communicate(b"hello\n", timeout=60)
    assert command.returncode == 0, err
    assert out.decode() == answer(3) + "\n"


def test_interrupt_while_chat_waits(app: App) -> None:
    command = process("chat", "-c", app("ok-3"))
    assert command.stdin is not None
    assert command.stdout is not None
    command.stdin.write(b"hello\n")
    command.stdin.flush()
    assert command.stdout.readline().decode() == answer(3) + "\n"
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=30)
    assert command.returncode == 130, err
    assert b"Traceback" not in err


def test_chat_that_is_no_text(app: App) -> None:
    command = process("chat", "-c", app("ok-3"), env={"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:strict"})
    _, err = command.communicate(b"\xff\xfe\n", timeout=60)
    assert command.returncode == 2, err
    assert b"not UTF-8" in err


def test_a_configuration_on_stdin(run: Run, app: App, request_file: File) -> None:
    text = Path(app("ok-3")).read_text()
    result = run("complete", request_file({"prompt": "x"}), "-c", "-", text=text)
    assert result.stdout == answer(3) + "\n"
    result = run("complete", request_file({"prompt": "x"}), "-c", "-", text=text + "rooting = 1\n")
    assert result.exit_code == 2
    assert "<stdin>:9: policies.rooting" in result.stderr
    for args in (["complete", "-"], ["explain", "-"], ["chat"]):
        assert run(*args, "-c", "-", text=text).exit_code == 2


def test_chat_at_a_terminal(app: App, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["hello"])

    def typed(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("cachespec.cli.chat._at_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", typed)
    with pytest.raises(SystemExit) as ended:
        cli(["chat", "-c", app("ok-3")])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.out == answer(3) + "\n\n"
    assert "/quit" in shown.err
