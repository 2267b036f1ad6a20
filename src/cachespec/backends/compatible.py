"""Servers that speak OpenAI's or Anthropic's protocol, as rows of data: no server has a class of its own.

A row says where a server is, which protocols it speaks, and what it takes in each; facts as of 2026-11, from the servers' own
documentation, and for llama-server from running it. What a row does not name is refused with a reason, never
dropped: a parameter that turns out to work can be sent with `extra`. What a given body says to OpenAI or Anthropic alone is
left out with a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from cachespec.annotations import PriceTable
from cachespec.backends._profile import ANTHROPIC_ID, MISTRAL_ID, Api, Profile
from cachespec.cache_terms import prompt_cache
from cachespec.durations import Duration
from cachespec.errors import ConfigError

if TYPE_CHECKING:
    from cachespec.backends._hosted import HostedBackend

_BASE = ("temperature", "top_p", "stop", "response_format", "max_output_tokens")
_CHAT = frozenset({*_BASE, "seed", "tool_choice"})
_SAMPLING = frozenset({*_CHAT, "top_k", "min_p"})
_RESPONSES = frozenset({"temperature", "top_p", "tool_choice", "response_format", "max_output_tokens"})
_EFFORT = frozenset({"effort"})
# What of a given Chat body others take as well (their references, 2026-11): how to draw, and how likely what was drawn was.
_PENALTIES = frozenset({"frequency_penalty", "presence_penalty"})
_SCORES = frozenset({"logprobs", "top_logprobs"})
_DRAWING = _PENALTIES | _SCORES | {"logit_bias"}

# Anthropic's protocol as it is spoken elsewhere: sampling as of 2023-06-01, no schemas, no cache marks.
_MESSAGES = Profile(
    api="messages",
    parameters=frozenset({"temperature", "top_p", "top_k", "stop", "tool_choice", "max_output_tokens"}),
    json_mode=False,
    json_schema=False,
    late_system=False,
    tool_ids=ANTHROPIC_ID,
)
# vLLM and SGLang: every sampling parameter, an effort for the models that have one, reasoning text of one's own.
_ENGINE = Profile(
    api="chat",
    parameters=_SAMPLING | {"reasoning"},
    reasoning=_EFFORT,
    reasoning_field="reasoning_content",
    passes=_DRAWING,
)
_VLLM_RESPONSES = Profile(
    api="responses",
    parameters=_RESPONSES | {"reasoning"},
    reasoning=_EFFORT,
    passes=frozenset({"include", "max_tool_calls", "top_logprobs"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of server.

    Attributes:
        url: the base URL of its OpenAI protocols (and, for a local server, where it listens unless told otherwise).
        profiles: what it takes in each protocol it speaks; the first is the one used unless the caller names another.
        messages_url: the base URL of its Anthropic protocol, where that is not `url` without ``/v1``.
        key: the environment variable that holds its key; None where it asks for none.
        local: runs on the caller's own machines: its prices are the caller's, and no speed is assumed.
    """

    url: str
    profiles: tuple[Profile, ...]
    messages_url: str | None = None
    key: str | None = None
    local: bool = False

    def profile(self, api: Api | None = None) -> Profile | None:
        """What it takes in a protocol, by default the first; None where it does not speak that."""
        return next((p for p in self.profiles if api in (None, p.api)), None)


