"""What the backends on a vendor's SDK share: everything but how the SDK's client is built."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeAlias

import anyio
import anyio.to_thread
import httpx2

from cachespec.backends._decode import EventDecoder
from cachespec.backends._decode_chat import ChatDecoder
from cachespec.backends._decode_messages import MessagesDecoder
from cachespec.backends._decode_responses import ResponsesDecoder
from cachespec.backends._http import HttpClient
from cachespec.backends._profile import Api, Profile, cannot
from cachespec.backends._render import Rendered
from cachespec.backends._render_chat import render_chat
from cachespec.backends._render_messages import render_messages
from cachespec.backends._render_responses import render_responses
from cachespec.backends._transport import HostedAttempt, sdk_error
from cachespec.backends.base import Capabilities, Estimate, Wire
from cachespec.decision import Belief, Latency, Plan, Reason, TokenEstimate
from cachespec.errors import (
    ConfigError,
    MissingDependencyError,
    RequestRejectedError,
    UnsupportedParameterError,
)
from cachespec.messages import ImagePart, Message, ToolResultPart
from cachespec.prompt import Prompt
from cachespec.request import Request

Headers: TypeAlias = Mapping[str, Any]
"""Header names in lower case; a value of the SDK's `Omit` takes a header out, wherever it came from."""

_RENDER = {"chat": render_chat, "responses": render_responses, "messages": render_messages}
_DECODER: Mapping[Api, type[EventDecoder]] = {"chat": ChatDecoder, "responses": ResponsesDecoder, "messages": MessagesDecoder}
_PATH: Mapping[Api, str] = {"chat": "/chat/completions", "responses": "/responses", "messages": "/v1/messages"}

# What an unseen prompt is taken to hold, and may hold at most. A token is at least one byte of text; what a vendor adds
# around it is bounded by an allowance per message, tool and image (a picture at the finest detail is 10,000 patches).
BYTES_PER_TOKEN, TOKENS_PER_IMAGE = 4, 1_000
WORST_BASE, WORST_PER_MESSAGE, WORST_PER_TOOL, WORST_PER_IMAGE = 2_048, 32, 128, 16_384
# Assumed until something is measured: milliseconds to the first token, for each token of input, and for each of output.
FIRST_MS, INPUT_MS, OUTPUT_MS, ASSUMED_OUTPUT = 600.0, 0.03, 15.0, 400


