"""PROMPTS files: what a line may be, and how a wrong one is told."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from cachespec.errors import InputError
from cachespec.evaluation.prompts import OTHERS, Slice, in_time, parse_prompts, read_prompts
from cachespec.messages import TextPart


def read(*lines: Any) -> Slice:
    return parse_prompts([line if isinstance(line, str) else json.dumps(line) for line in lines], "file.jsonl")


def test_requests_prompts_and_turns_are_read_in_order() -> None:
    found = read(
        {"messages": [{"role": "user", "content": "Hi"}], "category": "chat", "temperature": 0.5, "t": 3},
        "",
        {"prompt": "Sum 2 and 2.", "answer": "4", "t": 9.5},
        {"turns": ["One", "Two"], "category": "chat", "tenant": "acme", "session_id": "s", "timestamp": 12},
    )
    chat, plain, turns = found.lines
    assert (chat.category, plain.category, turns.category) == ("chat", OTHERS, "chat")
    assert [line.number for line in found.lines] == [1, 3, 4]
    assert [line.t for line in found.lines] == [3.0, 9.5, 12.0]
    assert chat.request.temperature == 0.5
    assert (plain.answers, turns.answers) == (("4",), (None, None))
    assert (chat.bench, plain.bench, turns.bench) == (False, False, True)
    assert (turns.request.tenant, turns.request.session_id) == ("acme", "s")
    assert found.categories == ["chat", OTHERS]
    second = turns.next(turns.request, "Sure.", 1)
    texts = [part.text for message in second.messages for part in message.parts if isinstance(part, TextPart)]
    assert texts == ["One", "Sure.", "Two"]
    assert second.tenant == "acme"


def test_vendor_bodies_are_read_with_what_stands_beside_them() -> None:
    body = {
        "model": "claude-sonnet-5-5",
        "max_tokens": 9,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hi"}],
    }
    (line,) = read({**body, "category": "support", "response": "Hello."}).lines
    assert line.request.max_output_tokens == 9
    assert line.answers == ("Hello.",)


def test_a_data_set_s_own_fields_are_left_out_and_told() -> None:
    found = read({"turns": ["One"], "question_id": 81}, {"prompt": "def f():", "task_id": "x", "max_output_tokens": 5})
    assert found.ignored == ("question_id", "task_id")
    assert found.lines[1].request.max_output_tokens == 5


def test_iso_times_are_seconds_and_order_is_that_of_time() -> None:
    found = read({"prompt": "b", "t": "2026-11-29T10:00:05Z"}, {"prompt": "a", "t": "2026-11-29T10:00:00"})
    later, first = (line.t for line in found.lines)
    assert later is not None
    assert first is not None
    assert later - first == 5.0
    assert in_time(found.lines) == [1, 0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "file.jsonl:2: is no JSON"),
        ('{"prompt": NaN}', "file.jsonl:2: is no JSON: NaN"),
        ("[1]", "file.jsonl:2: must be a JSON object"),
        ({"turns": []}, "file.jsonl:2: turns: "),
        ({"turns": ["a", 1]}, "file.jsonl:2: turns: "),
        ({"turns": ["a"], "prompt": "b"}, "file.jsonl:2: turns: "),
        ({"prompt": "a", "temperature": "hot"}, "file.jsonl:2: temperature: "),
        ({"prompt": "a", "category": 3}, "file.jsonl:2: category: "),
        ({"prompt": "a", "tenant": ""}, "file.jsonl:2: tenant: "),
        ({"prompt": "a", "answer": ["x", "y"]}, "file.jsonl:2: answer: "),
        ({"prompt": "a", "output": 5}, "file.jsonl:2: output: "),
        ({"prompt": "a", "t": "noon"}, "file.jsonl:2: t: "),
        ({"prompt": "a", "timestamp": True}, "file.jsonl:2: timestamp: "),
        ({"messages": [{"role": "user", "content": "a"}], "temprature": 1}, "file.jsonl:2: temprature"),
        ({"category": "x"}, "file.jsonl:2: messages"),
        ({"prompt": "a", "t": 5}, "file.jsonl:1: has no time"),
    ],
)
def test_what_is_wrong_is_told_with_file_line_and_field(line: Any, told: str) -> None:
    with pytest.raises(InputError) as caught:
        read({"prompt": "fine"}, line)
    assert told in str(caught.value)


def test_an_empty_file_holds_no_request() -> None:
    with pytest.raises(InputError, match="holds no request"):
        read("", " ")


def test_the_limit_is_spread_over_each_category() -> None:
    found = read(*({"prompt": f"{i}", "category": "ab"[i % 2]} for i in range(12)))
    limited = found.limited(2)
    assert [(line.category, line.number) for line in limited.lines] == [("a", 1), ("b", 2), ("a", 7), ("b", 8)]
    assert found.limited(None) is found


def test_files_may_be_gzipped_or_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'\xef\xbb\xbf{"prompt": "Hi"}\n'
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress(data))
    assert len(read_prompts(str(packed)).lines) == 1
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert read_prompts("-").name == "<stdin>"
    packed.write_bytes(gzip.compress(data)[:-9])
    with pytest.raises(InputError, match="no complete gzip"):
        read_prompts(str(packed))
    packed.write_bytes(b'{"prompt": "a"}\n\xff')
    with pytest.raises(InputError, match=":2: is not UTF-8"):
        read_prompts(str(packed))
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(str(tmp_path / "none"))


@pytest.mark.shared
def test_spec_bench(shared_data: Path) -> None:
    found = read_prompts(str(shared_data / "prompts" / "spec_bench.jsonl"))
    assert len(found.lines) == 240
    assert len(found.categories) == 13
    assert "rag" in found.categories
    assert any(len(line.answers) == 2 for line in found.lines)
