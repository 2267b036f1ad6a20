"""The contract of a backend: something that can answer a request, hosted or local.

A backend speaks to the world and decides nothing: it says what it can do (`check`), counts (`estimate`), shows the exact
bytes it would send (`wire`), and opens attempts (`open`). It is used by many tasks at once. `cachespec.testing` has the
contract tests that every backend passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from cachespec.cache_terms import PromptCache
from cachespec.decision import Belief, Latency, Plan, Reason, Speculation, TokenEstimate
from cachespec.events import Event
from cachespec.pricing import Rates
from cachespec.prompt import Prompt
from cachespec.request import Request
from cachespec.usage import Usage
from cachespec.values import quick


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can honour. `parameters` are `Request` field names it takes (``temperature``, ``seed``...).

    `marks` is the dialect of cache marks that its wire form carries; `opt_out` the body fields that stop a model from
    writing its prompt cache when that is what it does by default (None: it writes nothing unasked). `caching` is how it
    caches, at this model's prices; None: not known, and nothing is planned for it. `isolates`: it does by itself what a request
    says of its cache and its tenant, as the local engine does. `diagnoses`: whose way of asking why a
    prompt missed its cache this backend is told to use (None: it does not ask). `keeps`: the fields of a given body of its
    protocol with which it can be told what it keeps (``previous_response_id``); None: those of its `provider`'s own body.
    """

    parameters: frozenset[str]
    tools: bool = True
    images: bool = False
    json_mode: bool = True
    json_schema: bool = True
    context: int | None = None
    max_output: int | None = None
    local: bool = False
    marks: Literal["anthropic", "openai"] | None = None
    opt_out: Mapping[str, Any] | None = None
    diagnoses: Literal["anthropic", "openai"] | None = None
    caching: PromptCache | None = None
    isolates: bool = False
    keeps: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Exactly what would be sent: `body` is the text of the request body. Headers with secrets are never here."""

    url: str
    body: str


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A backend's view of a prompt, without I/O: tokens, what is cached, how long it takes, what it would draft.

    Attributes:
        busy_s: seconds that a local engine will work on it, the wait for others not counted, for an answer of
            `tokens.output_expected` tokens.
        output_max: output tokens that may be billed at most, as the body itself limits them (all of several answers, and a
            limit in `extra`, included). None: the caller's `max_output_tokens` and `capabilities.max_output` hold.
        billing: what the body asks for beyond the standard price (``{"service_tier": "priority"}``), for `Rates.worst`.
        unbounded: why the cost has no upper bound (content that is only named, tools that run at the vendor, no limit of
            the output), for a person. Where there is a reason, `tokens.worst_input` is None and a hard budget refuses the
            request.
    """

    tokens: TokenEstimate
    belief: Belief
    latency: Latency
    speculation: Speculation | None = None
    busy_s: float | None = None
    output_max: int | None = None
    billing: Mapping[str, str] | None = None
    unbounded: tuple[str, ...] = ()


class Attempt(Protocol):
    """One running call. One task uses it; `aclose` may be called at any moment, also twice, also under cancellation.

    An attempt that has `ends_by_itself = True` promises more: its `read` raises RequestTimeoutError when the `timeout` of
    `open` has passed, and returns empty as soon as another task calls `aclose`. Others are guarded from outside, which costs
    some 15 microseconds a read.
    """

    async def read(self) -> Sequence[Event]:
        """Wait for and return the next events, in order; empty exactly when the stream ended.

        Everything that is already there comes in one batch, and nothing is read ahead beyond it, so a slow caller slows
        the producer (contract S7). `Finished` is sent iff the protocol's terminal event arrived; what follows it on the
        wire (usage) may follow it here. A batch never holds `Retrying`.

        Raises: `BackendError` subclasses, already mapped. A clean end without `Finished` raises nothing: the stream
        decides what that means.
        """

    async def aclose(self) -> None:
        """Stop the upstream and free what the attempt holds: within 100 ms, without waiting for the upstream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """What a request that only had its prompt read and cached was counted as; `billing` as of `ResponseStarted`."""

    usage: Usage | None
    billing: Mapping[str, str] | None = None
    request_id: str | None = None


@runtime_checkable
class Warming(Protocol):
    """A backend that can have a prompt read and cached without generating anything, which renews what is cached of it."""

    def cannot_warm(self, request: Request) -> str | None:
        """Why this request cannot be sent that way; None: it can."""

    async def warm(self, request: Request, plan: Plan, *, timeout: float) -> Warmed:
        """Send it, with ``plan.prewarm``, and wait for the answer; `timeout` in seconds. Raises as `Backend.open`."""


class Backend(Protocol):
    """See the module's docstring. `name` is the name in the configuration, `model` what is asked of the vendor."""

    name: str
    model: str
    provider: str | None
    rates: Rates | None
    capabilities: Capabilities

    async def start(self) -> None:
        """Load what has to be loaded (a local model). Called once, before any `open`. Raises ConfigError and the like."""

    def check(self, request: Request) -> Sequence[Reason]:
        """Why this backend cannot honour the request (empty: it can). Pure; no I/O.

        The text of an ``unsupported_parameter`` begins with the name of the `Request` field and a colon, so that a client
        told to drop what is unsupported knows what to drop.

        Raises: InputError for a request that is wrong in itself, wherever it goes: cache marks that break their own
        dialect's rules, or an `extra` that sets what the request already says.
        """

    def estimate(self, prompt: Prompt) -> Estimate:
        """Tokens, belief and latency for this prompt. Pure with respect to the outside; no I/O."""

    def wire(self, request: Request, plan: Plan) -> Wire | None:
        """What `open` would send for the same arguments, byte for byte; None for a local backend."""

    async def open(self, request: Request, plan: Plan, *, timeout: float | None) -> Attempt:
        """Start an attempt; return when the backend accepted it (HTTP: status 200 and headers; local: queued).

        `timeout` is what is left of the deadline, in seconds. Raises mapped `BackendError`s; never retries by itself.
        Cancellation leaves nothing behind.
        """

    async def aclose(self) -> None:
        """Release connections, threads and memory. Idempotent."""


@runtime_checkable
class Located(Protocol):
    """A backend whose model is a file. `config check` and `doctor` ask for it without starting anything."""

    def locate(self) -> None:
        """Look for the files of its models, as far as that goes without loading or downloading. Raises ConfigError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """For `doctor`: whether a backend could start, and why not. `level` is what to do about it."""

    name: str
    ok: bool
    detail: str
    level: Literal["ok", "missing", "error"] = "ok"
    facts: Mapping[str, Any] = field(default_factory=dict)
