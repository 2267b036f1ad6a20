"""What the three renderers share: the rules for ids, cache marks, reasoning, and fields that belong to one vendor.

Content is never moved or rewritten, here or there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from cachespec.backends._fields import added, output_limit, says
from cachespec.backends._json import dumps
from cachespec.backends._marks import MARK, without_marks
from cachespec.backends._profile import Profile
from cachespec.decision import Plan
from cachespec.errors import InputError
from cachespec.messages import (
    CacheMark,
    ImagePart,
    Message,
    ReasoningPart,
)
from cachespec.request import Request

Body: TypeAlias = dict[str, Any]


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
        self._added = added(request, plan.backend, profile, drop_cache=plan.drop_marks)
        # An automatic mark at the top of the body, whoever's, is the plan's last one, said there.
        at_the_top = plan.options.get("cache_control") or self._added.fields.get("cache_control")
        self._planned = {mark.at: mark for mark in (plan.marks[:-1] if at_the_top else plan.marks)}
        self._warnings: dict[str, None] = dict.fromkeys(self._added.warnings)

    def warn(self, text: str) -> None:
        self._warnings[text] = None

    def wants(self, name: str) -> Any:
        """The value of a request field, or None where it is not given or the plan leaves it out."""
        value = None if name in self.plan.ignore else getattr(self.request, name)
        return None if value == () else value

    def limit(self, name: str) -> Body:
        """The limit of the output, called `name` in this body; empty where there is none, or `extra` has its own."""
        limit = output_limit(self.wants("max_output_tokens"), self.profile, self._added)
        return {} if limit is None or self._added.limits else {name: limit}

    # -- cache marks ----------------------------------------------------------------------------------------------

    def mark(self, at: str, mark: CacheMark | None) -> Body:
        """The cache mark of the part `at` as a field of its object; empty where there is none.

        The caller's own mark passes whole, unknown keys included, in its own dialect and is left out in any other; a
        planned one is added only where the caller put none.
        """
        dialect = self.profile.marks
        if mark is not None and not self.plan.drop_marks:
            if mark.dialect == dialect:
                return {MARK[dialect]: dict(mark.fields)}
            self.warn(f"the cache mark at {at} was left out: {MARK[mark.dialect]} means nothing to this backend")
            return {}
        planned = self._planned.get(at)
        if planned is None or dialect is None:
            return {}
        kind = {"type": "ephemeral"} if dialect == "anthropic" else {"mode": "explicit"}
        return {MARK[dialect]: {**kind, **({"ttl": planned.ttl} if planned.ttl else {})}}

    def unmarkable(self, at: str, mark: CacheMark | None) -> None:
        """A caller's mark where this dialect has no place for one."""
        if mark is not None and not self.plan.drop_marks:
            self.warn(f"the cache mark at {at} was left out: this protocol has no mark there")

    def raw(self, at: str, raw: Mapping[str, Any]) -> Body:
        """A vendor's own object, its inner marks kept where they mean something and may stay."""
        keep = None if self.plan.drop_marks or self.profile.marks is None else MARK[self.profile.marks]
        kept: Body = without_marks(raw, keep)
        if not self.plan.drop_marks and kept != raw:
            self.warn(f"cache marks inside {at} were left out: they mean nothing to this backend")
        return kept

    # -- parts ----------------------------------------------------------------------------------------------------

    def tool_id(self, given: str) -> str:
        return self.profile.tool_ids.apply(given)

    def own_part(self, at: str, raw: Mapping[str, Any]) -> Body:
        """A vendor's own part. The ids of calls in it are mapped as everywhere, so that results find their calls."""
        part = self.raw(at, raw)
        names = ("tool_use_id", "call_id", "id" if str(part.get("type")).endswith(("tool_use", "custom")) else "")
        return part | {name: self.tool_id(part[name]) for name in names if isinstance(part.get(name), str)}

    def own_extra(self, extra: Mapping[str, Any] | None, known: Iterable[str], *, at: str | None = None) -> Body:
        """Of the fields that only one dialect knows, those that this one knows. The rest is no content: what it is to the
        model is said elsewhere. Where it is more than that (a tool's settings), `at` names the place for the warning."""
        if not extra:
            return {}
        own = {key: extra[key] for key in known if key in extra and says(key, extra[key], self.profile.api)}
        if at is not None and (foreign := [key for key in extra if key not in own]):
            self.warn(f"left out at {at}, as this protocol has no such fields: {', '.join(foreign)}")
        return own

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
        self._added.merge_into(body)
        for key, value in self._added.limits.items():
            body[key] = value if self.profile.max_output is None else min(value, self.profile.max_output)
        if self.plan.prewarm:
            _only_read(body, self.profile.api)
        else:
            body["stream"] = True
        text = dumps(body)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InputError("holds a lone surrogate, which no body can carry", field=_surrogate(self.request)) from None
        return Rendered(body=text, warnings=tuple(self._warnings))


def _only_read(body: Body, api: str) -> None:
    """Have the prompt read and cached, and nothing generated: each vendor's own way to say so (their guides, 2026-11)."""
    body.pop("stream_options", None)
    if api == "messages":
        body["max_tokens"] = 0
    else:
        options = body.get("prompt_cache_options")
        body["prompt_cache_options"] = {**(options if isinstance(options, Mapping) else {}), "prewarm": True}


def data_url(part: ImagePart) -> str:
    """An image as one URL: its own, or its data as a ``data:`` URL."""
    return part.url if part.url is not None else f"data:{part.media_type};base64,{part.data}"


@dataclass(slots=True)
class Numbering:
    """Names of segments (DESIGN section 5): system messages are not counted among the messages, their parts go on
    counting where the system prompt ended."""

    system: int
    message: int = 0

    def names(self, message: Message) -> list[str]:
        if message.role in ("system", "developer"):
            first, self.system = self.system, self.system + len(message.parts)
            return [f"system[{first + j}]" for j in range(len(message.parts))]
        number, self.message = self.message, self.message + 1
        return [f"messages[{number}][{j}]" for j in range(len(message.parts))]


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
