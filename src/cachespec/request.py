"""One normalised request: what `Client.stream`, `complete` and `plan` take, validated once.

`Request` is neutral: no backend's field names, nothing rendered. Each attempt renders it anew for its backend, so
nothing vendor-specific crosses from one attempt to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from cachespec.messages import Message, TextPart, Tool

CacheMode: TypeAlias = Literal["auto", "off", "no-write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`mode` ``"tool"`` forces the tool `name`; ``"required"`` forces some tool. `parallel` None leaves the default."""

    mode: Literal["auto", "none", "required", "tool"]
    name: str | None = None
    parallel: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """``text``, ``json`` (any object), or ``schema`` with a JSON schema; `model` is the pydantic class it came from."""

    kind: Literal["text", "json", "schema"]
    name: str = "response"
    schema: Mapping[str, Any] | None = None
    model: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """How much to think: `effort` in the vendor's words (``low``, ``high``, ``none``...), or a token budget."""

    effort: str | None = None
    budget_tokens: int | None = None
    summary: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request. None means the caller did not say. `timeout` is seconds for all attempts together.

    `system` holds the `system` argument and the system messages that stood before the first other message; later ones
    stay where they are in `messages`. `max_output_tokens` None takes the client's default. `extra` is
    ``{backend name: {field: value}}``, merged into that backend's body. `passthrough` is ``{"openai" | "anthropic": {field:
    value}}``: fields of a given vendor body that only that vendor's protocol knows (its cache options, metadata).
    """

    messages: tuple[Message, ...]
    system: tuple[TextPart, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    reasoning: Reasoning | None = None
    model: str | None = None
    tenant: str | None = None
    session_id: str | None = None
    tags: tuple[str, ...] = ()
    timeout: float | None = None
    cache: CacheMode = "auto"
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    passthrough: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
