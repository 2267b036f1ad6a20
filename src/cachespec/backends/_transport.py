"""One answer of a hosted backend being read, and errors as ours.

The SDKs' clients supply addresses, authentication, limits and error classes; the answer's bytes are read as they come,
without the SDKs' chunk objects (contract S6). Works on asyncio and trio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import ModuleType
from typing import Any

import anyio
import httpx2

from cachespec.backends._decode import EventDecoder, error_class
from cachespec.backends._http import unwind
from cachespec.errors import (
    BackendError,
    ConnectionFailedError,
    NotFoundError,
    RequestRejectedError,
    RequestTimeoutError,
    ServerError,
    UnsupportedParameterError,
)
from cachespec.events import Event, Finished

_UNIX_S = 1e9  # Unix time in 2001, and a duration of 31 years
_NOT_SENT = (
    *(httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError),
    *(httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.InvalidURL),
)
"""What fails before a request is on its way. All else leaves open whether the server took it up."""
CLOSE_S = 0.1
"""How long closing, and waiting for the last bytes after the protocol's last word, may take."""


class Patience(float):
    """A read timeout that no answer outlives: `seconds` for each read, and for none of them beyond the moment `until`.

    The event loops make a read's deadline by adding its timeout to their clock (`anyio.fail_after`, `trio.fail_after`); with
    this one the sum is never past `until` (on that clock). A scope of our own around each read would say the same and cost
    more than everything else a chunk costs here.
    """

    until: float

    def __new__(cls, seconds: float, until: float) -> Patience:
        made = super().__new__(cls, seconds)
        made.until = until
        return made

    def __add__(self, now: float) -> float:
        return min(super().__add__(now), self.until)

    __radd__ = __add__


class HostedAttempt:
    """One answer being read: each `read` takes what the network has, decodes it, and returns its events."""

    ends_by_itself = True

    def __init__(
        self, response: httpx2.Response, decoder: EventDecoder, *, backend: str, model: str, warnings: tuple[str, ...] = ()
    ) -> None:
        self._response, self._decoder, self._warnings = response, decoder, warnings
        self._names = {"backend": backend, "model": model}
        self._chunks = response.aiter_bytes()
        self._reading = self._ended = self._closed = False

    async def read(self) -> Sequence[Event]:
        decoder = self._decoder
        if decoder.error is not None:
            raise decoder.error
        if self._ended or self._closed:
            return ()
        self._reading = True
        try:
            while not decoder.done:
                try:
                    data = await self._chunks.__anext__()
                except StopAsyncIteration:
                    self._ended = True
                    return self._told(decoder.close())
                events = decoder.feed(data)
                if events:
                    return self._told(events) if self._warnings else events
            await self._drain()
        except (httpx2.TransportError, httpx2.DecodingError, httpx2.StreamError, anyio.ClosedResourceError) as error:
            if self._left():
                return ()
            raise transport_error(error, request_id=decoder.request_id, **self._names) from error
        finally:
            self._reading = False
        return ()

    def _left(self) -> bool:
        """Whether `aclose` was called, perhaps while a read was under way."""
        return self._closed

    def _told(self, events: list[Event]) -> list[Event]:
        """The events, with what could not be said in the body noted on the last of them."""
        if self._warnings:
            said = self._warnings
            return [replace(e, warnings=(*said, *e.warnings)) if isinstance(e, Finished) else e for e in events]
        return events

    async def _drain(self) -> None:
        """The protocol said its last word. The end of the body comes with it, and frees the connection for the next call;
        a server that never ends it is not waited for."""
        self._ended = True
        with anyio.move_on_after(CLOSE_S), suppress(httpx2.TransportError, httpx2.DecodingError):
            async for _ in self._chunks:
                pass

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with anyio.move_on_after(CLOSE_S, shield=True):
            await self._response.aclose()
            if not self._reading:
                await unwind(self._chunks)


# -- errors -----------------------------------------------------------------------------------------------------------


def transport_error(
    error: Exception, *, backend: str, model: str, request_id: str | None = None, where: str = ""
) -> BackendError:
    """A failure below the protocol: a timeout, no connection, a broken one, or bytes that no HTTP server may send."""
    begun = not isinstance(error, _NOT_SENT)
    facts: dict[str, Any] = {"backend": backend, "model": model, "request_id": request_id, "begun": begun}
    if isinstance(error, httpx2.TimeoutException):
        what = "byte over the connection" if begun else "connection"
        return RequestTimeoutError(f"no {what}{where} {_waited(error)}", **facts)
    if isinstance(error, httpx2.DecodingError):
        return ServerError(f"the answer's encoding is broken: {error}", **facts)
    what = f"the connection{where} broke" if begun else f"no connection{where}"
    return ConnectionFailedError(f"{what}: {str(error) or type(error).__name__}", **facts)


