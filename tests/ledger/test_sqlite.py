"""The SQLite ledger: the contract, other processes, and every way a file can fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import anyio
import pytest
from tests.ledger.contract import NOON, Clock, FullLedger, LedgerContract, figures, hold, limit, spent

from cachespec.errors import BudgetExceededError, LedgerError
from cachespec.ledger.sqlite import SqliteLedger

WORKER = """
import sys, anyio
from decimal import Decimal
from cachespec.errors import BudgetExceededError
from cachespec.ledger.base import Hold, Limit, Settlement
from cachespec.ledger.sqlite import SqliteLedger

async def main(path, count, lease):
    ledger, passed = SqliteLedger(path, busy_s=60), []
    budget = Limit(scope="all", account="all", limit=Decimal("1.00"))
    hold = Hold(amount=Decimal("0.10"), backend="b", model="m", tenant=None, session_id=None, limits=(budget,), lease_s=lease)

    async def one():
        try:
            passed.append(await ledger.reserve(hold))
        except BudgetExceededError:
            pass

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(one)
    print(len(passed), flush=True)
    for line in sys.stdin:
        if line.strip() == "settle":
            cost = Settlement(amount=Decimal("0.05"), estimated=False, usage=None, outcome="completed")
            await ledger.settle(passed.pop(), cost)
            print("settled", flush=True)

