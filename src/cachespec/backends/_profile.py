"""What one server takes, as data, and what of a request it therefore cannot be told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from cachespec.cache_terms import PromptCache
from cachespec.decision import Reason
from cachespec.messages import ImagePart, Message, OpaquePart, Tool, ToolResultPart
from cachespec.recall import trace
from cachespec.request import Request

Api: TypeAlias = Literal["chat", "responses", "messages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRule:
    """What a server allows as the id of a tool call: which characters, and how many."""

    characters: str = ""
    longest: int | None = None
    exact: int | None = None

    def apply(self, given: str) -> str:
        """`given` where it is allowed, else an allowed id that is the same for the same `given`, always."""
        clean = re.sub(f"[^{self.characters}]", "_" if "_" in self.characters else "", given) if self.characters else given
        size = self.exact or self.longest
        if clean == given and given and (size is None or len(given) == size or (not self.exact and len(given) < size)):
            return given
        digest = blake2b(given.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if self.exact:
            return digest[: self.exact]
        room = (size or 64) - 11
        return f"{clean[:room]}_{digest[:10]}"


ANY_ID = IdRule()
ANTHROPIC_ID = IdRule(characters="a-zA-Z0-9_-", longest=64)
CHAT_ID = IdRule(longest=40)
RESPONSES_ID = IdRule(longest=64)
MISTRAL_ID = IdRule(characters="a-zA-Z0-9", exact=9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one server takes, as data: everything a renderer needs to know beside the request and the plan.

    Attributes:
        provider: the vendor's id (genai-prices' ids); reasoning blocks go back only to the provider they came from.
        parameters: names of `Request` fields that its body can say.
        reasoning: the keys of `Request.reasoning` that it takes.
        marks: the dialect of cache marks that it honours.
        cache_fields: the fields of `_fields.CACHE_FIELDS` that its body takes.
        passes: which of the fields that a given body of its protocol may have beside what is neutral it takes as well. Its
            own vendor takes them all (`own`).
        names: what its body calls a request field where that is not the protocol's own name.
        system_role: the role of system text in a list of messages.
        late_system: whether a system message may stand after the first other message.
        stream_usage: whether it wants to be asked for usage while streaming, and takes the asking.
        obfuscation: whether it pads stream events unless told not to.
        encrypted_reasoning: whether reasoning comes back encrypted, to be replayed.
        reasoning_field: the field of an assistant message in which it takes its own reasoning text back.
        message_extra: fields of a message in its own dialect that only this vendor knows.
        effort: how effort is said: a plain field, or an object.
        result_images: whether a tool result may hold images.
        tool_ids: the ids of tool calls that it takes.
        opt_out: the body fields that stop a model from writing its prompt cache unasked.
        max_output: the most output tokens that a body may ask for; a greater wish is cut down to it.
        cache: how the model caches prompts; None where no plans are made for it, and only the caller's marks go.
    """

    api: Api
    provider: str | None = None
    parameters: frozenset[str]
    reasoning: frozenset[str] = frozenset()
    tools: bool = True
    images: bool = False
    result_images: bool = False
    json_mode: bool = True
    json_schema: bool = True
    marks: Literal["anthropic", "openai"] | None = None
    cache_fields: frozenset[str] = frozenset()
    passes: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    system_role: Literal["system", "developer"] = "system"
    late_system: bool = True
    stream_usage: bool = True
    obfuscation: bool = False
    encrypted_reasoning: bool = False
    reasoning_field: str | None = None
    message_extra: tuple[str, ...] = ()
    effort: Literal["reasoning_effort", "reasoning"] = "reasoning_effort"
    tool_ids: IdRule = ANY_ID
    opt_out: Mapping[str, Any] | None = None
    max_output: int | None = None
    cache: PromptCache | None = None

    @property
    def default_output(self) -> int | None:
        """The limit of a body whose request has none: Messages wants one, and this is the client's own default."""
        return 4096 if self.api == "messages" else None

    @property
    def vendor(self) -> Literal["openai", "anthropic"]:
        """Whose pass-through fields its protocol understands."""
        return "anthropic" if self.api == "messages" else "openai"

    @property
    def own(self) -> bool:
        """Whether it is the API of the vendor whose protocol it is."""
        return self.provider == self.vendor

    @property
    def keeps(self) -> frozenset[str]:
        """The fields of a body of its protocol that name what a server keeps."""
        if self.api == "responses":
            return frozenset({"previous_response_id", "conversation", "prompt"})
        return frozenset({"container"} if self.api == "messages" and self.own else ())


