"""What a user writes: messages, parts and tools.

Input may be a plain string, `Message` objects, or dictionaries in the shape of OpenAI's Chat Completions, OpenAI's
Responses, or Anthropic's Messages. All of them become the same frozen values; nothing is rewritten or reordered. The
caller's own cache marks (``cache_control``, ``prompt_cache_breakpoint``) stay on the part they were written on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
JSON: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMark:
    """A cache breakpoint that the caller wrote.

    `dialect` is where it is valid (``"anthropic"``: ``cache_control``; ``"openai"``: ``prompt_cache_breakpoint``);
    `fields` is the object as given, unknown keys included.
    """

    dialect: Literal["anthropic", "openai"]
    fields: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """Text. `extra` keeps fields of the given dictionary that only its own dialect knows (citations, ids...)."""

    text: str
    mark: CacheMark | None = None
    extra: JSON | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """An image, by `url` or as base64 `data` with its `media_type`."""

    url: str | None = None
    data: str | None = None
    media_type: str | None = None
    detail: str | None = None
    mark: CacheMark | None = None
    extra: JSON | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallPart:
    """A tool call by the model. `arguments` is the model's own JSON text, verbatim, never parsed and re-serialised."""

    id: str
    name: str
    arguments: str
    mark: CacheMark | None = None
    extra: JSON | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResultPart:
    """The caller's answer to the tool call `id`; `content` holds text and image parts."""

    id: str
    content: tuple[TextPart | ImagePart, ...]
    is_error: bool = False
    mark: CacheMark | None = None
    extra: JSON | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningPart:
    """Reasoning of a model, kept raw. It is sent back only to the provider and model family it came from.

    `raw` is the vendor's own object: a ``thinking`` or ``redacted_thinking`` block (with signature), or a Responses
    ``reasoning`` item (with encrypted content). `provider` is ``"anthropic"``, ``"openai"``...; None is not known.
    """

    text: str
    raw: JSON | None = None
    provider: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaquePart:
    """Anything else a dialect allows (documents, server tools...): passed to that dialect as it is, refused elsewhere.

    `raw` is the object as given, less the cache mark, which is in `mark`.
    """

    dialect: Literal["chat", "responses", "messages"]
    raw: JSON
    mark: CacheMark | None = None


Part: TypeAlias = TextPart | ImagePart | ToolCallPart | ToolResultPart | ReasoningPart | OpaquePart


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. A tool result is a part: role ``"tool"`` (OpenAI) or ``"user"`` (Anthropic), as it was given.

    `extra` keeps fields of the given dictionary that only its own dialect knows (a Responses item's id, status, phase;
    Chat's audio).
    """

    role: Role
    parts: tuple[Part, ...]
    name: str | None = None
    extra: JSON | None = None

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(p.text for p in self.parts if isinstance(p, TextPart))

    @property
    def tool_calls(self) -> tuple[ToolCallPart, ...]:
        return tuple(p for p in self.parts if isinstance(p, ToolCallPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call. `parameters` is its JSON schema, key order kept as given.

    `raw` with its `dialect` keeps a vendor's own tool (web search, code execution...), which only that dialect takes, less
    its cache mark. `extra` keeps fields of a function tool that only one dialect knows (defer_loading, input_examples...).
    """

    name: str
    description: str | None = None
    parameters: JSON = field(default_factory=dict)
    strict: bool | None = None
    mark: CacheMark | None = None
    dialect: Literal["chat", "responses", "messages"] | None = None
    raw: JSON | None = None
    extra: JSON | None = None


MessageInput: TypeAlias = Message | Mapping[str, Any]
ToolInput: TypeAlias = Tool | Mapping[str, Any]
SystemInput: TypeAlias = str | Sequence[str | TextPart | Mapping[str, Any]]
