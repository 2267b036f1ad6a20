"""What a hosted request may cost at most: the bytes of what is sent, what the body itself allows, and why there is no bound."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from decimal import Decimal
from typing import Any

import pytest
from tests.backends.hosted_support import PLAN, WEATHER, ask

from cachespec.backends._hosted import HostedBackend
from cachespec.backends.anthropic import AnthropicBackend
from cachespec.backends.base import Estimate
from cachespec.backends.openai import OpenAIBackend
from cachespec.bodies import request_from_body
from cachespec.decision import Plan
from cachespec.errors import InputError
from cachespec.messages import (
    ImagePart,
    Message,
    OpaquePart,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from cachespec.prompt import build_prompt
from cachespec.request import Request, ResponseFormat, build_request

LONG = "wörd " * 5_000
BYTES = len(LONG.encode())


def backend(api: str, **options: Any) -> HostedBackend:
    if api == "messages":
        return AnthropicBackend(name="b", model="claude-opus-5-5", api_key="k", **options)
    return OpenAIBackend(name="b", model="gpt-6-astra", api_key="k", api=api, **options)  # type: ignore[arg-type]


def estimate(api: str, request: Request, **options: Any) -> Estimate:
    return backend(api, **options).estimate(build_prompt(request))


def content_bytes(value: Any) -> int:
    """Bytes of all text in a body, keys included: no tokenizer makes more tokens of them."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(content_bytes(k) + content_bytes(v) for k, v in value.items())
    if isinstance(value, list):
        return sum(map(content_bytes, value))
    return len(json.dumps(value))


def user(*parts: Any, **more: Any) -> Message:
    return Message(role="user", parts=parts, **more)


def assistant(*parts: Any, **more: Any) -> Message:
    return Message(role="assistant", parts=parts, **more)


def asked(*messages: Message, **fields: Any) -> Request:
    return Request(messages=(*messages, user(TextPart(text="x"))), **{"max_output_tokens": 10, **fields})


