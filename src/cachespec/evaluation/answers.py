"""A local model's plain answers to a slice, made by the real engine: the texts that drafters are measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from cachespec.backends._local import LocalBackend
from cachespec.backends._startup import EngineSettings, Progress
from cachespec.decision import Plan
from cachespec.engine.chat import ChatTemplate
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.sampling import Sampling
from cachespec.errors import BackendError, InputError
from cachespec.evaluation.paper import Sample
from cachespec.evaluation.prompts import Line
from cachespec.events import Event, Finished, TextDelta
from cachespec.request import Request

_SHARED = b""
"""The namespace of requests without a tenant."""


class _Borrowed:
    """A runtime that its engine empties at the end, and does not close."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def close(self) -> None:
        for sequence in range(self._runtime.sequences):
            self._runtime.free(sequence)


class Plain(LocalBackend):
    """A backend over a runtime that is loaded already, with no drafter: its requests are read and answered as live ones are."""

    def __init__(self, runtime: Runtime, settings: EngineSettings, model: str) -> None:
        plain = replace(settings, draft=None, require_eval=None)
        super().__init__(plain, model=model, cost=None, reads_per_s=1.0, flops_per_s=1.0)
        self._runtime = runtime

    def load_runtime(self, progress: Progress) -> Runtime:
        """The runtime that is there."""
        return cast("Runtime", _Borrowed(self._runtime))

    def load_draft(self, model: str, runtime: str | None) -> Runtime:
        """Nothing is drafted here: its settings have no drafter. Raises InputError."""
        raise InputError("plain answers need no draft model", field="draft")


class Answers:
    """Answers lines with a started `Plain` backend.

    Args:
        most: tokens of an answer, for requests that allow more or do not say.
        temperature: of requests that name none; None: as the backend does (1), but 0 for a benchmark's lines with `turns`.
    """

    def __init__(self, backend: Plain, runtime: Runtime, *, most: int, temperature: float | None) -> None:
        self._backend, self._runtime, self._most, self._temperature = backend, runtime, most, temperature
        self._template = ChatTemplate(runtime.info)
        self.skipped: list[str] = []
        """Why requests were left out."""

    async def line(self, line: Line, told: Callable[[], None]) -> list[tuple[Request, Sample]]:
        """All turns of a line. One that the model cannot take ends the line. `told` is called after each."""
        found: list[tuple[Request, Sample]] = []
        request = self._prepared(line)
        for turn, recorded in enumerate(line.answers):
            try:
                sample, text = await self._answer(line, request, recorded)
            except (BackendError, InputError) as error:
                self.skipped.append(f"line {line.number}: {error}")
                for _ in line.answers[turn:]:
                    told()
                break
            found.append((request, sample))
            told()
            if turn < len(line.turns):
                request = line.next(request, text, turn + 1)
        return found

    def _prepared(self, line: Line) -> Request:
        request, temperature = line.request, line.request.temperature
        if temperature is None:
            temperature = (0.0 if line.bench else 1.0) if self._temperature is None else self._temperature
        most = self._most if request.max_output_tokens is None else min(self._most, request.max_output_tokens)
        seed = line.number if request.seed is None else request.seed
        return replace(request, temperature=temperature, max_output_tokens=most, seed=seed, timeout=None)

    async def _answer(self, line: Line, request: Request, recorded: str | None) -> tuple[Sample, str]:
        if recorded is None:
            attempt = await self._backend.open(request, Plan(backend=self._backend.name), timeout=None)
            events: list[Event] = []
            try:
                while batch := await attempt.read():
                    events += batch
            finally:
                await attempt.aclose()
            prompt, answer = attempt.prompt, attempt.answer
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
            ended = any(isinstance(event, Finished) and event.reason != "length" for event in events)
        else:
            prompt, text, ended = self._prompt(request), recorded, True
            room = max(0, self._runtime.info.context - len(prompt) - 1)
            answer = tuple(self._runtime.tokenize(recorded, special=False))[:room]
        if len(prompt) >= self._runtime.info.context:
            raise InputError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self._runtime.info.context}")
        tenant = request.tenant
        namespace = None if request.cache == "off" else _SHARED if tenant is None else tenant.encode()
        return Sample(
            category=line.category,
            prompt=prompt,
            answer=answer,
            sampling=_sampling(request),
            output=max(request.max_output_tokens or 1, len(answer)),
            ended=ended,
            namespace=namespace,
        ), text

    def _prompt(self, request: Request) -> tuple[int, ...]:
        for reason in self._backend.check(request):
            raise InputError(reason.detail)
        tools = () if request.tool_choice is not None and request.tool_choice.mode == "none" else request.tools
        return self._template.prompt(self._runtime, request.system, request.messages, tools).tokens


def _sampling(request: Request) -> Sampling:
    temperature = 1.0 if request.temperature is None else request.temperature
    return Sampling(
        seed=request.seed or 0, temperature=temperature, top_k=request.top_k, top_p=request.top_p, min_p=request.min_p
    )
