"""OpenAI: Responses and Chat Completions, through the openai SDK's client.

What a model takes is decided by its name, in one place below; facts as of 2026-11 (SDK types 3.57, the vendor's guides).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Literal, cast

import httpx2

from cachespec.annotations import PriceTable
from cachespec.backends._hosted import (
    Headers,
    HostedBackend,
    SDKClient,
    Target,
    ambient_headers,
    check_header,
    known_context,
    required_key,
)
from cachespec.backends._profile import CHAT_ID, RESPONSES_ID, Profile, cannot
from cachespec.cache_terms import prompt_cache
from cachespec.decision import Reason
from cachespec.durations import Duration
from cachespec.request import Request

URL = "https://api.openai.com/v1"
KEY = "OPENAI_API_KEY"

# Context windows by model name, first match (genai-prices 0.2.3, 2026-11). An argument of the backend overrides.
_CONTEXT = (
    (r"gpt-5\.4-(mini|nano)", 400_000),
    (r"gpt-5\.5", 1_000_000),
    (r"gpt-(5\.[4-9]|6)", 1_050_000),
    (r"gpt-5", 400_000),
    (r"gpt-4\.1", 1_000_000),
    (r"gpt-4o", 128_000),
    (r"o\d", 200_000),
)


def generation(model: str) -> tuple[int, int] | None:
    """The version in a GPT model's name: (5, 6) of ``gpt-5.6-sol``; (1, 0) for the o-series; None for any other name."""
    name = model.removeprefix("ft:")
    if found := re.match(r"gpt-(\d+)(?:\.(\d+))?", name):
        return int(found[1]), int(found[2] or 0)
    return (1, 0) if re.match(r"o\d", name) else None


def reasons(model: str) -> bool:
    """Whether a model reasons: the o-series and GPT-5 and later, but not their chat variants."""
    version = generation(model)
    return version is not None and (version >= (5, 0) or version == (1, 0)) and "-chat" not in model


def openai_profile(model: str, api: Literal["responses", "chat"]) -> Profile:
    """What `model` takes over `api`. An unknown name (a deployment's, a proxy's) is not second-guessed."""
    version, reasoning = generation(model), reasons(model)
    parameters = {"temperature", "top_p", "tool_choice", "response_format", "max_output_tokens"}
    if api == "chat":
        parameters |= {"seed", "stop"}
    if reasoning:
        parameters -= {"temperature", "top_p", "stop"}  # answered with unsupported_value; see `OpenAIBackend._refused`
    if reasoning or version is None:
        parameters |= {"reasoning"}
    explicit = version is not None and version >= (5, 6)
    fields = {"prompt_cache_key", "prompt_cache_retention", *(("prompt_cache_options",) if explicit or version is None else ())}
    return Profile(
        api=api,
        provider="openai",
        parameters=frozenset(parameters),
        reasoning=frozenset({"effort", "summary"} if api == "responses" else {"effort"}),
        images=True,
        result_images=api == "responses",
        marks="openai" if explicit or version is None else None,  # older models refuse breakpoints
        cache_fields=frozenset(fields),
        cache=prompt_cache("openai", api, model),
        opt_out={"prompt_cache_options": {"mode": "explicit"}} if explicit else None,
        names={"max_output_tokens": "max_completion_tokens"},
        system_role="developer" if reasoning else "system",
        obfuscation=True,
        encrypted_reasoning=reasoning,
        message_extra=("audio",) if api == "chat" else ("phase",),
        tool_ids=CHAT_ID if api == "chat" else RESPONSES_ID,
    )


