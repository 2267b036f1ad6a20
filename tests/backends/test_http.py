"""The HTTP client under the SDKs' clients, against a server that misbehaves: what is sent again, read, and followed."""

from __future__ import annotations

import gc
import gzip
import json
import socket
import time
from typing import Any

import anyio
import httpx2
import pytest
from tests.backends.hosted_support import ask, read_all, text_of
from tests.backends.raw_server import CHAT, OK, RawServer, answer

from cachespec.backends._hosted import HostedBackend
from cachespec.backends._http import ERROR_BYTES, HttpClient
from cachespec.backends._transport import retry_after
from cachespec.backends.anthropic import AnthropicBackend
from cachespec.backends.openai import OpenAIBackend
from cachespec.decision import Plan
from cachespec.errors import (
    BackendError,
    ConnectionFailedError,
    OverloadedError,
    RateLimitError,
    RequestRejectedError,
    ServerError,
)
from cachespec.events import ToolCallDelta
from cachespec.messages import Tool

pytestmark = pytest.mark.anyio


def chat(url: str, **options: Any) -> OpenAIBackend:
    return OpenAIBackend(name="b", model="m", api_key="SECRET", base_url=f"{url}/v1", api="chat", **options)


async def call(backend: HostedBackend, times: int = 1) -> str:
    text = ""
    try:
        for _ in range(times):
            text = text_of(await read_all(await backend.open(ask(), Plan(backend="b"), timeout=10)))
    finally:
        await backend.aclose()
    return text


def once(connection: socket.socket, n: int) -> object:
    """Answers the first request, and closes the connection at the next."""
    if n == 1:
        connection.sendall(OK)
    return n == 1


# -- what is sent again


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 200 OK\r\ncontent-type: text/", b"HTTP/1.1 103 Early Hints\r\n\r\n", b"H", b"GARBAGE\r\n\r\n"]
)
async def test_after_any_byte_nothing_is_sent_again(said: bytes) -> None:
    def handler(connection: socket.socket, n: int) -> object:
        connection.sendall(OK if n == 1 else said)
        return n == 1

    with RawServer(handler) as server, pytest.raises(ConnectionFailedError):
        await call(chat(server.url), times=2)
    assert len(server.requests) == 2


async def test_a_server_that_dies_of_a_request_gets_it_once() -> None:
    def handler(connection: socket.socket, n: int) -> object:
        if n == 1:
            connection.sendall(OK)
        else:
            time.sleep(0.5)
        return n == 1

    with RawServer(handler) as server, pytest.raises(ConnectionFailedError):
        await call(chat(server.url), times=2)
    assert len(server.requests) == 2


async def test_a_connection_that_was_being_closed_is_replaced_once_and_no_more() -> None:
    def handler(connection: socket.socket, n: int) -> object:
        if n in (1, 3):
            connection.sendall(OK)
        return n == 1

    with RawServer(handler) as server:
        assert await call(chat(server.url), times=2) == "hello"
        assert len(server.requests) == 3

    with RawServer(once) as server:
        with pytest.raises(ConnectionFailedError):
            await call(chat(server.url), times=2)
        assert len(server.requests) == 3


async def test_many_closed_connections_cost_a_request_one_more_try() -> None:
    """Each of six idle connections is closed as the next request comes: one of them is met, not all."""

    def handler(connection: socket.socket, n: int) -> object:
        if n <= 6:
            time.sleep(0.1)
        if n != 7:
            connection.sendall(OK)
        return n <= 6

    with RawServer(handler) as server:
        backend = chat(server.url)

        async def one() -> None:
            await read_all(await backend.open(ask(), Plan(backend="b"), timeout=10))

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(one)
        await one()
        await backend.aclose()
        assert len(server.requests) == 8


async def test_without_a_look_at_the_network_nothing_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.backends._http.httpcore2.AsyncNetworkBackend", type("Other", (), {}))
    client = HttpClient()
    with RawServer(once) as server:
        assert (await client.get(server.url)).content == CHAT
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get(server.url)
    assert len(server.requests) == 2
    await client.aclose()


