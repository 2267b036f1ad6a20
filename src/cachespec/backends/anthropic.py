"""Anthropic: Messages, through the anthropic SDK's client.

What a model takes is decided by its name, in one place below; facts as of 2026-11 (SDK types 2.14, the vendor's guides).
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
from cachespec.backends._hosted import Headers, HostedBackend, SDKClient, Target, ambient_headers, known_context, required_key
from cachespec.backends._profile import ANTHROPIC_ID, Profile
from cachespec.cache_terms import claude_name, prompt_cache
from cachespec.durations import Duration
from cachespec.errors import ConfigError

URL = "https://api.anthropic.com"
KEY = "ANTHROPIC_API_KEY"
VERSION = "2026-10-21"
"""The API version our bodies are written for. From it on `temperature`, `top_p` and `top_k` are refused, even at defaults."""

_FIRST_4 = r"claude-[a-z]+-4-5|claude-3|claude-[a-z]+-4(-[01])?(-\d{8})?$"
# Models that take a system message in the middle of a conversation, as far as the vendor's guide names them.
_LATE_SYSTEM = r"claude-(opus-4-8|opus-5|fable-5|mythos-5)"
# Context windows by model name, first match (genai-prices 0.2.3, 2026-11). An argument of the backend overrides.
_CONTEXT = ((_FIRST_4, 200_000), (r"claude-", 1_000_000))


def anthropic_profile(model: str, version: str) -> Profile:
    """What `model` takes at an API version."""
    name = claude_name(model)
    sampling = ("temperature", "top_p", "top_k") if version < VERSION else ()
    efforts = () if re.match(_FIRST_4, name) else ("effort",)  # adaptive thinking came with 4.6
    return Profile(
        api="messages",
        provider="anthropic",
        parameters=frozenset({"stop", "reasoning", "tool_choice", "response_format", "max_output_tokens", *sampling}),
        reasoning=frozenset({"budget_tokens", "summary", *efforts}),
        images=True,
        result_images=True,
        json_mode=False,
        marks="anthropic",
        cache_fields=frozenset({"cache_control"}),
        cache=prompt_cache("anthropic", "messages", model),
        late_system=re.match(_LATE_SYSTEM, name) is not None,
        tool_ids=ANTHROPIC_ID,
    )


class AnthropicProtocol(HostedBackend):
    """Any server that the anthropic SDK's client can talk to, as a profile describes it."""

    sdk = "anthropic"

    def __init__(self, target: Target, *, version: str = VERSION, auth: Literal["bearer", "x-api-key"] = "bearer") -> None:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", version):
            raise ConfigError(f"must be a date such as 2023-06-01, not {version!r}", key="version")
        # The SDK adds /v1 itself, unlike OpenAI's; whoever wrote it too meant the same address.
        super().__init__(replace(target, base_url=target.base_url.rstrip("/").removesuffix("/v1")))
        self._version, self._auth = version, auth

    def _build(self, http: httpx2.AsyncClient) -> tuple[ModuleType, SDKClient, Headers]:
        import anthropic

        drop = anthropic.Omit()
        bearer, own = (None, self._api_key) if self._auth == "x-api-key" else (self._api_key, None)
        headers = {
            **dict.fromkeys(ambient_headers("ANTHROPIC_CUSTOM_HEADERS", os.environ), drop),
            "content-type": "application/json",
            "anthropic-version": self._version,
            "authorization": f"Bearer {bearer}" if bearer else drop,
            "x-api-key": own or drop,
            **self._own_headers,
        }
        client = anthropic.AsyncAnthropic(
            api_key=self._api_key or "none", base_url=self.base_url, max_retries=0, http_client=http, open_telemetry=False
        )
        return anthropic, cast("SDKClient", client), headers


class AnthropicBackend(AnthropicProtocol):
    """Anthropic's own API.

    Args:
        api_key: defaults to ``ANTHROPIC_API_KEY``, where `base_url` is Anthropic's own.
        base_url: another address of the same API, without ``/v1``. The environment's key is not sent there.
        version: the API version asked for; at an older one (``2023-06-01``) sampling parameters are taken.
        auth: how the key is sent: as ``Authorization: Bearer``, or as ``X-Api-Key``.
        prices: USD per million tokens in place of the published: ``{input, cache_read, cache_write: {ttl: price}, output}``.
        context, max_output: tokens, instead of what is known of the model.
        headers: sent with every request (``anthropic-beta``, say).
        diagnostics: ask the vendor why a prompt missed its cache, within a session; ``session.cache_report()`` has its word.
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
        version: str = VERSION,
        auth: Literal["bearer", "x-api-key"] = "bearer",
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
            profile=anthropic_profile(model, version),
            api_key=required_key(api_key, variable=KEY, own_url=own, environ=os.environ),
            base_url=base_url or URL,
            price_provider="anthropic" if own else None,
            prices=prices,
            context=known_context(_CONTEXT, claude_name(model)) if context is None else context,
            max_output=max_output,
            headers=headers,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            diagnostics=diagnostics,
        )
        super().__init__(target, version=version, auth=auth)
