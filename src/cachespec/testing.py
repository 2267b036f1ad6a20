"""For tests: a scripted backend, a clock that only moves when told, and the contract tests of each plug-in family.

A plug-in is finished when its family's check passes::

    await cachespec.testing.check_backend(lambda: MyBackend(name="mine", model="m"), build_request("Say hello."))
    cachespec.testing.check_routing(MyPolicy())
    await cachespec.testing.check_ledger(MyLedger)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

import anyio
import anyio.lowlevel

from cachespec.backends.base import Attempt, Backend, Capabilities, Estimate, Wire
from cachespec.decision import Ask, Belief, Latency, Offer, Plan, Quote, Reason, TokenEstimate
from cachespec.errors import BackendError, BudgetExceededError, InputError
from cachespec.events import Event, Finished, ResponseStarted, TextDelta, UsageReported
from cachespec.ledger.base import Hold, Ledger, Limit, Settlement
from cachespec.policies.base import RoutingPolicy
from cachespec.pricing import Rates
from cachespec.prompt import Prompt, build_prompt
from cachespec.request import Request
from cachespec.usage import Usage

ALL_PARAMETERS = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "stop", "seed", "reasoning", "tool_choice", "response_format")
)


class FakeClock:
    """Time that stands still until `advance`, or until somebody sleeps: a sleep takes no time and moves the clock.

    `sleeps` lists every pause, in seconds, in order.
    """

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now
        self.sleeps: list[float] = []

    def time(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await anyio.lowlevel.checkpoint()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a scripted backend answers to one request.

    Attributes:
        batches: the events of each read, in order. `say` writes the usual ones.
        refuse: raised by `open` instead of answering.
        fail: raised by the read after the last batch.
        delay_s: seconds before each read (real time).
    """

    batches: tuple[tuple[Event, ...], ...] = ()
    refuse: BackendError | None = None
    fail: BackendError | None = None
    delay_s: float = 0.0


def say(*texts: str, usage: Usage | None = None, reason: str = "stop", delay_s: float = 0.0) -> Reply:
    """A reply that streams `texts`, one read each, then ends well; by default its usage is a token for each text."""
    if usage is None:
        usage = Usage(uncached=10, cache_read=0, cache_write={}, output=len(texts))
    batches: list[tuple[Event, ...]] = [(ResponseStarted(request_id="req_scripted", model=None),)]
    batches += [(TextDelta(text),) for text in texts]
    batches.append((Finished(reason=reason), UsageReported(usage)))
    return Reply(batches=tuple(batches), delay_s=delay_s)


