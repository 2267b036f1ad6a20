"""The torch backend with the real small model, in float32 on one thread."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from tests.backends.test_llamacpp import ask, available, engine, idle, reason, run, text, usage

from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.backends.torch import TorchBackend
from cachespec.decision import Plan
from cachespec.errors import ConfigError, ContextLengthError
from cachespec.prompt import build_prompt
from cachespec.request import ResponseFormat
from cachespec.testing import check_backend

pytestmark = pytest.mark.anyio
model = pytest.mark.model
one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])
PLAN = Plan(backend="laptop")


def make(**more: Any) -> TorchBackend:
    options = {"name": "laptop", "model": "smollm2", "context": 512, "threads": 1, "device": "cpu", "dtype": "float32"}
    return TorchBackend(**{**options, "parallel": 3, **more})


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchBackend]:
    pytest.importorskip("torch")
    available()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        made = make(draft={"use": "suffix"})
        anyio.run(made.start)
    yield made
    anyio.run(made.aclose)


@model
@one_loop
async def test_it_says_what_llama_cpp_says_and_reuses_what_it_computed(backend: TorchBackend) -> None:
    """The weights are the same, dequantised; greedy text agrees for a while at least."""
    other = LlamaCppBackend(name="laptop", model="smollm2", context=512, threads=1)
    await other.start()
    request = ask("Name three colours of the rainbow.", max_output_tokens=12)
    expected = await run(other, request)
    await other.aclose()
    first = await run(backend, request)
    again = await run(backend, request)
    assert text(first)[:14] == text(expected)[:14]
    assert text(again) == text(first)
    assert usage(first).input_tokens == usage(expected).input_tokens
    assert (usage(again).cache_read or 0) >= (usage(again).input_tokens or 0) - 17
    belief = backend.estimate(build_prompt(request)).belief
    assert belief.tokens == usage(again).cache_read


@model
@one_loop
async def test_copying_is_drafted_and_the_text_stays(backend: TorchBackend) -> None:
    request = ask("Repeat: The harbour master keeps the keys in a blue tin box on the second shelf.", max_output_tokens=20)
    events = await run(backend, request)
    counted = usage(events)
    assert (counted.accepted or 0) > 5
    spoken = backend.estimate(build_prompt(request)).speculation
    assert spoken is not None
    assert spoken.reason == "gain"
    assert (spoken.gain or 0) > 1.2


@model
@one_loop
async def test_several_at_once_get_their_own_answers(backend: TorchBackend) -> None:
    questions = [ask(f"Repeat the number {n}.", max_output_tokens=8) for n in (11, 22, 33, 44)]
    alone = [text(await run(backend, question)) for question in questions]
    together: dict[int, str] = {}

    async def one(i: int) -> None:
        together[i] = text(await run(backend, questions[i]))

    async with anyio.create_task_group() as group:
        for i in range(len(questions)):
            group.start_soon(one, i)
    assert [together[i] for i in range(len(questions))] == alone


@model
@one_loop
async def test_json_is_forced_where_it_is_asked_for(backend: TorchBackend) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    request = ask(
        "How many legs has a cat?", response_format=ResponseFormat(kind="schema", schema=schema), max_output_tokens=24
    )
    events = await run(backend, request)
    assert reason(events) == "stop"
    assert text(events).replace(" ", "").replace("\n", "").startswith('{"n":')


@model
@one_loop
async def test_two_hundred_aborted_requests_leave_nothing(backend: TorchBackend) -> None:
    for i in range(200):
        attempt = await backend.open(ask(f"Story {i % 7}, please. " * (i % 3 + 1), max_output_tokens=100), PLAN, timeout=60)
        if i % 20 == 1:
            await attempt.read()
        elif i % 4 == 2:
            await anyio.sleep(0.002)
        await attempt.aclose()
    await idle(backend)
    engine(backend)._slots.check()
    assert text(await run(backend, ask("Say hello.", max_output_tokens=4)))


@model
@one_loop
async def test_a_prompt_that_does_not_fit_is_refused(backend: TorchBackend) -> None:
    with pytest.raises(ContextLengthError, match="512"):
        await backend.open(ask("word " * 600), PLAN, timeout=60)


@model
@one_loop
async def test_the_contract_of_backends() -> None:
    pytest.importorskip("torch")
    available()
    await check_backend(lambda: make(context=256), ask("Say hello.", max_output_tokens=4))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"device": "abacus"}, "device"),
        ({"device": "gpu"}, "device"),
        ({"device": 0}, "device"),
        ({"dtype": "float3"}, "dtype"),
        ({"threads": 100_000}, "threads"),
        ({"threads": "2"}, "threads"),
    ],
)
def test_settings_that_nothing_can_be_are_refused_at_once(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert caught.value.key == key


@pytest.mark.parametrize(("options", "key"), [({"device": "cuda:99"}, "device"), ({"context": 100_000}, "context")])
@one_loop
async def test_settings_that_cannot_be_had_fail_the_start(options: dict[str, Any], key: str) -> None:
    pytest.importorskip("torch")
    available()
    with pytest.raises(ConfigError) as caught:
        await make(**options).start()
    assert caught.value.key == key


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_loads_no_library() -> None:
    code = "import sys, cachespec.backends.torch\nprint({'torch', 'llama_cpp', 'numpy'} & set(sys.modules))"
    assert python(code) == "set()\n"


def test_without_torch_the_extra_is_named() -> None:
    code = """
import sys, anyio
sys.modules["torch"] = None
from cachespec.backends.torch import TorchBackend
from cachespec.errors import MissingDependencyError
try: anyio.run(TorchBackend(name="laptop", model="smollm2").start)
except MissingDependencyError as error: print(error.extra, error)
"""
    assert python(code).startswith("torch the torch backend needs torch; install it with: pip install")
