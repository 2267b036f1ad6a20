"""What the backends on a vendor's SDK share: everything but how the SDK's client is built."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeAlias

import anyio
import anyio.to_thread
import httpx2

from cachespec.backends._bounds import Bounds, bounds
from cachespec.backends._decode import EventDecoder, billing_facts
from cachespec.backends._decode_chat import ChatDecoder
from cachespec.backends._decode_messages import MessagesDecoder
from cachespec.backends._decode_responses import ResponsesDecoder
from cachespec.backends._fields import added
from cachespec.backends._http import HttpClient
from cachespec.backends._marks import check_marks
from cachespec.backends._profile import Api, Profile, cannot
from cachespec.backends._render import Rendered
from cachespec.backends._render_chat import render_chat
from cachespec.backends._render_messages import render_messages
from cachespec.backends._render_responses import render_responses
from cachespec.backends._transport import HostedAttempt, Patience, sdk_error
from cachespec.backends.base import Capabilities, Estimate, Warmed, Wire
from cachespec.cache_terms import at_prices
from cachespec.decision import Belief, Latency, Plan, Reason, TokenEstimate
from cachespec.errors import (
    ConfigError,
    InputError,
    MissingDependencyError,
    RequestRejectedError,
    RequestTimeoutError,
    ServerError,
    UnsupportedParameterError,
)
from cachespec.messages import ImagePart, Message, ToolResultPart
from cachespec.pricing import Rates, hosted_rates
from cachespec.prompt import Prompt
from cachespec.recall import trace
from cachespec.request import Request
from cachespec.usage_shapes import BILLING, usage_from

Headers: TypeAlias = Mapping[str, Any]
"""Header names in lower case; a value of the SDK's `Omit` takes a header out, wherever it came from."""

_RENDER = {"chat": render_chat, "responses": render_responses, "messages": render_messages}
_DECODER: Mapping[Api, type[EventDecoder]] = {"chat": ChatDecoder, "responses": ResponsesDecoder, "messages": MessagesDecoder}
_PATH: Mapping[Api, str] = {"chat": "/chat/completions", "responses": "/responses", "messages": "/v1/messages"}

# What an unseen prompt is taken to hold.
BYTES_PER_TOKEN, TOKENS_PER_IMAGE = 4, 1_000
# Assumed until something is measured: milliseconds to the first token, for each token of input, and for each of output.
FIRST_MS, INPUT_MS, OUTPUT_MS, ASSUMED_OUTPUT = 600.0, 0.03, 15.0, 400


_UNSEEN = Belief(state="unknown", evidence="nothing seen yet")


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
    diagnostics: bool = False

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
        for name, value in (self.headers or {}).items():
            check_header(name, value, key=f"headers.{name}")
        return self


