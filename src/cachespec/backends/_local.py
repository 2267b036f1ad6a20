"""What every in-process backend does: requests into jobs, what the engine generates into events, its KV into a belief.

All computing happens on the engine's own thread. A backend adds the runtime it loads (`LocalBackend.load_runtime`).
"""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import anyio
import anyio.to_thread

from cachespec.backends._engine_attempt import EngineAttempt
from cachespec.backends._forcing import Forcing
from cachespec.backends._local_fields import Tokens, wanted
from cachespec.backends._local_report import report, speculation
from cachespec.backends._startup import EngineSettings, Progress, Started, start_engine
from cachespec.backends.base import Capabilities, Estimate, Wire
from cachespec.decision import Belief, Latency, Plan, Reason, TokenEstimate
from cachespec.engine import chat
from cachespec.engine.models import check_model
from cachespec.engine.pages import PAGE
from cachespec.engine.runtimes.base import Interrupted, Runtime
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job
from cachespec.engine.toolcalls import PlainText
from cachespec.errors import (
    ConfigError,
    ContextLengthError,
    EngineStoppedError,
    InputError,
    RequestRejectedError,
    UnsupportedParameterError,
)
from cachespec.messages import ImagePart, Part, ToolResultPart
from cachespec.pricing import Rates, local_rates
from cachespec.prompt import Prompt, build_prompt
from cachespec.quotes import EXPECTED_OUTPUT
from cachespec.request import Request

_PARAMETERS = frozenset({"max_output_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed"})
_REMEMBERED = 8  # prompts whose tokens are kept, from being quoted to being opened
_WARM = 0.8  # share of a prompt in the KV from which it is called warm
_NO_LATENCY = Latency(ttft_ms=None, total_ms=None)


@dataclass(frozen=True, slots=True)
class _Loaded:
    runtime: Runtime
    template: chat.ChatTemplate
    started: Started
    forcing: Forcing | None
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class _Rendered:
    request: Request
    key: tuple[object, ...]
    prompt: chat.Prompt


