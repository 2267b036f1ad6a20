"""What the three renderers share: what a server takes (`Profile`), what comes out (`Rendered`), and the rules for ids,
cache marks, reasoning and foreign fields. Content is never moved, merged or rewritten here or there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

from cachespec.backends._json import dumps
from cachespec.decision import Plan, Reason
from cachespec.errors import InputError
from cachespec.messages import (
    CacheMark,
    ImagePart,
    Message,
    OpaquePart,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from cachespec.request import Request

Api: TypeAlias = Literal["chat", "responses", "messages"]
Body: TypeAlias = dict[str, Any]

CACHE_FIELDS = ("cache_control", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
"""Top-level body fields that steer a vendor's prompt cache: they go where that vendor's marks go, and nowhere else."""


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
        cache_fields: the fields of `CACHE_FIELDS` that its body takes.
        names: what its body calls a request field where that is not the protocol's own name.
        system_role: the role of system text in a list of messages.
        late_system: whether a system message may stand after the first other message.
        stream_usage: whether it wants to be asked for usage while streaming, and takes the asking.
        obfuscation: whether it pads stream events unless told not to.
        encrypted_reasoning: whether reasoning comes back encrypted, to be replayed.
        reasoning_field: the field of an assistant message in which it takes its own reasoning text back.
        effort: how effort is said: a plain field, or an object.
        result_images: whether a tool result may hold images.
        tool_ids: the ids of tool calls that it takes.
        opt_out: the body fields that stop a model from writing its prompt cache unasked.
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
    names: Mapping[str, str] = field(default_factory=dict)
    system_role: Literal["system", "developer"] = "system"
    late_system: bool = True
    stream_usage: bool = True
    obfuscation: bool = False
    encrypted_reasoning: bool = False
    reasoning_field: str | None = None
    effort: Literal["reasoning_effort", "reasoning"] = "reasoning_effort"
    tool_ids: IdRule = ANY_ID
    opt_out: Mapping[str, Any] | None = None

    @property
    def vendor(self) -> Literal["openai", "anthropic"]:
        """Whose pass-through fields its protocol understands."""
        return "anthropic" if self.api == "messages" else "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A body ready to be sent: its exact text, and what of the request could not be said in it."""

    body: str
    warnings: tuple[str, ...]


def model_family(model: str) -> str:
    """Models whose reasoning is of one kind: the name up to its version, as in ``gpt-5.6`` of ``openai/gpt-5.6-sol``."""
    name = model.lower().rsplit("/", 1)[-1]
    found = re.match(r"[^\d]*\d+(?:[.-]\d{1,2}(?![\da-z]))?", name)
    return found.group() if found else name


