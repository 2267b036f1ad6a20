"""A client whose backends fail: who is asked next, whose fault it was, and what it may cost."""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal
from typing import Any

import anyio
import pytest

from cachespec.client import Client
from cachespec.errors import (
    AuthenticationError,
    BackendError,
    ConnectionFailedError,
    LedgerError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RequestTimeoutError,
    ServerError,
    StreamInterruptedError,
)
from cachespec.events import ResponseStarted, Retrying, UsageReported
from cachespec.ledger.base import Hold
from cachespec.ledger.memory import MemoryLedger
from cachespec.pricing import hosted_rates
from cachespec.telemetry import AttemptFailed, Decided, Settled
from cachespec.testing import FakeClock, Reply, ScriptedBackend, say
from cachespec.usage import Usage

pytestmark = pytest.mark.anyio


def backend(name: str, script: Any = (), *, price: str = "1", kind: type[ScriptedBackend] = ScriptedBackend) -> Any:
    return kind(script, name=name, rates=hosted_rates(None, name, prices={"input": price, "output": price}))


def client_of(*backends: ScriptedBackend, clock: FakeClock | None = None, **options: Any) -> Client:
    models = {"main": [b.name for b in backends]}
    return Client(backends={b.name: b for b in backends}, models=models, model="main", clock=clock or FakeClock(), **options)


def said(client: Client, name: str) -> str:
    """What a plan says of a backend."""
    offer = next(o for o in client.plan("Hi").candidates if o.backend == name)
    return "; ".join(map(str, offer.reasons))


class Down(ScriptedBackend):
    """Refuses connections while it is down, some time after it was asked; counts who asked."""

    down, asked = True, 0

    async def open(self, request, plan, *, timeout):  # type: ignore[no-untyped-def]
        self.asked += 1
        await anyio.sleep(0.05)
        if self.down:
            raise ConnectionFailedError("refused", backend=self.name)
        return await super().open(request, plan, timeout=timeout)


class SlowLedger(MemoryLedger):
    """Reserves as a file does: others run meanwhile."""

    async def reserve(self, hold: Hold) -> str:
        await anyio.sleep(0.01)
        return await super().reserve(hold)


async def test_of_many_requests_one_probes_a_backend_whose_pause_is_over_and_one_fault_is_one_failure() -> None:
    clock, ill, well = FakeClock(), backend("ill", kind=Down), backend("well", price="50")

    async def many() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(client.complete, "Hi")

    async with client_of(ill, well, clock=clock, ledger=SlowLedger()) as client:
        await many()
        assert said(client, "ill") == "unhealthy: ConnectionFailedError after 1 failure in a row; tried again in 5 s"
        clock.advance(6)
        ill.asked = 0
        await many()
        assert ill.asked == 1
        assert said(client, "ill").endswith("tried again in 10 s")


async def test_a_probe_that_was_decided_and_not_sent_leaves_room_for_the_next() -> None:
    clock, ledger = FakeClock(), SlowLedger()
    ill, well = backend("ill", kind=Down), backend("well", price="50")
    async with client_of(ill, well, clock=clock, ledger=ledger) as client:
        await client.complete("Hi")
        clock.advance(6)
        ill.down = False
        with anyio.move_on_after(0.002) as scope:  # cancelled while the ledger reserves
            await client.complete("Hi")
        assert scope.cancelled_caught
        assert ill.asked == 1
        assert (await client.complete("Hi")).backend == "ill"


def refusing(error: BackendError) -> Reply:
    return Reply(refuse=error)


DOWNGRADE: dict[str, Any] = {"budgets": [{"scope": "overall", "limit": "0.0000001", "mode": "downgrade"}]}


