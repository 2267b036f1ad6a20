"""Over any interleaving: spent + reserved stays within the limit, and both ledgers say the same."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.ledger.contract import Clock, hold, spent

from cachespec.errors import BudgetExceededError, LedgerError
from cachespec.ledger.base import Limit
from cachespec.ledger.memory import MemoryLedger
from cachespec.ledger.sqlite import SqliteLedger
from cachespec.usage import Usage

DAY = 86_400.0
Held = tuple[str, str, Decimal, float]  # the id in either ledger, the amount, when the lease ends
CENTS = st.integers(0, 60).map(lambda n: f"{n / 100:.2f}")
WHO = st.sampled_from([None, "acme", "zeta"])


class Ledgers(RuleBasedStateMachine):
    reservations: Bundle[Held] = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.portal = self.stack.enter_context(start_blocking_portal())
        self.clock = Clock()
        self.memory = MemoryLedger(clock=self.clock)
        self.sqlite = SqliteLedger(str(Path(folder) / "ledger.db"), clock=self.clock)
        self.late = False  # something was settled after its lease: recorded, however full the budget is by then

    def limits(self, tenant: str | None) -> tuple[Limit, ...]:
        today = datetime.fromtimestamp(self.clock.now // DAY * DAY, UTC)
        return (
            Limit(scope="all per day", account="all", limit=Decimal("1.00"), since=today),
            Limit(scope="tenant", account=str(tenant), limit=Decimal("1.50")),
        )

    def both(self, method: str, *args: Any) -> tuple[Any, Any]:
        """The same call on both; an error is its type and, for a refusal, its text."""
        results: list[Any] = []
        for ledger in (self.memory, self.sqlite):
            try:
                results.append(self.portal.call(getattr(ledger, method), *args))
            except BudgetExceededError as error:
                results.append((type(error), str(error)))
        return results[0], results[1]

    @rule(target=reservations, amount=CENTS, tenant=WHO, lease=st.sampled_from([5.0, 600.0]))
    def reserve(self, amount: str, tenant: str | None, lease: float) -> Held:
        wanted = hold(amount, *self.limits(tenant), tenant=tenant, lease_s=lease)
        a, b = self.both("reserve", wanted)
        assert isinstance(a, str) == isinstance(b, str), (a, b)
        if isinstance(a, str):
            return a, b, wanted.amount, self.clock.now + lease
        assert a == b
        return "refused", "refused", Decimal(0), 0.0

    @rule(which=reservations, share=st.integers(0, 4), priced=st.booleans())
    def settle(self, which: Held, share: int, priced: bool) -> None:
        self.late |= which[3] <= self.clock.now
        amount = str(which[2] * share / 4) if priced else None
        usage = Usage(uncached=share, cache_read=None, cache_write={"5m": 2}, output=1) if share else None
        self.each("settle", which, spent(amount, usage=usage, estimated=share == 3))

    @rule(which=consumes(reservations))
    def release(self, which: Held) -> None:
        self.each("release", which)

    def each(self, method: str, which: Held, *args: Any) -> None:
        """The same call on both, each with its own id."""
        results: list[Any] = []
        for ledger, name in ((self.memory, which[0]), (self.sqlite, which[1])):
            try:
                results.append(self.portal.call(getattr(ledger, method), name, *args))
            except LedgerError as error:
                results.append(type(error))
        assert results[0] == results[1]

    @rule(tenant=WHO)
    def reset(self, tenant: str | None) -> None:
        self.both("reset", self.limits(tenant)[1:])

    @rule(seconds=st.sampled_from([1.0, 10.0, 700.0, DAY]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def both_say_the_same_and_stay_within(self) -> None:
        self.portal.call(self.compare)

    async def compare(self) -> None:
        limits = [limit for tenant in (None, "acme", "zeta") for limit in self.limits(tenant)]
        a, b = await self.memory.refresh(limits), await self.sqlite.refresh(limits)
        assert a == b
        assert tuple(a) == self.sqlite.snapshot(limits)
        assert await self.memory.totals() == await self.sqlite.totals()
        assert await self.memory.entries() == await self.sqlite.entries()
        assert await self.memory.accounts() == await self.sqlite.accounts()
        for state in a:
            assert self.late or state.spent + state.reserved <= state.limit

    def teardown(self) -> None:
        self.portal.call(self.sqlite.aclose)
        self.stack.close()


TestLedgers = pytest.mark.timeout(600)(Ledgers.TestCase)
TestLedgers.settings = settings(max_examples=1000, stateful_step_count=10, deadline=None)