class Renderer:
    """One rendering: the plan's marks, the warnings so far, and the walk's helpers. Used once, by one renderer."""

    def __init__(self, profile: Profile, request: Request, plan: Plan, *, model: str) -> None:
        self.profile, self.request, self.plan, self.model = profile, request, plan, model
        self._family = model_family(model)
        self._planned = {mark.at: mark for mark in plan.marks}
        self._warnings: dict[str, None] = {}

    def warn(self, text: str) -> None:
        self._warnings[text] = None

    def wants(self, name: str) -> Any:
        """The value of a request field, or None where it is not given or the plan leaves it out."""
        value = None if name in self.plan.ignore else getattr(self.request, name)
        return None if value == () else value

    # -- cache marks ----------------------------------------------------------------------------------------------

    def mark(self, at: str, mark: CacheMark | None) -> Body:
        """The cache mark of the part `at` as a field of its object; empty where there is none.

        The caller's own mark passes whole, unknown keys included, in its own dialect and is left out in any other; a
        planned one is added only where the caller put none.
        """
        dialect = self.profile.marks
        if mark is not None and not self.plan.drop_marks:
            if mark.dialect == dialect:
                return {_MARK[dialect]: dict(mark.fields)}
            self.warn(f"the cache mark at {at} was left out: {_MARK[mark.dialect]} means nothing to this backend")
            return {}
        planned = self._planned.get(at)
        if planned is None or dialect is None:
            return {}
        kind = {"type": "ephemeral"} if dialect == "anthropic" else {"mode": "explicit"}
        return {_MARK[dialect]: {**kind, **({"ttl": planned.ttl} if planned.ttl else {})}}

    def unmarkable(self, at: str, mark: CacheMark | None) -> None:
        """A caller's mark where this dialect has no place for one."""
        if mark is not None and not self.plan.drop_marks:
            self.warn(f"the cache mark at {at} was left out: this protocol has no mark there")

    # -- parts ----------------------------------------------------------------------------------------------------

    def tool_id(self, given: str) -> str:
        return self.profile.tool_ids.apply(given)

    def own_extra(self, extra: Mapping[str, Any] | None, known: Iterable[str]) -> Body:
        """Of the fields that only a part's own dialect knows, those that this dialect knows."""
        return {key: extra[key] for key in known if key in extra} if extra else {}

    def replays(self, part: ReasoningPart, at: str) -> bool:
        """Whether a reasoning part goes back: only to the provider and model family it came from."""
        same = part.provider == self.profile.provider and (part.model is None or model_family(part.model) == self._family)
        if not same:
            origin = "/".join(x for x in (part.provider, part.model) if x) or "an unknown model"
            self.warn(f"the reasoning at {at} was left out: it came from {origin}")
        return same

    # -- the whole ------------------------------------------------------------------------------------------------

    def finish(self, body: Body) -> Rendered:
        """Merge what the plan and the caller add, in order of rank, and write the body."""
        body.update(self.plan.options)
        for vendor, fields in self.request.passthrough.items():
            self._pass_through(vendor, fields, body)
        body.update(self.request.extra.get(self.plan.backend, {}))
        body["stream"] = True
        text = dumps(body)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InputError("holds a lone surrogate, which no body can carry", field=_surrogate(self.request)) from None
        return Rendered(body=text, warnings=tuple(self._warnings))

    def _pass_through(self, vendor: str, fields: Mapping[str, Any], body: Body) -> None:
        if vendor != self.profile.vendor:
            if fields:
                self.warn(f"left out, as they are {vendor}'s own: {', '.join(fields)}")
            return
        for key, value in fields.items():
            if key in CACHE_FIELDS:
                if self.plan.drop_marks:
                    continue
                if key not in self.profile.cache_fields:
                    self.warn(f"{key} was left out: it means nothing to this backend")
                    continue
            elif self.profile.vendor == "openai" and key in _ONLY[_OTHER[self.profile.api]]:
                self.warn(f"{key} was left out: it belongs to OpenAI's other API")
                continue
            if isinstance(value, Mapping) and isinstance(body.get(key), dict):
                value = {**body[key], **value}  # text.verbosity beside text.format, and the like
            body[key] = value


_MARK: Mapping[str, str] = {"anthropic": "cache_control", "openai": "prompt_cache_breakpoint"}
_OTHER: Mapping[str, str] = {"chat": "responses", "responses": "chat"}
# Fields that one of OpenAI's two APIs has and the other refuses (the parameter types of the openai SDK, 3.57).
_ONLY: Mapping[str, tuple[str, ...]] = {
    "chat": (
        *("audio", "frequency_penalty", "logit_bias", "logprobs", "modalities", "n", "prediction", "presence_penalty"),
        *("reasoning_effort", "stream_options", "verbosity", "web_search_options"),
    ),
    "responses": (
        *("background", "background_options", "context_management", "conversation", "include", "instructions"),
        *("max_tool_calls", "previous_response_id", "prompt", "reasoning", "text", "truncation"),
    ),
}


def text_only(parts: Iterable[object]) -> bool:
    return all(isinstance(part, TextPart) for part in parts)


