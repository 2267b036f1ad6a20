"""What the decoders of the three hosted protocols share: bytes in, events or one typed error out.

A decoder is told nothing but the bytes of a 200 answer's body, cut anywhere, and gives the same events for every cut
(contract S4). It knows no clock, no connection and no retry.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, TypeAlias

from cachespec.backends._halves import Halves, joined
from cachespec.backends._json import Number
from cachespec.backends._sse import MAX_EVENT, SSEDecoder
from cachespec.errors import (
    AuthenticationError,
    BackendError,
    ContentFilteredError,
    ContextLengthError,
    InputError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RequestRejectedError,
    RequestTimeoutError,
    ServerError,
    UnsupportedParameterError,
)
from cachespec.events import Event, ToolCallDelta, UsageReported
from cachespec.usage_shapes import BILLING, usage_from

Object: TypeAlias = dict[str, Any]

_BY_WORD: Mapping[str, type[BackendError]] = {
    "authentication_error": AuthenticationError,
    "invalid_api_key": AuthenticationError,
    "permission_error": PermissionDeniedError,
    "permission_denied": PermissionDeniedError,
    "billing_error": PermissionDeniedError,
    "insufficient_quota": PermissionDeniedError,
    "enforced_spend_limit_reached": PermissionDeniedError,
    "contract_spend_limit_reached": PermissionDeniedError,
    "data_residency_mismatch": PermissionDeniedError,
    "not_found_error": NotFoundError,
    "model_not_found": NotFoundError,
    "rate_limit_error": RateLimitError,
    "rate_limit_exceeded": RateLimitError,
    "ramp_limit_exceeded": RateLimitError,
    "overloaded_error": OverloadedError,
    "engine_overloaded": OverloadedError,
    "server_is_overloaded": OverloadedError,
    "service_unavailable": OverloadedError,
    "slow_down": OverloadedError,
    "timeout_error": RequestTimeoutError,
    "timeout": RequestTimeoutError,
    "vector_store_timeout": ServerError,
    "api_error": ServerError,
    "server_error": ServerError,
    "internal_error": ServerError,
    "internal_server_error": ServerError,
    "context_length_exceeded": ContextLengthError,
    "exceed_context_size_error": ContextLengthError,
    "content_filter": ContentFilteredError,
    "content_policy_violation": ContentFilteredError,
    "image_content_policy_violation": ContentFilteredError,
    "misalignment_policy_violation": ContentFilteredError,
    "bio_policy": ContentFilteredError,
    "invalid_prompt": ContentFilteredError,
    "unsupported_parameter": UnsupportedParameterError,
    "unsupported_value": UnsupportedParameterError,
    "invalid_request_error": RequestRejectedError,
    "request_too_large": RequestRejectedError,
    "badrequesterror": RequestRejectedError,
    "conflict_error": OverloadedError,  # as its status
    "failed_to_download_image": RequestRejectedError,
}
_REJECTED_PREFIXES = ("invalid_", "image_", "empty_image", "unsupported_image")
_BY_STATUS: Mapping[int, type[BackendError]] = {
    401: AuthenticationError,
    402: PermissionDeniedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    408: RequestTimeoutError,
    409: OverloadedError,  # something is locked: both SDKs try again
    429: RateLimitError,
    503: OverloadedError,
    504: RequestTimeoutError,
    529: OverloadedError,
}
_BAD_SHAPE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What parsing, or reading an object as if it had its protocol's shape, may raise on any other bytes."""
_loads: Callable[[str], Any] = json.JSONDecoder(parse_float=Number, parse_constant=Number).decode


def error_class(*words: object, status: int | None = None) -> type[BackendError]:
    """The error that a vendor's words mean: the most specific word first (``code``, then ``type``), then the status.

    Words are the fixed vocabulary of the vendors' error objects, never message texts. Unknown: ServerError, or
    RequestRejectedError where the status is another 4xx.
    """
    known = [w.lower() for w in words if isinstance(w, str)]
    for word in known:
        if word in _BY_WORD and _BY_WORD[word] not in (RequestRejectedError, ServerError):
            return _BY_WORD[word]
    if status is not None and status in _BY_STATUS:
        return _BY_STATUS[status]
    for word in known:
        if word in _BY_WORD:
            return _BY_WORD[word]
        if word.startswith(_REJECTED_PREFIXES):
            return RequestRejectedError
    return RequestRejectedError if status is not None and 400 <= status < 500 else ServerError


