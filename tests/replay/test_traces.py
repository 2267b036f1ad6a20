"""Reading traces: both formats, packed or not, and what is told of a wrong line."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachespec.errors import InputError
from cachespec.replay.traces import parse_trace, read_trace

AGENT: dict[str, Any] = {
    "trace": "a", "agent": "main", "t": 3, "model": "m", "input": 70, "output": 5, "blocks": [[1, 2], [9, 2]], "block_size": 16,
    "tool_tokens": 60, "system_tokens": 30, "input_types": ["text"], "stop": "end_turn", "api_time": 4.5,
}  # fmt: skip
CHAT: dict[str, Any] = {"timestamp": 2500, "input_length": 1030, "output_length": 4, "hash_ids": [4, 5, 8]}


def test_a_coding_agent_line() -> None:
    trace = parse_trace([json.dumps(AGENT), "", json.dumps(AGENT | {"t": 9, "api_time": None, "stop": ""})])
    assert (trace.format, trace.block_size, trace.any_block, trace.requests) == ("coding-agent", 16, False, 2)
    assert trace.input_tokens == 140
    first, second = trace.sessions[0].requests
    assert (first.i, first.t, first.blocks, first.block_count) == (0, 3.0, ((1, 2), (9, 2)), 4)
    assert first.fixed_tokens == 70  # tools and system cannot be longer than the prompt
    assert (first.traffic, first.input_types) == (("m", "main"), ("text",))
    assert (first.ended, first.stop, first.output_tokens) == (7.5, "end_turn", 5)
    assert (second.i, second.ended, second.stop) == (1, 11.0, None)


def test_a_mooncake_line() -> None:
    trace = parse_trace([json.dumps(CHAT), json.dumps(CHAT | {"timestamp": 0, "input_length": 1024, "hash_ids": [4, 5]})])
    assert (trace.format, trace.block_size, trace.any_block, trace.sessions[0].name) == ("mooncake", 512, True, None)
    early, late = trace.sessions[0].requests
    assert (early.i, early.t, early.rest) == (1, 0.0, None)
    assert (late.i, late.t, late.blocks, late.rest, late.ended) == (0, 2.5, ((4, 2),), 8, 4.5)


def test_sessions_stand_in_the_order_of_the_file() -> None:
    trace = parse_trace(json.dumps(AGENT | {"trace": name}) for name in ("z", "z", "b"))
    assert [(session.name, len(session.requests)) for session in trace.sessions] == [("z", 2), ("b", 1)]


def test_files_packed_plain_and_from_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(CHAT).encode()
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    assert read_trace(str(plain)).sessions == read_trace(str(packed)).sessions
    for given in (data, gzip.compress(data)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
        assert read_trace("-").requests == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "t: holds no request"),
        (["{"], "t:1: is no JSON"),
        (["[1]"], "t:1: must be a JSON object, not list"),
        (["{}"], "t:1: is neither a Mooncake line (hash_ids) nor a coding-agent line (blocks)"),
        ([CHAT, CHAT | {"input_length": True}], "t:2: input_length: must be a count, not True"),
        ([CHAT, {"timestamp": 1}], "t:2: input_length: must be a count, not absent"),
        ([CHAT | {"timestamp": -1}], "t:1: timestamp: must be a number from 0 on, not -1"),
        ([CHAT | {"hash_ids": [4]}], "t:1: hash_ids: 1 blocks of 512 tokens do not make 1030 tokens"),
        ([CHAT | {"hash_ids": "x"}], "t:1: hash_ids: must be a list of block ids from 0 on"),
        ([AGENT | {"blocks": [[1, 0]]}], "t:1: blocks: must be a list of runs [first id, count]"),
        ([AGENT | {"blocks": [[1, 3]]}], "t:1: blocks: do not make the 4 whole blocks of 70 tokens"),
        ([AGENT | {"block_size": 0}], "t:1: block_size: must be a count above 0"),
        ([AGENT, AGENT | {"block_size": 8}], "t:2: block_size: differs from the first line's 16"),
        ([AGENT, AGENT | {"trace": "b"}, AGENT], "t:3: trace: the lines of 'a' do not stand together"),
        ([AGENT | {"trace": None}], "t:1: trace: must be text, not absent"),
        ([AGENT | {"api_time": "soon"}], "t:1: api_time: must be a number from 0 on, not 'soon'"),
        ([AGENT | {"input_types": [1]}], "t:1: input_types: must be a list of texts"),
    ],
)
def test_a_wrong_line_is_named(lines: list[Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_trace([line if isinstance(line, str) else json.dumps(line) for line in lines], "t")
    assert str(raised.value).startswith(message)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: cannot be read: No such file"):
        read_trace(str(tmp_path / "nowhere"))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(CHAT).encode() * 50)[:40])
    with pytest.raises(InputError, match=r"cut\.gz: is no complete gzip file"):
        read_trace(str(cut))
    latin = tmp_path / "latin"
    latin.write_bytes(b'{"a": 1}\n"\xe4"')
    with pytest.raises(InputError, match="latin:2: is not UTF-8 text"):
        read_trace(str(latin))
