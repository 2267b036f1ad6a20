"""What a client does beside requests, when its time comes: keep-alives, a look at the configuration file, saving beliefs.

One daemon thread per client waits for the next job and has it run on the client's event loop, so that no task group must stay
open between `start` and `aclose`, whoever calls them and from which task. It works on asyncio and trio alike.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import CancelledError

import anyio
import anyio.from_thread
import anyio.to_thread
from anyio.lowlevel import EventLoopToken, current_token

from cachespec.clock import Clock

Job = Callable[[], Awaitable[None]]
_LOG = logging.getLogger("cachespec.background")
_LONGEST_S = 30.0  # wall clocks are set now and then; nobody sleeps past that for longer


class Background:
    """Jobs by key, each with the time it is due (Unix seconds of `clock`). Made and used on one event loop.

    A job that raises is logged and forgotten: what it was for must not depend on it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: dict[Hashable, tuple[float, int, Job]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._token: EventLoopToken | None = None
        self._scopes: set[anyio.CancelScope] = set()
        self._closed = False

    def at(self, when: float, key: Hashable, job: Job) -> None:
        """Run `job` at `when`, instead of what is planned under the same key. After `aclose` it does nothing."""
        with self._changed:
            if self._closed:
                return
            number = next(self._numbers)
            self._jobs[key] = (when, number, job)
            heapq.heappush(self._heap, (when, number, key))
            if len(self._heap) > 64 + 2 * len(self._jobs):  # replaced and cancelled ones
                self._heap = [(at, n, k) for k, (at, n, _) in self._jobs.items()]
                heapq.heapify(self._heap)
            if self._thread is None:
                self._token = current_token()
                self._thread = threading.Thread(target=self._wait, name="cachespec-background", daemon=True)
                self._thread.start()
            self._changed.notify()

    def cancel(self, key: Hashable) -> None:
        """Forget what is planned under this key; a job that runs already goes on."""
        with self._changed:
            self._jobs.pop(key, None)

    def __len__(self) -> int:
        return len(self._jobs)

    async def run_due(self) -> int:
        """Run what is due by now, in order of time; how many that were. The thread calls it; tests with their own clock do."""
        count = 0
        while (job := self._next_due()) is not None:
            count += 1
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    await job()
                except Exception:  # noqa: BLE001 - what it was for must not depend on it
                    _LOG.exception("a job in the background failed")
                finally:
                    self._scopes.discard(scope)
        return count

    async def aclose(self) -> None:
        """Forget what is planned, cancel what runs, and wait for the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify()
        for scope in list(self._scopes):
            scope.cancel()
        thread = self._thread
        if thread is not None and thread.is_alive():
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(thread.join)

    def _next_due(self) -> Job | None:
        with self._changed:
            while self._heap and not self._closed:
                when, number, key = self._heap[0]
                planned = self._jobs.get(key)
                if planned is None or planned[1] != number:
                    heapq.heappop(self._heap)  # replaced or cancelled
                elif when > self._clock.time():
                    return None
                else:
                    heapq.heappop(self._heap)
                    del self._jobs[key]
                    return planned[2]
        return None

    def _wait(self) -> None:
        """The thread: sleep until something is due, have it run on the loop, again."""
        while True:
            with self._changed:
                if self._closed:
                    return
                left = self._heap[0][0] - self._clock.time() if self._heap else _LONGEST_S
                if left > 0:
                    self._changed.wait(min(left, _LONGEST_S))
                    continue
            try:
                anyio.from_thread.run(self.run_due, token=self._token)
            except (RuntimeError, CancelledError):  # the event loop ended without closing the client
                return
            except BaseException as error:  # noqa: BLE001 - trio's own ways to say the same; a thread has nobody to tell
                _LOG.debug("the event loop ended: %r", error)
                return
