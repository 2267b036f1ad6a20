"""From a request to a decision: filter the candidates, price the rest, let the policy order them, plan the first.

No network, no disk (contract D3): everything is decided on what backends, ledger and sessions know at this moment. The
client reserves and opens; when either fails it asks again, with what failed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from hashlib import blake2b
from random import random
from time import perf_counter
from typing import Any

from cachespec.affinity import Change, can_be_told, holder_of, named_state
from cachespec.backends.base import Backend, Estimate
from cachespec.cache_plan import CachePlanner, Planned
from cachespec.caching import Lifetime
from cachespec.decision import (
    Ask,
    Decision,
    Latency,
    Offer,
    Reason,
)
from cachespec.errors import (
    BudgetExceededError,
    CachespecError,
    ContextLengthError,
    EngineStoppedError,
    InputError,
    NoRouteError,
    PriceUnknownError,
    UnsupportedParameterError,
)
from cachespec.learned import Learned, own_latency
from cachespec.ledger.base import Ledger
from cachespec.offers import (
    downgraded,
    left_out,
    limits_of,
    moved,
    not_offered,
    out,
    over_budget,
    ranked_by,
    refused_by,
    without,
)
from cachespec.policies.base import RoutingPolicy
from cachespec.policies.budgets import Applied, applied
from cachespec.policies.routing import stay
from cachespec.prompt import Prompt, build_prompt
from cachespec.quotes import quote, with_output
from cachespec.request import Request
from cachespec.rules import BudgetRule, Rule
from cachespec.tokens import sizes_of
from cachespec.turns import Outlook
from cachespec.values import quick

PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "stop", "seed", "reasoning", "tool_choice", "response_format")
_KEPT = (Lifetime(name="kv", seconds=math.inf, write=1.0),)
STEP_S = 1.0
"""How long past its deadline a local engine may be busy with a request: at most one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a configuration says beside its backends, and what their names stand for; one generation of it."""

    models: Mapping[str, tuple[str, ...]]
    default_model: str | None = None
    max_output_tokens: int | None = None
    drop_unsupported: bool = False
    rules: tuple[Rule, ...] = ()
    budgets: tuple[BudgetRule, ...] = ()
    generation: int = 0
    targets: Mapping[str, str] = field(default_factory=dict)


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request made ready once: its alias, its candidates, its prompt, and the budgets it falls under.

    `changed` says which parameters of its session, that are part of what is cached, it changes; `previous_response` is the
    vendor's id of the session's last answer; `spent` is what earlier attempts of this request were booked with, in USD.
    """

    request: Request
    prompt: Prompt
    ask: Ask
    candidates: tuple[str, ...]
    budgets: tuple[Applied, ...]
    changed: tuple[Change, ...] = ()
    previous_response: str | None = None
    spent: Decimal = Decimal(0)


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A decision with the request as each backend will get it, and the typed error of each candidate that is out.

    `planned` is the plan with what it rests on; None when nobody was chosen. `own` is what the chosen backend itself says of
    its time, where it knows.
    """

    decision: Decision
    request: Request
    errors: Mapping[str, CachespecError]
    warnings: tuple[str, ...]
    planned: Planned | None = None
    own: Latency | None = None


class Decider:
    """Decides for one configuration. Safe for any number of tasks: it keeps nothing between calls."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        routing: RoutingPolicy,
        ledger: Ledger,
        settings: Settings,
        planner: CachePlanner,
        learned: Learned,
    ) -> None:
        self._backends, self._routing, self._ledger, self._settings = backends, routing, ledger, settings
        self._planner, self._learned = planner, learned

    def resolve(self, model: str | None) -> tuple[str, tuple[str, ...]]:
        """An alias, then a backend's name, then ``provider:model``: the alias and its backends. Raises InputError."""
        settings = self._settings
        if model is None:
            model = settings.default_model
        if model is None and len(settings.models) == 1:
            model = next(iter(settings.models))
        if model is None and not settings.models and len(self._backends) == 1:
            model = next(iter(self._backends))
        if model is None:
            raise InputError(f"no default model; name one of: {', '.join(self._names())}", field="model")
        if model in settings.models:
            return model, settings.models[model]
        if model in self._backends:
            return model, (model,)
        found = tuple(n for n, b in self._backends.items() if model in (f"{b.provider}:{b.model}", f"{b.provider}/{b.model}"))
        if found:
            return model, found
        # A vendor's own id, as in a body that is sent through us as it is.
        found = tuple(n for n, b in self._backends.items() if b.model == model)
        if found:
            return model, found
        near = difflib.get_close_matches(model, self._names(), n=3, cutoff=0.4) or self._names()
        raise InputError(f"no model {model!r}; nearest: {', '.join(near)}", field="model")

    def _names(self) -> list[str]:
        qualified = [f"{b.provider}:{b.model}" for b in self._backends.values() if b.provider]
        return list(dict.fromkeys([*self._settings.models, *self._backends, *qualified]))

    def ask(
        self,
        request: Request,
        *,
        now: float,
        timeout_s: float | None,
        previous_backend: str | None,
        tool_loop: bool = False,
        previous_response: str | None = None,
        holder: str | None = None,
        changed: tuple[Change, ...] = (),
    ) -> Asked:
        """Make a request ready; `holder` keeps what its body names, where that is known.

        Raises InputError for a model or an `extra` that names nothing.
        """
        alias, candidates = self.resolve(request.model)
        for name in request.extra:
            if name not in self._backends:
                near = difflib.get_close_matches(name, list(self._backends), n=1)
                raise InputError(f"no backend {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), field="extra")
        if request.max_output_tokens is None and self._settings.max_output_tokens is not None:
            request = replace(request, max_output_tokens=self._settings.max_output_tokens)
        ask = Ask(
            alias=alias,
            tenant=request.tenant,
            session_id=request.session_id,
            tags=request.tags,
            tools=bool(request.tools),
            max_output_tokens=request.max_output_tokens,
            timeout_s=timeout_s,
            now=now,
            previous_backend=previous_backend,
            tool_loop=tool_loop,
            held_by=holder_of(request, self._backends, candidates, seen=holder, session=previous_backend),
            draw=_draw(request.tenant, request.session_id),
        )
        budgets = applied(self._settings.budgets, ask)
        prompt = build_prompt(request)
        return Asked(
            request=request,
            prompt=prompt,
            ask=ask,
            candidates=candidates,
            budgets=budgets,
            changed=changed,
            previous_response=previous_response,
        )

    def renewed(self, asked: Asked, now: float) -> Asked:
        """The same request at another moment: budgets count in the window of time that is current then."""
        ask = replace(asked.ask, now=now)
        return replace(asked, ask=ask, budgets=applied(self._settings.budgets, ask))

    async def refresh(self, asked: Asked) -> None:
        """Read the state of the budgets the request falls under; deciding itself reads nothing."""
        limits = limits_of(asked.budgets)
        if limits:
            await self._ledger.refresh(limits)

    def decide(self, asked: Asked, *, failed: Mapping[str, CachespecError] | None = None, choose: str | None = None) -> Verdict:
        """Filter, price, rank, plan. `failed` are candidates that fell since; `choose` is the one to try again now."""
        start = perf_counter()
        errors: dict[str, CachespecError] = {}
        plans: dict[str, Planned] = {}
        own: dict[str, Latency | None] = {}
        ahead = self._learned.output_expected(asked.ask), self._learned.turns.outlook(asked.ask)
        offers = [self._offer(name, asked, ahead, errors, plans, own) for name in asked.candidates]
        for name, error in (failed or {}).items():
            errors.setdefault(name, error)
            offers = [out(o, error) if o.backend == name and name != choose else o for o in offers]
        limits = limits_of(asked.budgets)
        budgets = self._ledger.snapshot(limits) if limits else ()
        modes = [b.rule.mode for b in asked.budgets if b.rule.scope != "request"] if limits else ()  # as `limits_of` has them
        budgets = tuple(replace(state, mode=mode) for state, mode in zip(budgets, modes, strict=False))
        offers = self._healthy(offers, asked.ask, choose)  # before budgets look for a cheap one: it has to be one that answers
        offers = moved(downgraded(offers, asked.budgets, budgets, asked.spent, asked.ask), asked.ask)
        eligible = [o for o in offers if o.eligible]
        ranked = list(stay(asked.ask, ranked_by(self._routing, asked.ask, eligible))) if eligible else []
        if choose is not None:
            ranked.sort(key=lambda o: o.backend != choose)
        best = ranked[0] if ranked else None
        chosen = {o.backend for o in ranked}
        rest = [left_out(o) if o.eligible else o for o in offers if o.backend not in chosen]
        planned = None if best is None else self._diagnosing(plans[best.backend], asked)
        plan = None if planned is None else planned.plan
        decision = Decision(
            chosen=None if best is None else best.backend,
            candidates=(*ranked, *rest),
            plan=plan,
            budgets=budgets,
            generation=self._settings.generation,
            decided_in_us=(perf_counter() - start) * 1e6,
        )
        request = asked.request if planned is None else planned.prompt.request
        dropped = () if plan is None else plan.ignore
        warnings = tuple(f"{decision.chosen} cannot honour {name}; it was left out (on_unsupported)" for name in dropped)
        speed = None if best is None else own[best.backend]
        return Verdict(decision=decision, request=request, errors=errors, warnings=warnings, planned=planned, own=speed)

    def foresee(self, asked: Asked) -> Verdict:
        """`decide`, without those that a hard budget would refuse as far as is known; to send, the ledger says it."""
        verdict, refused = self.decide(asked), dict[str, CachespecError]()
        while more := {n: e for n, e in refused_by(asked.budgets, verdict.decision).items() if n not in refused}:
            refused |= more  # without these, those whom a downgrade kept out may be in again
            verdict = self.decide(asked, failed=refused)
        return verdict

    def own_now(self, verdict: Verdict) -> Latency | None:
        """`Verdict.own` as it is now: while the ledger reserved, others may have begun to wait at a local engine."""
        decision, planned = verdict.decision, verdict.planned
        if verdict.own is None or planned is None or decision.chosen is None:
            return verdict.own
        estimate = self._backends[decision.chosen].estimate(planned.prompt)
        itself, _ = _for_output(estimate, decision.candidates[0].tokens.output_expected)
        return own_latency(itself, local=True)

    def _diagnosing(self, planned: Planned, asked: Asked) -> Planned:
        """With the question why the prompt missed its cache, where the backend is told to ask and there is a session."""
        plan, whose = planned.plan, self._backends[planned.plan.backend].capabilities.diagnoses
        if whose is None or asked.ask.session_id is None or asked.request.cache == "off":
            return planned
        before = asked.previous_response if asked.ask.previous_backend == plan.backend else None
        if whose == "anthropic":
            more: dict[str, Any] = {"diagnostics": {"previous_message_id": before}}
        elif before is None:
            return planned
        elif _given(asked.request, plan.backend, "prompt_cache_retention") is not None:
            return planned  # the vendor refuses the two together, and the caller's own stands
        else:
            options = plan.options.get("prompt_cache_options") or {}
            more = {"prompt_cache_options": {**options, "comparison_response_id": before}}
        return replace(planned, plan=replace(plan, options={**plan.options, **more}))

    def _offer(
        self,
        name: str,
        asked: Asked,
        ahead: tuple[int | None, Outlook],
        errors: dict[str, CachespecError],
        plans: dict[str, Planned],
        own: dict[str, Latency | None],
    ) -> Offer:
        """What a candidate offers. Where it can take the request, `plans` gets how it would be sent there, `own` its speed.

        `ahead`: the output tokens that are expected (None: not known), and what is to follow.
        """
        backend, request = self._backends[name], asked.request
        reasons: list[Reason] = []
        for rule in self._settings.rules:
            matches = rule.when.matches(
                tags=frozenset(asked.ask.tags), tenant=asked.ask.tenant, model=asked.ask.alias, tools=asked.ask.tools
            )
            if matches and not rule.allows(name):
                only = "" if rule.only is None else f"only {', '.join(sorted(rule.only))} may answer"
                reasons.append(Reason("rule", only or f"{name} is excluded"))
        holder = asked.ask.held_by
        if holder is not None and name != holder:
            reasons.append(Reason("capability", f"the conversation that this request names is kept by {holder}"))
        else:
            for vendor, field in named_state(request):
                if not can_be_told(backend, vendor, field):
                    reasons.append(Reason("capability", f"{field} names what {vendor} keeps, and cannot be said here"))
        if self._settings.drop_unsupported:
            request = _honourable(request, backend)
        refused = backend.check(request)
        reasons += refused
        if refused:
            text = "; ".join(r.detail for r in refused)
            stopped = any(r.code == "unhealthy" for r in refused)
            kind = EngineStoppedError if stopped else UnsupportedParameterError
            errors[name] = kind(text, backend=name, model=backend.model)
        if reasons:
            return not_offered(backend, reasons)
        prompt = asked.prompt if request is asked.request else replace(asked.prompt, request=request)
        estimate = backend.estimate(prompt)
        ignored = _unsupported(asked.request, backend) if self._settings.drop_unsupported else ()
        target = self._settings.targets.get(name, "")
        planned = plans[name] = self._planner.plan(
            backend, prompt, asked.ask, target=target, ignored=ignored, changed=asked.changed
        )
        said = estimate.tokens
        tokens, belief = (said if planned.tokens is None else planned.tokens), planned.belief or estimate.belief
        capabilities = backend.capabilities
        density = self._learned.tokens(planned.tokenizer)
        if planned.tokens is None and density.seen and not prompt.images:
            count = density.tokens(sizes_of(prompt.segments))
            tokens = replace(tokens, input=count, uncached=count)
        output_max = estimate.output_max
        if output_max is None:
            output_max = _least(request.max_output_tokens, capabilities.max_output)
        if capabilities.context is not None and tokens.input is not None:
            # A local model's count is exact. Elsewhere it is a guess that may be twice too high; the vendor's word counts then.
            surely = tokens.input if capabilities.local else tokens.input // 2
            if surely >= capabilities.context:
                detail = f"prompt of about {tokens.input} tokens, context of {capabilities.context}"
                reasons.append(Reason("context_length", detail))
                errors[name] = ContextLengthError(detail, backend=name, model=backend.model)
            elif capabilities.local:
                output_max = _least(output_max, capabilities.context - tokens.input)
        expected, outlook = ahead
        expected = said.output_expected if expected is None else expected
        tokens = with_output(tokens, output_max, expected, said.worst_input, density.error)
        itself, busy = _for_output(estimate, tokens.output_expected) if capabilities.local else (estimate.latency, None)
        own[name] = own_latency(itself, local=capabilities.local)
        local, now = capabilities.local, asked.ask.now
        latency = self._learned.latency(name, itself, tokens, local=local, now=now, target=target)
        if busy is not None and itself.total_ms and latency.total_ms is not None:
            busy *= latency.total_ms / itself.total_ms  # what is learned of all of its time holds for this part, too
        timeout = asked.ask.timeout_s
        priced = quote(
            backend.rates,
            estimate,
            tokens,
            latency,
            at_most_s=None if timeout is None else timeout + STEP_S,
            busy_s=busy,
            outlook=outlook,
            kept=_KEPT if capabilities.local else planned.lifetimes,
            read=0.0 if planned.cache is None else planned.cache.terms.read,
        )
        over = over_budget(backend, asked.budgets, priced, estimate.unbounded, asked.spent)
        if over is not None:
            reasons.append(over[0])
            errors[name] = over[1]
        drafts = estimate.speculation
        if drafts is not None and drafts.detail is not None:
            reasons.append(Reason(drafts.reason, drafts.detail))
        barred = any(r.code in ("context_length", "budget", "price_unknown") for r in reasons)
        return Offer(
            backend=name,
            model=backend.model,
            eligible=not barred,
            reasons=tuple(reasons),
            quote=priced,
            tokens=tokens,
            latency=latency,
            belief=belief,
            speculation=estimate.speculation,
        )

    def _healthy(self, offers: list[Offer], ask: Ask, choose: str | None) -> list[Offer]:
        """Those whose breaker is open are out, unless nobody else is left: then there is nothing to lose by asking. A tool
        loop's own place is out when it is gone, not when it is only busy (contract D2)."""
        health = self._learned.health
        ill = {o.backend: why for o in offers if o.eligible and (why := health.refusal(o.backend, ask.now)) is not None}
        ill.pop(choose or "", None)
        if ask.tool_loop and not health.gone(ask.previous_backend or "", ask.now):
            ill.pop(ask.previous_backend or "", None)
        if not ill or all(o.backend in ill for o in offers if o.eligible):
            return offers
        return [without(o, Reason("unhealthy", ill[o.backend])) if o.backend in ill else o for o in offers]


def _for_output(estimate: Estimate, expected: int | None) -> tuple[Latency, float | None]:
    """A local engine's own times, and how long it is busy, for an answer of the expected length, not of the one it took."""
    latency, taken = estimate.latency, estimate.tokens.output_expected
    if not taken or expected is None or expected == taken or latency.ttft_ms is None or latency.total_ms is None:
        return latency, estimate.busy_s
    changed = (latency.total_ms - latency.ttft_ms) * (expected / taken - 1.0)
    busy = None if estimate.busy_s is None else max(estimate.busy_s + changed / 1000, 0.0)
    return replace(latency, total_ms=latency.total_ms + changed), busy


def _given(request: Request, backend: str, field: str) -> Any:
    """What the caller set a field of OpenAI's body to; None: nothing."""
    return request.extra.get(backend, {}).get(field) or request.passthrough.get("openai", {}).get(field)


def _draw(tenant: str | None, session_id: str | None) -> float:
    """A number in [0, 1) for policies that choose by chance: a session has one, in every process."""
    if session_id is None:
        return random()  # noqa: S311 - nothing secret hangs on it
    name = session_id if tenant is None else f"{tenant}\0{session_id}"
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=6).digest()) / 2**48


