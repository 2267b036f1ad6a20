"""The wire server is believed only because the vendors' own clients read it, and our decoders agree with them."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio
import httpx2
import openai
import pytest
from tests.backends.decoding import DECODERS, decoder, text, thoughts
from tests.wire.frames import CALLS, REASONING_TEXT, answer, expected_usage
from tests.wire.server import WireServer

from cachespec.errors import BackendError, ServerError
from cachespec.events import Event, Finished, ToolCallDelta, UsageReported

pytestmark = pytest.mark.anyio
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
HI: list[Any] = [{"role": "user", "content": "hi"}]
APIS = sorted(DECODERS)


def request(api: str, model: str, *, content: str = "hi", **more: Any) -> dict[str, Any]:
    turns = {"input" if api == "responses" else "messages": [{"role": "user", "content": content}]}
    options = {"stream_options": {"include_usage": True}} if api == "chat" else {}
    return {"model": model, "stream": True, **turns, **options, **more}


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: the server has a thread of its own, and the vendors' clients leave generators open on trio."""
    return "asyncio"


@asynccontextmanager
async def http(keep: int | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=keep)
    async with httpx2.AsyncClient(timeout=20, limits=limits, trust_env=False) as client:
        yield client


async def read(
    server: WireServer, api: str, model: str, client: httpx2.AsyncClient, **more: Any
) -> tuple[list[Event], Exception | None]:
    """What our decoder makes of an answer, and the error that ended it (the decoder's or the connection's)."""
    d, events = decoder(api), []
    try:
        async with client.stream("POST", server.url + PATHS[api], json=request(api, model, **more)) as response:
            assert response.status_code == 200
            async for data in response.aiter_bytes():
                events += d.feed(data)
        events += d.close()
        if d.error is not None:
            d.close()
    except (BackendError, httpx2.HTTPError) as error:
        return events, error
    return events, None


def finish(events: list[Event]) -> str | None:
    found = [e.reason for e in events if isinstance(e, Finished)]
    return found[0] if found else None


def usages(events: list[Event]) -> list[Any]:
    return [e.usage for e in events if isinstance(e, UsageReported)]


# -- the vendors' clients ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def sdks(server: WireServer) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    async with (
        openai.AsyncOpenAI(api_key="k", base_url=server.openai_url, max_retries=0) as o,
        anthropic.AsyncAnthropic(api_key="k", base_url=server.url, max_retries=0) as a,
    ):
        yield o, a


@pytest.mark.parametrize(
    "model", ["ok-5", "tool", "tools2", "reasoning+ok-3", "crlf+comments+ok-4", "drip-1+ok-3", "single+ok-30"]
)
async def test_the_vendors_clients_read_every_stream(wire_server: WireServer, model: str) -> None:
    async with sdks(wire_server) as (o, a):
        chat_options: Any = {"include_usage": True}
        async with o.chat.completions.stream(model=model, messages=HI, stream_options=chat_options) as chat:
            done = await chat.get_final_completion()
        async with o.responses.stream(model=model, input="hi") as responses:
            response = await responses.get_final_response()
        async with a.messages.stream(model=model, max_tokens=9, messages=HI) as messages:
            message = await messages.get_final_message()
    async with http() as client:
        ours = {api: (await read(wire_server, api, model, client))[0] for api in APIS}
    choice = done.choices[0]
    assert (choice.message.content or "") == response.output_text == text(ours["chat"]) == text(ours["messages"])
    assert "".join(b.text for b in message.content if b.type == "text") == text(ours["responses"])
    arguments = [c.function.arguments for c in choice.message.tool_calls or []]
    assert arguments == [i.arguments for i in response.output if i.type == "function_call"]
    assert [json.loads(x) for x in arguments] == [b.input for b in message.content if b.type == "tool_use"]
    for api in APIS:
        pieces: dict[int, str] = {}
        for event in ours[api]:
            if isinstance(event, ToolCallDelta):
                pieces[event.index] = pieces.get(event.index, "") + event.arguments
        assert list(pieces.values()) == arguments
        assert finish(ours[api]) == ("tool_calls" if arguments else "stop")
    assert done.usage is not None
    assert response.usage is not None
    output = {done.usage.completion_tokens, response.usage.output_tokens, message.usage.output_tokens}
    assert len(output) == 1
    for api in APIS:
        assert usages(ours[api])[-1] == expected_usage(api, output.copy().pop())  # type: ignore[arg-type]


