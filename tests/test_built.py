"""Values that the caller built: checked like dictionaries, and out of the caller's reach once a request has them."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

import pytest

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
from cachespec.request import Reasoning, Request, ResponseFormat, ToolChoice, build_request


def user(*parts: Any) -> Message:
    return Message(role="user", parts=parts)


def everything(store: dict[str, Any], wrap: Any = dict) -> Request:
    """A request of values that hold `store` wherever JSON can be held."""
    held = wrap(store)
    mark = CacheMark(dialect="anthropic", fields=held)
    text = TextPart(text="x", mark=mark, extra=held)
    return build_request(
        messages=[
            Message(role="user", parts=(text, ImagePart(url="u", mark=mark, extra=held)), extra=held),
            Message(
                role="assistant", parts=(ReasoningPart(text="t", raw=held), ToolCallPart(id="1", name="f", arguments="{}"))
            ),
            user(ToolResultPart(id="1", content=(TextPart(text="y", extra=held),), mark=mark, extra=held)),
            {"role": "user", "content": [OpaquePart(dialect="messages", raw=held, mark=mark), text]},
        ],
        system=[text],
        tools=[
            Tool(name="f", parameters=held, mark=mark, extra=held),
            Tool(name="g", parameters={}, dialect="responses", raw=held),
        ],
        response_format=ResponseFormat(kind="schema", schema=held),
        extra={"laptop": held},
    )


def test_later_changes_do_not_arrive() -> None:
    def fresh() -> dict[str, Any]:
        return {"type": "document", "deep": {"list": [1]}}

    store = fresh()
    request = everything(store, wrap=lambda x: x)
    want = copy.deepcopy(request)
    store["deep"]["list"].append(2)
    store["more"] = True
    assert request == want == everything(fresh())


def test_read_only_views_are_mappings_too() -> None:
    deep = MappingProxyType({"type": "document", "deep": MappingProxyType({"list": [1]})})
    assert everything({}, wrap=lambda _: deep) == everything({"type": "document", "deep": {"list": [1]}})


def test_what_holds_no_json_stays_the_value_it_is() -> None:
    message = user(TextPart(text="x"), ToolCallPart(id="1", name="f", arguments="{}"))
    assert build_request([message]).messages[0] is message
    silent = Message(role="assistant", parts=())  # a model may answer nothing, and its message can be sent back
    assert build_request([user(TextPart(text="x")), silent]).messages[1] is silent


@pytest.mark.parametrize(
    ("part", "field", "words"),
    [
        (TextPart(text=3), ".text", "a string"),  # type: ignore[arg-type]
        (TextPart(text="x", mark="m"), ".mark", "CacheMark"),  # type: ignore[arg-type]
        (TextPart(text="x", mark=CacheMark(dialect="x", fields={})), ".mark", "CacheMark"),  # type: ignore[arg-type]
        (TextPart(text="x", mark=CacheMark(dialect="openai", fields=[])), ".mark", "an object"),  # type: ignore[arg-type]
        (TextPart(text="x", extra={"a": {1, 2}}), ".extra.a", "must be JSON"),
        (ImagePart(), "", "either url or data"),
        (ImagePart(url=3), ".url", "a string"),  # type: ignore[arg-type]
        (ImagePart(data="AA=="), ".media_type", "missing"),
        (ToolCallPart(id="", name="f", arguments=""), ".id", "empty"),
        (ToolResultPart(id="1", content="x"), ".content", "a tuple of parts"),  # type: ignore[arg-type]
        (ToolResultPart(id="1", content=(OpaquePart(dialect="chat", raw={}),)), ".content[0]", "text and images"),  # type: ignore[arg-type]
        (ToolResultPart(id="1", content=(TextPart(text="\ud800"),)), ".content[0].text", "surrogate"),
        (ToolResultPart(id="1", content=(), is_error="no"), ".is_error", "true or false"),  # type: ignore[arg-type]
        (ReasoningPart(text=None), ".text", "a string"),  # type: ignore[arg-type]
        (OpaquePart(dialect="chat", raw=[]), ".raw", "an object"),  # type: ignore[arg-type]
        (OpaquePart(dialect="chat", raw={"a": float("nan")}), ".raw.a", "finite"),
        (OpaquePart(dialect="chat", raw={"a": 10**5000}), ".raw.a", "too long a number"),
        ("x", "", "a content part"),
    ],
)
def test_a_wrong_part_names_its_field(part: Any, field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        build_request([user(TextPart(text="x"), part)])
    assert caught.value.field == f"messages[0].parts[1]{field}"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (user(), "messages[0].parts"),
        (Message(role="usr", parts=(TextPart(text="x"),)), "messages[0].role"),  # type: ignore[arg-type]
        (Message(role="user", parts=[TextPart(text="x")]), "messages[0].parts"),  # type: ignore[arg-type]
        (Message(role="user", parts=(TextPart(text="x"),), name=5), "messages[0].name"),  # type: ignore[arg-type]
        (Message(role="user", parts=(TextPart(text="x"),), extra=[]), "messages[0].extra"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_message_names_its_field(message: Message, field: str) -> None:
    with pytest.raises(InputError) as caught:
        build_request([message])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"tools": [Tool(name="")]}, "tools[0].name"),
        ({"tools": [Tool(name="t", description=5)]}, "tools[0].description"),  # type: ignore[arg-type]
        ({"tools": [Tool(name="t", strict="no")]}, "tools[0].strict"),  # type: ignore[arg-type]
        ({"tools": [Tool(name="t", parameters={"enum": {1, 2}})]}, "tools[0].parameters.enum"),
        ({"tools": [Tool(name="t", parameters=[])]}, "tools[0].parameters"),  # type: ignore[arg-type]
        ({"tools": [Tool(name="t", raw={})]}, "tools[0].dialect"),
        ({"tool_choice": ToolChoice(mode="some")}, "tool_choice.mode"),  # type: ignore[arg-type]
        ({"tool_choice": ToolChoice(mode="tool")}, "tool_choice.name"),
        ({"tool_choice": ToolChoice(mode="auto", parallel=1)}, "tool_choice.parallel"),  # type: ignore[arg-type]
        ({"response_format": ResponseFormat(kind="xml")}, "response_format.kind"),  # type: ignore[arg-type]
        ({"response_format": ResponseFormat(kind="schema")}, "response_format.schema"),
        ({"response_format": ResponseFormat(kind="text", name="")}, "response_format.name"),
        ({"response_format": ResponseFormat(kind="json", strict=1)}, "response_format.strict"),  # type: ignore[arg-type]
        ({"response_format": ResponseFormat(kind="json", description=1)}, "response_format.description"),  # type: ignore[arg-type]
        ({"reasoning": Reasoning(budget_tokens=0)}, "reasoning.budget_tokens"),
        ({"system": [TextPart(text="x", extra={"a": b"x"})]}, "system[0].extra.a"),
    ],
)
def test_a_wrong_tool_or_choice_names_its_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        build_request("x", **arguments)
    assert caught.value.field == field