anyio.run(main, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
"""


class TestSqliteLedger(LedgerContract):
    def make(self, folder: Path, clock: Clock) -> FullLedger:
        return SqliteLedger(str(folder / "ledger.db"), clock=clock)


@contextmanager
def worker(path: Path, count: int, lease_s: float = 600.0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER, str(path), str(count), str(lease_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return told(process)


# -- processes ----------------------------------------------------------------------------------------------------------


def test_four_processes_never_pass_a_limit(tmp_path: Path) -> None:
    """D1: fifty parallel reservations of $0.10 in each of four processes under a limit of $1.00: ten pass."""
    path = tmp_path / "ledger.db"  # made by whoever comes first
    with worker(path, 50) as a, worker(path, 50) as b, worker(path, 50) as c, worker(path, 50) as d:
        assert sum(int(told(process)) for process in (a, b, c, d)) == 10


@pytest.mark.anyio
async def test_a_killed_process_frees_its_room_after_the_lease_and_loses_no_spending(tmp_path: Path) -> None:
    """D3."""
    path, budget = tmp_path / "ledger.db", limit("1")
    clock = Clock(time.time())
    with worker(path, 10, lease_s=30) as process:
        assert told(process) == "10"
        assert tell(process, "settle") == "settled"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    ledger = SqliteLedger(str(path), clock=clock)
    assert figures(await ledger.refresh([budget])) == [("0.05", "0.9")]
    with pytest.raises(BudgetExceededError):
        await ledger.reserve(hold("0.5", budget))
    clock.now += 600
    await ledger.reserve(hold("0.95", budget))
    assert (await ledger.totals()).amount == Decimal("0.05")
    await ledger.aclose()


@pytest.mark.anyio
async def test_two_ledgers_on_one_file_see_each_other(tmp_path: Path) -> None:
    budget = limit("1")
    one, two = (SqliteLedger(str(tmp_path / "ledger.db")) for _ in range(2))
    reservation = await one.reserve(hold("0.6", budget))
    with pytest.raises(BudgetExceededError):
        await two.reserve(hold("0.6", budget))
    await two.settle(reservation, spent("0.2"))  # whoever it is that learns what it cost
    await one.settle(reservation, spent("0.2"))
    assert figures(await one.refresh([budget])) == [("0.2", "0")]
    assert await one.secret("salt") == await two.secret("salt")
    await one.aclose()
    assert (await two.totals()).requests == 1
    await two.aclose()


# -- cancellation -------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Another program writes for a while."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(seconds, lambda: other.execute("ROLLBACK"))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        other.close()


@pytest.mark.anyio
async def test_cancelled_while_another_process_holds_the_lock(tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger.db", limit("1")
    ledger = SqliteLedger(str(path))
    await ledger.refresh([budget])
    with locked(path, 0.2), anyio.move_on_after(0.05) as scope:
        await ledger.reserve(hold("1", budget))
    assert scope.cancelled_caught
    assert figures(await ledger.refresh([budget])) == [("0", "0")]
    await ledger.reserve(hold("1", budget))
    await ledger.aclose()


def test_a_task_cancelled_by_asyncio_itself_leaves_no_reservation(tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger.db", limit("10")

    async def main() -> None:
        ledger = SqliteLedger(str(path))
        await ledger.refresh([budget])
        with locked(path, 0.2):
            tasks = [asyncio.create_task(ledger.reserve(hold("1", budget))) for _ in range(3)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        assert figures(await ledger.refresh([budget])) == [("0", "0")]
        await ledger.aclose()

    asyncio.run(main())


def natively(path: Path, work: Callable[[SqliteLedger, str], Coroutine[object, object, object]], cancels: int) -> SqliteLedger:
    """A ledger whose call was cancelled by asyncio itself while it waited for another process; closed at once after it."""
    budget, ledger = limit("1"), SqliteLedger(str(path))

    async def main() -> None:
        reservation = await ledger.reserve(hold("0.5", budget))
        with locked(path, 0.2):
            task = asyncio.create_task(work(ledger, reservation))
            await asyncio.sleep(0.03)
            for _ in range(cancels):
                task.cancel()
                await asyncio.sleep(0.01)
            assert task.cancelled()
            await ledger.aclose()

    asyncio.run(main())
    return SqliteLedger(str(path))


@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize(
    ("work", "figure", "requests"),
    [
        (lambda ledger, held: ledger.settle(held, spent("0.1")), ("0.1", "0"), 1),
        (lambda ledger, held: ledger.release(held), ("0", "0"), 0),
        (lambda ledger, _: ledger.reserve(hold("0.25", limit("1"))), ("0", "0.5"), 0),
    ],
    ids=["settle", "release", "reserve"],
)
def test_what_asyncio_cancels_is_done_all_the_same(
    tmp_path: Path,
    work: Callable[[SqliteLedger, str], Coroutine[object, object, object]],
    figure: tuple[str, str],
    requests: int,
    cancels: int,
) -> None:
    """`task.cancel()`, `asyncio.timeout` and `TaskGroup` pass through every shield; nothing is lost, nothing stays reserved."""
    ledger = natively(tmp_path / "ledger.db", work, cancels)

    async def look() -> None:
        assert figures(await ledger.refresh([limit("1")])) == [figure]
        assert (await ledger.totals()).requests == requests
        await ledger.aclose()

    anyio.run(look)


def test_a_settlement_before_its_turn_is_not_lost(tmp_path: Path) -> None:
    """Cancelled before the writer got to it, and again while the ledger closes."""
    path = tmp_path / "ledger.db"

    async def main() -> None:
        ledger = SqliteLedger(str(path))
        held = [await ledger.reserve(hold("0.1", limit("1"))) for _ in range(5)]
        with locked(path, 0.2):
            tasks = [asyncio.create_task(ledger.settle(one, spent("0.1"))) for one in held]
            await asyncio.sleep(0)  # each is queued, and waits
            for task in tasks:
                task.cancel()
            closing_ = asyncio.create_task(ledger.aclose())
            await asyncio.sleep(0.02)
            closing_.cancel()
            results = await asyncio.gather(*tasks, closing_, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        with pytest.raises(LedgerError, match="closed"):
            await ledger.settle(held[0], spent("0.1"))
        await ledger.aclose()

    asyncio.run(main())
    assert anyio.run(SqliteLedger(str(path)).totals).requests == 5


def test_a_settlement_that_fails_unwatched_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ledger.db"

    async def main() -> None:
        ledger = SqliteLedger(str(path), busy_s=0.05)
        held = await ledger.reserve(hold("0.1"))
        with locked(path, 0.3):
            task = asyncio.create_task(ledger.settle(held, spent("0.1")))
            await asyncio.sleep(0.01)
            task.cancel()
            await ledger.aclose()

    asyncio.run(main())
    assert "database is locked" in caplog.text


@pytest.mark.anyio
async def test_closing_leaves_no_thread(tmp_path: Path) -> None:
    ledger = SqliteLedger(str(tmp_path / "ledger.db"))
    await ledger.totals()
    assert [t for t in threading.enumerate() if t.name.startswith("cachespec-ledger")]
    await ledger.aclose()
    assert not [t for t in threading.enumerate() if t.name.startswith("cachespec-ledger")]


# -- a file that fails --------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_missing_folder(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "ledger.db"
    ledger = SqliteLedger(str(path))
    with pytest.raises(LedgerError, match=f"{path}: .*No such file or directory"):
        await ledger.reserve(hold("1"))
    assert not path.parent.exists()
    await ledger.aclose()


@pytest.mark.anyio
async def test_a_folder_in_its_place(tmp_path: Path) -> None:
    ledger = SqliteLedger(str(tmp_path))
    with pytest.raises(LedgerError, match=str(tmp_path)):
        await ledger.totals()
    await ledger.aclose()


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE theirs (x)")
        db.commit()


def newer(path: Path) -> None:
    async def make() -> None:
        ledger = SqliteLedger(str(path))
        await ledger.totals()
        await ledger.aclose()  # or the file would still change when it is collected

    anyio.run(make)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: path.write_bytes(b"my diary, not yours " * 200), "not a database"),
        (foreign, "not a cachespec ledger"),
        (newer, "schema version 99"),
    ],
    ids=["no database", "another program's", "a newer version's"],
)
def test_a_file_that_is_not_ours_is_refused_and_left_alone(
    tmp_path: Path, prepare: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "ledger.db"
    prepare(path)
    before = path.read_bytes()

    async def main() -> None:
        ledger = SqliteLedger(str(path))
        with pytest.raises(LedgerError, match=says) as caught:
            await ledger.reserve(hold("1"))
        assert str(path) in str(caught.value)
        await ledger.aclose()

    anyio.run(main)
    assert path.read_bytes() == before


@pytest.mark.anyio
async def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger(str(path))
    await ledger.settle(await ledger.reserve(hold("1")), spent("1"))
    await ledger.aclose()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    ledger = SqliteLedger(str(path))
    with pytest.raises(LedgerError, match="malformed"):
        await ledger.totals()
    await ledger.aclose()


@pytest.mark.parametrize(
    ("break_", "mend", "says"),
    [
        ("PRAGMA max_page_count = 1", "PRAGMA max_page_count = 1000000", "full"),
        ("PRAGMA query_only = ON", "PRAGMA query_only = OFF", "readonly"),
    ],
    ids=["disk full", "read-only"],
)
@pytest.mark.anyio
async def test_a_settlement_that_cannot_be_written_is_not_lost(tmp_path: Path, break_: str, mend: str, says: str) -> None:
    budget = limit("1")
    ledger = SqliteLedger(str(tmp_path / "ledger.db"))
    reservation = await ledger.reserve(hold("0.5", budget))
    assert ledger._connection is not None
    filler = spent("0.1", outcome="x" * 20_000)  # more than the free room of a page
    ledger._connection.execute(break_)
    with pytest.raises(LedgerError, match=f"ledger.db: .*{says}"):
        await ledger.settle(reservation, filler)
    assert figures(ledger.snapshot([budget])) == [("0", "0.5")]
    ledger._connection.execute(mend)
    assert figures(await ledger.refresh([budget])) == [("0", "0.5")]
    await ledger.settle(reservation, filler)
    assert figures(await ledger.refresh([budget])) == [("0.1", "0")]
    await ledger.aclose()


@pytest.mark.anyio
async def test_a_file_locked_for_too_long(tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger.db", limit("1")
    ledger = SqliteLedger(str(path), busy_s=0.05)
    reservation = await ledger.reserve(hold("0.5", budget))
    with locked(path, 0.4):
        with pytest.raises(LedgerError, match="locked"):
            await ledger.settle(reservation, spent("0.1"))
        with pytest.raises(LedgerError, match="locked"):
            await ledger.reserve(hold("0.1", budget))
        assert (await ledger.totals()).requests == 0  # reading needs no lock
    await ledger.settle(reservation, spent("0.1"))
    assert figures(await ledger.refresh([budget])) == [("0.1", "0")]
    await ledger.aclose()


@pytest.mark.anyio
async def test_a_new_file_that_another_process_is_making(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger(str(path))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        impatient = SqliteLedger(str(path), busy_s=0.02)
        with pytest.raises(LedgerError, match="locked"):
            await impatient.totals()
        await impatient.aclose()
    with locked(path, 0.1):
        assert (await ledger.totals()).requests == 0
    await ledger.aclose()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
@pytest.mark.anyio
async def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.touch(mode=0o000)
    ledger = SqliteLedger(str(path))
    with pytest.raises(LedgerError, match="unable to open"):
        await ledger.reserve(hold("1"))
    await ledger.aclose()


# -- the file itself ----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_it_lasts(tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger.db", limit("1")
    first = SqliteLedger(str(path))
    salt = await first.secret("salt")
    await first.settle(await first.reserve(hold("0.5", budget)), spent("0.4"))
    open_ = await first.reserve(hold("0.1", budget))
    await first.aclose()
    second = SqliteLedger(str(path), durable=True)
    assert await second.secret("salt") == salt
    assert figures(second.snapshot([budget])) == [("0", "0")]  # nothing read yet
    assert figures(await second.refresh([budget])) == [("0.4", "0.1")]
    await second.settle(open_, spent("0.1"))
    assert [str(e.amount) for e in await second.entries()] == ["0.1", "0.4"]
    await second.aclose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it holds a secret
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.db"]


@pytest.mark.anyio
async def test_nothing_is_opened_before_it_is_needed(tmp_path: Path) -> None:
    ledger = SqliteLedger(str(tmp_path / "ledger.db"))
    assert figures(ledger.snapshot([limit("1")])) == [("0", "0")]
    await ledger.aclose()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.anyio
async def test_what_nobody_asks_for_is_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    ledger = SqliteLedger(str(tmp_path / "ledger.db"), clock=clock)
    for day in range(30):
        clock.now = NOON.timestamp() + 86_400 * day
        budget = limit("9", since=NOON + timedelta(days=day))
        await ledger.reserve(hold("1", budget, lease_s=1))
    clock.now += 86_400 * 31
    ledger._writes = 0  # the sweep's turn
    reservation = await ledger.reserve(hold("1", limit("9"), lease_s=1))
    assert ledger._connection is not None
    tables = "SELECT (SELECT COUNT(*) FROM holds), (SELECT COUNT(*) FROM reservations), (SELECT COUNT(*) FROM counters)"
    assert ledger._connection.execute(tables).fetchone() == (1, 1, 1)
    await ledger.settle(reservation, spent("1"))
    await ledger.aclose()


@pytest.mark.anyio
async def test_counters_of_windows_that_ended_go_and_what_is_shown_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachespec.ledger.sqlite._ACCOUNTS", 50)
    clock = Clock()
    ledger = SqliteLedger(str(tmp_path / "ledger.db"), clock=clock)
    day, total = limit("99", since=NOON - timedelta(hours=12)), limit("999")
    for minute in range(100):
        now = limit("1", since=NOON + timedelta(minutes=minute))
        await ledger.settle(await ledger.reserve(hold("0.2", total, day, now)), spent("0.1"))
        clock.now += 60
    assert ledger._connection is not None
    count = "SELECT COUNT(*) FROM counters WHERE account = 'all'"
    assert ledger._connection.execute(count).fetchone()[0] < 10
    made = "SELECT used FROM counters WHERE account = 'all' AND since = 0"
    assert ledger._connection.execute(made).fetchone()[0] > (clock.now - 180) * 1_000_000  # kept, and known to be in use
    sessions = [limit("1", account=f"session:{i}") for i in range(200)]
    for session in sessions:
        await ledger.settle(await ledger.reserve(hold("0.2", session)), spent("0.1"))
    assert len(ledger._known) == 50
    assert figures(await ledger.refresh(sessions)) == [("0.1", "0")] * 200
    assert len(ledger._known) == 50
    with pytest.raises(BudgetExceededError):
        await ledger.reserve(hold("0.95", sessions[0]))
    assert figures(ledger.snapshot(sessions[:1])) == [("0.1", "0")]
    await ledger.aclose()


def test_one_ledger_in_several_event_loops(tmp_path: Path) -> None:
    ledger = SqliteLedger(str(tmp_path / "ledger.db"))
    for backend in ("asyncio", "trio", "asyncio"):
        anyio.run(ledger.reserve, hold("1", limit("9")), backend=backend)
    assert figures(anyio.run(ledger.refresh, [limit("9")])) == [("0", "3")]
    anyio.run(ledger.aclose)


@pytest.mark.anyio
async def test_a_reservation_and_its_settlement_are_quick(tmp_path: Path) -> None:
    ledger, budget, best = SqliteLedger(str(tmp_path / "ledger.db")), limit("100000"), []
    for _ in range(200):
        start = time.perf_counter()
        await ledger.settle(await ledger.reserve(hold("1", budget, accounts=("t",))), spent("1"))
        best.append(time.perf_counter() - start)
    assert sorted(best)[20] < 0.02  # about half a millisecond on an idle machine
    await ledger.aclose()
