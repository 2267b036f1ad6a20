"""The keyword arguments of `Client.stream`, REQUEST documents in every shape, and answers read back."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from cachespec.answers import parse_answer
from cachespec.bodies import KEYWORDS, request_from_body
from cachespec.checks import copy_json
from cachespec.errors import InputError
from cachespec.messages import CacheMark, Message, TextPart, Tool
from cachespec.request import Reasoning, Request, ResponseFormat, ToolChoice, build_request

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "Hi"}]
USER = (Message(role="user", parts=(TextPart(text="Hi"),)),)


class City(pydantic.BaseModel):
    name: str
    people: int


def test_a_prompt_alone() -> None:
    assert build_request("Hi") == Request(messages=USER)
    assert build_request(HI) == build_request(messages=HI) == build_request(messages="Hi") == build_request("Hi")


def test_everything_at_once() -> None:
    request = build_request(
        messages=[{"role": "system", "content": "two"}, *HI],
        system="one",
        tools=[TOOL],
        tool_choice="required",
        response_format="json",
        max_output_tokens=400,
        temperature=1,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        stop="\n\n",
        seed=-7,
        reasoning="high",
        model="assistant",
        tenant="acme",
        session_id="s1",
        tags=["a", "b", "a"],
        timeout="800ms",
        cache="no-write",
        extra={"laptop": {"mirostat": 2}},
    )
    assert request == Request(
        messages=USER,
        system=(TextPart(text="one"), TextPart(text="two")),
        tools=(Tool(name="f", parameters={"type": "object"}),),
        tool_choice=ToolChoice(mode="required"),
        response_format=ResponseFormat(kind="json"),
        max_output_tokens=400,
        temperature=1,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        stop=("\n\n",),
        seed=-7,
        reasoning=Reasoning(effort="high"),
        model="assistant",
        tenant="acme",
        session_id="s1",
        tags=("a", "b"),
        timeout=0.8,
        cache="no-write",
        extra={"laptop": {"mirostat": 2}},
    )


def test_an_extra_field_is_a_copy() -> None:
    extra: dict[str, Any] = {"laptop": {"bias": [1]}}
    request = build_request("Hi", extra=extra)
    extra["laptop"]["bias"].append(2)
    assert request.extra == {"laptop": {"bias": [1]}}


@pytest.mark.parametrize(
    ("value", "mode", "name", "parallel"),
    [
        ("auto", "auto", None, None),
        ("any", "required", None, None),
        ({"type": "none"}, "none", None, None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", None, False),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": False}, "tool", "f", True),
        ({"type": "function", "name": "f"}, "tool", "f", None),
        ({"type": "function", "function": {"name": "f"}}, "tool", "f", None),
        (ToolChoice(mode="tool", name="f"), "tool", "f", None),
    ],
)
def test_tool_choice_of_both_vendors(value: Any, mode: Any, name: str | None, parallel: bool | None) -> None:
    choice = build_request("Hi", tools=[TOOL], tool_choice=value).tool_choice
    assert choice == ToolChoice(mode=mode, name=name, parallel=parallel)


def test_response_formats() -> None:
    def form(value: Any) -> ResponseFormat | None:
        return build_request("Hi", response_format=value).response_format

    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert form(None) is None
    assert form("text") == form({"type": "text"}) == ResponseFormat(kind="text")
    assert form("json") == form({"type": "json_object"}) == ResponseFormat(kind="json")
    assert form(schema) == form({"type": "json_schema", "schema": schema}) == ResponseFormat(kind="schema", schema=schema)
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True, "description": "d"}}
    assert form(named) == ResponseFormat(kind="schema", name="n", schema=schema, strict=True, description="d")
    assert form(named["json_schema"] | {"type": "json_schema"}) == form(named)  # type: ignore[operator]
    model = form(City)
    assert model is not None
    assert (model.kind, model.name, model.model) == ("schema", "City", City)
    assert model.schema == City.model_json_schema()
    assert form(model) == model


def test_reasoning_spellings() -> None:
    want = Reasoning(effort="low", budget_tokens=1024, summary="auto")
    assert build_request("Hi", reasoning={"effort": "low", "budget_tokens": 1024, "summary": "auto"}).reasoning == want
    assert build_request("Hi", reasoning=want).reasoning == want
    assert build_request("Hi", reasoning={}).reasoning is None


class NoSchema(pydantic.BaseModel):
    call: Callable[[], None]


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({}, "messages", "either a prompt or messages"),
        ({"prompt": "x", "messages": HI}, "messages", "not both"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "messages", "empty"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "null"),
        ({"prompt": "x\ud800"}, "prompt", "surrogate"),
        ({"system": [1]}, "system[0]", "content part"),
        ({"tools": [{}]}, "tools[0].type", "missing"),
        ({"tool_choice": "requird"}, "tool_choice", "did you mean 'required'"),
        ({"tool_choice": "f"}, "tool_choice", "to force one tool"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "ff"}}, "tool_choice", "did you mean 'f'"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.type", "`extra`"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "must be a string"),
        ({"tool_choice": 1}, "tool_choice", "must be an object"),
        ({"response_format": "jsn"}, "response_format", "'jsn'"),
        ({"response_format": 3}, "response_format", "not an integer"),
        ({"response_format": int}, "response_format", "no pydantic model"),
        ({"response_format": NoSchema}, "response_format", "no JSON schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema", "must be an object"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "unknown field"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": True}, "max_output_tokens", "not a boolean"),
        ({"max_output_tokens": 1.0}, "max_output_tokens", "integer"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"temperature": -0.1}, "temperature", "at least 0"),
        ({"temperature": "1"}, "temperature", "a number"),
        ({"temperature": False}, "temperature", "not a boolean"),
        ({"top_p": 1.1}, "top_p", "between 0 and 1"),
        ({"top_p": float("inf")}, "top_p", "finite"),
        ({"top_k": -1}, "top_k", "at least 0"),
        ({"min_p": 2}, "min_p", "between 0 and 1"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["x", ""]}, "stop[1]", "empty"),
        ({"stop": 3}, "stop", "a list"),
        ({"seed": 2**63}, "seed", "between"),
        ({"reasoning": ""}, "reasoning", "empty"),
        ({"reasoning": 3}, "reasoning", "an object"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort", "did you mean 'effort'"),
        ({"reasoning": {"budget_tokens": 0}}, "reasoning.budget_tokens", "at least 1"),
        ({"model": ""}, "model", "empty"),
        ({"tenant": 3}, "tenant", "a string"),
        ({"session_id": ""}, "session_id", "empty"),
        ({"tags": [1]}, "tags[0]", "a string"),
        ({"timeout": "soon"}, "timeout", "duration"),
        ({"timeout": 0}, "timeout", "above 0"),
        ({"timeout": [1]}, "timeout", "duration"),
        ({"timeout": 1e13}, "timeout", "at most ten years"),
        ({"timeout": "99999999999999999999d"}, "timeout", "at most ten years"),
        ({"timeout": 10**400}, "timeout", "at most ten years"),
        ({"timeout": -(10**5000)}, "timeout", "a whole number of 16610 bits"),
        ({"temperature": 10**400}, "temperature", "between 0 and"),
        ({"temperature": 10**5000}, "temperature", "between 0 and"),
        ({"top_p": 10**400}, "top_p", "between 0 and 1"),
        ({"min_p": -(10**400)}, "min_p", "between 0 and 1"),
        ({"top_k": 10**400}, "top_k", "between 0 and"),
        ({"max_output_tokens": 10**400}, "max_output_tokens", "between 1 and"),
        ({"extra": {"laptop": {"x": 10**5000}}}, "extra.laptop.x", "too long a number"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"n": 10**5000}}]}
                ]
            },
            "messages[0].content[0].input.n",
            "too long a number",
        ),
        ({"cache": "of"}, "cache", "did you mean 'off'"),
        ({"cache": None}, "cache", "must be one of"),
        ({"extra": []}, "extra", "an object"),
        ({"extra": {"laptop": 1}}, "extra.laptop", "an object"),
        ({"extra": {"laptop": {"x": float("inf")}}}, "extra.laptop.x", "finite"),
    ],
)
def test_bad_arguments_are_refused_by_field(arguments: dict[str, Any], field: str, words: str) -> None:
    if not arguments.keys() & {"prompt", "messages"} and arguments:
        arguments = {"prompt": "Hi", **arguments}
    with pytest.raises(InputError) as caught:
        build_request(**arguments)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_document_of_keyword_arguments() -> None:
    document = {"prompt": "Hi", "system": "s", "tags": ["a"], "timeout": "30s", "cache": None, "reasoning": {"effort": "low"}}
    want = build_request("Hi", system="s", tags=["a"], timeout=30, reasoning="low")
    assert request_from_body(document) == want
    assert set(KEYWORDS) == {f for f in Request.__dataclass_fields__ if f != "passthrough"} | {"prompt"}


def test_a_chat_body() -> None:
    body = {
        "model": "gpt-5.6",
        "messages": [{"role": "developer", "content": "d"}, *HI],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "max_completion_tokens": 10,
        "temperature": 0.5,
        "stop": ["a"],
        "seed": 1,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"},
        "metadata": {"a": "b"},
        "user": "u",
        "logit_bias": {"1": 2},
        "service_tier": None,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert request_from_body(body) == Request(
        model="gpt-5.6",
        messages=USER,
        system=(TextPart(text="d"),),
        tools=(Tool(name="f", parameters={"type": "object"}),),
        tool_choice=ToolChoice(mode="tool", name="f", parallel=False),
        max_output_tokens=10,
        temperature=0.5,
        stop=("a",),
        seed=1,
        reasoning=Reasoning(effort="low"),
        response_format=ResponseFormat(kind="schema", name="n", schema={}),
        passthrough={
            "openai": {
                "prompt_cache_key": "k",
                "prompt_cache_options": {"mode": "explicit"},
                "metadata": {"a": "b"},
                "user": "u",
                "logit_bias": {"1": 2},
            }
        },
    )


def test_a_responses_body() -> None:
    body = {
        "model": "gpt-5.6",
        "instructions": "be kind",
        "input": [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "parallel_tool_calls": True,
        "max_output_tokens": 10,
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "reasoning": {"effort": "high", "summary": "auto", "context": "all_turns"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "stream": True,
    }
    assert request_from_body(body) == Request(
        model="gpt-5.6",
        messages=USER,
        system=(TextPart(text="be kind"), TextPart(text="d")),
        tools=(Tool(name="f"),),
        tool_choice=ToolChoice(mode="auto", parallel=True),
        max_output_tokens=10,
        response_format=ResponseFormat(kind="json"),
        reasoning=Reasoning(effort="high", summary="auto"),
        passthrough={
            "openai": {
                "store": False,
                "include": ["reasoning.encrypted_content"],
                "text": {"verbosity": "low"},
                "reasoning": {"context": "all_turns"},
            }
        },
    )
    assert request_from_body({"input": "Hi", "model": "m"}) == build_request("Hi", model="m")


def test_a_messages_body() -> None:
    body = {
        "model": "claude-sonnet-5-5",
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": HI,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "max_tokens": 10,
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "metadata": {"user_id": "u"},
        "stream": False,
    }
    assert request_from_body(body) == Request(
        model="claude-sonnet-5-5",
        messages=USER,
        system=(TextPart(text="s", mark=CacheMark(dialect="anthropic", fields={"type": "ephemeral"})),),
        tools=(Tool(name="f", parameters={"type": "object"}),),
        tool_choice=ToolChoice(mode="auto", parallel=False),
        max_output_tokens=10,
        stop=("x",),
        reasoning=Reasoning(effort="high", budget_tokens=1024),
        response_format=ResponseFormat(kind="schema", schema={"type": "object"}),
        passthrough={"anthropic": {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "metadata": {"user_id": "u"}}},
    )


@pytest.mark.parametrize(
    "hint",
    [
        {"stop_sequences": ["x"]},
        {"system": "s"},
        {"model": "claude-opus-5-5"},
        {"tools": [{"name": "f", "input_schema": {}}]},
        {"tool_choice": {"type": "any"}, "tools": [TOOL]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
    ],
)
def test_a_body_that_could_be_either_is_told_by_what_is_in_it(hint: dict[str, Any]) -> None:
    body = {"model": "m", "messages": HI, "max_tokens": 5, "metadata": {"a": "b"}}
    assert request_from_body(body).passthrough == {"openai": {"metadata": {"a": "b"}}}
    assert request_from_body(body | hint).passthrough == {"anthropic": {"metadata": {"a": "b"}}}


def test_what_only_one_vendor_can_say_is_passed_through_whole() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    chat = request_from_body({"messages": HI, "max_tokens": 1, "tool_choice": allowed})
    assert (chat.tool_choice, chat.passthrough) == (None, {"openai": {"tool_choice": allowed}})
    adaptive = {"type": "adaptive", "display": "omitted"}
    messages = request_from_body({"messages": HI, "max_tokens": 1, "thinking": adaptive})
    assert (messages.reasoning, messages.passthrough) == (None, {"anthropic": {"thinking": adaptive}})
    shown = {"type": "enabled", "budget_tokens": 2048, "display": "summarized"}
    messages = request_from_body({"messages": HI, "max_tokens": 4096, "thinking": shown})
    assert messages.reasoning == Reasoning(budget_tokens=2048)
    assert messages.passthrough == {"anthropic": {"thinking": shown}}


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ([], None, "must be an object"),
        ({}, "messages", "either"),
        ({"messages": HI, "temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"prompt": "Hi", "max_tokens": 3}, "max_tokens", "did you mean 'max_output_tokens'"),
        ({"messages": HI, "max_tokens": 3, "tenant": "a"}, "max_tokens", "did you mean"),
        ({"messages": HI, "max_tokens": 3, "stop_sequence": ["x"]}, "stop_sequence", "unknown field"),
        ({"input": "Hi", "max_tokens": 3}, "max_tokens", "did you mean 'max_output_tokens'"),
        ({"instructions": "x"}, "input", "missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "null"),
        ({"input": "Hi", "background": True}, "background", "not a stream"),
        ({"input": "Hi", "text": {"fmt": 1}}, "text.fmt", "did you mean"),
        ({"input": "Hi", "reasoning": {"efort": "low"}}, "reasoning.efort", "did you mean 'effort'"),
        ({"model": "m", "max_tokens": 3}, "messages", "missing"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"messages": HI, "n": 2}, "n", "one answer"),
        ({"messages": HI, "functions": []}, "functions", "replaced"),
        ({"messages": HI, "stream": "yes"}, "stream", "true or false"),
        ({"messages": HI, "max_tokens": 1, "response_format": {"type": "object"}}, "response_format.type", "json_schema"),
        ({"messages": HI, "max_tokens": 1, "stop_sequences": "x"}, "stop_sequences", "a list"),
        ({"messages": HI, "max_tokens": 1, "thinking": {"type": "enabled"}}, "thinking.budget_tokens", "integer"),
        ({"messages": HI, "max_tokens": 1, "output_config": {"efort": 1}}, "output_config.efort", "did you mean 'effort'"),
        ({"messages": HI, "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ],
)
def test_bad_documents_are_refused_by_field(body: Any, field: str | None, words: str) -> None:
    with pytest.raises(InputError) as caught:
        request_from_body(body)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_document_is_not_kept_by_reference() -> None:
    body: dict[str, Any] = {"messages": HI, "max_tokens": 1, "metadata": {"a": "b"}}
    request = request_from_body(body)
    body["metadata"]["a"] = "c"
    assert request.passthrough == {"openai": {"metadata": {"a": "b"}}}


def test_answers() -> None:
    def answer(form: Any, text: str) -> tuple[Any, str | None]:
        return parse_answer(build_request("Hi", response_format=form), text)

    assert answer(None, "x") == answer("text", "x") == (None, None)
    assert answer("json", '{"a": 1}') == ({"a": 1}, None)
    assert answer({"type": "array"}, "[1]") == ([1], None)
    assert answer(City, '{"name": "Zug", "people": 31000}') == (City(name="Zug", people=31000), None)
    for form, text, words in [
        ("json", "{", "does not parse as JSON"),
        ("json", "", "does not parse as JSON"),
        ("json", "[1]", "not an object"),
        ("json", '{"a": NaN}', "NaN is not JSON"),
        ("json", "[" * 100_000, "does not parse"),
        (City, '{"name": "Zug"}', "does not parse as City"),
    ]:
        value, warning = answer(form, text)
        assert value is None
        assert warning is not None
        assert words in warning


def test_a_validator_that_fails_in_its_own_way_is_a_warning() -> None:
    class Odd(pydantic.BaseModel):
        a: int

        @pydantic.field_validator("a")
        @classmethod
        def check(cls, value: int) -> int:
            raise KeyError(value)

    value, warning = parse_answer(build_request("Hi", response_format=Odd), '{"a": 1}')
    assert value is None
    assert warning is not None


def test_copies_keep_order_and_types() -> None:
    given = {"b": [1, 2.5, None, True, ("x",)], "a": {}}
    copied = copy_json(given, "f")
    assert json.dumps(copied) == '{"b": [1, 2.5, null, true, ["x"]], "a": {}}'


@pytest.mark.shared
def test_recorded_requests_are_documents(shared_data: Path) -> None:
    for path in sorted((shared_data / "agents").glob("agentic_code_*.json.gz")):
        body = json.loads(gzip.decompress(path.read_bytes()))
        request = request_from_body(body)
        assert (request.model, request.max_output_tokens, request.top_p) == (body["model"], body["max_tokens"], body["top_p"])
        assert len(request.system) + len(request.messages) == len(body["messages"])
        assert len(request.tools) == len(body["tools"])
        assert request.passthrough == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": b"x"}, "prompt: must be a string or a list, not bytes"),
        ({"prompt": 3}, "prompt: must be a string or a list, not an integer"),
        ({"messages": 3}, "messages: must be a string or a list, not an integer"),
        ({"prompt": "x", "stop": 3}, "stop: must be a string or a list, not an integer"),
        ({"messages": [{"rol": "user", "content": "x"}]}, "messages[0].rol: unknown field, did you mean 'role'?"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
            "messages[0].content[0].txt: unknown field, did you mean 'text'?",
        ),
        (
            {"messages": [{"role": "user", "content": [{"typ": "text", "text": "x"}]}]},
            "messages[0].content[0].typ: unknown field, did you mean 'type'?",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_ulr": {"url": "x"}}]}]},
            "messages[0].content[0].image_ulr: unknown field, did you mean 'image_url'?",
        ),
        ({"prompt": "x", "tools": [{"nme": "f"}]}, "tools[0].nme: unknown field, did you mean 'name'?"),
        (
            {"prompt": "x", "tools": [{"nme": "f", "input_schema": {}}]},
            "tools[0].nme: unknown field, did you mean 'name'?",
        ),
        (
            {"prompt": "x", "tools": [{"type": "function", "function": {"nme": "f"}}]},
            "tools[0].function.nme: unknown field, did you mean 'name'?",
        ),
    ],
)
def test_what_is_wrong_is_named_and_not_what_it_left_out(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        build_request(**arguments)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("body", "key", "meant"), [({"promt": "x"}, "promt", "prompt"), ({"mesages": []}, "mesages", "messages")]
)
def test_a_document_that_is_nearly_one(body: dict[str, Any], key: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"{key}: unknown field, did you mean '{meant}'"):
        request_from_body(body)