def cannot(request: Request, profile: Profile) -> list[Reason]:
    """What of a request this server cannot be told at all: a reason for each, none where it can be told everything."""
    reasons = [_parameter(name, "has no such parameter") for name in _set_fields(request) if name not in profile.parameters]
    reasons += _reasoning(request, profile)
    form = request.response_format
    if form is not None and "response_format" in profile.parameters:
        if form.kind == "json" and not profile.json_mode:
            reasons.append(_parameter("response_format", "there is no JSON mode without a schema"))
        if form.kind == "schema" and not profile.json_schema:
            reasons.append(_parameter("response_format", "schemas are not taken"))
    capability: dict[str, None] = {}
    if request.tools and not profile.tools:
        capability["tools are not taken"] = None
    for i, dialect in trace(request.tools, _own_tools, 0)[1]:
        if dialect != profile.api:
            capability[f"tools[{i}] is {dialect}'s own tool"] = None
    special = trace(request.messages, _special, _Special())[0]
    for what, owner in special.found:
        if owner is None:
            if not profile.late_system:
                capability["a system message after the first other message is not taken"] = None
        elif owner != profile.api:
            capability[f"{what} is {owner}'s own part"] = None
    if special.images and not profile.images:
        reasons.append(_parameter("images", "are not taken"))
    if special.result_images and not profile.result_images:
        reasons.append(_parameter("images", "are not taken in tool results"))
    return reasons + [Reason("capability", text) for text in capability]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Special:
    """What of some messages not every server takes.

    `found` has each once, in the order they came: a part's kind and the dialect whose own it is, or, without a dialect, a
    system message that stands late.
    """

    started: bool = False
    images: bool = False
    result_images: bool = False
    found: tuple[tuple[str, str | None], ...] = ()


def _special(before: _Special, message: Message) -> tuple[_Special, tuple[()]]:
    system = message.role in ("system", "developer")
    images, result_images, found = before.images, before.result_images, before.found
    if system and before.started:
        found += (("system", None),)
    for part in message.parts:
        if isinstance(part, OpaquePart):
            found += ((str(part.raw.get("type", "item")), part.dialect),)
        images = images or isinstance(part, ImagePart)
        if isinstance(part, ToolResultPart):
            result_images = result_images or any(isinstance(inner, ImagePart) for inner in part.content)
    started = before.started or not system
    if (started, images, result_images, found) == (before.started, before.images, before.result_images, before.found):
        return before, ()
    found = tuple(dict.fromkeys(found))
    return _Special(started=started, images=images, result_images=result_images, found=found), ()


def shows_images(request: Request) -> bool:
    """Whether any message holds an image, a vendor's own part (an uploaded file) included."""
    special = trace(request.messages, _special, _Special())[0]
    return special.images or special.result_images or any(kind == "image" for kind, _ in special.found)


def _own_tools(i: int, tool: Tool) -> tuple[int, tuple[tuple[int, str | None], ...]]:
    """Vendors' own tools: where they stand, and whose they are."""
    return i + 1, () if tool.raw is None else ((i, tool.dialect),)


def _parameter(name: str, why: str) -> Reason:
    return Reason("unsupported_parameter", f"{name}: {why}")


def _set_fields(request: Request) -> list[str]:
    given = [name for name, value in zip(_PARAMETERS, _VALUES(request), strict=True) if value is not None and value != ()]
    if request.response_format is not None and request.response_format.kind == "text":
        given.remove("response_format")
    return given


_PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "seed"),
    *("reasoning", "tool_choice", "response_format", "max_output_tokens"),
)
_VALUES = attrgetter(*_PARAMETERS)


def _reasoning(request: Request, profile: Profile) -> list[Reason]:
    if request.reasoning is None or "reasoning" not in profile.parameters:
        return []
    given = [name for name in ("effort", "budget_tokens", "summary") if getattr(request.reasoning, name) is not None]
    return [_parameter(f"reasoning.{name}", "has no such parameter") for name in given if name not in profile.reasoning]
