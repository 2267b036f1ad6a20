"""The canonical prompt: segments in prefix order, each with the hash of everything up to its end.

Two prompts share a cached prefix exactly as far as their chained hashes agree, whatever vendor or engine caches it. The
order is that of the vendors: parameters that enter the cache key, tools, system, messages (DESIGN section 5, names).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

from cachespec.choices import ToolChoice
from cachespec.messages import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from cachespec.recall import trace
from cachespec.request import Request
from cachespec.values import quick

Whole: TypeAlias = tuple[bytes, ToolChoice | None]
"""A prompt's digest, and the choice of a tool, without which an engine may read something else."""
SegmentKind = Literal["params", "tools", "system", "turn"]
_SYSTEM = ("system", "developer")
_LATE: SegmentKind = "system"
_TURN: SegmentKind = "turn"


@quick
@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of the prefix. `value` is the part's own text, or its JSON value where it is not text.

    `size` is how many bytes it and the fields beside it have as UTF-8; `digest` (16 bytes) chains over all segments up to and
    with this one. Equal digests mean that a model reads the same.
    """

    name: str
    kind: SegmentKind
    value: Any
    size: int
    digest: bytes

    @property
    def text(self) -> str:
        """The part's own text, or its canonical JSON where it is not text: what is compared and shown to a person."""
        return self.value if isinstance(self.value, str) else canonical_json(self.value)


@quick
@dataclass(frozen=True, slots=True)
class Prompt:
    """A request with its segments. `images` counts the images, which no byte count can price."""

    request: Request
    segments: tuple[Segment, ...]
    size: int
    images: int

    @property
    def digest(self) -> bytes:
        return self.segments[-1].digest

    @property
    def whole(self) -> Whole:
        return self.digest, self.request.tool_choice


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def build_prompt(request: Request) -> Prompt:
    """Cut a request into segments and chain their hashes (BLAKE2b, 128 bits).

    Of the parameters a tool's choice is no part of the chain: with some vendors a prefix is the same without it, with others up
    to the messages (`cachespec.cache_terms.PromptCache`), so each cache's own view of a prompt adds it.

    What is hashed of a segment is framed by lengths: its name, whose it is, whether it is text, the content, and the fields
    beside it (a message's name, what only one dialect knows). So no text can pass for a part of another kind, and the order
    of keys counts, which a model reads too. Cache marks are left out: no model reads them.

    Of tools, system and messages that a client remembers (`cachespec.recall`) only what is new is cut and hashed.
    """
    params, first = _added(_Link(), "params", "params", "params", _params(request))
    tools, of_tools = trace(request.tools, _add_tool, params, params.digest)
    system, of_system = trace(request.system, _add_system, tools, tools.digest)
    end, of_messages = trace(request.messages, _add_message, system, system.digest)
    return Prompt(request, (first, *of_tools, *of_system, *of_messages), end.size, end.images)


@quick
@dataclass(frozen=True, slots=True)
class _Link:
    """Where the chain is: the hash and size of all segments so far, the images in them, and the numbers of what comes next."""

    digest: bytes = b""
    size: int = 0
    images: int = 0
    tool: int = 0
    system: int = 0
    message: int = 0


def _added(
    link: _Link,
    name: str,
    kind: SegmentKind,
    whose: str,
    value: Any,
    beside: Any = None,
    *,
    images: int = 0,
    tool: int = 0,
    system: int = 0,
) -> tuple[_Link, Segment]:
    """The next segment and the chain after it; `images`, `tool` and `system` say what it adds to the counts."""
    plain = isinstance(value, str)
    content = (value if plain else _json(value)).encode("utf-8", "surrogatepass")
    rest = b"" if beside is None else _json(beside).encode("utf-8", "surrogatepass")
    head = f"{name}\n{whose}\n{'text' if plain else 'json'}".encode()
    framed = b"%b%d:%b%d:%b%d:%b" % (link.digest, len(head), head, len(content), content, len(rest), rest)
    digest = blake2b(framed, digest_size=16).digest()
    size = len(content) + len(rest)
    after = _Link(digest, link.size + size, link.images + images, link.tool + tool, link.system + system, link.message)
    return after, Segment(name, kind, value, size, digest)