async def test_the_vendors_clients_read_whole_answers_and_counts(wire_server: WireServer) -> None:
    async with sdks(wire_server) as (o, a):
        chat = await o.chat.completions.create(model="reasoning+ok-3", messages=HI)
        response = await o.responses.create(model="reasoning+ok-3", input="hi")
        message = await a.messages.create(model="reasoning+ok-3", max_tokens=9, messages=HI)
        count = await a.messages.count_tokens(model="ok", messages=HI)
        tokens = await o.responses.input_tokens.count(model="ok", input="hi")
        models = await o.models.list()
    assert chat.choices[0].message.content == response.output_text == answer(3)
    assert [b.type for b in message.content] == ["thinking", "redacted_thinking", "text"]
    assert count.input_tokens > 0
    assert tokens.input_tokens > 0
    assert [m.id for m in models.data] == ["ok"]


async def test_the_vendors_clients_see_the_errors(wire_server: WireServer) -> None:
    async with sdks(wire_server) as (o, a):
        for status, theirs, ours in (
            (400, openai.BadRequestError, anthropic.BadRequestError),
            (401, openai.AuthenticationError, anthropic.AuthenticationError),
            (403, openai.PermissionDeniedError, anthropic.PermissionDeniedError),
            (404, openai.NotFoundError, anthropic.NotFoundError),
            (500, openai.InternalServerError, anthropic.InternalServerError),
            (529, openai.InternalServerError, anthropic.OverloadedError),
        ):
            with pytest.raises(theirs):
                await o.chat.completions.create(model=str(status), messages=HI)
            with pytest.raises(ours):
                await a.messages.create(model=str(status), max_tokens=9, messages=HI)
        with pytest.raises(openai.RateLimitError) as limited:
            await o.responses.create(model="429-1-0.5", input="hi")
        assert limited.value.response.headers["retry-after"] == "0.5"
        assert limited.value.request_id
        assert (await o.responses.create(model="429-1-0.5", input="hi")).output_text == answer(20)
        with pytest.raises(openai.BadRequestError) as long:
            await o.responses.create(model="context", input="hi")
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.APIStatusError) as overloaded:
            async with a.messages.stream(model="error-mid-2", max_tokens=9, messages=HI) as stream:
                await stream.get_final_message()
        assert overloaded.value.status_code == 200
        assert overloaded.value.type == "overloaded_error"
        with pytest.raises(openai.APIError):
            async with o.chat.completions.stream(model="error-mid-2", messages=HI) as chat:
                await chat.get_final_completion()


# -- every fault -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
async def test_what_each_fault_looks_like(wire_server: WireServer, api: str) -> None:
    async with http(keep=0) as client:  # a connection that the server closes unannounced would fail the next request
        for n in (0, 1, 7):
            events, error = await read(wire_server, api, f"cut-{n}", client)
            assert (text(events), finish(events), type(error)) == (answer(n), None, httpx2.RemoteProtocolError)
            events, error = await read(wire_server, api, f"reset-{n}", client)
            assert (text(events), finish(events)) == (answer(n), None)
            assert isinstance(error, httpx2.TransportError)
            events, error = await read(wire_server, api, f"eof-{n}", client)
            assert (text(events), finish(events), error) == (answer(n), None, None)
            events, error = await read(wire_server, api, f"malformed-{n}", client)
            assert (text(events), type(error)) == (answer(n), ServerError)
            events, error = await read(wire_server, api, f"error-mid-{n}:rate_limit_error", client)
            assert (text(events), type(error).__name__) == (answer(n), "RateLimitError")
            events, error = await read(wire_server, api, f"failed-{n}:rate_limit_exceeded", client)
            assert (text(events), type(error).__name__) == (answer(n), "RateLimitError")
        for model in ("plain-json", "dataonly", "close-idle", "slowstart-5", "slowfirst-5", "single"):
            events, error = await read(wire_server, api, model, client)
            assert (text(events), finish(events), error) == (answer(20), "stop", None)
            assert usages(events)[-1] == expected_usage(api, 20)  # type: ignore[arg-type]
        for model in ("html", "plain-error"):
            events, error = await read(wire_server, api, model, client)
            assert (events, type(error)) == ([], ServerError)
        assert await read(wire_server, api, "empty", client) == ([], None)
        events, error = await read(wire_server, api, "nousage", client)
        assert (finish(events), error, [u for u in usages(events) if u.output is not None]) == ("stop", None, [])
        for model, kind in (("cut-before-usage", httpx2.RemoteProtocolError), ("eof-before-usage", type(None))):
            events, error = await read(wire_server, api, model, client)
            assert (text(events), type(error)) == (answer(20), kind)
            assert finish(events) == ("stop" if api == "chat" else None)
        events, error = await read(wire_server, api, "incomplete", client)
        assert finish(events) == "length"
        for model in ("filtered", "refusal"):
            events, error = await read(wire_server, api, model, client)
            assert (text(events), finish(events)) == (answer(20), "content_filter")
        events, error = await read(wire_server, api, "reasoning+ok-2", client)
        assert (thoughts(events), text(events)) == ("".join(REASONING_TEXT), answer(2))
        events, error = await read(wire_server, api, "echo", client, content="Grüße, 世界 🙂 and more")
        assert text(events) == "Grüße, 世界 🙂 and more"
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(wire_server.url + PATHS[api], json=request(api, "refuse-1"))
        assert (await client.post(wire_server.url + PATHS[api], json=request(api, "refuse-1"))).status_code == 200
        assert (await client.post(wire_server.url + PATHS[api], content=b"{")).status_code == 400
        assert (await client.get(wire_server.url + "/nowhere")).status_code == 404


