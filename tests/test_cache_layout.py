"""Where marks may stand in a prompt, and that it is worked out once."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cachespec.cache_layout import Layout, Layouts, tokens_of, tokens_to
from cachespec.prompt import build_prompt
from cachespec.request import build_request
from cachespec.tokens import PRIOR, TokenModel, sizes_of

LONG = "The quick brown fox jumps over the lazy dog. " * 60
TOOLS: list[Any] = [
    {"name": f"t{i}", "description": "x", "input_schema": {"type": "object", "properties": {}}} for i in range(3)
]
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "t0", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]}


def layout(api: Any = "messages", layouts: Layouts | None = None, **request: Any) -> Layout:
    return (layouts or Layouts()).of(build_prompt(build_request(**copy.deepcopy(request))), api, PRIOR)


def test_places_of_each_protocol() -> None:
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a"}, CALL, RESULT],
        "tools": TOOLS,
        "system": ["s", " ", "u"],
    }
    found = layout(**request)
    assert [p.at for p in found.prefixes] == [
        *("tools[2]", "system[0]", "system[2]", "messages[0][0]", "messages[1][0]", "messages[2][0]")
    ]
    assert [p.kind for p in found.prefixes] == ["tools", "system", "system", "turn", "turn", "turn"]
    assert (found.head, found.segments, found.messages) == (3, 10, 3)
    assert [p.position for p in found.prefixes] == [3, 4, 6, 7, 8, 9]
    for api in ("responses", "chat"):
        names = [p.at for p in layout(api, **request).prefixes]
        assert names == ["system[0]", "system[2]", "messages[0][0]", "messages[2][0]"]


def test_what_an_assistant_said_takes_a_mark_with_anthropic_only() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [p.at for p in layout(messages=messages).prefixes] == ["messages[0][0]", "messages[1][0]"]
    assert [p.at for p in layout("chat", messages=messages).prefixes] == ["messages[0][0]"]


def test_a_long_part_within_a_message_is_a_document() -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": "short"}, {"type": "text", "text": "question?"}]
    found = layout(messages=[{"role": "user", "content": parts}])
    assert [(p.at, p.kind) for p in found.prefixes] == [("messages[0][0]", "document"), ("messages[0][2]", "turn")]


def test_late_system_messages_and_files() -> None:
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert [p.at for p in layout(messages=late).prefixes] == ["messages[0][0]"]
    assert [(p.at, p.kind) for p in layout("responses", messages=late).prefixes][-1] == ("system[0]", "system")
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    assert len(layout(messages=[{"role": "user", "content": [document]}]).prefixes) == 1
    file = {"type": "input_file", "file_data": "data:,x", "filename": "x"}
    assert len(layout("responses", messages=[{"role": "user", "content": [file]}]).prefixes) == 1


@pytest.mark.parametrize(
    ("api", "result", "able"),
    [
        ("messages", {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document", "source": {}}]}, True),
        ("messages", {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "search_result"}]}, True),
        ("responses", {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_file"}]}, True),
        ("responses", {"type": "custom_tool_call_output", "call_id": "1", "output": "x"}, True),
        ("responses", {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_file"}]}, True),
        (
            "responses",
            {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": ""}]},
            False,
        ),
        ("responses", {"type": "custom_tool_call_output", "call_id": "1", "output": " "}, False),
        ("responses", {"type": "custom_tool_call_output", "call_id": "1", "output": []}, False),
        ("responses", {"type": "computer_call_output", "call_id": "1", "output": {"type": "computer_screenshot"}}, False),
    ],
)
def test_results_that_are_a_vendors_own_part_take_a_mark(api: str, result: dict[str, Any], able: bool) -> None:
    given = {"role": "user", "content": [result]} if api == "messages" else result
    found = layout(api, messages=[{"role": "user", "content": "a"}, given])
    assert [p.at for p in found.prefixes] == ["messages[0][0]", *(["messages[1][0]"] if able else [])]


@pytest.mark.parametrize("api", ["messages", "responses", "chat"])
def test_a_layout_that_was_extended_is_the_one_made_at_once(api: str) -> None:
    messages: list[Any] = []
    layouts = Layouts()
    for i in range(12):
        turn = [{"role": "user", "content": f"{i} {LONG}"}, CALL, RESULT, {"role": "assistant", "content": "é" * i or "x"}]
        messages = [*messages, *turn]
        grown = layout(api, layouts, messages=messages, tools=TOOLS, system="s")
        assert grown == layout(api, messages=messages, tools=TOOLS, system="s")
    assert layout(api, layouts, messages=messages[:9], tools=TOOLS, system="s") == layout(
        api, messages=messages[:9], tools=TOOLS, system="s"
    )
    assert [p.tokens for p in grown.prefixes] == sorted(p.tokens for p in grown.prefixes)


def test_what_is_known_is_not_worked_out_again() -> None:
    layouts = Layouts()
    messages: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first = layout(layouts=layouts, messages=messages, tools=TOOLS)
    second = layout(layouts=layouts, messages=[*messages, {"role": "user", "content": "c"}], tools=TOOLS)
    assert all(a is b for a, b in zip(first.prefixes, second.prefixes, strict=False))
    assert len(second.prefixes) == len(first.prefixes) + 1


def test_it_remembers_so_many() -> None:
    layouts = Layouts(most=4)
    for i in range(20):
        layout(layouts=layouts, messages=[{"role": "user", "content": str(i)}])
    assert len(layouts._known) == 4


def test_tokens_are_those_of_the_token_model() -> None:
    request = {"messages": [{"role": "user", "content": f"ü {LONG}"}, CALL, RESULT], "tools": TOOLS, "system": LONG}
    prompt = build_prompt(build_request(**copy.deepcopy(request)))  # type: ignore[arg-type]
    found = Layouts().of(prompt, "messages", PRIOR)
    assert found.sizes == sizes_of(prompt.segments)
    assert found.tokens == tokens_of(found.sizes, PRIOR) == TokenModel().tokens(found.sizes)
    for place, index in enumerate(found.at):
        assert tokens_to(prompt, PRIOR, index) == found.prefixes[place].tokens
    assert tokens_to(prompt, PRIOR, len(prompt.segments) - 1) == found.tokens


def test_an_image_counts_as_one_whatever_its_bytes() -> None:
    def tokens(size: int) -> int:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "a" * size}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
        return layout(messages=[{"role": "user", "content": [image]}, CALL, {"role": "user", "content": [result]}]).tokens

    assert 2000 < tokens(4) == tokens(400_000) < 2300