def _waited(error: httpx2.TimeoutException) -> str:
    """For how long, as far as the request says."""
    try:
        limits: Mapping[str, Any] = error.request.extensions.get("timeout", {})
    except RuntimeError:  # it does not know its request
        return "in time"
    name = {httpx2.ReadTimeout: "read", httpx2.WriteTimeout: "write", httpx2.PoolTimeout: "pool"}.get(type(error), "connect")
    seconds = limits.get(name)
    if isinstance(seconds, Patience) and anyio.current_time() >= seconds.until:
        return "before the deadline of the request"
    return "in time" if seconds is None else f"within {seconds:.3g} s"


def sdk_error(error: Exception, sdk: ModuleType, *, backend: str, model: str, url: str) -> BackendError:
    """An SDK's exception as ours: by its class, then its status and the words of its body, never by message text."""
    if isinstance(error, sdk.APIStatusError):
        return status_error(error.response, error.body, backend=backend, model=model)
    cause = error.__cause__ if isinstance(error, sdk.APIConnectionError) else error
    if isinstance(error, sdk.APITimeoutError) and not isinstance(cause, httpx2.TimeoutException):
        return RequestTimeoutError(f"no answer in time from {url}", backend=backend, model=model)
    return transport_error(cause if isinstance(cause, Exception) else error, backend=backend, model=model, where=f" to {url}")


_PARAMETER_WORDS = (None, "unknown_parameter", "unsupported_parameter", "unsupported_value")
_PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "seed", "reasoning", "reasoning_effort", "reasoning.effort"),
    *("response_format", "text.format", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens"),
)


def status_error(response: httpx2.Response, body: object, *, backend: str, model: str) -> BackendError:
    """What an answer with an error status means."""
    status, headers = response.status_code, response.headers
    inner = body.get("error", body) if isinstance(body, dict) else None
    code = kind = message = parameter = detail = None
    if isinstance(inner, dict):
        code, kind, message, parameter = (inner.get(key) for key in ("code", "type", "message", "param"))
        details = inner.get("details")
        detail = details.get("error_code") if isinstance(details, dict) else None
    elif isinstance(inner, str):
        message = inner
    if 300 <= status < 400:
        message = f"answered with a redirect{_origin(response)}, which is not followed; set base_url to where the API is"
    found = error_class(detail, code, kind, status=status)
    word = code if isinstance(code, str) else None
    if found is RequestRejectedError and parameter in _PARAMETERS and word in _PARAMETER_WORDS:
        found = UnsupportedParameterError
    if not isinstance(message, str) or not message:
        text = body.strip() if isinstance(body, str) else ""
        message = f"answered with status {status}" + (f": {text[:200]!r}" if text else "")
    if found is NotFoundError:
        message += _asked(response)  # a wrong base_url looks like this
    words = ", ".join(w for w in (detail, code, kind) if isinstance(w, str) and w != message)
    asked = {"true": True, "false": False}.get(headers.get("x-should-retry", ""))
    return found(
        f"{message} ({words})" if words else message,
        backend=backend,
        model=model,
        status=status,
        request_id=headers.get("x-request-id") or headers.get("request-id"),
        retry_after=retry_after(headers),
        retryable=asked if asked is not None and found.default_retryable else None,
    )


def _asked(response: httpx2.Response) -> str:
    """What was asked for. No secret is in it: a base URL with a user or a query is refused."""
    try:
        return f" (at {response.request.url})"
    except RuntimeError:
        return ""


def _origin(response: httpx2.Response) -> str:
    """Where a redirect leads, without what may be secret in its path and query."""
    try:
        url = response.request.url.join(response.headers["location"])
    except (KeyError, ValueError, RuntimeError, httpx2.InvalidURL):
        return ""
    return f" to {url.scheme}://{url.netloc.decode('ascii', 'replace')}" if url.host else ""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds a server asks to wait: ``retry-after-ms``, or ``retry-after`` as seconds or as a date.

    Some servers send the Unix time, in seconds or milliseconds, instead of a duration; no duration is as long. None where there
    is no such header, or none that can be read.
    """
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        with suppress(ValueError):
            seconds = float(text) / scale
            if seconds >= _UNIX_S:
                seconds = (seconds if seconds < 1000 * _UNIX_S else seconds / 1000) - datetime.now(UTC).timestamp()
            return max(0.0, seconds) if math.isfinite(seconds) else None
        with suppress(ValueError, TypeError, LookupError, ArithmeticError):  # what the parser says to text that is no date
            moment = parsedate_to_datetime(text)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    return None
