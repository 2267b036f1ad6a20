"""A local backend: plain answers by its real engine, and every drafter over them, in shadow and as its policy would draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from cachespec.backends._local import LocalBackend
from cachespec.backends._startup import has_room, make_drafter, measured_costs
from cachespec.backends.base import Backend
from cachespec.config import Config
from cachespec.engine.contained import ContainedDrafter, Fault
from cachespec.engine.costs import CalibrationStore
from cachespec.engine.drafters.base import Drafter
from cachespec.engine.evidence import Evidence, save_evidence
from cachespec.engine.invariance import kept_width
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.speculation import CostTable
from cachespec.errors import InputError
from cachespec.evaluation.answers import Answers, Plain
from cachespec.evaluation.interval import Counts, acceptance
from cachespec.evaluation.paper import Played, Sample, Truth, play, shadow
from cachespec.evaluation.prompts import Line, Slice, in_time
from cachespec.evaluation.result import ALL, DrafterScore, Evaluated, Evaluation, Group, Progress, local_words, recommended
from cachespec.evaluation.sharing import Asked, Pages, shared, token_pages
from cachespec.evaluation.spending import PaperEngine, Spent, rivals, routing_costs
from cachespec.prompt import Whole, build_prompt
from cachespec.request import Request

SUFFIX: Final[Mapping[str, Any]] = {"use": "suffix"}
Scored: TypeAlias = tuple[list[Counts], list[Played]]
"""A drafter over the samples: counts of its tokens, and decoding on paper."""
T = TypeVar("T")


class LocalEvaluation:
    """See the module's docstring. Used once."""

    def __init__(
        self,
        config: Config,
        backend: LocalBackend,
        prompts: Slice,
        *,
        progress: Progress,
        max_output_tokens: int,
        temperature: float | None,
        measure_s: float,
        store: CalibrationStore,
    ) -> None:
        self._config, self._backend, self._prompts, self._measure_s = config, backend, prompts, measure_s
        self._progress, self._most, self._temperature, self._store = progress, max_output_tokens, temperature, store
        self._settings = replace(backend.settings, parallel=1)
        self._notes: list[str] = []
        self._failed: dict[str, str] = {}  # drafters, and why
        self._width = 1  # tokens that a call may evaluate

    async def evaluated(self) -> Evaluated:
        runtime = await anyio.to_thread.run_sync(self._load)
        try:
            return await self._with(runtime)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(runtime.close)

    def _load(self) -> Runtime:
        def told(part: float) -> bool:
            self._progress("loading", round(100 * part), 100)
            return True

        return self._backend.load_runtime(told)

    async def _with(self, runtime: Runtime) -> Evaluated:
        drafts = self._drafts() if runtime.info.rewinds else {}
        pairs, speeds = await self._answers(runtime)
        samples = [sample for _, _, sample in pairs]
        scores = await anyio.to_thread.run_sync(lambda: self._scores(drafts, samples, runtime))
        return self._result(runtime, pairs, scores, drafts, speeds)

    def _drafts(self) -> dict[str, Mapping[str, Any]]:
        """The drafters to score, by what they are called in a `draft` table: suffix, and what is configured with its parts."""
        configured = self._backend.settings.draft
        found: dict[str, Mapping[str, Any]] = {"suffix": SUFFIX}
        if configured is None:
            return found
        use = str(configured["use"])
        if use in ("model", "hybrid"):
            shared = {key: configured[key] for key in ("model", "runtime", "min_probability") if key in configured}
            found["model"], found["hybrid"] = {"use": "model", **shared}, {"use": "hybrid", **shared}
        found[use] = configured
        return found

    def _scores(
        self, drafts: Mapping[str, Mapping[str, Any]], samples: Sequence[Sample], runtime: Runtime
    ) -> dict[str, Scored]:
        if not drafts:
            return {}
        truth, believed = self._costs(runtime, max(len(sample.prompt) + len(sample.answer) for sample in samples))
        scores = {use: self._score(use, draft, samples, runtime, truth, believed) for use, draft in drafts.items()}
        return {use: scored for use, scored in scores.items() if scored is not None}

    def _costs(self, runtime: Runtime, longest: int) -> tuple[Truth, CostTable]:
        self._progress("measuring", 0, 2)
        settings = self._backend.settings
        self._width = kept_width(runtime, self._store) if settings.deterministic else runtime.width
        believed = measured_costs(runtime, settings, self._width, self._store)
        self._progress("measuring", 1, 2)
        truth = Truth.measure(runtime, longest, seconds=self._measure_s)
        self._progress("measuring", 2, 2)
        return truth, believed

    async def _answers(self, runtime: Runtime) -> tuple[list[tuple[Line, Request, Sample]], Mapping[str, float | None]]:
        plain = Plain(runtime, self._settings, self._backend.model)
        total = sum(len(line.answers) for line in self._prompts.lines)
        done = 0

        def told() -> None:
            nonlocal done
            done += 1
            self._progress("answers", done, total)

        found: list[tuple[Line, Request, Sample]] = []
        try:
            await plain.start()
            answers = Answers(plain, runtime, most=self._most, temperature=self._temperature)
            for line in self._prompts.lines:
                found += [(line, request, sample) for request, sample in await answers.line(line, told)]
            speeds: Mapping[str, float | None] = plain.report()["speeds"]
        finally:
            with anyio.CancelScope(shield=True):
                await plain.aclose()
        if not found:
            raise InputError(f"{self._prompts.name}: {self._backend.name} can answer no request of it; {answers.skipped[0]}")
        if answers.skipped:
            self._notes.append(f"{len(answers.skipped)} left out, the first: {answers.skipped[0]}")
        return found, speeds

    def _score(
        self,
        use: str,
        draft: Mapping[str, Any],
        samples: Sequence[Sample],
        runtime: Runtime,
        truth: Truth,
        believed: CostTable,
    ) -> Scored | None:
        """One drafter over the samples, in shadow and under the backend's policy; None: it does not fit, or it failed.

        Each pass has a drafter of its own: one that saw the answers once knows them.
        """
        if has_room(draft, self._backend.draft_fits) is False:
            self._notes.append(f"{use}: the draft model does not fit into memory (draft_does_not_fit)")
            return None
        policy, width = self._settings.policy(), self._width
        try:
            counts = self._pass(use, draft, runtime, len(samples), 0, lambda made: shadow(samples, made, runtime))
            played = self._pass(
                use,
                draft,
                runtime,
                len(samples),
                1,
                lambda made: play(samples, policy, made, truth=truth, believed=believed, runtime=runtime, width=width),
            )
        except Fault as fault:
            self._failed[use] = str(fault)
            return None
        return counts, played

    def _pass(
        self,
        use: str,
        draft: Mapping[str, Any],
        runtime: Runtime,
        count: int,
        number: int,
        over: Callable[[Drafter[Any]], Iterator[T]],
    ) -> list[T]:
        results: list[T] = []
        drafter = make_drafter(self._settings, draft, runtime, self._backend.load_draft)
        try:
            for result in over(drafter):
                anyio.from_thread.check_cancelled()
                results.append(result)
                self._progress(f"scoring {use}", number * count + len(results), 2 * count)
        finally:
            with suppress(Fault):  # what it did until then is what counts
                ContainedDrafter(drafter).stop()
        return results

    def _result(
        self,
        runtime: Runtime,
        pairs: Sequence[tuple[Line, Request, Sample]],
        scores: Mapping[str, Scored],
        drafts: Mapping[str, Mapping[str, Any]],
        speeds: Mapping[str, float | None],
    ) -> Evaluated:
        bar = self._settings.require_eval
        samples = [sample for _, _, sample in pairs]
        order = in_time([line for line, _, _ in pairs])
        prompts = {
            build_prompt(request).whole: (len(sample.prompt), token_pages(sample.prompt, line.request.tenant))
            for line, request, sample in pairs
        }
        prefix = shared(
            Asked(t=pairs[i][0].t, tokens=len(samples[i].prompt), pages=token_pages(samples[i].prompt, pairs[i][1].tenant))
            for i in order
        )
        spent = [Spent(request=pairs[i][1], t=pairs[i][0].t, output=len(samples[i].answer)) for i in order]
        without = "eval_required" if self._failed else "capability"
        overall = _group(ALL, range(len(samples)), samples, scores, bar, without)
        groups = tuple(
            _group(category, [i for i, s in enumerate(samples) if s.category == category], samples, scores, bar, without)
            for category in dict.fromkeys(sample.category for sample in samples)
        )
        self._keep(runtime, overall, drafts)
        policies = self._routing(spent, prompts, speeds)
        evaluation = Evaluation(
            backend=self._backend.name,
            groups=groups,
            overall=overall,
            prefix=prefix,
            policies=policies,
            recommendation=local_words(self._backend.name, overall, groups, bar, prefix, self._failed),
            notes=tuple(self._notes),
            failed=self._failed,
        )
        return Evaluated(evaluation=evaluation, draft=drafts.get(overall.recommended), caching=None)

    def _keep(self, runtime: Runtime, overall: Group, drafts: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what was found as evidence, for the drafters as they would be configured."""
        for use, score in overall.drafters.items():
            rate = score.acceptance
            if rate is None:
                continue
            found = Evidence(acceptance=rate.rate, low=rate.low, high=rate.high, requests=overall.requests, scored=rate.scored)
            if not save_evidence(self._store, runtime.info.fingerprint, self._backend.name, drafts[use], found):
                self._notes.append("the evidence could not be kept: the user's cache folder cannot be written")

    def _routing(
        self, spent: Sequence[Spent], prompts: Mapping[Whole, tuple[int, Pages]], speeds: Mapping[str, float | None]
    ) -> dict[str, Any]:
        def paper(backend: Backend) -> Backend:
            if backend.name != self._backend.name:
                return backend
            return PaperEngine(self._backend, prompts, prefill=speeds["prefill"], decode=speeds["decode"])

        return routing_costs(self._config, spent, lambda: rivals(self._config, self._backend.name, paper), self._progress)


def _group(
    category: str,
    numbers: Sequence[int],
    samples: Sequence[Sample],
    scores: Mapping[str, Scored],
    bar: float | None,
    without: str,
) -> Group:
    drafters: dict[str, DrafterScore] = {}
    for use, (counts, played) in scores.items():
        mine = [played[i] for i in numbers]
        calls, seconds = sum(p.calls for p in mine), sum(p.seconds for p in mine)
        rate = acceptance([counts[i] for i in numbers])
        drafters[use] = DrafterScore(
            acceptance=rate,
            tokens_per_pass=sum(p.tokens for p in mine) / calls if calls else 1.0,
            predicted_speedup=sum(p.plain_s for p in mine) / seconds if seconds else 1.0,
        )
    return Group(
        category=category,
        requests=len(numbers),
        tokens=sum(len(samples[i].answer) for i in numbers),
        drafters=drafters,
        recommended=recommended(drafters, bar) if drafters else without,
    )
