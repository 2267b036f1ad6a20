"""The client without async: a thin blocking facade over a portal, no logic of its own.

``with cachespec.sync.connect("cachespec.toml") as client`` runs one event loop in one thread; every call hands over to it
and waits. It may be used from several threads. Arguments and errors are those of `cachespec.Client`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Literal, Self

import anyio
from anyio.from_thread import BlockingPortal

from cachespec import client as _async
from cachespec.decision import Decision
from cachespec.errors import StreamStateError
from cachespec.events import Completion, Event
from cachespec.messages import Message, MessageInput, SystemInput, ToolInput
from cachespec.middleware import Middleware
from cachespec.request import Request, build_request
from cachespec.session import Session as _AsyncSession
from cachespec.session import SessionStream
from cachespec.stream import ResponseStream as _AsyncStream
from cachespec.telemetry import Hook

FORKED = "the client was opened in the process that this one was forked from; open one here"


class _Loop:
    """An event loop in a thread of its own, for the process that started it: what is forked from that has no such thread.

    Unlike anyio's `start_blocking_portal` it is no generator, which would wait for that thread when it is collected: at the
    exit of a process that did not close its client, or was forked from one that has it open.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
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

    @property
    def portal(self) -> BlockingPortal:
        """What hands over to the loop. Raises StreamStateError in a process without it."""
        if self.forked:
            raise StreamStateError(FORKED)
        return self._portal

    def stop(self, *, cancel: bool) -> None:
        self._portal.call(self._portal.stop, cancel)
        self._thread.join()


class ResponseStream:
    """One streamed answer: ``with client.stream("Hi") as stream: for text in stream.text_stream: ...``."""

    def __init__(self, loop: _Loop, stream: _AsyncStream | SessionStream) -> None:
        self._loop, self._stream = loop, stream

    def __enter__(self) -> Self:
        entering = self._loop.portal.start_task_soon(self._stream.__aenter__)
        try:
            entering.result()
        except KeyboardInterrupt:  # it goes on in the portal's thread: nobody would ever leave it
            self._loop.portal.call(self._stream.aclose)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._loop.portal.call(self._stream.__aexit__, kind, error, traceback)

    def __iter__(self) -> Iterator[Event]:
        iterator = self._stream.__aiter__()
        while True:
            try:
                yield self._loop.portal.call(iterator.__anext__)
            except StopAsyncIteration:
                return

    @property
    def text_stream(self) -> Iterator[str]:
        """Only the text of the answer, piece by piece."""
        iterator = self._stream.text_stream
        while True:
            try:
                yield self._loop.portal.call(iterator.__anext__)
            except StopAsyncIteration:
                return

    @property
    def decision(self) -> Decision:
        """Why this backend."""
        return self._stream.decision

    def get_final_completion(self) -> Completion:
        """Read what is left and return the finished answer."""
        return self._loop.portal.call(self._stream.get_final_completion)


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

    def stream(
        self,
        turn: str | Sequence[MessageInput],
        *,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        response_format: str | Mapping[str, Any] | type | None = None,
        timeout: float | str | None = None,
    ) -> ResponseStream:
        """The next turn, streamed."""
        stream = self._session.stream(
            turn,
            max_output_tokens=max_output_tokens,
            temperature=temperature,
            response_format=response_format,
            timeout=timeout,
        )
        return ResponseStream(self._loop, stream)

    def complete(
        self,
        turn: str | Sequence[MessageInput],
        *,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        response_format: str | Mapping[str, Any] | type | None = None,
        timeout: float | str | None = None,
    ) -> Completion:
        """The next turn's finished answer."""
        stream = self.stream(
            turn,
            max_output_tokens=max_output_tokens,
            temperature=temperature,
            response_format=response_format,
            timeout=timeout,
        )
        with stream:
            return stream.get_final_completion()