async def test_requests_are_recorded_to_the_byte(wire_server: WireServer) -> None:
    body = '{"model":"ok-1",  "stream":false,"messages":[{"role":"user","content":"é"}]}'.encode()
    async with http() as client:
        await client.post(wire_server.openai_url + "/chat/completions?x=1", content=body, headers={"X-Key": "v"})
        await client.post(wire_server.openai_url + "/chat/completions", content=body)
    first, second = wire_server.requests
    assert (first.method, first.path, first.body, first.headers["x-key"]) == ("POST", "/v1/chat/completions?x=1", body, "v")
    assert first.json["messages"][0]["content"] == "é"
    assert (first.status, first.disconnected_at, first.connection) == (200, None, second.connection)


@pytest.mark.parametrize("model", ["stall-3", "drip-20+ok-500", "stay"])
async def test_a_client_that_leaves_is_seen(wire_server: WireServer, model: str) -> None:
    async with http() as client:
        async with client.stream("POST", wire_server.url + PATHS["chat"], json=request("chat", model)) as response:
            async for _ in response.aiter_bytes():
                break
        left = time.monotonic()
        (recorded,) = wire_server.requests
        assert await anyio.to_thread.run_sync(recorded.ended.wait, 5)
    assert recorded.disconnected_at is not None
    assert recorded.disconnected_at - left < 1


async def test_idle_connections_are_closed_after_the_keep_alive(wire_server: WireServer) -> None:
    wire_server.keep_alive = 0.1
    before = wire_server.idle_closed
    async with http() as client:
        await client.post(wire_server.url + PATHS["chat"], json=request("chat", "ok-1", stream=False))
        assert await anyio.to_thread.run_sync(wire_server.wait_for, lambda: wire_server.idle_closed > before)


async def test_pacing(wire_server: WireServer) -> None:
    async with http() as client:
        start = time.monotonic()
        await read(wire_server, "messages", "drip-10+ok-20", client)
        assert time.monotonic() - start >= 0.19


async def test_many_streams_at_once_are_not_mixed_up(wire_server: WireServer) -> None:
    done: list[str] = []

    async def one(client: httpx2.AsyncClient, i: int) -> None:
        said = f"stream {i} says " + "x" * (i % 40)
        events, error = await read(wire_server, APIS[i % 3], "echo+drip-20", client, content=said)
        assert (text(events), finish(events), error) == (said, "stop", None)
        done.append(said)

    async with http() as client, anyio.create_task_group() as group:
        for i in range(150):
            group.start_soon(one, client, i)
    assert len(set(done)) == 150


def test_a_thousand_connections_in_the_middle_of_their_streams(wire_server: WireServer) -> None:
    body = json.dumps(request("chat", "stall-2")).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    count = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
    links = []
    try:
        for _ in range(count):
            links.append(socket.create_connection(("127.0.0.1", wire_server.port)))
            links[-1].sendall(head + body)
        for link in links:
            seen = b""
            while seen.count(b"data: ") < 3:
                seen += link.recv(65536)
        assert wire_server.connections >= count
    finally:
        for link in links:
            link.close()
    assert wire_server.wait_for(lambda: all(r.disconnected_at is not None for r in wire_server.requests))


def test_as_a_process() -> None:
    command = [sys.executable, "-m", "tests.wire.server", "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        answered = httpx2.post(url + PATHS["chat"], json=request("chat", "ok-3"), trust_env=False)
        process.stdin.close()
        assert process.wait(10) == 0
    assert answered.text.count("data: ") == 7


def test_the_calls_have_spaces_that_a_parser_would_lose() -> None:
    assert any(json.dumps(json.loads(arguments)) != arguments for _, _, arguments in CALLS)