ROWS: Mapping[str, Row] = {
    # Local servers.
    "vllm": Row(
        profiles=(_ENGINE, _VLLM_RESPONSES, _MESSAGES),
        url="http://127.0.0.1:8000/v1",
        local=True,
    ),
    "sglang": Row(profiles=(_ENGINE,), url="http://127.0.0.1:30000/v1", local=True),
    "llama-server": Row(
        profiles=(
            Profile(api="chat", parameters=_SAMPLING, reasoning_field="reasoning_content", passes=_DRAWING),
            Profile(api="responses", parameters=(_RESPONSES - {"response_format"}) | {"top_k", "min_p", "seed"}),
            _MESSAGES,
        ),
        url="http://127.0.0.1:8080/v1",
        local=True,
    ),
    "ollama": Row(
        profiles=(
            Profile(api="chat", parameters=_CHAT - {"tool_choice"}, passes=_PENALTIES | _SCORES),
            replace(_MESSAGES, parameters=_MESSAGES.parameters - {"tool_choice"}),
        ),
        url="http://127.0.0.1:11434/v1",
        local=True,
    ),
    "lmstudio": Row(
        profiles=(
            Profile(
                api="chat",
                parameters=(_CHAT - {"tool_choice"}) | {"top_k"},
                json_mode=False,
                passes=_PENALTIES | {"logit_bias"},
            ),
        ),
        url="http://127.0.0.1:1234/v1",
        local=True,
    ),
    # Vendors.
    "deepseek": Row(
        profiles=(
            Profile(
                api="chat",
                provider="deepseek",
                parameters=_CHAT - {"seed"},
                json_schema=False,
                reasoning_field="reasoning_content",
                passes=_PENALTIES | _SCORES,
            ),
            replace(_MESSAGES, provider="deepseek", parameters=_MESSAGES.parameters - {"top_k"}),
        ),
        url="https://api.deepseek.com/v1",
        messages_url="https://api.deepseek.com/anthropic",
        key="DEEPSEEK_API_KEY",
    ),
    "openrouter": Row(
        profiles=(
            Profile(
                api="chat",
                provider="openrouter",
                parameters=_SAMPLING | {"reasoning"},
                reasoning=frozenset({"effort", "budget_tokens"}),
                effort="reasoning",
                marks="anthropic",  # turned into the vendor's own where it is not Anthropic
                cache_fields=frozenset({"cache_control"}),
                message_extra=("reasoning_details",),
                passes=_DRAWING | {"verbosity"},
                images=True,
            ),
        ),
        url="https://openrouter.ai/api/v1",
        key="OPENROUTER_API_KEY",
    ),
    "groq": Row(
        profiles=(
            Profile(api="chat", provider="groq", parameters=_CHAT | {"reasoning"}, reasoning=_EFFORT, passes=_PENALTIES),
        ),
        url="https://api.groq.com/openai/v1",
        key="GROQ_API_KEY",
    ),
    "mistral": Row(
        profiles=(
            Profile(
                api="chat",
                provider="mistral",
                parameters=_CHAT,
                names={"seed": "random_seed"},
                stream_usage=False,  # unknown fields are refused, `stream_options` among them; usage comes unasked
                tool_ids=MISTRAL_ID,
                passes=_PENALTIES | {"prediction"},
            ),
        ),
        url="https://api.mistral.ai/v1",
        key="MISTRAL_API_KEY",
    ),
    "together": Row(
        profiles=(Profile(api="chat", provider="together", parameters=_SAMPLING, passes=_PENALTIES | {"logit_bias"}),),
        url="https://api.together.xyz/v1",
        key="TOGETHER_API_KEY",
    ),
    "fireworks": Row(
        profiles=(Profile(api="chat", provider="fireworks", parameters=_SAMPLING, passes=_DRAWING),),
        url="https://api.fireworks.ai/inference/v1",
        key="FIREWORKS_API_KEY",
    ),
    "cerebras": Row(
        profiles=(Profile(api="chat", provider="cerebras", parameters=_CHAT, passes=_SCORES),),
        url="https://api.cerebras.ai/v1",
        key="CEREBRAS_API_KEY",
    ),
    "xai": Row(
        profiles=(Profile(api="chat", provider="x-ai", parameters=_CHAT | {"reasoning"}, reasoning=_EFFORT, passes=_SCORES),),
        url="https://api.x.ai/v1",
        key="XAI_API_KEY",
    ),
}


def compatible(
    *,
    name: str,
    server: str,
    model: str,
    base_url: str | None = None,
    api_key: str | None = None,
    api: Literal["chat", "responses", "messages"] | None = None,
    images: bool | None = None,
    prices: PriceTable = None,
    context: int | None = None,
    max_output: int | None = None,
    headers: Mapping[str, str] | None = None,
    connect_timeout: Duration = 10.0,
    read_timeout: Duration = 600.0,
) -> HostedBackend:
    """A backend for a server that speaks OpenAI's or Anthropic's protocol.

    Args:
        server: the name of a row: vllm, sglang, llama-server, ollama, lmstudio, deepseek, openrouter, groq, mistral, together,
            fireworks, cerebras, xai.
        base_url: where it is; defaults to the row's.
        api_key: defaults to the row's environment variable, where `base_url` is the row's own. A local server needs none.
        api: the protocol to speak, out of those of the row; defaults to the row's first.
        images: whether this model takes images; defaults to the row's answer, which is no where it depends on the model.
        prices: USD per million tokens: ``{input, cache_read, cache_write: {ttl: price}, output}``; without them a vendor's
            published prices hold, and a local server's are not known.
        context, max_output: tokens; not known unless given.
        headers: sent with every request.
        connect_timeout, read_timeout: seconds to a connection, and without a byte; never beyond a request's own deadline.

    Raises: ConfigError naming the key that is wrong or missing; MissingDependencyError without the protocol's SDK.
    """
    row = ROWS.get(server)
    if row is None:
        near = get_close_matches(server, ROWS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(ROWS)}"
        raise ConfigError(f"no server {server!r}", key="server", hint=hint)
    profile = row.profile(api)
    if profile is None:
        raise ConfigError(
            f"{server} does not speak {api!r}", key="api", hint=f"known: {', '.join(p.api for p in row.profiles)}"
        )
    if images is not None:
        profile = replace(profile, images=images, result_images=images and profile.api != "chat")
    if profile.provider is not None:
        profile = replace(profile, cache=prompt_cache(profile.provider, profile.api, model))
    default = (row.messages_url or row.url) if profile.api == "messages" else row.url
    own = base_url is None or base_url.rstrip("/") == default
    from cachespec.backends._hosted import Target

    target = Target(
        name=name,
        model=model,
        profile=profile,
        api_key=_key(row, api_key, own=own),
        base_url=base_url or default,
        price_provider=None if row.local or not own else profile.provider,
        prices=prices,
        context=context,
        max_output=max_output,
        headers=headers,
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        local=row.local,
    )
    if profile.api == "messages":
        from cachespec.backends.anthropic import AnthropicProtocol

        return AnthropicProtocol(target, version="2023-06-01", auth="x-api-key")
    from cachespec.backends.openai import OpenAIProtocol

    return OpenAIProtocol(target)


def _key(row: Row, api_key: str | None, *, own: bool) -> str | None:
    """The key to send, if any: a local server is asked without one unless the caller gives it."""
    from cachespec.backends._hosted import required_key

    if row.key is None and api_key is None:
        return None
    return required_key(api_key, variable=row.key, own_url=own, environ=os.environ)