class SDKClient(Protocol):
    """The part of the SDKs' async clients that is used. Both have it."""

    async def post(
        self, path: str, *, cast_to: type[httpx2.Response], content: bytes, options: Any, stream: bool, stream_cls: Any
    ) -> httpx2.Response: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which model, where, and on what terms; checked when a backend is made of it.

    `price_provider` is whose published prices hold, None where only `base_url` can tell; `local` says that the server runs
    on the caller's own machines. Times are seconds.
    """

    name: str
    model: str
    profile: Profile
    api_key: str | None
    base_url: str
    price_provider: str | None
    prices: Mapping[str, Any] | None
    context: int | None
    max_output: int | None
    headers: Mapping[str, str] | None
    connect_timeout: float
    read_timeout: float
    local: bool = False

    def checked(self) -> Target:
        """Itself. Raises ConfigError naming the field that is wrong."""
        for key, text in (("name", self.name), ("model", self.model)):
            if not isinstance(text, str) or not text:
                raise ConfigError("must be a text that is not empty", key=key)
        for key, number in (("connect_timeout", self.connect_timeout), ("read_timeout", self.read_timeout)):
            if not number > 0:
                raise ConfigError(f"must be more than 0 seconds, not {number}", key=key)
        for key, count in (("context", self.context), ("max_output", self.max_output)):
            if count is not None and count < 1:
                raise ConfigError(f"must be 1 or more tokens, not {count}", key=key)
        return self


class HostedBackend:
    """A `Backend` on an SDK's client. A subclass says how that client is built; the profile says what its server takes."""

    sdk: ClassVar[str]

    def __init__(self, target: Target) -> None:
        profile = target.checked().profile
        self.name, self.model, self.provider = target.name, target.model, profile.provider
        self.base_url = checked_url(target.base_url)
        if find_spec(self.sdk) is None:
            raise MissingDependencyError(f"backend {self.name!r} needs the package {self.sdk!r}", extra=self.sdk)
        from cachespec.pricing import hosted_rates

        self.rates = hosted_rates(target.price_provider, self.model, base_url=self.base_url, prices=target.prices)
        self.capabilities = Capabilities(
            parameters=profile.parameters,
            tools=profile.tools,
            images=profile.images,
            json_mode=profile.json_mode,
            json_schema=profile.json_schema,
            context=target.context,
            max_output=target.max_output,
            local=target.local,
            marks=profile.marks,
            opt_out=profile.opt_out,
        )
        self._profile = profile
        self._api_key = target.api_key
        self._own_headers = {key.lower(): value for key, value in (target.headers or {}).items()}
        self._connect_timeout, self._read_timeout = target.connect_timeout, target.read_timeout
        self._url = self.base_url + _PATH[profile.api]
        self._client: SDKClient | None = None
        self._module: ModuleType | None = None
        self._headers: Headers = {}

    # -- what a subclass gives

    def _build(self, http: httpx2.AsyncClient) -> tuple[ModuleType, SDKClient, Headers]:
        """The SDK's module, its client, and the headers that every request sets (or takes out)."""
        raise NotImplementedError  # pragma: no cover - abstract

    # -- the contract

    async def start(self) -> None:
        """Load the SDK, which takes a second and would otherwise be the first request's."""
        if self._client is None:
            await anyio.to_thread.run_sync(self._connect)

    def check(self, request: Request) -> Sequence[Reason]:
        return cannot(request, self._profile)

    def estimate(self, prompt: Prompt) -> Estimate:
        return estimate(prompt, local=self.capabilities.local)

    def wire(self, request: Request, plan: Plan) -> Wire:
        return Wire(url=self._url, body=self.render(request, plan).body)

    def render(self, request: Request, plan: Plan) -> Rendered:
        """The body, and what could not be said in it. Raises for what `check` refuses and the plan does not leave out."""
        refused = [r for r in self.check(request) if r.detail.partition(":")[0].partition(".")[0] not in plan.ignore]
        if refused:
            kind = UnsupportedParameterError if refused[0].code == "unsupported_parameter" else RequestRejectedError
            raise kind("; ".join(r.detail for r in refused), backend=self.name, model=self.model)
        return _RENDER[self._profile.api](self._profile, request, plan, model=self.model)

    async def open(self, request: Request, plan: Plan, *, timeout: float | None) -> HostedAttempt:
        rendered = self.render(request, plan)
        module, client = self._connect()
        read = self._read_timeout if timeout is None else max(0.001, min(timeout, self._read_timeout))
        connect = min(self._connect_timeout, read)
        limits = httpx2.Timeout(connect=connect, read=read, write=read, pool=connect)
        try:
            response = await client.post(
                _PATH[self._profile.api],
                cast_to=httpx2.Response,
                content=rendered.body.encode(),
                options={"headers": self._headers, "timeout": limits, "max_retries": 0},
                stream=True,
                stream_cls=None,
            )
        except (module.APIError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise sdk_error(error, module, backend=self.name, model=self.model, url=self.base_url) from error
        decoder = _DECODER[self._profile.api](backend=self.name, model=self.model, provider=self.provider)
        decoder.request_id = response.headers.get("x-request-id") or response.headers.get("request-id")
        return HostedAttempt(response, decoder, backend=self.name, model=self.model, warnings=rendered.warnings)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with anyio.CancelScope(shield=True):
                await client.close()

    def _connect(self) -> tuple[ModuleType, SDKClient]:
        if self._client is None or self._module is None:
            self._module, self._client, self._headers = self._build(HttpClient())
        return self._module, self._client


def ambient_headers(variable: str, environ: Mapping[str, str]) -> list[str]:
    """Names of the headers that an SDK takes from an environment variable; they are none of ours, whoever set them."""
    lines = environ.get(variable, "").split("\n")
    return [line.partition(":")[0].strip().lower() for line in lines if ":" in line]


def known_context(table: Sequence[tuple[str, int]], model: str) -> int | None:
    """The size of the first row whose pattern the model's name begins with."""
    return next((size for pattern, size in table if re.match(pattern, model)), None)


def checked_url(text: str) -> str:
    """A base URL without its last slash. Raises ConfigError where it is none, or holds a secret."""
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, TypeError) as error:
        raise ConfigError(f"is no URL: {error}", key="base_url") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"must begin with http:// or https:// and name a host, not {text!r}", key="base_url")
    if url.userinfo:
        raise ConfigError("must not hold a user or password", key="base_url", hint="use api_key, or headers")
    return text.rstrip("/")


def estimate(prompt: Prompt, *, local: bool) -> Estimate:
    """Tokens by bytes until something is learned; times are assumed, and not known for a server of one's own."""
    request, images = prompt.request, prompt.images
    text = prompt.size - (_image_bytes(request.messages) if images else 0)
    messages, tools = len(request.messages), len(request.tools)
    expected = -(-max(text, 0) // BYTES_PER_TOKEN) + 4 * (messages + 1) + images * TOKENS_PER_IMAGE
    worst = prompt.size + WORST_BASE + messages * WORST_PER_MESSAGE + tools * WORST_PER_TOOL + images * WORST_PER_IMAGE
    tokens = TokenEstimate(
        input=expected,
        cache_read=None,
        cache_write=None,
        uncached=expected,
        output_expected=None,
        output_max=None,
        worst_input=worst,
    )
    first = FIRST_MS + expected * INPUT_MS
    output = min(ASSUMED_OUTPUT, request.max_output_tokens or ASSUMED_OUTPUT)
    latency = Latency(ttft_ms=None, total_ms=None) if local else Latency(ttft_ms=first, total_ms=first + output * OUTPUT_MS)
    return Estimate(tokens=tokens, belief=Belief(state="unknown", evidence="nothing seen yet"), latency=latency)


def _image_bytes(messages: Sequence[Message]) -> int:
    parts = [part for message in messages for part in message.parts]
    parts += [inner for part in parts if isinstance(part, ToolResultPart) for inner in part.content]
    return sum(len(part.data) for part in parts if isinstance(part, ImagePart) and part.data is not None)


def required_key(api_key: str | None, *, variable: str | None, own_url: bool, environ: Mapping[str, str]) -> str:
    """The key to send. The environment's goes to its own vendor alone, never to another base URL. Raises ConfigError."""
    if api_key is None and variable is not None and own_url:
        api_key = environ.get(variable)
    if not api_key:
        name = variable or "NAME"
        message = f"is missing: {name} is not set" if own_url else f"is missing: {name} is not sent to another base URL"
        raise ConfigError(message, key="api_key", hint=f'api_key = {{ env = "{name}" }}, or the environment variable {name}')
    if not api_key.isascii() or any(c.isspace() for c in api_key):
        raise ConfigError("holds blanks or characters that no header can carry", key="api_key")
    return api_key
