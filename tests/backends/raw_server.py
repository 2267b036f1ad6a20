"""A server that says whatever bytes a test wants, on sockets of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

Handler = Callable[[socket.socket, int], object]
"""Answers the n-th request (from 1) on its connection; anything but True closes the connection."""


class RawServer:
    """Reads whole requests and hands them to a handler; `requests` are their bodies, in order of arrival."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.requests: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        with connection, stream, contextlib.suppress(OSError, ValueError):
            while stream.readline():
                size = 0
                while (line := stream.readline().strip().lower()) != b"":
                    if line.startswith(b"content-length:"):
                        size = int(line.partition(b":")[2])
                self.requests.append(stream.read(size))
                if self._handler(connection, len(self.requests)) is not True:
                    connection.shutdown(socket.SHUT_RDWR)
                    return


def answer(status: str, body: bytes, *headers: str) -> bytes:
    """A whole answer with its length."""
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}"))
    return head.encode("latin-1") + b"\r\n" + body


CHAT = (
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"content":"hello"}}]}\n\n'
    b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
OK = answer("200 OK", CHAT, "content-type: text/event-stream")
