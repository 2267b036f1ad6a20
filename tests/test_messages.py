"""What users write becomes the same values in every dialect, loses nothing, and is refused by exact field."""

from __future__ import annotations

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as given_by
from hypothesis import strategies as st

from cachespec.errors import InputError
from cachespec.messages import (
    CacheMark,
    ImagePart,
    Message,
    OpaquePart,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from cachespec.messages_dump import message_to_dict, tool_to_dict
from cachespec.messages_parse import parse_messages, parse_system
from cachespec.tools_parse import parse_tools

PIXEL = "iVBORw0KGgo="


def read(*items: Any) -> tuple[Message, ...]:
    return parse_messages(list(items))[1]


def part(raw: dict[str, Any]) -> Part:
    return read({"role": "assistant", "content": [raw]})[0].parts[0]


def refused(value: Any, field: str, words: str = "") -> None:
    with pytest.raises(InputError) as caught:
        parse_messages(value)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_prompt_is_one_user_message() -> None:
    assert parse_messages("Hi") == ((), (Message(role="user", parts=(TextPart(text="Hi"),)),))


def test_leading_system_text_is_hoisted_and_later_system_text_stays() -> None:
    system, messages = parse_messages(
        [
            {"role": "system", "content": "one"},
            {"role": "developer", "content": [{"type": "text", "text": "two"}]},
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": "late"},
        ]
    )
    assert [p.text for p in system] == ["one", "two"]
    assert [(m.role, m.text) for m in messages] == [("user", "Hi"), ("system", "late")]


@pytest.mark.parametrize(
    "first",
    [
        {"role": "system", "content": "named", "name": "boss"},
        {"role": "developer", "content": [{"type": "input_file", "file_id": "f1"}]},
        {"type": "message", "role": "developer", "content": "x", "id": "msg_1"},
    ],
)
def test_a_system_message_that_text_alone_cannot_hold_stays_in_place(first: dict[str, Any]) -> None:
    system, messages = parse_messages([first, {"role": "user", "content": "Hi"}])
    assert system == ()
    assert len(messages) == 2


def test_one_conversation_in_three_dialects_is_one_value() -> None:
    arguments = '{"city":"Zürich","days":[1,2]}'
    chat = read(
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    )
    responses = read(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    )
    messages = read(
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Zürich", "days": [1, 2]}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    )
    assert chat == responses
    assert [m.parts for m in messages] == [m.parts for m in chat]
    assert [m.role for m in messages] == ["user", "assistant", "user"], "a result keeps the role it was given with"


def test_tool_arguments_are_never_re_serialised() -> None:
    text = '{ "b" : 1,\n "a": 1.0}'
    (message,) = read({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": text}}]})
    assert message.tool_calls[0].arguments == text
    assert message_to_dict(message)["tool_calls"][0]["function"]["arguments"] == text


def test_tool_use_input_keeps_the_key_order_of_the_model() -> None:
    call = part({"type": "tool_use", "id": "t", "name": "f", "input": {"z": 1, "a": {"y": None, "b": "é"}}})
    assert isinstance(call, ToolCallPart)
    assert call.arguments == '{"z":1,"a":{"y":null,"b":"é"}}'


def test_images_of_every_dialect() -> None:
    inline = ImagePart(data=PIXEL, media_type="image/png")
    url = f"data:image/png;base64,{PIXEL}"
    assert part({"type": "image", "source": {"type": "base64", "data": PIXEL, "media_type": "image/png"}}) == inline
    assert part({"type": "image_url", "image_url": {"url": url}}) == inline
    assert part({"type": "input_image", "image_url": url}) == inline
    assert part({"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "low"}}) == ImagePart(
        url="https://x/y.png", detail="low"
    )
    assert part({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}) == ImagePart(url="https://x/y.png")
    odd = "data:image/svg+xml;charset=utf-8;base64,AAAA"
    assert part({"type": "image_url", "image_url": {"url": odd}}) == ImagePart(url=odd), "no part of a URL is lost"


def test_images_held_by_a_vendor_are_that_vendors_own() -> None:
    theirs = {"type": "image", "source": {"type": "file", "file_id": "f1"}}
    assert part(theirs) == OpaquePart(dialect="messages", raw=theirs)
    ours = {"type": "input_image", "file_id": "f1", "detail": "auto"}
    assert part(ours) == OpaquePart(dialect="responses", raw=ours)


@pytest.mark.parametrize(
    ("raw", "dialect"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "chat"),
        ({"type": "file", "file": {"file_id": "f"}}, "chat"),
        ({"type": "refusal", "refusal": "no"}, "chat"),
        ({"type": "input_file", "file_id": "f"}, "responses"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}, "messages"),
        ({"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, "messages"),
        ({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document", "source": {}}]}, "messages"),
        ({"type": "function_call_output", "call_id": "t", "output": [{"type": "input_file", "file_id": "f"}]}, "responses"),
    ],
)
def test_parts_of_one_dialect_are_kept_whole(raw: dict[str, Any], dialect: str) -> None:
    found = part(raw)
    assert isinstance(found, OpaquePart)
    assert (found.dialect, found.raw) == (dialect, raw)


def test_the_dialect_of_a_body_decides_for_shared_and_future_parts() -> None:
    refusal = [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    assert parse_messages(refusal)[1][0].parts == (OpaquePart(dialect="responses", raw=refusal[0]["content"][0]),)  # type: ignore[arg-type]
    new = {"type": "hologram", "data": 1}
    message = parse_messages([{"role": "user", "content": [new]}], dialect="messages")[1][0]
    assert message.parts == (OpaquePart(dialect="messages", raw=new),)
    refused([{"role": "user", "content": [new]}], "messages[0].content[0].type", "unknown kind of content 'hologram'")


def test_reasoning_is_kept_verbatim() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "sig"}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    item = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "e"}
    assert part(thinking) == ReasoningPart(text="hm", raw=thinking, provider="anthropic")
    assert part(redacted) == ReasoningPart(text="", raw=redacted, provider="anthropic")
    assert read(item)[0] == Message(role="assistant", parts=(ReasoningPart(text="so", raw=item, provider="openai"),))
    (message,) = read({"role": "assistant", "content": "a", "reasoning_content": "r"})
    assert message.parts == (ReasoningPart(text="r"), TextPart(text="a"))
    (message,) = read({"role": "assistant", "content": "a", "reasoning": "r"})
    assert message.parts[0] == ReasoningPart(text="r", raw={"reasoning": "r"})


def test_items_without_a_role_stay_responses_own() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    output = {"type": "shell_call_output", "call_id": "s", "output": []}
    reference = {"id": "msg_1"}
    tools = {"type": "additional_tools", "role": "developer", "tools": []}
    found = read({"role": "user", "content": "Hi"}, search, output, reference, tools)[1:]
    assert [m.role for m in found] == ["assistant", "tool", "assistant", "developer"]
    assert [m.parts for m in found] == [(OpaquePart(dialect="responses", raw=r),) for r in (search, output, reference, tools)]


def test_fields_of_one_dialect_are_kept_in_extra() -> None:
    cited = part({"type": "text", "text": "x", "citations": [{"type": "char_location"}]})
    assert cited == TextPart(text="x", extra={"citations": [{"type": "char_location"}]})
    (message,) = read(
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "phase": "commentary", "content": "x"}
    )
    assert message.extra == {"id": "m", "status": "completed", "phase": "commentary"}
    (call,) = read({"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "{}"})[0].parts
    assert call == ToolCallPart(id="c", name="f", arguments="{}", extra={"id": "fc"})
    (dumped,) = read(
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    )
    assert dumped == Message(role="assistant", parts=(TextPart(text="x"),)), "an SDK's dump of a message can be appended"


def test_marks_are_kept_with_unknown_keys_and_apart_from_opaque_parts() -> None:
    fields = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    marked = part({"type": "text", "text": "x", "cache_control": fields})
    assert marked == TextPart(text="x", mark=CacheMark(dialect="anthropic", fields=fields))
    explicit = {"mode": "explicit", "ttl": "12h"}
    image = part({"type": "image_url", "image_url": {"url": "u"}, "prompt_cache_breakpoint": explicit})
    assert image == ImagePart(url="u", mark=CacheMark(dialect="openai", fields=explicit))
    document = part({"type": "document", "source": {}, "cache_control": fields})
    assert document == OpaquePart(
        dialect="messages", raw={"type": "document", "source": {}}, mark=CacheMark(dialect="anthropic", fields=fields)
    )
    result = part({"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True, "cache_control": fields})
    assert isinstance(result, ToolResultPart)
    assert result.is_error
    assert result.mark is not None
    assert part({"type": "text", "text": "x", "cache_control": None}) == TextPart(text="x")


def test_later_changes_by_the_caller_do_not_arrive() -> None:
    given: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "meta": {"a": [1]}}],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
        {"role": "assistant", "content": [{"type": "document", "source": {"data": ["d"]}}]},
    ]
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {}}}}]
    before, tools_before = read(*copy.deepcopy(given)), parse_tools(copy.deepcopy(tools))
    messages, parsed = read(*given), parse_tools(tools)
    given[0]["content"][0]["cache_control"]["ttl"] = "1h"
    given[0]["content"][0]["meta"]["a"].append(2)
    given[1]["content"][0]["thinking"] = "changed"
    given[2]["content"][0]["source"]["data"].append("more")
    tools[0]["input_schema"]["properties"]["b"] = {}  # type: ignore[index]
    assert messages == before
    assert parsed == tools_before


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ("", "messages", "empty"),
        ([], "messages", "empty"),
        (7, "messages", "must be a string or a list"),
        ({"role": "user", "content": "x"}, "messages", "not one message"),
        ([{"role": "system", "content": "x"}], "messages", "nothing but system"),
        (["x"], "messages[0]", "must be a Message"),
        ([{"content": "x"}], "messages[0].role", "missing"),
        ([{"role": "usr", "content": "x"}], "messages[0].role", "unknown role"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "user", "content": []}], "messages[0].content", "empty"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content", "must be a string or a list"),
        ([{"role": "user", "contents": "x"}], "messages[0].contents", "did you mean 'content'"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content", "surrogate at character 1"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text", "must be a string"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "not null"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type", "missing"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "content part"),
        ([{"role": "user", "content": [{"type": "txt", "text": "x"}]}], "messages[0].content[0].type", "did you mean 'text'"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "cache_contrl": {}}]}],
            "messages[0].content[0].cache_contrl",
            "did you mean 'cache_control'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": "5m"}]}],
            "messages[0].content[0].cache_control",
            "must be an object",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}, "prompt_cache_breakpoint": {}}]}],
            "messages[0].content[0].prompt_cache_breakpoint",
            "one mark",
        ),
        ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls", "assistant"),
        ([{"role": "user", "content": "x", "tool_call_id": "c"}], "messages[0].tool_call_id", "tool message"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", "missing"),
        ([{"role": "tool", "tool_call_id": "", "content": "x"}], "messages[0].tool_call_id", "empty"),
        ([{"role": "tool", "tool_call_id": "c", "content": "x", "tool_calls": []}], "messages[0].tool_calls", "assistant"),
        (
            [{"role": "tool", "tool_call_id": "c", "content": [{"type": "refusal", "refusal": "x"}]}],
            "messages[0].content[0]",
            "text and images",
        ),
        ([{"role": "user", "content": "x", "is_error": True}], "messages[0].is_error", "tool message"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call", "tool_calls"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls", "must be a list"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]", "must be an object"),
        ([{"role": "assistant", "tool_calls": [{"id": "c", "type": "x"}]}], "messages[0].tool_calls[0].type", "'x'"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "must be a string",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "argumnts": "{}"}}]}],
            "messages[0].tool_calls[0].function.argumnts",
            "did you mean 'arguments'",
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "{}"}]}],
            "messages[0].content[0].input",
            "must be an object",
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": float("nan")}}]}],
            "messages[0].content[0].input.a",
            "finite",
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {1: 2}}]}],
            "messages[0].content[0].input",
            "keys must be strings",
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": [object()]}}]}],
            "messages[0].content[0].input.a[0]",
            "must be JSON",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "source": {"type": "disk"}}]}],
            "messages[0].content[0].source.type",
            "'disk'",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"uri": "x"}}]}],
            "messages[0].content[0].image_url.uri",
            "url",
        ),
        ([{"type": 5}], "messages[0].type", "must be a string"),
        ([{"type": "text", "text": "x"}], "messages[0].type", "wrap it"),
        ([Message(role="owner", parts=())], "messages[0].role", "unknown role"),  # type: ignore[arg-type]
        ([Message(role="user", parts=[TextPart(text="x")])], "messages[0].parts", "must be a tuple"),  # type: ignore[arg-type]
        ([Message(role="user", parts=("x",))], "messages[0].parts[0]", "content part"),  # type: ignore[arg-type]
        ([Message(role="user", parts=(TextPart(text="\udfff"),))], "messages[0].parts[0].text", "surrogate"),
        ([Message(role="user", parts=(ImagePart(),))], "messages[0].parts[0]", "either url or data"),
        ([Message(role="user", parts=(ImagePart(data="x"),))], "messages[0].parts[0].media_type", "missing"),
        ([Message(role="assistant", parts=(ToolCallPart(id="", name="f", arguments=""),))], "messages[0].parts[0].id", "empty"),
        (
            [Message(role="tool", parts=(ToolResultPart(id="c", content=(ReasoningPart(text="x"),)),))],  # type: ignore[arg-type]
            "messages[0].parts[0].content[0]",
            "text and images",
        ),
    ],
)
def test_bad_messages_are_refused_by_exact_field(value: Any, field: str, words: str) -> None:
    refused(value, field, words)


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(InputError, match="nested deeper"):
        part({"type": "document", "source": loop})


