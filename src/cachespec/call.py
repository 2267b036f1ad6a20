"""One request on its way: decide, reserve, open, and after the last byte settle. The client makes one for each stream."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

import anyio

from cachespec.affinity import Sessions
from cachespec.answers import parse_answer
from cachespec.assembly import Assembly
from cachespec.backends.base import Attempt, Backend
from cachespec.blame import AT_DEADLINE_S, of_data, of_deadline, of_request, patience_s
from cachespec.cache_learning import Sent
from cachespec.caching import Outcome as CacheOutcome
from cachespec.clock import Clock
from cachespec.decide import Asked, Verdict, route_error
from cachespec.decision import Decision, Latency, Offer, Reason
from cachespec.errors import (
    BackendError,
    BudgetExceededError,
    CachespecError,
    ConnectionFailedError,
    RequestTimeoutError,
    StreamInterruptedError,
)
from cachespec.events import Completion, Retrying
from cachespec.fanout import LONGEST_S
from cachespec.finishing import to_the_end
from cachespec.generations import Generation
from cachespec.health import Trial
from cachespec.holds import hold_for, passed, passed_text
from cachespec.keepalive import KeepAlives
from cachespec.learned import Answer, Learned
from cachespec.leases import MARGIN_S, Leases
from cachespec.ledger.base import Hold, Ledger, Settlement
from cachespec.middleware import Chain
from cachespec.policies.retries import Failure, NextAttempt, next_attempt
from cachespec.settling import spent
from cachespec.stream import Outcome
from cachespec.telemetry import AttemptFailed, Decided, Settled, Telemetry
from cachespec.tokens import Sizes, sizes_of
from cachespec.usage import EXACT, Cost


@dataclass(slots=True)
class _Open:
    """An attempt that holds a reservation."""

    backend: Backend
    offer: Offer
    reservation: str
    assembly: Assembly
    trial: Trial
    load: int
    own: Latency | None
    sent: Sent | None = None
    attempt: Attempt | None = None
    since: float = field(default_factory=anyio.current_time)
    content_by: tuple[float, float] = (math.inf, math.inf)  # on the event loop's clock: if silent, and once it has begun


class ClientCall:
    """Implements `cachespec.stream.Call`. Used by one task.

    `ask` makes the request ready under the client's `current` generation. It begins, and ends, under the one that is current
    when it is entered: what it was built under may be closed by then.
    """

    def __init__(
        self,
        ask: Callable[[], Asked],
        current: Callable[[], Generation],
        *,
        ledger: Ledger,
        leases: Leases,
        learned: Learned,
        keepalives: KeepAlives,
        telemetry: Telemetry,
        middleware: Chain,
        clock: Clock,
        start: Callable[[], Awaitable[None]],
        sessions: Sessions,
    ) -> None:
        self._ask, self._current, self._sessions = ask, current, sessions
        self._begin(current())
        self.timeout_s = self._asked.ask.timeout_s
        self._ledger, self._leases, self._learned, self._keepalives = ledger, leases, learned, keepalives
        self._telemetry, self._middleware, self._clock = telemetry, middleware, clock
        self._ready = start
        self._verdict: Verdict | None = None
        self._failures: list[Failure] = []
        self._failed: dict[str, CachespecError] = {}
        self._choose: str | None = None
        self._attempts = 0
        self._open: _Open | None = None
        self._answered: _Open | None = None
        self._start: float | None = None  # on the event loop's clock: from when it is entered
        self._cost: Cost | None = None
        self._warnings: list[str] = []

    def _begin(self, now: Generation) -> None:
        asked = self._ask()  # raises where this generation has no such alias, and then it takes nothing up
        self._now, self._asked, self._remembered = now, asked, self._sessions.changes
        self._decider, self._backends, self._caching = now.decider, now.backends, now.caching

    @property
    def decision(self) -> Decision:
        if self._verdict is None:
            self._verdict = self._decider.decide(self._asked)
        return self._verdict.decision

    @property
    def _begun_at(self) -> float:
        return anyio.current_time() if self._start is None else self._start

    async def open(self, *, left_s: float | None) -> tuple[Attempt, Assembly]:
        if self._start is None:
            self._start = anyio.current_time()
        until = None if left_s is None else anyio.current_time() + left_s
        await self._ready()
        if not self._failures:
            if (now := self._current()) is not self._now or self._sessions.changes != self._remembered:
                self._begin(now)
                # Its deadline runs already, as it was when the stream was made.
                self._asked = replace(self._asked, ask=replace(self._asked.ask, timeout_s=self.timeout_s))
            self._renew()
            await self._decider.refresh(self._asked)
        while True:
            left_s = None if until is None else until - anyio.current_time()
            verdict = await self._in_turn(self._decide(), left_s)
            asked, decision = self._asked.ask, verdict.decision
            self._telemetry.tell(Decided(tenant=asked.tenant, session_id=asked.session_id, tags=asked.tags, decision=decision))
            if decision.chosen is None or decision.plan is None or verdict.planned is None:
                raise route_error(verdict)
            try:
                held = await self._reserved(verdict, left_s)
                break
            except BudgetExceededError as refusal:  # nobody was asked: decide again without that one
                following = self._next(decision.chosen, refusal, left_s)
                if following is None:
                    raise
                await self.pause(following.delay_s)
        self._choose, self._open = decision.chosen, held
        held.own = self._decider.own_now(verdict)
        held.sent = self._caching.sent(verdict.planned, self._clock.time())
        self._keepalives.used(verdict.planned)
        left_s = None if until is None else until - anyio.current_time()
        silent, begun = patience_s(held.offer.latency, self._others(held), left_s)
        held.content_by = anyio.current_time() + silent, anyio.current_time() + begun
        with anyio.CancelScope(deadline=held.content_by[0]):
            held.attempt = await held.backend.open(verdict.request, decision.plan, timeout=left_s)
        if held.attempt is None:
            raise self.no_content()
        self._answered = held
        return held.attempt, held.assembly

    @property
    def content_by(self) -> float:
        held = self._open
        return math.inf if held is None else held.content_by[held.assembly.begun]

    def no_content(self) -> RequestTimeoutError:
        held = self._open
        assert held is not None  # noqa: S101 - only an attempt is waited for
        text = f"no content within {self.content_by - held.since:.3g} s, and others can still be asked"
        return RequestTimeoutError(text, backend=held.backend.name, model=held.backend.model)

    def _others(self, held: _Open) -> list[Latency]:
        """The times of those who were not asked yet, and would be, should this attempt fail."""
        ask, name = self._asked.ask, held.backend.name
        if ask.tool_loop and ask.previous_backend == name and not self._learned.health.gone(name, ask.now):
            return []
        if self._attempts + 1 >= self._now.config.retries.attempts:
            return []
        offers = self.decision.candidates
        return [o.latency for o in offers if o.eligible and o.backend != name and o.backend not in self._failed]

    async def _reserved(self, verdict: Verdict, left_s: float | None) -> _Open:
        """An attempt at the chosen backend, with its reservation. Raises BudgetExceededError and LedgerError."""
        offer, health = verdict.decision.candidates[0], self._learned.health
        backend, hold = self._backends[offer.backend], self._hold(offer, left_s)
        load, trial = health.load(backend.name), health.started(backend.name, self._asked.ask.now)
        try:
            await self._leases.renew()  # what is under way keeps its room, also when the clock jumped
            reservation = await self._ledger.reserve(hold)
        except BaseException:
            health.left(trial)
            raise
        self._leases.keep(reservation, hold)
        assembly = Assembly(provider=backend.provider, model=backend.model, begun=self._began)
        return _Open(backend, offer, reservation, assembly, trial, load=load, own=verdict.own)

    @property
    def asking(self) -> str | None:
        return None if self._open is None else self._open.backend.name

    def _decide(self) -> Verdict:
        """Decide on what is known now."""
        self._renew()
        self._verdict = self._decider.decide(self._asked, failed=self._failed, choose=self._choose)
        return self._verdict

    def _renew(self) -> None:
        self._asked = self._decider.renewed(self._asked, self._clock.time())

    def _left(self) -> tuple[list[str], list[str]]:
        """Who may be asked now, in the order of a decision without those that failed; among them those that failed and may be
        asked again. Whom they kept out (a budget's cheaper choice, or somebody well where another is ill) is in again.
        Then, in words, whom a hard budget keeps out."""
        self._renew()
        verdict = self._decider.decide(self._asked, failed=self._failed)
        errors = verdict.errors
        only_failed = {name for name, error in self._failed.items() if errors.get(name) is error}
        able = [o.backend for o in verdict.decision.candidates if o.eligible or o.backend in only_failed]
        barred = {n: e for n, e in errors.items() if isinstance(e, BudgetExceededError) and n not in only_failed}
        return able, [f"not asked: {name}: {error}" for name, error in barred.items()]

    async def _in_turn(self, verdict: Verdict, left_s: float | None) -> Verdict:
        """The verdict, after another request that is about to write the same cold prefix has begun to (contract P5)."""
        begin, most = anyio.current_time(), LONGEST_S if left_s is None else min(LONGEST_S, left_s / 2)
        waited = False
        while verdict.planned is not None and (lead := self._caching.ahead(verdict.planned)) is not None:
            waited = True
            begun = await lead.begun(at_most_s=most - (anyio.current_time() - begin))
            verdict = self._decide()  # also after waiting in vain: others were decided meanwhile
            if not begun:
                break
        if waited and verdict.decision.plan is not None:
            text = f"waited {(anyio.current_time() - begin) * 1000:.0f} ms for another request to write the same cold prefix"
            plan = verdict.decision.plan
            plan = replace(plan, reasons=(*plan.reasons, Reason("cold_fan_out", text)))
            verdict = self._verdict = replace(verdict, decision=replace(verdict.decision, plan=plan))
        return verdict

    def _began(self) -> None:
        """The response begins: what it writes can be read from now on."""
        held = self._open
        if held is not None:
            self._learned.health.began(held.trial)
            if held.sent is not None:
                self._caching.began(held.sent, self._clock.time())

    def _hold(self, offer: Offer, left_s: float | None) -> Hold:
        worst = Decimal(0) if offer.quote is None or offer.quote.worst is None else offer.quote.worst
        for told in passed(self._asked, worst, self._ledger):
            self._warnings.append(passed_text(told))
            self._telemetry.tell(told)
        limits = [b.limit for b in self._asked.budgets if b.rule.mode == "hard" and b.rule.scope != "request"]
        lease_s = (600.0 if left_s is None else left_s) + MARGIN_S
        ask = self._asked.ask
        return hold_for(ask, limits, backend=offer.backend, model=offer.model, worst=worst, lease_s=lease_s)

    async def retry(self, error: CachespecError, *, left_s: float | None) -> Retrying | None:
        held, self._open = self._open, None
        if held is None:  # nobody was asked, so nothing is anybody's fault
            if all(failure.error is not error for failure in self._failures):
                self._tell_earlier(error, self._failures)
            return None
        await self._give_back(held, error, left_s)
        self._attempts += 1
        number, name = self._attempts, held.backend.name
        plan = self._next(name, error, left_s)
        delay = 0.0 if plan is None else plan.delay_s
        following = None if plan is None else plan.backend
        self._telemetry.tell(AttemptFailed(attempt=number, backend=name, error=error, next_backend=following, delay_s=delay))
        if plan is None:
            return None
        return Retrying(attempt=number, backend=name, error=error, next_backend=plan.backend, delay_s=delay)

    def _next(self, name: str, error: CachespecError, left_s: float | None) -> NextAttempt | None:
        """Who is asked after this backend failed, or was refused by a budget; None: nobody, and then the error says why.

        A tool loop stays with who called the tools, unless that one is gone: busy is not gone (contract D2).
        """
        self._failures.append(Failure(backend=name, error=error, at=anyio.current_time() - self._begun_at))
        self._failed[name] = error
        able, barred = self._left()
        ask = self._asked.ask
        loop = ask.previous_backend if ask.tool_loop else None
        stays = None if loop is None or self._learned.health.gone(loop, ask.now) else loop
        plan = next_attempt(self._now.config.retries, self._failures, able, left_s=left_s, stays=stays)
        if plan is None:
            self._tell_earlier(error, self._failures[:-1])
            for note in barred:
                error.add_note(note)
        else:
            self._choose = plan.backend
        return plan

    @staticmethod
    def _tell_earlier(error: CachespecError, failures: Sequence[Failure]) -> None:
        for earlier in failures:
            error.add_note(f"earlier: {earlier.backend}: {type(earlier.error).__name__}: {earlier.error}")

    async def _give_back(self, held: _Open, error: CachespecError, left_s: float | None) -> None:
        """A failed attempt costs nothing, unless the vendor counted, or may have begun to work (`BackendError.begun`)."""
        health, waited_s, latency = self._learned.health, anyio.current_time() - held.since, held.offer.latency
        if anyio.current_time() >= held.content_by[held.assembly.begun]:
            left_s = 0.0  # its time was over, if not that of the request
        if isinstance(error, BackendError) and (
            of_data(error, local=held.backend.capabilities.local)
            or of_request(error, self._asked.request, held.backend.name)
            or of_deadline(error, latency=latency, waited_s=waited_s, left_s=left_s)
        ):
            health.left(held.trial)
        else:
            health.failed(held.trial, error, self._clock.time())
        cut = isinstance(error, ConnectionFailedError) and held.attempt is not None
        if held.assembly.usage is not None or cut or getattr(error, "begun", False):
            await self._book(held, "failed", ttft_ms=None, total_ms=waited_s * 1000)
        else:
            self._learn(held, "error")
            self._leases.drop(held.reservation)
            await to_the_end(lambda: self._ledger.release(held.reservation))

    def _learn(self, held: _Open, stop: str | None) -> None:
        """What the vendor said of its cache, for the next request."""
        if held.sent is not None:
            self._caching.ended(held.sent, usage=held.assembly.usage, stop=stop, now=self._clock.time())

    async def pause(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    async def settle(
        self, outcome: Outcome, *, ttft_ms: float | None, total_ms: float, cause: BackendError | None = None
    ) -> None:
        held, self._open = self._open, None
        if held is None:
            return
        # Also when it was left on its way, before the backend accepted: nobody can say whether it was worked on.
        self._took(held, outcome, cause, ttft_ms=ttft_ms, total_ms=total_ms)
        if outcome == "completed":  # also when it cannot be booked: where the conversation is now is no matter of money
            calls = [call.id for call in held.assembly.message().tool_calls]
            name, model, started = held.backend.name, held.backend.model, held.assembly.started
            answer = None if started is None else started.response_id
            self._sessions.remember(self._asked.request, backend=name, model=model, calls=calls, response_id=answer)
        await self._book(held, outcome, ttft_ms=ttft_ms, total_ms=total_ms)
        if outcome == "completed":
            self._keep(held)
        self._caching.save_soon(self._ledger, self._clock.time())

    def _took(
        self, held: _Open, outcome: Outcome, cause: BackendError | None, *, ttft_ms: float | None, total_ms: float
    ) -> None:
        """What an answer says of its backend: that it is there, and how long it takes."""
        learned, name, now = self._learned, held.backend.name, self._clock.time()
        late = self.timeout_s is not None and anyio.current_time() > self._begun_at + self.timeout_s - AT_DEADLINE_S
        if outcome == "failed" and not late:  # after content a deadline that passed says how patient the caller was
            if cause is not None and of_data(cause, local=held.backend.capabilities.local):
                learned.health.left(held.trial)
            else:
                learned.health.failed(held.trial, StreamInterruptedError("cut", backend=name), now)
        elif outcome != "completed":
            learned.health.left(held.trial)
        else:
            learned.health.answered(held.trial)
            earlier = (held.since - self._begun_at) * 1000  # what other attempts took is not this one's doing
            answer = Answer(
                ask=self._asked.ask,
                backend=name,
                model=f"{held.backend.provider}:{held.backend.model}",
                sizes=self._sizes(held),
                usage=held.assembly.usage,
                own=held.own,
                own_output=held.offer.tokens.output_expected,
                load=held.load,
                ttft_ms=None if ttft_ms is None else max(ttft_ms - earlier, 0.0),
                total_ms=max(total_ms - earlier, 0.0),
                most_input=held.offer.tokens.worst_input,
                most_output=held.offer.tokens.output_max,
                target=self._now.targets.get(name, ""),
            )
            learned.answered(answer, now=now)

    @staticmethod
    def _sizes(held: _Open) -> Sizes | None:
        """What the prompt is made of, where the backend's tokens are a guess and nobody else learns from its count."""
        planned = None if held.sent is None else held.sent.planned
        exact_count = held.own is not None  # an engine's own
        if planned is None or planned.cache is not None or exact_count or planned.prompt.images:
            return None
        return sizes_of(planned.prompt.segments)

    def _keep(self, held: _Open) -> None:
        """What the answer leaves in a cache may be worth keeping alive until the next turn."""
        if held.sent is not None:
            finished, usage = held.assembly.finished, held.assembly.usage
            outcome = CacheOutcome(
                ended_at=self._clock.time(),
                stop=None if finished is None else finished.reason,
                output_tokens=None if usage is None else usage.output,
                read=None if usage is None else usage.cache_read,
                written=None if usage is None else usage.written,
            )
            self._keepalives.ended(self._asked, held.sent, held.backend, self._caching, outcome)

    async def _book(self, held: _Open, outcome: Outcome, *, ttft_ms: float | None, total_ms: float) -> None:
        usage, cost = spent(held.backend, held.attempt, held.assembly, held.offer.tokens, since=held.since)
        self._cost, told = cost, held.assembly.usage
        if told is not None and usage is None:
            held.assembly.usage = None
            counts = f"{told.input_tokens} tokens of input and {told.output} of output"
            self._warnings.append(f"{held.backend.name} reported {counts}, which no request can cost: taken as not reported")
        if cost.amount is not None:
            self._asked = replace(self._asked, spent=EXACT.add(self._asked.spent, cost.amount))
        finished = held.assembly.finished
        self._learn(held, outcome if finished is None else finished.reason)
        ask, started = self._asked.ask, held.assembly.started
        request_id = None if started is None else started.request_id
        settlement = Settlement(
            amount=cost.amount,
            estimated=cost.estimated,
            usage=usage,
            outcome=outcome,
            request_id=request_id,
            price_source=cost.source,
        )
        self._leases.drop(held.reservation)
        await to_the_end(lambda: self._ledger.settle(held.reservation, settlement))
        self._telemetry.tell(
            Settled(
                backend=held.backend.name,
                model=held.backend.model,
                tenant=ask.tenant,
                session_id=ask.session_id,
                outcome=outcome,
                usage=usage,
                cost=cost.amount,
                estimated=cost.estimated,
                ttft_ms=ttft_ms,
                total_ms=total_ms,
                request_id=request_id,
            )
        )

    def completion(self, *, ttft_ms: float | None, total_ms: float, warnings: tuple[str, ...] = ()) -> Completion:
        held, verdict = self._answered, self._verdict
        assert held is not None  # noqa: S101 - there is an answer
        assert verdict is not None  # noqa: S101
        assembly = held.assembly
        message = assembly.message()
        started, finished = assembly.started, assembly.finished
        notes = [*verdict.warnings, *self._warnings, *(() if finished is None else finished.warnings), *warnings]
        if assembly.usage is None:
            notes.append("the backend reported no usage; the cost is an estimate")
        cost = self._cost or Cost(amount=None, estimated=True, source=None, price_date=None)
        if cost.amount is None:
            notes.append(f"the price of {held.backend.model} on {held.backend.name} is not known")
        parsed, problem = None, None
        if finished is not None and finished.reason != "tool_calls":  # cut short it may be whole, and seldom is
            parsed, problem = parse_answer(self._asked.request, message.text)
        if problem is not None:
            notes.append(problem)
        done = Completion(
            text=message.text,
            message=message,
            tool_calls=message.tool_calls,
            parsed=parsed,
            finish_reason=None if finished is None else finished.reason,
            usage=assembly.usage,
            cost=cost.amount,
            estimated=cost.estimated,
            backend=held.backend.name,
            model=held.backend.model if started is None or started.model is None else started.model,
            request_id=None if started is None else started.request_id,
            ttft_ms=ttft_ms,
            total_ms=total_ms,
            decision=verdict.decision,
            warnings=tuple(dict.fromkeys(notes)),
            logprobs=assembly.logprobs,
            cache_diagnosis=assembly.diagnosed,
        )
        return done if finished is None else self._middleware.completion(self._asked.request, done)