def _add_tool(link: _Link, tool: Tool) -> tuple[_Link, tuple[Segment]]:
    link, segment = _added(link, f"tools[{link.tool}]", "tools", f"{tool.dialect} tool", _tool_json(tool), tool=1)
    return link, (segment,)


def _add_system(link: _Link, said: TextPart) -> tuple[_Link, tuple[Segment]]:
    link, segment = _added(link, f"system[{link.system}]", "system", "system", said.text, said.extra, system=1)
    return link, (segment,)


def _add_message(link: _Link, message: Message) -> tuple[_Link, list[Segment]]:
    late = message.role in _SYSTEM
    segments: list[Segment] = []
    for j, part in enumerate(message.parts):
        beside, images = _beside(message if j == 0 else None, part), _count_images(part)
        if late:
            # Its name does not say where a message begins.
            name, kind, whose = f"system[{link.system}]", _LATE, f"{message.role} {j}"
        else:
            name, kind, whose = f"messages[{link.message}][{j}]", _TURN, message.role
        link, segment = _added(link, name, kind, whose, _content(part), beside, images=images, system=late)
        segments.append(segment)
    if not message.parts:  # an answer that said nothing is read as well
        name = f"messages[{link.message}][0]"
        link, segment = _added(link, name, "turn", f"{message.role}, nothing", "", _beside(message, None))
        segments.append(segment)
    return (link if late else replace(link, message=link.message + 1)), segments


def shared_segments(a: Prompt, b: Prompt) -> int:
    """How many leading segments two prompts have in common."""
    count = 0
    for x, y in zip(a.segments, b.segments, strict=False):
        if x.digest != y.digest:
            break
        count += 1
    return count


def part_text(part: Part) -> str:
    """A text part's text; any other part as canonical JSON."""
    return part.text if isinstance(part, TextPart) else canonical_json(_part_json(part))


def _json(value: Any) -> str:
    """JSON with the keys in their own order, no spaces: what is hashed."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _content(part: Part) -> Any:
    return part.text if isinstance(part, TextPart) else _part_json(part)


def _beside(message: Message | None, part: Part | None) -> Any:
    """What belongs to a part, or to the message that it begins, and is not in its content."""
    fields: dict[str, Any] = {}
    if message is not None and message.name is not None:
        fields["name"] = message.name
    if message is not None and message.extra:
        fields["message"] = message.extra
    if isinstance(part, TextPart) and part.extra:
        fields["part"] = part.extra
    return fields or None


def _part_json(part: Part) -> Mapping[str, Any]:
    match part:
        case TextPart():
            value: dict[str, Any] = {"type": "text", "text": part.text}
        case ImagePart():
            image = {"url": part.url, "data": part.data, "media_type": part.media_type, "detail": part.detail}
            value = {"type": "image", **image}
        case ToolCallPart():
            value = {"type": "tool_call", "id": part.id, "name": part.name, "arguments": part.arguments}
        case ToolResultPart():
            content = [_part_json(p) for p in part.content]
            value = {"type": "tool_result", "id": part.id, "content": content, "is_error": part.is_error}
        case ReasoningPart():
            origin = {"provider": part.provider, "model": part.model}
            return {"type": "reasoning", "text": part.text, "raw": part.raw, **origin}
        case _:
            return {"type": "opaque", "dialect": part.dialect, "raw": part.raw}
    return {**value, "extra": part.extra} if part.extra else value


def _tool_json(tool: Tool) -> Mapping[str, Any]:
    if tool.raw is not None:
        return tool.raw
    value = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {**value, "extra": tool.extra} if tool.extra else value


def _params(request: Request) -> Mapping[str, Any]:
    form, reasoning = request.response_format, request.reasoning
    return {
        "tool_choice": None,  # see `build_prompt`; named all the same, since keys and beliefs of earlier versions rest on this
        "response_format": None if form is None else [form.kind, form.name, form.schema, form.strict, form.description],
        "reasoning": None if reasoning is None else [reasoning.effort, reasoning.budget_tokens, reasoning.summary],
    }


def _count_images(part: Part) -> int:
    if isinstance(part, ImagePart):
        return 1
    if isinstance(part, ToolResultPart):
        return sum(isinstance(p, ImagePart) for p in part.content)
    return 0