@pytest.mark.parametrize("error", [ServerError("500"), RequestTimeoutError("hangs"), AuthenticationError("401")])
async def test_a_budget_that_downgrades_does_not_keep_a_request_with_a_cheap_backend_that_fails(error: BackendError) -> None:
    cheap, dear, dearer = backend("cheap", refusing(error)), backend("dear", price="50"), backend("dearer", price="90")
    async with client_of(cheap, dearer, dear, policies=DOWNGRADE) as client:
        done = await client.complete("Hi")
        assert done.backend == "dear"  # the cheapest of those that are left
        reasons = {o.backend: [r.code for r in o.reasons] for o in done.decision.candidates}
        assert reasons["cheap"][-1] == "unhealthy"
        assert reasons["dearer"][-1] == "budget"
        assert (len(cheap.requests), len(dear.requests), len(dearer.requests)) == (1, 1, 0)
        for _ in range(3):
            await client.complete("Hi")
        asked = len(cheap.requests)
        assert client.plan("Hi").chosen == "dear"  # its breaker is open: nobody waits for it, budget or not
        assert (await client.complete("Hi")).backend == "dear"
        assert len(cheap.requests) == asked


class Switched(ScriptedBackend):
    """Answers, or fails with `error` while it is set."""

    error: BackendError | None = None
    asked = 0

    async def open(self, request, plan, *, timeout):  # type: ignore[no-untyped-def]
        self.asked += 1
        if self.error is not None:
            raise self.error
        return await super().open(request, plan, timeout=timeout)


@pytest.mark.parametrize("error", [ConnectionFailedError("refused"), AuthenticationError("401"), RateLimitError("429")])
async def test_one_whose_breaker_is_open_is_asked_when_all_others_failed(error: BackendError) -> None:
    first, second = backend("first", kind=Switched), backend("second", price="5", kind=Switched)
    clock = FakeClock()
    async with client_of(first, second, clock=clock) as client:
        first.error = ConnectionFailedError("refused")
        assert (await client.complete("Hi")).backend == "second"
        first.error, second.error = None, error
        clock.advance(1)  # the breaker of the first is open for 4 s more
        done = await client.complete("Hi")
        assert done.backend == "first"
        assert second.asked == 2
        assert clock.sleeps == []


async def test_the_ones_that_failed_are_asked_again_when_nobody_else_is_left() -> None:
    busy = OverloadedError("529")
    first, second = backend("first", [refusing(busy), say("ok")]), backend("second", refusing(busy), price="5")
    async with client_of(first, second, policies=DOWNGRADE) as client:
        assert (await client.complete("Hi")).backend == "first"
    assert (len(first.requests), len(second.requests)) == (2, 1)


async def test_a_pinned_backend_alone_is_not_left_for_another() -> None:
    first, second = backend("first", refusing(ServerError("500"))), backend("second")
    policies = {"routing": {"use": "pinned", "backend": "first", "only": True}}
    async with client_of(first, second, policies=policies) as client:
        with pytest.raises(ServerError) as caught:
            await client.complete("Hi")
    assert len(caught.value.__notes__) == 3
    assert not second.requests


class Waiting(FakeClock):
    """Pauses take their time."""

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(60)


class Stuck(MemoryLedger):
    """Never reserves: others hold the file."""

    async def reserve(self, hold: Hold) -> str:
        await anyio.sleep(60)
        return await super().reserve(hold)


class Loading(ScriptedBackend):
    async def start(self) -> None:
        await anyio.sleep(60)


def told(kind: type[Any], hooked: list[Any]) -> list[Any]:
    return [one for one in hooked if isinstance(one, kind)]


async def test_a_deadline_that_passes_between_two_attempts_is_nobodys_failure() -> None:
    hooked: list[Any] = []
    only = backend("only", refusing(OverloadedError("529", backend="only")))
    async with client_of(only, clock=Waiting(), hooks=[hooked.append], policies={"retries": {"first_delay": 0.01}}) as client:
        with pytest.raises(RequestTimeoutError) as caught:
            await client.complete("Hi", timeout=1.0)
        failed = told(AttemptFailed, hooked)
        assert [(f.attempt, type(f.error), f.next_backend) for f in failed] == [(1, OverloadedError, "only")]
        assert caught.value.backend is None
        assert caught.value.__notes__ == ["earlier: only: OverloadedError: only: 529"]
        assert await client.ledger.entries() == ()
        assert len(only.requests) == 1


@pytest.mark.parametrize("where", ["ledger", "start"])
async def test_a_deadline_that_passes_before_anybody_was_asked_is_nobodys_failure(where: str) -> None:
    hooked: list[Any] = []
    first = backend("first", kind=Loading if where == "start" else ScriptedBackend)
    client = client_of(first, ledger=Stuck() if where == "ledger" else None, hooks=[hooked.append])
    for _ in range(4):
        with pytest.raises(RequestTimeoutError) as caught:
            await client.complete("Hi", timeout=0.05)
        assert caught.value.backend is None
    assert told(AttemptFailed, hooked) == []
    assert client._learned.health.refusal("first", client._clock.time()) is None
    assert client._learned.health.load("first") == 0
    assert first.requests == []
    await client.aclose()