class LocalBackend(ABC):
    """Base of the backends that run a model in this process. The contract is `backends.base.Backend`.

    `reads_per_s` and `flops_per_s` are what the hardware is assumed to do (bytes of weights, floating-point operations)
    until speeds were measured. Raises ConfigError for a cost that is none.
    """

    provider: str | None = None
    folders: ClassVar[bool] = False
    """Whether `model` may be a folder, too."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        model: str,
        cost: Mapping[str, Any] | str | None,
        reads_per_s: float,
        flops_per_s: float,
    ) -> None:
        settings.policy()  # what is wrong with it is found now
        self.name, self.model, self.settings = settings.name, model, settings
        self.rates: Rates | None = local_rates(cost)
        self.capabilities = Capabilities(
            parameters=_PARAMETERS, tools=False, json_mode=True, json_schema=True, context=settings.context, local=True
        )
        self._context = settings.context
        self._reads_per_s, self._flops_per_s = reads_per_s, flops_per_s
        self._loaded: _Loaded | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._recent: deque[_Rendered] = deque(maxlen=_REMEMBERED)

    @abstractmethod
    def load_runtime(self, progress: Progress) -> Runtime:
        """Load the model, in a worker thread. `progress` takes the loaded part, 0 to 1; on False stop with `Interrupted`.

        Raises ConfigError, NotFoundError, MissingDependencyError.
        """

    @abstractmethod
    def load_draft(self, model: str, runtime: str | None) -> Runtime:
        """Load a draft model, in a worker thread, on the runtime of this name (None: this backend's own). Raises likewise."""

    def draft_fits(self, model: str, runtime: str | None) -> bool | None:
        """Whether it will have room beside what is loaded; None where nobody can tell."""
        return None

    def locate(self) -> None:
        """See `backends.base.Located`. Its own model, and that of a drafter."""
        check_model(self.model, folder=self.folders)
        drafting = (self.settings.draft or {}).get("model")
        if isinstance(drafting, str):
            try:
                check_model(drafting, folder=True)
            except ConfigError as error:
                raise ConfigError(error.message, key="draft.model", hint=error.hint) from error

    async def start(self, progress: Callable[[float], None] | None = None) -> None:
        """Load the model in a worker thread. `progress` is called from there with the loaded part, 0 to 1.

        A second call does nothing; a failed one changes nothing. Cancelling stops loading. Raises ConfigError (model not
        found, not loadable, context too long), NotFoundError (not on the hub), MissingDependencyError.
        """
        if self._closed:
            raise self._stopped()
        if self._loaded is not None:
            return
        cancelled = threading.Event()

        def report(part: float) -> bool:
            if progress is not None:
                progress(part)
            return not cancelled.is_set()

        def load() -> _Loaded | None:
            try:
                loaded = self._load(report)
            except Interrupted:
                return None
            if cancelled.is_set():  # nobody is left to use it
                loaded.started.engine.close()
            return loaded

        try:
            self._loaded = await anyio.to_thread.run_sync(load, abandon_on_cancel=True)
        except BaseException:
            cancelled.set()
            raise
        loaded = self._loaded
        tools = loaded is not None and loaded.template.tools is not None
        grammars = loaded is not None and loaded.forcing is not None
        parameters = (
            _PARAMETERS | ({"tool_choice"} if tools else frozenset()) | ({"response_format"} if grammars else frozenset())
        )
        self.capabilities = replace(
            self.capabilities, tools=tools, parameters=parameters, json_mode=grammars, json_schema=grammars
        )

    def _load(self, progress: Progress) -> _Loaded:
        runtime = self.load_runtime(progress)
        try:
            template = chat.ChatTemplate(runtime.info)
            started = start_engine(runtime, self.settings, self.load_draft, fits=self.draft_fits)
        except BaseException:
            runtime.close()
            raise
        vocabulary = started.vocabulary
        forcing = None if vocabulary is None else Forcing(vocabulary, template.tools, runtime.info.controls)
        return _Loaded(runtime, template, started, forcing, Tokens(runtime))

    def check(self, request: Request) -> Sequence[Reason]:
        """See `Backend.check`. A model that is not loaded yet is asked nothing about its template, nor about tokens."""
        wanted(request, self.name, None if self._loaded is None else self._loaded.tokens)
        reasons = [Reason("unsupported_parameter", text) for text in self._refused_parameters(request)]
        if any(_has_image(part) for message in request.messages for part in message.parts):
            reasons.append(Reason("unsupported_parameter", f"images: {self.model} takes none"))
        if request.tools and self._loaded is not None and self._loaded.template.tools is None:
            reasons.append(
                Reason("capability", f"the chat template of {self.model} has no tool calls that are understood here")
            )
        if not reasons and self._loaded is not None:
            try:
                self._render(self._loaded, request)
            except InputError as error:
                reasons.append(Reason("capability", str(error)))
        return reasons

    def _refused_parameters(self, request: Request) -> list[str]:
        refused = []
        if request.reasoning is not None and request.reasoning.effort != "none":
            refused.append("reasoning: local models have no setting for it")
        choice = request.tool_choice
        if choice is not None and choice.parallel is False and request.tools:
            refused.append("tool_choice: this engine cannot forbid parallel calls")
        try:
            _sampling(request, seed=0)
        except InputError as error:
            refused.append(str(error))
        loaded = self._loaded
        if loaded is not None:
            try:
                if loaded.forcing is not None:
                    loaded.forcing.grammar(request)
                elif Forcing.wanted(request):
                    refused.append(f"{Forcing.wanted(request)}: forcing the form of an answer needs llguidance")
            except InputError as error:
                refused.append(str(error))
        return refused

    def estimate(self, prompt: Prompt) -> Estimate:
        """See `Backend.estimate`. The token count is exact once the model is loaded; before, nothing is known."""
        loaded = self._loaded
        if loaded is None:
            unknown = TokenEstimate(
                input=None, cache_read=None, cache_write=None, uncached=None, output_expected=None, output_max=None
            )
            return Estimate(tokens=unknown, belief=Belief(state="unknown", evidence="not loaded"), latency=_NO_LATENCY)
        request = prompt.request
        tokens = self._render(loaded, request, prompt.digest).tokens
        belief = self._belief(loaded, request, tokens)
        read = belief.tokens or 0
        rest = len(tokens) - read
        keep = max(0, len(tokens) // PAGE * PAGE - read) if request.cache == "auto" else 0
        room = max(0, self._context - len(tokens))
        output_max = room if request.max_output_tokens is None else min(room, request.max_output_tokens)
        typical = loaded.started.engine.answer_length.value
        expected = min(output_max, EXPECTED_OUTPUT if typical is None else round(typical))
        counts = TokenEstimate(
            input=len(tokens),
            cache_read=read,
            cache_write=keep,
            uncached=rest - keep,
            output_expected=expected,
            output_max=output_max,
            worst_input=len(tokens),
        )
        latency, busy = self._latency(loaded, rest, expected)
        return Estimate(
            tokens=counts,
            belief=belief,
            latency=latency,
            busy_s=busy,
            speculation=speculation(loaded.started, expected),
        )

    def _belief(self, loaded: _Loaded, request: Request, tokens: tuple[int, ...]) -> Belief:
        if request.cache == "off":
            return Belief(state="cold", tokens=0, evidence="cache = off")
        here, stored, near = loaded.started.engine.peek(tokens, request.tenant)
        reach = max(here, stored)
        evidence = f"KV of {here} tokens is there"
        if stored > here:
            evidence = f"KV of {stored} tokens is in host memory, of {here} in place"
        if near is not None:
            held, asked = (loaded.runtime.piece(t).decode("utf-8", "replace") for t in (near.kept, near.given))
            evidence += f"; at token {near.position} it holds {held!r} where the prompt has {asked!r}"
        state = "cold" if reach == 0 else "warm" if reach >= _WARM * len(tokens) else "partial"
        return Belief(state=state, tokens=reach, evidence=evidence)  # type: ignore[arg-type]

    def _latency(self, loaded: _Loaded, prefill: int, output: int) -> tuple[Latency, float]:
        """How long it takes, and how much of that the engine works on it; the rest is waiting for others."""
        engine, info = loaded.started.engine, loaded.runtime.info
        measured = engine.prefill_speed.value, engine.decode_speed.value
        prefill_speed = measured[0] or self._flops_per_s / (2 * max(1, info.parameters))
        decode_speed = measured[1] or self._reads_per_s / max(1, info.size)
        ahead_tokens, ahead = engine.backlog
        wait = ahead_tokens / prefill_speed + ahead * (engine.answer_length.value or EXPECTED_OUTPUT) / decode_speed
        first = wait + prefill / prefill_speed + 1 / decode_speed
        total = first + max(0, output - 1) / decode_speed
        evidence: Literal["measured", "assumed"] = "assumed" if None in measured else "measured"
        return Latency(ttft_ms=first * 1000, total_ms=total * 1000, evidence=evidence), total - wait

    def report(self) -> dict[str, Any]:
        """Figures since the start, as JSON: what is reused, how fast it runs, what drafts are worth and why they are made.

        Keys: `runtime` (its settings), `requests` (active, preempted), `speeds` (tokens a second of prefill and decoding,
        tokens an answer; None before any), `prefix` (`engine.prefix.PrefixStats`), `speculation`: None without a drafter;
        else with its `goodput` in tokens a second, how often each reason was given, and by drafter what was drafted and
        accepted, its acceptance, and for each position of a draft how often it was tried and right; `reason` alone where
        the model cannot speculate. From any thread.

        Raises: EngineStoppedError before the start and after the end.
        """
        loaded = self._loaded
        if loaded is None or self._closed:
            raise self._stopped()
        return report(loaded.runtime, loaded.started)

    def wire(self, request: Request, plan: Plan) -> Wire | None:
        """Nothing is sent anywhere."""
        return None

    async def open(self, request: Request, plan: Plan, *, timeout: float | None) -> EngineAttempt:
        """Queue the request. `max_output_tokens` beyond the context's end is cut there (then it ends with ``length``).

        Raises: InputError, ContextLengthError, UnsupportedParameterError, RequestRejectedError before any work;
            EngineStoppedError.
        """
        loaded = self._loaded
        if loaded is None or self._closed:
            raise self._stopped()
        for reason in self.check(request):
            kind = UnsupportedParameterError if reason.code == "unsupported_parameter" else RequestRejectedError
            raise kind(reason.detail, backend=self.name, model=self.model)
        prompt = self._render(loaded, request)
        room = self._context - len(prompt.tokens)
        if room < 1:
            detail = f"a prompt of {len(prompt.tokens)} tokens leaves no room in a context of {self._context}"
            raise ContextLengthError(detail, backend=self.name, model=self.model)
        more = wanted(request, self.name, loaded.tokens)
        job = Job(
            prompt=prompt.tokens,
            sampling=_sampling(request, seed=secrets.randbits(64) if request.seed is None else request.seed),
            output=room if request.max_output_tokens is None else min(room, request.max_output_tokens),
            stop=request.stop,
            cache=request.cache,
            namespace=request.tenant,
            session=request.session_id,
            keep_s=self.settings.keep_warm,
            grammar=None if loaded.forcing is None else loaded.forcing.grammar(request),
            processing=more.processing,
            logprobs=more.logprobs,
            warnings=(*prompt.warnings, *more.warnings),
            **_tools(loaded, request),
        )
        deadline = None if timeout is None else anyio.current_time() + timeout
        return EngineAttempt(loaded.started.engine.submit(job), backend=self.name, model=self.model, deadline=deadline)

    async def aclose(self) -> None:
        """Stop the engine (its requests fail with EngineStoppedError) and free the model. Idempotent."""
        self._closed = True
        loaded = self._loaded
        if loaded is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(loaded.started.engine.close)

    def _stopped(self) -> EngineStoppedError:
        why = "was closed" if self._closed else "is not started"
        return EngineStoppedError(f"the engine {why}", backend=self.name, model=self.model)

    def _render(self, loaded: _Loaded, request: Request, digest: bytes | None = None) -> chat.Prompt:
        """Tokens of a request, remembered for the few requests that were last asked about. Raises InputError."""
        with self._lock:
            for known in self._recent:
                if known.request is request:
                    return known.prompt
        key = (build_prompt(request).digest if digest is None else digest, *(m.name for m in request.messages))
        with self._lock:
            found = next((known.prompt for known in self._recent if known.key == key), None)
        if found is None:
            tools = () if request.tool_choice is not None and request.tool_choice.mode == "none" else request.tools
            found = loaded.template.prompt(loaded.runtime, request.system, request.messages, tools)
        with self._lock:
            self._recent.append(_Rendered(request, key, found))
        return found


def _sampling(request: Request, *, seed: int) -> Sampling:
    """The request's own parameters; what it does not say leaves the model's law as it is (temperature 1)."""
    return Sampling(
        seed=seed,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
    )


def _tools(loaded: _Loaded, request: Request) -> dict[str, Any]:
    """The parser of a request with tools, and the control tokens that it must see."""
    form = loaded.template.tools
    if form is None or not request.tools or (request.tool_choice is not None and request.tool_choice.mode == "none"):
        return {"parser": PlainText()}
    controls = loaded.runtime.info.controls
    pieces = {controls[marker]: marker.encode() for marker in form.markers if marker in controls}
    return {"parser": form.parser(frozenset(tool.name for tool in request.tools)), "pieces": pieces}


def _has_image(part: Part) -> bool:
    inner = part.content if isinstance(part, ToolResultPart) else (part,)
    return any(isinstance(p, ImagePart) for p in inner)
