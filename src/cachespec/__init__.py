"""cachespec: one async client for hosted and local language models.

The names below are the public ones. Each is imported when it is first used, so `import cachespec` loads nothing but this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachespec import sync
    from cachespec.client import Client, connect
    from cachespec.decision import Decision, Offer, Plan, Quote, Reason
    from cachespec.errors import (
        AuthenticationError,
        BackendError,
        BudgetExceededError,
        CachespecError,
        ConfigError,
        ConnectionFailedError,
        ContentFilteredError,
        ContextLengthError,
        EngineStoppedError,
        InputError,
        LedgerError,
        MissingDependencyError,
        NoRouteError,
        NotFoundError,
        OutOfPagesError,
        OverloadedError,
        PermissionDeniedError,
        PriceUnknownError,
        RateLimitError,
        RequestRejectedError,
        RequestTimeoutError,
        ServerError,
        StreamInterruptedError,
        StreamStateError,
        UnknownPluginError,
        UnsupportedParameterError,
    )
    from cachespec.events import (
        Completion,
        DraftVerified,
        Finished,
        LogprobsReported,
        ReasoningDelta,
        ReasoningFinished,
        ResponseStarted,
        Retrying,
        TextDelta,
        TokenLogprob,
        ToolCallDelta,
        UsageReported,
    )
    from cachespec.messages import ImagePart, Message, ReasoningPart, TextPart, Tool, ToolCallPart, ToolResultPart
    from cachespec.session import Session
    from cachespec.stream import ResponseStream
    from cachespec.usage import Cost, Usage

    __version__: str

__all__ = [
    "AuthenticationError",
    "BackendError",
    "BudgetExceededError",
    "CachespecError",
    "Client",
    "Completion",
    "ConfigError",
    "ConnectionFailedError",
    "ContentFilteredError",
    "ContextLengthError",
    "Cost",
    "Decision",
    "DraftVerified",
    "EngineStoppedError",
    "Finished",
    "ImagePart",
    "InputError",
    "LedgerError",
    "LogprobsReported",
    "Message",
    "MissingDependencyError",
    "NoRouteError",
    "NotFoundError",
    "Offer",
    "OutOfPagesError",
    "OverloadedError",
    "PermissionDeniedError",
    "Plan",
    "PriceUnknownError",
    "Quote",
    "RateLimitError",
    "Reason",
    "ReasoningDelta",
    "ReasoningFinished",
    "ReasoningPart",
    "RequestRejectedError",
    "RequestTimeoutError",
    "ResponseStarted",
    "ResponseStream",
    "Retrying",
    "ServerError",
    "Session",
    "StreamInterruptedError",
    "StreamStateError",
    "TextDelta",
    "TextPart",
    "TokenLogprob",
    "Tool",
    "ToolCallDelta",
    "ToolCallPart",
    "ToolResultPart",
    "UnknownPluginError",
    "UnsupportedParameterError",
    "Usage",
    "UsageReported",
    "__version__",
    "connect",
    "sync",
]

_HOMES = {
    "client": ("Client", "connect"),
    "decision": ("Decision", "Offer", "Plan", "Quote", "Reason"),
    "events": (
        *("Completion", "DraftVerified", "Finished", "LogprobsReported", "ReasoningDelta", "ReasoningFinished"),
        *("ResponseStarted", "Retrying", "TextDelta", "TokenLogprob", "ToolCallDelta", "UsageReported"),
    ),
    "messages": ("ImagePart", "Message", "ReasoningPart", "TextPart", "Tool", "ToolCallPart", "ToolResultPart"),
    "session": ("Session",),
    "stream": ("ResponseStream",),
    "usage": ("Cost", "Usage"),
}
"""Where the names live; the others are exceptions."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "sync":
        return import_module(f"{__name__}.sync")
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    home = next((module for module, names in _HOMES.items() if name in names), "errors")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
