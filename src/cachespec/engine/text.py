"""From tokens to text that may be shown: whole characters only, and nothing of a stop string.

A token stands for bytes, not characters: the bytes of one character may come in several tokens, so incomplete ones are
held, and only at the very end become U+FFFD. A stop string may begin in one token and end in a later one, so text that
may still become one is withheld, and no more than that. Text and token counts end before the stop string.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from cachespec.errors import InputError


class TextStream:
    """Turns the pieces of one answer into text, and counts the tokens that text consists of.

    `stopped` is set once a stop string was found; then nothing more comes out. `tokens` counts the tokens that begin
    before the stop string (all of them, without one): what is emitted, counted and kept.
    """

    __slots__ = ("_decoded", "_decoder", "_held", "_starts", "_stops", "stopped", "tokens")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise InputError("a stop string may not be empty", field="stop")
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._decoded = 0
        self._starts: deque[int] = deque()
        self.stopped: str | None = None
        self.tokens = 0

    @property
    def certain(self) -> int:
        """How many of the `tokens` no stop string can take back any more."""
        return self.tokens - len(self._starts)

    def push(self, piece: bytes) -> str:
        """The text that may be shown now that this token's bytes arrived."""
        if self.stopped is not None:
            return ""
        self.tokens += 1
        if self._stops:
            self._starts.append(self._decoded)
        return self._release(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was withheld, now that nothing more comes; incomplete bytes as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
            self._starts.clear()
        return text

    def _release(self, new: str) -> str:
        if not self._stops:
            return new
        text = self._held + new
        self._decoded += len(new)
        shown = self._decoded - len(text)  # characters that left before
        found = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.stopped = found
            while self._starts and self._starts[-1] >= shown + at:
                self._starts.pop()
                self.tokens -= 1
            self._starts.clear()
            self._held = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        while self._starts and self._starts[0] < shown + cut:
            self._starts.popleft()  # begins in text that leaves now: counted for good
        self._held = text[cut:]
        return text[:cut]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, shorter than the whole of it."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