class EventDecoder(ABC):
    """Bytes of one answer to events. A subclass says what the protocol's events mean.

    Attributes:
        error: set when the answer failed after events of the same bytes; the next `feed` or `close` raises it. Whoever
            waits for more bytes looks here first, for a server may say that it failed and keep the connection open.
        request_id: the answer's own id; whoever knows a better one (a header's) sets it before the first bytes.
        tools: the names of the request's tools, as far as they are known; whoever knows them sets them before the first bytes.
        held: the beginning of a tool call, kept back by a subclass for what the next event may say of it.
        done: the protocol sent its last word; nothing that matters can follow, even if the connection stays open.
    """

    api: ClassVar[str]

    def __init__(self, *, backend: str, model: str, provider: str | None = None) -> None:
        """`backend` and `model` (as asked for) are named in errors; they and `provider` in reasoning parts."""
        self.backend, self.model, self.provider = backend, model, provider
        self.request_id: str | None = None
        self.error: BackendError | None = None
        self.done = False
        self.tools: Collection[str] = ()
        self.held: ToolCallDelta | None = None
        self._sse = SSEDecoder(backend=backend, model=model)
        self._head: bytes | None = b""
        self._plain: list[bytes] | None = None
        self._plain_size = 0
        self._counts: dict[str, Any] = {}
        self._halves = Halves()
        self._halved = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes, in order.

        Raises: the BackendError that the server reported or that its bytes amount to. Where events precede it they are
        returned first, and it is raised by the next call; see `error`.
        """
        return self._run(data, last=False)

    def close(self) -> list[Event]:
        """The events that a clean end of the bytes completes. That the terminal event is missing raises nothing here.

        Raises: as `feed`; and ServerError where the body was no event stream (a complete answer object of the protocol
        is decoded as such).
        """
        return self._run(b"", last=True)

    def _run(self, data: bytes, *, last: bool) -> list[Event]:
        if self.error is not None:
            raise self.error
        out: list[Event] = []
        try:
            if self._head is not None:
                data = self._sniff(data, last=last)
            if self._plain is not None:
                self._keep(self._plain, data)
                if last:
                    found: list[Event] = []
                    self._whole_body(b"".join(self._plain), found)
                    out += self._halves.mend(found)
                return out
            for name, text in self._sse.feed(data):
                self._event(name, text, out)
            if last:
                for name, text in self._sse.close():
                    self._event(name, text, out)
                self._let_go(out)
                out += self._halves.end()
        except BackendError as error:
            self.error = error
            self._let_go(out)
            if not out:
                raise
        return out

    def release(self, out: list[Event]) -> None:
        """Append the event that was kept back, if any: what it waited for does not come."""
        if self.held is not None:
            held, self.held = self.held, None
            out.append(held)

    def _let_go(self, out: list[Event]) -> None:
        """Append what is left when nothing follows."""
        rest: list[Event] = []
        self.release(rest)
        out += self._halves.mend(rest)

    def _event(self, name: str | None, text: str, out: list[Event]) -> None:
        if not text or self.done:
            return
        if text.startswith("[DONE]"):
            self.done = True
            return
        # Only an escape can say half a character, so hardly any answer needs a second look.
        halved = self._halved = self._halved or "\\ud" in text or "\\uD" in text
        found: list[Event] = [] if halved else out
        try:
            self.payload(_loads(text), name, found)
        except _BAD_SHAPE as error:
            raise (self.fault(text) if name == "error" else self.malformed(text)) from error
        finally:
            if halved:
                out += self._halves.mend(found)

    @abstractmethod
    def payload(self, payload: Object, name: str | None, out: list[Event]) -> None:
        """Append the events of one parsed ``data`` object. A shape that is not the protocol's may raise anything."""

    @abstractmethod
    def whole(self, payload: Object, out: list[Event]) -> bool:
        """Decode a complete, not streamed, answer object; False where it is none."""

    # -- errors ---------------------------------------------------------------------------------------------------

    def fault(self, error: object) -> BackendError:
        """The error that a vendor's error object (or text) means; nested objects are looked through."""
        message = code = kind = None
        status: int | None = None
        if isinstance(error, dict):
            inner = error.get("error")
            if isinstance(inner, str):
                inner = {"message": inner}
            if isinstance(inner, dict):
                error = {**error, **inner}
            code, kind, message = error.get("code"), error.get("type"), error.get("message")
            numbers = (code, error.get("status"), error.get("status_code"))
            status = next((int(n) for n in numbers if n is not None and _is_status(n)), None)
        elif isinstance(error, str):
            message = error
        message = joined(message) if isinstance(message, str) and message else f"failed: {_excerpt(error)}"
        words = ", ".join(w for w in (code, kind) if isinstance(w, str) and w not in ("error", message))
        return error_class(code, kind, status=status)(
            f"{message} ({words})" if words else message,
            backend=self.backend,
            model=self.model,
            status=status,
            request_id=self.request_id,
        )

    def malformed(self, text: str) -> ServerError:
        return self._server_error(f"sent data that its protocol does not allow: {_excerpt(text)}")

    def _server_error(self, text: str) -> ServerError:
        return ServerError(text, backend=self.backend, model=self.model, request_id=self.request_id)

    # -- usage ----------------------------------------------------------------------------------------------------

    def usage(self, raw: object, out: list[Event], *, begun: bool = True) -> None:
        """Report a vendor's usage object, with what earlier ones of this answer said that it does not: counts are of the
        whole answer and never added up. What is said of the output before it has `begun` is no count of it.

        An object that makes no sense is usage that did not arrive (contract S5).
        """
        if not isinstance(raw, dict) or not raw:
            return
        if not begun:
            raw = {key: value for key, value in raw.items() if not key.startswith("output_tokens")}
        self._counts = merged_usage(self._counts, raw)
        for counts in (self._counts, raw):  # alone, where the two contradict each other
            try:
                usage = usage_from(self.api, counts)
            except InputError:
                continue
            if usage.uncached is not None or usage.output is not None:
                out.append(UsageReported(usage))
            return

    # -- bodies that are no event stream --------------------------------------------------------------------------

    def _sniff(self, data: bytes, *, last: bool) -> bytes:
        """Look at the first bytes; hold them back while they may still become a field of an event stream.

        Blanks, line ends and byte order marks before the first word mean nothing in either kind of body and are left out,
        however they were cut.
        """
        data = (self._head or b"") + data
        start = data[len(_BLANK.match(data)[0]) :]  # type: ignore[index]
        if not last and any(word.startswith(start) for word in (_BOM, *_FIELDS)):
            self._head = start
            return b""
        self._head = None
        if start and not start.startswith((b":", *_FIELDS)):
            self._plain = []
        return start

    def _keep(self, plain: list[bytes], data: bytes) -> None:
        self._plain_size += len(data)
        if self._plain_size > MAX_EVENT:
            raise self._no_stream((plain or [data])[0])
        plain.append(data)

    def _whole_body(self, body: bytes, out: list[Event]) -> None:
        try:
            payload = json.loads(body, parse_float=Number, parse_constant=Number)
        except (ValueError, RecursionError):
            raise self._no_stream(body) from None
        if isinstance(payload, dict):
            if payload.get("error"):
                raise self.fault(payload)
            try:
                if self.whole(payload, out):
                    self.done = True
                    return
            except _BAD_SHAPE as error:
                raise self._no_stream(body) from error
        raise self._no_stream(body)

    def _no_stream(self, body: bytes) -> ServerError:
        text = body.decode("utf-8", "replace")
        return self._server_error(f"answered with something that is no event stream: {_excerpt(text)}")


