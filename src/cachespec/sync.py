"""The client without async: a thin blocking facade over a portal, no logic of its own.

``client = cachespec.sync.connect("cachespec.toml")`` runs one event loop in one thread, from its first use on; every call hands
over to it and waits. It may be used from several threads, and serve a whole module: ``with`` opens it at once and closes it at
the end, `Client.close` does the latter, and a process that does neither ends all the same. Arguments and errors are those of
`cachespec.Client`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from threading import RLock, Thread
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, overload

import anyio
from anyio.from_thread import BlockingPortal

from cachespec import client as _async
from cachespec.backends.base import Backend, Wire
from cachespec.config import Config
from cachespec.decide import Verdict
from cachespec.decision import BudgetState, Decision
from cachespec.errors import StreamStateError
from cachespec.events import Completion, Event
from cachespec.keepalive import Prewarmed
from cachespec.ledger.base import Entry, Limit, Totals
from cachespec.ledger.base import Ledger as _AsyncLedger
from cachespec.messages import Message
from cachespec.middleware import Middleware
from cachespec.request import Request
from cachespec.session import CacheTurn, SessionStream
from cachespec.session import Session as _AsyncSession
from cachespec.signatures import takes
from cachespec.stream import ResponseStream as _AsyncStream
from cachespec.telemetry import Hook

P = ParamSpec("P")
T = TypeVar("T")

CLOSED = "the client is closed"
FORKED = "the client was opened in the process that this one was forked from; open one here"


class _Loop:
    """An event loop in a thread of its own, for the process that started it: what is forked from that has no such thread.

    Unlike anyio's `start_blocking_portal` it is no generator, which would wait for that thread when it is collected: at the
    exit of a process that did not close its client, or was forked from one that has it open.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self.stopped = False
        began: Future[BlockingPortal] = Future()
        self._thread = Thread(target=self._run, args=(began,), name="cachespec-sync", daemon=True)
        self._thread.start()
        self._portal = began.result()

    def _run(self, began: Future[BlockingPortal]) -> None:
        try:
            anyio.run(self._serve, began)
        except BaseException as error:
            if began.done():
                raise
            began.set_exception(error)

    async def _serve(self, began: Future[BlockingPortal]) -> None:
        async with BlockingPortal() as portal:
            began.set_result(portal)
            await portal.sleep_until_stopped()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process

    @overload
    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have the loop call it, and wait. Raises StreamStateError in a process without the loop, and when that was stopped."""
        if self.forked:
            raise StreamStateError(FORKED)
        try:
            return self._portal.call(partial(function, *args, **kwargs))
        except (RuntimeError, CancelledError):
            if self.stopped:  # before, or meanwhile by another thread
                raise StreamStateError(CLOSED) from None
            raise

    def enter(self, stream: _AsyncStream | SessionStream) -> None:
        """Enter a stream; what interrupts the wait leaves it, since it goes on in the loop's thread."""
        try:
            self.call(stream.__aenter__)
        except KeyboardInterrupt:
            self.call(stream.aclose)
            raise

    def stop(self) -> None:
        """End the loop with whatever it still does, and the thread."""
        self.stopped = True
        self._portal.call(self._portal.stop, True)
        self._thread.join()


