"""Never run, only type-checked: every public name, used as a user would. A signature cannot get worse unnoticed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, assert_type

import cachespec
from cachespec import (
    AuthenticationError,
    BackendError,
    BudgetExceededError,
    CachespecError,
    Client,
    Completion,
    ConfigError,
    ConnectionFailedError,
    ContentFilteredError,
    ContextLengthError,
    Cost,
    Decision,
    DraftVerified,
    EngineStoppedError,
    ImagePart,
    InputError,
    LedgerError,
    Message,
    MissingDependencyError,
    NoRouteError,
    NotFoundError,
    Offer,
    OutOfPagesError,
    OverloadedError,
    PermissionDeniedError,
    Plan,
    PriceUnknownError,
    Quote,
    RateLimitError,
    Reason,
    ReasoningDelta,
    ReasoningPart,
    RequestRejectedError,
    RequestTimeoutError,
    ResponseStarted,
    ResponseStream,
    Retrying,
    ServerError,
    Session,
    StreamInterruptedError,
    StreamStateError,
    TextDelta,
    TextPart,
    Tool,
    ToolCallDelta,
    ToolCallPart,
    ToolResultPart,
    UnknownPluginError,
    UnsupportedParameterError,
    Usage,
    UsageReported,
    connect,
    sync,
)

REJECTED: list[type[RequestRejectedError]] = [ContextLengthError, ContentFilteredError, UnsupportedParameterError]
FAILED: list[type[BackendError]] = [
    *REJECTED,
    AuthenticationError,
    PermissionDeniedError,
    NotFoundError,
    RateLimitError,
    OverloadedError,
    ServerError,
    RequestTimeoutError,
    ConnectionFailedError,
    OutOfPagesError,
    EngineStoppedError,
    StreamInterruptedError,
]
ALL: list[type[CachespecError]] = [
    *FAILED,
    ConfigError,
    UnknownPluginError,
    MissingDependencyError,
    InputError,
    NoRouteError,
    BudgetExceededError,
    PriceUnknownError,
    LedgerError,
    StreamStateError,
]


def values() -> list[Message]:
    call = ToolCallPart(id="c", name="f", arguments="{}")
    return [
        Message(role="user", parts=(TextPart(text="x"), ImagePart(url="https://example.org/x.png"))),
        Message(role="assistant", parts=(ReasoningPart(text="r"), call)),
        Message(role="tool", parts=(ToolResultPart(id="c", content=(TextPart(text="y"),)),)),
    ]


async def asynchronous() -> None:
    async with connect("cachespec.toml") as client:
        assert_type(client, Client)
        async with client.stream("Hi", system=["a", TextPart(text="b")], tags=["t"], timeout="30s", cache="off") as stream:
            assert_type(stream, ResponseStream)
            async for text in stream.text_stream:
                assert_type(text, str)
            async for event in stream:
                match event:
                    case TextDelta() | ReasoningDelta() | ToolCallDelta():
                        print(event.index)
                    case UsageReported():
                        assert_type(event.usage, Usage)
                    case Retrying():
                        assert_type(event.delay_s, float)
                    case DraftVerified():
                        assert_type(event.accepted, int)
                    case ResponseStarted():
                        assert_type(event.request_id, str | None)
            finished(await stream.get_final_completion())
            assert_type(await stream.get_final_text(), str)
        history: list[Message | Mapping[str, Any]] = [*values(), {"role": "user", "content": "x"}]
        tools = [Tool(name="f", parameters={"type": "object"})]
        done = await client.complete(messages=history, tools=tools, tool_choice={"type": "tool", "name": "f"}, reasoning="low")
        finished(done)
        plain = await client.complete(messages=[{"role": "user", "content": "x"}], response_format={"type": "object"})
        finished(plain)
        decided(client.plan("Hi", model="assistant", extra={"laptop": {"x": 1}}))
        session = client.session(system="x", messages=history)
        assert_type(session, Session)
        async with session.stream("Hi", model="laptop", tags=["t"], cache="off", seed=1) as turn:
            finished(await turn.get_final_completion())
        finished(await session.complete("Hi", reasoning="low", stop=["x"]))
        await session.complete("Hi", modle="x")  # type: ignore[call-arg]
        await client.complete("Hi", cache="on")  # type: ignore[arg-type]


def synchronous() -> None:
    with sync.connect() as client:
        finished(client.complete("Hi", temperature=0.5, seed=1, stop="x"))
        decided(client.plan("Hi"))
        with client.stream("Hi") as stream:
            for text in stream.text_stream:
                assert_type(text, str)
            finished(stream.get_final_completion())
        session = client.session(tags=["t"])
        assert_type(session, sync.Session)
        with session.stream("Hi", model="laptop") as turn:
            assert_type(turn, sync.ResponseStream)
        finished(session.complete("Hi", seed=1))
        assert_type(client.ledger.totals(tenant="acme").requests, int)
        assert_type(client.prewarm(system="x").sent, bool)
        assert_type(client.reload(), int)
        client.complete("Hi", modle="x")  # type: ignore[call-arg]
        session.complete("Hi", system="x")  # type: ignore[call-arg]
    client.close()


def finished(done: Completion) -> None:
    assert_type(done.text, str)
    assert_type(done.message, Message)
    assert_type(done.tool_calls, tuple[ToolCallPart, ...])
    assert_type(done.usage, Usage | None)
    assert_type(done.cost, Decimal | None)
    assert_type(done.decision, Decision)
    assert_type(done.warnings, tuple[str, ...])


def decided(decision: Decision) -> None:
    assert_type(decision.plan, Plan | None)
    for offer in decision.candidates:
        assert_type(offer, Offer)
        assert_type(offer.quote, Quote | None)
        assert_type(offer.reasons, tuple[Reason, ...])
    assert_type(decision.explain(), str)


def failed(error: CachespecError, cost: Cost) -> None:
    assert_type(cost.amount, Decimal | None)
    match error:
        case InputError():
            assert_type(error.field, str | None)
        case ConfigError():
            assert_type((error.path, error.line, error.key), tuple[str | None, int | None, str | None])
        case BudgetExceededError():
            assert_type(error.resets_at, datetime | None)
        case StreamInterruptedError():
            assert_type(error.partial, Completion | None)
        case BackendError():
            assert_type(error.retry_after, float | None)
    print(cachespec.__version__)
