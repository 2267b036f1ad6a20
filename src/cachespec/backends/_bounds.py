"""What a request may cost at most, before it is sent: a bound on its input and output, or why there is none (contract M3).

A token is at least one byte of text, so input is bounded by the bytes of everything that can get into the body, with an
allowance for what a vendor adds around it. No body is rendered for that (contract D3): a prompt's size counts every field of
messages, parts and tools, and the fields that the request adds are measured here. There is no bound for what is only named,
not sent (files, pages, stored conversations), for what is packed (a PDF), and for tools that run at the vendor and feed their
results back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cachespec.backends._fields import Added, output_limit
from cachespec.backends._json import dumps
from cachespec.backends._profile import Profile
from cachespec.messages import ImagePart, Message, OpaquePart, Tool, ToolResultPart
from cachespec.prompt import Prompt
from cachespec.recall import trace
from cachespec.values import quick

# Tokens that a vendor adds at most: once, around each piece of the prompt, each function, each tool that it knows itself
# (their instructions), and for a picture at the finest detail (10,000 patches and more).
BASE, PER_SEGMENT, PER_TOOL, PER_OWN_TOOL, PER_IMAGE = 2_048, 32, 128, 2_048, 16_384

_NAMED: Mapping[str, str] = {
    **dict.fromkeys(("input_file", "file", "container_upload"), "a file"),
    **dict.fromkeys(("input_audio", "audio_url"), "sound"),
    **dict.fromkeys(("video_url", "input_video"), "a film"),
    "item_reference": "a stored item",
}
_IMAGE = "an image is only named, not sent"
_IMAGES = ("image", "image_url", "input_image", "computer_screenshot")
_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("previous_response_id", "conversation", "thread", "prompt", "container"), "it names what the vendor keeps"
    ),
    **dict.fromkeys(("web_search_options", "search_parameters", "plugins", "mcp_servers"), "it runs tools at the vendor"),
    **dict.fromkeys(("models", "fallbacks"), "other models may answer"),
    **dict.fromkeys(("audio", "context_management"), "what it makes is billed beside the answer"),
}
_OWN_HANDS = ("bash_", "text_editor_", "memory_", "computer_")  # Anthropic's tools that the caller runs
_OWN_TOOLS = ("function", "custom", "local_shell", "apply_patch", "computer", "computer_use_preview")  # OpenAI's


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`input` and `output` tokens at most, and `unknown`: why one of them has no bound, then `input` is None."""

    input: int | None
    output: int | None
    unknown: tuple[str, ...]


def bounds(prompt: Prompt, profile: Profile, found: Added) -> Bounds:
    """The bounds of a prompt sent to a server of this profile, with the fields that the request adds."""
    request, fields = prompt.request, found.fields
    inside, named = trace(request.messages, _look_at, 0)
    (_, tools), remote = trace(request.tools, _of_tool, (0, 0))
    unknown: dict[str, None] = dict.fromkeys((*named, *remote))
    around = BASE + len(prompt.segments) * PER_SEGMENT + (prompt.images + inside) * PER_IMAGE + tools
    if fields:
        unknown |= {f"{name}: {why}": None for name, why in _FIELDS.items() if fields.get(name)}
    limit = output_limit(request.max_output_tokens, profile, found)
    if limit is None:
        unknown["max_output_tokens: no limit was given"] = None
    # Answers of one request are billed each, and so is what was predicted and did not come.
    output = None if limit is None else fields.get("n", 1) * (limit + _size(fields.get("prediction")))
    most = prompt.size + _size(fields) + _size(request.stop) + around
    return Bounds(input=None if unknown else most, output=output, unknown=tuple(unknown))


def _look_at(count: int, message: Message) -> tuple[int, Iterable[str]]:
    """How many pictures vendors' own objects hold, this message's added; and what the message only names."""
    unknown: dict[str, None] = {}
    for part in message.parts:
        if isinstance(part, OpaquePart):
            count += _images_in(part.raw, unknown)
        for image in part.content if isinstance(part, ToolResultPart) else (part,):
            if isinstance(image, ImagePart) and image.url is not None and not image.url.startswith("data:"):
                unknown[_IMAGE] = None
    if message.extra and message.extra.get("audio"):
        unknown["sound is only named, not sent"] = None
    return count, unknown


def _of_tool(before: tuple[int, int], tool: Tool) -> tuple[tuple[int, int], tuple[str, ...]]:
    """How many tools and what vendors add for them, this one added; and whether it has no bound."""
    i, tokens = before
    if tool.raw is None:
        return (i + 1, tokens + PER_TOOL), ()
    kind = str(tool.raw.get("type", ""))
    ours = kind in _OWN_TOOLS or kind.startswith(_OWN_HANDS)
    return (i + 1, tokens + PER_OWN_TOOL), () if ours else (f"tools[{i}]: {kind} runs at the vendor",)


def _images_in(value: object, unknown: dict[str, None]) -> int:
    """How many pictures a vendor's own object holds; what it only names is noted."""
    if isinstance(value, list | tuple):
        return sum(_images_in(item, unknown) for item in value)
    if not isinstance(value, Mapping):
        return 0
    kind = value.get("type")
    if kind in _IMAGES:
        if not _is_inline(value):
            unknown[_IMAGE] = None
        return 1
    if kind in _NAMED or value.keys() == {"id"}:
        unknown[f"{_NAMED.get(str(kind), 'a stored item')} is named or packed"] = None
        return 0
    source = value.get("source")
    if kind == "document" and not (isinstance(source, Mapping) and source.get("type") in ("text", "content")):
        unknown["a document is named or packed"] = None
        return 0
    return sum(_images_in(inner, unknown) for key, inner in value.items() if key not in ("input", "arguments"))


def _is_inline(block: Mapping[str, Any]) -> bool:
    source, url = block.get("source"), block.get("image_url")
    if isinstance(source, Mapping):
        return source.get("type") == "base64"
    if isinstance(url, Mapping):
        url = url.get("url")
    return isinstance(url, str) and url.startswith("data:")


def _size(value: object) -> int:
    """Bytes of a value in a body; nothing for nothing."""
    return len(dumps(value).encode("utf-8", "surrogatepass")) if value else 0