def test_system_prompts() -> None:
    assert parse_system(None) == ()
    assert parse_system("x") == (TextPart(text="x"),)
    assert parse_system(TextPart(text="x")) == (TextPart(text="x"),)
    blocks = ["a", {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}, TextPart(text="c")]
    assert [p.text for p in parse_system(blocks)] == ["a", "b", "c"]
    for value, field in [(3, "system"), ([{"type": "document"}], "system[0]"), (["x", 1], "system[1]")]:
        with pytest.raises(InputError) as caught:
            parse_system(value)
        assert caught.value.field == field


def test_one_tool_in_three_dialects_is_one_value() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    chat = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, "strict": True}}
    responses = {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True}
    messages = {"name": "f", "description": "d", "input_schema": schema, "strict": True}
    want = Tool(name="f", description="d", parameters=schema, strict=True)
    assert parse_tools([chat]) == parse_tools([responses]) == parse_tools([messages]) == parse_tools([want]) == (want,)
    assert list(parse_tools([chat])[0].parameters["properties"]) == ["b", "a"]
    assert tool_to_dict(want) == chat


def test_vendors_own_tools_are_kept_whole() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "cache_control": {"type": "ephemeral"}}
    hosted = {"type": "code_interpreter", "container": {"type": "auto"}}
    custom = {"type": "custom", "custom": {"name": "sql", "format": {"type": "text"}}}
    grammar = {"type": "custom", "name": "sql", "format": {"type": "text"}}
    found = parse_tools([search, hosted, custom, grammar])
    assert [(t.name, t.dialect) for t in found] == [
        ("web_search", "messages"),
        ("code_interpreter", "responses"),
        ("custom", "chat"),
        ("sql", "responses"),
    ]
    assert [tool_to_dict(t) for t in found] == [search, hosted, custom, grammar]
    assert found[0].mark == CacheMark(dialect="anthropic", fields={"type": "ephemeral"})