class Client:
    """`cachespec.Client`, blocking. Made by `connect`, or around a client of your own: ``with sync.Client(client)``."""

    def __init__(self, client: _async.Client | _async.Connection) -> None:
        self._given = client
        self._exit = ExitStack()
        self._loop: _Loop | None = None
        self._client: _async.Client | None = None

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise StreamStateError("a client can be entered once")
        loop = self._loop = _Loop()
        with ExitStack() as stack:
            stack.push(lambda kind, error, traceback: loop.stop(cancel=error is not None))
            self._client = stack.enter_context(loop.portal.wrap_async_context_manager(self._given))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._client = None
        if self._loop is not None and not self._loop.forked:  # what is open there is the other process's
            self._exit.__exit__(kind, error, traceback)

    @property
    def _open(self) -> tuple[_Loop, _async.Client]:
        loop = self._loop
        if loop is not None and loop.forked:
            raise StreamStateError(FORKED)
        if loop is None or self._client is None:
            raise StreamStateError("enter the client first: with cachespec.sync.connect(...) as client")
        return loop, self._client

    def stream(
        self,
        prompt: str | Sequence[MessageInput] | None = None,
        *,
        messages: Sequence[MessageInput] | None = None,
        system: SystemInput | None = None,
        tools: Sequence[ToolInput] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: str | Mapping[str, Any] | type | None = None,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        reasoning: str | Mapping[str, Any] | None = None,
        model: str | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
        tags: Sequence[str] | None = None,
        timeout: float | str | None = None,
        cache: Literal["auto", "off", "no-write"] = "auto",
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> ResponseStream:
        """See `cachespec.Client.stream`."""
        return self.stream_request(
            build_request(
                prompt,
                messages=messages,
                system=system,
                tools=tools,
                tool_choice=tool_choice,
                response_format=response_format,
                max_output_tokens=max_output_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                stop=stop,
                seed=seed,
                reasoning=reasoning,
                model=model,
                tenant=tenant,
                session_id=session_id,
                tags=tags,
                timeout=timeout,
                cache=cache,
                extra=extra,
            )
        )

    def complete(
        self,
        prompt: str | Sequence[MessageInput] | None = None,
        *,
        messages: Sequence[MessageInput] | None = None,
        system: SystemInput | None = None,
        tools: Sequence[ToolInput] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: str | Mapping[str, Any] | type | None = None,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        reasoning: str | Mapping[str, Any] | None = None,
        model: str | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
        tags: Sequence[str] | None = None,
        timeout: float | str | None = None,
        cache: Literal["auto", "off", "no-write"] = "auto",
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Completion:
        """See `cachespec.Client.complete`."""
        stream = self.stream(
            prompt,
            messages=messages,
            system=system,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            max_output_tokens=max_output_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=stop,
            seed=seed,
            reasoning=reasoning,
            model=model,
            tenant=tenant,
            session_id=session_id,
            tags=tags,
            timeout=timeout,
            cache=cache,
            extra=extra,
        )
        with stream:
            return stream.get_final_completion()

    def plan(
        self,
        prompt: str | Sequence[MessageInput] | None = None,
        *,
        messages: Sequence[MessageInput] | None = None,
        system: SystemInput | None = None,
        tools: Sequence[ToolInput] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: str | Mapping[str, Any] | type | None = None,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        reasoning: str | Mapping[str, Any] | None = None,
        model: str | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
        tags: Sequence[str] | None = None,
        timeout: float | str | None = None,
        cache: Literal["auto", "off", "no-write"] = "auto",
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Decision:
        """See `cachespec.Client.plan`."""
        request = build_request(
            prompt,
            messages=messages,
            system=system,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            max_output_tokens=max_output_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=stop,
            seed=seed,
            reasoning=reasoning,
            model=model,
            tenant=tenant,
            session_id=session_id,
            tags=tags,
            timeout=timeout,
            cache=cache,
            extra=extra,
        )
        loop, client = self._open
        return loop.portal.call(client.plan_request, request).decision

    def stream_request(self, request: Request) -> ResponseStream:
        """See `cachespec.Client.stream_request`."""
        loop, client = self._open
        return ResponseStream(loop, loop.portal.call(client.stream_request, request))

    def session(
        self,
        *,
        system: SystemInput | None = None,
        tools: Sequence[ToolInput] | None = None,
        model: str | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> Session:
        """See `cachespec.Client.session`."""
        loop, client = self._open
        session = client.session(system=system, tools=tools, model=model, tenant=tenant, session_id=session_id, tags=tags)
        return Session(loop, session)


def connect(
    path: str | Path | None = None,
    *,
    middleware: Sequence[Middleware] = (),
    hooks: Sequence[Hook] = (),
    watch: bool = True,
) -> Client:
    """See `cachespec.connect`."""
    return Client(_async.connect(path, middleware=middleware, hooks=hooks, watch=watch))
