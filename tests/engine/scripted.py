"""A runtime without a model: tokens are bytes, and a function of the sequence says what comes next.

It keeps the contract of `runtimes.base` strictly (positions, rows, one thread), so a loop that breaks it fails here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
        fingerprint=b"scripted",
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
    """`delay_s` is the time of a call, interruptible, and `token_s` of a token; `crash_at` the call that fails.

    `forgets`: it cannot be cut (and says so in advance when `rewinds` is False). `shares`: forks take no room of their own,
    and `room` is that of all sequences.
    """

    def __init__(
        self,
        following: Next = forever,
        *,
        context: int = 4096,
        width: int = 512,
        sequences: int = 6,
        room: int | None = None,
        shares: bool = True,
        rewinds: bool = True,
        delay_s: float = 0.0,
        token_s: float = 0.0,
        crash_at: int | None = None,
        no_room_at: int | None = None,
        nan_at: int | None = None,
        forgets: bool = False,
        imports: bool = True,
    ) -> None:
        self.info = replace(info(context), room=room, shares=shares, rewinds=rewinds, kv_bytes=1)
        self.sequences, self.width = sequences, width
        self.following, self.delay_s, self.token_s, self.forgets = following, delay_s, token_s, forgets or not rewinds
        self.crash_at, self.no_room_at, self.nan_at, self.imports = crash_at, no_room_at, nan_at, imports
        self.kv: list[list[int]] = [[] for _ in range(sequences)]
        self.cells: list[list[object]] = [[] for _ in range(sequences)]  # the same object where a fork shares
        self.calls: list[int] = []
        self.spans: list[list[Span]] = []
        self.evaluated = 0
        self.truncations: list[int] = []
        self.closed = False
        self._rows: list[tuple[list[int], bool]] = []
        self._interrupt = threading.Event()
        self._owner: int | None = None
        self._taken = False

    @property
    def held(self) -> list[int]:
        """What the longest sequence holds."""
        return max(self.kv, key=len)

    @property
    def used(self) -> int:
        """Tokens that there is KV of."""
        return len({id(cell) for cells in self.cells for cell in cells})

    def _mine(self) -> None:
        """Only one thread ever touches the context (llama-cpp-python#471 and others)."""
        self._alive()
        me = threading.get_ident()
        if not self._taken and threading.current_thread().name.startswith("cachespec-"):
            self._owner, self._taken = me, True  # whoever loaded and measured it is done
        self._owner = self._owner or me
        if self._owner != me:
            raise AssertionError("two threads used one context")

    def _alive(self) -> None:
        if self.closed:
            raise RuntimeError("closed")

    def hand_over(self) -> None:
        """Let another thread have it: the one that loaded it is done."""
        self._owner, self._taken = None, False

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        self._alive()
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        self._alive()
        return bytes([token]) if token < END else b""

    def is_end(self, token: int) -> bool:
        self._alive()
        return token == END

    def evaluate(self, spans: Sequence[Span]) -> list[int]:
        self._mine()
        total = sum(len(span.tokens) for span in spans)
        assert 0 < total <= self.width
        assert len({span.sequence for span in spans}) == len(spans)
        for span in spans:
            assert span.start == len(self.kv[span.sequence]), "a gap or an overlap in the positions"
            assert 0 <= span.rows <= len(span.tokens)
            assert span.start + len(span.tokens) <= self.info.context
            assert all(0 <= token < VOCAB for token in span.tokens)
        call = len(self.calls)
        self.calls.append(total)
        self.spans.append(list(spans))
        if call == self.crash_at:
            raise RuntimeError("the device fell off")
        if call == self.no_room_at or (self.info.room is not None and self.used + total > self.info.room):
            raise OutOfPagesError("no room")
        delay = self.delay_s + self.token_s * total
        if self._interrupt.wait(delay) if delay else self._interrupt.is_set():
            raise Interrupted
        self.evaluated += total
        self._rows = []
        for span in spans:
            held = self.kv[span.sequence]
            held += span.tokens
            self.cells[span.sequence] += [object() for _ in span.tokens]
            at = len(held) - span.rows + 1
            self._rows += [(held[: at + j], call == self.nan_at) for j in range(span.rows)]
        return list(range(len(self._rows)))

    def _row(self, handle: int) -> NDArray[np.float32]:
        tokens, broken = self._rows[handle]
        row = np.full(VOCAB, -30.0, dtype=np.float32)
        row[self.following(tokens)] = 0.0
        if broken:
            row[:] = np.nan
        return row

    def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        self._mine()
        assert [len(self._rows[r][0]) for r in rows] == list(positions), "a row of another position"
        return [draw(self._row(r), s, p) for r, s, p in zip(rows, sampling, positions, strict=True)]

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        self._mine()
        return np.stack([self._row(r) for r in rows])

    def length(self, sequence: int) -> int:
        return len(self.kv[sequence])

    def truncate(self, sequence: int, length: int) -> bool:
        self._mine()
        if length >= len(self.kv[sequence]):
            return True
        self.truncations.append(length)
        if self.forgets:
            return False
        del self.kv[sequence][length:], self.cells[sequence][length:]
        return True

    def fork(self, source: int, target: int, length: int) -> bool:
        self._mine()
        assert not self.kv[target]
        assert 0 < length <= len(self.kv[source])
        if self.forgets and length < len(self.kv[source]):
            return False
        self.kv[target] = self.kv[source][:length]
        self.cells[target] = self.cells[source][:length] if self.info.shares else [object() for _ in range(length)]
        return True

    def free(self, sequence: int) -> None:
        self._mine()
        self.kv[sequence], self.cells[sequence] = [], []

    def export_state(self, sequence: int) -> bytes:
        self._mine()
        return np.array(self.kv[sequence], np.int32).tobytes()

    def import_state(self, sequence: int, data: bytes) -> bool:
        self._mine()
        assert not self.kv[sequence]
        if self.imports:
            self.kv[sequence] = np.frombuffer(data, np.int32).tolist()
            self.cells[sequence] = [object() for _ in self.kv[sequence]]
        return self.imports

    def interrupt(self) -> None:
        self._interrupt.set()

    def resume(self) -> None:
        self._interrupt.clear()

    def close(self) -> None:
        self.closed = True

    def facts(self) -> Mapping[str, Any]:
        self._alive()
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
