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
from typing import Any, ClassVar, TypeVar

import anyio
import anyio.to_thread

from cachespec.backends._engine_attempt import EngineAttempt
from cachespec.backends._forcing import Forcing
from cachespec.backends._local_fields import Tokens, has_image, refused_forms, refused_parameters, sampling_of, wanted
from cachespec.backends._local_report import belief_of, latency_of, report, speculation, unknown
from cachespec.backends._marks import unheard_marks
from cachespec.backends._startup import EngineSettings, Progress, Started, start_engine
from cachespec.backends.base import Capabilities, Estimate, Wire
from cachespec.decision import Plan, Reason, TokenEstimate
from cachespec.engine import chat
from cachespec.engine.models import check_model
from cachespec.engine.pages import PAGE
from cachespec.engine.runtimes.base import Interrupted, Runtime
from cachespec.engine.sequence import Job
from cachespec.engine.sequence import Sequence as Running
from cachespec.engine.toolcalls import PlainText
from cachespec.errors import (
    ConfigError,
    ContextLengthError,
    EngineStoppedError,
    InputError,
    RequestRejectedError,
    UnsupportedParameterError,
)
from cachespec.pricing import Rates, local_rates
from cachespec.prompt import Prompt, build_prompt
from cachespec.quotes import EXPECTED_OUTPUT
from cachespec.request import Request

T = TypeVar("T")
_PARAMETERS = frozenset({"max_output_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed"})
_REMEMBERED = 8  # prompts whose tokens are kept, from being quoted to being opened


