"""The HTTP client under the SDKs' clients: when it sends again by itself, how much of an error it reads, where it goes.

Three rules that httpx2 and the SDKs do not have: a request is sent a second time only where the server cannot have begun to
answer it; the body of an error is read up to a bound, and as UTF-8 whatever it claims to be; redirects are not followed, for
they would carry prompts and keys to wherever the answer points.
"""

from __future__ import annotations

import ssl
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import httpcore2
import httpx2

KEEPALIVE_S = 3.5
"""How long an idle connection is kept. Below 5 s, after which common servers (llama.cpp, uvicorn) close theirs unannounced."""
STALE_S, IDLE_S = 0.2, 1.0
"""A connection that was used before, or stood idle for `IDLE_S` since it was made, and ends within `STALE_S` of sending, with
nothing received, was being closed as we sent."""
UNSENT = 3
"""How often a request is sent again that was not sent at all, since the server had closed its new connection by then."""
ERROR_BYTES, ERROR_S = 64 * 1024, 2.0
"""How much of an error's body is read, and for how long: the status is known already, the rest is words."""


class HttpClient(httpx2.AsyncClient):
    """See the module. `send` is all that the SDKs' clients call."""

    def __init__(self) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=200, keepalive_expiry=KEEPALIVE_S)
        # Of the encodings, those that `_plain` reads.
        super().__init__(limits=limits, follow_redirects=False, headers={"accept-encoding": "gzip, deflate"})
        # httpx2 has no argument for httpcore2's network. Where it hides it elsewhere one day, nothing is sent again.
        self._networks: list[_Network] = []
        for transport in (self._transport, *self._mounts.values()):
            pool = getattr(transport, "_pool", None)
            if isinstance(network := getattr(pool, "_network_backend", None), httpcore2.AsyncNetworkBackend):
                pool._network_backend = _Network(network)  # type: ignore[union-attr]
                self._networks.append(pool._network_backend)  # type: ignore[union-attr]

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send, and again where the connection turned out to be closed: once where the request may have been on its way (see
        `_ClosedUnheard`), a few times where nothing was sent (`_ClosedUnsent`).

        Then it goes by no connection that idled until now, for the server may be closing those just so.
        """
        again: dict[type | None, int] = {_ClosedUnheard: 1, _ClosedUnsent: UNSENT}
        while True:
            try:
                response = await super().send(request, stream=True, **options)
                break
            except (httpx2.ReadError, httpx2.ConnectError) as error:
                why = type(error.__cause__)
                if not again.get(why):
                    raise
                again[why] -= 1
                for network in self._networks:
                    network.trusted_since = time.monotonic()
        if not response.is_success:
            return await _error_read(response)
        if not stream:
            try:
                await response.aread()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
                raise
        return response


async def _error_read(response: httpx2.Response) -> httpx2.Response:
    """The same answer with the beginning of its body, read and closed."""
    body, chunks = bytearray(), response.aiter_raw()
    try:
        with anyio.move_on_after(ERROR_S), suppress(httpx2.TransportError):
            async for data in chunks:
                body += data
                if len(body) >= ERROR_BYTES:
                    break
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()
            await unwind(chunks)
    # What the body was is told by its head no longer: it is plain, complete, and UTF-8 as far as it can be.
    about = ("content-type", "content-encoding", "content-length", "transfer-encoding")
    return httpx2.Response(
        response.status_code,
        headers=[(name, value) for name, value in response.headers.multi_items() if name.lower() not in about],
        content=_plain(bytes(body), response.headers.get("content-encoding", "identity"))[:ERROR_BYTES],
        request=response.request,
        extensions=response.extensions,
    )


def _plain(body: bytes, encoding: str) -> bytes:
    """A body without its compression, up to the bound; empty where it cannot be read."""
    if encoding.strip().lower() == "identity":
        return body
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, ERROR_BYTES)  # gzip or deflate, as its head says
    except zlib.error:
        return b""


async def unwind(chunks: AsyncIterator[bytes]) -> None:
    """End the iterators inside httpx2, which closing leaves suspended (trio objects): on a closed connection they give what
    is buffered, then fail."""
    with suppress(httpx2.TransportError, httpx2.DecodingError, httpx2.StreamError):
        async for _ in chunks:
            pass


class _ClosedUnheard(httpcore2.ReadError):
    """A connection that had served before, or waited for us, ended right after we sent, and not a byte came back.

    That is how it looks when a server closes an idle connection while a request is on its way (RFC 9112, 9.5), the one case
    in which section 9.3.1 lets a client repeat a request by itself: what was sent reached nobody. A server that died of the
    request looks alike only if it did so at once, so at worst one answer is begun twice, hardly ever, and never one of which
    anything was seen.
    """


class _ClosedUnsent(httpcore2.ConnectError):
    """A connection, perhaps a new one, that the server had closed before anything was sent: it waits for a request only so
    long, and a busy client can be slow."""


class _Network(httpcore2.AsyncNetworkBackend):
    """Connections that know what they heard.

    trusted_since: a connection that heard nothing since then is not used again (a reading of `time.monotonic`).
    """

    def __init__(self, network: httpcore2.AsyncNetworkBackend) -> None:
        self._network = network
        self.trusted_since = 0.0

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        return _Stream(await self._network.connect_tcp(*args, **options), self)

    async def connect_unix_socket(self, *args: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        return _Stream(await self._network.connect_unix_socket(*args, **options), self)

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


class _Stream(httpcore2.AsyncNetworkStream):
    """One connection. A read that ends it tells whether anything came back since the last write."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, network: _Network) -> None:
        self._stream, self._network = stream, network
        self._served = False
        self._heard = time.monotonic()  # when something last came
        self._unheard: float | None = None  # since when what we sent is without an answer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            data = await self._stream.read(max_bytes, timeout)
        except httpcore2.ReadError as error:
            if self._closed_unheard():
                raise _ClosedUnheard(str(error)) from error
            raise
        if data:
            self._served, self._unheard, self._heard = True, None, time.monotonic()
        elif self._closed_unheard():
            raise _ClosedUnheard("the server closed the connection as the request came")
        return data

    def _closed_unheard(self) -> bool:
        sent = self._unheard
        return sent is not None and time.monotonic() - sent < STALE_S and (self._served or sent - self._heard > IDLE_S)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._unheard is None:
            if self._given_up():
                raise _ClosedUnsent("the server closed the connection before the request was sent")
            self._unheard = time.monotonic()
        await self._stream.write(buffer, timeout)

    def _given_up(self) -> bool:
        """Whether the server ended the connection before we began: in plain HTTP it has nothing else to say by then. (Over
        TLS it has: session tickets.)"""
        return bool(self._stream.get_extra_info("is_readable")) and self._stream.get_extra_info("ssl_object") is None

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._network)

    def get_extra_info(self, info: str) -> Any:
        # The pool asks this of an idle connection: one with something to read was closed by the server, and is replaced.
        if info == "is_readable" and self._heard < self._network.trusted_since:
            return True
        return self._stream.get_extra_info(info)
