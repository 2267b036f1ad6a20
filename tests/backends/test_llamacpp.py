"""The llama.cpp backend with the real small model, at one thread."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import pytest
from tests.engine.scripted import engine_threads

from cachespec.backends._engine_attempt import EngineAttempt
from cachespec.backends._local import LocalBackend
from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.decision import Plan
from cachespec.engine.averages import shared_prefix
from cachespec.engine.models import find_model
from cachespec.engine.pages import PAGE
from cachespec.engine.runtimes.base import Span
from cachespec.errors import (
    ConfigError,
    ContextLengthError,
    EngineStoppedError,
    RequestRejectedError,
    RequestTimeoutError,
    UnknownPluginError,
    UnsupportedParameterError,
)
from cachespec.events import Event, Finished, ResponseStarted, TextDelta, UsageReported
from cachespec.messages import ImagePart, Message, TextPart, Tool, ToolResultPart
from cachespec.prompt import build_prompt
from cachespec.request import Reasoning, Request, ResponseFormat, ToolChoice
from cachespec.testing import check_backend
from cachespec.usage import Usage

model = pytest.mark.model
one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])  # what it shows is not about event loops, and it is slow
PLAN = Plan(backend="laptop")


def make(**more: Any) -> LlamaCppBackend:
    return LlamaCppBackend(**{"name": "laptop", "model": "smollm2", "context": 1024, "threads": 1, **more})


def available() -> None:
    pytest.importorskip("llama_cpp")
    try:
        find_model("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded() -> Iterator[LlamaCppBackend]:
    """One model for all tests, on whatever event loop they run: the engine's thread belongs to none."""
    available()
    backend = make()
    anyio.run(backend.start)
    yield backend
    anyio.run(backend.aclose)


@pytest.fixture
async def backend(loaded: LlamaCppBackend) -> AsyncIterator[LlamaCppBackend]:
    """Nothing may be left running afterwards."""
    yield loaded
    await idle(loaded)


def ask(text: str, *, system: str = "", **more: Any) -> Request:
    options = {"temperature": 0.0, "max_output_tokens": 8, **more}
    parts = (TextPart(text=system),) if system else ()
    return Request(messages=(Message(role="user", parts=(TextPart(text=text),)),), system=parts, **options)


async def read(attempt: EngineAttempt) -> list[Event]:
    events: list[Event] = []
    with anyio.fail_after(60):
        while batch := await attempt.read():
            events += batch
    return events


async def run(backend: LocalBackend, request: Request) -> list[Event]:
    return await read(await backend.open(request, PLAN, timeout=60))


