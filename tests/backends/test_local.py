"""What every in-process backend does, on a runtime without a model: tools, refusals, the hand-over to an event loop."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import anyio.from_thread
import pytest
from tests.engine.scripted import ScriptedRuntime, engine_threads, forever, says, wait_until

from cachespec.backends._engine_attempt import EngineAttempt
from cachespec.backends._local import LocalBackend
from cachespec.backends._startup import EngineSettings
from cachespec.client import Client
from cachespec.decision import Plan
from cachespec.engine.loop import Engine
from cachespec.engine.runtimes.base import Interrupted, Runtime
from cachespec.errors import (
    ConfigError,
    EngineStoppedError,
    InputError,
    RequestRejectedError,
    RequestTimeoutError,
    StreamInterruptedError,
)
from cachespec.events import Event, Finished, TextDelta, ToolCallDelta
from cachespec.messages import CacheMark, Message, ReasoningPart, TextPart, Tool, ToolCallPart
from cachespec.prompt import build_prompt
from cachespec.request import Request, ResponseFormat, ToolChoice
from cachespec.testing import check_backend

pytestmark = pytest.mark.anyio
PLAN = Plan(backend="toy")
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"


def calling(before: str, after: str) -> str:
    """A template whose calls stand between these."""
    call = '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    calls = "{% for c in m.tool_calls or [] %}" + before + call + after + "{% endfor %}"
    return "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN.replace("{% endfor %}", calls + "{% endfor %}")


TOOLS = calling("<tool_call>", "</tool_call>")
TOOL = Tool(name="get_weather", parameters={"type": "object"})


class Toy(LocalBackend):
    def __init__(self, runtime: ScriptedRuntime, *, chunk: int = 128, deterministic: bool = False, **more: Any) -> None:
        options: dict[str, Any] = {
            "name": "toy",
            "context": runtime.info.context,
            "parallel": 1,
            "kv_tokens": None,
            "prefill_chunk": chunk,
            "max_gap": 4.0,
            "host_cache_mb": 0,
            "keep_warm": 60.0,
            "deterministic": deterministic,
            "draft": None,
            "acceptance": None,
        }
        super().__init__(EngineSettings(**{**options, **more}), model="toy", cost="0", reads_per_s=1e9, flops_per_s=1e9)
        self.runtime, self.loading_s = runtime, 0.0

    def load_draft(self, model: str, runtime: str | None) -> Runtime:
        raise ConfigError(f"{model} on {runtime} is not there", key="model")

    def load_runtime(self, progress: Callable[[float], bool]) -> ScriptedRuntime:
        end = time.monotonic() + self.loading_s
        while time.monotonic() < end:
            if not progress(0.5):
                raise Interrupted
            time.sleep(0.005)
        self.runtime.hand_over()
        return self.runtime


def toy(following: Callable[[Sequence[int]], int] = forever, *, template: str = PLAIN, **more: float) -> Toy:
    runtime = ScriptedRuntime(following, **more)  # type: ignore[arg-type]
    runtime.info = replace(runtime.info, chat_template=template)
    return Toy(runtime)


def ask(text: str = "hi", **more: object) -> Request:
    return replace(
        Request(messages=(Message(role="user", parts=(TextPart(text=text),)),), temperature=0, max_output_tokens=200),
        **more,  # type: ignore[arg-type]
    )


async def read(attempt: EngineAttempt) -> list[Event]:
    events: list[Event] = []
    with anyio.fail_after(30):
        while batch := await attempt.read():
            events += batch
    return events


@pytest.fixture
async def started() -> AsyncIterator[Callable[[Toy], object]]:
    open_: list[Toy] = []

    async def start(backend: Toy) -> Toy:
        open_.append(backend)
        await backend.start()
        return backend

    yield start
    for backend in open_:
        await backend.aclose()


def answer_after(request: Request, text: str) -> Toy:
    """A backend whose model says `text` to this request."""
    probe = toy(template=TOOLS)
    prompt = "".join(f"[{m.role}]{m.text}" for m in request.messages) + ">"
    size = len(prompt.encode())
    if request.tools and (request.tool_choice is None or request.tool_choice.mode != "none"):
        tool = '{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {"type": "object"}}}'
        size += len(f"[{tool}]")
    probe.runtime.following = says(text, after=size)
    return probe


async def test_a_tool_call_comes_as_one(started: Callable[[Toy], object]) -> None:
    arguments = '{"city" :"Zürich",  "n":1.50}'
    request = ask(tools=(TOOL,))
    said = f'One moment.\n<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    backend = await started(answer_after(request, said))  # type: ignore[misc]
    assert backend.capabilities.tools
    assert "tool_choice" in backend.capabilities.parameters
    assert backend.check(request) == []
    events = await read(await backend.open(request, PLAN, timeout=None))
    (call,) = [e for e in events if isinstance(e, ToolCallDelta)]
    assert (call.index, call.name, call.arguments) == (0, "get_weather", arguments)
    assert call.id
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "One moment."
    assert [e.reason for e in events if isinstance(e, Finished)] == ["tool_calls"]


@pytest.mark.parametrize("request_", [ask(), ask(tools=(TOOL,), tool_choice=ToolChoice(mode="none"))])
async def test_without_tools_a_call_is_text(started: Callable[[Toy], object], request_: Request) -> None:
    said = '<tool_call>{"name": "f"}</tool_call>'
    backend = await started(answer_after(request_, said))  # type: ignore[misc]
    events = await read(await backend.open(request_, PLAN, timeout=None))
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == said
    assert [e.reason for e in events if isinstance(e, Finished)] == ["stop"]


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"], "additionalProperties": False}


@pytest.mark.parametrize("choice", [ToolChoice(mode="required"), ToolChoice(mode="tool", name="get_weather")])
async def test_a_forced_call_follows_the_tool_s_schema(started: Callable[[Toy], object], choice: ToolChoice) -> None:
    pytest.importorskip("llguidance")
    backend = await started(toy(template=TOOLS))  # type: ignore[misc]
    tools = (Tool(name="get_weather", parameters=CITY), Tool(name="other", parameters={"type": "object"}))
    request = ask(tools=tools if choice.mode == "tool" else tools[:1], tool_choice=choice)
    assert backend.check(request) == []
    # The model wants letters for ever; the grammar has its way, blanks it may put in aside.
    events = await read(await backend.open(request, PLAN, timeout=None))
    (call,) = [e for e in events if isinstance(e, ToolCallDelta)]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert [e.reason for e in events if isinstance(e, Finished)] == ["tool_calls"]


@pytest.mark.parametrize(
    ("template", "more", "named"),
    [
        (TOOLS, {"tool_choice": ToolChoice(mode="auto", parallel=False)}, "parallel"),
        (TOOLS, {"response_format": ResponseFormat(kind="json")}, "no way to call tools"),
        (TOOLS, {"response_format": ResponseFormat(kind="json"), "tool_choice": ToolChoice(mode="required")}, "both"),
        (calling("[TOOL_CALLS][", "]"), {"tool_choice": ToolChoice(mode="required")}, "cannot be forced"),
    ],
)
async def test_what_cannot_be_forced_is_refused(
    started: Callable[[Toy], object], template: str, more: dict[str, Any], named: str
) -> None:
    pytest.importorskip("llguidance")
    backend = await started(toy(template=template))  # type: ignore[misc]
    (reason,) = backend.check(ask(tools=(TOOL,), **more))
    assert reason.code == "unsupported_parameter"
    assert named in reason.detail


async def test_a_schema_that_cannot_be_followed_is_refused(started: Callable[[Toy], object]) -> None:
    pytest.importorskip("llguidance")
    backend = await started(toy())  # type: ignore[misc]
    form = ResponseFormat(kind="schema", schema={"type": "object", "unevaluatedProperties": {"type": "string"}})
    (reason,) = backend.check(ask(response_format=form))
    assert (reason.code, "response_format" in reason.detail) == ("unsupported_parameter", True)


async def test_a_tool_whose_schema_cannot_be_followed_is_refused(started: Callable[[Toy], object]) -> None:
    pytest.importorskip("llguidance")
    backend = await started(toy(template=TOOLS))  # type: ignore[misc]
    tool = Tool(name="f", parameters={"type": "object", "properties": {"n": {"const": 2**65}}})
    (reason,) = backend.check(ask(tools=(tool,), tool_choice=ToolChoice(mode="required")))
    assert reason.code == "unsupported_parameter"
    assert "const 36893488147419103232" in reason.detail
    assert "tool_choice" in reason.detail
    assert "response_format" not in reason.detail
    assert backend.check(ask(tools=(tool,))) == []


async def test_without_the_library_for_grammars_forms_are_refused(
    started: Callable[[Toy], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachespec.backends._startup.find_spec", lambda name: None)
    backend = await started(toy(template=TOOLS))  # type: ignore[misc]
    assert not backend.capabilities.json_schema
    for request in (
        ask(response_format=ResponseFormat(kind="json")),
        ask(tools=(TOOL,), tool_choice=ToolChoice(mode="required")),
    ):
        (reason,) = backend.check(request)
        assert (reason.code, "llguidance" in reason.detail) == ("unsupported_parameter", True)


@pytest.mark.parametrize(
    ("before", "after", "controls"),
    [("[TOOL_CALLS][", "]", {"[TOOL_CALLS]": 7}), ("<tool_call>", "</tool_call>", {"<tool_call>": 7, "</tool_call>": 8})],
)
async def test_control_tokens_that_mark_calls_reach_the_parser(
    started: Callable[[Toy], object], before: str, after: str, controls: dict[str, int]
) -> None:
    backend = toy(template=calling(before, after))
    backend.runtime.info = replace(backend.runtime.info, controls=controls)
    request = ask(tools=(TOOL,))
    await started(backend)  # type: ignore[misc]
    size = backend.estimate(build_prompt(request)).tokens.input or 0
    said = before + '{"name": "get_weather", "arguments": {}}' + after
    for text, token in controls.items():
        said = said.replace(text, chr(token))
    backend.runtime.following = says(said, after=size)
    events = await read(await backend.open(request, PLAN, timeout=None))
    assert [(e.name, e.arguments) for e in events if isinstance(e, ToolCallDelta)] == [("get_weather", "{}")]
    assert not [e for e in events if isinstance(e, TextDelta)]


async def test_what_the_template_refuses_is_a_reason(started: Callable[[Toy], object]) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
    backend = await started(toy(template=template))  # type: ignore[misc]
    request = ask(system=(TextPart(text="S"),))
    (reason,) = backend.check(request)
    assert (reason.code, "no system role" in reason.detail) == ("capability", True)
    with pytest.raises(RequestRejectedError):
        await backend.open(request, PLAN, timeout=None)
    call = ToolCallPart(id="1", name="f", arguments="{}")
    assert backend.check(Request(messages=(Message(role="assistant", parts=(call,)),))) == []


async def test_reasoning_left_out_is_said_at_the_end(started: Callable[[Toy], object]) -> None:
    backend = await started(toy())  # type: ignore[misc]
    thought = Message(role="assistant", parts=(ReasoningPart(text="hm", provider="openai"), TextPart(text="yes")))
    request = ask(max_output_tokens=2)
    events = await read(await backend.open(replace(request, messages=(*request.messages, thought)), PLAN, timeout=None))
    (finished,) = [e for e in events if isinstance(e, Finished)]
    assert "openai" in finished.warnings[0]


async def test_marks_left_out_are_said_at_the_end(started: Callable[[Toy], object]) -> None:
    backend = await started(toy())  # type: ignore[misc]
    mark = CacheMark(dialect="anthropic", fields={"type": "ephemeral"})
    request = ask(max_output_tokens=2, system=(TextPart(text="S", mark=mark),))
    (finished,) = [e for e in await read(await backend.open(request, PLAN, timeout=None)) if isinstance(e, Finished)]
    assert finished.warnings == ("the cache mark at system[0] was left out: cache_control means nothing to this backend",)


async def test_an_estimate_is_cheap_the_second_time(started: Callable[[Toy], object], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = await started(toy())  # type: ignore[misc]
    counted: list[str] = []
    tokenize = backend.runtime.tokenize

    def count(text: str, *, special: bool) -> Any:
        counted.append(text)
        return tokenize(text, special=special)

    monkeypatch.setattr(backend.runtime, "tokenize", count)
    request = ask("a long question")
    prompt = build_prompt(request)
    assert backend.check(request) == []
    assert backend.estimate(prompt) == backend.estimate(prompt)
    assert backend.estimate(build_prompt(replace(request))).tokens.input == len("[user]a long question>")
    await read(await backend.open(request, PLAN, timeout=None))
    assert len(counted) == 1
    named = Message(role="user", parts=request.messages[0].parts, name="ann")
    backend.estimate(build_prompt(replace(request, messages=(named,))))
    assert len(counted) == 2  # templates may show the name


async def test_latency_counts_what_is_ahead(started: Callable[[Toy], object]) -> None:
    backend = await started(toy(delay_s=0.01))  # type: ignore[misc]
    prompt = build_prompt(ask("q" * 100))
    alone = backend.estimate(prompt).latency
    assert alone.evidence == "assumed"
    assert (alone.total_ms or 0) > (alone.ttft_ms or 0) > 0  # a price by the hour needs a time, measured or not
    ahead = [await backend.open(ask("p" * 300), PLAN, timeout=None) for _ in range(3)]
    assert (backend.estimate(prompt).latency.ttft_ms or 0) > (alone.ttft_ms or 0)
    for attempt in ahead:
        await attempt.aclose()
    await read(await backend.open(ask("r" * 300, max_output_tokens=5), PLAN, timeout=None))
    estimate = backend.estimate(prompt)
    assert estimate.latency.evidence == "measured"
    assert estimate.tokens.output_expected == 5
    assert (estimate.latency.total_ms or 0) > (estimate.latency.ttft_ms or 0)


async def test_a_slow_reader_slows_the_engine(started: Callable[[Toy], object]) -> None:
    backend = await started(toy())  # type: ignore[misc]
    attempt = await backend.open(ask(max_output_tokens=2000), PLAN, timeout=None)
    await attempt.read()
    await anyio.sleep(0.1)
    calls = len(backend.runtime.calls)
    await anyio.sleep(0.1)
    assert len(backend.runtime.calls) == calls < 300
    events = await read(attempt)
    assert [e.reason for e in events if isinstance(e, Finished)] == ["length"]


async def test_the_deadline_holds_however_much_is_there_to_read(started: Callable[[Toy], object]) -> None:
    backend = await started(toy())  # type: ignore[misc]
    attempt = await backend.open(ask(max_output_tokens=400), PLAN, timeout=60.0)
    await attempt.read()
    wait_until(lambda: not attempt._running.room)
    attempt._deadline = anyio.current_time()
    with pytest.raises(RequestTimeoutError):
        await attempt.read()
    await attempt.aclose()
    assert attempt._running.done


async def test_what_was_read_to_its_end_is_not_late(started: Callable[[Toy], object]) -> None:
    """The last read says only that nothing follows."""
    backend = await started(toy())  # type: ignore[misc]
    attempt = await backend.open(ask(max_output_tokens=5), PLAN, timeout=60.0)
    wait_until(lambda: attempt._running.done)
    assert any(isinstance(e, Finished) for e in await attempt.read())
    attempt._deadline = anyio.current_time()
    assert await attempt.read() == ()


async def test_the_deadline_of_a_stream_holds_for_a_slow_reader() -> None:
    """Also for what came in one batch and waits to be handed out."""
    seen = 0
    async with client_of(toy()) as client:
        with pytest.raises(StreamInterruptedError, match=r"not finished within 60 s") as caught:
            async with client.stream("hello", max_output_tokens=400, timeout=60) as stream:
                async for _ in stream.text_stream:
                    if not seen:
                        wait_until(lambda: not stream._attempt._running.room)  # type: ignore[union-attr]
                        stream._deadline = anyio.current_time() + 0.2
                    seen += 1
                    await anyio.sleep(0.02)
        assert caught.value.partial is not None
        assert 0 < seen <= 11  # of the sixty that were there
        assert isinstance(caught.value.__cause__, RequestTimeoutError)
        with anyio.fail_after(20):
            while engine(client.backends["b0"]).active:  # type: ignore[arg-type]
                await anyio.sleep(0.001)


async def test_an_answer_that_is_whole_is_handed_out_after_the_deadline() -> None:
    async with client_of(toy()) as client:
        texts = []
        async with client.stream("hello", max_output_tokens=30, timeout=60) as stream:
            wait_until(lambda: not engine(client.backends["b0"]).active)  # type: ignore[arg-type]
            async for event in stream:
                if stream._assembly is not None and stream._assembly.finished is not None:
                    stream._deadline = 0.0
                if isinstance(event, TextDelta):
                    texts.append(event.text)
        assert stream._deadline == 0.0
        assert len(texts) == 30


async def test_ten_thousand_events_in_linear_time_and_bounded_memory(started: Callable[[Toy], object]) -> None:
    backend = toy(context=11_000)
    await started(backend)  # type: ignore[misc]
    start = time.perf_counter()
    attempt = await backend.open(ask(max_output_tokens=10_000), PLAN, timeout=None)
    count, widest = 0, 0
    while batch := await attempt.read():
        widest = max(widest, len(batch))
        count += sum(isinstance(e, TextDelta) for e in batch)
    assert count == 10_000
    assert widest <= 70
    assert time.perf_counter() - start < 30


async def test_a_crash_reaches_the_reader_and_the_next_caller(started: Callable[[Toy], object]) -> None:
    backend = toy()
    backend.runtime.crash_at = 3
    await started(backend)  # type: ignore[misc]
    attempt = await backend.open(ask(), PLAN, timeout=None)
    with pytest.raises(EngineStoppedError, match="fell off") as caught:
        await read(attempt)
    assert caught.value.backend == "toy"
    with pytest.raises(EngineStoppedError):
        await backend.open(ask(), PLAN, timeout=None)
    assert "fell off" in backend.report()["stopped"]


async def test_a_crashed_engine_is_unhealthy_whatever_it_is_asked(started: Callable[[Toy], object]) -> None:
    backend = toy()
    backend.runtime.crash_at = 0
    await started(backend)  # type: ignore[misc]
    assert backend.report()["stopped"] is None
    with pytest.raises(EngineStoppedError):
        await read(await backend.open(ask(), PLAN, timeout=None))
    wait_until(lambda: backend.runtime.closed)
    assert "fell off" in backend.report()["stopped"]
    for request in (ask("never asked before"), ask("a bias", extra={"toy": {"logit_bias": {"a": 1}}})):
        (reason,) = backend.check(request)
        assert (reason.code, "fell off" in reason.detail) == ("unhealthy", True)
        estimate = backend.estimate(build_prompt(request))
        assert (estimate.tokens.input, "fell off" in (estimate.belief.evidence or "")) == (None, True)
    with pytest.raises(InputError):  # what is wrong in itself is still told so
        backend.check(ask(extra={"toy": {"no_such_field": 1}}))


@pytest.mark.parametrize("method", ["check", "estimate"])
async def test_an_engine_that_crashes_while_it_is_asked(
    started: Callable[[Toy], object], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The runtime is closed between looking whether it is and asking it."""
    backend = toy()
    await started(backend)  # type: ignore[misc]
    tokenize = backend.runtime.tokenize

    def crash(text: str, *, special: bool) -> list[int]:
        engine(backend)._failure = RuntimeError("fell off just now")
        backend.runtime.closed = True
        return tokenize(text, special=special)

    monkeypatch.setattr(backend.runtime, "tokenize", crash)
    if method == "check":
        assert [r.code for r in backend.check(ask())] == ["unhealthy"]
    else:
        assert "just now" in (backend.estimate(build_prompt(ask())).belief.evidence or "")


