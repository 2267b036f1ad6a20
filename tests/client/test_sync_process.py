"""The blocking client in processes that do not close it, or were forked from one that has it open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import os, sys
from cachespec import sync
from cachespec.client import Client
from cachespec.testing import ScriptedBackend, say

backend = ScriptedBackend([say("hi")] * 9, name="b")
ledger = {"use": "sqlite", "path": sys.argv[1]}
client = sync.Client(Client(backends={"b": backend}, models={"m": ["b"]}, model="m", ledger=ledger))
if sys.argv[2] != "not entered":
    client.__enter__()
print(client.complete("x").text, flush=True)
"""
LEFT = """
stream = client.stream("x").__enter__()
print(next(stream.text_stream), client.ledger.totals().requests)
"""
UNUSED = """
unused = sync.Client(Client(backends={"b": backend}))
pid = os.fork()
if pid == 0:
    print(unused.complete("x").text, flush=True)
    sys.exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(unused.complete("x").text)
"""
CHILD = """
pid = os.fork()
if pid == 0:
    if sys.argv[2] == "used":
        for use in (lambda: client.complete("x", timeout=1), lambda: client.plan("x"), lambda: client.session()):
            try:
                print(use().session_id)
            except Exception as error:
                print(type(error).__name__, error)
    if sys.argv[2] != "idle":
        client.__exit__(None, None, None)
    sys.exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(client.complete("y").text)
client.__exit__(None, None, None)
"""


def run(code: str, *args: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("what", ["entered", "not entered"])
def test_a_process_that_does_not_close_it_ends(tmp_path: Path, what: str) -> None:
    assert run(SETUP, str(tmp_path / "ledger.db"), what) == ["hi"]


@pytest.mark.parametrize("what", ["entered", "not entered"])
def test_a_process_that_leaves_a_stream_open_ends(tmp_path: Path, what: str) -> None:
    assert run(SETUP + LEFT, str(tmp_path / "ledger.db"), what) == ["hi", "hi 1"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork here")
def test_one_that_was_not_used_before_the_fork_opens_in_each_process(tmp_path: Path) -> None:
    assert run(SETUP + UNUSED, str(tmp_path / "ledger.db"), "not entered") == ["hi", "hi", "child 0", "hi"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork here")
@pytest.mark.parametrize("what", ["idle", "closed", "used"])
def test_a_forked_process_is_told_and_ends(tmp_path: Path, what: str) -> None:
    told = "StreamStateError the client was opened in the process that this one was forked from; open one here"
    first, *child, ended, last = run(SETUP + CHILD, str(tmp_path / "ledger.db"), what)
    assert (first, ended, last) == ("hi", "child 0", "hi")
    assert child == ([told] * 3 if what == "used" else [])


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork here")
def test_a_forked_process_leaves_streams_to_the_other(tmp_path: Path) -> None:
    code = (
        SETUP
        + """
with client.stream("y") as stream:
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(stream.get_final_completion().text)
client.close()
"""
    )
    assert run(code, str(tmp_path / "ledger.db"), "entered") == ["hi", "child 0", "hi"]
