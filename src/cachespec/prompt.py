"""The canonical prompt: segments in prefix order, each with the hash of everything up to its end.

Two prompts share a cached prefix exactly as far as their chained hashes agree, whatever vendor or engine caches it. The
order is that of the vendors: parameters that enter the cache key, tools, system, messages (DESIGN section 5, names).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from cachespec.messages import (
    ImagePart,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from cachespec.request import Request

SegmentKind = Literal["params", "tools", "system", "turn"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of the prefix. `text` is the part's own text, or its canonical JSON where it is not text.

    `size` is the UTF-8 length of `text` in bytes; `digest` (16 bytes) chains over all segments up to and with this one.
    """

    name: str
    kind: SegmentKind
    text: str
    size: int
    digest: bytes


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


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def build_prompt(request: Request) -> Prompt:
    """Cut a request into segments and chain their hashes (BLAKE2b, 128 bits, keyed by segment name and length)."""
    pieces: list[tuple[str, SegmentKind, str]] = [("params", "params", canonical_json(_params(request)))]
    pieces += [(f"tools[{i}]", "tools", canonical_json(_tool_json(tool))) for i, tool in enumerate(request.tools)]
    pieces += [(f"system[{i}]", "system", part.text) for i, part in enumerate(request.system)]
    images = 0
    number = 0
    system = len(request.system)
    for message in request.messages:
        if message.role in ("system", "developer"):
            for part in message.parts:
                pieces.append((f"system[{system}]", "system", part_text(part)))
                system += 1
            continue
        for j, part in enumerate(message.parts):
            images += _count_images(part)
            pieces.append((f"messages[{number}][{j}]", "turn", f"{message.role}\n{part_text(part)}"))
        number += 1
    segments: list[Segment] = []
    digest = b""
    total = 0
    for name, kind, text in pieces:
        data = text.encode("utf-8", "surrogatepass")
        total += len(data)
        digest = blake2b(b"%b%b:%d:%b" % (digest, name.encode(), len(data), data), digest_size=16).digest()
        segments.append(Segment(name, kind, text, len(data), digest))
    return Prompt(request, tuple(segments), total, images)


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


def _part_json(part: Part) -> Mapping[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ImagePart():
            return {"type": "image", "url": part.url, "data": part.data, "media_type": part.media_type, "detail": part.detail}
        case ToolCallPart():
            return {"type": "tool_call", "id": part.id, "name": part.name, "arguments": part.arguments}
        case ToolResultPart():
            content = [_part_json(p) for p in part.content]
            return {"type": "tool_result", "id": part.id, "content": content, "is_error": part.is_error}
        case ReasoningPart():
            return {"type": "reasoning", "text": part.text, "raw": part.raw}
        case _:
            return {"type": "opaque", "dialect": part.dialect, "raw": part.raw}


def _tool_json(tool: Tool) -> Mapping[str, Any]:
    if tool.raw is not None:
        return tool.raw
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}


def _params(request: Request) -> Mapping[str, Any]:
    choice, form, reasoning = request.tool_choice, request.response_format, request.reasoning
    return {
        "tool_choice": None if choice is None else [choice.mode, choice.name, choice.parallel],
        "response_format": None if form is None else [form.kind, form.schema],
        "reasoning": None if reasoning is None else [reasoning.effort, reasoning.budget_tokens, reasoning.summary],
    }


def _count_images(part: Part) -> int:
    if isinstance(part, ImagePart):
        return 1
    if isinstance(part, ToolResultPart):
        return sum(isinstance(p, ImagePart) for p in part.content)
    return 0
