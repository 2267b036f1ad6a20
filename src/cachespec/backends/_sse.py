"""An incremental decoder of server-sent events (WHATWG HTML, 9.2.6) over bytes that may be cut anywhere.

The rules kept: lines end in LF, CRLF or CR; one space after the colon is dropped; several ``data`` lines are joined by a
newline; a leading byte order mark is dropped; a line is decoded as UTF-8 only when it is whole, with U+FFFD for bytes that
are no UTF-8; an event without data is skipped. Two things differ: an event that the end of the bytes leaves without its
blank line is still given out by `close` (many servers end like that), and one event is bounded in size.
"""

from __future__ import annotations

from collections.abc import Iterator

from cachespec.errors import ServerError

MAX_EVENT = 8 * 1024 * 1024
"""Bytes of one event, or of one line, above which the server is at fault. Vendors stay below 1 MiB."""

_BOM = b"\xef\xbb\xbf"


class SSEDecoder:
    """Turns bytes into ``(event name or None, data)`` pairs. Every byte is copied a bounded number of times.

    `id` and `retry` fields are read over: a cut answer cannot be resumed, whatever its last id.
    """

    __slots__ = ("_after_cr", "_backend", "_data", "_first", "_held", "_limit", "_model", "_name", "_size")

    def __init__(self, *, backend: str | None = None, model: str | None = None, limit: int = MAX_EVENT) -> None:
        self._backend, self._model, self._limit = backend, model, limit
        self._held: list[bytes] = []
        self._data: list[bytes] = []
        self._name: str | None = None
        self._size = 0
        self._after_cr = False
        self._first = True

    def feed(self, data: bytes) -> Iterator[tuple[str | None, str]]:
        """The events that `data` completes; read all of them before the next call.

        Raises: ServerError where an event or a line is over the limit.
        """
        if self._after_cr and data:
            self._after_cr = False
            if data[0] == 10:
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data[-1] == 13
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        if self._held:
            self._held.append(lines[0])
            if len(lines) == 1:
                self._grow(len(data))
                return
            self._size -= sum(map(len, self._held[:-1]))
            lines[0] = b"".join(self._held)
        tail = lines.pop()
        self._held = [tail] if tail else []
        for line in lines:
            if not line:
                if self._data:
                    yield self._name, self._take()
                self._name = None
            elif line.startswith(b"data:"):
                value = line[6:] if line[5:6] == b" " else line[5:]
                self._data.append(value)
                self._grow(len(value))
                self._first = False
            else:
                self._field(line)
        if tail:
            self._grow(len(tail))

    def close(self) -> Iterator[tuple[str | None, str]]:
        """What the end of the bytes leaves complete: a last event whose blank line never came."""
        yield from self.feed(b"\n\n")

    def _take(self) -> str:
        parts = self._data
        whole = parts[0] if len(parts) == 1 else b"\n".join(parts)
        self._data = []
        self._size = 0
        return whole.decode("utf-8", "replace")

    def _field(self, line: bytes) -> None:
        """Any line but the usual ``data: ...``; comments and unknown fields are passed over."""
        if self._first:
            self._first = False
            if line.startswith(_BOM):
                line = line[3:]
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if len(line) > self._limit:
            self._grow(len(line))
        if name == b"data":
            self._data.append(value)
            self._grow(len(value))
        elif name == b"event":
            self._name = value.decode("utf-8", "replace") or None

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._limit:
            text = f"sent a server-sent event larger than {self._limit} bytes"
            raise ServerError(text, backend=self._backend, model=self._model)
