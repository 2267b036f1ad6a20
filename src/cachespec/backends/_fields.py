"""Top-level body fields that a request adds of its own: a given body's fields that only its vendor knows, and `extra`.

They are merged in order of rank: what the renderer wrote, the plan's options, pass-through fields, `extra`. What a body says
of the model, the prompt and the tools is not theirs to change, for it is what was checked, priced and decided on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cachespec.backends._profile import Api, Profile
from cachespec.errors import InputError
from cachespec.request import Request
from cachespec.values import quick

LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Every name that a protocol, or a server of its own mind, has for the greatest number of output tokens."""
CACHE_FIELDS = ("cache_control", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
"""Fields that steer a vendor's prompt cache: they go where that vendor's marks go, and nowhere else."""
_OURS: Mapping[str, str] = {
    "model": "choose another backend instead",
    **dict.fromkeys(("messages", "input", "system", "instructions", "tools", "functions"), "it is an argument of the request"),
}


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The fields of a vendor's own body (`passed`) and those for one backend (`extra`), and what was left out, for a person."""

    passed: Mapping[str, Any]
    extra: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def fields(self) -> Mapping[str, Any]:
        return {**self.passed, **self.extra} if self.passed or self.extra else {}

    @property
    def limits(self) -> dict[str, int]:
        """Limits of the output among them, which take the place of the request's."""
        return {key: value for key, value in self.fields.items() if key in LIMITS}

    def merge_into(self, body: dict[str, Any]) -> None:
        for fields in (self.passed, self.extra):
            for key, value in fields.items():
                body[key] = _beside(key, body.get(key), value)


def _beside(key: str, ours: Any, given: Any) -> Any:
    """A field of the caller's, where the body may have it already.

    An object comes beside the body's own (`text.verbosity` beside `text.format`), unless it is of another kind, which its
    `type` says. What the client asks for to count an answer and to replay its reasoning stays asked for.
    """
    if key == "include" and isinstance(ours, list) and isinstance(given, list | tuple):
        return [*ours, *(item for item in given if item not in ours)]
    if isinstance(ours, dict) and isinstance(given, Mapping) and "type" not in given:
        return {**ours, **given, **{name: ours[name] for name in ("include_usage",) if name in ours}}
    return given


_NOTHING = Added(passed={}, extra={})


def added(request: Request, backend: str, profile: Profile, *, drop_cache: bool) -> Added:
    """What `request` adds to a body for `backend`; with `drop_cache` nothing that steers a cache.

    Raises: InputError for a field that is not the caller's to set, or a limit that is none.
    """
    extra = request.extra.get(backend)
    if not extra and not request.passthrough:
        return _NOTHING
    warnings: list[str] = []
    passed: dict[str, Any] = {}
    for vendor, fields in request.passthrough.items():
        if vendor == profile.vendor:
            passed |= _passed(fields, profile, warnings, drop_cache=drop_cache)
        elif fields:
            warnings.append(f"left out, as they are {vendor}'s own: {', '.join(fields)}")
    own = dict(extra or {})
    for key in [key for key in own if drop_cache and key in CACHE_FIELDS]:
        del own[key]
        warnings.append(f'{key} was left out: cache="{request.cache}"')
    found = Added(passed=passed, extra=own, warnings=tuple(warnings))
    for key, value in found.fields.items():
        if key in _OURS:
            raise InputError(f"cannot be set here: {_OURS[key]}", field=f"extra.{backend}.{key}")
        if key in (*LIMITS, "n") and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"must be a whole number from 1 on, not {value!r}", field=f"extra.{backend}.{key}")
    return found


def _passed(fields: Mapping[str, Any], profile: Profile, warnings: list[str], *, drop_cache: bool) -> dict[str, Any]:
    """Of a given body's own fields those that go to a server which speaks the body's protocol. Who only speaks it is another
    vendor: it has no use for what is between the caller and the first (ids of users, tiers, storage), and may refuse it."""
    kept: dict[str, Any] = {}
    foreign: list[str] = []
    for key, value in fields.items():
        if key in CACHE_FIELDS:
            if drop_cache:
                continue
            if key not in profile.cache_fields:
                warnings.append(f"{key} was left out: it means nothing to this backend")
                continue
        elif profile.vendor == "openai" and _of_the_other(key, value, profile.api):
            warnings.append(f"{key} was left out: it belongs to OpenAI's other API")
            continue
        elif not profile.own and key not in profile.passes and key not in profile.keeps:
            foreign.append(key)
            continue
        kept[key] = value
    if foreign:
        warnings.append(f"left out, as they are {profile.vendor}'s own: {', '.join(foreign)}")
    return kept


def _of_the_other(key: str, value: object, api: Api) -> bool:
    """Whether a field belongs to the other one of OpenAI's two APIs. Of a choice of tools both have one, in forms of their own:
    Chat's is an object named as its type says."""
    if key == "tool_choice" and isinstance(value, Mapping):
        return isinstance(value.get(str(value.get("type"))), Mapping) is not (api == "chat")
    return key in _ONLY["responses" if api == "chat" else "chat"]


def says(key: str, value: object, api: Api) -> bool:
    """Whether a part's or tool's own field says in a protocol what it says in the one it came from: who may call a tool, and
    who called it, both vendors say in the same fields and in other words."""
    words = [value.get("type")] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    other = "program" if api == "messages" else "code_execution"
    return key not in ("caller", "allowed_callers") or not any(str(word).startswith(other) for word in words)


def output_limit(asked: int | None, profile: Profile, found: Added) -> int | None:
    """Output tokens of one answer that the body allows; None where it says nothing, and the model decides.

    Of several limits in one body the largest: which one a server minds is not known.
    """
    limit = max(found.limits.values(), default=asked if asked is not None else profile.default_output)
    if limit is None or profile.max_output is None:
        return limit if profile.max_output is None else profile.max_output
    return min(limit, profile.max_output)


# Fields that one of OpenAI's two APIs has and the other refuses (the parameter types of the openai SDK, 3.57).
_ONLY: Mapping[str, tuple[str, ...]] = {
    "chat": (
        *("audio", "frequency_penalty", "logit_bias", "logprobs", "modalities", "n", "prediction", "presence_penalty"),
        *("reasoning_effort", "stream_options", "verbosity", "web_search_options"),
    ),
    "responses": (
        *("access_programs", "background", "background_options", "context_management", "conversation", "image", "include"),
        *("instructions", "max_tool_calls", "previous_response_id", "prompt", "reasoning", "text", "truncation"),
    ),
}
