"""The caller's own cache marks: sets that a vendor refuses are refused here, and marks that must not be sent are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.backends.hosted_support import PLAN

from cachespec.backends._hosted import HostedBackend
from cachespec.backends._marks import unheard_marks
from cachespec.backends.anthropic import AnthropicBackend
from cachespec.backends.compatible import compatible
from cachespec.backends.openai import OpenAIBackend
from cachespec.decision import Plan
from cachespec.errors import InputError
from cachespec.request import Request, build_request

CLAUDE = AnthropicBackend(name="b", model="claude-opus-5-5", api_key="k")
GPT = OpenAIBackend(name="b", model="gpt-6-astra", api_key="k")
ROUTER = compatible(name="b", server="openrouter", model="anthropic/claude-opus-5-5", api_key="k")
LOCAL = compatible(name="b", server="vllm", model="q", api="messages")
OFF = Plan(backend="b", drop_marks=True)


def mark(ttl: str | None = None) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}}


def texts(*ttls: str | None) -> list[dict[str, Any]]:
    return [{"type": "text", "text": f"p{i}", **mark(ttl)} for i, ttl in enumerate(ttls)]


def text_marked(**fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": "p", "cache_control": fields}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def asked(*messages: Any, **fields: Any) -> Request:
    return build_request(messages=[*messages] or [user({"type": "text", "text": "x"})], **fields)


def used(*content: Any) -> list[Any]:
    """A tool call and its result."""
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "t", "input": {}}]}
    return [
        user({"type": "text", "text": "x"}),
        call,
        user({"type": "tool_result", "tool_use_id": "1", "content": list(content)}),
    ]


def thinking(kind: str = "thinking", **more: Any) -> list[Any]:
    block = {"type": kind, "thinking": "hm", "signature": "s"} if kind == "thinking" else {"type": kind, "data": "d"}
    said = {"role": "assistant", "content": [{**block, **more}, {"type": "text", "text": "y"}]}
    return [user({"type": "text", "text": "x"}), said, user({"type": "text", "text": "z"})]


TOOL = {"name": "t", "input_schema": {"type": "object"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
ILLEGAL: list[tuple[Request, str]] = [
    (asked(user(*texts(None, None, None, None, None))), "messages[0][4].cache_control"),
    (asked(user(*texts(None, None)), tools=[{**TOOL, **mark()}], system=texts(None, None)), "messages[0][1].cache_control"),
    (
        asked(*used(*texts(None, None, None), {**DOCUMENT, **mark()}, {**DOCUMENT, **mark()})),
        "messages[2][0].content[4].cache_control",
    ),
    (asked(user(*texts("1h")), system=texts("5m")), "messages[0][0].cache_control"),
    (asked(user(*texts("1h")), system=texts(None)), "messages[0][0].cache_control"),
    (asked(user(*texts("1h")), tools=[{**TOOL, **mark("5m")}]), "messages[0][0].cache_control"),
    (asked(*used({**DOCUMENT, **mark("5m")}, *texts("1h"))), "messages[2][0].content[1].cache_control"),
    (asked(user({"type": "text", "text": "", **mark()}, {"type": "text", "text": "x"})), "messages[0][0].cache_control"),
    (asked(user({"type": "text", "text": " \n\t", **mark()}, {"type": "text", "text": "x"})), "messages[0][0].cache_control"),
    (asked(*used({"type": "text", "text": " ", **mark()}, DOCUMENT)), "messages[2][0].content[0].cache_control"),
    (asked(*thinking(**mark())), "messages[1][0].cache_control"),
    (asked(*thinking("redacted_thinking", **mark())), "messages[1][0].cache_control"),
    (asked(user(*texts("9y"))), "messages[0][0].cache_control.ttl"),
    (
        asked(user({"type": "text", "text": "p", "cache_control": {"type": "ephemeral", "ttl": {"x": 1}}})),
        "messages[0][0].cache_control.ttl",
    ),
    (asked(user({"type": "text", "text": "p", "cache_control": {"ttl": "5m"}})), "messages[0][0].cache_control"),
    (asked(user(*texts(None, None, None, None), {"type": "text", "text": "x"}), extra={"b": mark()}), "cache_control"),
    (asked(user(*texts("5m")), extra={"b": mark("1h")}), "cache_control"),
    (asked(user(*texts("5m"), {"type": "text", "text": "x"}), extra={"b": mark("1h")}), "cache_control"),
    (asked(extra={"b": {"cache_control": "ephemeral"}}), "cache_control"),
    (asked(extra={"b": mark("30m")}), "cache_control.ttl"),
]


@pytest.mark.parametrize(("request_", "field"), ILLEGAL, ids=[str(i) for i in range(len(ILLEGAL))])
def test_an_illegal_set_is_an_input_error_before_anything_is_sent(request_: Request, field: str) -> None:
    for use in (CLAUDE.check, lambda r: CLAUDE.wire(r, PLAN)):
        with pytest.raises(InputError) as caught:
            use(request_)
        assert caught.value.field == field


LEGAL = [
    asked(user(*texts(None, None, None, None))),
    asked(user(*texts("1h", "1h", None, "5m"))),
    asked(user(*texts("1h", "5m", "5m"), {"type": "text", "text": "x"}), extra={"b": mark()}),
    asked(user(*texts(None, None, None, None)), extra={"b": mark()}),  # on the last block, where there is one: no fifth
    asked(user(*texts(None)), system=texts("1h"), tools=[{**TOOL, **mark("1h")}]),
    asked(*used({**DOCUMENT, **mark()}, *texts(None))),
    asked(*thinking()),
    asked(user(text_marked(type="ephemeral", scope="new"))),
    asked(user({"type": "text", "text": ""}, *texts(None))),
    asked(*used({"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]})),
]


@pytest.mark.parametrize("request_", LEGAL, ids=[str(i) for i in range(len(LEGAL))])
def test_a_legal_set_passes(request_: Request) -> None:
    assert not CLAUDE.check(request_)


@pytest.mark.parametrize(("request_", "field"), ILLEGAL, ids=[str(i) for i in range(len(ILLEGAL))])
def test_marks_that_are_not_sent_are_not_judged(request_: Request, field: str) -> None:
    """Where a server has no such marks, and where the caller switched the cache off."""
    if not request_.extra:
        for other in (GPT, LOCAL):
            try:
                other.check(request_)
            except InputError as error:  # pragma: no cover - what is tested is that it is not raised
                pytest.fail(f"{other.model}: {error}")
    for cache in ("off", "no-write"):
        request = build_request(
            messages=request_.messages, tools=request_.tools, system=request_.system, cache=cache, extra=request_.extra
        )
        assert not CLAUDE.check(request)
        assert "cache_control" not in CLAUDE.wire(request, OFF).body


def test_openais_marks_are_judged_by_their_values() -> None:
    def marked(**fields: Any) -> Request:
        part = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": fields}
        return asked(user(*[part] * 6))

    assert not GPT.check(marked(mode="explicit", ttl="12h", new=1))
    for fields, at in (({"mode": "implicit"}, ""), ({}, ""), ({"mode": "explicit", "ttl": "1h"}, ".ttl")):
        with pytest.raises(InputError) as caught:
            GPT.check(marked(**fields))
        assert caught.value.field == f"messages[0][0].prompt_cache_breakpoint{at}"


def test_anthropics_marks_elsewhere_follow_its_rules() -> None:
    with pytest.raises(InputError, match="at most 4"):
        ROUTER.check(asked(user(*texts(*[None] * 5))))
    assert not ROUTER.check(asked(user(*texts("1h")), tools=[{**TOOL, **mark()}]))  # Chat has no place for a tool's mark


# -- marks that must not be sent

NESTED = [*used({**DOCUMENT, **mark()}, *texts(None)), *thinking()[1:]]


def test_a_cache_switched_off_leaves_no_mark_however_deep() -> None:
    request = asked(*NESTED, cache="off")
    sent = CLAUDE.wire(request, OFF).body
    assert "cache_control" not in sent
    assert json.loads(sent)["messages"][2]["content"][0]["content"] == [DOCUMENT, {"type": "text", "text": "p0"}]
    assert sent.replace(" ", "") == CLAUDE.wire(asked(*_without(NESTED)), PLAN).body.replace(" ", "")
    marked_thought = asked(*thinking(**mark()), cache="off")
    assert CLAUDE.wire(marked_thought, OFF).body == CLAUDE.wire(asked(*thinking()), PLAN).body


def _without(messages: list[Any]) -> list[Any]:
    parsed: list[Any] = json.loads(json.dumps(messages).replace(', "cache_control": {"type": "ephemeral"}', ""))
    return parsed


def test_inner_marks_go_where_they_mean_something_and_are_told_of_where_they_do_not() -> None:
    request = asked(*NESTED)
    assert CLAUDE.wire(request, PLAN).body.count("cache_control") == 2
    rendered = LOCAL.render(request, PLAN)
    assert "cache_control" not in rendered.body
    assert any("cache marks inside messages[2][0]" in text for text in rendered.warnings)


def test_data_that_looks_like_a_mark_is_left_alone() -> None:
    call = {"type": "server_tool_use", "id": "s", "name": "n", "input": {"type": "x", "cache_control": {"type": "no"}}}
    request = asked(user({"type": "text", "text": "x"}), {"role": "assistant", "content": [call]}, user(*texts(None)))
    for backend, plan in ((CLAUDE, PLAN), (CLAUDE, OFF), (LOCAL, PLAN)):
        assert not _check(backend, request)
        assert json.loads(backend.wire(request, plan).body)["messages"][1]["content"][0] == call


def _check(backend: HostedBackend, request: Request) -> list[Any]:
    return list(backend.check(request))


def test_an_automatic_mark_is_one_on_the_last_block_that_may_have_one() -> None:
    top = {"extra": {"b": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}}}
    unmarkable: list[list[dict[str, Any]]] = [
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}],
        [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "d"}]}, user({"type": "text", "text": " "})],
        [{"role": "assistant", "content": ""}],
    ]
    for after in unmarkable:
        # The same mark twice is one: four and it are four.
        assert CLAUDE.check(asked(user(*texts(None, None, None, "5m")), *after, **top)) == []
        with pytest.raises(InputError, match="another ttl"):
            CLAUDE.check(asked(user(*texts("1h")), *after, **top))
        with pytest.raises(InputError, match="at most 4"):
            CLAUDE.check(asked(user(*texts(None, None, None, None), {"type": "text", "text": "z"}), *after, **top))
    nothing = build_request(" ", **top)  # type: ignore[arg-type]
    assert CLAUDE.check(nothing) == []


def test_b23_a_local_engine_tells_of_the_marks_that_mean_nothing_to_it() -> None:
    marked = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    system = [{"type": "text", "text": "s", **mark("1h")}]
    tools = [{"name": "t", "input_schema": {"type": "object"}, **mark()}]
    request = asked(user(marked), *used({"type": "text", "text": "r", **mark()})[1:], system=system, tools=tools)
    assert unheard_marks(request) == (
        "the cache mark at tools[0] was left out: cache_control means nothing to this backend",
        "the cache mark at system[0] was left out: cache_control means nothing to this backend",
        "the cache mark at messages[2][0].content[0] was left out: cache_control means nothing to this backend",
        "the cache mark at messages[0][0] was left out: prompt_cache_breakpoint means nothing to this backend",
    )
    assert unheard_marks(asked()) == ()
    assert unheard_marks(asked(user(marked), cache="off")) == ()