def test_fields_of_a_tool_that_one_dialect_knows() -> None:
    (tool,) = parse_tools([{"name": "f", "input_schema": {}, "defer_loading": True, "cache_control": {"type": "ephemeral"}}])
    assert tool.extra == {"defer_loading": True}
    assert tool.mark is not None
    assert parse_tools([tool_to_dict(tool)]) == (tool,)


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({}, "tools", "must be a list"),
        ([3], "tools[0]", "must be a Tool"),
        ([{"name": "f"}], "tools[0].type", "missing"),
        ([{"type": "function", "function": {"description": "d"}}], "tools[0].function.name", "must be a string"),
        ([{"type": "function", "function": {"name": "f", "params": {}}}], "tools[0].function.params", "did you mean"),
        ([{"name": "f", "input_schema": []}], "tools[0].input_schema", "must be an object"),
        ([{"name": "f", "input_schema": {}, "descriptio": "x"}], "tools[0].descriptio", "did you mean 'description'"),
        ([{"type": "function", "name": "f", "strict": 1}], "tools[0].strict", "true or false"),
        ([{"name": "f", "input_schema": {}}, {"name": "f", "input_schema": {}}], "tools[1]", "tools[0]"),
        ([Tool(name="")], "tools[0].name", "empty"),
    ],
)
def test_bad_tools_are_refused_by_exact_field(value: Any, field: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("[", r"\[")) as caught:
        parse_tools(value)
    assert caught.value.field == field


