"""How another thread wakes up an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio.lowlevel


def scheduler() -> Callable[[Callable[[], None]], object]:
    """How another thread runs a function on this event loop without waiting for it. RuntimeError once the loop is gone.

    `anyio.from_thread` would make that thread wait for a busy event loop; asyncio's loop and trio's token both have a call
    that does not.
    """
    native: Any = anyio.lowlevel.current_token().native_token
    found: Callable[[Callable[[], None]], object]
    found = native.call_soon_threadsafe if hasattr(native, "call_soon_threadsafe") else native.run_sync_soon
    return found