ORIGIN = {"messages": ("anthropic", "claude-opus-5-5"), "responses": ("openai", "gpt-6-astra")}
RAW: dict[str, dict[str, Any]] = {
    "messages": {"type": "thinking", "thinking": LONG, "signature": LONG},
    "responses": {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": LONG},
}


def thought(api: str) -> ReasoningPart:
    provider, model = ORIGIN[api]
    return ReasoningPart(text="", raw=RAW[api], provider=provider, model=model)


PLACES: list[tuple[str, Request]] = [
    *((api, ask(LONG, max_output_tokens=10)) for api in ("chat", "responses", "messages")),
    *((api, ask(system=LONG, max_output_tokens=10)) for api in ("chat", "responses", "messages")),
    *(
        (api, ask(tools=(replace(WEATHER, description=LONG),), max_output_tokens=10))
        for api in ("chat", "responses", "messages")
    ),
    *(
        (api, ask(tools=(replace(WEATHER, parameters={"type": "object", "properties": {LONG: {}}}),), max_output_tokens=10))
        for api in ("chat", "responses", "messages")
    ),
    ("messages", ask(tools=(replace(WEATHER, extra={"input_examples": [{"a": LONG}]}),), max_output_tokens=10)),
    ("responses", ask(tools=(replace(WEATHER, extra={"output_schema": {"d": LONG}}),), max_output_tokens=10)),
    ("messages", asked(assistant(TextPart(text="hi", extra={"citations": [{"cited_text": LONG}]})))),
    ("responses", asked(assistant(TextPart(text="hi", extra={"annotations": [{"title": LONG}]})))),
    ("messages", asked(Message(role="system", parts=(TextPart(text=LONG),)))),
    ("chat", asked(user(TextPart(text="x"), name=LONG))),
    ("responses", asked(assistant(TextPart(text="x"), extra={"phase": LONG}))),
    ("chat", asked(assistant(ToolCallPart(id=LONG, name="f", arguments="{}")))),
    *((api, asked(assistant(ToolCallPart(id="i", name=LONG, arguments="{}")))) for api in ("chat", "responses", "messages")),
    *(
        (api, asked(assistant(ToolCallPart(id="i", name="f", arguments=json.dumps({"a": LONG})))))
        for api in ("chat", "responses", "messages")
    ),
    *((api, asked(user(ToolResultPart(id="i", content=(TextPart(text=LONG),))))) for api in ("chat", "responses", "messages")),
    ("messages", asked(user(ToolResultPart(id="i", content=(TextPart(text="x", extra={"citations": LONG}),))))),
    ("messages", asked(user(ToolResultPart(id="i", content=(), extra={"toolset_name": LONG})))),
    ("messages", asked(assistant(ToolCallPart(id="i", name="f", arguments="{}", extra={"toolset_name": LONG})))),
    *((api, asked(assistant(thought(api)))) for api in ("responses", "messages")),
    ("chat", asked(assistant(OpaquePart(dialect="chat", raw={"type": "refusal", "refusal": LONG})))),
    ("messages", asked(user(OpaquePart(dialect="messages", raw={"type": "search_result", "title": LONG, "content": []})))),
    (
        "messages",
        asked(user(OpaquePart(dialect="messages", raw={"type": "document", "source": {"type": "text", "data": LONG}}))),
    ),
    *(
        (api, ask(response_format=ResponseFormat(kind="schema", schema={"d": LONG}), max_output_tokens=10))
        for api in ("chat", "responses", "messages")
    ),
    *(
        (api, ask(response_format=ResponseFormat(kind="schema", schema={}, description=LONG), max_output_tokens=10))
        for api in ("chat", "responses")
    ),
    ("chat", ask(max_output_tokens=10, extra={"b": {"prediction": {"type": "content", "content": LONG}}})),
    ("chat", ask(max_output_tokens=10, passthrough={"openai": {"prediction": {"type": "content", "content": LONG}}})),
    ("messages", ask(max_output_tokens=10, passthrough={"anthropic": {"metadata": {"user_id": LONG}}})),
    *((api, ask(max_output_tokens=10, extra={"b": {"anything": [LONG]}})) for api in ("chat", "responses", "messages")),
    ("chat", asked(user(ImagePart(data="A" * BYTES, media_type="image/png")))),
]


@pytest.mark.parametrize(("api", "request_"), PLACES, ids=lambda v: v if isinstance(v, str) else "")
def test_the_bound_counts_whatever_gets_into_the_body(api: str, request_: Request) -> None:
    plain = estimate(api, asked()).tokens.worst_input
    found = estimate(api, request_)
    sent = json.loads(backend(api).wire(request_, PLAN).body)
    assert found.unbounded == ()
    assert found.tokens.worst_input is not None
    assert plain is not None
    assert found.tokens.worst_input - plain >= BYTES - 100  # the text was counted, not the allowance alone
    assert found.tokens.worst_input >= content_bytes(sent)
    assert found.tokens.input is not None
    assert found.tokens.input <= found.tokens.worst_input


def test_the_places_hold_every_field_that_holds_text() -> None:
    """A new field of a part must come into the list above (and into what is counted)."""
    known: dict[type, set[str]] = {
        TextPart: {"text", "mark", "extra"},
        ImagePart: {"url", "data", "media_type", "detail", "mark", "extra"},
        ToolCallPart: {"id", "name", "arguments", "mark", "extra"},
        ToolResultPart: {"id", "content", "is_error", "mark", "extra"},
        ReasoningPart: {"text", "raw", "provider", "model"},
        OpaquePart: {"dialect", "raw", "mark"},
        Message: {"role", "parts", "name", "extra"},
        Tool: {"name", "description", "parameters", "strict", "mark", "dialect", "raw", "extra"},
        ResponseFormat: {"kind", "schema", "name", "strict", "description", "model"},
    }
    for kind, names in known.items():
        assert {f.name for f in fields(kind)} <= names, kind


# -- no bound


def block(raw: dict[str, Any], dialect: Any = "messages") -> Request:
    return asked(user(OpaquePart(dialect=dialect, raw=raw)))


def own_tool(kind: str, dialect: Any = "messages") -> Request:
    return ask(tools=(Tool(name=kind, dialect=dialect, raw={"type": kind, "name": kind}),), max_output_tokens=10)


UNBOUNDED: list[tuple[str, Request, str]] = [
    ("chat", asked(user(ImagePart(url="https://x/y.png"))), "image"),
    ("messages", asked(user(ToolResultPart(id="i", content=(ImagePart(url="https://x/y.png"),)))), "image"),
    ("messages", block({"type": "image", "source": {"type": "file", "file_id": "f"}}), "image"),
    ("responses", block({"type": "input_image", "file_id": "f"}, "responses"), "image"),
    ("messages", block({"type": "document", "source": {"type": "url", "url": "https://x/y.pdf"}}), "document"),
    ("messages", block({"type": "document", "source": {"type": "base64", "data": "JVBE"}}), "document"),
    (
        "messages",
        block({"type": "tool_result", "tool_use_id": "i", "content": [{"type": "document", "source": {"type": "file"}}]}),
        "document",
    ),
    (
        "messages",
        block({"type": "document", "source": {"type": "content", "content": [{"type": "image", "source": {"type": "url"}}]}}),
        "image",
    ),
    ("messages", block({"type": "container_upload", "file_id": "f"}), "file"),
    ("responses", block({"type": "input_file", "file_id": "f"}, "responses"), "file"),
    ("chat", block({"type": "file", "file": {"file_data": "x"}}, "chat"), "file"),
    ("chat", block({"type": "input_audio", "input_audio": {"data": "x"}}, "chat"), "sound"),
    ("chat", asked(assistant(TextPart(text="x"), extra={"audio": {"id": "a"}})), "sound"),
    ("chat", block({"type": "video_url", "video_url": {"url": "x"}}, "chat"), "film"),
    ("responses", block({"id": "item_1"}, "responses"), "stored item"),
    ("responses", block({"type": "item_reference", "id": "item_1"}, "responses"), "stored item"),
    ("messages", own_tool("web_search_20250305"), "web_search_20250305 runs at the vendor"),
    ("messages", own_tool("code_execution_20250825"), "runs at the vendor"),
    ("responses", own_tool("file_search", "responses"), "runs at the vendor"),
    ("responses", ask(max_output_tokens=10, passthrough={"openai": {"previous_response_id": "r"}}), "previous_response_id"),
    ("responses", ask(max_output_tokens=10, extra={"b": {"conversation": "c"}}), "conversation"),
    ("chat", ask(max_output_tokens=10, passthrough={"openai": {"web_search_options": {"a": 1}}}), "web_search_options"),
    ("chat", ask(max_output_tokens=10, extra={"b": {"search_parameters": {"mode": "on"}}}), "search_parameters"),
    ("chat", ask(max_output_tokens=10, extra={"b": {"models": ["dear"]}}), "other models"),
    ("messages", ask(max_output_tokens=10, passthrough={"anthropic": {"container": "c"}}), "container"),
    ("chat", ask(), "max_output_tokens"),
    ("responses", ask(), "max_output_tokens"),
]


@pytest.mark.parametrize(("api", "request_", "why"), UNBOUNDED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_only_named_has_no_bound_and_says_why(api: str, request_: Request, why: str) -> None:
    found = estimate(api, request_)
    assert found.tokens.worst_input is None
    assert why in "; ".join(found.unbounded)
    assert found.tokens.input is not None  # what is likely is known all the same


def test_what_is_sent_whole_has_a_bound() -> None:
    picture = {"type": "image", "source": {"type": "base64", "data": "QUJD"}}
    results = {"type": "tool_result", "tool_use_id": "i", "content": [picture, {"type": "text", "text": "https://x/y.png"}]}
    for request in (
        block(results),
        own_tool("bash_20250124"),
        own_tool("text_editor_20250728"),
        asked(user(OpaquePart(dialect="messages", raw={"type": "server_tool_use", "id": "i", "input": {"type": "file"}}))),
    ):
        assert estimate("messages", request).tokens.worst_input is not None
    pictures = (estimate("messages", block(r)).tokens.worst_input for r in (results, {**results, "content": [picture] * 2}))
    one, two = pictures
    assert one is not None
    assert two is not None
    assert two > one + 10_000
    screen = {
        "type": "computer_call_output",
        "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,QQ"},
    }
    for raw in (screen, {"type": "input_image", "image_url": "data:image/png;base64,QQ"}):
        assert estimate("responses", block(raw, "responses")).tokens.worst_input is not None
    inline = asked(
        user(ImagePart(url="data:image/svg+xml,x")), tools=(Tool(name="t", dialect="responses", raw={"type": "custom"}),)
    )
    assert estimate("responses", inline).tokens.worst_input is not None


# -- output


@pytest.mark.parametrize(
    ("api", "asked_for", "extra", "options", "sent", "most"),
    [
        ("chat", 10, {}, {}, {"max_completion_tokens": 10}, 10),
        ("chat", 10, {"max_completion_tokens": 50_000}, {}, {"max_completion_tokens": 50_000}, 50_000),
        ("chat", 10, {"max_tokens": 50_000}, {}, {"max_tokens": 50_000}, 50_000),
        ("chat", 10, {"n": 10}, {}, {"max_completion_tokens": 10}, 100),
        ("chat", 5_000, {}, {"max_output": 100}, {"max_completion_tokens": 100}, 100),
        ("chat", None, {}, {"max_output": 100}, {"max_completion_tokens": 100}, 100),
        ("chat", 5, {"max_tokens": 500, "n": 2}, {"max_output": 100}, {"max_tokens": 100}, 200),
        ("chat", None, {}, {}, {}, None),
        ("responses", 10, {"max_output_tokens": 500}, {}, {"max_output_tokens": 500}, 500),
        ("responses", 5_000, {}, {"max_output": 100}, {"max_output_tokens": 100}, 100),
        ("messages", 10, {"max_tokens": 500}, {}, {"max_tokens": 500}, 500),
        ("messages", None, {}, {}, {"max_tokens": 4096}, 4096),
        ("messages", None, {}, {"max_output": 64}, {"max_tokens": 64}, 64),
    ],
)
def test_the_output_is_bounded_by_what_the_body_says(
    api: str, asked_for: int | None, extra: dict[str, Any], options: dict[str, Any], sent: dict[str, int], most: int | None
) -> None:
    request = ask(max_output_tokens=asked_for, extra={"b": extra})
    found = estimate(api, request, **options)
    body = json.loads(backend(api, **options).wire(request, PLAN).body)
    assert {key: value for key, value in body.items() if key.startswith("max_")} == sent
    assert found.output_max == most
    assert (found.tokens.worst_input is None) == (most is None)


def test_what_was_predicted_and_did_not_come_is_billed_as_output() -> None:
    body = {"model": "b", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 10}
    request = request_from_body({**body, "prediction": {"type": "content", "content": LONG}})
    assert (estimate("chat", request).output_max or 0) > BYTES


@pytest.mark.parametrize("key", ["model", "messages", "input", "system", "instructions", "tools", "functions"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_what_was_checked_and_priced_is_not_changed_afterwards(api: str, key: str) -> None:
    request = ask(max_output_tokens=10, extra={"b": {key: "dear"}})
    for use in (backend(api).check, lambda r: estimate(api, r), lambda r: backend(api).wire(r, PLAN)):
        with pytest.raises(InputError) as caught:
            use(request)
        assert caught.value.field == f"extra.b.{key}"
    assert not backend(api).check(ask(extra={"other": {key: "dear"}}))


@pytest.mark.parametrize(
    ("key", "value"), [("max_tokens", 0), ("max_tokens", None), ("max_output_tokens", "9"), ("n", 0), ("n", True)]
)
def test_a_limit_that_is_none_is_refused(key: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        backend("chat").check(ask(extra={"b": {key: value}}))
    assert caught.value.field == f"extra.b.{key}"


# -- tiers


@pytest.mark.parametrize(
    ("api", "said", "billing"),
    [
        ("responses", {"passthrough": {"openai": {"service_tier": "priority"}}}, {"service_tier": "priority"}),
        ("chat", {"extra": {"b": {"service_tier": "flex"}}}, {"service_tier": "flex"}),
        ("messages", {"passthrough": {"anthropic": {"speed": "fast"}}}, {"speed": "fast"}),
        ("messages", {"passthrough": {"openai": {"service_tier": "priority"}}}, None),
        ("chat", {}, None),
    ],
)
def test_the_tier_that_is_asked_for_is_told(api: str, said: dict[str, Any], billing: dict[str, str] | None) -> None:
    found = estimate(api, ask(max_output_tokens=1_000, **said))
    assert found.billing == billing
    if billing == {"service_tier": "priority"}:
        rates = backend(api).rates
        assert rates is not None
        asked_for = rates.worst(input_tokens=100, output_tokens=1_000, billing=billing)
        standard = rates.worst(input_tokens=100, output_tokens=1_000)
        assert (asked_for or Decimal(0)) > (standard or Decimal(0))


def test_a_cache_switched_off_stays_off_whatever_extra_says() -> None:
    request = build_request("x", cache="off", extra={"b": {"cache_control": {"type": "ephemeral"}}})
    rendered = backend("messages").render(request, Plan(backend="b", drop_marks=True))
    assert "cache_control" not in rendered.body
    assert rendered.warnings == ('cache_control was left out: cache="off"',)
