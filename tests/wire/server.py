"""A loopback HTTP server that speaks Chat Completions, Responses and Messages, and fails on demand.

It runs in a thread of its own (so tests on any event loop can use it), or as a process: ``python -m tests.wire.server``
prints ``http://127.0.0.1:<port>``. The model's name says what happens (see `tests.wire.frames` for what is said):

before the answer
    ``409-<k>`` ``429-<k>-<s>`` ``500-<k>`` ``502-<k>`` ``503-<k>-<s>`` ``529-<k>``: that status k times with
    ``Retry-After: s``, then the answer (always, without k). ``400`` ``401`` ``403`` ``404`` ``413``, ``context`` (context
    length), ``filter`` (content policy), ``unsupported`` (parameter): always. ``refuse-<k>``: the connection is closed
    without an answer, k times.
    ``slowstart-<ms>``: before the headers.
instead of a stream
    ``plain-json`` (the whole answer object, though a stream was asked for), ``html``, ``empty``, ``plain-error`` (an error
    object).
within the stream, after n content events
    ``cut-<n>`` (the connection ends inside the body), ``reset-<n>`` (TCP reset), ``eof-<n>`` (the body ends cleanly),
    ``stall-<n>`` (nothing more comes), ``error-mid-<n>[:type]`` (an error event), ``malformed-<n>`` (a broken line, then on),
    ``failed-<n>[:code]`` (``response.failed``; on the other protocols an error event).
at its end
    ``cut-before-usage``, ``eof-before-usage`` (Chat: after the finish_reason; the others: before the terminal event),
    ``stay`` (all is said, the body does not end), ``close-idle`` (the connection is closed after the answer, unannounced),
    ``gate-<n>`` (it ends once n requests arrived).
pace
    ``drip-<ms>`` between content events, ``slowfirst-<ms>`` before the first event; otherwise as fast as it goes, in large
    writes (``single``: one write an event).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tests.wire.frames import (
    Api,
    Frame,
    Spec,
    counted,
    dumps,
    error_event,
    error_object,
    failed_event,
    frames,
    sse,
    whole_object,
)

Counts = Callable[[Api, dict[str, Any], dict[str, str]], Callable[[int], dict[str, Any]] | str | None]
_APIS: dict[str, Api] = {"/chat/completions": "chat", "/responses": "responses", "/messages": "messages"}
_COUNTS = {"/messages/count_tokens": "messages", "/responses/input_tokens": "responses"}
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 429: "Too Many Requests"}
_TRANSIENT = (409, 429, 500, 502, 503, 529)
_END = b"0\r\n\r\n"


class _Gone(Exception):
    """The client left, or the answer is to end here."""


@dataclass
class Recorded:
    """One request as it arrived. Times are `time.monotonic()`; `disconnected_at` is set when the client left early."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    started_at: float
    status: int = 0
    events_sent: int = 0
    disconnected_at: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class WireServer:
    """Start with `with`, or `start` and `stop`. Everything recorded may be read from any thread.

    Attributes:
        requests: every request, in order of arrival. `connections` is how many are open, `opened` how many ever were.
        keep_alive: seconds an idle connection is kept; may be changed between requests.
        slow_s: seconds before the first event of every stream; may be changed while it runs.
        counts: what a request counts as: the usage object for an answer of so many tokens, or the text of a 400. None: it is
            hung up on.
    """

    def __init__(self, *, keep_alive: float = 5.0, port: int = 0, record: bool = True) -> None:
        self.keep_alive, self.record = keep_alive, record
        self.port = port
        self.requests: list[Recorded] = []
        self.slow_s = 0.0
        self.counts: Counts | None = None
        self.connections = self.opened = self.idle_closed = 0
        self.seen: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The base URL of the Anthropic SDK; `openai_url` that of the OpenAI SDK."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def __enter__(self) -> WireServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> WireServer:
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire-server", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def stop(self) -> None:
        if self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._thread = None

    def reset(self) -> None:
        """Forget requests and how often each model was asked for; open connections stay."""
        self.requests.clear()
        self.seen.clear()

    def wait_for(self, condition: Callable[[], bool], timeout: float = 5.0) -> bool:
        """Block until `condition` holds; False where it does not within `timeout` seconds."""
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(lambda: _Link(self), "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _shut(self) -> None:
        assert self._server is not None
        self._server.close()
        for link in list(self._links):
            link.drop()
        while self._links:
            await asyncio.sleep(0)
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Link(asyncio.Protocol):
    """One connection: requests one after another, each answered by a task."""

    def __init__(self, server: WireServer) -> None:
        self.server = server
        self.transport: asyncio.Transport
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._recorded: Recorded | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.number = 0

    # -- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        server = self.server
        server.opened += 1
        server.connections += 1
        self.number = server.opened
        server._links.add(self)
        self._wait_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections -= 1
        self.server._links.discard(self)
        self._stop_idle()
        self._writable.set()
        if self._recorded is not None and self._recorded.disconnected_at is None:
            self._recorded.disconnected_at = time.monotonic()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._stop_idle()
        self._buffer += data
        if self._task is None:
            self._next_request()

    def drop(self) -> None:
        """Close from this side: the client is not to blame."""
        self._recorded = None
        self.transport.abort()

    def _wait_idle(self) -> None:
        self._idle = self.server._loop.call_later(self.server.keep_alive, self._close_idle)

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _close_idle(self) -> None:
        self.server.idle_closed += 1
        self.transport.close()

    # -- requests

    def _next_request(self) -> None:
        head, found, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = bytearray(rest[length:])
        method, target, _ = first.split(" ", 2)
        recorded = Recorded(method, target, headers, rest[:length], self.number, time.monotonic())
        if self.server.record:
            self.server.requests.append(recorded)
        self._recorded = recorded
        self._task = self.server._loop.create_task(self._answer(recorded))

    async def _answer(self, recorded: Recorded) -> None:
        keep = False
        try:
            keep = await self._respond(recorded)
        except _Gone:
            pass
        finally:
            self._recorded = None
            self._task = None
            recorded.ended.set()
        if self.transport.is_closing():
            return
        if not keep or recorded.headers.get("connection", "").lower() == "close":
            self.transport.close()
            return
        self._wait_idle()
        if self._buffer:
            self._next_request()

    async def _respond(self, recorded: Recorded) -> bool:
        """Answer one request; whether the connection may be used again."""
        path = recorded.path.partition("?")[0].removeprefix("/v1")
        if path == "/models":
            return self._object(200, {"object": "list", "data": [{"id": "ok", "object": "model"}]}, "chat")
        if path in _COUNTS:
            return self._object(200, {"object": "response.input_tokens", "input_tokens": len(recorded.body) // 4}, "chat")
        if path not in _APIS:
            return self._object(404, error_object("chat", 404), "chat")
        api = _APIS[path]
        try:
            request = json.loads(recorded.body)
            spec = Spec.parse(request["model"])
        except (ValueError, KeyError, TypeError):
            return self._object(400, error_object(api, 400), api)
        self.server.seen[spec.model] += 1
        await self._pause(spec, "slowstart")
        refused = spec.number("refuse", 1e9)
        if refused is not None and self.server.seen[spec.model] <= refused:
            raise self._end()
        status, error, extra = self._rejection(api, spec)
        if status:
            return self._object(status, error, api, extra)
        usage: Callable[[int], dict[str, Any]] | None = None
        if self.server.counts is not None:
            counted = self.server.counts(api, request, recorded.headers)
            if counted is None:
                raise self._end()
            if isinstance(counted, str):
                return self._object(400, error_object(api, 400, text=counted), api)
            usage = counted
        if not request.get("stream"):
            whole = whole_object(api, spec, _echo(request))
            if usage is not None:
                whole["usage"] = usage(0)
            return self._object(200, whole, api) and not spec.has("close-idle")
        return await self._stream(api, spec, request, recorded, usage)

    def _rejection(self, api: Api, spec: Spec) -> tuple[int, Any, str]:
        for status in (400, 401, 403, 404, 413):
            if spec.has(str(status)):
                return status, error_object(api, status), ""
        if spec.has("context"):
            return 400, error_object(api, 400, code="context_length_exceeded"), ""
        if spec.has("filter"):
            return 400, error_object(api, 400, code="content_policy_violation"), ""
        if spec.has("unsupported"):
            return 400, error_object(api, 400, code="unsupported_parameter"), ""
        for status in _TRANSIENT:
            times = spec.number(str(status), 1e9)
            if times is not None and self.server.seen[spec.model] <= times:
                after = spec.number(str(status), None, 1)
                return status, error_object(api, status), "" if after is None else f"retry-after: {after:g}\r\n"
        return 0, None, ""

    def _object(self, status: int, value: Any, api: Api, extra: str = "") -> bool:
        body = dumps(value).encode()
        self._head(status, api, f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{extra}")
        self.transport.write(body)
        return True

    def _head(self, status: int, api: Api, headers: str) -> None:
        if self._recorded is not None:
            self._recorded.status = status
        name = "request-id" if api == "messages" else "x-request-id"
        request_id = f"req_{self.server.seen.total()}"
        reason = _REASONS.get(status, "Error")
        self.transport.write(f"HTTP/1.1 {status} {reason}\r\n{name}: {request_id}\r\n{headers}\r\n".encode("latin-1"))

    # -- streams

    async def _stream(
        self,
        api: Api,
        spec: Spec,
        request: dict[str, Any],
        recorded: Recorded,
        counts: Callable[[int], dict[str, Any]] | None,
    ) -> bool:
        plain = _plain_body(api, spec, request)
        kind = "text/event-stream" if plain is None else "text/html" if spec.has("html") else "application/json"
        self._head(
            200, api, f"content-type: {kind}; charset=utf-8\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n"
        )
        if plain is not None:
            self.transport.write((_chunk(plain) if plain else b"") + _END)
            return True
        await self._pause(spec, "slowfirst")
        await asyncio.sleep(self.server.slow_s)
        usage = bool((request.get("stream_options") or {}).get("include_usage"))
        if not spec.disturbed and counts is None:
            return await self._blocks(_coalesced(api, spec, usage)) and not spec.has("close-idle")
        told = frames(api, spec, usage=usage, echo=_echo(request))
        if counts is not None:
            told = counted(api, spec, told, counts, echo=_echo(request))
        drip, single = (spec.number("drip") or 0) / 1000, spec.has("single")
        due = time.monotonic()
        pending = bytearray()
        gate = int(spec.number("gate") or 0)
        for kind, data in self._with_faults(api, spec, told):
            if gate and kind == "end":
                self.transport.write(bytes(pending))
                pending.clear()
                while len(self.server.requests) < gate:
                    await asyncio.sleep(0.01)
                gate = 0
            if kind == "stop":
                self.transport.write(bytes(pending))
                if data == b"eof":
                    self.transport.write(_END)
                    return True
                await self._fault(data.decode())
            pending += _chunk(data)
            recorded.events_sent += 1
            if drip and kind in ("content", "after"):
                due += drip
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            elif not single and len(pending) < 65536:
                continue
            self.transport.write(bytes(pending))
            pending.clear()
            if not self._writable.is_set():
                await self._writable.wait()
            elif single:
                await asyncio.sleep(0)
        if spec.has("stay"):
            self.transport.write(bytes(pending))
            await self._fault("stall")
        self.transport.write(bytes(pending) + _END)
        return not spec.has("close-idle")

    async def _blocks(self, blocks: tuple[bytes, ...]) -> bool:
        """A stream that nothing disturbs, from bytes made once for each model name."""
        for block in blocks:
            self.transport.write(block)
            if not self._writable.is_set():
                await self._writable.wait()
        return True

    def _with_faults(self, api: Api, spec: Spec, told: list[Frame]) -> Iterator[tuple[str, bytes]]:
        """The frames with the faults that the model's name asks for put in; ``stop`` frames name an ending."""
        faults = {name: spec.number(name, 0) for name in ("cut", "reset", "eof", "stall", "error-mid", "malformed", "failed")}
        planned = {name: int(n) for name, n in faults.items() if n is not None}
        count = 0
        for kind, data in told:
            if kind in ("content", "end"):
                for name in [n for n, at in planned.items() if at == count or kind == "end"]:
                    del planned[name]
                    yield from _fault_frames(api, spec, name)
                count += 1
            before = "after" if api == "chat" else "end"
            for name in ("cut", "eof"):
                if kind == before and spec.has(f"{name}-before-usage"):
                    yield "stop", name.encode()
            yield kind, data

    async def _fault(self, name: str) -> None:
        if name == "cut":
            raise self._end()
        if name == "reset":
            raw = self.transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(0.01)
            self.drop()
            raise _Gone
        await asyncio.get_running_loop().create_future()  # a stall: until the client leaves

    def _end(self) -> _Gone:
        self._recorded = None
        self.transport.close()
        return _Gone()

    async def _pause(self, spec: Spec, name: str) -> None:
        milliseconds = spec.number(name)
        if milliseconds:
            await asyncio.sleep(milliseconds / 1000)


@lru_cache(maxsize=64)
def _coalesced(api: Api, spec: Spec, usage: bool) -> tuple[bytes, ...]:
    body = b"".join(_chunk(data) for _, data in frames(api, spec, usage=usage)) + _END
    return tuple(body[i : i + 65536] for i in range(0, len(body), 65536))


def _fault_frames(api: Api, spec: Spec, name: str) -> Iterator[tuple[str, bytes]]:
    if name == "malformed":
        yield "start", sse(spec, '{"id":"broken","choices":[{"del')
    elif name == "error-mid":
        yield "start", error_event(api, spec, spec.word(name, "overloaded_error" if api == "messages" else "server_error"))
        yield "stop", b"eof"
    elif name == "failed":
        code = spec.word(name, "api_error" if api == "messages" else "server_error")
        yield "start", failed_event(spec, code) if api == "responses" else error_event(api, spec, code)
        yield "stop", b"eof"
    else:
        yield "stop", name.encode()


def _plain_body(api: Api, spec: Spec, request: dict[str, Any]) -> bytes | None:
    """The body of a 200 that is no event stream; None where it is one."""
    if spec.has("empty"):
        return b""
    if spec.has("html"):
        return b"<!doctype html><title>Sign in</title>"
    if spec.has("plain-error"):
        return dumps(error_object(api, 500)).encode()
    return dumps(whole_object(api, spec, _echo(request))).encode() if spec.has("plain-json") else None


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _echo(request: dict[str, Any]) -> str:
    """The text of the last message (Chat, Messages) or input item (Responses)."""
    turns = request.get("messages") or request.get("input") or [""]
    last = turns if isinstance(turns, str) else turns[-1]
    content = last.get("content") if isinstance(last, dict) else last
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def main() -> None:
    """Serve until standard input ends or a signal comes."""
    parser = argparse.ArgumentParser(description="loopback wire server for tests and benchmarks")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--keep-alive", type=float, default=5.0)
    options = parser.parse_args()
    with suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))
    with WireServer(keep_alive=options.keep_alive, port=options.port, record=False) as server:
        print(server.url, flush=True)
        with suppress(KeyboardInterrupt):
            sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
