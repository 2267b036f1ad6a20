"""Middleware: code of the application that sees every request before it is decided, and every completion at its end.

Both are plain functions of values, run in the order given for requests and in the opposite order for completions. An
exception ends the request with that exception; a request that has not been decided yet has cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from cachespec.errors import ConfigError
from cachespec.events import Completion
from cachespec.request import Request
from cachespec.telemetry import takes

_T = TypeVar("_T")


class Middleware(Protocol):
    """Both methods return what shall go on: the argument itself, or a changed copy (`dataclasses.replace`)."""

    def request(self, request: Request, /) -> Request: ...

    def completion(self, request: Request, completion: Completion, /) -> Completion: ...


class Chain:
    """A checked sequence of middleware. Raises ConfigError, naming the culprit, when a member has neither shape."""

    def __init__(self, members: Sequence[Middleware] = ()) -> None:
        for position, member in enumerate(members):
            for method, arguments in (("request", 1), ("completion", 2)):
                problem = takes(getattr(member, method, None), arguments)
                if problem is not None:
                    raise ConfigError(f"{member!r}: {method} {problem}", key=f"middleware[{position}]")
        self._members = tuple(members)

    def request(self, request: Request) -> Request:
        for position, member in enumerate(self._members):
            request = _checked(member.request(request), Request, f"middleware[{position}].request")
        return request

    def completion(self, request: Request, completion: Completion) -> Completion:
        for position, member in reversed(list(enumerate(self._members))):
            where = f"middleware[{position}].completion"
            completion = _checked(member.completion(request, completion), Completion, where)
        return completion


def _checked(value: _T, kind: type[_T], where: str) -> _T:
    if not isinstance(value, kind):
        raise ConfigError(f"must return a {kind.__name__}, not {type(value).__name__}", key=where)
    return value
