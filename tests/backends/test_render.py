"""Bodies: what a request becomes in each protocol, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from tests.backends.hosted_support import PLAN, WEATHER, ask, body, rendered, schema

from cachespec.backends._json import Raw, dumps, object_text
from cachespec.backends._marks import MARK
from cachespec.backends._profile import ANTHROPIC_ID, CHAT_ID, MISTRAL_ID, RESPONSES_ID, Api, IdRule, Profile, cannot
from cachespec.backends._render import model_family, strict_schema
from cachespec.backends.anthropic import VERSION, anthropic_profile
from cachespec.backends.compatible import ROWS
from cachespec.backends.openai import openai_profile
from cachespec.decision import Mark, Plan
from cachespec.errors import InputError
from cachespec.messages import (
    CacheMark,
    ImagePart,
    Message,
    OpaquePart,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from cachespec.messages_parse import parse_messages
from cachespec.request import Reasoning, Request, ResponseFormat, ToolChoice


def profile_of(server: str, api: Api) -> Profile:
    found = ROWS[server].profile(api)
    assert found is not None
    return found


CHAT = openai_profile("gpt-6-astra", "chat")
OLD_CHAT = openai_profile("gpt-4.1", "chat")
RESPONSES = openai_profile("gpt-6-astra", "responses")
MESSAGES = anthropic_profile("claude-sonnet-5-5", VERSION)
LOCAL = profile_of("llama-server", "chat")
LOCAL_MESSAGES = profile_of("llama-server", "messages")
OPENROUTER = profile_of("openrouter", "chat")
HOSTED = [CHAT, RESPONSES, MESSAGES]
ANTHROPIC_MARK = CacheMark(dialect="anthropic", fields={"type": "ephemeral", "ttl": "1h", "scope": "x"})
OPENAI_MARK = CacheMark(dialect="openai", fields={"mode": "explicit", "ttl": "12h", "new": 1})


def user(*parts: Any) -> Message:
    return Message(role="user", parts=parts)


def assistant(*parts: Any) -> Message:
    return Message(role="assistant", parts=parts)


# -- JSON


def test_json_is_compact_ordered_and_not_escaped() -> None:
    assert dumps({"b": 1, "a": ["é", None, True, 1.5], "r": Raw('{ "x":1}')}) == '{"b":1,"a":["é",null,true,1.5],"r":{ "x":1}}'
    assert dumps({}) == "{}"
    assert dumps([]) == "[]"


@pytest.mark.parametrize("value", [float("nan"), {"a": {1, 2}}, object(), {1: "x"}, [float("inf")]])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(InputError):
        dumps({"x": value})


@pytest.mark.parametrize("text", ["", "[1]", '"x"', "{", '{"a":NaN}', '{"a":1} x', "nul"])
def test_only_objects_are_spliced(text: str) -> None:
    assert object_text(text) is None


# -- whole bodies


def test_chat_body() -> None:
    request = ask(system="Be brief.", tools=(WEATHER,), max_output_tokens=9, seed=3, reasoning=Reasoning(effort="low"))
    assert rendered(CHAT, request, model="gpt-6-astra").body == (
        '{"model":"gpt-6-astra","messages":[{"role":"developer","content":"Be brief."},{"role":"user","content":"Hello"}],'
        '"tools":[{"type":"function","function":{"name":"get_weather","description":"The weather in a city.",'
        '"parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}}],'
        '"max_completion_tokens":9,"seed":3,"reasoning_effort":"low",'
        '"stream_options":{"include_usage":true,"include_obfuscation":false},"stream":true}'
    )


def test_responses_body() -> None:
    request = ask(system="Be brief.", tools=(WEATHER,), max_output_tokens=9, reasoning=Reasoning(effort="low", summary="auto"))
    assert rendered(RESPONSES, request, model="gpt-6-astra").body == (
        '{"model":"gpt-6-astra","input":[{"type":"message","role":"developer","content":[{"type":"input_text",'
        '"text":"Be brief."}]},{"type":"message","role":"user","content":"Hello"}],'
        '"tools":[{"type":"function","name":"get_weather","description":"The weather in a city.",'
        '"parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]},"strict":false}],'
        '"max_output_tokens":9,"reasoning":{"effort":"low","summary":"auto"},"store":false,'
        '"include":["reasoning.encrypted_content"],"stream_options":{"include_obfuscation":false},"stream":true}'
    )


def test_a_model_that_takes_no_marks_has_instructions() -> None:
    profile = openai_profile("gpt-5.4", "responses")
    assert body(profile, ask(system="Be brief."), model="gpt-5.4")["instructions"] == "Be brief."


def test_messages_body() -> None:
    request = ask(system="Be brief.", tools=(WEATHER,), max_output_tokens=9, stop=("END",), reasoning=Reasoning(effort="low"))
    assert rendered(MESSAGES, request, model="claude-sonnet-5-5").body == (
        '{"model":"claude-sonnet-5-5","max_tokens":9,"tools":[{"name":"get_weather","description":"The weather in a city.",'
        '"input_schema":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}],"system":"Be brief.",'
        '"messages":[{"role":"user","content":"Hello"}],"stop_sequences":["END"],"thinking":{"type":"adaptive"},'
        '"output_config":{"effort":"low"},"stream":true}'
    )


def test_sampling_goes_where_it_is_taken() -> None:
    request = ask(temperature=0.0, top_p=0.5, top_k=4, min_p=0.1, seed=7, max_output_tokens=5)
    local = body(LOCAL, request)
    assert [local[k] for k in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")] == [0.0, 0.5, 4, 0.1, 7, 5]
    assert body(LOCAL_MESSAGES, request)["top_k"] == 4
    assert body(profile_of("mistral", "chat"), request)["random_seed"] == 7
    assert "stream_options" not in body(profile_of("mistral", "chat"), request)


def test_usage_is_always_asked_for_while_streaming() -> None:
    # Without the option a Chat stream reports no usage and would be booked as free (case A13).
    for server in ROWS:
        if server != "mistral":
            assert body(profile_of(server, "chat"), ask())["stream_options"]["include_usage"] is True


def test_the_body_always_streams_and_extra_comes_last() -> None:
    plan = Plan(backend="b", options={"prompt_cache_options": {"mode": "explicit"}, "user": "plan"})
    request = ask(extra={"b": {"stream": False, "user": "u", "n": 1}, "other": {"x": 1}}, passthrough={"openai": {"user": "p"}})
    sent = body(CHAT, request, plan)
    assert sent["stream"] is True
    assert sent["user"] == "u"
    assert sent["n"] == 1
    assert sent["prompt_cache_options"] == {"mode": "explicit"}
    assert "x" not in sent


FORM = ResponseFormat(kind="schema", schema={"type": "object"})


@pytest.mark.parametrize(
    ("profile", "given", "expected"),
    [
        (CHAT, {"stream_options": {"include_obfuscation": True}}, {"include_usage": True, "include_obfuscation": True}),
        (CHAT, {"stream_options": {"include_usage": False}}, {"include_usage": True, "include_obfuscation": False}),
        (CHAT, {"stream_options": {"new": 1}}, {"include_usage": True, "include_obfuscation": False, "new": 1}),
        (CHAT, {"stream_options": None}, None),
        (RESPONSES, {"include": ["x"]}, ["reasoning.encrypted_content", "x"]),
        (RESPONSES, {"include": ["x", "reasoning.encrypted_content"]}, ["reasoning.encrypted_content", "x"]),
        (RESPONSES, {"include": None}, None),
        (RESPONSES, {"text": {"verbosity": "low"}}, {**body(RESPONSES, ask(response_format=FORM))["text"], "verbosity": "low"}),
        (RESPONSES, {"reasoning": {"context": "all"}}, {"effort": "low", "context": "all"}),
        (MESSAGES, {"thinking": {"type": "disabled"}}, {"type": "disabled"}),
        (
            MESSAGES,
            {"output_config": {"effort": "max"}},
            {**body(MESSAGES, ask(response_format=FORM))["output_config"], "effort": "max"},
        ),
    ],
)
def test_a_field_comes_beside_what_the_client_itself_asks_for(profile: Profile, given: dict[str, Any], expected: Any) -> None:
    (key,) = given
    request = ask(response_format=FORM, reasoning=Reasoning(effort="low"))
    assert body(profile, replace(request, extra={"b": given}))[key] == expected
    if key != "stream_options":  # of a whole body that is transport, and ignored
        assert body(profile, replace(request, passthrough={profile.vendor: given}))[key] == expected


def test_ignored_parameters_are_left_out() -> None:
    request = ask(
        temperature=0.5, stop=("x",), response_format=ResponseFormat(kind="json"), tool_choice=ToolChoice(mode="auto")
    )
    plan = Plan(backend="b", ignore=("temperature", "stop", "response_format", "tool_choice"))
    for profile in (*HOSTED, LOCAL):
        text = rendered(profile, request, plan).body
        assert not any(word in text for word in ("temperature", "stop", "format", "tool_choice"))


# -- determinism


def test_the_same_request_gives_the_same_bytes_in_every_process() -> None:
    # Case B17: 1,000 renderings here, and others under different hash seeds.
    script = (
        "from tests.backends.test_render import everything, HOSTED, LOCAL\n"
        "from tests.backends.hosted_support import rendered\n"
        "print('\\n'.join(rendered(p, everything()).body for p in (*HOSTED, LOCAL)))"
    )
    request = everything()
    texts = [rendered(profile, request).body for profile in (*HOSTED, LOCAL)]
    for _ in range(1000):
        assert [rendered(profile, request).body for profile in (*HOSTED, LOCAL)] == texts
    for seed in ("0", "1", "4242"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == texts


def everything() -> Request:
    """One request with something of everything that all protocols take."""
    return Request(
        system=(TextPart(text="S1"), TextPart(text="S2 ünï")),
        messages=(
            user(TextPart(text="Weather?"), TextPart(text="In Zürich.")),
            assistant(
                TextPart(text="Looking."),
                ToolCallPart(id="call:1/ä", name="get_weather", arguments='{"z": 1,  "city":"Zürich"}'),
                ToolCallPart(id="call_2", name="get_weather", arguments="not json"),
            ),
            Message(role="tool", parts=(ToolResultPart(id="call:1/ä", content=(TextPart(text="12°"),)),)),
            Message(role="tool", parts=(ToolResultPart(id="call_2", content=(TextPart(text="bad"),), is_error=True),)),
            user(TextPart(text="Thanks")),
        ),
        tools=(WEATHER, Tool(name="now")),
        tool_choice=ToolChoice(mode="tool", name="now", parallel=False),
        response_format=ResponseFormat(kind="schema", name="answer", schema=schema(b={"type": "string"}, a={"type": "number"})),
        max_output_tokens=100,
    )


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    request = Request(messages=(user(TextPart(text="fine")), user(TextPart(text="bad \ud800"))))
    for profile in HOSTED:
        with pytest.raises(InputError, match="surrogate") as caught:
            rendered(profile, request)
        assert caught.value.field == "messages[1]"


# -- tool calls


def test_argument_text_is_kept_verbatim() -> None:
    # Case B19: neither sorted nor re-serialised, in any protocol; spliced in where the body wants an object.
    text = '{"z": 1,\n "a":"\\u00e9",  "z": 2, "n": 1.0e+2}'
    request = Request(messages=(assistant(ToolCallPart(id="c", name="f", arguments=text)),))
    assert f'"input":{text}' in rendered(MESSAGES, request).body
    assert body(CHAT, request)["messages"][0]["tool_calls"][0]["function"]["arguments"] == text
    assert body(RESPONSES, request)["input"][0]["arguments"] == text


@pytest.mark.parametrize("text", ["not json", "[1]", '{"a": NaN}', '{"a":'])
def test_arguments_that_are_no_object_are_wrapped_and_reported(text: str) -> None:
    request = Request(messages=(assistant(ToolCallPart(id="c", name="f", arguments=text)),))
    made = rendered(MESSAGES, request)
    assert json.loads(made.body)["messages"][0]["content"][0]["input"] == {"arguments": text}
    assert any("messages[0][0]" in warning for warning in made.warnings)
    assert not rendered(CHAT, request).warnings


def test_a_call_without_arguments_has_an_empty_input() -> None:
    made = rendered(MESSAGES, Request(messages=(assistant(ToolCallPart(id="c", name="f", arguments="")),)))
    assert '"input":{}' in made.body
    assert not made.warnings


def test_tool_ids_are_mapped_the_same_in_call_and_result() -> None:
    given = "functions.get_weather:0|" + "x" * 80
    request = Request(
        messages=(
            assistant(ToolCallPart(id=given, name="f", arguments="{}")),
            Message(role="tool", parts=(ToolResultPart(id=given, content=(TextPart(text="1"),)),)),
        )
    )
    first, second = body(MESSAGES, request)["messages"]
    assert first["content"][0]["id"] == second["content"][0]["tool_use_id"]
    chat = body(CHAT, request)["messages"]
    assert chat[0]["tool_calls"][0]["id"] == chat[1]["tool_call_id"]
    assert len(chat[1]["tool_call_id"]) == 40
    items = body(RESPONSES, request)["input"]
    assert items[0]["call_id"] == items[1]["call_id"]
    assert len(items[0]["call_id"]) == 64
    assert body(LOCAL, request)["messages"][1]["tool_call_id"] == given


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
FILE = {"type": "input_file", "file_id": "f"}


def test_ids_in_a_vendors_own_parts_are_mapped_with_the_rest() -> None:
    given = "functions.get_weather:0|" + "x" * 80
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": given, "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": given, "content": [DOCUMENT]}]}
    first, second = body(MESSAGES, ask(given=[call, result]))["messages"]
    assert first["content"][0]["id"] == second["content"][0]["tool_use_id"] == ANTHROPIC_ID.apply(given) != given
    assert second["content"][0]["content"] == [DOCUMENT]
    answers = {"type": "function_call_output", "call_id": given, "output": [FILE]}
    items = body(RESPONSES, ask(given=[{"type": "function_call", "call_id": given, "name": "f", "arguments": ""}, answers]))[
        "input"
    ]
    assert items[0]["call_id"] == items[1]["call_id"] == RESPONSES_ID.apply(given) != given
    custom = [{"type": "custom_tool_call", "id": "c", "call_id": given, "name": "f", "input": ""}]
    custom.append({"type": "custom_tool_call_output", "call_id": given, "output": "x"})
    items = body(RESPONSES, ask(given=custom))["input"]
    assert (items[0]["id"], items[0]["call_id"]) == ("c", items[1]["call_id"]) == ("c", RESPONSES_ID.apply(given))
    made = {"type": "custom", "id": given, "custom": {"name": "f", "input": ""}}
    chat = [{"role": "assistant", "tool_calls": [made]}, {"role": "tool", "tool_call_id": given, "content": "x"}]
    entry, answer = body(CHAT, ask(given=chat))["messages"]
    assert entry["tool_calls"] == [made | {"id": answer["tool_call_id"]}]
    server = [{"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}]
    server.append({"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []})
    assert body(MESSAGES, ask(given=[{"role": "assistant", "content": server}]))["messages"][0]["content"] == server


def test_results_that_follow_each_other_become_one_message_whatever_is_in_them() -> None:
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "abc"]
    contents: list[Any] = ["r", [DOCUMENT], "r"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": c} for name, c in zip("abc", contents, strict=True)]
    given = [{"role": "assistant", "content": calls}, *({"role": "user", "content": [result]} for result in results)]
    sent = body(MESSAGES, ask(given=given))["messages"]
    assert [message["role"] for message in sent] == ["assistant", "user"]
    assert sent[1]["content"] == results


@pytest.mark.parametrize(
    ("profile", "result", "expected"),
    [
        (MESSAGES, {"type": "tool_result", "tool_use_id": "c", "content": [DOCUMENT]}, ["cache_control"]),
        (RESPONSES, {"type": "function_call_output", "call_id": "c", "output": [FILE]}, ["output", 0]),
        (RESPONSES, {"type": "custom_tool_call_output", "call_id": "c", "output": [FILE, FILE]}, ["output", 1]),
        (RESPONSES, {"type": "custom_tool_call_output", "call_id": "c", "output": "x"}, ["output", 0]),
    ],
)
def test_a_mark_comes_to_the_end_of_a_vendors_own_result(profile: Profile, result: dict[str, Any], expected: list[Any]) -> None:
    given = [{"role": "user", "content": [result]}] if profile is MESSAGES else [result]
    plan = Plan(backend="b", marks=(Mark(at="messages[0][0]", tokens=9, ttl=None),))
    plain, marked = (rendered(profile, ask(given=given), p) for p in (PLAN, plan))
    assert not plain.warnings + marked.warnings
    sent = json.loads(marked.body)
    (made,) = sent["messages"][0]["content"] if profile is MESSAGES else sent["input"]
    key = MARK[profile.marks or "openai"]
    inner = made if profile is MESSAGES else made["output"][expected[1]]
    assert inner.pop(key)
    assert made == (result | {"output": [{"type": "input_text", "text": "x"}]} if result.get("output") == "x" else result)


def test_a_mark_of_the_callers_on_the_end_of_such_a_result_stays_his() -> None:
    mark = {"mode": "explicit", "ttl": "12h"}
    result = {"type": "function_call_output", "call_id": "c", "output": [FILE | {"prompt_cache_breakpoint": mark}]}
    plan = Plan(backend="b", marks=(Mark(at="messages[0][0]", tokens=9, ttl="30m"),))
    assert body(RESPONSES, ask(given=[result]), plan)["input"] == [result]


def test_an_empty_text_is_not_sent_to_anthropic_wherever_it_stands() -> None:
    empty, said = {"type": "text", "text": ""}, {"type": "text", "text": "x"}
    picture = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    blank = TextPart(text="")
    for given, expected in (([empty, said], "x"), ([empty, picture, empty], [picture]), ([empty, DOCUMENT], [DOCUMENT])):
        result = {"type": "tool_result", "tool_use_id": "c", "content": given}
        request = ask(given=[{"role": "user", "content": [result, empty]}], system=(blank, TextPart(text="s"), blank))
        sent = body(MESSAGES, request)
        assert sent["system"] == "s"
        assert sent["messages"][0]["content"] == [result | {"content": expected}]
    alone = ask(given=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [empty, empty]}]}])
    assert body(MESSAGES, alone)["messages"][0]["content"][0]["content"] == ""
    # Two texts stay two, so that what the model reads does not change.
    two = body(MESSAGES, ask(system=(TextPart(text="a"), blank, TextPart(text="b"))))
    assert [part["text"] for part in two["system"]] == ["a", "b"]


@pytest.mark.parametrize("rule", [ANTHROPIC_ID, CHAT_ID, MISTRAL_ID])
def test_ids_that_are_allowed_stay_and_others_do_not_collide(rule: IdRule) -> None:
    assert rule.apply("a1B2c3D4e") == "a1B2c3D4e"
    made = {rule.apply(f"a.{i}" + "y" * 100) for i in range(200)}
    assert len(made) == 200
    assert rule.apply("") == rule.apply("") != ""
    size = rule.exact or rule.longest or 0
    assert all(0 < len(name) <= size and name.replace("_", "").replace(".", "").isalnum() for name in made)


def test_consecutive_tool_results_become_one_user_message_for_messages() -> None:
    sent = body(MESSAGES, everything())["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "user", "user"]
    results = sent[2]["content"]
    assert [r["type"] for r in results] == ["tool_result", "tool_result"]
    assert results[0]["content"] == "12°"
    assert results[1]["is_error"] is True


def test_results_in_a_user_message_become_tool_messages_for_chat() -> None:
    request = Request(
        messages=(
            user(
                ToolResultPart(id="a", content=(TextPart(text="1"),)),
                ToolResultPart(id="b", content=(), is_error=True),
                TextPart(text="go on"),
            ),
        )
    )
    made = rendered(CHAT, request)
    assert json.loads(made.body)["messages"] == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": "go on"},
    ]
    assert any("error" in warning for warning in made.warnings)
    items = body(RESPONSES, request)["input"]
    assert [item.get("type", "message") for item in items] == ["function_call_output", "function_call_output", "message"]


CONVERSATION = [
    {"role": "user", "content": "Weather in Zürich and Oslo?"},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich", "days": 3}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {"city": "Oslo", "a": {"b": [1, None]}}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12°"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": '3° "cold"'},
        ],
    },
    {"role": "assistant", "content": "12 and 3."},
    {"role": "user", "content": "Thanks"},
]


def test_a_tool_conversation_survives_the_round_through_every_protocol() -> None:
    _, messages = parse_messages(CONVERSATION, dialect="messages")
    start = body(MESSAGES, Request(messages=messages))
    assert start["messages"] == CONVERSATION
    for profile, key, dialect in ((CHAT, "messages", "chat"), (RESPONSES, "input", "responses")):
        sent = body(profile, Request(messages=messages))[key]
        _, again = parse_messages(sent, dialect=dialect)  # type: ignore[arg-type]
        back = body(MESSAGES, Request(messages=again))["messages"]
        if dialect == "responses":
            back = _joined(back)  # Responses items are messages of their own
        assert back == CONVERSATION
        assert json.dumps(body(profile, Request(messages=again))[key]) == json.dumps(sent)


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role as one message, which is how the vendor reads them."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if out and out[-1]["role"] == message["role"] == "assistant":
            before = out[-1]["content"]
            before = [{"type": "text", "text": before}] if isinstance(before, str) else before
            out[-1] = {"role": "assistant", "content": before + message["content"]}
        else:
            out.append(message)
    return out


# -- cache marks


def test_own_marks_survive_whole() -> None:
    # Cases B23 and B24: unknown keys inside a mark survive, and nobody adds another.
    request = Request(
        system=(TextPart(text="S", mark=ANTHROPIC_MARK),),
        messages=(user(TextPart(text="A", mark=ANTHROPIC_MARK), TextPart(text="B")),),
        tools=(replace(WEATHER, mark=ANTHROPIC_MARK),),
    )
    made = rendered(MESSAGES, request)
    sent = json.loads(made.body)
    assert sent["system"][0]["cache_control"] == {"type": "ephemeral", "ttl": "1h", "scope": "x"}
    assert sent["messages"][0]["content"][0]["cache_control"]["scope"] == "x"
    assert sent["tools"][0]["cache_control"]["scope"] == "x"
    assert made.body.count("cache_control") == 3
    assert not made.warnings
    openai = rendered(CHAT, Request(messages=(user(TextPart(text="A", mark=OPENAI_MARK)),)))
    assert json.loads(openai.body)["messages"][0]["content"][0]["prompt_cache_breakpoint"]["new"] == 1


def test_a_mark_on_a_tool_result_survives() -> None:
    # Case B7.
    part = ToolResultPart(id="a", content=(TextPart(text="1"),), mark=ANTHROPIC_MARK)
    sent = body(MESSAGES, Request(messages=(Message(role="tool", parts=(part,)),)))
    assert sent["messages"][0]["content"][0]["cache_control"]["ttl"] == "1h"
    part = replace(part, mark=OPENAI_MARK)
    sent = body(RESPONSES, Request(messages=(Message(role="tool", parts=(part,)),)))
    assert sent["input"][0]["output"][0]["prompt_cache_breakpoint"]["ttl"] == "12h"
    sent = body(CHAT, Request(messages=(Message(role="tool", parts=(part,)),)))
    assert sent["messages"][0]["content"][0]["prompt_cache_breakpoint"]["ttl"] == "12h"


@pytest.mark.parametrize(
    ("profile", "mark"),
    [
        (CHAT, ANTHROPIC_MARK),
        (RESPONSES, ANTHROPIC_MARK),
        (MESSAGES, OPENAI_MARK),
        (LOCAL, ANTHROPIC_MARK),
        (OLD_CHAT, OPENAI_MARK),
    ],
)
def test_marks_never_cross(profile: Profile, mark: CacheMark) -> None:
    # Case B25: each attempt renders from the neutral request, and the removal is on record.
    request = Request(
        system=(TextPart(text="S", mark=mark),),
        messages=(
            user(TextPart(text="A", mark=mark), ImagePart(url="https://x/y.png", mark=mark)),
            assistant(ToolCallPart(id="a", name="f", arguments="{}", mark=mark)),
            user(ToolResultPart(id="a", content=(TextPart(text="1", mark=mark),), mark=mark)),
        ),
        tools=(replace(WEATHER, mark=mark),),
        passthrough={mark.dialect: {"cache_control": {"type": "ephemeral"}, "prompt_cache_options": {"mode": "implicit"}}},
    )
    made = rendered(profile, request, Plan(backend="b", marks=(Mark(at="system[0]", tokens=None, ttl="5m"),)))
    assert "cache_control" not in made.body
    assert "prompt_cache" not in made.body
    assert len(made.warnings) >= 6


def test_marks_are_dropped_when_the_plan_says_so() -> None:
    for profile, mark in ((MESSAGES, ANTHROPIC_MARK), (CHAT, OPENAI_MARK)):
        request = Request(
            messages=(user(TextPart(text="A", mark=mark)),),
            passthrough={profile.vendor: {"cache_control": {"type": "ephemeral"}, "prompt_cache_key": "k"}},
        )
        made = rendered(profile, request, Plan(backend="b", drop_marks=True, options=dict(profile.opt_out or {})))
        assert "cache_control" not in made.body
        assert "breakpoint" not in made.body
        assert "prompt_cache_key" not in made.body
        assert not made.warnings
    assert '"prompt_cache_options":{"mode":"explicit"}' in made.body


def test_planned_marks_are_added_where_the_caller_put_none() -> None:
    marks = (Mark(at="system[0]", tokens=9, ttl="1h"), Mark(at="messages[0][0]", tokens=20, ttl=None))
    request = ask(system="S")
    sent = body(MESSAGES, request, Plan(backend="b", marks=marks))
    assert sent["system"] == [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    assert sent["messages"][0]["content"] == [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    sent = body(RESPONSES, request, Plan(backend="b", marks=marks[:1]))
    assert "instructions" not in sent
    assert sent["input"][0] == {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "S", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "1h"}}],
    }


def test_openrouter_takes_anthropic_marks() -> None:
    sent = body(OPENROUTER, Request(messages=(user(TextPart(text="A", mark=ANTHROPIC_MARK)),)))
    assert sent["messages"][0]["content"][0]["cache_control"]["scope"] == "x"


# -- reasoning


def thinking(provider: str | None, model: str | None = None) -> ReasoningPart:
    raw: dict[str, Any] = {"type": "thinking", "thinking": "hm", "signature": "sig=="}
    if provider == "openai":
        raw = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    return ReasoningPart(text="hm", raw=raw, provider=provider, model=model)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt-5.6-sol", "gpt-5.6"),
        ("openai/gpt-5.6-luna", "gpt-5.6"),
        ("gpt-4-0613", "gpt-4"),
        ("claude-sonnet-5-5", "claude-sonnet-5-5"),
        ("claude-sonnet-5-20260101", "claude-sonnet-5"),
        ("o3-2025-04-16", "o3"),
        ("qwen3-8b", "qwen3"),
        ("llama-3.1-8b", "llama-3.1"),
        ("deepseek-chat", "deepseek-chat"),
    ],
)
def test_model_families(name: str, family: str) -> None:
    assert model_family(name) == family


def test_reasoning_goes_back_only_where_it_came_from() -> None:
    own = Request(messages=(assistant(thinking("anthropic", "claude-sonnet-5-5-20261001"), TextPart(text="Hi")),))
    sent = body(MESSAGES, own, model="claude-sonnet-5-5")
    assert sent["messages"][0]["content"][0] == {"type": "thinking", "thinking": "hm", "signature": "sig=="}
    for profile, model in ((MESSAGES, "claude-opus-5"), (RESPONSES, "gpt-6-astra"), (CHAT, "gpt-6-astra"), (LOCAL, "x")):
        made = rendered(profile, own, model=model)
        assert "sig==" not in made.body
        assert any("reasoning" in warning for warning in made.warnings)
    openai = Request(messages=(assistant(thinking("openai"), TextPart(text="Hi")),))
    items = body(RESPONSES, openai, model="gpt-6-astra")["input"]
    assert items[0] == {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    assert items[1] == {"type": "message", "role": "assistant", "content": "Hi"}
    made = rendered(MESSAGES, openai)
    assert "gAAA" not in made.body
    assert made.warnings


def test_reasoning_without_encrypted_content_is_left_out() -> None:
    part = replace(thinking("openai"), raw={"type": "reasoning", "id": "rs_1", "summary": []})
    made = rendered(RESPONSES, Request(messages=(assistant(part, TextPart(text="Hi")),)))
    assert "rs_1" not in made.body
    assert any("encrypted" in warning for warning in made.warnings)


def test_an_answer_of_nothing_but_foreign_reasoning_leaves_no_message() -> None:
    request = Request(messages=(user(TextPart(text="a")), assistant(thinking("openai")), user(TextPart(text="b"))))
    assert [m["role"] for m in body(MESSAGES, request)["messages"]] == ["user", "user"]


def test_reasoning_text_goes_back_in_the_field_it_came_in() -> None:
    deepseek = profile_of("deepseek", "chat")
    part = ReasoningPart(text="hm", raw={"reasoning_content": "hm"}, provider="deepseek", model="deepseek-v4-pro")
    request = Request(messages=(assistant(part, TextPart(text="Hi")),))
    sent = body(deepseek, request, model="deepseek-v4-pro")
    assert sent["messages"][0] == {"role": "assistant", "reasoning_content": "hm", "content": "Hi"}
    assert "hm" not in rendered(profile_of("groq", "chat"), request).body
    given = ask(given=[{"role": "assistant", "reasoning_content": "own", "content": "Hi"}, {"role": "user", "content": "?"}])
    assert body(deepseek, given)["messages"][0]["reasoning_content"] == "own"


def test_thinking_settings_of_messages() -> None:
    def sent(**settings: Any) -> dict[str, Any]:
        return body(MESSAGES, ask(reasoning=Reasoning(**settings)))

    assert sent(effort="none")["thinking"] == {"type": "disabled"}
    assert "output_config" not in sent(effort="none")
    assert sent(budget_tokens=2048)["thinking"] == {"type": "enabled", "budget_tokens": 2048}
    assert sent(effort="max", summary="auto")["thinking"] == {"type": "adaptive", "display": "summarized"}
    both = ask(
        reasoning=Reasoning(effort="high"), response_format=ResponseFormat(kind="schema", schema=schema(a={"type": "string"}))
    )
    config = body(MESSAGES, both)["output_config"]
    assert config["effort"] == "high"
    assert config["format"]["type"] == "json_schema"


def test_openrouter_takes_reasoning_as_an_object() -> None:
    sent = body(OPENROUTER, ask(reasoning=Reasoning(budget_tokens=500)))
    assert sent["reasoning"] == {"max_tokens": 500}


# -- formats, choices, systems, images


def test_response_formats() -> None:
    closed = schema(a={"type": "string"})
    open_schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert "response_format" not in body(CHAT, ask(response_format=ResponseFormat(kind="text")))
    assert body(CHAT, ask(response_format=ResponseFormat(kind="json")))["response_format"] == {"type": "json_object"}
    chat = body(CHAT, ask(response_format=ResponseFormat(kind="schema", name="n", schema=closed)))["response_format"]
    assert chat == {"type": "json_schema", "json_schema": {"name": "n", "schema": closed, "strict": True}}
    chat = body(CHAT, ask(response_format=ResponseFormat(kind="schema", schema=open_schema)))["response_format"]
    assert "strict" not in chat["json_schema"]
    text = body(RESPONSES, ask(response_format=ResponseFormat(kind="schema", name="n", schema=closed)))["text"]
    assert text == {"format": {"type": "json_schema", "name": "n", "schema": closed, "strict": True}}
    config = body(MESSAGES, ask(response_format=ResponseFormat(kind="schema", name="n", schema=closed)))["output_config"]
    assert config == {"format": {"type": "json_schema", "schema": closed}}


def test_strict_schemas() -> None:
    assert strict_schema(schema(a=schema(b={"type": "string"})))
    assert not strict_schema(schema(a={"type": "object", "properties": {}}))
    assert not strict_schema({**schema(a={"type": "string"}), "required": []})
    assert not strict_schema(schema(a={"anyOf": [{"type": "object"}]}))


def test_tool_choices() -> None:
    def sent(profile: Profile, choice: ToolChoice) -> dict[str, Any]:
        return body(profile, ask(tools=(WEATHER,), tool_choice=choice))

    assert sent(CHAT, ToolChoice(mode="required"))["tool_choice"] == "required"
    assert sent(CHAT, ToolChoice(mode="tool", name="f"))["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert sent(CHAT, ToolChoice(mode="auto", parallel=False))["parallel_tool_calls"] is False
    assert sent(RESPONSES, ToolChoice(mode="tool", name="f"))["tool_choice"] == {"type": "function", "name": "f"}
    assert sent(MESSAGES, ToolChoice(mode="required", parallel=False))["tool_choice"] == {
        "type": "any",
        "disable_parallel_tool_use": True,
    }
    assert sent(MESSAGES, ToolChoice(mode="none", parallel=True))["tool_choice"] == {"type": "none"}
    for profile in HOSTED:
        assert "tool_choice" not in body(profile, ask(tool_choice=ToolChoice(mode="none")))


def test_several_system_texts_keep_their_parts() -> None:
    request = ask(system=(TextPart(text="A"), TextPart(text="B")))
    assert body(CHAT, request)["messages"][0]["content"] == [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert body(RESPONSES, request)["input"][0]["role"] == "developer"
    assert [block["text"] for block in body(MESSAGES, request)["system"]] == ["A", "B"]


def test_a_late_system_message_stays_where_it_is() -> None:
    request = Request(messages=(user(TextPart(text="a")), Message(role="system", parts=(TextPart(text="new rule"),))))
    assert body(CHAT, request)["messages"][1] == {"role": "developer", "content": "new rule"}
    assert body(OLD_CHAT, request)["messages"][1] == {"role": "system", "content": "new rule"}
    assert body(RESPONSES, request)["input"][1] == {"type": "message", "role": "system", "content": "new rule"}
    assert body(MESSAGES, request)["messages"][1] == {"role": "system", "content": "new rule"}
    assert [r.code for r in cannot(request, MESSAGES)] == ["capability"]
    assert cannot(request, anthropic_profile("claude-opus-5-5", VERSION)) == []


def test_images() -> None:
    request = Request(
        messages=(user(ImagePart(url="https://x/y.png", detail="low"), ImagePart(data="QUJD", media_type="image/png")),)
    )
    chat = body(CHAT, request)["messages"][0]["content"]
    assert chat[0] == {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "low"}}
    assert chat[1]["image_url"]["url"] == "data:image/png;base64,QUJD"
    items = body(RESPONSES, request)["input"][0]["content"]
    assert items[1] == {"type": "input_image", "image_url": "data:image/png;base64,QUJD", "detail": "auto"}
    blocks = body(MESSAGES, request)["messages"][0]["content"]
    assert blocks[0]["source"] == {"type": "url", "url": "https://x/y.png"}
    assert blocks[1]["source"] == {"type": "base64", "media_type": "image/png", "data": "QUJD"}


def test_empty_texts_beside_others_are_left_out_for_messages() -> None:
    request = ask(given=[{"role": "assistant", "content": "", "tool_calls": [call("c")]}, {"role": "user", "content": "x"}])
    assert [b["type"] for b in body(MESSAGES, request)["messages"][0]["content"]] == ["tool_use"]


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_names_of_messages() -> None:
    request = ask(given=[{"role": "user", "name": "ann", "content": "x"}])
    assert body(CHAT, request)["messages"][0] == {"role": "user", "content": "x", "name": "ann"}
    for profile in (RESPONSES, MESSAGES):
        assert any("name" in warning for warning in rendered(profile, request).warnings)


def test_own_parts_and_tools_pass_and_foreign_ones_are_refused() -> None:
    document = OpaquePart(dialect="messages", raw={"type": "document", "source": {}}, mark=ANTHROPIC_MARK)
    search = Tool(name="web_search", dialect="messages", raw={"type": "web_search_20260209", "name": "web_search"})
    request = Request(messages=(user(document),), tools=(search,))
    sent = body(MESSAGES, request)
    assert sent["messages"][0]["content"] == [{**document.raw, "cache_control": dict(ANTHROPIC_MARK.fields)}]
    assert sent["tools"] == [dict(search.raw or {})]
    assert [r.code for r in cannot(request, CHAT)] == ["capability", "capability"]
    file = Request(messages=(user(OpaquePart(dialect="responses", raw={"type": "input_file", "file_id": "f"})),))
    assert body(RESPONSES, file)["input"][0]["content"] == [{"type": "input_file", "file_id": "f"}]
    item = Request(messages=(assistant(OpaquePart(dialect="responses", raw={"type": "web_search_call", "id": "w"})),))
    assert body(RESPONSES, item)["input"] == [{"type": "web_search_call", "id": "w"}]
    refusal = Request(messages=(assistant(OpaquePart(dialect="chat", raw={"type": "refusal", "refusal": "no"})),))
    assert body(CHAT, refusal)["messages"][0]["content"] == [{"type": "refusal", "refusal": "no"}]


# -- what cannot be said


def test_parameters_that_a_protocol_cannot_say() -> None:
    request = ask(temperature=0.5, top_k=3, min_p=0.1, seed=1, stop=("x",), reasoning=Reasoning(budget_tokens=1000))
    names = {r.detail.partition(":")[0] for r in cannot(request, RESPONSES)}
    assert names == {"temperature", "top_k", "min_p", "seed", "stop", "reasoning.budget_tokens"}
    assert {r.code for r in cannot(request, RESPONSES)} == {"unsupported_parameter"}
    assert {r.detail.partition(":")[0] for r in cannot(request, MESSAGES)} == {"temperature", "top_k", "min_p", "seed"}
    assert {r.detail.partition(":")[0] for r in cannot(request, anthropic_profile("claude-sonnet-5-5", "2023-06-01"))} == {
        "min_p",
        "seed",
    }
    assert {r.detail.partition(":")[0] for r in cannot(request, LOCAL)} == {"reasoning"}
    assert cannot(ask(response_format=ResponseFormat(kind="json")), MESSAGES)[0].detail.startswith("response_format")
    assert cannot(ask(response_format=ResponseFormat(kind="text")), LOCAL_MESSAGES) == []


def test_images_where_none_are_taken() -> None:
    picture = ImagePart(url="https://x/y.png")
    assert cannot(Request(messages=(user(picture),)), LOCAL)[0].code == "unsupported_parameter"
    result = Request(messages=(user(ToolResultPart(id="a", content=(picture,))),))
    assert cannot(result, CHAT)[0].detail.startswith("images:")
    assert cannot(result, RESPONSES) == cannot(result, MESSAGES) == []


def test_one_turn_of_several_items_is_one_chat_message_when_it_calls_tools() -> None:
    call = ToolCallPart(id="a", name="f", arguments="{}")
    other = ToolCallPart(id="b", name="g", arguments="{}")
    said = [Message(role="assistant", parts=(part,)) for part in (TextPart(text="Wait."), call, other)]
    results = tuple(Message(role="tool", parts=(ToolResultPart(id=i, content=(TextPart(text="1"),)),)) for i in "ab")
    messages = body(CHAT, Request(messages=(user(TextPart(text="Hi")), *said, *results)))["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "Wait."
    assert [c["id"] for c in messages[1]["tool_calls"]] == ["a", "b"]
    two = Request(messages=tuple(Message(role="assistant", parts=(TextPart(text=t),)) for t in "ab"))
    assert len(body(CHAT, two)["messages"]) == 2
    thought = Message(role="assistant", parts=(ReasoningPart(text="hm", raw={"type": "reasoning"}, provider="openai"),))
    assert len(body(CHAT, Request(messages=(user(TextPart(text="Hi")), thought)))["messages"]) == 1


def test_what_a_schema_says_of_itself_is_kept() -> None:
    form = ResponseFormat(kind="schema", name="n", schema={"type": "object"}, strict=True, description="d")
    wanted = {"name": "n", "schema": {"type": "object"}, "strict": True, "description": "d"}
    assert body(CHAT, ask(response_format=form))["response_format"]["json_schema"] == wanted
    assert body(RESPONSES, ask(response_format=form))["text"]["format"] == {"type": "json_schema", **wanted}


def test_passthrough_goes_to_its_own_api() -> None:
    request = ask(passthrough={"openai": {"logit_bias": {"1": 2}, "metadata": {"a": "b"}, "prompt_cache_key": "k"}})
    chat = body(CHAT, request)
    assert chat["logit_bias"] == {"1": 2}
    assert chat["prompt_cache_key"] == "k"
    made = rendered(RESPONSES, request)
    assert json.loads(made.body)["metadata"] == {"a": "b"}
    assert "logit_bias" not in made.body
    assert made.warnings == ("logit_bias was left out: it belongs to OpenAI's other API",)
    assert "prompt_cache_key" not in rendered(LOCAL, request).body
    verbose = ask(passthrough={"openai": {"text": {"verbosity": "low"}}}, response_format=ResponseFormat(kind="json"))
    assert body(RESPONSES, verbose)["text"] == {"format": {"type": "json_object"}, "verbosity": "low"}


OPENAI_OWN = {
    **dict.fromkeys(
        ("user", "safety_identifier", "metadata", "store", "service_tier", "moderation", "web_search_options"), "own"
    ),
    **dict.fromkeys(("verbosity", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs"), "same"),
    **dict.fromkeys(("text", "include", "truncation", "context_management", "access_programs", "max_tool_calls"), "other"),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control"), "cache"),
}
ANTHROPIC_OWN = dict.fromkeys(
    ("metadata", "service_tier", "speed", "inference_geo", "diagnostics", "thinking", "workspace_id", "cache_control"), "own"
)


@pytest.mark.parametrize(("server", "api"), [(name, p.api) for name, row in ROWS.items() for p in row.profiles])
def test_what_a_body_says_to_its_vendor_goes_to_nobody_else_and_is_told(server: str, api: Api) -> None:
    profile = profile_of(server, api)
    given = ANTHROPIC_OWN if api == "messages" else OPENAI_OWN
    plain, made = body(profile, ask()), rendered(profile, ask(passthrough={profile.vendor: given}))
    sent = json.loads(made.body)
    new = {key for key in sent if sent[key] != plain.get(key)}
    assert new == (profile.passes | profile.cache_fields) & given.keys()
    assert not new & {"user", "safety_identifier", "metadata", "store", "service_tier", "moderation", "speed", "inference_geo"}
    told = " ".join(made.warnings)
    assert [key for key in given if key not in new and key not in told] == []
    # By the server's own name the caller may send what he likes.
    assert body(profile, ask(extra={"b": {"user": "u"}}))["user"] == "u"


def test_each_of_openais_apis_gets_its_own_fields_alone() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    fields = {"chat": get_type_hints(CompletionCreateParamsBase), "responses": get_type_hints(ResponseCreateParamsBase)}
    neutral = {"messages", "input", "instructions", "tools", "functions", "function_call", "model", "prompt", "n"}
    neutral |= {"max_tokens", "max_completion_tokens", "max_output_tokens", "response_format", "seed", "stop"}
    for profile, other in ((CHAT, "responses"), (RESPONSES, "chat")):
        foreign = fields[other].keys() - fields[profile.api].keys() - neutral
        made = rendered(profile, ask(passthrough={"openai": dict.fromkeys(foreign, "x")}))
        assert foreign
        assert not foreign & json.loads(made.body).keys()


CHAT_CHOICE = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "t"}}]},
}
CHOICE = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "t"}]}


@pytest.mark.parametrize("choice", [CHAT_CHOICE, {"type": "custom", "custom": {"name": "t"}}, CHOICE, {"type": "file_search"}])
def test_a_choice_of_tools_goes_to_the_api_whose_form_it_has(choice: dict[str, Any]) -> None:
    request = ask(tools=(WEATHER,), passthrough={"openai": {"tool_choice": choice}})
    own, other = (CHAT, RESPONSES) if choice["type"] in choice else (RESPONSES, CHAT)
    assert body(own, request)["tool_choice"] == choice
    made = rendered(other, request)
    assert "tool_choice" not in json.loads(made.body)
    assert made.warnings == ("tool_choice was left out: it belongs to OpenAI's other API",)


@pytest.mark.parametrize(
    ("own", "other", "caller", "allowed"),
    [
        (MESSAGES, RESPONSES, {"type": "code_execution_20250825", "tool_id": "s"}, ["direct", "code_execution_20250825"]),
        (RESPONSES, MESSAGES, {"type": "program", "caller_id": "p"}, ["programmatic"]),
        (MESSAGES, None, {"type": "direct"}, ["direct"]),
        (RESPONSES, None, {"type": "direct"}, ["direct"]),
    ],
)
def test_who_may_call_a_tool_is_told_in_the_vendors_own_words(
    own: Profile, other: Profile | None, caller: dict[str, str], allowed: list[str]
) -> None:
    made = ToolCallPart(id="c", name="get_weather", arguments="{}", extra={"caller": caller})
    result = ToolResultPart(id="c", content=(TextPart(text="x"),))
    request = ask(given=[assistant(made), user(result)], tools=(replace(WEATHER, extra={"allowed_callers": allowed}),))
    sent = rendered(own, request)
    assert json.dumps(caller, separators=(",", ":")) in sent.body
    assert json.loads(sent.body)["tools"][0]["allowed_callers"] == allowed
    if other is not None:
        left = rendered(other, request)
        assert "caller" not in left.body
        assert any("tools[0]" in warning and "allowed_callers" in warning for warning in left.warnings)


def test_no_part_of_a_body_names_another_vendor() -> None:
    assert PLAN.backend == "b"
    texts = {profile.api: rendered(profile, everything()).body for profile in HOSTED}
    assert "input_schema" not in texts["chat"] + texts["responses"]
    assert "function" not in texts["messages"]


def test_fields_of_one_vendor_stay_with_it() -> None:
    given = [
        {"role": "assistant", "content": "x", "reasoning_details": [{"type": "reasoning.text"}], "phase": "final_answer"},
        {"role": "user", "content": [{"type": "text", "text": "y", "citations": [{"a": 1}]}]},
    ]
    request = ask(given=given, tools=(replace(WEATHER, extra={"input_examples": [{"city": "X"}], "defer_loading": True}),))
    assert body(OPENROUTER, request)["messages"][0]["reasoning_details"] == [{"type": "reasoning.text"}]
    for profile in (CHAT, LOCAL, MESSAGES):
        assert "reasoning_details" not in rendered(profile, request).body
    assert body(RESPONSES, request)["input"][0]["phase"] == "final_answer"
    assert body(MESSAGES, request)["messages"][1]["content"][0]["citations"] == [{"a": 1}]
    assert "citations" not in rendered(CHAT, request).body
    assert body(MESSAGES, request)["tools"][0]["input_examples"] == [{"city": "X"}]
    chat = rendered(CHAT, request)
    assert "input_examples" not in chat.body
    assert any("tools[0]" in warning and "input_examples, defer_loading" in warning for warning in chat.warnings)
    assert body(RESPONSES, request)["tools"][0]["defer_loading"] is True


def test_custom_tools_of_chat() -> None:
    custom = Tool(name="grammar", dialect="chat", raw={"type": "custom", "custom": {"name": "grammar"}})
    made = {"type": "custom", "id": "c" * 50, "custom": {"name": "grammar", "input": "x"}}
    request = Request(
        messages=(Message(role="assistant", name="bob", parts=(OpaquePart(dialect="chat", raw=made),)),),
        tools=(custom, replace(WEATHER, strict=True)),
    )
    sent = body(CHAT, request)
    assert sent["tools"][0] == custom.raw
    assert sent["tools"][1]["function"]["strict"] is True
    assert sent["messages"][0]["name"] == "bob"
    assert sent["messages"][0]["content"] is None
    assert len(sent["messages"][0]["tool_calls"][0]["id"]) == 40
    assert body(MESSAGES, ask(tools=(replace(WEATHER, strict=True),)))["tools"][0]["strict"] is True
    hosted = Tool(name="web_search", dialect="responses", raw={"type": "web_search"})
    assert body(RESPONSES, ask(tools=(hosted,)))["tools"] == [{"type": "web_search"}]


def test_what_a_server_does_not_do_at_all() -> None:
    plain = replace(LOCAL, tools=False)
    assert [r.code for r in cannot(ask(tools=(WEATHER,)), plain)] == ["capability"]
    form = ResponseFormat(kind="schema", schema=schema(a={"type": "string"}))
    assert cannot(ask(response_format=form), profile_of("deepseek", "chat"))[0].detail.startswith("response_format")


def test_thinking_that_is_no_block_is_left_out() -> None:
    part = ReasoningPart(text="hm", raw={"reasoning_content": "hm"}, provider="anthropic")
    made = rendered(MESSAGES, Request(messages=(assistant(part, TextPart(text="Hi")),)))
    assert json.loads(made.body)["messages"][0]["content"] == "Hi"
    assert any("no thinking block" in warning for warning in made.warnings)