# -- the bodies of errors


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_an_error_without_end_is_read_up_to_a_bound(api: str) -> None:
    sent = 0

    def handler(connection: socket.socket, _: int) -> None:
        nonlocal sent
        connection.sendall(b"HTTP/1.1 500 x\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n")
        while True:
            sent += connection.send(b"x" * 65536)

    with RawServer(handler) as server:
        backend: HostedBackend = chat(server.url)
        if api == "messages":
            backend = AnthropicBackend(name="b", model="m", api_key="k", base_url=server.url)
        with anyio.fail_after(10), pytest.raises(ServerError) as caught:
            await call(backend)
        assert caught.value.status == 500
        assert len(str(caught.value)) < 400
        gc.collect()
    assert sent < 64 * ERROR_BYTES  # what sockets hold, and no more


async def test_an_error_whose_words_never_come_is_told_by_its_status() -> None:
    def handler(connection: socket.socket, _: int) -> None:
        connection.sendall(b"HTTP/1.1 529 x\r\ncontent-length: 100\r\n\r\n{")
        time.sleep(8)

    with RawServer(handler) as server, anyio.fail_after(7), pytest.raises(OverloadedError):
        await call(chat(server.url))


@pytest.mark.parametrize("charset", ["hex", "rot13", "idna", "utf-7", "base64", "punycode", "undefined", "utf-16", "\xff"])
@pytest.mark.parametrize(("status", "kind"), [(500, ServerError), (400, RequestRejectedError)])
async def test_no_charset_of_an_error_does_harm(charset: str, status: int, kind: type[BackendError]) -> None:
    for body in (b'{"error":{"message":"gr\xc3\xbc\xc3\x9fe"}}', b'\xff\xfe{"error"zz'):
        said = answer(f"{status} x", body, f"content-type: application/json; charset={charset}")
        with RawServer(lambda connection, _, said=said: connection.sendall(said)) as server, pytest.raises(kind) as caught:  # type: ignore[misc]
            await call(chat(server.url))
        assert caught.value.status == status
        assert ("grüße" in str(caught.value)) == body.startswith(b"{")


@pytest.mark.parametrize("body", [gzip.compress(b'{"error":{"message":"zipped"}}'), b"no gzip"])
async def test_an_error_may_be_compressed_and_broken(body: bytes) -> None:
    said = answer("400 x", body, "content-encoding: gzip")
    with RawServer(lambda connection, _: connection.sendall(said)) as server, pytest.raises(RequestRejectedError) as caught:
        await call(chat(server.url))
    assert ("zipped" in str(caught.value)) == body.startswith(b"\x1f\x8b")


@pytest.mark.parametrize(("status", "kind"), [(400, RequestRejectedError), (529, OverloadedError)])
async def test_an_error_is_what_it_is_where_nothing_is_streamed(status: int, kind: type[BackendError]) -> None:
    said = answer(f"{status} x", b'{"error":{"message":"in words"}}', "content-type: application/json")
    with RawServer(lambda connection, _: connection.sendall(said)) as server:
        backend = AnthropicBackend(name="b", model="claude-sonnet-5", api_key="k", base_url=server.url)
        with pytest.raises(kind, match="in words") as caught:
            await backend.warm(ask(), Plan(backend="b"), timeout=10)
        await backend.aclose()
    assert (caught.value.status, caught.value.begun) == (status, False)


@pytest.mark.parametrize("output", ["hi", ["hi"], {"a": 1}, 3])
async def test_an_odd_field_of_an_answer_to_a_warming_takes_nothing_from_its_counts(output: Any) -> None:
    counts = {"input_tokens": 3, "output_tokens": 0}
    for kind, model, path, usage in (
        (AnthropicBackend, "claude-sonnet-5", "", {**counts, "output": output}),
        (OpenAIBackend, "gpt-5.6-terra", "/v1", counts),
    ):
        body = json.dumps({"id": "r", "model": model, "output": output, "service_tier": "flex", "usage": usage}).encode()
        said = answer("200 OK", body, "content-type: application/json")
        with RawServer(lambda connection, _, said=said: connection.sendall(said)) as server:  # type: ignore[misc]
            backend = kind(name="b", model=model, api_key="k", base_url=f"{server.url}{path}")
            warmed = await backend.warm(ask(), Plan(backend="b"), timeout=10)
            await backend.aclose()
        assert warmed.usage is not None
        assert (warmed.usage.input_tokens, warmed.usage.output) == (3, 0)
        assert warmed.billing == (None if kind is AnthropicBackend else {"service_tier": "flex"})