@dataclass(frozen=True, slots=True)
class _Loaded:
    runtime: Runtime
    template: chat.ChatTemplate
    started: Started
    forcing: Forcing | None
    tokens: Tokens
    facts: Mapping[str, Any]


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
            parameters=_PARAMETERS,
            tools=False,
            json_mode=True,
            json_schema=True,
            context=settings.context,
            local=True,
            isolates=True,
        )
        self._context = settings.context
        self._reads_per_s, self._flops_per_s = reads_per_s, flops_per_s
        self._loaded: _Loaded | None = None
        self._closed = False
        self._lock = threading.Lock()  # of what was loaded, closed and rendered
        self._starting = threading.Lock()  # one loads at a time; who comes second finds what is there
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

        A second call does nothing, and waits for the first; a failed one changes nothing. Cancelling stops loading, and so
        does `aclose`. Raises ConfigError (model not found, not loadable, context too long), NotFoundError (not on the hub),
        MissingDependencyError; EngineStoppedError when it was closed.
        """
        if self._closed:
            raise self._stopped()
        if self._loaded is not None:
            return
        cancelled = threading.Event()

        def going() -> bool:
            return not (cancelled.is_set() or self._closed)

        def report(part: float) -> bool:
            if progress is not None:
                progress(part)
            return going()

        def load() -> None:
            with self._starting:
                if self._loaded is not None or not going():
                    return
                try:
                    loaded = self._load(report)
                except Interrupted:
                    return
                with self._lock:
                    if going():
                        self._loaded, self.capabilities = loaded, self._capabilities(loaded)
                        return
                loaded.started.engine.close()  # nobody is left to use it

        try:
            await anyio.to_thread.run_sync(load, abandon_on_cancel=True)
        except BaseException:
            with self._lock:
                cancelled.set()
            raise
        if self._closed:
            raise self._stopped()

    def _capabilities(self, loaded: _Loaded) -> Capabilities:
        tools, grammars = loaded.template.tools is not None, loaded.forcing is not None
        more = {"tool_choice": tools, "response_format": grammars}
        parameters = _PARAMETERS | {name for name, there in more.items() if there}
        return replace(self.capabilities, tools=tools, parameters=parameters, json_mode=grammars, json_schema=grammars)

    def _load(self, progress: Progress) -> _Loaded:
        runtime = self.load_runtime(progress)
        try:
            if not progress(1.0):
                raise Interrupted
            template, facts = chat.ChatTemplate(runtime.info), runtime.facts()
            started = start_engine(runtime, self.settings, self.load_draft, fits=self.draft_fits)
        except BaseException:
            runtime.close()
            raise
        vocabulary = started.vocabulary
        forcing = None if vocabulary is None else Forcing(vocabulary, template.tools, runtime.info.controls)
        return _Loaded(runtime, template, started, forcing, Tokens(runtime), facts)

    def check(self, request: Request) -> Sequence[Reason]:
        """See `Backend.check`. A model that is not loaded yet is asked nothing about its template, nor about tokens.

        An engine that ended can do nothing any more: ``unhealthy``.
        """
        try:
            return self._alive(lambda loaded: self._check(loaded, request))
        except EngineStoppedError as error:
            wanted(request, self.name, None)
            return [Reason("unhealthy", error.message)]

    def _check(self, loaded: _Loaded | None, request: Request) -> Sequence[Reason]:
        wanted(request, self.name, None if loaded is None else loaded.tokens)
        refused = refused_parameters(request)
        if any(has_image(part) for message in request.messages for part in message.parts):
            refused.append(f"images: {self.model} takes none")
        if loaded is not None:
            refused += refused_forms(request, loaded.forcing)
        reasons = [Reason("unsupported_parameter", text) for text in refused]
        if request.tools and loaded is not None and loaded.template.tools is None:
            reasons.append(
                Reason("capability", f"the chat template of {self.model} has no tool calls that are understood here")
            )
        if not reasons and loaded is not None:
            try:
                self._render(loaded, request)
            except InputError as error:
                reasons.append(Reason("capability", str(error)))
        return reasons

    def estimate(self, prompt: Prompt) -> Estimate:
        """See `Backend.estimate`. The token count is exact while the model is loaded; else nothing is known."""
        try:
            return self._alive(lambda loaded: self._estimate(loaded, prompt))
        except EngineStoppedError as error:
            return unknown(error.message)

    def _estimate(self, loaded: _Loaded | None, prompt: Prompt) -> Estimate:
        if loaded is None:
            return unknown("not loaded")
        request = prompt.request
        tokens = self._render(loaded, request, prompt.digest).tokens
        started, runtime = loaded.started, loaded.runtime
        belief = belief_of(runtime, started, request, tokens)
        read = belief.tokens or 0
        rest = len(tokens) - read
        keep = max(0, len(tokens) // PAGE * PAGE - read) if request.cache == "auto" else 0
        room = max(0, self._context - len(tokens))
        output_max = room if request.max_output_tokens is None else min(room, request.max_output_tokens)
        typical = started.engine.answer_length.value
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
        latency, busy = latency_of(runtime, started, rest, expected, assumed=(self._flops_per_s, self._reads_per_s))
        return Estimate(
            tokens=counts,
            belief=belief,
            latency=latency,
            busy_s=busy,
            speculation=speculation(started, expected, rest),
        )

    def report(self) -> dict[str, Any]:
        """Figures since the start, as JSON: what is reused, how fast it runs, what drafts are worth and why they are made.

        Keys: `runtime` (its settings), `requests` (active, preempted), `speeds` (tokens a second of prefill and decoding,
        tokens an answer; None before any), `prefix` (`engine.prefix.PrefixStats`), `speculation`: None without a drafter;
        else with its `goodput` in tokens a second, how often each reason was given, by drafter what was drafted and
        accepted, its acceptance, and for each position of a draft how often it was tried and right, and `withheld`, what is
        missing of the evidence that `require_eval` asks for; `reason` alone where the model cannot speculate; `stopped`: why
        the engine takes no requests any more, None while it does. From any thread.

        Raises: EngineStoppedError before the start and after `aclose`.
        """
        loaded = self._loaded
        if loaded is None or self._closed:
            raise self._stopped()
        return {**report(loaded.facts, loaded.started), "stopped": self._stopped().message if self._failure else None}

    def wire(self, request: Request, plan: Plan) -> Wire | None:
        """Nothing is sent anywhere."""
        return None

    async def open(self, request: Request, plan: Plan, *, timeout: float | None) -> EngineAttempt:
        """Queue the request. `max_output_tokens` beyond the context's end is cut there (then it ends with ``length``).

        Raises: InputError, ContextLengthError, UnsupportedParameterError, RequestRejectedError before any work;
            EngineStoppedError.
        """
        running, deadline = self._alive(lambda loaded: self._submit(loaded, request)), None
        if timeout is not None:
            deadline = anyio.current_time() + timeout
        return EngineAttempt(running, backend=self.name, model=self.model, deadline=deadline)

    def _submit(self, loaded: _Loaded | None, request: Request) -> Running:
        if loaded is None:
            raise self._stopped()
        for reason in self._check(loaded, request):
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
            sampling=sampling_of(request, seed=secrets.randbits(64) if request.seed is None else request.seed),
            output=room if request.max_output_tokens is None else min(room, request.max_output_tokens),
            stop=request.stop,
            cache=request.cache,
            namespace=request.tenant,
            session=request.session_id,
            keep_s=self.settings.keep_warm,
            grammar=None if loaded.forcing is None else loaded.forcing.grammar(request),
            processing=more.processing,
            logprobs=more.logprobs,
            warnings=(*prompt.warnings, *more.warnings, *unheard_marks(request)),
            **_tools(loaded, request),
        )
        return loaded.started.engine.submit(job)

    async def aclose(self) -> None:
        """Stop the engine (its requests fail with EngineStoppedError) and free the model. Idempotent.

        A start that is under way stops as soon as it can, and frees what it loaded.
        """
        with self._lock:
            self._closed = True
            loaded = self._loaded
        if loaded is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(loaded.started.engine.close)

    def _alive(self, work: Callable[[_Loaded | None], T]) -> T:
        """Do something with what is loaded (None: nothing yet). Raises EngineStoppedError where the engine ended."""
        if not self._ended:
            try:
                return work(self._loaded)
            except RuntimeError:  # what a runtime says that was closed meanwhile
                if not self._ended:
                    raise
        raise self._stopped()

    @property
    def _ended(self) -> bool:
        return self._closed or self._failure is not None

    @property
    def _failure(self) -> BaseException | None:
        return None if self._loaded is None else self._loaded.started.engine.failure

    def _stopped(self) -> EngineStoppedError:
        why = "was closed" if self._closed else "is not started"
        failure = None if self._closed else self._failure
        if failure is not None:
            why = f"crashed: {failure!r}"
        error = EngineStoppedError(f"the engine {why}", backend=self.name, model=self.model)
        error.__cause__ = failure
        return error

    def _render(self, loaded: _Loaded, request: Request, digest: bytes | None = None) -> chat.Prompt:
        """Tokens of a request, remembered for the few requests that were last asked about. Raises InputError."""
        with self._lock:
            for known in self._recent:
                if known.request is request:
                    return known.prompt
        digest = build_prompt(request).digest if digest is None else digest
        key = (digest, request.tool_choice, *(m.name for m in request.messages))
        with self._lock:
            found = next((known.prompt for known in self._recent if known.key == key), None)
        if found is None:
            tools = () if request.tool_choice is not None and request.tool_choice.mode == "none" else request.tools
            found = loaded.template.prompt(loaded.runtime, request.system, request.messages, tools)
        with self._lock:
            self._recent.append(_Rendered(request, key, found))
        return found


def _tools(loaded: _Loaded, request: Request) -> dict[str, Any]:
    """The parser of a request with tools, and the control tokens that it must see."""
    form = loaded.template.tools
    if form is None or not request.tools or (request.tool_choice is not None and request.tool_choice.mode == "none"):
        return {"parser": PlainText()}
    controls = loaded.runtime.info.controls
    pieces = {controls[marker]: marker.encode() for marker in form.markers if marker in controls}
    return {"parser": form.parser(request.tools), "pieces": pieces}
