"""Segments and their digests: equal exactly where a model reads the same."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from cachespec.messages import CacheMark, Message, OpaquePart, Part, ReasoningPart, TextPart, Tool, ToolCallPart, ToolResultPart
from cachespec.prompt import Prompt, build_prompt, part_text, shared_segments
from cachespec.request import ResponseFormat, build_request

HI = {"role": "user", "content": "Hi"}


def prompt(*messages: Any, **arguments: Any) -> Prompt:
    return build_prompt(build_request(messages=[HI, *messages], **arguments))


def user(*parts: Part, **fields: Any) -> Message:
    return Message(role="user", parts=parts, **fields)


RESULT = ToolResultPart(id="1", content=(TextPart(text="paid in full"),))
CALL = ToolCallPart(id="1", name="f", arguments="{}")
OPAQUE = OpaquePart(dialect="messages", raw={"type": "document", "source": {}})
THOUGHT = ReasoningPart(text="hm", raw={"type": "thinking"}, provider="anthropic")
SCHEMA = {"type": "object", "properties": {"a": {}, "b": {}}}
FORM = ResponseFormat(kind="schema", schema=SCHEMA)
TOOL = Tool(name="f", description="d", parameters=SCHEMA)


def test_the_same_request_has_the_same_digest_in_every_process() -> None:
    first, second = prompt(user(RESULT), tools=[TOOL], system="s"), prompt(user(RESULT), tools=[TOOL], system="s")
    assert first.digest == second.digest
    assert [s.name for s in first.segments] == ["params", "tools[0]", "system[0]", "messages[0][0]", "messages[1][0]"]
    assert build_prompt(build_request("Hi")).digest.hex() == "7681f386de2e468a6fe7ea18c0fbdee7"


def test_the_text_of_a_segment_is_the_parts_own() -> None:
    segments = prompt(user(TextPart(text="é"), RESULT), system="s", tools=[TOOL]).segments
    assert [s.text for s in segments[2:5]] == ["s", "Hi", "é"]
    assert segments[5].text == part_text(RESULT)
    assert segments[5].text.startswith('{"content":[{"text":"paid in full","type":"text"}],"id":"1"')
    assert segments[1].text.startswith('{"description":"d","name":"f","parameters":{"properties"')
    assert [s.size for s in segments[2:5]] == [1, 2, 2]


@pytest.mark.parametrize("part", [RESULT, CALL, OPAQUE, THOUGHT], ids=lambda part: type(part).__name__)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_no_text_passes_for_a_part_of_another_kind(part: Part, role: Any) -> None:
    """A tool's result that a caller writes as text was once answered from the cache of the other."""
    real = prompt(Message(role=role, parts=(part,)))
    for text in (part_text(part), f"{role}\n{part_text(part)}", f"json\n{part_text(part)}"):
        assert prompt(Message(role=role, parts=(TextPart(text=text),))).digest != real.digest


DIFFERENT: list[tuple[Any, Any]] = [
    # boundaries of messages and parts
    ([user(TextPart(text="ab"))], [user(TextPart(text="a"), TextPart(text="b"))]),
    ([user(TextPart(text="a"), TextPart(text="b"))], [user(TextPart(text="a")), user(TextPart(text="b"))]),
    (
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, HI],
        [{"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, HI],
    ),
    ([{"role": "system", "content": "a"}, HI], [{"role": "developer", "content": "a"}, HI]),
    ([{"role": "system", "content": "a"}, HI], [HI, {"role": "system", "content": "a"}]),
    # roles, names, and what stands beside a text
    ([user(TextPart(text="a"))], [Message(role="assistant", parts=(TextPart(text="a"),))]),
    ([user(TextPart(text="a"))], [user(TextPart(text="a"), name="bo")]),
    ([user(TextPart(text="a"), name="b")], [user(TextPart(text="a"), extra={"name": "b"})]),
    ([user(TextPart(text="a"))], [user(TextPart(text="a", extra={"citations": [1]}))]),
    ([user(RESULT)], [user(replace(RESULT, is_error=True))]),
    ([user(RESULT)], [user(replace(RESULT, content=(TextPart(text="paid in full", extra={"citations": [1]}),)))]),
    ([user(RESULT)], [user(replace(RESULT, extra={"x": 1}))]),
    ([user(CALL)], [user(replace(CALL, extra={"x": 1}))]),
    ([user(THOUGHT)], [user(replace(THOUGHT, provider=None))]),
    ([user(THOUGHT)], [user(replace(THOUGHT, model="m"))]),
    ([user(OPAQUE)], [user(replace(OPAQUE, dialect="chat"))]),
    ([], [Message(role="assistant", parts=())]),
    ([Message(role="assistant", parts=())], [Message(role="assistant", parts=(TextPart(text=""),))]),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u", "detail": "low"}}]}],
    ),
]


@pytest.mark.parametrize(("a", "b"), DIFFERENT, ids=[str(i) for i in range(len(DIFFERENT))])
def test_what_a_model_reads_differently_has_another_digest(a: Any, b: Any) -> None:
    assert prompt(*a).digest != prompt(*b).digest


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"tools": [TOOL]}, {"tools": [replace(TOOL, extra={"input_examples": []})]}),
        ({"tools": [TOOL]}, {"tools": [replace(TOOL, parameters={"properties": SCHEMA["properties"], "type": "object"})]}),
        (
            {"tools": [Tool(name="x", dialect="chat", raw={"type": "x"})]},
            {"tools": [Tool(name="x", dialect="responses", raw={"type": "x"})]},
        ),
        ({"response_format": FORM}, {"response_format": replace(FORM, description="d")}),
        ({"response_format": FORM}, {"response_format": replace(FORM, strict=True)}),
        ({"response_format": FORM}, {"response_format": replace(FORM, name="n")}),
        ({"system": "s"}, {"system": [TextPart(text="s", extra={"x": 1})]}),
    ],
)
def test_tools_and_parameters_count(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert prompt(**a).digest != prompt(**b).digest


def test_the_choice_of_a_tool_is_no_part_of_the_chain_and_part_of_the_whole() -> None:
    free, forced = prompt(tools=[TOOL]), prompt(tools=[TOOL], tool_choice="required")
    assert free.digest == forced.digest
    assert free.whole != forced.whole
    assert forced.whole == prompt(tools=[TOOL], tool_choice="required").whole


def test_cache_marks_are_read_by_no_model() -> None:
    mark = CacheMark(dialect="anthropic", fields={"type": "ephemeral"})
    marked = prompt(user(TextPart(text="x", mark=mark)), tools=[replace(TOOL, mark=mark)])
    assert marked.digest == prompt(user(TextPart(text="x")), tools=[TOOL]).digest


def test_where_two_prompts_part() -> None:
    a, b = prompt(user(TextPart(text="x")), HI), prompt(user(TextPart(text="x")), user(RESULT))
    assert shared_segments(a, b) == 3
    assert shared_segments(a, a) == len(a.segments) == 4


def test_images_are_counted() -> None:
    image = {"type": "image_url", "image_url": {"url": "u"}}
    assert prompt({"role": "user", "content": [image, image]}).images == 2


def test_a_long_history_is_cut_quickly() -> None:
    request = build_request(messages=[user(TextPart(text="word " * 100)) for _ in range(100)])
    best = min(_timed(request) for _ in range(20))
    assert best < 0.01  # about 0.3 ms


def _timed(request: Any) -> float:
    start = time.perf_counter()
    build_prompt(request)
    return time.perf_counter() - start