class OpenAIProtocol(HostedBackend):
    """Any server that the openai SDK's client can talk to, as a profile describes it."""

    sdk = "openai"

    def __init__(self, target: Target, *, organization: str | None = None, project: str | None = None) -> None:
        super().__init__(target)
        for key, value in (("organization", organization), ("project", project)):
            check_header(key, value or "", key=key)
        self._organization, self._project = organization, project

    def _build(self, http: httpx2.AsyncClient) -> tuple[ModuleType, SDKClient, Headers]:
        import openai

        drop = openai.Omit()
        headers = {
            **dict.fromkeys(ambient_headers("OPENAI_CUSTOM_HEADERS", os.environ), drop),
            "content-type": "application/json",
            "authorization": f"Bearer {self._api_key}" if self._api_key else drop,
            "openai-organization": self._organization or drop,
            "openai-project": self._project or drop,
            **self._own_headers,
        }
        client = openai.AsyncOpenAI(api_key=self._api_key or "none", base_url=self.base_url, max_retries=0, http_client=http)
        return openai, cast("SDKClient", client), headers


class OpenAIBackend(OpenAIProtocol):
    """OpenAI's own API.

    Args:
        api: ``"responses"`` or ``"chat"`` (Chat Completions).
        api_key: defaults to ``OPENAI_API_KEY``, where `base_url` is OpenAI's own.
        base_url: another address of the same API (a proxy, a regional host). The environment's key, organization and
            project are not sent there.
        organization, project: default to ``OPENAI_ORG_ID`` and ``OPENAI_PROJECT_ID``, likewise.
        prices: USD per million tokens in place of the published: ``{input, cache_read, cache_write: {ttl: price}, output}``.
        context, max_output: tokens, instead of what is known of the model.
        headers: sent with every request.
        diagnostics: ask the vendor why a prompt missed its cache, within a session; ``session.cache_report()`` has its word.
            Over Responses, from GPT-5.6 on; others are not asked.
        connect_timeout, read_timeout: seconds to a connection, and without a byte; never beyond a request's own deadline.

    Raises: ConfigError naming the key that is wrong or missing; MissingDependencyError without the SDK.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        api_key: str | None = None,
        base_url: str | None = None,
        api: Literal["responses", "chat"] = "responses",
        organization: str | None = None,
        project: str | None = None,
        prices: PriceTable = None,
        context: int | None = None,
        max_output: int | None = None,
        headers: Mapping[str, str] | None = None,
        diagnostics: bool = False,
        connect_timeout: Duration = 10.0,
        read_timeout: Duration = 600.0,
    ) -> None:
        own = base_url is None or base_url.rstrip("/") == URL
        target = Target(
            name=name,
            model=model,
            profile=openai_profile(model, api),
            api_key=required_key(api_key, variable=KEY, own_url=own, environ=os.environ),
            base_url=base_url or URL,
            price_provider="openai" if own else None,
            prices=prices,
            context=known_context(_CONTEXT, model) if context is None else context,
            max_output=max_output,
            headers=headers,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            diagnostics=diagnostics,
        )
        super().__init__(
            target,
            organization=organization or (os.environ.get("OPENAI_ORG_ID") if own else None),
            project=project or (os.environ.get("OPENAI_PROJECT_ID") if own else None),
        )
        version = generation(model)
        # Reported for GPT-5.1 and later: sampling parameters are taken while reasoning is switched off, else refused.
        self._still = replace(self._profile, parameters=self._profile.parameters | {"temperature", "top_p"})
        self._can_be_still = reasons(model) and version is not None and version >= (5, 1)
        # Reported for GPT-5.6 over Chat Completions: tools and an effort together are refused.
        self._effort_or_tools = api == "chat" and version is not None and version >= (5, 6)

    def _refused(self, request: Request) -> list[Reason]:
        effort = None if request.reasoning is None else request.reasoning.effort
        found = cannot(request, self._still if self._can_be_still and effort == "none" else self._profile)
        if self._effort_or_tools and request.tools and effort not in (None, "none"):
            detail = "reasoning.effort: not beside tools over Chat Completions on this model; use api = 'responses'"
            found.append(Reason("unsupported_parameter", detail))
        return found