_KINDS = ["text", "image", "image_url", "input_image", "tool_use", "tool_result", "function_call", "thinking", "reasoning"]
_KEYS = ["type", "role", "content", "text", "image_url", "source", "id", "name", "input", "tool_calls", "function", "summary"]
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([*_KINDS, "user", "tool"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5),
    max_leaves=12,
)


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given_by(st.dictionaries(st.sampled_from(_KEYS), _VALUES), st.sampled_from(["user", "assistant", "tool", None]))
def test_nonsense_is_refused_as_bad_input_or_comes_back_whole(raw: dict[str, Any], role: str | None) -> None:
    if role is not None:
        raw = {**raw, "role": role}
    try:
        (message,) = read(raw)
    except InputError:
        return
    assert read(message_to_dict(message)) == (message,)


EXCHANGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "user", "name": "ann", "content": "Hi"},
    {"role": "assistant", "content": "", "reasoning_content": "r"},
    {"role": "assistant", "content": "x", "reasoning": "r"},
    {"role": "assistant", "content": None},
    {
        "role": "assistant",
        "content": "x",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "b", "type": "custom", "custom": {"name": "g", "input": "raw"}},
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}, "index": 1},
        ],
    },
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "tool", "tool_call_id": "a", "name": "f", "content": "x"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "high"}},
            {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
            {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        ],
    },
]


