"""The hosted backends against the loopback wire server: what is sent, what comes back, and how things go wrong."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import httpx2
import pytest
from tests.backends.hosted_support import WEATHER, ask, calls_of, finish_of, read_all, text_of, usage_of
from tests.wire.frames import CALLS, Api, answer, expected_usage
from tests.wire.server import WireServer

from cachespec.backends import _http
from cachespec.backends._hosted import HostedBackend
from cachespec.backends._http import HttpClient
from cachespec.backends._transport import retry_after, status_error
from cachespec.backends.anthropic import AnthropicBackend
from cachespec.backends.compatible import compatible
from cachespec.backends.openai import OpenAIBackend
from cachespec.decision import Plan
from cachespec.errors import (
    AuthenticationError,
    BackendError,
    ConfigError,
    ConnectionFailedError,
    ContentFilteredError,
    ContextLengthError,
    MissingDependencyError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RequestRejectedError,
    RequestTimeoutError,
    ServerError,
    UnsupportedParameterError,
)
from cachespec.messages import CacheMark, ImagePart, Message, TextPart
from cachespec.prompt import build_prompt
from cachespec.request import Request, ToolChoice
from cachespec.testing import check_backend

APIS: list[Api] = ["chat", "responses", "messages"]
Build = Callable[..., HostedBackend]


def build(api: str, server: WireServer, model: str, **options: Any) -> HostedBackend:
    if api == "messages":
        return AnthropicBackend(name="b", model=model, api_key="secret", base_url=server.url, **options)
    return OpenAIBackend(name="b", model=model, api_key="secret", base_url=server.openai_url, api=api, **options)  # type: ignore[arg-type]


async def call(backend: HostedBackend, request: Request | None = None, timeout: float | None = 10) -> Any:
    try:
        attempt = await backend.open(request or ask(), Plan(backend="b"), timeout=timeout)
        return await read_all(attempt)
    finally:
        await backend.aclose()


# -- success


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_an_answer_arrives_whole_with_its_usage(api: Api, wire_server: WireServer) -> None:
    events = await call(build(api, wire_server, "ok-25+drip-1"), ask(system="S", max_output_tokens=99))
    assert text_of(events) == answer(25)
    assert finish_of(events).reason == "stop"
    assert usage_of(events).usage == expected_usage(api, 25)


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_parallel_tool_calls_arrive_byte_for_byte(api: Api, wire_server: WireServer) -> None:
    # Case C10.
    events = await call(build(api, wire_server, "tools2+single"), ask(tools=(WEATHER,), tool_choice=ToolChoice(mode="auto")))
    assert calls_of(events) == list(CALLS)
    assert finish_of(events).reason == "tool_calls"


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_wire_is_what_is_sent(api: Api, wire_server: WireServer) -> None:
    backend = build(api, wire_server, "ok-1")
    request = ask("Grüße 🙂", system="S", tools=(WEATHER,), max_output_tokens=7)
    wire = backend.wire(request, Plan(backend="b"))
    await call(backend, request)
    (recorded,) = wire_server.requests
    assert recorded.body.decode() == wire.body
    assert wire.url == wire_server.url + recorded.path
    assert "secret" not in wire.body + wire.url
    assert recorded.headers["authorization"] == "Bearer secret"
    assert recorded.headers["content-type"] == "application/json"


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_one_connection_serves_one_call_after_another(api: Api, wire_server: WireServer) -> None:
    backend = build(api, wire_server, "ok-3")
    for _ in range(3):
        attempt = await backend.open(ask(), Plan(backend="b"), timeout=5)
        await read_all(attempt)
    await backend.aclose()
    assert len({r.connection for r in wire_server.requests}) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_a_body_that_never_ends_is_not_waited_for(api: Api, wire_server: WireServer) -> None:
    start = time.monotonic()
    events = await call(build(api, wire_server, "ok-3+stay"))
    assert finish_of(events).reason == "stop"
    assert usage_of(events).usage.output == 3
    assert time.monotonic() - start < 5


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_many_streams_at_once_stay_apart(api: Api, wire_server: WireServer) -> None:
    backend = build(api, wire_server, "echo+drip-2")
    got: dict[int, str] = {}

    async def one(i: int) -> None:
        attempt = await backend.open(ask(f"number {i} of many, said at some length"), Plan(backend="b"), timeout=30)
        got[i] = text_of(await read_all(attempt))

    async with anyio.create_task_group() as group:
        for i in range(60):
            group.start_soon(one, i)
    await backend.aclose()
    assert got == {i: f"number {i} of many, said at some length" for i in range(60)}


@pytest.mark.anyio
async def test_what_could_not_be_said_is_told_with_the_end(wire_server: WireServer) -> None:
    mark = CacheMark(dialect="anthropic", fields={"type": "ephemeral"})
    request = Request(messages=(Message(role="user", parts=(TextPart(text="x", mark=mark),)),))
    events = await call(build("chat", wire_server, "ok-1"), request)
    (warning,) = finish_of(events).warnings
    assert "messages[0][0]" in warning


# -- leaving


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("how", ["close", "cancel", "cancel-read"])
async def test_leaving_closes_the_upstream_at_once(api: Api, how: str, wire_server: WireServer) -> None:
    # Case C11: within 100 ms; the bound here allows for a busy machine.
    backend = build(api, wire_server, "ok-3000+drip-5")
    left = 0.0
    if how == "close":
        attempt = await backend.open(ask(), Plan(backend="b"), timeout=30)
        await attempt.read()
        left = time.monotonic()
        await attempt.aclose()
        await attempt.aclose()
        assert await attempt.read() == ()
    else:
        with anyio.CancelScope() as scope:
            attempt = await backend.open(ask(), Plan(backend="b"), timeout=30)
            try:
                await attempt.read()
                if how == "cancel":
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                else:
                    scope.deadline = anyio.current_time() + 0.05
                    while True:
                        await attempt.read()
            finally:
                left = time.monotonic()
                await attempt.aclose()
    (recorded,) = wire_server.requests
    assert wire_server.wait_for(lambda: recorded.disconnected_at is not None)
    assert recorded.disconnected_at is not None
    assert recorded.disconnected_at - left < 0.5
    await backend.aclose()
    gc.collect()  # nothing is left for the collector to complain about


@pytest.mark.anyio
async def test_closing_from_another_task_ends_the_read(wire_server: WireServer) -> None:
    backend = build("chat", wire_server, "ok-5+stall-1")
    attempt = await backend.open(ask(), Plan(backend="b"), timeout=30)
    await attempt.read()

    async def close() -> None:
        await anyio.sleep(0.05)
        await attempt.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(close)
        with anyio.fail_after(10):
            while await attempt.read():
                pass
    await backend.aclose()


@pytest.mark.anyio
async def test_cancelling_while_it_opens_leaves_nothing(wire_server: WireServer) -> None:
    backend = build("chat", wire_server, "ok-5+slowstart-60000")
    with anyio.move_on_after(0.3):
        await backend.open(ask(), Plan(backend="b"), timeout=30)
    assert wire_server.wait_for(lambda: all(r.disconnected_at is not None for r in wire_server.requests))
    await backend.aclose()


# -- errors


STATUS: list[tuple[str, type[BackendError], int]] = [
    ("400", RequestRejectedError, 400),
    ("401", AuthenticationError, 401),
    ("403", PermissionDeniedError, 403),
    ("404", NotFoundError, 404),
    ("409", OverloadedError, 409),
    ("413", RequestRejectedError, 413),
    ("429", RateLimitError, 429),
    ("500", ServerError, 500),
    ("502", ServerError, 502),
    ("503", OverloadedError, 503),
    ("529", OverloadedError, 529),
    ("context", ContextLengthError, 400),
    ("filter", ContentFilteredError, 400),
    ("unsupported", UnsupportedParameterError, 400),
]


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("model", "kind", "status"), STATUS)
async def test_every_error_status_is_typed(
    api: Api, model: str, kind: type[BackendError], status: int, wire_server: WireServer
) -> None:
    with pytest.raises(BackendError) as caught:
        await call(build(api, wire_server, model))
    error = caught.value
    if api == "messages" and model in ("context", "filter", "unsupported"):
        kind = RequestRejectedError  # Anthropic has no word for these, only a text
    assert type(error) is kind
    assert (error.status, error.backend, error.model) == (status, "b", model)
    assert error.request_id == "req_1"
    assert error.__cause__ is not None
    assert error.retryable == kind.default_retryable
    assert len(wire_server.requests) == 1  # the SDKs never retry by themselves
    assert (f"(at {wire_server.url}/" in str(error)) == (kind is NotFoundError)  # a wrong base_url shows


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_retry_after_is_reported(api: Api, wire_server: WireServer) -> None:
    with pytest.raises(RateLimitError) as caught:
        await call(build(api, wire_server, "429-1-7"))
    assert caught.value.retry_after == 7.0


@pytest.mark.parametrize(
    ("header", "form"), [("retry-after", "{:.3f}"), ("retry-after", "{:.0f}000"), ("retry-after-ms", "{:.0f}000")]
)
def test_a_retry_after_that_is_unix_time_is_read_as_one(header: str, form: str) -> None:
    found = retry_after({header: form.format(time.time() + 90)})
    assert found is not None
    assert 0 < found <= 91
    assert retry_after({"retry-after": "1700000000"}) == 0.0  # it is over
    assert retry_after({"retry-after": "86400"}) == 86_400.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"}, None),
        ({"retry-after": "Mon, 01 Jan 2001 00:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_forms_of_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    found = retry_after(httpx2.Headers(headers))
    if "2100" in headers.get("retry-after", ""):
        assert found is not None
        assert found > 1e9
    else:
        assert found == seconds


def _status(status: int, body: object, **headers: str) -> BackendError:
    response = httpx2.Response(status, headers=headers)
    return status_error(response, body, backend="b", model="m")


def test_spend_limits_are_not_rate_limits() -> None:
    quota = _status(429, {"message": "x", "type": "insufficient_quota", "code": "insufficient_quota"})
    assert type(quota) is PermissionDeniedError
    assert not quota.retryable
    details = {"error_code": "enforced_spend_limit_reached"}
    cap = _status(429, {"type": "error", "error": {"type": "rate_limit_error", "message": "x", "details": details}})
    assert type(cap) is PermissionDeniedError
    ramp = {"error_code": "ramp_limit_exceeded"}
    assert type(_status(429, {"error": {"type": "rate_limit_error", "details": ramp}})) is RateLimitError


def test_a_refused_parameter_is_known_by_its_name_not_by_its_text() -> None:
    body = {"message": "no", "type": "invalid_request_error", "param": "reasoning_effort", "code": None}
    assert type(_status(400, body)) is UnsupportedParameterError
    assert type(_status(400, {**body, "param": "messages[0].content"})) is RequestRejectedError
    assert type(_status(400, {**body, "param": "temperature", "code": "decimal_above_max_value"})) is RequestRejectedError
    assert (
        type(_status(400, {"message": "temperature is not supported", "type": "invalid_request_error"})) is RequestRejectedError
    )


def test_answers_that_are_no_error_objects() -> None:
    assert type(_status(502, "<html>Bad gateway</html>")) is ServerError
    assert "Bad gateway" in str(_status(502, "<html>Bad gateway</html>"))
    assert type(_status(404, {"error": "no such model"})) is NotFoundError
    assert "no such model" in str(_status(404, {"error": "no such model"}))
    assert type(_status(418, None)) is RequestRejectedError
    assert type(_status(409, None)) is OverloadedError  # a lock at the vendor: the SDKs try again, and so do we
    assert type(_status(409, {"type": "error", "error": {"type": "conflict_error", "message": "x"}})) is OverloadedError
    assert type(_status(409, {"error": {"type": "invalid_request_error", "code": None}})) is OverloadedError
    assert not _status(409, None, **{"x-should-retry": "false"}).retryable
    assert not _status(529, None, **{"x-should-retry": "false"}).retryable
    assert not _status(400, None, **{"x-should-retry": "true"}).retryable  # a 400 is never retried elsewhere
    error = _status(400, {"error": {"type": "exceed_context_size_error", "code": 400, "message": "too long"}})
    assert type(error) is ContextLengthError


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("model", ["ok-9+cut-3", "ok-9+reset-3+drip-5"])
async def test_a_broken_connection_is_typed_and_what_came_before_is_kept(api: Api, model: str, wire_server: WireServer) -> None:
    backend = build(api, wire_server, model)
    attempt = await backend.open(ask(), Plan(backend="b"), timeout=10)
    events: list[Any] = []
    with pytest.raises(ConnectionFailedError) as caught:
        while batch := await attempt.read():
            events += batch
    await attempt.aclose()
    await backend.aclose()
    assert text_of(events) == answer(3)
    assert isinstance(caught.value.__cause__, httpx2.TransportError)


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_a_clean_end_without_the_terminal_event_finishes_nothing(api: Api, wire_server: WireServer) -> None:
    events = await call(build(api, wire_server, "ok-9+eof-3"))
    assert text_of(events) == answer(3)
    assert "Finished" not in {type(e).__name__ for e in events}


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_an_error_event_in_the_stream_is_typed(api: Api, wire_server: WireServer) -> None:
    with pytest.raises(OverloadedError if api == "messages" else ServerError):
        await call(build(api, wire_server, "ok-9+error-mid-3"))


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_silence_ends_at_the_deadline(api: Api, wire_server: WireServer) -> None:
    start = time.monotonic()
    with pytest.raises(RequestTimeoutError, match="no byte over the connection before the deadline of the request"):
        await call(build(api, wire_server, "ok-9+stall-2"), timeout=0.3)
    with pytest.raises(RequestTimeoutError, match=r"no byte over the connection within 0\.3 s"):
        await call(build(api, wire_server, "ok-9+stall-2", read_timeout=0.3))
    with pytest.raises(RequestTimeoutError, match=r"no byte over the connection to http://\S+ within 0\.3 s"):
        await call(build(api, wire_server, "ok-9+slowstart-60000", read_timeout=0.3))
    with pytest.raises(RequestTimeoutError) as caught:
        await call(build(api, wire_server, "ok-9+slowstart-60000"), timeout=0.3)
    assert isinstance(caught.value.__cause__, Exception)
    assert time.monotonic() - start < 10


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_a_closed_port_is_a_failed_connection(api: Api, wire_server: WireServer) -> None:
    if api == "messages":
        backend: HostedBackend = AnthropicBackend(name="b", model="m", api_key="k", base_url="http://127.0.0.1:9")
    else:
        backend = OpenAIBackend(name="b", model="m", api_key="k", base_url="http://127.0.0.1:9/v1", api=api)
    with pytest.raises(ConnectionFailedError, match=r"127\.0\.0\.1:9"):
        await call(backend)


# -- stale connections


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_a_connection_the_server_had_closed_is_replaced_at_once(api: Api, wire_server: WireServer) -> None:
    backend = build(api, wire_server, "refuse-1")
    http = await _warm(backend, wire_server)
    # On the reused connection the server hangs up without a word: nothing was received, so it is sent again.
    events = await call(backend)
    assert finish_of(events).reason == "stop"
    assert [r.status for r in wire_server.requests[1:]] == [0, 200]
    assert http.is_closed


async def _warm(backend: HostedBackend, server: WireServer) -> HttpClient:
    """Leave one idle connection in the backend's pool."""
    await backend.start()
    client: Any = backend._client
    http = client._client
    assert isinstance(http, HttpClient)
    await http.get(f"{server.url}/v1/models")
    return http


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_a_new_connection_that_breaks_is_not_retried(api: Api, wire_server: WireServer) -> None:
    with pytest.raises(ConnectionFailedError):
        await call(build(api, wire_server, "refuse-1"))
    assert len(wire_server.requests) == 1


