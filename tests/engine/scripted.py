"""A runtime without a model: tokens are bytes, and a function of the sequence says what comes next.

It keeps the contract of `runtimes.base` strictly (positions, rows, one thread), so a loop that breaks it fails here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachespec.engine.runtimes.base import Interrupted, ModelInfo, Span
from cachespec.engine.sampling import Sampling, draw
from cachespec.errors import OutOfPagesError

END = 256
VOCAB = 257
Next = Callable[[Sequence[int]], int]


def info(context: int = 4096, template: str | None = None, controls: Mapping[str, int] | None = None) -> ModelInfo:
    return ModelInfo(
        architecture="scripted",
        description="scripted",
        context=context,
        trained_context=None,
        vocab=VOCAB,
        parameters=1,
        size=1,
        chat_template=template,
        bos="",
        eos="",
        add_bos=False,
        controls=controls or {},
    )


def says(text: str | bytes, *, after: int) -> Next:
    """Generates `text` after a prompt of `after` tokens, then ends."""
    data = text.encode() if isinstance(text, str) else text

    def following(tokens: Sequence[int]) -> int:
        at = len(tokens) - after
        return data[at] if at < len(data) else END

    return following


def forever(tokens: Sequence[int]) -> int:
    """Generates letters without end."""
    return 97 + len(tokens) % 26


class ScriptedRuntime:
    """`delay_s` is the time of a call, interruptible; `crash_at` the call that fails; `forgets`: it cannot be cut."""

    def __init__(
        self,
        following: Next = forever,
        *,
        context: int = 4096,
        width: int = 512,
        delay_s: float = 0.0,
        crash_at: int | None = None,
        no_room_at: int | None = None,
        nan_at: int | None = None,
        forgets: bool = False,
    ) -> None:
        self.info = info(context)
        self.sequences, self.width = 1, width
        self.following, self.delay_s, self.forgets = following, delay_s, forgets
        self.crash_at, self.no_room_at, self.nan_at = crash_at, no_room_at, nan_at
        self.held: list[int] = []
        self.calls: list[int] = []
        self.evaluated = 0
        self.truncations: list[int] = []
        self.closed = False
        self._rows: list[NDArray[np.float32]] = []
        self._interrupt = threading.Event()
        self._owner: int | None = None

    def _mine(self) -> None:
        """Only one thread ever touches the context (llama-cpp-python#471 and others)."""
        if self.closed:
            raise RuntimeError("closed")
        me = threading.get_ident()
        self._owner = self._owner or me
        if self._owner != me:
            raise AssertionError("two threads used one context")

    def hand_over(self) -> None:
        """Let another thread have it: the one that loaded it is done."""
        self._owner = None

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < END else b""

    def is_end(self, token: int) -> bool:
        return token == END

    def evaluate(self, spans: Sequence[Span]) -> list[int]:
        self._mine()
        (span,) = spans
        assert span.sequence == 0
        assert span.start == len(self.held), "a gap or an overlap in the positions"
        assert 0 < len(span.tokens) <= self.width
        call = len(self.calls)
        self.calls.append(len(span.tokens))
        if call == self.crash_at:
            raise RuntimeError("the device fell off")
        if call == self.no_room_at:
            raise OutOfPagesError("no room")
        if self._interrupt.wait(self.delay_s) if self.delay_s else self._interrupt.is_set():
            raise Interrupted
        self.held += span.tokens
        assert len(self.held) <= self.info.context
        self.evaluated += len(span.tokens)
        self._rows = []
        for j in range(span.rows):
            row = np.full(VOCAB, -30.0, dtype=np.float32)
            row[self.following(self.held[: len(self.held) - span.rows + 1 + j])] = 0.0
            if call == self.nan_at:
                row[:] = np.nan
            self._rows.append(row)
        return list(range(span.rows))

    def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        self._mine()
        assert list(positions) == [len(self.held)]
        return [draw(self._rows[r], s, p) for r, s, p in zip(rows, sampling, positions, strict=True)]

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        self._mine()
        return np.stack([self._rows[r] for r in rows])

    def length(self, sequence: int) -> int:
        return len(self.held)

    def truncate(self, sequence: int, length: int) -> bool:
        self._mine()
        self.truncations.append(length)
        if length >= len(self.held):
            return True
        if self.forgets:
            return False
        del self.held[length:]
        return True

    def fork(self, source: int, target: int, length: int) -> bool:
        return False

    def free(self, sequence: int) -> None:
        self._mine()
        self.held.clear()

    def export_state(self, sequence: int) -> bytes:
        return bytes(self.held)

    def import_state(self, sequence: int, data: bytes) -> bool:
        self.held = list(data)
        return True

    def interrupt(self) -> None:
        self._interrupt.set()

    def resume(self) -> None:
        self._interrupt.clear()

    def close(self) -> None:
        self.closed = True

    def facts(self) -> Mapping[str, Any]:
        return {}


def engine_threads() -> int:
    """Engines' threads; worker threads of an event loop come and go by themselves."""
    return sum(t.name.startswith("cachespec-") for t in threading.enumerate())


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Fails when it does not come true in time; the time is generous, the machine may be busy."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)
