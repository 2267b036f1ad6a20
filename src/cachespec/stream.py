"""`ResponseStream`: one state machine for every backend (contracts S1 to S7).

It reads attempts and knows nothing of prices, policies or protocols; what happens between attempts is the client's
(`Call`). States: new -> open -> ended (a completion, or one exception) or left (the caller went away first). Nothing
starts before it is entered, nothing runs in the background, and whatever way it is left, the attempt is closed and the
request settled, exactly once.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import anyio

from cachespec.assembly import Assembly
from cachespec.errors import (
    BackendError,
    CachespecError,
    LedgerError,
    RequestTimeoutError,
    StreamInterruptedError,
    StreamStateError,
)
from cachespec.events import Completion, Event, Retrying, TextDelta
from cachespec.finishing import to_the_end

if TYPE_CHECKING:
    from cachespec.backends.base import Attempt
    from cachespec.decision import Decision

Outcome = Literal["completed", "left", "cancelled", "failed"]


class Call(Protocol):
    """What the stream asks of the client, for one request."""

    timeout_s: float | None

    @property
    def decision(self) -> Decision:
        """The latest decision."""

    @property
    def asking(self) -> str | None:
        """The backend that is being asked now; None: nobody is."""

    async def open(self, *, left_s: float | None) -> tuple[Attempt, Assembly]:
        """Decide, reserve, and open the attempt that is due. Raises what failed; then nothing is held."""

    @property
    def content_by(self) -> float:
        """When (`anyio.current_time`) the open attempt is given up if no content came; infinite: not before the deadline."""

    def no_content(self) -> BackendError:
        """The error of an attempt that was given up so."""

    async def retry(self, error: CachespecError, *, left_s: float | None) -> Retrying | None:
        """Note a failed attempt, release or settle it, and say what comes next; None: nothing does, or nobody was asked."""

    async def pause(self, seconds: float) -> None:
        """Wait between attempts."""

    async def settle(
        self, outcome: Outcome, *, ttft_ms: float | None, total_ms: float, cause: BackendError | None = None
    ) -> None:
        """Book what the open attempt used and give back the rest; `cause` ended it. A second call does nothing."""

    def completion(self, *, ttft_ms: float | None, total_ms: float, warnings: tuple[str, ...] = ()) -> Completion:
        """What has arrived so far, priced as far as it is settled."""


class ResponseStream:
    """One streamed answer. Use it as ``async with client.stream(...) as stream`` and read it once, in one task.

    Iterating yields events; `text_stream` yields only text. Reading to the end gives a `Completion`
    (`get_final_completion`) or raises exactly one typed exception. Leaving early, or cancelling, raises nothing of ours.
    """

    def __init__(self, call: Call, *, opened: set[ResponseStream] | None = None) -> None:
        """`opened` is where the stream keeps itself while it is entered, for whoever has to close it from outside."""
        self._call = call
        self._opened = set() if opened is None else opened
        self._state: Literal["new", "open", "ended", "left"] = "new"
        self._events: deque[Event] = deque()
        self._preamble: deque[Event] = deque()
        self._attempt: Attempt | None = None
        self._assembly: Assembly | None = None
        self._next: Retrying | None = None
        self._reading = False
        self._working: anyio.CancelScope | None = None
        self._ends_by_itself = False
        self._deadline = math.inf
        self._start = 0.0
        self._ttft: float | None = None
        self._completion: Completion | None = None
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise StreamStateError("a stream can be entered once")
        self._state = "open"
        self._start = anyio.current_time()
        timeout = self._call.timeout_s
        self._deadline = math.inf if timeout is None else anyio.current_time() + timeout
        self._opened.add(self)
        try:
            await self._open_any()
        except BaseException as error:
            self._opened.discard(self)
            await self._give_up(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.discard(self)
        if self._state == "open":
            await self._leave("cancelled" if error is not None and not isinstance(error, Exception) else "left")

    async def aclose(self) -> None:
        """Stop now: close the upstream and settle what was used, as leaving the ``async with`` block does.

        Another task may do it, too; a task that waits for this stream then gets StreamStateError.
        """
        await self.__aexit__(None, None, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        late = self._late()
        if self._events and not late:
            return self._events.popleft()
        if self._state != "open":
            self._not_open()
            raise StopAsyncIteration
        if self._reading:
            raise StreamStateError("two tasks read one stream at once")
        self._reading = True
        try:
            if late:
                self._events.clear()
                await self._broken(self._timed_out())
            await self._fill()
        except BaseException as error:
            await self._give_up(error)
            raise
        finally:
            self._reading = False
        if self._events:
            return self._events.popleft()
        raise StopAsyncIteration

    @property
    def text_stream(self) -> AsyncIterator[str]:
        """Only the text of the answer, piece by piece."""
        return _Texts(self)

    async def until_done(self) -> None:
        """Read to the end and drop the events."""
        async for _ in self:
            pass

    async def get_final_completion(self) -> Completion:
        """Read what is left and return the finished answer. Raises what reading raises."""
        if self._completion is None:
            await self.until_done()
        if self._completion is None:
            if isinstance(self._error, CachespecError):
                raise self._error
            raise StreamStateError("the stream was left before its end; there is no completion") from self._error
        return self._completion

    async def get_final_text(self) -> str:
        """The text of `get_final_completion`."""
        return (await self.get_final_completion()).text

    @property
    def completion(self) -> Completion | None:
        """The finished answer once the stream was read to its end; None before, and when it failed or was left."""
        return self._completion

    @property
    def decision(self) -> Decision:
        """Why this backend: known as soon as the stream is entered."""
        if self._state == "new":
            self._not_open()
        return self._call.decision

    @property
    def request_id(self) -> str | None:
        """The vendor's id of this request, once it is known."""
        started = None if self._assembly is None else self._assembly.started
        return None if started is None else started.request_id

    def _not_open(self) -> None:
        if self._state == "new":
            raise StreamStateError("enter the stream first: async with client.stream(...) as stream")
        if self._state == "left":
            raise StreamStateError("the stream was left; it cannot be read any more") from self._error

    async def _fill(self) -> None:
        """Wait until there is an event to hand out, or the end."""
        while not self._events and self._state == "open":
            if self._next is not None:
                await self._open_any()
                continue
            try:
                events = await self._read()
            except BackendError as error:
                await self._broken(error)
                continue
            if not events:
                await self._ended()
                return
            assembly = self._assembly
            assert assembly is not None  # noqa: S101 - set whenever an attempt is
            absorb = assembly.absorb
            # What comes before the content is kept back: an attempt that fails there leaves no trace but `Retrying`.
            queue = self._events if self._ttft is not None else self._preamble
            for event in events:
                shown = absorb(event)
                if shown is not None:
                    queue.append(shown)
            if self._ttft is None and assembly.committed:
                self._ttft = (anyio.current_time() - self._start) * 1000
                self._events, self._preamble = self._preamble, self._events

    async def _read(self) -> Any:
        attempt = self._attempt
        assert attempt is not None  # noqa: S101 - `_open_any` set it
        until = self._deadline if self._ttft is not None else min(self._deadline, self._call.content_by)
        if self._ends_by_itself and until == self._deadline:  # a scope for each read is most of what a chunk costs here
            events = await attempt.read()
            if self._state == "left":
                raise self._stopped()
            return events
        with anyio.CancelScope(deadline=until) as self._working:
            return await attempt.read()
        raise self._stopped()

    def _late(self) -> bool:
        """Whether the time is over for what is there but not handed out yet. An answer that is whole is not cut any more."""
        if self._state != "open" or anyio.current_time() < self._deadline:
            return False
        return self._assembly is None or self._assembly.finished is None

    def _stopped(self) -> CachespecError:
        """Why a wait was ended from outside: by the deadline, or by another task that closed the stream."""
        self._working = None
        if self._state == "left":
            return StreamStateError("the stream was closed while it was being read")
        return self._timed_out() if anyio.current_time() >= self._deadline else self._call.no_content()

    def _timed_out(self) -> BackendError:
        asking, timeout_s = self._call.asking, self._call.timeout_s
        return RequestTimeoutError(f"not finished within {timeout_s:g} s", backend=asking, retryable=False)

    def _left(self) -> float | None:
        return None if self._deadline == math.inf else self._deadline - anyio.current_time()

    async def _open_any(self) -> None:
        """Open the attempt that is due; on failure, the ones after it, as long as the client has one."""
        while True:
            try:
                with anyio.CancelScope(deadline=self._deadline) as self._working:
                    await self._open_one()
                    return
                raise self._stopped()
            except StreamStateError:
                raise
            except CachespecError as error:
                await self._failed(error)

    async def _open_one(self) -> None:
        if self._next is not None:
            if self._next.delay_s > 0:
                await self._call.pause(self._next.delay_s)
            self._next = None
        self._attempt, self._assembly = await self._call.open(left_s=self._left())
        self._ends_by_itself = getattr(self._attempt, "ends_by_itself", False)

    async def _failed(self, error: CachespecError) -> None:
        """An attempt failed before content: line up the next one, or raise."""
        await self._close()
        self._preamble.clear()
        with anyio.CancelScope(shield=True):
            self._next = await self._call.retry(error, left_s=self._left())
        if self._next is None:
            raise error
        self._events.append(self._next)

    async def _broken(self, error: BackendError) -> None:
        """The attempt's stream failed: after its end that is nothing, before content a retry, else the end."""
        assembly = self._assembly
        assert assembly is not None  # noqa: S101
        if assembly.finished is not None:
            await self._ended(f"the connection failed after the answer was complete: {error}")
        elif not assembly.committed:
            await self._failed(error)
        else:
            await self._interrupt(str(error), error)

    async def _interrupt(self, why: str, cause: BackendError | None) -> None:
        await self._close()
        total = (anyio.current_time() - self._start) * 1000
        await self._settle("failed", total, cause)
        partial = self._call.completion(ttft_ms=self._ttft, total_ms=total)
        self._state = "ended"
        self._error = StreamInterruptedError(
            why if cause is None else cause.message,
            partial=partial,
            backend=partial.backend,
            model=partial.model,
            status=None if cause is None else cause.status,
            request_id=partial.request_id,
            retry_after=None if cause is None else cause.retry_after,
            retryable=True if cause is None else cause.retryable,
        )
        raise self._error from cause

    async def _ended(self, *warnings: str) -> None:
        """No more bytes: a completion when the terminal event was seen, else an interruption."""
        assembly = self._assembly
        assert assembly is not None  # noqa: S101
        if assembly.finished is None:
            why = "the stream ended without its protocol's terminal event"
            if assembly.committed:
                await self._interrupt(why, None)
            asking = self._call.asking
            await self._failed(StreamInterruptedError(why, backend=asking, request_id=self.request_id, retryable=True))
            return
        await self._close()
        total = (anyio.current_time() - self._start) * 1000
        try:
            await self._call.settle("completed", ttft_ms=self._ttft, total_ms=total)
        except LedgerError as error:
            error.completion = self._call.completion(ttft_ms=self._ttft, total_ms=total, warnings=warnings)
            self._state = "ended"
            raise
        self._completion = self._call.completion(ttft_ms=self._ttft, total_ms=total, warnings=warnings)
        self._state = "ended"
        # Last of all, whatever the protocol's own order is: when it is seen, the request is settled.
        self._events += (*self._preamble, assembly.finished)
        self._preamble.clear()

    async def _close(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            await to_the_end(attempt.aclose)

    async def _give_up(self, error: BaseException) -> None:
        """Leave because of an exception, which goes on to the caller; nothing is left to do after an ending of its own."""
        if self._state == "ended":
            return
        self._error = self._error or error
        await self._leave("failed" if isinstance(error, Exception) else "cancelled")

    async def _leave(self, outcome: Outcome) -> None:
        self._state = "left"
        if self._working is not None:
            self._working.cancel()  # another task waits, for this attempt or for one that is being opened
        total = (anyio.current_time() - self._start) * 1000
        try:
            await self._close()
        finally:
            await self._settle(outcome, total)

    async def _settle(self, outcome: Outcome, total_ms: float, cause: BackendError | None = None) -> None:
        """Book an answer that is not whole. A ledger that fails now must not hide why; its reservation stays and counts."""
        try:
            await self._call.settle(outcome, ttft_ms=self._ttft, total_ms=total_ms, cause=cause)
        except LedgerError as failure:
            logging.getLogger("cachespec").warning("a request that ended early could not be settled: %s", failure)


class _Texts:
    """The text of a stream. A class, since an async generator that is left early waits for the garbage collector."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            event = await self._stream.__anext__()
            if type(event) is TextDelta:
                return event.text