def route_error(verdict: Verdict) -> CachespecError:
    """The error for a decision that chose nobody: the one cause of all candidates, else NoRouteError."""
    offers, errors = verdict.decision.candidates, verdict.errors
    kinds = {type(errors[o.backend]) if o.backend in errors else None for o in offers}
    own = (ContextLengthError, UnsupportedParameterError, BudgetExceededError, PriceUnknownError, EngineStoppedError)
    if len(kinds) == 1 and (kind := kinds.pop()) is not None and issubclass(kind, own):
        first = errors[offers[0].backend]
        if isinstance(first, UnsupportedParameterError):
            return _unsupported_everywhere(first, offers, errors)
        return first
    return NoRouteError("no candidate can take this request", reasons={o.backend: o.reasons for o in offers})


def _unsupported_everywhere(
    first: UnsupportedParameterError, offers: Sequence[Offer], errors: Mapping[str, CachespecError]
) -> UnsupportedParameterError:
    """The first candidate's error, with what the others say, and what can be done where they would do without."""
    said = [str(errors[o.backend]) for o in offers[1:]]
    if any(all(r.code == "unsupported_parameter" and _field(r) in PARAMETERS for r in o.reasons) for o in offers):
        said.append('on_unsupported = "drop" leaves it out')
    if not said:
        return first
    told = UnsupportedParameterError(
        "; ".join([first.message, *said]),
        backend=first.backend,
        model=first.model,
        status=first.status,
        request_id=first.request_id,
    )
    told.__cause__ = first.__cause__
    return told


def _field(reason: Reason) -> str:
    """The parameter that the text of an ``unsupported_parameter`` begins with."""
    return reason.detail.partition(":")[0].partition(".")[0]


def _unsupported(request: Request, backend: Backend) -> tuple[str, ...]:
    """The parameters that this backend cannot honour as they are given: a reason's text begins with their name."""
    refused = {_field(r) for r in backend.check(request) if r.code == "unsupported_parameter"}
    return tuple(name for name in PARAMETERS if name in refused)


def _honourable(request: Request, backend: Backend) -> Request:
    drop = {name: (() if name == "stop" else None) for name in _unsupported(request, backend)}
    return replace(request, **drop) if drop else request  # type: ignore[arg-type]


def _least(*values: int | None) -> int | None:
    known = [v for v in values if v is not None]
    return min(known) if known else None
