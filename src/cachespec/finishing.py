"""Steps that must be done to their end, whoever cancels: closing an upstream, booking what was spent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

_T = TypeVar("_T")


async def to_the_end(step: Callable[[], Awaitable[_T]]) -> _T:
    """Run an idempotent step to its end, then let a cancellation go on.

    A shielded scope keeps anyio's cancellations out, but not the event loop's own (``task.cancel()``, ``asyncio.timeout``),
    which arrive inside the step once each; the step is then run again. The exceptions of the step itself are raised.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while True:
            try:
                result = await step()
                break
            except anyio.get_cancelled_exc_class() as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    return result