async def test_a_server_that_gives_each_call_the_same_place_is_read_by_the_tools_of_the_request() -> None:
    calls = [[{"index": 0, "function": {"name": name, "arguments": ""}}] for name in ("start", "stop")]
    choices = [{"index": 0, "delta": {"tool_calls": each}} for each in calls]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    body = b"".join(b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode() for choice in choices)
    said = answer("200 OK", body + b"data: [DONE]\n\n", "content-type: text/event-stream")
    with RawServer(lambda connection, _: connection.sendall(said)) as server:
        backend = chat(server.url)
        request = ask(tools=(Tool(name="start"), Tool(name="stop")))
        events = await read_all(await backend.open(request, Plan(backend="b"), timeout=10))
        await backend.aclose()
    assert [(e.index, e.name) for e in events if isinstance(e, ToolCallDelta)] == [(0, "start"), (1, "stop")]


async def test_an_answer_that_ends_early_is_a_broken_connection_where_nothing_is_streamed() -> None:
    said = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"
    with RawServer(lambda connection, _: connection.sendall(said)) as server:
        backend = AnthropicBackend(name="b", model="claude-sonnet-5", api_key="k", base_url=server.url)
        with pytest.raises(ConnectionFailedError) as caught:
            await backend.warm(ask(), Plan(backend="b"), timeout=10)
        await backend.aclose()
    assert caught.value.begun


# -- redirects


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
async def test_no_redirect_is_followed(status: int) -> None:
    with RawServer(lambda connection, _: connection.sendall(OK)) as other:
        said = answer(f"{status} x", b"", f"location: {other.url}/v1/chat/completions?key=QUERY")
        with RawServer(lambda connection, _: connection.sendall(said)) as server, pytest.raises(ServerError) as caught:
            await call(chat(server.url, headers={"x-portkey-api-key": "SECRET2"}))
        assert other.url in str(caught.value)
        assert "QUERY" not in str(caught.value)
        assert "completions" not in str(caught.value)
        assert (len(server.requests), len(other.requests)) == (1, 0)


@pytest.mark.parametrize(
    "location",
    ["", "location: /elsewhere", "location: file:///etc/passwd", "location: http://[bad", "location: http://me:pw@h/"],
)
async def test_a_redirect_to_nowhere_is_typed(location: str) -> None:
    said = answer("307 x", b"", location or "x: y")
    with (
        RawServer(lambda connection, _: connection.sendall(said)) as server,
        pytest.raises(ServerError, match="redirect") as caught,
    ):
        await call(chat(server.url))
    assert "passwd" not in str(caught.value)
    assert "pw" not in str(caught.value)


# -- hostile heads


@pytest.mark.parametrize(
    "text",
    [
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Mon, 01 Jan 2026 00:00:00 +99999999999999999999",
        "Mon, 99 Foo 2026 99:99:99 GMT",
        "1e400",
        "nan",
        "garbage",
        ",",
        "01 Jan",
    ],
)
async def test_an_unreadable_retry_after_is_none(text: str) -> None:
    assert retry_after({"retry-after": text}) is None
    said = answer("429 x", b"{}", f"retry-after: {text}")
    with RawServer(lambda connection, _: connection.sendall(said)) as server, pytest.raises(RateLimitError) as caught:
        await call(chat(server.url))
    assert caught.value.retry_after is None


async def test_dates_at_the_edge_are_seconds() -> None:
    assert (retry_after({"retry-after": "Fri, 31 Dec 9999 23:59:59 -2359"}) or 0) > 1e10
    assert retry_after({"retry-after": "Mon, 01 Jan 0001 00:00:00 +2359"}) == 0.0
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 -0000"}) == 0.0  # a date without a zone
