"""Every exception cachespec raises.

::

    CachespecError
    ├── ConfigError                    (path, line, key, hint)
    ├── UnknownPluginError
    ├── MissingDependencyError         (extra)
    ├── InputError                     (field)
    ├── NoRouteError                   (reasons, by candidate)
    ├── BudgetExceededError            (scope, limit, spent, reserved, requested, resets_at)
    ├── PriceUnknownError
    ├── LedgerError
    ├── BackendError                   (backend, model, status, request_id, retry_after, retryable)
    │   ├── AuthenticationError
    │   ├── PermissionDeniedError
    │   ├── NotFoundError
    │   ├── RateLimitError
    │   ├── OverloadedError
    │   ├── ServerError
    │   ├── RequestTimeoutError
    │   ├── ConnectionFailedError
    │   ├── RequestRejectedError
    │   │   ├── ContextLengthError
    │   │   ├── ContentFilteredError
    │   │   └── UnsupportedParameterError
    │   ├── OutOfPagesError
    │   ├── EngineStoppedError
    │   └── StreamInterruptedError     (partial)
    └── StreamStateError
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from cachespec.events import Completion


class CachespecError(Exception):
    """Base class of everything this package raises on purpose."""


class ConfigError(CachespecError):
    """A configuration is wrong: the text names file, line and key, and the nearest valid name as a hint."""

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        line: int | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.message, self.path, self.line, self.key, self.hint = message, path, line, key, hint
        where = ":".join(str(x) for x in (path, line) if x is not None)
        text = f"{where}: " if where else ""
        text += f"{key}: {message}" if key else message
        super().__init__(f"{text} ({hint})" if hint else text)


class UnknownPluginError(CachespecError):
    """`use` names a plug-in that is neither built in, installed, nor importable as ``module:attribute``."""


class MissingDependencyError(CachespecError):
    """An optional package is needed; `extra` is what to install: ``pip install 'cachespec[extra]'``."""

    def __init__(self, message: str, *, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{message}; install it with: pip install 'cachespec[{extra}]'")


class InputError(CachespecError):
    """An argument of a request is wrong; `field` says which one (dotted, e.g. ``messages[2].content``)."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        self.field = field
        super().__init__(f"{field}: {message}" if field else message)


class NoRouteError(CachespecError):
    """No candidate can take the request; `reasons` maps each candidate to its reason codes with details."""

    def __init__(self, message: str, *, reasons: Mapping[str, Sequence[Any]]) -> None:
        self.reasons = {name: tuple(items) for name, items in reasons.items()}
        lines = [f"  {name}: " + "; ".join(str(r) for r in items) for name, items in self.reasons.items()]
        super().__init__("\n".join([message, *lines]))


class BudgetExceededError(CachespecError):
    """A hard budget has no room for the worst case of this request. Amounts are USD.

    `reserved` is held for requests that run now; what they do not use is free when they end, before `resets_at`.
    """

    def __init__(
        self,
        *,
        scope: str,
        limit: Decimal,
        spent: Decimal,
        reserved: Decimal,
        requested: Decimal,
        resets_at: datetime | None,
    ) -> None:
        self.scope, self.limit, self.spent, self.reserved = scope, limit, spent, reserved
        self.requested, self.resets_at = requested, resets_at
        held = f"reserved {reserved:f}" + (" until the requests that run now end" if reserved else "")
        until = f", resets at {resets_at.isoformat()}" if resets_at else ""
        super().__init__(
            f"budget {scope}: limit {limit:f} USD, spent {spent:f}, {held}, this request may cost {requested:f}{until}"
        )


class PriceUnknownError(CachespecError):
    """A hard budget applies and the price of the chosen model is not known, so nothing was sent."""


class LedgerError(CachespecError):
    """The ledger cannot be read or written (disk full, locked, corrupt, not ours).

    `completion` is the finished answer when only booking it failed: what was paid for is not lost. Its reservation stays
    and counts against budgets until its lease ends.
    """

    def __init__(self, message: str, *, completion: Completion | None = None) -> None:
        self.completion = completion
        super().__init__(message)


class BackendError(CachespecError):
    """A backend failed. `status` is the HTTP status where there was one; `retry_after` is in seconds.

    `retryable` says whether the same request may succeed later or elsewhere; a rejected request never does. `begun` says
    whether the backend may have begun to work on it, and may bill it, although no answer says so: the time was over, or the
    connection broke, after the request was sent.
    """

    default_retryable: ClassVar[bool] = False
    default_begun: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        model: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        retryable: bool | None = None,
        begun: bool | None = None,
    ) -> None:
        self.message = message
        self.backend, self.model, self.status = backend, model, status
        self.request_id, self.retry_after = request_id, retry_after
        self.retryable = type(self).default_retryable if retryable is None else retryable
        self.begun = type(self).default_begun if begun is None else begun
        facts = [f"status {status}" if status else "", f"request {request_id}" if request_id else ""]
        tail = ", ".join(f for f in facts if f)
        head = f"{backend}: " if backend else ""
        super().__init__(f"{head}{message}" + (f" ({tail})" if tail else ""))


class AuthenticationError(BackendError):
    """The key is missing, wrong or expired (401)."""


class PermissionDeniedError(BackendError):
    """The key may not do this (403), or a spending cap of the account is reached."""


class NotFoundError(BackendError):
    """The model or endpoint does not exist there (404)."""


class RateLimitError(BackendError):
    """Too many requests or tokens (429); `retry_after` when the server said so."""

    default_retryable = True


class OverloadedError(BackendError):
    """The service cannot take it now: overloaded (529, 503, or an in-stream overload event), or waiting for a lock (409)."""

    default_retryable = True


class ServerError(BackendError):
    """The service failed (5xx), or sent what its protocol does not allow."""

    default_retryable = True


class RequestTimeoutError(BackendError):
    """No answer within the time allowed: the request's deadline, or a read or connect timeout."""

    default_retryable = True
    default_begun = True


class ConnectionFailedError(BackendError):
    """No connection, or it broke before any content arrived."""

    default_retryable = True


class RequestRejectedError(BackendError):
    """The service understood and refused the request (400, 413, 422): the same body will be refused again."""


class ContextLengthError(RequestRejectedError):
    """Prompt and output do not fit the model's context."""


class ContentFilteredError(RequestRejectedError):
    """A content policy refused the prompt."""


class UnsupportedParameterError(RequestRejectedError):
    """The model or server cannot honour a parameter of the request."""


class OutOfPagesError(BackendError):
    """The local engine has no KV memory left for this request."""

    default_retryable = True


class EngineStoppedError(BackendError):
    """The local engine crashed or was closed; it takes no further requests."""

    default_retryable = True


class StreamInterruptedError(BackendError):
    """The stream ended, after content, without its protocol's terminal event. `partial` is what arrived."""

    default_begun = True

    def __init__(
        self,
        message: str,
        *,
        partial: Completion | None = None,
        backend: str | None = None,
        model: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        self.partial = partial
        super().__init__(
            message,
            backend=backend,
            model=model,
            status=status,
            request_id=request_id,
            retry_after=retry_after,
            retryable=retryable,
        )


class StreamStateError(CachespecError):
    """A stream was misused: read before entering, entered twice, or read by two tasks at once."""
