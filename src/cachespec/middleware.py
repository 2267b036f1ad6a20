"""Middleware: code of the application that sees every request before it is decided, and every completion at its end.

Both are plain functions of values, run in the order given for requests and in the opposite order for completions. An
exception ends the request with that exception; a request that has not been decided yet has cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cachespec.errors import ConfigError
from cachespec.events import Completion
from cachespec.request import Request


class Middleware(Protocol):
    """Both methods return what shall go on: the argument itself, or a changed copy (`dataclasses.replace`)."""

    def request(self, request: Request, /) -> Request: ...

    def completion(self, request: Request, completion: Completion, /) -> Completion: ...


class Chain:
    """A checked sequence of middleware. Raises ConfigError, naming the culprit, when a member has neither shape."""

    def __init__(self, members: Sequence[Middleware] = ()) -> None:
        for position, member in enumerate(members):
            for method in ("request", "completion"):
                if not callable(getattr(member, method, None)):
                    raise ConfigError(f"{member!r} has no method {method!r}", key=f"middleware[{position}]")
        self._members = tuple(members)

    def request(self, request: Request) -> Request:
        for member in self._members:
            request = member.request(request)
        return request

    def completion(self, request: Request, completion: Completion) -> Completion:
        for member in reversed(self._members):
            completion = member.completion(request, completion)
        return completion
