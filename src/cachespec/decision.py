"""Frozen values between deciding and doing: what was asked, what was offered, what was planned, and why.

`Decision.to_dict()` is the one JSON value that is logged, shown by `plan` and `explain`, and replayed. Reason codes are
listed in `REASON_CODES`; a new one is added there and in the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from cachespec.usage import money_text
from cachespec.values import quick

REASON_CODES = frozenset(
    {
        "capability",
        "unsupported_parameter",
        "context_length",
        "rule",
        "budget",
        "price_unknown",
        "unhealthy",
        "pinned",
        "sticky",
        "tool_loop",
        "cheapest",
        "fastest",
        "switch_cost",
        "latency_limit",
        "warm_prefix",
        "below_minimum",
        "no_expected_reuse",
        "expected_reuse",
        "write_without_read",
        "caller_marks",
        "cache_off",
        "cold_fan_out",
        "draft_does_not_fit",
        "low_acceptance",
        "short_output",
        "vendor_optimises",
        "no_gain",
        "gain",
        "eval_required",
        "params_changed",
        "isolation",
        "mark_limit",
    }
)


@quick
@dataclass(frozen=True, slots=True)
class Reason:
    """Why: a code from `REASON_CODES`, and a sentence for a person."""

    code: str
    detail: str

    def to_dict(self) -> dict[str, str]:
        return {"code": self.code, "detail": self.detail}

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" if self.detail else self.code


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a policy may know of a request. `timeout_s` is the time it has for everything; `now` is Unix time, seconds.

    `previous_backend` answered the session (or made the tool calls that are answered) before; `tool_loop`: there are results,
    not answered yet, of tools that `previous_backend` called; `held_by`: the backend that keeps state this request names.
    `draw` is a number in [0, 1) for policies that choose by chance: the same for all requests of a session.
    """

    alias: str
    tenant: str | None
    session_id: str | None
    tags: tuple[str, ...]
    tools: bool
    max_output_tokens: int | None
    timeout_s: float | None
    now: float
    previous_backend: str | None = None
    tool_loop: bool = False
    held_by: str | None = None
    draw: float = 0.0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimate:
    """Tokens of a request before it is sent. None means not known.

    `worst_input` is a bound, not a guess; `writes` is `cache_write` by lifetime (`usage.WRITE_TTLS`). `error` is how far the
    last estimates for this model were off what it reported, on average and relative; None where nothing was compared, or the
    count is exact.
    """

    input: int | None
    cache_read: int | None
    cache_write: int | None
    uncached: int | None
    output_expected: int | None
    output_max: int | None
    worst_input: int | None = None
    writes: Mapping[str, int] | None = None
    error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        names = ("input", "cache_read", "cache_write", "uncached", "output_expected", "output_max")
        return {**{name: getattr(self, name) for name in names}, "error": self.error}


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What a candidate would cost, in USD: expected, and the worst case that is reserved. None is not known.

    `ahead` is what the further turns of the conversation are expected to cost there, once it has begun there: what makes a
    backend with cheap reads worth a dearer first turn. `turns` is how many there are expected to be.
    """

    expected: Decimal | None
    worst: Decimal | None
    source: str | None
    price_date: str | None
    ahead: Decimal | None = None
    turns: float = 0.0

    def to_dict(self) -> dict[str, str | None]:
        return {
            "expected": money_text(self.expected),
            "worst": money_text(self.worst),
            "source": self.source,
            "price_date": self.price_date,
            "ahead": money_text(self.ahead),
        }


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Expected time to first token and in total, in milliseconds, and whether anything was measured.

    The `_high_` ones are what 95 of 100 answers keep: limits are held against them. `detail` says how we know.
    """

    ttft_ms: float | None
    total_ms: float | None
    evidence: Literal["measured", "assumed"] = "assumed"
    ttft_high_ms: float | None = None
    total_high_ms: float | None = None
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "ttft_ms": self.ttft_ms,
            "total_ms": self.total_ms,
            "evidence": self.evidence,
            "ttft_high_ms": self.ttft_high_ms,
            "total_high_ms": self.total_high_ms,
            "detail": self.detail,
        }


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What is believed cached for this prompt: how many tokens, for how long yet, and how we know."""

    state: Literal["warm", "partial", "stale", "cold", "unknown"]
    tokens: int | None = None
    expires_in_s: float | None = None
    evidence: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "tokens": self.tokens,
            "expires_in_s": self.expires_in_s,
            "evidence": self.evidence,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a local engine intends: drafter, tokens per step, acceptance and gain it expects, and why.

    `detail`: the reason in a sentence, where its code does not say enough; the offer has it among its reasons.
    """

    drafter: str | None
    draft_length: int
    acceptance: float | None
    gain: float | None
    reason: str
    detail: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "draft_length": self.draft_length,
            "acceptance": self.acceptance,
            "gain": self.gain,
            "reason": self.reason,
        }


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One candidate with everything known about it. `reasons` say why it is out, or what speaks for it."""

    backend: str
    model: str
    eligible: bool
    reasons: tuple[Reason, ...]
    quote: Quote | None
    tokens: TokenEstimate
    latency: Latency
    belief: Belief
    speculation: Speculation | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "model": self.model,
            "eligible": self.eligible,
            "reasons": [r.to_dict() for r in self.reasons],
            "quote": None if self.quote is None else self.quote.to_dict(),
            "tokens": self.tokens.to_dict(),
            "latency": self.latency.to_dict(),
            "belief": self.belief.to_dict(),
            "speculation": None if self.speculation is None else self.speculation.to_dict(),
        }

    def explain(self) -> str:
        """The offer on one line: price, size, cache, time."""
        quote = self.quote
        if quote is None and not self.eligible:
            return f"{self.backend} ({self.model}): cannot take it"
        price = "price unknown"
        if quote is not None and quote.expected is not None:
            price = f"about ${money_text(quote.expected)}"
            if quote.worst is not None:
                price += f", at most ${money_text(quote.worst)}"
            price += f" [{quote.source}, {quote.price_date}]" if quote.price_date else f" [{quote.source}]"
        count = "?" if self.tokens.input is None else str(self.tokens.input)
        count += "" if self.tokens.error is None else f" (give or take {self.tokens.error:.0%})"
        line = f"{self.backend} ({self.model}): {price}; input {count} tokens, cache {self.belief.state}"
        if self.belief.tokens:
            line += f" ({self.belief.tokens} tokens)"
        if self.latency.ttft_ms is not None:
            line += f"; first token in about {self.latency.ttft_ms:.0f} ms ({self.latency.evidence})"
        drafts = self.speculation
        if drafts is not None:
            length = drafts.draft_length
            does = f"{drafts.drafter} drafts {length or 'no'} tokens a step" if drafts.drafter else "no drafts"
            line += f"; {does} ({drafts.reason})"
        return line


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A cache breakpoint in a plan: `at` a segment name (``system[0]``), after `tokens` tokens, kept for `ttl`."""

    at: str
    tokens: int | None
    ttl: str | None

    def to_dict(self) -> dict[str, Any]:
        return {"at": self.at, "tokens": self.tokens, "ttl": self.ttl}


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one backend will be called: the only thing that crosses from deciding to doing.

    `marks` are the caller's and the planner's breakpoints in wire order; `options` are cache parameters of the body;
    `drop_marks` says that the caller's own marks are left out (``cache="off"``); `ignore` names the parameters that are
    left out because this backend cannot honour them (``on_unsupported = "drop"``). `prewarm`: only the prompt is read and
    cached, nothing is generated.
    """

    backend: str
    marks: tuple[Mark, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    drop_marks: bool = False
    ignore: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    prewarm: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "marks": [m.to_dict() for m in self.marks],
            "options": dict(self.options),
            "reasons": [r.to_dict() for r in self.reasons],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """A budget as the decision saw it, in USD. `scope` names it, e.g. ``tenant:acme per day``; `mode` (``hard``, ``soft``,
    ``downgrade``) is what the configuration says happens at its end, which a ledger does not know (None)."""

    scope: str
    limit: Decimal
    spent: Decimal
    reserved: Decimal
    mode: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        return {
            "scope": self.scope,
            "limit": money_text(self.limit),
            "spent": money_text(self.spent),
            "reserved": money_text(self.reserved),
        }


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which backend answers and why; `candidates` stand in the order they would be tried, ineligible ones last."""

    chosen: str | None
    candidates: tuple[Offer, ...]
    plan: Plan | None
    budgets: tuple[BudgetState, ...] = ()
    generation: int = 0
    decided_in_us: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen,
            "candidates": [c.to_dict() for c in self.candidates],
            "plan": None if self.plan is None else self.plan.to_dict(),
            "budgets": [b.to_dict() for b in self.budgets],
            "generation": self.generation,
            "decided_in_us": self.decided_in_us,
        }

    def explain(self) -> str:
        """The decision in words: one line per candidate, then the plan."""
        chosen = self.chosen or "none"
        lines = [f"chosen: {chosen} (decided in {self.decided_in_us:.0f} us, config generation {self.generation})"]
        for offer in self.candidates:
            sign = ">" if offer.backend == self.chosen else ("-" if offer.eligible else "x")
            lines.append(f" {sign} {offer.explain()}")
            lines.extend(f"     {reason}" for reason in offer.reasons)
        if self.plan is not None:
            lines.extend(f"   cache mark at {mark.at} (ttl {mark.ttl or 'default'})" for mark in self.plan.marks)
            if self.plan.options:
                lines.append(f"   cache options: {dict(self.plan.options)}")
            lines.extend(f"   {reason}" for reason in self.plan.reasons)
        lines.extend(
            f"   {b.mode or 'a'} budget {b.scope}: ${money_text(b.spent)} spent, ${money_text(b.reserved)} reserved"
            f" of ${money_text(b.limit)}"
            for b in self.budgets
        )
        return "\n".join(lines)