def text(events: Sequence[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def usage(events: Sequence[Event]) -> Usage:
    (found,) = [e.usage for e in events if isinstance(e, UsageReported)]
    return found


def reason(events: Sequence[Event]) -> str:
    (found,) = [e.reason for e in events if isinstance(e, Finished)]
    return found


def engine(backend: LocalBackend) -> Any:
    assert backend._loaded is not None
    return backend._loaded.started.engine


def consistent(backend: LocalBackend) -> None:
    """What the index believes is what the library holds. The engine must be idle."""
    engine(backend)._slots.check()


async def idle(backend: LocalBackend, within: float = 10.0) -> float:
    """Wait until the engine has nothing to do; how long that took."""
    start = time.monotonic()
    with anyio.fail_after(within):
        while engine(backend).active:
            await anyio.sleep(0.002)
    return time.monotonic() - start


@model
@pytest.mark.anyio
async def test_streamed_text_is_that_of_its_tokens_at_once(backend: LlamaCppBackend) -> None:
    request = ask("Write one line with an emoji and the word café.", max_output_tokens=24)
    attempt = await backend.open(request, PLAN, timeout=60)
    events = await read(attempt)
    assert isinstance(events[0], ResponseStarted)
    assert events[0].model == "smollm2"
    assert events[0].request_id
    prompt = backend.estimate(build_prompt(request)).tokens.input
    runtime = backend._loaded.runtime  # type: ignore[union-attr]
    ids = attempt._running.tokens[prompt:]
    assert text(events) == b"".join(map(runtime.piece, ids)).decode("utf-8", "replace")
    assert usage(events).output == len(ids)
    assert len([e for e in events if isinstance(e, TextDelta)]) > 5  # it streamed
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert 0 < (finished.busy_s or 0) < 60


@model
@pytest.mark.anyio
async def test_a_shared_prefix_is_not_evaluated_twice(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    manual = uuid4().hex + " ".join(f"Rule {i}: item {i} costs {i * 7 % 13} coins." for i in range(25))
    first, second = ask("What does item 3 cost?", system=manual), ask("Name a rule.", system=manual)
    before = backend.estimate(build_prompt(first))
    assert before.belief.state in ("cold", "partial")  # the template begins alike, if anything was there before
    head = before.tokens.cache_read or 0
    assert head <= 32
    cold = usage(await run(backend, first))
    estimate = backend.estimate(build_prompt(second))
    a, b = (backend._render(backend._loaded, r).tokens for r in (first, second))  # type: ignore[arg-type]
    common = shared_prefix(a, b)
    assert common >= 300
    runtime: Any = backend._loaded.runtime  # type: ignore[union-attr]
    evaluated: list[int] = []
    evaluate = runtime.evaluate

    def counted(spans: Sequence[Span]) -> Any:
        evaluated.append(len(spans[0].tokens))
        return evaluate(spans)

    monkeypatch.setattr(runtime, "evaluate", counted)
    warm = usage(await run(backend, second))
    whole = len(a) // PAGE * PAGE
    writes = {"kv": whole - head}
    assert cold == Usage(uncached=len(a) - whole, cache_read=head, cache_write=writes, output=cold.output)
    assert (warm.cache_read or 0) > common - PAGE
    assert warm.input_tokens == len(b)
    assert (warm.written or 0) == len(b) // PAGE * PAGE - (warm.cache_read or 0)
    assert evaluated[0] == len(b) - (warm.cache_read or 0)
    assert set(evaluated[1:]) <= {1}
    # What was quoted is what came.
    assert estimate.belief.state == "warm"
    assert estimate.belief.tokens == estimate.tokens.cache_read == warm.cache_read
    assert estimate.tokens.cache_write == warm.written
    assert f"KV of {warm.cache_read} tokens is there; at token {common} it holds" in estimate.belief.evidence
    assert estimate.tokens.input == estimate.tokens.worst_input == len(b)
    assert estimate.latency.evidence == "measured"
    assert (estimate.latency.ttft_ms or 0) < (before.latency.ttft_ms or 0)


@model
@one_loop
@pytest.mark.anyio
async def test_tenants_share_nothing_and_the_same_one_does(backend: LlamaCppBackend) -> None:
    request = ask("Is this a secret? Say yes or no, and nothing else.", max_output_tokens=2)
    reads = [usage(await run(backend, replace(request, tenant=t))).cache_read for t in ("a", "b", "b", "a", "")]
    assert reads[0] == reads[1] == reads[4] == 0
    assert min(reads[2] or 0, reads[3] or 0) > 10
    other = backend.estimate(build_prompt(replace(request, tenant="c")))
    assert other.belief.state == "cold"


@model
@one_loop
@pytest.mark.anyio
async def test_cache_modes(backend: LlamaCppBackend) -> None:
    request = ask("Count to three.", max_output_tokens=2, tenant="modes")
    size = backend.estimate(build_prompt(request)).tokens.input or 0
    read = (size - 1) // PAGE * PAGE
    first = usage(await run(backend, request))
    assert (first.cache_read, first.written) == (0, size // PAGE * PAGE)
    quiet = usage(await run(backend, replace(request, cache="no-write")))
    off_estimate = backend.estimate(build_prompt(replace(request, cache="off"))).tokens
    off = usage(await run(backend, replace(request, cache="off")))
    after = usage(await run(backend, request))
    assert quiet == Usage(uncached=size - read, cache_read=read, cache_write={}, output=2)
    assert off == Usage(uncached=size, cache_read=0, cache_write={}, output=2)
    assert (off_estimate.uncached, off_estimate.cache_read, off_estimate.cache_write) == (size, 0, 0)
    assert after.cache_read == read


@model
@pytest.mark.anyio
async def test_cancel_inside_prefill(backend: LlamaCppBackend) -> None:
    attempt = await backend.open(ask("word " * 900), PLAN, timeout=60)
    while engine(backend).active == 0:
        await anyio.sleep(0.001)
    await anyio.sleep(0.3)
    start = time.monotonic()
    await attempt.aclose()
    await attempt.aclose()
    assert time.monotonic() - start < 0.1
    assert await idle(backend) < 1.0
    assert await attempt.read() == ()
    assert 0 < attempt.busy_s < 5
    assert attempt.usage.output == 0


@model
@pytest.mark.anyio
async def test_a_cancelled_reader_leaves_nothing(backend: LlamaCppBackend) -> None:
    with anyio.move_on_after(0.15):
        attempt = await backend.open(ask("Tell me a long story.", max_output_tokens=500), PLAN, timeout=60)
        try:
            while await attempt.read():
                pass
        finally:
            await attempt.aclose()
    assert await idle(backend) < 1.0
    assert (attempt.usage.output or 0) < 500


@model
@one_loop
@pytest.mark.anyio
async def test_a_prompt_that_does_not_fit_is_refused_before_any_work(backend: LlamaCppBackend) -> None:
    request = ask("word " * 1200)
    before = engine(backend).active, engine(backend).report()["prefix"]
    with pytest.raises(ContextLengthError, match="1024") as caught:
        await backend.open(request, PLAN, timeout=60)
    assert (caught.value.backend, caught.value.model, caught.value.retryable) == ("laptop", "smollm2", False)
    assert (engine(backend).active, engine(backend).report()["prefix"]) == before
    estimate = backend.estimate(build_prompt(request)).tokens
    assert (estimate.input or 0) > (backend.capabilities.context or 0)
    assert estimate.output_max == 0


@model
@one_loop
@pytest.mark.anyio
async def test_output_beyond_the_context_ends_at_its_end() -> None:
    available()
    small = make(context=64)
    await small.start()
    try:
        request = ask("Write a very long story about a fox.", max_output_tokens=5000)
        estimate = small.estimate(build_prompt(request)).tokens
        events = await run(small, request)
        assert reason(events) == "length"
        assert estimate.output_max == usage(events).output == 64 - (usage(events).input_tokens or 0)
        unlimited = await run(small, replace(request, max_output_tokens=None))
        assert usage(unlimited).output == usage(events).output
    finally:
        await small.aclose()


@model
@one_loop
@pytest.mark.anyio
async def test_a_seed_gives_one_text_and_another_seed_another(backend: LlamaCppBackend) -> None:
    request = ask("Invent a name for a cat.", temperature=0.7, seed=11, cache="off", max_output_tokens=12)
    first, again = text(await run(backend, request)), text(await run(backend, request))
    others = {text(await run(backend, replace(request, seed=s))) for s in (12, 13)}
    assert first == again
    assert others != {first}
    unseeded = {text(await run(backend, replace(request, seed=None, temperature=1.5))) for _ in range(2)}
    assert len(unseeded) > 1


@model
@one_loop
@pytest.mark.anyio
async def test_sampling_parameters_act_on_every_token(backend: LlamaCppBackend) -> None:
    greedy = await run(backend, ask("Name three colours.", max_output_tokens=12))
    hot = ask("Name three colours.", temperature=1.5, seed=3, max_output_tokens=12)
    for narrow in (replace(hot, top_k=1), replace(hot, top_p=1e-9), replace(hot, min_p=1.0)):
        assert text(await run(backend, narrow)) == text(greedy)
    assert text(await run(backend, hot)) != text(greedy)


@model
@one_loop
@pytest.mark.anyio
async def test_deterministic_text_does_not_depend_on_what_was_cached() -> None:
    available()
    fixed = make(context=512, deterministic=True, prefill_chunk=32, parallel=1)
    await fixed.start()
    try:
        request = ask("Tell me about the sea. " * 8, temperature=0.7, seed=4, max_output_tokens=16)
        cold = await run(fixed, request)
        await run(fixed, ask("Tell me about the sea. " * 3))
        partial = await run(fixed, request)
        hot = await run(fixed, request)
        assert [bool(usage(e).cache_read) for e in (cold, partial, hot)] == [False, True, True]
        assert text(cold) == text(partial) == text(hot)
    finally:
        await fixed.aclose()


@model
@pytest.mark.anyio
async def test_stop_strings(backend: LlamaCppBackend) -> None:
    request = ask("List the days of the week.", max_output_tokens=24)
    whole = text(await run(backend, request))
    stop = whole[9:14]
    events = await run(backend, replace(request, stop=("no such text", stop)))
    assert text(events) == whole[: whole.index(stop)]
    assert reason(events) == "stop"
    assert 0 < (usage(events).output or 0) < 24


@model
@one_loop
@pytest.mark.anyio
async def test_two_hundred_aborted_requests_leave_no_thread_and_no_sequence(backend: LlamaCppBackend) -> None:
    threads = engine_threads()
    for i in range(200):
        attempt = await backend.open(ask(f"Story {i % 7}, please. " * (i % 3 + 1), max_output_tokens=100), PLAN, timeout=60)
        if i % 10 == 1:
            await attempt.read()
        elif i % 3 == 2:
            await anyio.sleep(0.005)
        await attempt.aclose()
    await idle(backend)
    assert engine_threads() == threads
    await anyio.to_thread.run_sync(consistent, backend)
    assert text(await run(backend, ask("Say hello.")))


@model
@one_loop
@pytest.mark.anyio
async def test_tasks_take_turns_and_get_their_own_answers(backend: LlamaCppBackend) -> None:
    """Not the same as alone to the letter: at near ties, calls of more tokens round differently."""
    numbers = (11, 22, 33)
    together: dict[int, str] = {}

    async def one(number: int) -> None:
        together[number] = text(await run(backend, ask(f"Repeat the number {number}.", cache="off")))

    async with anyio.create_task_group() as group:
        for number in numbers:
            group.start_soon(one, number)
    for number in numbers:
        assert [n for n in numbers if str(n) in together[number]] == [number]


@model
@pytest.mark.anyio
async def test_waiting_stops_at_the_deadline(backend: LlamaCppBackend) -> None:
    attempt = await backend.open(ask("word " * 900), PLAN, timeout=0.1)
    with pytest.raises(RequestTimeoutError):
        await read(attempt)
    assert await idle(backend) < 1.0


@model
@pytest.mark.anyio
async def test_the_event_loop_stays_free_while_the_model_computes(backend: LlamaCppBackend) -> None:
    gaps: list[float] = []

    async def watch() -> None:
        times = [time.monotonic()]
        while True:
            await anyio.sleep(0.005)
            times.append(time.monotonic())
            gaps[:] = [b - a for a, b in pairwise(times)]

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await run(backend, ask("word " * 200, tenant=uuid4().hex))
        group.cancel_scope.cancel()
    assert len(gaps) > 10
    assert sorted(gaps)[len(gaps) // 2] < 0.2  # a chunk takes longer than that on a slow machine


@model
def test_what_it_says_of_itself(loaded: LlamaCppBackend) -> None:
    able = loaded.capabilities
    assert able.local
    assert able.context == 1024
    assert (able.tools, able.images, able.json_mode, able.json_schema) == (False, False, True, True)
    assert {"temperature", "top_p", "top_k", "min_p", "stop", "seed", "max_output_tokens"} <= able.parameters
    assert loaded.provider is None
    assert loaded.wire(ask("x"), PLAN) is None


TOOL = Tool(name="f", parameters={"type": "object"})
IMAGE = ImagePart(url="https://example.org/x.png")
REFUSED = [
    (ask("x", tools=(TOOL,)), "capability", "tool"),
    (
        ask("x", response_format=ResponseFormat(kind="schema", schema={"type": "no"})),
        "unsupported_parameter",
        "response_format",
    ),
    (ask("x", reasoning=Reasoning(effort="high")), "unsupported_parameter", "reasoning"),
    (ask("x", tool_choice=ToolChoice(mode="required")), "unsupported_parameter", "tool_choice"),
    (ask("x", top_p=1.5), "unsupported_parameter", "top_p"),
    (Request(messages=(Message(role="user", parts=(IMAGE,)),)), "unsupported_parameter", "images"),
    (
        Request(messages=(Message(role="user", parts=(ToolResultPart(id="1", content=(IMAGE,)),)),)),
        "unsupported_parameter",
        "images",
    ),
]


@model
@pytest.mark.anyio
@pytest.mark.parametrize(("request_", "code", "named"), REFUSED)
async def test_what_it_cannot_do_is_refused(loaded: LlamaCppBackend, request_: Request, code: str, named: str) -> None:
    (found,) = loaded.check(request_)
    assert found.code == code
    assert named in found.detail
    expected = UnsupportedParameterError if code == "unsupported_parameter" else RequestRejectedError
    with pytest.raises(expected):
        await loaded.open(request_, PLAN, timeout=60)


@model
def test_what_it_can_ignore_is_not_refused(loaded: LlamaCppBackend) -> None:
    fine = ask(
        "x",
        response_format=ResponseFormat(kind="text"),
        reasoning=Reasoning(effort="none"),
        tool_choice=ToolChoice(mode="auto"),
        extra={"other": {"a": 1}},
    )
    assert loaded.check(fine) == []


@model
@pytest.mark.anyio
async def test_the_contract_of_backends() -> None:
    available()
    await check_backend(lambda: make(context=256), ask("Say hello.", max_output_tokens=4))


@model
@pytest.mark.anyio
async def test_closing_ends_a_running_request() -> None:
    available()
    backend = make(context=512)
    await backend.start()
    await backend.start()
    attempt = await backend.open(ask("Tell a long story.", max_output_tokens=400), PLAN, timeout=60)
    await attempt.read()
    await backend.aclose()
    await backend.aclose()
    with pytest.raises(EngineStoppedError, match="closed"):
        await read(attempt)
    with pytest.raises(EngineStoppedError, match="closed"):
        await backend.open(ask("x"), PLAN, timeout=60)
    with pytest.raises(EngineStoppedError):
        await backend.start()


@model
@pytest.mark.anyio
async def test_loading_reports_and_can_be_cancelled() -> None:
    available()
    backend = make(context=64)
    seen: list[float] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await backend.start()
    assert scope.cancelled_caught
    assert backend._loaded is None
    await backend.start(seen.append)  # nothing was changed: it can be started still
    assert seen[-1] == 1.0
    await backend.aclose()


def test_threads_and_defaults() -> None:
    assert make(threads=None)._threads >= 1
    assert make(threads=3)._threads == 3


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"context": 1}, "context"),
        ({"threads": 0}, "threads"),
        ({"gpu_layers": -2}, "gpu_layers"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"prefill_chunk": 513}, "prefill_chunk"),
        ({"parallel": 0}, "parallel"),
        ({"parallel": 65}, "parallel"),
        ({"max_gap": 0.5}, "max_gap"),
        ({"kv_tokens": 1000}, "kv_tokens"),
        ({"host_cache_mb": -1}, "host_cache_mb"),
        ({"cost": "1.5"}, "cost"),
        ({"context": 2.5}, "context"),
        ({"context": 2**31}, "context"),
        ({"parallel": True}, "parallel"),
        ({"threads": 1.5}, "threads"),
        ({"threads": 100_000}, "threads"),
        ({"gpu_layers": 2**32}, "gpu_layers"),
        ({"prefill_chunk": "64"}, "prefill_chunk"),
        ({"max_gap": "4"}, "max_gap"),
        ({"max_gap": float("nan")}, "max_gap"),
        ({"kv_tokens": 2048.5}, "kv_tokens"),
        ({"kv_tokens": 2**32 + 256}, "kv_tokens"),
        ({"host_cache_mb": None}, "host_cache_mb"),
        ({"keep_warm": -1}, "keep_warm"),
        ({"keep_warm": float("nan")}, "keep_warm"),
        ({"keep_warm": "10m"}, "keep_warm"),
        ({"keep_warm": 10**5000}, "keep_warm"),
        ({"require_eval": "0.6", "draft": {"use": "suffix"}}, "require_eval"),
        ({"require_eval": 60, "draft": {"use": "suffix"}}, "require_eval"),
        ({"draft": "suffix"}, "draft"),
        ({"acceptance": "never"}, "acceptance"),
        ({"acceptance": {"use": "fixed", "draft_length": 0}}, "acceptance.draft_length"),
        ({"draft": {"use": "suffix", "min_match": 0}}, "draft.min_match"),
    ],
)
def test_settings_out_of_range_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"draft": {"use": "sufix"}}, UnknownPluginError, "suffix"),
        ({"draft": {"use": "suffix", "min_mtch": 2}}, ConfigError, "min_match"),
        ({"draft": {"use": "suffix", "target": 2}}, ConfigError, "target"),
        ({"draft": {"use": "model"}}, ConfigError, "model"),
        ({"draft": {}}, ConfigError, "use"),
        ({"acceptance": {"use": "good"}}, UnknownPluginError, "goodput"),
        ({"acceptance": {"use": "goodput", "min_acceptance": 2.0}}, ConfigError, "min_acceptance"),
    ],
)
def test_drafters_and_policies_are_checked_before_anything_is_loaded(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make(**options)


SMALL: list[dict[str, Any]] = [
    {"context": 2},
    {"context": 4},
    {"context": 7, "parallel": 4},
    {"context": 64, "parallel": 64},
    {"context": 100, "parallel": 64, "kv_tokens": 200},
]


@model
@one_loop
@pytest.mark.anyio
async def test_settings_with_little_room_have_fewer_sequences() -> None:
    """More sequences than there is KV for would stop the process."""
    available()
    for options in SMALL:
        backend = make(**options)
        try:
            await backend.start()
            assert 1 <= engine(backend).parallel <= backend.settings.room
            if backend.settings.context > 60:
                events = await run(backend, ask("Hi", max_output_tokens=2))
                assert reason(events) == "length"
            else:
                with pytest.raises(ContextLengthError):
                    await backend.open(ask("Hi"), PLAN, timeout=60)
        finally:
            await backend.aclose()


@model
@pytest.mark.parametrize(("options", "key"), [({"kv_tokens": 10**9}, "kv_tokens"), ({}, "context")])
@one_loop
@pytest.mark.anyio
async def test_more_than_the_memory_of_the_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], key: str
) -> None:
    available()
    if not options:
        monkeypatch.setattr("cachespec.engine.runtimes.llamacpp._memory", lambda: 1e6)
    backend = make(**options)
    with pytest.raises(ConfigError, match="no room for") as caught:
        await backend.start()
    assert caught.value.key == key
    await backend.aclose()


