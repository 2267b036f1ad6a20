"""What every ledger does. A ledger's own tests subclass `LedgerContract` and say how to make one."""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import anyio
import pytest

from cachespec.decision import BudgetState
from cachespec.errors import BudgetExceededError, InputError, LedgerError
from cachespec.ledger.base import MOST_USD, Hold, Ledger, Limit, Settlement
from cachespec.usage import MOST_TOKENS, Usage

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


@dataclass
class Clock:
    """Time that passes only when told to."""

    now: float = NOON.timestamp()

    def __call__(self) -> float:
        return self.now


class FullLedger(Ledger, Protocol):
    """The contract, and what both of our own ledgers offer besides."""

    async def refresh(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]: ...

    async def secret(self, name: str) -> bytes: ...


def limit(amount: str, *, account: str = "all", since: datetime | None = None, resets_at: datetime | None = None) -> Limit:
    return Limit(scope=f"{account} budget", account=account, limit=Decimal(amount), since=since, resets_at=resets_at)


def hold(
    amount: str, *limits: Limit, tenant: str | None = "acme", accounts: tuple[str, ...] = (), lease_s: float = 600.0
) -> Hold:
    return Hold(
        amount=Decimal(amount),
        backend="claude",
        model="claude-sonnet-5-5",
        tenant=tenant,
        session_id="s1",
        tags=("a", "b"),
        accounts=accounts,
        limits=limits,
        lease_s=lease_s,
    )


def spent(amount: str | None, *, usage: Usage | None = None, estimated: bool = False, outcome: str = "completed") -> Settlement:
    return Settlement(
        amount=None if amount is None else Decimal(amount),
        estimated=estimated,
        usage=usage,
        outcome=outcome,
        request_id="req_1",
        price_source="override",
    )


def figures(states: Sequence[BudgetState]) -> list[tuple[str, str]]:
    return [(str(s.spent), str(s.reserved)) for s in states]


