"""What a stream yields, and what it ends with.

Iterating a `ResponseStream` yields them in the order they came, with two rules for every protocol: nothing is seen of an
attempt before its first content but `Retrying`, and `Finished` comes last, when the request is settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

from cachespec.messages import Message, ReasoningPart, ToolCallPart
from cachespec.usage import Usage, money_text

if TYPE_CHECKING:
    from cachespec.decision import Decision


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer. `index` tells the text blocks of one answer apart (0 where a protocol has one)."""

    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning text (a summary where the vendor shows only that)."""

    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a tool call: `arguments` is the next piece of its JSON text, byte for byte.

    From a backend `id` and `name` may be empty where the wire left them out; the stream fills them in, and starts a
    new call when a new id appears on an index already in use.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVerified:
    """One speculative step of a local engine: tokens proposed, tokens accepted, and why that many were proposed."""

    drafter: str | None
    drafted: int
    accepted: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token with its natural log probability in the model's own law: before temperature, filters, penalties, grammar.

    Attributes:
        token: its id.
        text: the bytes it stands for, which need not be whole characters; of a control token its name.
        top: the most probable tokens at its place, most probable first, without a `top` of their own.
    """

    token: int
    text: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As Chat Completions writes it: the text, with U+FFFD for what is no whole character, beside the bytes."""
        plain = {"token": self.text.decode("utf-8", "replace"), "bytes": list(self.text), "id": self.token}
        top = {"top_logprobs": [other.to_dict() for other in self.top]} if self.top else {}
        return {**plain, "logprob": self.logprob, **top}


@dataclass(frozen=True, slots=True)
class LogprobsReported:
    """Log probabilities of the next tokens of the answer, in order, where a request asked a local backend for them.

    All of them together are the tokens that `usage.output` counts; the text of one may come before or after it.
    """

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class UsageReported:
    """The backend's own count, complete as far as it is known now; a later one replaces it."""

    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrying:
    """An attempt failed before any content; the next one starts on `next_backend` after `delay_s` seconds."""

    attempt: int
    backend: str
    error: Exception
    next_backend: str
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStarted:
    """The backend took the request: its id, the model that answers (as the vendor names it), and billing facts.

    `billing` holds what the price depends on beside the usage, e.g. ``{"service_tier": "flex"}`` (of the *response*).
    `response_id` is the vendor's id of the answer itself, by which a later request can name it.
    """

    request_id: str | None = None
    model: str | None = None
    billing: Mapping[str, str] | None = None
    response_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFinished:
    """A reasoning block is complete: the part with its raw vendor object, to be replayed verbatim."""

    index: int
    part: ReasoningPart


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDiagnosed:
    """The vendor's own word on why a prompt missed its cache: `reason` as the vendor calls it (``hit`` where it did not
    miss, ``pending`` where it cannot say yet), and the input tokens it says were lost. Only where it was asked for."""

    reason: str
    missed_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer is complete: its protocol's terminal event arrived. The last event of a stream.

    `reason` is ``stop``, ``length``, ``tool_calls``, ``content_filter`` or ``pause``, else the vendor's own word.
    `busy_s` is the seconds a local engine spent on this request (None for hosted ones).
    """

    reason: str
    busy_s: float | None = None
    warnings: tuple[str, ...] = ()


Event: TypeAlias = (
    TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | DraftVerified
    | LogprobsReported
    | UsageReported
    | Retrying
    | ResponseStarted
    | ReasoningFinished
    | CacheDiagnosed
    | Finished
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer. Costs are USD; times are milliseconds since the stream was entered.

    `cache_diagnosis` is the vendor's own word on a cache miss, where it was asked (`diagnostics` of the backend).
    `usage` is None when the backend reported none; `cost` is then the ledger's estimate and `estimated` True. `cost` is
    None when the price is not known. `message` can be appended to `messages` as it is. `logprobs` are those of the
    answer's tokens where they were asked for (`LogprobsReported`), else None.
    """

    text: str
    message: Message
    tool_calls: tuple[ToolCallPart, ...]
    parsed: Any
    finish_reason: str | None
    usage: Usage | None
    cost: Decimal | None
    estimated: bool
    backend: str
    model: str
    request_id: str | None
    ttft_ms: float | None
    total_ms: float
    decision: Decision
    warnings: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    cache_diagnosis: CacheDiagnosed | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that ``cachespec complete --json`` prints; with ``logprobs`` where there are any."""
        scores = {} if self.logprobs is None else {"logprobs": [token.to_dict() for token in self.logprobs]}
        return {
            "text": self.text,
            "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in self.tool_calls],
            "finish_reason": self.finish_reason,
            "usage": None if self.usage is None else self.usage.to_dict(),
            "cost": money_text(self.cost),
            "estimated": self.estimated,
            "backend": self.backend,
            "model": self.model,
            "request_id": self.request_id,
            "ttft_ms": self.ttft_ms,
            "total_ms": self.total_ms,
            "decision": self.decision.to_dict(),
            "warnings": list(self.warnings),
            **scores,
        }