def data_url(part: ImagePart) -> str:
    """An image as one URL: its own, or its data as a ``data:`` URL."""
    return part.url if part.url is not None else f"data:{part.media_type};base64,{part.data}"


@dataclass(slots=True)
class Numbering:
    """Names of segments (DESIGN section 5): system messages are not counted among the messages, their parts go on
    counting where the system prompt ended."""

    system: int
    message: int = 0
    _next: int = field(default=0)

    def names(self, message: Message) -> list[str]:
        if message.role in ("system", "developer"):
            first, self.system = self.system, self.system + len(message.parts)
            return [f"system[{first + j}]" for j in range(len(message.parts))]
        number, self.message = self.message, self.message + 1
        return [f"messages[{number}][{j}]" for j in range(len(message.parts))]


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
    for i, tool in enumerate(request.tools):
        if tool.raw is not None and tool.dialect != profile.api:
            capability[f"tools[{i}] is {tool.dialect}'s own tool"] = None
    started = False
    for message in request.messages:
        system = message.role in ("system", "developer")
        if system and started and not profile.late_system:
            capability["a system message after the first other message is not taken"] = None
        started = started or not system
        for part in message.parts:
            _part(part, profile, capability.setdefault)
    return reasons + [Reason("capability", text) for text in capability]


def _part(part: object, profile: Profile, note: Callable[[str, None], None]) -> None:
    if isinstance(part, TextPart | ToolCallPart | ReasoningPart):
        return
    if isinstance(part, ImagePart) and not profile.images:
        note("images are not taken", None)
    elif isinstance(part, OpaquePart) and part.dialect != profile.api:
        note(f"{part.raw.get('type', 'item')} is {part.dialect}'s own part", None)
    elif isinstance(part, ToolResultPart) and not profile.result_images and not text_only(part.content):
        note("images in tool results are not taken", None)


def _parameter(name: str, why: str) -> Reason:
    return Reason("unsupported_parameter", f"{name}: {why}")


def _set_fields(request: Request) -> list[str]:
    given = [name for name in _PARAMETERS if getattr(request, name) not in (None, ())]
    if request.response_format is not None and request.response_format.kind == "text":
        given.remove("response_format")
    return given


_PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "seed"),
    *("reasoning", "tool_choice", "response_format", "max_output_tokens"),
)


def _reasoning(request: Request, profile: Profile) -> list[Reason]:
    if request.reasoning is None or "reasoning" not in profile.parameters:
        return []
    given = [name for name in ("effort", "budget_tokens", "summary") if getattr(request.reasoning, name) is not None]
    return [_parameter(f"reasoning.{name}", "has no such parameter") for name in given if name not in profile.reasoning]


def strict_schema(schema: object) -> bool:
    """Whether a schema is of the closed kind that OpenAI enforces exactly: every object closed, every property required."""
    if isinstance(schema, Mapping):
        if "properties" in schema or schema.get("type") == "object":
            properties = schema.get("properties") or {}
            if schema.get("additionalProperties") is not False or set(properties) != set(schema.get("required") or ()):
                return False
        return all(strict_schema(value) for value in schema.values())
    return all(strict_schema(item) for item in schema) if isinstance(schema, list | tuple) else True


def _surrogate(request: Request) -> str | None:
    """Where a request holds text that cannot be encoded."""
    places: list[tuple[str, object]] = [(f"tools[{i}]", tool) for i, tool in enumerate(request.tools)]
    places += [(f"system[{i}]", part) for i, part in enumerate(request.system)]
    places += [(f"messages[{i}]", message) for i, message in enumerate(request.messages)]
    places += [("stop", request.stop), ("extra", request.extra)]
    for name, value in places:
        if re.search("[\ud800-\udfff]", _text_of(value)):
            return name
    return None


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "".join(_text_of(k) + _text_of(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return "".join(map(_text_of, value))
    slots = getattr(type(value), "__dataclass_fields__", ())
    return "".join(_text_of(getattr(value, name)) for name in slots)