class LedgerContract:
    """Subclass it and implement `make`."""

    def make(self, folder: Path, clock: Clock) -> FullLedger:
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def ledger(self, tmp_path: Path, clock: Clock) -> FullLedger:
        return self.make(tmp_path, clock)

    @pytest.mark.anyio
    async def test_a_reservation_becomes_what_was_spent(self, ledger: FullLedger) -> None:
        budget = limit("1")
        first = await ledger.reserve(hold("0.6", budget))
        assert figures(ledger.snapshot([budget])) == [("0", "0.6")]
        with pytest.raises(BudgetExceededError) as caught:
            await ledger.reserve(hold("0.400000000001", budget))
        error = caught.value
        assert (error.scope, str(error.limit), str(error.spent), str(error.reserved)) == ("all budget", "1", "0", "0.6")
        assert str(error.requested) == "0.400000000001"
        await ledger.settle(first, spent("0.25"))
        assert figures(ledger.snapshot([budget])) == [("0.25", "0")]
        await ledger.reserve(hold("0.75", budget))  # to the last picodollar
        assert figures(ledger.snapshot([budget])) == [("0.25", "0.75")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_window_that_is_reset_begins_at_nothing_and_no_other_does(self, ledger: FullLedger, clock: Clock) -> None:
        total, today = limit("1"), limit("1", since=NOON - timedelta(hours=12))
        other = limit("1", account="tenant:acme")
        reservation = await ledger.reserve(hold("0.6", total, accounts=("all", "tenant:acme")))
        await ledger.settle(reservation, spent("0.6"))
        await ledger.reserve(hold("0.3", total, accounts=("all", "tenant:acme")))
        await ledger.reset([today])
        assert figures(ledger.snapshot([today])) == [("0", "0.3")]
        assert figures(await ledger.refresh([total, today, other])) == [("0.6", "0.3"), ("0", "0.3"), ("0.6", "0.3")]
        assert (await ledger.totals()).amount == Decimal("0.6")
        clock.now += 5 * 86_400  # counters of windows not used for days are made anew from the single amounts
        await ledger.refresh([limit("1", since=NOON)])
        assert figures(await ledger.refresh([today])) == [("0", "0")]
        settled = await ledger.reserve(hold("0.2", today, accounts=("all",)))
        await ledger.settle(settled, spent("0.2"))
        await ledger.reset([today])
        assert figures(await ledger.refresh([total, today])) == [("0.8", "0"), ("0", "0")]
        assert await ledger.accounts() == ("all", "tenant:acme")
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_clock_that_leapt_ahead_and_was_set_back_fills_no_window_to_come(
        self, ledger: FullLedger, clock: Clock
    ) -> None:
        """Only what was recorded at the wrong time itself counts until then: what comes after it counts when it came."""
        year = 365 * 86_400
        clock.now += year
        await ledger.settle(await ledger.reserve(hold("1", accounts=("all",))), spent("0.1"))
        clock.now -= year
        for day in range(4):
            today = limit("1", since=NOON + timedelta(days=day), resets_at=NOON + timedelta(days=day + 1))
            for _ in range(2):
                await ledger.settle(await ledger.reserve(hold("0.4", today)), spent("0.4"))
            assert figures(await ledger.refresh([today])) == [("0.9", "0")]
            clock.now += 86_400
        assert figures(await ledger.refresh([limit("9"), limit("1", since=NOON + timedelta(days=4))])) == [
            ("3.3", "0"),
            ("0.1", "0"),
        ]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_short_windows_come_and_go_and_long_ones_stay_right(self, ledger: FullLedger, clock: Clock) -> None:
        hour = limit("99", since=NOON - timedelta(hours=1))
        reset = limit("99", since=NOON + timedelta(minutes=2))
        for minute in range(200):
            now = limit("1", since=NOON + timedelta(minutes=minute))
            for _ in range(2):
                await ledger.settle(await ledger.reserve(hold("0.2", limit("999"), hour, now)), spent("0.1"))
            assert figures(ledger.snapshot([now, hour, limit("999")])) == [
                ("0.2", "0"),
                *[(str(Decimal(2 * minute + 2) / 10), "0")] * 2,
            ]
            if minute == 2:
                await ledger.reset([reset])
            clock.now += 60
        asked = [limit("9", since=NOON + timedelta(minutes=m)) for m in (0, 2, 190, 300)]
        assert figures(await ledger.refresh(asked)) == [("40", "0"), ("39.4", "0"), ("2", "0"), ("0", "0")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_settling_is_done_once(self, ledger: FullLedger) -> None:
        budget = limit("1")
        reservation = await ledger.reserve(hold("0.5", budget))
        await ledger.settle(reservation, spent("0.1"))
        await ledger.settle(reservation, spent("0.4"))
        await ledger.release(reservation)
        assert figures(await ledger.refresh([budget])) == [("0.1", "0")]
        assert (await ledger.totals()).requests == 1
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_releasing_frees_and_spends_nothing(self, ledger: FullLedger) -> None:
        budget = limit("1")
        reservation = await ledger.reserve(hold("1", budget))
        await ledger.release(reservation)
        await ledger.release(reservation)
        await ledger.release("never")
        await ledger.reserve(hold("1", budget))
        assert (await ledger.totals()).requests == 0
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_settling_what_never_was_is_an_error(self, ledger: FullLedger) -> None:
        with pytest.raises(LedgerError, match="unknown reservation never"):
            await ledger.settle("never", spent("1"))
        reservation = await ledger.reserve(hold("1"))
        await ledger.release(reservation)
        with pytest.raises(LedgerError):
            await ledger.settle(reservation, spent("1"))
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_refusal_by_one_limit_reserves_on_none(self, ledger: FullLedger) -> None:
        wide, narrow = limit("10", account="all"), limit("1", account="tenant:acme")
        with pytest.raises(BudgetExceededError) as caught:
            await ledger.reserve(hold("2", wide, narrow))
        assert caught.value.scope == "tenant:acme budget"
        assert figures(await ledger.refresh([wide, narrow])) == [("0", "0"), ("0", "0")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_accounts_without_a_limit_are_counted_too(self, ledger: FullLedger) -> None:
        reservation = await ledger.reserve(hold("2", accounts=("all", "tenant:acme")))
        await ledger.settle(reservation, spent("0.5"))
        later = limit("1", account="tenant:acme")  # a limit that a reload brought
        assert figures(await ledger.refresh([later])) == [("0.5", "0")]
        with pytest.raises(BudgetExceededError):
            await ledger.reserve(hold("0.6", later))
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_changed_limit_meets_the_same_counter(self, ledger: FullLedger) -> None:
        reservation = await ledger.reserve(hold("1", limit("1")))
        await ledger.settle(reservation, spent("1"))
        with pytest.raises(BudgetExceededError):
            await ledger.reserve(hold("1", limit("1.5")))
        await ledger.reserve(hold("1", limit("2")))
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_window_counts_from_its_start(self, ledger: FullLedger, clock: Clock) -> None:
        today = NOON.replace(hour=0)
        tomorrow = today + timedelta(days=1)
        daily, monthly = limit("1", since=today, resets_at=tomorrow), limit("10", since=today.replace(day=1))
        reservation = await ledger.reserve(hold("1", daily, monthly))
        await ledger.settle(reservation, spent("0.9"))
        with pytest.raises(BudgetExceededError) as caught:
            await ledger.reserve(hold("0.2", daily, monthly))
        assert caught.value.resets_at == tomorrow
        clock.now = tomorrow.timestamp() + 1
        next_daily = limit("1", since=tomorrow)
        reservation = await ledger.reserve(hold("1", next_daily, monthly))
        assert figures(ledger.snapshot([next_daily, monthly])) == [("0", "1"), ("0.9", "1")]
        await ledger.settle(reservation, spent("0.3"))
        assert figures(ledger.snapshot([next_daily, monthly])) == [("0.3", "0"), ("1.2", "0")]
        assert figures(await ledger.refresh([daily])) == [("1.2", "0")]  # since the day before, as asked
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_lease_that_ran_out_frees_its_room_and_can_still_be_settled(self, ledger: FullLedger, clock: Clock) -> None:
        budget = limit("1")
        dead = await ledger.reserve(hold("1", budget, lease_s=30))
        clock.now += 29
        with pytest.raises(BudgetExceededError):
            await ledger.reserve(hold("0.1", budget))
        clock.now += 2
        await ledger.reserve(hold("0.1", budget))
        await ledger.settle(dead, spent("0.7"))  # it was only slow: what it spent is not lost
        assert figures(await ledger.refresh([budget])) == [("0.7", "0.1")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_lease_that_is_renewed_holds_on(self, ledger: FullLedger, clock: Clock) -> None:
        budget, mine = limit("1"), hold("0.8", limit("1"), lease_s=30, accounts=("tenant:acme",))
        running = await ledger.reserve(mine)
        for _ in range(5):
            clock.now += 20
            await ledger.renew(running, mine)
        with pytest.raises(BudgetExceededError) as caught:
            await ledger.reserve(hold("0.3", budget))
        assert str(caught.value.reserved) == "0.8"
        assert await ledger.accounts() == ("all", "tenant:acme")
        await ledger.renew(running, hold("0.8", budget, lease_s=1))  # never shorter
        clock.now += 25
        assert figures(await ledger.refresh([budget])) == [("0", "0.8")]
        await ledger.settle(running, spent("0.7"))
        await ledger.renew(running, mine)
        await ledger.renew("never", mine)
        assert figures(await ledger.refresh([budget])) == [("0.7", "0")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_lease_that_ran_out_is_taken_up_again_whatever_was_reserved_meanwhile(
        self, ledger: FullLedger, clock: Clock
    ) -> None:
        budget, mine = limit("1"), hold("0.8", limit("1"), lease_s=30)
        slow = await ledger.reserve(mine)
        clock.now += 31
        for _ in range(260):  # enough for what ended to be swept away
            await ledger.release(await ledger.reserve(hold("0.6", budget)))
        other = await ledger.reserve(hold("0.6", budget))
        await ledger.renew(slow, mine)
        assert figures(ledger.snapshot([budget])) == [("0", "1.4")]
        with pytest.raises(BudgetExceededError):
            await ledger.reserve(hold("0.1", budget))
        await ledger.settle(slow, spent("0.2"))
        await ledger.settle(other, spent("0.2"))
        assert figures(await ledger.refresh([budget])) == [("0.4", "0")]
        with pytest.raises(InputError, match="lease_s"):
            await ledger.renew(slow, hold("0.8", budget, lease_s=-1.0))
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_spending_above_the_reservation_is_recorded_as_it_is(self, ledger: FullLedger) -> None:
        budget = limit("1")
        reservation = await ledger.reserve(hold("0.1", budget))
        await ledger.settle(reservation, spent("5"))
        assert figures(await ledger.refresh([budget])) == [("5", "0")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_entries_and_totals(self, ledger: FullLedger, clock: Clock) -> None:
        usage = Usage(uncached=1, cache_read=20, cache_write={"5m": 300, "1h": 1}, output=4, reasoning=2, drafted=9, accepted=7)
        unsaid = Usage(uncached=None, cache_read=None, cache_write=None, output=None)
        for tenant, settlement in (
            ("acme", spent("0.000000000001", usage=usage)),
            (None, spent(None, usage=unsaid, outcome="cancelled")),
            ("zeta", spent("2.5", estimated=True, outcome="left")),
        ):
            await ledger.settle(await ledger.reserve(hold("1", tenant=tenant)), settlement)
            clock.now += 1
        newest, unpriced, oldest = await ledger.entries()
        assert (newest.tenant, newest.amount, newest.estimated, newest.outcome) == ("zeta", Decimal("2.5"), True, "left")
        assert newest.usage is None
        assert (unpriced.tenant, unpriced.amount, unpriced.usage) == (None, None, unsaid)
        assert (oldest.id, oldest.at, oldest.backend, oldest.model) == (1, NOON, "claude", "claude-sonnet-5-5")
        assert (oldest.session_id, oldest.tags, oldest.request_id) == ("s1", ("a", "b"), "req_1")
        assert (oldest.usage, oldest.amount) == (usage, Decimal("1e-12"))
        assert [e.id for e in await ledger.entries(limit=2)] == [3, 2]
        assert await ledger.entries(limit=0) == ()
        assert [e.id for e in await ledger.entries(tenant="acme")] == [1]
        totals = await ledger.totals()
        assert (totals.requests, str(totals.amount), totals.estimated, totals.unpriced) == (3, "2.500000000001", 1, 1)
        assert (totals.uncached, totals.cache_read, totals.cache_write, totals.output) == (1, 20, 301, 4)
        assert (await ledger.totals(tenant="zeta")).amount == Decimal("2.5")
        assert (await ledger.totals(tenant="nobody")).requests == 0
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_bounds_round_up_and_spending_to_the_nearest(self, ledger: FullLedger) -> None:
        budget = limit("1")
        reservation = await ledger.reserve(hold("0.0000000000001", budget))
        assert figures(ledger.snapshot([budget])) == [("0", "1E-12")]
        await ledger.settle(reservation, spent("0.0000000000014"))
        assert figures(ledger.snapshot([budget])) == [("1E-12", "0")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_the_most_that_one_request_can_cost_is_held_exactly(self, ledger: FullLedger) -> None:
        for _ in range(3):
            await ledger.settle(await ledger.reserve(hold(str(MOST_USD))), spent(str(MOST_USD)))
        assert (await ledger.totals()).amount == 3 * MOST_USD
        await ledger.aclose()

    @pytest.mark.parametrize("amount", ["-1", "NaN", "Infinity", "9223373", "9e999999"])
    @pytest.mark.anyio
    async def test_what_is_no_amount_changes_nothing(self, ledger: FullLedger, amount: str) -> None:
        """An answer that cost more than the ledger holds is the ledger's failure, not the caller's."""
        budget = limit("1")
        with pytest.raises(InputError):
            await ledger.reserve(hold(amount, budget))
        reservation = await ledger.reserve(hold("0.5", budget))
        with pytest.raises(LedgerError if amount.startswith("9") else InputError):
            await ledger.settle(reservation, spent(amount))
        assert figures(await ledger.refresh([budget])) == [("0", "0.5")]
        await ledger.aclose()

    @pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e13])
    @pytest.mark.anyio
    async def test_what_is_no_lease_reserves_nothing(self, ledger: FullLedger, seconds: float) -> None:
        with pytest.raises(InputError, match="lease_s"):
            await ledger.reserve(hold("0.5", limit("1"), lease_s=seconds))
        assert figures(await ledger.refresh([limit("1")])) == [("0", "0")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_the_callers_decimal_context_plays_no_part(self, ledger: FullLedger) -> None:
        budget = limit("1000")
        with decimal.localcontext(decimal.Context(prec=2, traps=[decimal.Inexact, decimal.Rounded])):
            reservation = await ledger.reserve(hold("123.456789012345", budget))
            state = (await ledger.refresh([budget]))[0]
            assert (str(state.reserved), str(ledger.snapshot([budget])[0].reserved)) == ("123.456789012345",) * 2
            await ledger.settle(reservation, spent("98.765432109876"))
            with pytest.raises(BudgetExceededError) as caught:
                await ledger.reserve(hold("901.234567890125", budget))
            totals, entries = await ledger.totals(), await ledger.entries()
        assert (str(caught.value.spent), str(caught.value.requested)) == ("98.765432109876", "901.234567890125")
        assert (str(totals.amount), str(entries[0].amount)) == ("98.765432109876", "98.765432109876")
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_limit_beyond_every_amount_lets_pass(self, ledger: FullLedger) -> None:
        await ledger.reserve(hold("9000000", limit("9e999999")))
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_the_largest_counts_are_summed(self, ledger: FullLedger) -> None:
        usage = Usage(
            uncached=MOST_TOKENS, cache_read=1, cache_write={"5m": MOST_TOKENS, "1h": MOST_TOKENS}, output=MOST_TOKENS
        )
        for _ in range(3):
            await ledger.settle(await ledger.reserve(hold("1")), spent("1", usage=usage))
        await ledger.settle(await ledger.reserve(hold("1")), spent("1"))
        totals = await ledger.totals()
        assert (totals.uncached, totals.cache_read, totals.cache_write) == (3 * MOST_TOKENS, 3, 6 * MOST_TOKENS)
        assert (totals.output, totals.requests, totals.uncounted) == (3 * MOST_TOKENS, 4, 1)
        assert (await ledger.entries(limit=10**30))[-1].usage == usage
        await ledger.aclose()

    @pytest.mark.parametrize("most", ["-1", "NaN", "Infinity"])
    @pytest.mark.anyio
    async def test_what_is_no_limit_reserves_nothing(self, ledger: FullLedger, most: str) -> None:
        with pytest.raises(InputError):
            await ledger.reserve(hold("0.5", limit("1"), limit(most, account="other")))
        assert figures(await ledger.refresh([limit("1")])) == [("0", "0")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_sums_beyond_what_one_amount_holds(self, ledger: FullLedger) -> None:
        budget = limit("40000000")
        for _ in range(3):
            await ledger.settle(await ledger.reserve(hold("9000000", budget)), spent("9000000"))
        await ledger.reserve(hold("9000000", budget))
        assert figures(await ledger.refresh([budget])) == [("27000000", "9000000")]
        assert (await ledger.totals()).amount == 27_000_000
        with pytest.raises(BudgetExceededError):
            await ledger.reserve(hold("4000000.000000000001", budget))
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_many_tasks_never_pass_a_limit(self, ledger: FullLedger) -> None:
        budget, passed = limit("1"), []

        async def one(cost: str) -> None:
            try:
                reservation = await ledger.reserve(hold("0.1", budget))
            except BudgetExceededError:
                return
            passed.append(reservation)
            await ledger.settle(reservation, spent(cost))

        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                tasks.start_soon(one, "0.1")
        assert len(passed) == 10
        assert figures(await ledger.refresh([budget])) == [("1", "0")]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_cancelled_caller_leaves_no_reservation(self, ledger: FullLedger) -> None:
        budget, known = limit("1000"), []

        async def one(delay: float) -> None:
            with anyio.move_on_after(delay):
                known.append(await ledger.reserve(hold("1", budget)))

        async with anyio.create_task_group() as tasks:
            for i in range(40):
                tasks.start_soon(one, i / 10_000)
        assert figures(await ledger.refresh([budget])) == [("0", str(len(known)))]
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_a_secret_is_made_once(self, ledger: FullLedger) -> None:
        first = await ledger.secret("tenant-salt")
        assert len(first) == 32
        assert await ledger.secret("tenant-salt") == first
        assert await ledger.secret("other") != first
        await ledger.aclose()

    @pytest.mark.anyio
    async def test_what_is_saved_is_loaded_the_last_one_wins(self, ledger: FullLedger) -> None:
        assert await ledger.load("warmth") is None
        for data in (b"", b"first", bytes(range(256)) * 400):
            await ledger.save("warmth", data)
            assert await ledger.load("warmth") == data
        await ledger.save("other", b"x")
        assert await ledger.load("warmth") == bytes(range(256)) * 400
        await ledger.aclose()
        with pytest.raises(LedgerError, match="closed"):
            await ledger.save("warmth", b"late")

    @pytest.mark.anyio
    async def test_closing_twice_and_writing_after_it(self, ledger: FullLedger) -> None:
        await ledger.aclose()
        await ledger.aclose()
        with pytest.raises(LedgerError, match="closed"):
            await ledger.reserve(hold("1"))