async def test_another_error_of_a_runtime_is_not_hidden(
    started: Callable[[Toy], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await started(toy())  # type: ignore[misc]

    def fail(text: str, *, special: bool) -> list[int]:
        raise RuntimeError("llama_tokenize failed with -1")

    monkeypatch.setattr(backend.runtime, "tokenize", fail)
    with pytest.raises(RuntimeError, match="llama_tokenize"):
        backend.check(ask())


def client_of(*backends: Toy) -> Client:
    for i, backend in enumerate(backends):
        backend.name = f"b{i}"
    return Client(backends={b.name: b for b in backends}, models={"m": [b.name for b in backends]})


async def test_the_other_backend_answers_for_a_crashed_one() -> None:
    first, second = toy(), toy()
    first.runtime.crash_at = 0  # before any content
    async with client_of(first, second) as client:
        victim = await client.complete("hello", max_output_tokens=5, model="m")
        assert victim.backend == "b1"
        for i in range(2):
            assert (await client.complete(f"hello {i}", max_output_tokens=5)).backend == "b1"
        ill = {o.backend: o for o in client.plan("hello again").candidates}["b0"]
        assert not ill.eligible
        assert [r.code for r in ill.reasons] == ["unhealthy"]


async def test_a_crashed_backend_that_is_alone_says_so() -> None:
    backend = toy()
    backend.runtime.crash_at = 0
    async with client_of(backend) as client:
        for i in range(3):
            with pytest.raises(EngineStoppedError, match="fell off"):
                await client.complete(f"hello {i}", max_output_tokens=5)


def engine(backend: Toy) -> Engine:
    assert backend._loaded is not None
    return backend._loaded.started.engine


async def test_closing_while_loading_leaves_nothing_alive() -> None:
    backend, threads, raised = toy(), engine_threads(), []
    backend.loading_s = 30.0

    async def start() -> None:
        with pytest.raises(EngineStoppedError, match="closed"):
            await backend.start()
        raised.append(True)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(start)
            await anyio.sleep(0.05)
            await backend.aclose()
    assert raised
    assert (backend._loaded, engine_threads()) == (None, threads)


async def test_closing_after_the_model_is_read_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too late to stop loading: what was started is closed."""
    backend, threads = toy(), engine_threads()
    load = backend._load

    def closing(progress: Callable[[float], bool]) -> Any:
        loaded = load(progress)
        anyio.from_thread.run(backend.aclose)
        return loaded

    monkeypatch.setattr(backend, "_load", closing)
    with pytest.raises(EngineStoppedError, match="closed"):
        await backend.start()
    assert backend.runtime.closed
    assert engine_threads() == threads
    with pytest.raises(EngineStoppedError, match="closed"):
        await backend.start()


async def test_starts_at_the_same_time_load_once() -> None:
    backend, loads = toy(), []
    backend.loading_s = 0.1
    load = backend.load_runtime

    def counted(progress: Callable[[float], bool]) -> ScriptedRuntime:
        loads.append(True)
        return load(progress)

    backend.load_runtime = counted  # type: ignore[method-assign]
    before = engine_threads()
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(backend.start)
    assert (len(loads), engine_threads() - before) == (1, 1)
    await backend.aclose()
    assert engine_threads() == before


async def test_many_readers_at_once(started: Callable[[Toy], object]) -> None:
    backend = await started(toy())  # type: ignore[misc]
    texts: dict[int, str] = {}

    async def one(i: int) -> None:
        events = await read(await backend.open(ask("x" * i, max_output_tokens=30), PLAN, timeout=None))
        texts[i] = "".join(e.text for e in events if isinstance(e, TextDelta))

    async with anyio.create_task_group() as group:
        for i in range(40):
            group.start_soon(one, i)
    for i, text in texts.items():
        begin = len(f"[user]{'x' * i}>")
        assert text == "".join(chr(forever(range(begin + k))) for k in range(30))


async def test_cancelled_readers_leave_nothing(started: Callable[[Toy], object]) -> None:
    backend = await started(toy(delay_s=0.0005))  # type: ignore[misc]
    threads = engine_threads()
    for i in range(100):
        with anyio.move_on_after(0.0007 * (i % 7)):
            attempt = await backend.open(ask(str(i), max_output_tokens=1000), PLAN, timeout=None)
            try:
                await read(attempt)
            finally:
                await attempt.aclose()
    with anyio.fail_after(10):
        while backend._loaded.started.engine.active:
            await anyio.sleep(0.002)
    assert engine_threads() == threads
    gc.collect()


async def test_a_request_abandoned_with_its_event_loop_does_not_hold_up_others() -> None:
    backend = toy(delay_s=0.001)

    async def leave() -> None:
        attempt = await backend.open(ask(max_output_tokens=3000), PLAN, timeout=None)
        with anyio.move_on_after(0.05):
            await read(attempt)

    await backend.start()
    await anyio.to_thread.run_sync(anyio.run, leave)  # gone without closing the attempt
    assert len(await read(await backend.open(ask(max_output_tokens=20), PLAN, timeout=None))) > 20
    await backend.aclose()


async def test_loading_can_be_cancelled() -> None:
    backend = toy()
    backend.loading_s = 30.0
    start = time.monotonic()
    with anyio.move_on_after(0.1):
        await backend.start()
    assert time.monotonic() - start < 5
    assert backend._loaded is None
    backend.loading_s = 0.0
    await backend.start()
    await backend.aclose()
    assert backend.runtime.closed


async def test_a_bad_template_frees_the_model() -> None:
    backend = toy(template="{% if %}")
    with pytest.raises(ConfigError, match="template"):
        await backend.start()
    assert backend.runtime.closed
    await backend.aclose()


async def test_deterministic_keeps_calls_inside_the_invariant_width() -> None:
    runtime = ScriptedRuntime(width=64)
    runtime.info = replace(runtime.info, chat_template=PLAIN)
    backend = Toy(runtime, chunk=10, deterministic=True)
    await backend.start()
    runtime.hand_over()
    before = len(runtime.calls)
    await read(await backend.open(ask("x" * 100, max_output_tokens=3), PLAN, timeout=None))
    assert max(runtime.calls[before:]) <= 10
    await backend.aclose()


async def test_the_contract_of_backends() -> None:
    await check_backend(lambda: toy(delay_s=0.001), ask(max_output_tokens=20))