@pytest.mark.anyio
async def test_the_second_time_goes_by_no_connection_that_idled_until_now() -> None:
    """A server that is closing its idle connections, each as the next request comes: one new connection, not one try each."""
    requests: list[int] = []

    async def serve(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            for turn in range(2):
                try:
                    head = await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    return
                assert head.startswith(b"GET ")
                requests.append(turn)
                if turn == 0:
                    await anyio.sleep(0.2)  # so that the first ones take a connection each
                    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django
    async with anyio.create_task_group() as group, HttpClient() as http:
        group.start_soon(listener.serve, serve)
        async with anyio.create_task_group() as first:
            for _ in range(5):
                first.start_soon(http.get, f"http://127.0.0.1:{port}/")
        assert requests == [0] * 5
        assert (await http.get(f"http://127.0.0.1:{port}/")).is_success
        assert requests == [0] * 5 + [1, 0]
        group.cancel_scope.cancel()
    await listener.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("late", [False, True])
async def test_a_new_connection_that_the_server_gave_up_before_we_sent_is_replaced(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy client that is slow to send: the server does not wait for ever, and closes before the request or as it comes."""
    opened = 0

    async def serve(stream: anyio.abc.ByteStream) -> None:
        nonlocal opened
        opened += 1
        async with stream:
            if opened > 1:
                await stream.receive()
                await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            elif late:
                await stream.receive()

    monkeypatch.setattr(_http, "STALE_S", 5.0)
    monkeypatch.setattr(_http, "IDLE_S", 0.2)
    connect = _http._Network.connect_tcp

    async def slowly(self: Any, *args: Any, **options: Any) -> Any:
        stream = await connect(self, *args, **options)
        await anyio.sleep(0.3)
        return stream

    monkeypatch.setattr(_http._Network, "connect_tcp", slowly)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django
    async with anyio.create_task_group() as group, HttpClient() as http:
        group.start_soon(listener.serve, serve)
        assert (await http.get(f"http://127.0.0.1:{port}/")).is_success
        assert opened == 2
        group.cancel_scope.cancel()
    await listener.aclose()


@pytest.mark.anyio
async def test_pauses_around_the_servers_keep_alive_lose_nothing(
    wire_server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_http, "STALE_S", 5.0)  # on a busy machine 0.2 s can pass between a request and its hearing nothing
    wire_server.keep_alive = 0.5
    backend = build("chat", wire_server, "ok-2")
    await backend.start()

    async def one(i: int) -> None:
        for pause in (0.48, 0.51):
            attempt = await backend.open(ask(), Plan(backend="b"), timeout=30)
            assert text_of(await read_all(attempt)) == answer(2)
            await anyio.sleep(pause + i / 1000)

    try:
        async with anyio.create_task_group() as group:
            for i in range(20):
                group.start_soon(one, i)
    finally:
        await backend.aclose()


# -- the environment


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_no_environment_header_reaches_another_base_url(
    api: Api, wire_server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak = "x-leak: yes\nAuthorization: Bearer leak\nanthropic-version: 1999-01-01\nX-Api-Key: leak\nUser-Agent: leak"
    for name in ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS"):
        monkeypatch.setenv(name, leak)
    for name in (
        *("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_WEBHOOK_SECRET"),
        *("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE", "ANTHROPIC_WEBHOOK_SIGNING_KEY"),
    ):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/leak")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:9/leak")
    await call(build(api, wire_server, "ok-1"))
    server = "llama-server"
    url = wire_server.url if api == "messages" else wire_server.openai_url
    await call(compatible(name="b", server=server, model="ok-1", base_url=url, api=api))
    for recorded in wire_server.requests:
        assert "leak" not in str(recorded.headers).lower()
        assert "openai-organization" not in recorded.headers
    assert wire_server.requests[0].headers["authorization"] == "Bearer secret"
    assert "authorization" not in wire_server.requests[1].headers
    if api == "messages":
        assert wire_server.requests[0].headers["anthropic-version"] == "2026-10-21"
        assert wire_server.requests[1].headers["anthropic-version"] == "2023-06-01"


@pytest.mark.anyio
async def test_given_headers_are_sent_and_win(wire_server: WireServer) -> None:
    backend = build("messages", wire_server, "ok-1", headers={"Anthropic-Beta": "x-1", "AUTHORIZATION": "Bearer own"})
    await call(backend)
    (recorded,) = wire_server.requests
    assert recorded.headers["anthropic-beta"] == "x-1"
    assert recorded.headers["authorization"] == "Bearer own"
    backend = build("chat", wire_server, "ok-1", organization="org", project="proj")
    await call(backend)
    assert wire_server.requests[1].headers["openai-organization"] == "org"
    assert wire_server.requests[1].headers["openai-project"] == "proj"


@pytest.mark.anyio
async def test_a_key_is_sent_the_way_it_is_asked_for(wire_server: WireServer) -> None:
    await call(build("messages", wire_server, "ok-1", auth="x-api-key"))
    (recorded,) = wire_server.requests
    assert recorded.headers["x-api-key"] == "secret"
    assert "authorization" not in recorded.headers


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for factory, variable in ((OpenAIBackend, "OPENAI_API_KEY"), (AnthropicBackend, "ANTHROPIC_API_KEY")):
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(ConfigError, match=variable) as caught:
            factory(name="b", model="m")
        assert caught.value.key == "api_key"
        monkeypatch.setenv(variable, "")
        with pytest.raises(ConfigError, match=variable):
            factory(name="b", model="m")
        monkeypatch.setenv(variable, "from-env")
        assert factory(name="b", model="m")._api_key == "from-env"
        with pytest.raises(ConfigError, match="not sent to another base URL") as caught:
            factory(name="b", model="m", base_url="http://127.0.0.1:1/v1")
        assert caught.value.hint is not None
        assert variable not in caught.value.hint
        with pytest.raises(ConfigError, match="blanks"):
            factory(name="b", model="m", api_key="a b\n")


def test_openais_own_address_uses_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    assert OpenAIBackend(name="b", model="m", api_key="k")._organization == "org"
    assert OpenAIBackend(name="b", model="m", api_key="k", base_url="http://127.0.0.1:1")._organization is None


def test_a_missing_sdk_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for factory, extra in ((OpenAIBackend, "openai"), (AnthropicBackend, "anthropic")):
        monkeypatch.setitem(sys.modules, extra, None)
        with pytest.raises(MissingDependencyError, match=rf"cachespec\[{extra}\]") as caught:
            factory(name="b", model="m", api_key="k")
        assert caught.value.extra == extra


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"base_url": "ftp://x"}, "base_url"),
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": "https://me:pw@host"}, "base_url"),
        ({"base_url": "http://[::1"}, "base_url"),
        ({"base_url": "https://host/v1?key=SECRET"}, "base_url"),
        ({"base_url": "https://host/v1#SECRET"}, "base_url"),
        ({"headers": {"x-a": "SECRETé"}}, "headers.x-a"),
        ({"headers": {"x-a": "SECRET\r\nx-b: c"}}, "headers.x-a"),
        ({"headers": {"x-a": " SECRET"}}, "headers.x-a"),
        ({"headers": {"x-a": "\x00SECRET"}}, "headers.x-a"),
        ({"headers": {"x-a": 5}}, "headers.x-a"),
        ({"headers": {"bad name": "SECRET"}}, "headers.bad name"),
        ({"headers": {"x:": "SECRET"}}, "headers.x:"),
        ({"headers": {"": "SECRET"}}, "headers."),
        ({"model": ""}, "model"),
        ({"context": 0}, "context"),
        ({"max_output": -1}, "max_output"),
        ({"connect_timeout": 0.0}, "connect_timeout"),
        ({"read_timeout": float("nan")}, "read_timeout"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], key: str) -> None:
    for factory in (OpenAIBackend, AnthropicBackend):
        with pytest.raises(ConfigError) as caught:
            factory(**{"name": "b", "model": "m", "api_key": "k", **options})
        assert caught.value.key == key
        assert "SECRET" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        OpenAIBackend(name="b", model="m", api_key="k", organization="ö")
    assert caught.value.key == "organization"
    OpenAIBackend(name="b", model="m", api_key="k", headers={"x-a": "", "x_b": 'a b; c="d"'})
    with pytest.raises(ConfigError, match="2023-06-01"):
        AnthropicBackend(name="b", model="m", api_key="k", version="latest")


@pytest.mark.parametrize(
    ("factory", "url", "base"),
    [
        (OpenAIBackend, "http://127.0.0.1:1/v1/chat/completions", "http://127.0.0.1:1/v1"),
        (OpenAIBackend, "http://127.0.0.1:1/v1/responses/", "http://127.0.0.1:1/v1"),
        (AnthropicBackend, "http://127.0.0.1:1/v1/messages", "http://127.0.0.1:1"),
    ],
)
def test_an_endpoint_is_no_base_url(factory: type[OpenAIBackend] | type[AnthropicBackend], url: str, base: str) -> None:
    with pytest.raises(ConfigError) as caught:
        factory(name="b", model="m", api_key="k", base_url=url)
    assert (caught.value.key, caught.value.hint) == ("base_url", f"did you mean {base!r}?")
    factory(name="b", model="m", api_key="k", base_url=base)


# -- what is known before


def test_estimates_bound_the_input_by_bytes() -> None:
    backend = OpenAIBackend(name="b", model="gpt-6-astra", api_key="k")
    request = ask("word " * 1000, system="S" * 400, tools=(WEATHER,), max_output_tokens=50)
    found = backend.estimate(build_prompt(request))
    assert found.tokens.input is not None
    assert 1200 < found.tokens.input < 1800
    assert found.tokens.uncached == found.tokens.input
    assert found.tokens.cache_read is None
    assert found.tokens.worst_input is not None
    assert found.tokens.worst_input >= len(backend.wire(request, Plan(backend="b")).body)
    assert found.belief.state == "unknown"
    assert found.latency.evidence == "assumed"


def test_an_image_is_not_counted_by_its_bytes() -> None:
    backend = AnthropicBackend(name="b", model="claude-sonnet-5-5", api_key="k")
    picture = ImagePart(data="A" * 400_000, media_type="image/png")
    request = Request(messages=(Message(role="user", parts=(TextPart(text="x"), picture)),))
    found = backend.estimate(build_prompt(request)).tokens
    assert found.input is not None
    assert found.input < 2000
    assert found.worst_input is not None
    assert found.worst_input > 400_000


def test_prices_and_context_are_those_of_the_model() -> None:
    backend = AnthropicBackend(name="b", model="claude-sonnet-5-5", api_key="k")
    assert backend.rates is not None
    assert backend.capabilities.context == 1_000_000
    assert AnthropicBackend(name="b", model="claude-haiku-4-5", api_key="k").capabilities.context == 200_000
    assert OpenAIBackend(name="b", model="gpt-5.6-sol", api_key="k").capabilities.context == 1_050_000
    assert OpenAIBackend(name="b", model="gpt-5.6-sol", api_key="k", context=5).capabilities.context == 5
    elsewhere = OpenAIBackend(name="b", model="gpt-5.6-sol", api_key="k", base_url="http://127.0.0.1:1/v1")
    assert elsewhere.rates is None  # whose prices hold there is not known (contract M2)
    own = OpenAIBackend(name="b", model="x", api_key="k", prices={"input": "1", "output": "2"})
    assert own.rates is not None
    with pytest.raises(ConfigError):
        OpenAIBackend(name="b", model="x", api_key="k", prices={"inputs": "1"})


@pytest.mark.anyio
async def test_what_check_refuses_is_not_sent(wire_server: WireServer) -> None:
    backend = build("messages", wire_server, "ok-1")
    request = ask(temperature=0.5)
    assert [r.code for r in backend.check(request)] == ["unsupported_parameter"]
    with pytest.raises(UnsupportedParameterError, match="temperature"):
        await call(backend, request)
    wire = backend.wire(request, Plan(backend="b", ignore=("temperature",)))
    assert "temperature" not in wire.body
    assert not wire_server.requests


@pytest.mark.anyio
@pytest.mark.parametrize("api", APIS)
async def test_the_contract_of_backends_is_kept(api: Api, wire_server: WireServer) -> None:
    await check_backend(lambda: build(api, wire_server, "ok-30+drip-1"), ask())