class HostedBackend(ABC):
    """A `Backend` on an SDK's client. A subclass says how that client is built; the profile says what its server takes."""

    sdk: ClassVar[str]

    def __init__(self, target: Target) -> None:
        profile = replace(target.checked().profile, max_output=target.max_output)
        self.name, self.model, self.provider = target.name, target.model, profile.provider
        self.base_url = checked_url(target.base_url)
        if find_spec(self.sdk) is None:
            raise MissingDependencyError(f"backend {self.name!r} needs the package {self.sdk!r}", extra=self.sdk)
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
            diagnoses=profile.vendor if target.diagnostics and _tells(profile) else None,
            caching=None if profile.cache is None else at_prices(profile.cache, self._published(profile)),
            keeps=profile.keeps,
        )
        self._profile = profile
        self._api_key = target.api_key
        self._own_headers = {key.lower(): value for key, value in (target.headers or {}).items()}
        self._connect_timeout, self._read_timeout = target.connect_timeout, target.read_timeout
        self._url = self.base_url + _PATH[profile.api]
        self._client: SDKClient | None = None
        self._module: ModuleType | None = None
        self._headers: Headers = {}

    def _published(self, profile: Profile) -> Rates | None:
        """Prices for multiples: those that hold here, else the vendor's own, whose proportions a proxy's will have."""
        return self.rates or hosted_rates(profile.provider, self.model)

    # -- what a subclass gives

    @abstractmethod
    def _build(self, http: httpx2.AsyncClient) -> tuple[ModuleType, SDKClient, Headers]:
        """The SDK's module, its client, and the headers that every request sets (or takes out)."""

    # -- the contract

    async def start(self) -> None:
        """Load the SDK, which takes a second and would otherwise be the first request's."""
        if self._client is None:
            await anyio.to_thread.run_sync(self._connect)

    def check(self, request: Request) -> Sequence[Reason]:
        drop = request.cache != "auto"
        fields = added(request, self.name, self._profile, drop_cache=drop).fields
        if not drop:
            check_marks(request, self._profile, fields.get("cache_control"))
        return self._refused(request)

    def _refused(self, request: Request) -> list[Reason]:
        return cannot(request, self._profile)

    def estimate(self, prompt: Prompt) -> Estimate:
        request = prompt.request
        found = added(request, self.name, self._profile, drop_cache=request.cache != "auto")
        bound = bounds(prompt, self._profile, found)
        fields, tiers = found.fields, None
        if fields:
            tiers = {key: value for key in BILLING if isinstance(value := fields.get(key), str)}
        return estimate(prompt, bound, local=self.capabilities.local, billing=tiers or None)

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
        # Less than half of what is left: who cannot be reached was not asked, and others still have time.
        connect = min(self._connect_timeout, read if timeout is None else 0.45 * read)
        patience = read if timeout is None else Patience(read, anyio.current_time() + timeout)
        limits = httpx2.Timeout(connect=connect, read=patience, write=read, pool=connect)
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
        decoder.tools = [tool.name for tool in request.tools]
        decoder.request_id = response.headers.get("x-request-id") or response.headers.get("request-id")
        return HostedAttempt(response, decoder, backend=self.name, model=self.model, warnings=rendered.warnings)

    def cannot_warm(self, request: Request) -> str | None:
        """See `Warming.cannot_warm`: what the vendors' guides name (2026-11)."""
        cache = self.capabilities.caching
        if cache is None or cache.control == "routing" or self._profile.api == "chat":
            return "this API has no request that only reads a prompt"
        if self._profile.api != "messages":
            return None
        thinking = request.passthrough.get("anthropic", {}).get("thinking") or request.extra.get(self.name, {}).get("thinking")
        if (request.reasoning is not None and request.reasoning.effort != "none") or thinking:
            return "not with thinking"
        if request.response_format is not None and request.response_format.kind == "schema":
            return "not with an output format"
        if request.tool_choice is not None and request.tool_choice.mode in ("required", "tool"):
            return "not with a forced tool choice"
        return None

    async def warm(self, request: Request, plan: Plan, *, timeout: float) -> Warmed:
        """See `Warming.warm`. Raises what `open` raises, and ServerError for an answer that is none."""
        body = self.render(request, replace(plan, prewarm=True)).body
        module, client = self._connect()
        limits = httpx2.Timeout(timeout, connect=min(self._connect_timeout, timeout))
        try:
            with anyio.fail_after(timeout):
                response = await client.post(
                    _PATH[self._profile.api],
                    cast_to=httpx2.Response,
                    content=body.encode(),
                    options={"headers": self._headers, "timeout": limits, "max_retries": 0},
                    stream=False,
                    stream_cls=None,
                )
        except TimeoutError as error:
            text = f"nothing came within {timeout:.0f} s"
            raise RequestTimeoutError(text, backend=self.name, model=self.model) from error
        except (module.APIError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise sdk_error(error, module, backend=self.name, model=self.model, url=self.base_url) from error
        try:
            answer = response.json()
            counts = answer.get("usage")
            usage = None if counts is None else usage_from(self._profile.api, counts)
            in_usage = self._profile.api == "messages"
            facts = billing_facts(counts or {}) if in_usage else billing_facts(answer, items=answer.get("output"))
        except (ValueError, AttributeError, InputError) as error:
            text = f"an answer that is none: {error}"
            raise ServerError(text, backend=self.name, model=self.model, begun=True) from error
        request_id = response.headers.get("x-request-id") or response.headers.get("request-id")
        return Warmed(usage=usage, billing=facts, request_id=request_id)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with anyio.CancelScope(shield=True):
                await client.close()

    def _connect(self) -> tuple[ModuleType, SDKClient]:
        if self._client is None or self._module is None:
            self._module, self._client, self._headers = self._build(HttpClient())
        return self._module, self._client


def _tells(profile: Profile) -> bool:
    """Whether a server can be asked why a prompt missed: over Messages; over Responses where it takes cache options."""
    return profile.api == "messages" or (profile.api == "responses" and "prompt_cache_options" in profile.cache_fields)


def ambient_headers(variable: str, environ: Mapping[str, str]) -> list[str]:
    """Names of the headers that an SDK takes from an environment variable; they are none of ours, whoever set them."""
    lines = environ.get(variable, "").split("\n")
    return [line.partition(":")[0].strip().lower() for line in lines if ":" in line]


def check_header(name: object, value: object, *, key: str) -> None:
    """Raises ConfigError, without the value, where HTTP has no such header (RFC 9110, 5.5 and 5.6.2; ASCII only)."""
    if not isinstance(name, str) or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
        raise ConfigError(f"{name!r} is no name of a header", key=key)
    if not isinstance(value, str) or not re.fullmatch(r"([!-~]([ \t!-~]*[!-~])?)?", value):
        raise ConfigError("must be plain ASCII text, without line ends or blanks around it", key=key)


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
    if "?" in text or "#" in text:  # paths are added to its end
        raise ConfigError("must not hold a query or fragment", key="base_url", hint="use headers")
    base = text.rstrip("/")
    for path in _PATH.values():
        if base.endswith(path):
            hint = f"did you mean {base.removesuffix(path)!r}?"
            raise ConfigError(f"must be what stands before {path}, which is added to it", key="base_url", hint=hint)
    return base


def estimate(prompt: Prompt, bound: Bounds, *, local: bool, billing: Mapping[str, str] | None = None) -> Estimate:
    """What is likely: tokens by bytes until something is learned; times are assumed, and not known for one's own server."""
    request, images = prompt.request, prompt.images
    text = prompt.size - (trace(request.messages, _add_image_bytes, 0)[0] if images else 0)
    expected = -(-max(text, 0) // BYTES_PER_TOKEN) + 4 * (len(request.messages) + 1) + images * TOKENS_PER_IMAGE
    tokens = TokenEstimate(
        input=expected,
        cache_read=None,
        cache_write=None,
        uncached=expected,
        output_expected=None,
        output_max=None,
        worst_input=bound.input,
    )
    first = FIRST_MS + expected * INPUT_MS
    output = min(ASSUMED_OUTPUT, request.max_output_tokens or ASSUMED_OUTPUT)
    latency = Latency(ttft_ms=None, total_ms=None) if local else Latency(ttft_ms=first, total_ms=first + output * OUTPUT_MS)
    return Estimate(
        tokens=tokens,
        belief=_UNSEEN,
        latency=latency,
        output_max=bound.output,
        billing=billing,
        unbounded=bound.unknown,
    )


def _add_image_bytes(before: int, message: Message) -> tuple[int, tuple[()]]:
    parts = [*message.parts, *(inner for part in message.parts if isinstance(part, ToolResultPart) for inner in part.content)]
    return before + sum(len(part.data) for part in parts if isinstance(part, ImagePart) and part.data is not None), ()


def required_key(api_key: str | None, *, variable: str | None, own_url: bool, environ: Mapping[str, str]) -> str:
    """The key to send. The environment's goes to its own vendor alone, never to another base URL. Raises ConfigError."""
    if api_key is None and variable is not None and own_url:
        api_key = environ.get(variable)
    if not api_key:
        if own_url and variable:
            hint = f'api_key = {{ env = "{variable}" }}, or the environment variable {variable}'
            raise ConfigError(f"is missing: {variable} is not set", key="api_key", hint=hint)
        why = f"is missing: {variable} is not sent to another base URL" if variable else "is empty"
        raise ConfigError(why, key="api_key", hint='name the key for this address: api_key = { env = "..." }')
    if not re.fullmatch(r"[!-~]+", api_key):
        raise ConfigError("holds blanks or characters that no header can carry", key="api_key")
    return api_key