@pytest.mark.parametrize("raw", EXCHANGES)
def test_chat_messages_come_back_as_they_were(raw: dict[str, Any]) -> None:
    (message,) = read(raw)
    again = message_to_dict(message)
    assert again == raw
    json.dumps(again)


FOREIGN: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"z": 1, "a": 2}},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}, "cache_control": {"type": "ephemeral"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "x", "is_error": True},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"type": "text", "text": "go on"},
            {"type": "document", "source": {"type": "text", "data": "d"}, "cache_control": {"type": "ephemeral"}},
        ],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{ }", "status": "completed"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}], "status": "completed"},
    {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "e"},
    {
        "type": "message",
        "role": "assistant",
        "id": "m",
        "content": [{"type": "output_text", "text": "x", "annotations": []}],
    },
]


@pytest.mark.parametrize("raw", FOREIGN)
def test_messages_of_other_dialects_lose_nothing_on_the_way_through_chat(raw: dict[str, Any]) -> None:
    (message,) = read(raw)
    again = message_to_dict(message)
    assert read(json.loads(json.dumps(again))) == (message,)


def test_an_error_result_and_unlabelled_reasoning_survive() -> None:
    failed = Message(role="tool", parts=(ToolResultPart(id="c", content=(TextPart(text="x"),), is_error=True),))
    assert read(message_to_dict(failed)) == (failed,)
    between = Message(role="assistant", parts=(TextPart(text="a"), ReasoningPart(text="r")))
    (again,) = read(message_to_dict(between))
    assert [getattr(p, "text", None) for p in again.parts] == ["a", "r"]


@pytest.mark.shared
def test_recorded_agents_are_read_without_loss(shared_data: Path) -> None:
    count = 0
    for path in sorted((shared_data / "agents").glob("*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        bodies = [document] if isinstance(document, dict) else [{"messages": session["traj"]} for session in document]
        for body in bodies:
            given = body["messages"]
            system, messages = parse_messages(given)
            hoisted = len(given) - len(messages)
            assert [p.text for p in system] == [m["content"] for m in given[:hoisted]]
            assert [message_to_dict(m) for m in messages] == given[hoisted:]
            assert [tool_to_dict(t) for t in parse_tools(body.get("tools"))] == body.get("tools", [])
            count += len(given)
    assert count > 2000


@pytest.mark.shared
def test_a_large_tool_set_is_the_same_in_both_dialects(shared_data: Path) -> None:
    openai = json.loads((shared_data / "tools" / "github_mcp_openai.json").read_text(encoding="utf-8"))
    anthropic = json.loads((shared_data / "tools" / "github_mcp_anthropic.json").read_text(encoding="utf-8"))
    tools = parse_tools(openai)
    assert len(tools) == 117
    assert [json.dumps(tool_to_dict(t)) for t in tools] == [json.dumps(t) for t in openai]
    assert tools == parse_tools(anthropic)
    assert replace(tools[0]) == tools[0]