class ResponseStream:
    """One streamed answer: ``with client.stream("Hi") as stream: for text in stream.text_stream: ...``."""

    def __init__(self, loop: _Loop, stream: _AsyncStream | SessionStream) -> None:
        self._loop, self._stream = loop, stream

    def __enter__(self) -> Self:
        self._loop.enter(self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if not (self._loop.stopped or self._loop.forked):  # else it was closed with the client, or is another process's
            self._loop.call(self._stream.__aexit__, kind, error, traceback)

    def close(self) -> None:
        """Stop now, as leaving the ``with`` block does."""
        self.__exit__(None, None, None)

    def __iter__(self) -> Iterator[Event]:
        iterator = self._stream.__aiter__()
        while True:
            try:
                yield self._loop.call(iterator.__anext__)
            except StopAsyncIteration:
                return

    @property
    def text_stream(self) -> Iterator[str]:
        """Only the text of the answer, piece by piece."""
        iterator = self._stream.text_stream
        while True:
            try:
                yield self._loop.call(iterator.__anext__)
            except StopAsyncIteration:
                return

    @property
    def decision(self) -> Decision:
        """Why this backend."""
        return self._stream.decision

    @property
    def completion(self) -> Completion | None:
        """The finished answer; None while the stream is not read to its end."""
        return self._stream.completion

    @property
    def request_id(self) -> str | None:
        """The backend's id of the request; None where it gave none, yet."""
        return self._stream.request_id

    def get_final_completion(self) -> Completion:
        """Read what is left and return the finished answer."""
        return self._loop.call(self._stream.get_final_completion)

    def get_final_text(self) -> str:
        """Read what is left and return the text of the answer."""
        return self._loop.call(self._stream.get_final_text)


class Session:
    """A conversation; see `cachespec.Session`."""

    def __init__(self, loop: _Loop, session: _AsyncSession) -> None:
        self._loop, self._session = loop, session

    @property
    def session_id(self) -> str:
        return self._session.session_id

    @property
    def messages(self) -> tuple[Message, ...]:
        """The history so far."""
        return self._session.messages

    def cache_report(self) -> tuple[CacheTurn, ...]:
        """What the cache did for each turn, and where one turn's prompt parted from the last one's."""
        return self._loop.call(self._session.cache_report)

    @takes(_AsyncSession.stream)
    def stream(self, *args: Any, **kwargs: Any) -> ResponseStream:
        """The next turn, streamed. See `cachespec.Session.stream`."""
        return ResponseStream(self._loop, self._loop.call(self._session.stream, *args, **kwargs))

    @takes(_AsyncSession.stream)
    def complete(self, *args: Any, **kwargs: Any) -> Completion:
        """The next turn's finished answer."""
        with self.stream(*args, **kwargs) as stream:
            return stream.get_final_completion()


class Ledger:
    """What a person asks of a ledger, blocking; see `cachespec.ledger.base.Ledger`. The rest is what requests do with it."""

    def __init__(self, loop: _Loop, ledger: _AsyncLedger) -> None:
        self._loop, self._ledger = loop, ledger

    def totals(self, *, tenant: str | None = None) -> Totals:
        """Sums over settled requests."""
        return self._loop.call(self._ledger.totals, tenant=tenant)

    def entries(self, *, limit: int | None = None, tenant: str | None = None) -> tuple[Entry, ...]:
        """Settled requests, newest first."""
        return self._loop.call(self._ledger.entries, limit=limit, tenant=tenant)

    def accounts(self) -> tuple[str, ...]:
        """Every counter that something was spent on or is reserved on, in order."""
        return self._loop.call(self._ledger.accounts)

    def refresh(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """Read these limits, other processes' spending included."""
        return self._loop.call(self._ledger.refresh, limits)

    def reset(self, limits: Sequence[Limit]) -> None:
        """Count these limits' windows from nothing again."""
        self._loop.call(self._ledger.reset, limits)


class Client:
    """`cachespec.Client`, blocking. Made by `connect`, or around a client of your own: ``sync.Client(client)``.

    It opens at its first use, or at once by ``with``, and belongs to the process that it was opened in.
    """

    def __init__(self, client: _async.Client | _async.Connection) -> None:
        self._make = client.make if isinstance(client, _async.Connection) else lambda: client
        self._client = client if isinstance(client, _async.Client) else None
        self._loop: _Loop | None = None
        self._changing = RLock()  # a signal's handler may close what is being opened
        self._closed = False

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start every backend (local models load here). Called by ``with`` and by the first stream otherwise."""
        loop, client = self._open
        loop.call(client.start)

    def close(self) -> None:
        """Settle what is open, then release every backend, the ledger and the thread. Idempotent.

        Whoever still waits for something, in another thread, gets StreamStateError.
        """
        with self._changing:
            closed, self._closed = self._closed, True
        loop, client = self._loop, self._client
        if closed or client is None or (loop is not None and loop.forked):  # what is open there is the other process's
            return
        loop = loop or _Loop()  # one of your own that was never used, and holds its backends and ledger
        try:
            loop.call(client.aclose)
        finally:
            loop.stop()

    @property
    def _open(self) -> tuple[_Loop, _async.Client]:
        if self._loop is None:
            with self._changing:
                if self._client is None and not self._closed:
                    self._client = self._make()
                if self._loop is None and not self._closed:
                    self._loop = _Loop()
        loop, client = self._loop, self._client
        if loop is not None and loop.forked:
            raise StreamStateError(FORKED)
        if loop is None or client is None or self._closed:
            raise StreamStateError(CLOSED)
        return loop, client

    @property
    def backends(self) -> Mapping[str, Backend]:
        """The backends of the current generation, by name."""
        return self._open[1].backends

    @property
    def config(self) -> Config:
        """The configuration of the current generation."""
        return self._open[1].config

    @property
    def ledger(self) -> Ledger:
        """What was spent."""
        loop, client = self._open
        return Ledger(loop, client.ledger)

    @takes(_async.Client.stream)
    def stream(self, *args: Any, **kwargs: Any) -> ResponseStream:
        """See `cachespec.Client.stream`."""
        loop, client = self._open
        return ResponseStream(loop, loop.call(client.stream, *args, **kwargs))

    @takes(_async.Client.stream)
    def complete(self, *args: Any, **kwargs: Any) -> Completion:
        """See `cachespec.Client.complete`."""
        with self.stream(*args, **kwargs) as stream:
            return stream.get_final_completion()

    @takes(_async.Client.plan)
    def plan(self, *args: Any, **kwargs: Any) -> Decision:
        """See `cachespec.Client.plan`."""
        loop, client = self._open
        return loop.call(client.plan, *args, **kwargs)

    @takes(_async.Client.prewarm)
    def prewarm(self, *args: Any, **kwargs: Any) -> Prewarmed:
        """See `cachespec.Client.prewarm`."""
        loop, client = self._open
        prewarmed: Prewarmed = loop.call(client.prewarm, *args, **kwargs)
        return prewarmed

    @takes(_async.Client.session)
    def session(self, *args: Any, **kwargs: Any) -> Session:
        """See `cachespec.Client.session`."""
        loop, client = self._open
        return Session(loop, loop.call(client.session, *args, **kwargs))

    def reload(self, config: Config | None = None) -> int:
        """See `cachespec.Client.reload`."""
        loop, client = self._open
        return loop.call(client.reload, config)

    def stream_request(self, request: Request) -> ResponseStream:
        """See `cachespec.Client.stream_request`."""
        loop, client = self._open
        return ResponseStream(loop, loop.call(client.stream_request, request))

    def plan_request(self, request: Request) -> Verdict:
        """See `cachespec.Client.plan_request`."""
        loop, client = self._open
        return loop.call(client.plan_request, request)

    def refresh(self, request: Request) -> None:
        """See `cachespec.Client.refresh`."""
        loop, client = self._open
        loop.call(client.refresh, request)

    def wire(self, verdict: Verdict) -> Wire | None:
        """See `cachespec.Client.wire`."""
        loop, client = self._open
        return loop.call(client.wire, verdict)


def connect(
    path: str | Path | None = None,
    *,
    middleware: Sequence[Middleware] = (),
    hooks: Sequence[Hook] = (),
    watch: bool = True,
) -> Client:
    """See `cachespec.connect`. The file is read at the first use, or when ``with`` is entered."""
    return Client(_async.connect(path, middleware=middleware, hooks=hooks, watch=watch))