@pytest.mark.anyio
async def test_before_the_start() -> None:
    backend = make(context=100)
    estimate = backend.estimate(build_prompt(ask("x")))
    assert estimate.tokens.input is None
    assert estimate.belief.state == "unknown"
    assert backend.check(ask("x", tools=(TOOL,))) == []  # not known yet
    with pytest.raises(EngineStoppedError, match="not started"):
        await backend.open(ask("x"), PLAN, timeout=1)
    await backend.aclose()


@pytest.mark.anyio
async def test_a_failed_start_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    file = tmp_path / "model.gguf"
    backend = make(model=str(file))
    for content in (None, b"not a model"):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.gguf"):
            await backend.start()
        assert backend._loaded is None
    await backend.aclose()


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_it_loads_no_library() -> None:
    code = (
        "import sys, cachespec.backends.llamacpp\nprint({'llama_cpp', 'numpy', 'jinja2', 'huggingface_hub'} & set(sys.modules))"
    )
    assert python(code) == "set()\n"


@model
def test_without_the_library_the_extra_is_named() -> None:
    available()
    code = """
import sys, anyio
sys.modules["llama_cpp"] = None
from cachespec.backends._local import LocalBackend
from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.errors import MissingDependencyError
try: anyio.run(LlamaCppBackend(name="laptop", model="smollm2").start)
except MissingDependencyError as error: print(error.extra, error)
"""
    assert python(code).startswith("llamacpp the llama.cpp backend needs llama-cpp-python; install it with: pip install")


@model
def test_a_process_that_forgets_to_close_ends_quietly() -> None:
    """No hang, no crash, and nothing of the library's log on standard error."""
    available()
    code = """
import anyio
from cachespec.backends._local import LocalBackend
from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.decision import Plan
from cachespec.messages import Message, TextPart
from cachespec.request import Request
async def main():
    backend = LlamaCppBackend(name="laptop", model="smollm2", context=256, threads=1)
    await backend.start()
    message = Message(role="user", parts=(TextPart(text="Tell a long story."),))
    attempt = await backend.open(Request(messages=(message,)), Plan(backend="laptop"), timeout=None)
    print(bool(await attempt.read()))
anyio.run(main)
"""
    assert python(code) == "True\n"
