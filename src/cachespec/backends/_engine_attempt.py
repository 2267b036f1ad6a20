"""The bridge between the engine's thread and an event loop: one request, read as `backends.base.Attempt`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from uuid import uuid4

import anyio
import anyio.lowlevel

from cachespec.engine.sequence import Sequence as Running
from cachespec.errors import RequestTimeoutError
from cachespec.events import Event, ResponseStarted
from cachespec.loops import scheduler
from cachespec.usage import Usage

CLOSE_S = 0.09
"""How long closing waits for the engine's step to end."""


class EngineAttempt:
    """One request in the engine. The contract is `backends.base.Attempt`.

    `usage` and `busy_s` (engine seconds spent on it) may be read at any time, after an early `aclose` as well.
    """

    ends_by_itself = True

    def __init__(self, running: Running, *, backend: str, model: str, deadline: float | None) -> None:
        self._running, self._backend, self._model, self._deadline = running, backend, model, deadline
        self._first: list[Event] = [ResponseStarted(request_id=f"{backend}-{uuid4().hex}", model=model)]

    @property
    def usage(self) -> Usage:
        return self._running.usage

    @property
    def busy_s(self) -> float:
        return self._running.busy_s

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens of the answer so far, without an end token."""
        return tuple(self._running.tokens[len(self._running.job.prompt) :])

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return self._running.job.prompt

    async def read(self) -> Sequence[Event]:
        running = self._running
        while True:
            # A turn of the event loop first: it lets a cancellation in, and more tokens gather meanwhile.
            await anyio.lowlevel.checkpoint()
            ended = running.done
            events = running.take()
            if self._late and (not ended or (events and running.error is not None)):
                raise self._timeout()  # an answer that is whole by now is handed out all the same
            if events:
                first, self._first = self._first, []
                return [*first, *events]
            if ended:
                if running.error is not None:
                    raise running.error
                return ()
            await self._wait()

    @property
    def _late(self) -> bool:
        return self._deadline is not None and anyio.current_time() >= self._deadline

    def _timeout(self) -> RequestTimeoutError:
        count, before = len(self.answer), "while the prompt was read" if self.busy_s else "in the queue"
        where = f"after {count} tokens of the answer" if count else before
        self._running.cancel()
        return RequestTimeoutError(f"not finished within the time allowed: {where}", backend=self._backend, model=self._model)

    async def _wait(self) -> None:
        """Until the engine's thread has something for us, or the time is over."""
        ready = anyio.Event()
        schedule = scheduler()
        if not self._running.when_ready(lambda: schedule(ready.set)):
            return
        with anyio.move_on_at(inf if self._deadline is None else self._deadline):
            await ready.wait()

    async def aclose(self) -> None:
        """Stop within one step of the engine. Waits for that step as long as the contract allows, so that `usage` is final."""
        self._running.cancel()
        with anyio.move_on_after(CLOSE_S, shield=True):
            while not self._running.done:  # noqa: ASYNC110 - the one waiter there is may be a read's
                await anyio.sleep(CLOSE_S / 50)
