"""What is remembered changes nothing: a request read with a memory is the one read without, in every respect."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachespec.backends.anthropic import AnthropicBackend
from cachespec.backends.openai import OpenAIBackend
from cachespec.decision import Plan
from cachespec.errors import InputError
from cachespec.messages import CacheMark, ImagePart, Message, ReasoningPart, TextPart, Tool, ToolResultPart
from cachespec.prompt import build_prompt
from cachespec.recall import Recall, Seen, trace
from cachespec.request import Memory, Request, build_request

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
HI = {"role": "user", "content": "Hi"}


def exactly(value: Any) -> Any:
    """A value in a form in which only what is the same in every respect is equal: types, order of keys, signs of zeros."""
    if isinstance(value, dict):
        return (dict, [(key, exactly(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list, [exactly(item) for item in value])
    if hasattr(value, "__dataclass_fields__"):
        return (type(value), [(name, exactly(getattr(value, name))) for name in value.__dataclass_fields__])
    return (type(value), repr(value))


def outcome(memory: Memory | None, **arguments: Any) -> Any:
    """The request, its prompt, and what backends say of it; or the error."""
    try:
        request = build_request(memory=memory, **arguments)
    except InputError as error:
        return str(error)
    prompt = build_prompt(request)
    found = [exactly(request), exactly(prompt.segments), prompt.size, prompt.images]
    for backend in BACKENDS:
        try:
            found += [tuple(backend.check(request)), backend.estimate(prompt), backend.render(request, Plan(backend="b")).body]
        except Exception as error:  # which error it is, is part of the outcome
            found.append(f"{type(error).__name__}: {error}")
    return found


BACKENDS = (
    AnthropicBackend(name="b", model="claude-sonnet-4-5", api_key="k"),
    OpenAIBackend(name="b", model="gpt-4.1", api_key="k"),
    OpenAIBackend(name="b", model="gpt-4.1", api_key="k", api="chat"),
)

texts = st.text(max_size=6) | st.sampled_from(["", "a", "\ud800", "é", "same"])
numbers = st.sampled_from([0, 1, True, False, 1.0, 0.0, -0.0, 10**700, 2**64, float("nan"), float("inf"), 1e300])
values = st.recursive(
    st.none() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
marks = st.sampled_from([{}, {"cache_control": {"type": "ephemeral"}}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}])
parts = st.one_of(
    st.builds(lambda text, mark: {"type": "text", "text": text, **mark}, texts, marks),
    st.builds(lambda data: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}, texts),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, st.sampled_from(["u", "data:image/png;base64,AA"])),
    st.builds(
        lambda text, flag: {"type": "tool_result", "tool_use_id": "1", "content": text, "is_error": flag}, texts, numbers
    ),
    st.builds(lambda value: {"type": "tool_use", "id": "1", "name": "f", "input": {"v": value}}, values),
    st.builds(lambda value: {"type": "document", "source": value}, values),
    st.builds(lambda value: {"type": "thinking", "thinking": "t", "signature": value}, values),
    st.builds(lambda kind: {"type": kind}, values),
)
messages = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant", "system"]), texts),
    st.builds(lambda text, role: {"content": text, "role": role}, texts, st.sampled_from(["user", "assistant", "tool"])),
    st.builds(
        lambda role, some: {"role": role, "content": some}, st.sampled_from(["user", "assistant"]), st.lists(parts, max_size=3)
    ),
    st.builds(lambda text, i: {"role": "tool", "content": text, "tool_call_id": i}, texts, st.sampled_from(["1", "2", ""])),
    st.builds(lambda name, text: {"role": "user", "name": name, "content": text}, texts, texts),
    st.builds(
        lambda some: Message(role="user", parts=(TextPart(text="x", extra=some),)), st.dictionaries(st.just("a"), values)
    ),
    st.builds(lambda text: {"role": "user", "content": text, "phase": None}, texts),
)
tools = st.one_of(
    st.builds(lambda name, schema, mark: {"name": name, "input_schema": schema, **mark}, st.sampled_from("fg"), values, marks),
    st.builds(
        lambda name, schema: {"type": "function", "function": {"name": name, "parameters": {"a": schema}}},
        st.sampled_from("fgh"),
        values,
    ),
    st.builds(lambda value: {"type": "web_search_20250305", "name": "web_search", "max_uses": value}, values),
)
arguments = st.fixed_dictionaries(
    {"messages": st.lists(messages, min_size=1, max_size=5), "tools": st.lists(tools, max_size=3)},
    optional={
        "system": texts | st.lists(st.builds(lambda t, m: {"type": "text", "text": t, **m}, texts, marks), max_size=2),
        "response_format": values.map(lambda value: {"type": "object", "properties": {"a": value}}),
    },
)


@settings(max_examples=300, deadline=None)
@given(st.lists(arguments, min_size=2, max_size=5), st.data())
def test_a_memory_changes_nothing(several: list[dict[str, Any]], data: st.DataObject) -> None:
    """Requests that share some of their items, in any order, each also in an equal copy and mixed with one another."""
    memory = Memory()
    for _ in range(4):
        one, other = data.draw(st.sampled_from(several)), data.draw(st.sampled_from(several))
        cut = data.draw(st.integers(0, len(one["messages"])))
        mixed = {**one, "messages": one["messages"][:cut] + other["messages"], "tools": one["tools"] or other["tools"]}
        for asked in (one, mixed, copy.deepcopy(mixed)):
            assert outcome(memory, **asked) == outcome(None, **copy.deepcopy(asked))


def tool(value: Any) -> dict[str, Any]:
    return {"name": "f", "input_schema": {"type": "object", "default": value}}


TWINS: list[tuple[Any, Any]] = [
    (True, 1),
    (1, 1.0),
    (0.0, -0.0),
    (False, 0),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ([True], [1]),
    (None, False),
    ("1", 1),
    (2**64, float(2**64)),
    ("é", "e\u0301"),
    ([], {}),
]


@pytest.mark.parametrize(("one", "other"), TWINS, ids=repr)
@pytest.mark.parametrize("where", ["tools", "message", "part", "own"])
def test_what_python_calls_equal_is_told_apart(one: Any, other: Any, where: str) -> None:
    def asked(value: Any) -> dict[str, Any]:
        if where == "tools":
            return {"messages": [HI], "tools": [tool(value)]}
        if where == "message":
            return {"messages": [HI, {"role": "assistant", "content": "x", "annotations": [value]}, HI]}
        if where == "part":
            big = {"type": "document", "source": {"type": "text", "data": "x", "v": value}}
            return {"messages": [{"role": "user", "content": [big]}]}
        return {"messages": [Message(role="user", parts=(TextPart(text="x", extra={"v": value}),))]}

    memory = Memory()
    for value in (one, other, one, other):
        assert outcome(memory, **asked(value)) == outcome(None, **asked(value))
    assert exactly(build_request(memory=memory, **asked(one))) != exactly(build_request(memory=memory, **asked(other)))


def test_equal_copies_are_recognised_and_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    history: list[dict[str, Any]] = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(6)]
    first = build_request(messages=copy.deepcopy(history), tools=[tool(1)], system="s", memory=memory)
    build_prompt(first)
    hashed: list[bytes] = []

    def counted(data: bytes, *, digest_size: int) -> Any:
        hashed.append(data)
        return blake2b(data, digest_size=digest_size)

    monkeypatch.setattr("cachespec.prompt.blake2b", counted)
    second = build_request(
        messages=[*copy.deepcopy(history), HI], tools=json.loads(json.dumps([tool(1)])), system="s", memory=memory
    )
    assert [new is old for new, old in zip(second.messages, first.messages, strict=False)] == [True] * 6
    assert second.tools[0] is first.tools[0]
    prompt = build_prompt(second)
    assert len(hashed) == 2  # the parameters, and the new message
    assert prompt.segments[:-1] == build_prompt(first).segments
    build_request(messages=[*history[:3], HI], memory=memory)
    forked = build_request(messages=[*copy.deepcopy(history[:3]), HI, HI], memory=memory)
    assert forked.messages[2] is first.messages[2]


def test_changing_what_was_given_changes_nothing_that_was_read() -> None:
    memory = Memory()
    given = [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "a"}}]}]
    offered = [tool({"a": [1]})]
    own = Message(role="assistant", parts=(ReasoningPart(text="", raw={"type": "thinking", "n": [1]}),))
    before = outcome(None, messages=copy.deepcopy([*given, own, HI]), tools=copy.deepcopy(offered))
    first = build_request(messages=[*given, own, HI], tools=offered, memory=memory)
    exact = exactly(first)
    given[0]["content"][0]["source"]["data"] = "b"  # type: ignore[index]
    offered[0]["input_schema"]["default"]["a"].append(2)
    own.parts[0].raw["n"].append(2)  # type: ignore[union-attr, index]
    assert exactly(first) == exact
    changed = outcome(memory, messages=[*given, own, HI], tools=offered)
    assert changed == outcome(None, messages=copy.deepcopy([*given, own, HI]), tools=copy.deepcopy(offered))
    assert changed != before
    given[0]["content"][0]["source"]["data"] = "a"  # type: ignore[index]
    offered[0]["input_schema"]["default"]["a"].pop()
    own.parts[0].raw["n"].pop()  # type: ignore[union-attr, index]
    assert outcome(memory, messages=[*given, own, HI], tools=offered) == before


class Text(str):
    """Text that may be anything."""

    __slots__ = ()


class Odd:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "item",
    [
        MappingProxyType(HI),
        OrderedDict(HI),
        {"role": Text("user"), "content": "Hi"},
        {"role": "user", "content": Text("Hi")},
        {"role": "user", "content": [OrderedDict(type="text", text="Hi")]},
        Message(role="user", parts=(TextPart(text=Text("Hi")),)),
        Message(role="user", parts=(TextPart(text="Hi", extra=MappingProxyType({"a": 1})),)),
    ],
    ids=repr,
)
def test_what_no_key_holds_is_read_each_time(item: Any) -> None:
    memory = Memory()
    for _ in range(2):
        request = build_request(messages=[HI, item, HI], memory=memory)
        assert not isinstance(request.messages, Seen)
        assert exactly(request) == exactly(build_request(messages=[HI, item, HI]))


@pytest.mark.parametrize("item", [{"role": "user", "content": Odd()}, {"role": Odd(), "content": "Hi"}, Odd(), None, 1])
def test_an_object_that_equals_everything_is_not_taken_for_what_is_known(item: Any) -> None:
    memory = Memory()
    build_request(messages=[HI, HI], memory=memory)
    with pytest.raises(InputError, match=r"messages\[1\]"):
        build_request(messages=[HI, item], memory=memory)


def test_items_that_contain_themselves_are_refused_as_ever() -> None:
    loop: dict[str, Any] = {"role": "user", "content": [{"type": "document"}]}
    loop["content"][0]["source"] = loop
    within: list[Any] = [{"type": "tool_result", "tool_use_id": "1"}]
    within[0]["content"] = within
    for message in (loop, {"role": "user", "content": within}):
        with pytest.raises((InputError, RecursionError)):
            build_request(messages=[message], memory=Memory())


def test_errors_name_the_place_and_leave_nothing_behind() -> None:
    memory = Memory()
    good = [HI, {"role": "assistant", "content": "x"}]
    build_request(messages=good, memory=memory)
    for _ in range(2):
        with pytest.raises(InputError, match=r"messages\[2\]\.role"):
            build_request(messages=[*good, {"role": "nobody", "content": "x"}], memory=memory)
        with pytest.raises(InputError, match=r"tools\[1\].*there already, as tools\[0\]"):
            build_request(messages=good, tools=[tool(1), tool(2)], memory=memory)
        with pytest.raises(InputError, match="nothing but system"):
            build_request(messages=[{"role": "system", "content": "s"}], memory=memory)
        build_request(messages=[{"role": "system", "content": "s"}, *good], memory=memory)


def test_a_system_message_that_is_hoisted_stays_so_in_every_continuation() -> None:
    memory = Memory()
    system = {"role": "system", "content": "s"}
    for asked in (
        [system, HI],
        [system, HI, system],
        [system, system, HI],
        [system, {"role": "user", "content": "x"}],
        [HI, system],
    ):
        assert exactly(build_request(messages=asked, memory=memory)) == exactly(build_request(messages=asked))


def test_the_same_items_read_as_different_dialects_are_different() -> None:
    recall: Recall[str] = Recall(most_bytes=10_000_000, weight=1)
    for salt in ("a", "b", "a"):
        assert recall.read([HI], lambda i, salt=salt: f"{salt}{i}", salt=salt)[1] == (f"{salt}0",)  # type: ignore[misc]


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    recall: Recall[int] = Recall(most_bytes=100_000, weight=1)
    reads: list[int] = []

    def ask(n: int) -> None:
        def read(i: int) -> int:
            reads.append(n)
            return i

        recall.read([{"role": "user", "content": f"{n:05}"}, {"role": "user", "content": "x" * 1000}], read)

    for n in range(1000):
        ask(n)
        ask(0)
    assert reads.count(0) == 2
    assert len(recall._index) < 100
    assert len(recall._runs) * 2 == len(recall._index)
    assert recall._bytes <= 100_000
    reads.clear()
    ask(500)
    assert reads == [500, 500]


def test_one_that_is_larger_than_all_memory_is_read_and_not_kept() -> None:
    recall: Recall[int] = Recall(most_bytes=10_000, weight=1)
    for _ in range(2):
        skipped, values = recall.read([{"role": "user", "content": "x" * 20_000}, HI], lambda i: i)
        assert (skipped, values) == ((), (0, 1))
        assert trace(values, lambda state, value: (state + value, [value]), 0) == (1, [0, 1])
    assert (recall._bytes, recall._index) == (0, {})


def test_a_trace_goes_along_new_values_only() -> None:
    recall: Recall[int] = Recall(most_bytes=10_000_000, weight=1)
    stepped: list[int] = []

    def step(state: int, value: int) -> tuple[int, list[str]]:
        stepped.append(value)
        return state + value, [str(value)] * value

    def along(count: int, last: str = "") -> tuple[int, list[str]]:
        given = [{"role": "user", "content": f"{i}{last if i == count - 1 else ''}"} for i in range(count)]
        state, pieces = trace(recall.read(given, lambda i: i)[1], step, 0)
        return state, list(pieces)

    assert along(3) == (3, ["1", "2", "2"])
    assert along(4) == (6, ["1", "2", "2", "3", "3", "3"])
    assert along(2) == (1, ["1"])
    assert along(3, "other") == (3, ["1", "2", "2"])
    assert along(3) == (3, ["1", "2", "2"])
    assert stepped == [0, 1, 2, 3, 2]


def test_traces_of_many_beginnings_are_bounded() -> None:
    memory = Memory()
    for i in range(100):
        form = {"type": "object", "properties": {f"p{i}": {}}}
        request = build_request(messages=[HI], tools=[tool(1)], response_format=form, memory=memory)
        plain = build_request(messages=[HI], tools=[tool(1)], response_format=form)
        assert build_prompt(request).segments == build_prompt(plain).segments
    assert isinstance(request.tools, Seen)
    assert len(request.tools.run.traces) <= 64


def test_what_is_handed_out_is_a_tuple_like_any_other() -> None:
    request = build_request(messages=[HI, HI], tools=[tool(1)], memory=Memory())
    assert request == build_request(messages=[HI, HI], tools=[tool(1)])
    for copied in (copy.deepcopy(request), pickle.loads(pickle.dumps(request)), copy.copy(request)):  # noqa: S301
        assert copied == request
        assert build_prompt(copied).digest == build_prompt(request).digest
    assert type(copy.deepcopy(request).messages) is tuple
    shorter = replace(request, messages=request.messages[:1], tools=())
    assert build_prompt(shorter).digest == build_prompt(build_request("Hi")).digest
    assert repr(request.messages) == repr(tuple(request.messages))


def test_many_threads_read_the_same() -> None:
    memory = Memory()
    history = [{"role": "user", "content": f"turn {i}"} for i in range(40)]
    want = {n: build_prompt(build_request(messages=history[:n])).digest for n in range(1, 41)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        for k in range(200):
            n = (seed * 7 + k * 11) % 40 + 1
            request = build_request(messages=copy.deepcopy(history[:n]), memory=memory)
            if build_prompt(request).digest != want[n]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_values_of_our_own_are_recognised_by_content() -> None:
    memory = Memory()
    image = ImagePart(data="x" * 100, media_type="image/png", mark=CacheMark(dialect="anthropic", fields={"type": "ephemeral"}))

    def history() -> list[Any]:
        result = ToolResultPart(id="1", content=(TextPart(text="t"), copy.deepcopy(image)))
        return [Message(role="user", parts=(result,)), Message(role="assistant", parts=()), HI]

    first, second = (build_request(messages=history(), tools=[Tool(name="f")], memory=memory) for _ in range(2))
    assert all(new is old for new, old in zip(second.messages, first.messages, strict=True))
    assert second.tools[0] is first.tools[0]


@pytest.mark.shared
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_real_tools_are_the_same_with_a_memory(dialect: str) -> None:
    path = DATA / "tools" / f"github_mcp_{dialect}.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    text = path.read_text()
    memory = Memory()
    for _ in range(3):
        request = build_request(messages=[HI], tools=json.loads(text), memory=memory)
        assert exactly(request) == exactly(build_request(messages=[HI], tools=json.loads(text)))
    assert isinstance(request, Request)
    assert len(request.tools) == 117


def test_a_request_that_was_not_read_with_a_memory_is_recognised() -> None:
    memory = Memory()
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}}}
    said = [HI, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "Go on."}]
    first = memory.known(build_request(messages=said[:1], tools=[tool], system="Be brief."))
    whole = build_request(messages=said, tools=[tool], system="Be brief.")
    known = memory.known(whole)
    assert exactly(known) == exactly(whole)
    assert known.messages[0] is first.messages[0]
    assert known.tools[0] is first.tools[0]
    assert build_prompt(known).segments == build_prompt(whole).segments
    assert memory.known(known) is known


def test_what_a_caller_changes_later_is_not_in_what_was_recognised() -> None:
    memory = Memory()
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    request = replace(build_request("Hi"), tools=(Tool(name="look", description=None, parameters=schema),))
    known = memory.known(request)
    schema["properties"]["q"] = {"type": "string"}
    assert known.tools[0].parameters == {"type": "object", "properties": {}}
    assert memory.known(request).tools[0].parameters == schema


def test_a_request_with_what_has_no_key_stays_as_it_is() -> None:
    request = replace(build_request("Hi"), tools=(Tool(name="look", description=None, parameters=MappingProxyType({})),))
    known = Memory().known(request)
    assert known.tools is request.tools
    assert known == request