class ScriptedBackend:
    """A backend that answers from a script: the n-th request gets the n-th reply, the last one goes on for ever.

    It obeys the whole contract. `requests` records what arrived (with its plan), `open_attempts` how many are running.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | Reply = (),
        *,
        name: str = "scripted",
        model: str = "scripted-1",
        rates: Rates | None = None,
        capabilities: Capabilities | None = None,
        ttft_ms: float | None = None,
        provider: str | None = None,
    ) -> None:
        self.name, self.model, self.provider, self.rates = name, model, provider, rates
        self.capabilities = capabilities or Capabilities(parameters=ALL_PARAMETERS, images=True)
        self.requests: list[tuple[Request, Plan]] = []
        self.open_attempts = 0
        self.started = 0
        self.closed = False
        self._replies = [replies] if isinstance(replies, Reply) else (list(replies) or [say("Hello", " there.")])
        self._ttft_ms = ttft_ms

    async def start(self) -> None:
        self.started += 1

    def check(self, request: Request) -> Sequence[Reason]:
        able = self.capabilities
        given = [n for n in ALL_PARAMETERS if getattr(request, n) not in (None, ()) and n not in able.parameters]
        reasons = [Reason("unsupported_parameter", f"{name}: the script has no such parameter") for name in sorted(given)]
        if request.tools and not able.tools:
            reasons.append(Reason("capability", f"{self.name} takes no tools"))
        return reasons

    def estimate(self, prompt: Prompt) -> Estimate:
        count = -(-prompt.size // 4)
        tokens = TokenEstimate(
            input=count,
            cache_read=0,
            cache_write=0,
            uncached=count,
            output_expected=None,
            output_max=None,
            worst_input=prompt.size,
        )
        return Estimate(
            tokens=tokens,
            belief=Belief(state="cold", tokens=0, evidence="scripted"),
            latency=Latency(ttft_ms=self._ttft_ms, total_ms=None if self._ttft_ms is None else 2 * self._ttft_ms),
        )

    def wire(self, request: Request, plan: Plan) -> Wire | None:
        return None

    async def open(self, request: Request, plan: Plan, *, timeout: float | None) -> Attempt:
        await anyio.lowlevel.checkpoint()
        reply = self._replies[min(len(self.requests), len(self._replies) - 1)]
        self.requests.append((request, plan))
        if reply.refuse is not None:
            raise reply.refuse
        self.open_attempts += 1
        return _ScriptedAttempt(self, reply)

    async def aclose(self) -> None:
        self.closed = True


class _ScriptedAttempt:
    def __init__(self, backend: ScriptedBackend, reply: Reply) -> None:
        self._backend, self._reply, self._position, self._closed = backend, reply, 0, False

    async def read(self) -> Sequence[Event]:
        await anyio.sleep(self._reply.delay_s)
        if self._position < len(self._reply.batches):
            self._position += 1
            return self._reply.batches[self._position - 1]
        if self._reply.fail is not None:
            raise self._reply.fail
        return ()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._backend.open_attempts -= 1


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


async def check_backend(make: Callable[[], Backend], request: Request) -> None:
    """The contract of `backends/base.py`, on a backend that can answer `request`. Raises AssertionError."""
    backend = make()
    await backend.start()
    try:
        _require(bool(backend.name) and bool(backend.model), "name and model must be set")
        _require(tuple(backend.check(request)) == (), "check must accept a request the backend can answer")
        prompt = build_prompt(request)
        estimate = backend.estimate(prompt)
        _require(isinstance(estimate, Estimate), "estimate must return an Estimate")
        counts = estimate.tokens
        if counts.input is not None and counts.worst_input is not None:
            _require(counts.input <= counts.worst_input, "worst_input is a bound: it may not be below the estimate")
        plan = Plan(backend=backend.name)
        _require(backend.wire(request, plan) == backend.wire(request, plan), "wire must be deterministic")
        events = await _read_all(await backend.open(request, plan, timeout=60.0))
        finished = [e for e in events if isinstance(e, Finished)]
        _require(len(finished) == 1, f"a whole answer has one Finished, not {len(finished)}")
        _require(any(isinstance(e, TextDelta) for e in events), "the answer has no text")
        attempt = await backend.open(request, plan, timeout=60.0)
        await attempt.aclose()
        await attempt.aclose()
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(_open_and_leave, backend, request, plan)
    finally:
        await backend.aclose()
        await backend.aclose()


async def _read_all(attempt: Attempt) -> list[Event]:
    events: list[Event] = []
    try:
        while batch := await attempt.read():
            events += batch
    finally:
        await attempt.aclose()
    return events


async def _open_and_leave(backend: Backend, request: Request, plan: Plan) -> None:
    attempt = await backend.open(request, plan, timeout=60.0)
    await attempt.read()
    await attempt.aclose()


def check_routing(policy: RoutingPolicy) -> None:
    """The contract of a routing policy, on a grid of offers. Raises AssertionError."""
    ask = Ask(
        alias="assistant",
        tenant=None,
        session_id=None,
        tags=(),
        tools=False,
        max_output_tokens=100,
        timeout_s=60.0,
        now=1_800_000_000.0,
    )
    offers = tuple(
        _offer(f"b{i}", price, ttft)
        for i, (price, ttft) in enumerate([("0.01", 100.0), ("0.002", 900.0), (None, None), ("0", 5000.0), ("0.01", 50.0)])
    )
    for count in range(len(offers) + 1):
        given = offers[:count]
        answer = policy.rank(ask, given)
        _require(isinstance(answer, Sequence), f"rank must return a sequence of offers, not {type(answer).__name__}")
        ranked = list(answer)
        _require(all(isinstance(o, Offer) for o in ranked), f"rank must return offers: {ranked!r}")
        names = [o.backend for o in ranked]
        _require(len(set(names)) == len(names), f"an offer came back twice: {names}")
        _require(set(names) <= {o.backend for o in given}, f"an offer was invented: {names}")
        original = {o.backend: o for o in given}
        for offer in ranked:
            same = replace(offer, reasons=original[offer.backend].reasons) == original[offer.backend]
            _require(same, f"{offer.backend}: a policy may add reasons and change nothing else")
        _require(list(policy.rank(ask, given)) == ranked, "rank must be pure: the same offers gave two orders")


def _offer(name: str, price: str | None, ttft: float | None) -> Offer:
    counts = TokenEstimate(input=100, cache_read=0, cache_write=0, uncached=100, output_expected=50, output_max=100)
    amount = None if price is None else Decimal(price)
    return Offer(
        backend=name,
        model=f"{name}-model",
        eligible=True,
        reasons=(),
        quote=Quote(expected=amount, worst=amount, source="test", price_date=None),
        tokens=counts,
        latency=Latency(ttft_ms=ttft, total_ms=None if ttft is None else ttft * 2),
        belief=Belief(state="unknown"),
    )


async def check_ledger(make: Callable[[], Ledger] | Callable[[], Awaitable[Ledger]]) -> None:
    """The contract of `ledger/base.py` on a new, empty ledger. Raises AssertionError."""
    made = make()
    ledger = made if not isinstance(made, Awaitable) else await made
    try:
        limit = Limit(scope="tenant:a in total", account="tenant:a", limit=Decimal("1.00"))
        hold = Hold(
            amount=Decimal("0.40"),
            backend="b",
            model="m",
            tenant="a",
            session_id=None,
            accounts=("overall", "tenant:a"),
            limits=(limit,),
        )
        first = await ledger.reserve(hold)
        second = await ledger.reserve(hold)
        _require(first != second, "reservations need ids of their own")
        try:
            await ledger.reserve(hold)
        except BudgetExceededError as error:
            _require(error.reserved == Decimal("0.80"), f"reserved is {error.reserved}, not 0.80")
        else:
            raise AssertionError("a third reservation of 0.40 passed a limit of 1.00")
        await ledger.renew(first, hold)
        _require(ledger.snapshot([limit])[0].reserved == Decimal("0.80"), "to renew a lease reserves nothing more")
        spent = Settlement(amount=Decimal("0.10"), estimated=False, usage=None, outcome="completed")
        await ledger.settle(first, spent)
        await ledger.settle(first, replace(spent, amount=Decimal("0.90")))
        await ledger.release(second)
        await ledger.release(second)
        await ledger.release(first)
        await ledger.renew(first, hold)
        totals = await ledger.totals()
        _require(totals.amount == Decimal("0.10"), f"spent is {totals.amount}, not 0.10: settle counts once")
        state = ledger.snapshot([limit])
        _require(len(state) == 1 and state[0].spent == Decimal("0.10"), "snapshot must show what this process settled")
        _require(state[0].reserved == 0, "nothing is reserved any more")
        _require(set(await ledger.accounts()) == {"overall", "tenant:a"}, "accounts must name what was spent on")
        overall = Limit(scope="overall in total", account="overall", limit=Decimal("1.00"))
        await ledger.reset([limit])
        after, other = await ledger.refresh([limit, overall])
        _require(after.spent == 0, "a window that was reset begins at nothing")
        _require(other.spent == Decimal("0.10"), "reset takes one account's window back, no other")
        secret = await ledger.secret("keys")
        _require(len(secret) == 32 and await ledger.secret("keys") == secret, "a secret is 32 bytes, made once")
        _require(await ledger.load("learned") is None, "nothing was saved yet")
        for data in (b"one", b"\x00two" * 1000):
            await ledger.save("learned", data)
            _require(await ledger.load("learned") == data, "load must give what was saved last")
        entries = await ledger.entries()
        _require(len(entries) == 1 and entries[0].usage is None, "one settled request, its usage unknown")
        for bad in (Decimal("-1"), Decimal("NaN")):
            try:
                await ledger.reserve(replace(hold, amount=bad, limits=()))
            except InputError:
                continue
            raise AssertionError(f"a reservation of {bad} was accepted")
    finally:
        await ledger.aclose()
        await ledger.aclose()
