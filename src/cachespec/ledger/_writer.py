"""One thread that does a ledger's work on its file, in the order in which it was asked for.

Work is queued before anybody waits for it. So it is done whatever becomes of the task that asked: cancelled through anyio,
or by asyncio itself (``task.cancel()``, ``asyncio.timeout``), which no shield keeps out, once or several times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from cachespec.loops import scheduler

T = TypeVar("T")
_log = logging.getLogger("cachespec")


class Writer:
    """The thread starts with the first piece of work. The interpreter waits for what is queued before it exits."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cachespec-ledger")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`, without waiting. Raises RuntimeError once the writer is closed."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Take nothing more; what is queued is still done. Does not wait."""
        self._pool.shutdown(wait=False)

    async def closed(self) -> None:
        """Wait until the queue is empty and the thread gone."""
        await anyio.to_thread.run_sync(self._pool.shutdown)


async def result_of(job: Future[T]) -> T:
    """Wait for a job. Whoever stops waiting leaves it to run."""
    done, schedule = anyio.Event(), scheduler()

    def tell(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the event loop is gone
            schedule(done.set)

    job.add_done_callback(tell)
    await done.wait()
    return job.result()


def complain(job: Future[Any]) -> None:
    """For a job that nobody waits for any more: should it fail, that is logged, not lost."""
    if not job.cancelled() and (error := job.exception()) is not None:
        _log.warning("%s", error)