_FIELDS = (b"data:", b"event:", b"id:", b"retry:")
_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(rb"(?:[ \t\r\n]|\xef\xbb\xbf)*")


def _is_status(value: object) -> bool:
    if isinstance(value, str):
        return len(value) == 3 and value.isascii() and value.isdigit()
    return isinstance(value, int) and 100 <= value < 600


def string(value: object) -> str:
    """`value`, which the protocol says is a string; TypeError where it is not."""
    if isinstance(value, str):
        return value
    raise TypeError(f"not a string: {value!r}")


def text_or_none(value: object) -> str | None:
    """A string that is not empty, as whole characters; anything else is None."""
    return joined(value) if isinstance(value, str) and value else None


def name_of_call(value: object) -> str:
    """The name of a tool call, without which it cannot be answered; TypeError where there is none."""
    if text := string(value):
        return text
    raise TypeError("a tool call without a name")


def merged_usage(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Two usage objects of one answer as one: a later value replaces an earlier one, but null and 0 erase nothing."""
    merged = dict(earlier)
    for key, value in later.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = merged_usage(old, value)
        elif value is not None and not (value == 0 and old):
            merged[key] = value
    return merged


def billing_facts(said: Object, *, items: object = None) -> dict[str, str] | None:
    """What the price depends on besides the usage, as the answer says it. ``auto`` is a wish, not a tier.

    `items` are the output of a Responses answer. `tools` are those of them that OpenAI bills by themselves, and of which it
    does not say how much they were used.
    """
    facts = {key: said[key] for key in BILLING if text_or_none(said.get(key)) and said[key] != "auto"}
    billed = _BILLED if isinstance(said.get("tool_usage"), dict) else (*_BILLED, "web_search_call")
    kinds = [item.get("type") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    tools = dict.fromkeys(kind for kind in kinds if isinstance(kind, str) and kind in billed)
    return {**facts, "tools": ", ".join(tools)} if tools else facts or None


_BILLED = ("file_search_call", "code_interpreter_call", "image_generation_call")


def _excerpt(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text[:200] + "..." if len(text) > 200 else text)