async def test_one_that_a_budget_refuses_was_not_asked_and_is_not_told_as_failed() -> None:
    hooked: list[Any] = []
    dear, cheap = backend("dear", price="1000"), backend("cheap")
    policies = {"routing": {"use": "pinned", "backend": "dear"}, "budgets": [{"scope": "overall", "limit": "0.05"}]}
    client = client_of(dear, cheap, policies=policies, hooks=[hooked.append], max_output_tokens=100)
    async with client, client.stream("Hi") as stream:
        events = [event async for event in stream]
        done = await stream.get_final_completion()
    assert done.backend == "cheap"
    assert dear.requests == []
    assert "budget" in {r.code for o in done.decision.candidates if o.backend == "dear" for r in o.reasons}
    assert [type(one) for one in hooked] == [Decided, Decided, Settled]
    assert told(Retrying, events) == []


async def test_attempts_are_counted_without_those_that_a_budget_refused() -> None:
    hooked: list[Any] = []
    dear, ill, well = backend("dear", price="1000"), backend("ill", refusing(ServerError("500"))), backend("well", price="2")
    policies = {"routing": {"use": "pinned", "backend": "dear"}, "budgets": [{"scope": "overall", "limit": "0.05"}]}
    async with client_of(dear, ill, well, policies=policies, hooks=[hooked.append], max_output_tokens=100) as client:
        assert (await client.complete("Hi")).backend == "well"
    assert [(f.attempt, f.backend) for f in told(AttemptFailed, hooked)] == [(1, "ill")]


async def test_a_ledger_that_fails_is_no_backends_failure() -> None:
    class Broken(MemoryLedger):
        async def reserve(self, hold: Hold) -> str:
            raise LedgerError("disk full")

    hooked: list[Any] = []
    first, second = backend("first"), backend("second")
    async with client_of(first, second, ledger=Broken(), hooks=[hooked.append]) as client:
        with pytest.raises(LedgerError, match="disk full"):
            await client.complete("Hi")
    assert told(AttemptFailed, hooked) == []
    assert first.requests == second.requests == []


COUNTED = Usage(uncached=900, cache_read=0, cache_write={}, output=0)


def cut_before_content(usage: Usage = COUNTED) -> Reply:
    """Accepted and counted, then cut before anything was said."""
    begin = (ResponseStarted(request_id="r", model=None), UsageReported(usage))
    return Reply(batches=(begin,), fail=StreamInterruptedError("cut"))


def of_one_request(limit: str, mode: str = "hard") -> dict[str, Any]:
    return {"budgets": [{"scope": "request", "limit": limit, "mode": mode}]}


@pytest.mark.parametrize(("limit", "asked"), [("1.00", 1), ("1.85", 2), ("2.80", 3)])
async def test_what_earlier_attempts_were_booked_with_counts_against_the_budget_of_their_request(
    limit: str, asked: int
) -> None:
    """Each attempt is booked with 0.90 USD and may cost about 0.91."""
    backends = [backend(name, cut_before_content(), price="1000") for name in ("a", "b", "c")]
    async with client_of(*backends, policies=of_one_request(limit)) as client:
        with pytest.raises(StreamInterruptedError) as caught:
            await client.complete("x" * 880, max_output_tokens=5)
        assert sum(len(b.requests) for b in backends) == asked
        spent = (await client.ledger.totals()).amount
        assert spent == Decimal("0.9") * asked <= Decimal(limit)
        told = [n for n in caught.value.__notes__ if n.startswith("not asked: ")]
        assert len(told) == 3
        assert all(f"limit {limit} USD, spent {spent:f}, " in note for note in told)


async def test_a_soft_budget_of_a_request_tells_what_its_attempts_cost_together() -> None:
    first, second = backend("a", cut_before_content(), price="1000"), backend("b", say("ok", usage=COUNTED), price="1000")
    async with client_of(first, second, policies=of_one_request("1.00", "soft")) as client:
        done = await client.complete("x" * 880, max_output_tokens=5)
    assert any("0.9 spent" in warning for warning in done.warnings)


async def test_a_budget_of_a_request_that_downgrades_leaves_what_is_left_of_it_to_the_cheapest() -> None:
    first = backend("first", cut_before_content(), price="1000")
    dear, cheap = backend("dear", price="1000"), backend("cheap", price="1")
    routing = {"routing": {"use": "pinned", "backend": "first"}}
    async with client_of(first, dear, cheap, policies=routing | of_one_request("1.00", "downgrade")) as client:
        done = await client.complete("x" * 880, max_output_tokens=5)
    assert done.backend == "cheap"
    assert not dear.requests


WRONG = [NotFoundError("no such conversation", status=404), PermissionDeniedError("not yours", status=403)]
IMAGE = {"type": "input_image", "file_id": "file-of-somebody-else"}
NAMING: list[dict[str, Any]] = [
    {"prompt": "Hi", "extra": {"first": {"conversation": "conv_gone"}}},
    {"prompt": "Hi", "extra": {"first": {"model": "no-such-model"}}},
    {"messages": [{"role": "user", "content": [IMAGE]}]},
    {"prompt": "Hi", "tools": [{"type": "file_search", "vector_store_ids": ["vs_gone"]}]},
]


@pytest.mark.parametrize("error", WRONG)
@pytest.mark.parametrize("naming", NAMING)
async def test_what_a_request_names_wrongly_takes_no_backend_out_for_others(
    naming: dict[str, Any], error: BackendError
) -> None:
    first, second = backend("first", refusing(error)), backend("second", price="5")
    async with client_of(first, second) as client:
        for _ in range(5):
            with suppress(type(error)):  # what a vendor keeps does not move
                await client.complete(**naming)
        assert len(first.requests) == 5
        assert client.plan("Hi").chosen == "first"
        await client.complete("Hi")  # of one that names nothing it is the model, or the key
        assert client.plan("Hi").chosen == "second"


async def test_a_spent_account_is_the_backends_whatever_a_request_names() -> None:
    first, second = backend("first", refusing(PermissionDeniedError("quota", status=429))), backend("second", price="5")
    async with client_of(first, second) as client:
        await client.complete("Hi", extra={"first": {"service_tier": "flex"}})
        assert client.plan("Hi").chosen == "second"


async def test_callers_without_patience_take_no_backend_out_for_others() -> None:
    first, second = backend("first", say(*"a" * 200, delay_s=0.02)), backend("second", price="5")
    async with client_of(first, second) as client:
        for _ in range(4):
            with pytest.raises(RequestTimeoutError):
                await client.complete("Hi", timeout=0.005)
        for _ in range(3):
            with pytest.raises(StreamInterruptedError):  # content had come
                await client.complete("Hi", timeout=0.3)
        assert client.plan("Hi").chosen == "first"


@pytest.mark.parametrize("content_first", [True, False])
async def test_readers_that_sleep_past_their_own_deadline_take_no_backend_out(content_first: bool) -> None:
    first, second = backend("first", say("one", "two", delay_s=0.001)), backend("second", price="5")
    async with client_of(first, second) as client:
        for _ in range(3):
            async with client.stream("Hi", timeout=0.25) as stream:
                if content_first:
                    await stream.__anext__()
                await anyio.sleep(0.4)
                with pytest.raises(StreamInterruptedError if content_first else RequestTimeoutError):
                    await stream.until_done()
        assert client.plan("Hi").chosen == "first"


async def test_one_that_hangs_longer_than_it_usually_takes_is_ill() -> None:
    first = backend("first", [*[say("quick")] * 30, say("never", delay_s=60)])
    second = backend("second", price="5")
    async with client_of(first, second) as client:
        for _ in range(30):
            await client.complete("Hi")
        offer = client.plan("Hi").candidates[0]
        assert offer.latency.evidence == "measured"
        assert offer.latency.ttft_high_ms is not None
        for _ in range(3):
            if client.plan("Hi").chosen == "first":
                assert (await client.complete("Hi", timeout=2)).backend == "second"  # asked when half of the time was over
        assert client.plan("Hi").chosen == "second"
