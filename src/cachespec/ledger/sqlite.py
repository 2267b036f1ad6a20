"""A ledger in one SQLite file, shared by any number of tasks, threads and processes of one machine.

- **One atomic step.** A reservation is one ``BEGIN IMMEDIATE`` transaction: SQLite lets one writer in at a time, whatever
  process it is in, so nothing comes between the check of the limits and the reservation.
- **One connection** per ledger, used by one thread of its own, in the order of the calls: a second one could not write in
  parallel anyway, and readers of the same ledger then see their own writes. The event loop never waits for the disk.
- **Cancellation.** A call is queued before it waits, so it is done even if the task that made it is cancelled, in whatever
  way and however often; a reservation whose caller went away is released again.
- **Exact.** Amounts are whole numbers of 1e-12 USD. What an account spent since a window began is kept in a counter that
  every settlement adds to, so a reservation costs the same after a million requests; those of windows that ended go.
- **Crashes.** A process that dies loses nothing that was settled; its reservations free their room when the lease ends,
  and can still be settled afterwards. Write-ahead logging with ``synchronous=NORMAL`` survives a crash of the process;
  after a loss of *power* the last transactions since the log was last synced may be missing, the file stays consistent.
  ``durable=True`` syncs each transaction (a few milliseconds on most disks) and loses none.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio

from cachespec.decision import BudgetState
from cachespec.errors import BudgetExceededError, CachespecError, LedgerError
from cachespec.ledger._amounts import (
    MOST,
    accounts_of,
    from_micros,
    from_units,
    lease_micros,
    limit_units,
    reserved_units,
    spent_units,
    to_micros,
)
from cachespec.ledger._sqlite_file import connect, transaction
from cachespec.ledger._writer import Writer, complain, result_of
from cachespec.ledger.base import Entry, Hold, Limit, Settlement, Totals
from cachespec.usage import Usage

_MINUTE, _DAY = 60_000_000, 86_400_000_000  # microseconds
_CHECKPOINT = 64  # settlements between two syncs of the log, which cost milliseconds: nobody waits for a first token then
_ACCOUNTS, _WINDOWS = 4096, 64  # accounts, and windows of each, looked at last, whose state is kept for `snapshot`
_IDLE = 5 * _MINUTE  # a counter not used for so long, and for longer than it was in use, is of a window that ended
_KEEP_UNSETTLED = 30 * _DAY  # a reservation whose process died may be settled this long after its lease

T = TypeVar("T")


def _halves(column: str) -> str:
    """A sum in two halves, for `_whole`: SQLite's own fails beyond 63 bits."""
    return f"COALESCE(SUM({column} >> 32), 0), COALESCE(SUM({column} & 4294967295), 0)"


def _whole(high: int, low: int) -> int:
    return (high << 32) + low


_SUM = _halves("units")
_NONE: Mapping[int, tuple[int, int]] = {}
_COUNTS = ("uncached", "cache_read", "cache_write", "output")


class SqliteLedger:
    """See `cachespec.ledger.base.Ledger`. The file is opened, and made where it is missing, at the first call.

    Args:
        path: the file; its folder must exist. A missing file is created readable by its owner only.
        durable: sync every transaction to disk (see the module's docstring).
        busy_s: how long to wait for another process's transaction, in seconds, before a LedgerError.
        clock: Unix time in seconds; all processes of one file should agree on it.
    """

    def __init__(
        self, path: str, *, durable: bool = False, busy_s: float = 10.0, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = Path(path).expanduser()
        self._durable, self._busy_s, self._clock = durable, busy_s, clock
        self._writer = Writer()
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._known: OrderedDict[str, OrderedDict[int, tuple[int, int]]] = OrderedDict()  # account, since: spent, reserved
        self._writes = self._settled = 0

    # -- the ledger contract ---------------------------------------------------------------------------------------

    async def reserve(self, hold: Hold) -> str:
        """See `Ledger.reserve`. A cancelled caller leaves no reservation behind."""
        units = reserved_units(hold.amount)
        lease = lease_micros(hold.lease_s)
        limits = [(limit, limit_units(limit.limit)) for limit in hold.limits]
        reservation = secrets.token_hex(16)
        job = self._queue(lambda db: self._reserve(db, reservation, hold, units, lease, limits))
        try:
            await result_of(job)
        except CachespecError:
            raise
        except BaseException:  # the caller went away, cancelled or thrown away
            if not job.cancel():  # begun, or done already: what comes after it in the queue undoes it
                with suppress(LedgerError):  # closing: then the lease frees it
                    self._queue(lambda db: self._release(db, reservation))
            raise
        return reservation

    async def renew(self, reservation: str, hold: Hold) -> None:
        """See `Ledger.renew`. One transaction."""
        units, lease = reserved_units(hold.amount), lease_micros(hold.lease_s)
        await self._run(lambda db: self._renew(db, reservation, hold, units, lease))

    async def settle(self, reservation: str, settlement: Settlement) -> None:
        """See `Ledger.settle`. When it cannot be written the reservation stays, and settling may be tried again."""
        units = spent_units(settlement.amount)
        await self._shielded(lambda db: self._settle(db, reservation, settlement, units))

    async def release(self, reservation: str) -> None:
        """See `Ledger.release`."""
        await self._shielded(lambda db: self._release(db, reservation))

    def snapshot(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """See `Ledger.snapshot`: as of this process's last reserve, settle, release or `refresh` of these accounts.

        A limit never seen, or not for thousands of accounts, counts as unspent; `refresh` reads it.
        """
        windows = [self._known.get(limit.account) or _NONE for limit in limits]
        return tuple(_state(x, *known.get(to_micros(x.since), (0, 0))) for x, known in zip(limits, windows, strict=True))

    async def refresh(self, limits: Sequence[Limit]) -> tuple[BudgetState, ...]:
        """Read the state of these limits, other processes' spending included; `snapshot` returns it from then on."""

        def work(db: sqlite3.Connection) -> tuple[BudgetState, ...]:
            with transaction(db):
                return tuple(_state(limit, *self._look(db, limit.account, to_micros(limit.since))) for limit in limits)

        return await self._run(work)

    async def reset(self, limits: Sequence[Limit]) -> None:
        """See `Ledger.reset`. One transaction for all of them."""

        def work(db: sqlite3.Connection) -> None:
            with transaction(db):
                for limit in limits:
                    account, since = limit.account, to_micros(limit.since)
                    spent, reserved = self._look(db, account, since)
                    key = _forgiven_key(account, since)
                    total = spent + self._forgiven(db, account, since)
                    # Kept beside the counter, which is made anew from the single amounts when it was not used for long.
                    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, str(total)))
                    db.execute("UPDATE counters SET units = '0' WHERE account = ? AND since = ?", (account, since))
                    self._known[account][since] = (0, reserved)

        await self._run(work)

    async def accounts(self) -> tuple[str, ...]:
        """See `Ledger.accounts`."""
        query = "SELECT DISTINCT account FROM spends UNION SELECT DISTINCT account FROM holds WHERE expires > ? ORDER BY 1"
        rows = await self._run(lambda db: db.execute(query, (self._now(),)).fetchall())
        return tuple(name for (name,) in rows)

    async def entries(self, *, limit: int | None = None, tenant: str | None = None) -> tuple[Entry, ...]:
        """See `Ledger.entries`."""
        where, values = ("", ()) if tenant is None else ("WHERE tenant = ? ", (tenant,))
        names = "id, at, backend, model, tenant, session_id, tags, units, estimated, usage, outcome, request_id"
        query = f"SELECT {names} FROM entries {where}ORDER BY id DESC LIMIT ?"  # noqa: S608
        most = -1 if limit is None else min(max(limit, 0), MOST)
        rows = await self._run(lambda db: db.execute(query, (*values, most)).fetchall())
        return tuple(_entry(row) for row in rows)

    async def totals(self, *, tenant: str | None = None) -> Totals:
        """See `Ledger.totals`."""
        where, values = ("", ()) if tenant is None else ("WHERE tenant = ?", (tenant,))
        partly = "COUNT(*) - COUNT(json_extract(usage, '$.output'))"
        sums = ", ".join(map(_halves, ("units", *_COUNTS)))
        query = f"SELECT COUNT(*), COUNT(*) - COUNT(units), {partly}, SUM(estimated), {sums} FROM entries {where}"  # noqa: S608
        row = await self._run(lambda db: db.execute(query, values).fetchone())
        requests, unpriced, uncounted, estimated, *halves = row
        units, *counts = map(_whole, halves[::2], halves[1::2])
        return Totals(
            requests=requests,
            amount=from_units(units),
            estimated=estimated or 0,
            unpriced=unpriced,
            uncounted=uncounted,
            **dict(zip(_COUNTS, counts, strict=True)),
        )

    async def secret(self, name: str) -> bytes:
        """32 random bytes kept in the file under `name`, made at the first call: the salt of tenants' keys."""

        def work(db: sqlite3.Connection) -> bytes:
            with transaction(db):
                fresh = secrets.token_bytes(32)
                db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (f"secret:{name}", fresh))
                row = db.execute("SELECT value FROM meta WHERE name = ?", (f"secret:{name}",)).fetchone()
            return bytes(row[0])

        return await self._run(work)

    async def save(self, name: str, data: bytes) -> None:
        """See `Ledger.save`. The last one wins, whichever process it is in."""

        def work(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"saved:{name}", data))

        await self._shielded(work)

    async def load(self, name: str) -> bytes | None:
        """See `Ledger.load`."""
        query = "SELECT value FROM meta WHERE name = ?"
        row = await self._run(lambda db: db.execute(query, (f"saved:{name}",)).fetchone())
        return None if row is None else bytes(row[0])

    async def aclose(self) -> None:
        """See `Ledger.aclose`. What was asked for before is still done; what comes after is refused."""
        if not self._closed:
            self._closed = True
            self._writer.submit(self._disconnect)
            self._writer.close()
        with anyio.CancelScope(shield=True):
            await self._writer.closed()

    # -- transactions (in the writer's thread) ---------------------------------------------------------------------

    def _reserve(
        self,
        db: sqlite3.Connection,
        reservation: str,
        hold: Hold,
        units: int,
        lease: int,
        limits: Iterable[tuple[Limit, int]],
    ) -> None:
        accounts = accounts_of(hold)
        with transaction(db):
            now = self._now()
            for limit, most in limits:
                spent, reserved = self._look(db, limit.account, to_micros(limit.since))
                if spent + reserved + units > most:
                    raise BudgetExceededError(
                        scope=limit.scope,
                        limit=limit.limit,
                        spent=from_units(spent),
                        reserved=from_units(reserved),
                        requested=from_units(units),
                        resets_at=limit.resets_at,
                    )
            expires = now + lease
            facts = (hold.backend, hold.model, hold.tenant, hold.session_id, json.dumps(hold.tags))
            row = (reservation, json.dumps(accounts), expires, *facts)
            db.execute("INSERT INTO reservations VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            db.executemany("INSERT INTO holds VALUES (?, ?, ?, ?)", [(a, reservation, units, expires) for a in accounts])
            self._sweep(db, now)
        self._looked(accounts, 0, units)

    def _renew(self, db: sqlite3.Connection, reservation: str, hold: Hold, units: int, lease: int) -> None:
        accounts = accounts_of(hold)
        with transaction(db):
            expires = self._now() + lease
            if not db.execute(
                "UPDATE reservations SET expires = MAX(expires, ?) WHERE id = ?", (expires, reservation)
            ).rowcount:
                return
            db.executemany(  # a hold whose lease ran out may be swept away
                "INSERT INTO holds VALUES (?, ?, ?, ?) "
                "ON CONFLICT (account, reservation) DO UPDATE SET expires = MAX(expires, excluded.expires)",
                [(account, reservation, units, expires) for account in accounts],
            )
            for account in accounts:
                for since in tuple(self._known.get(account, ())):
                    self._look(db, account, since)

    def _settle(self, db: sqlite3.Connection, reservation: str, settlement: Settlement, units: int | None) -> None:
        with transaction(db):
            row = db.execute(
                "SELECT accounts, backend, model, tenant, session_id, tags FROM reservations WHERE id = ?", (reservation,)
            ).fetchone()
            if row is None:
                if db.execute("SELECT 1 FROM entries WHERE reservation = ?", (reservation,)).fetchone() is None:
                    raise LedgerError(f"ledger {self.path}: unknown reservation {reservation}")
                return
            accounts, now, usage = json.loads(row[0]), self._now(), settlement.usage
            counts = (0, 0, 0, 0)
            if usage is not None:
                counts = (usage.uncached or 0, usage.cache_read or 0, usage.written or 0, usage.output or 0)
            facts = (units, settlement.estimated, settlement.outcome, settlement.request_id, settlement.price_source)
            values = (reservation, now, *row[1:], *facts, _usage_text(usage), *counts)
            names = (
                "reservation, at, backend, model, tenant, session_id, tags, units, estimated, outcome, request_id, "
                "price_source, usage, uncached, cache_read, cache_write, output"
            )
            marks = ", ".join("?" * len(values))
            entry = db.execute(f"INSERT INTO entries ({names}) VALUES ({marks})", values).lastrowid  # noqa: S608
            held = self._drop(db, reservation)
            for account in accounts if units else ():
                db.execute("INSERT INTO spends VALUES (?, ?, ?, ?)", (account, now, entry, units))
                for since, known in db.execute(
                    "SELECT since, units FROM counters WHERE account = ? AND since <= ?", (account, now)
                ).fetchall():
                    db.execute(
                        "UPDATE counters SET units = ? WHERE account = ? AND since = ?",
                        (str(int(known) + (units or 0)), account, since),
                    )
        self._looked(accounts, units or 0, -held)
        self._settled += 1
        if self._settled % _CHECKPOINT == 0:
            with suppress(sqlite3.Error):  # the settlement is committed, and the log is tried again later
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _release(self, db: sqlite3.Connection, reservation: str) -> None:
        with transaction(db):
            row = db.execute("SELECT accounts FROM reservations WHERE id = ?", (reservation,)).fetchone()
            held = 0 if row is None else self._drop(db, reservation)
        if row is not None:
            self._looked(json.loads(row[0]), 0, -held)

    def _drop(self, db: sqlite3.Connection, reservation: str) -> int:
        """Delete a reservation; return the units it held."""
        accounts = json.loads(db.execute("SELECT accounts FROM reservations WHERE id = ?", (reservation,)).fetchone()[0])
        held = 0
        for account in accounts:
            key = (account, reservation)
            row = db.execute("SELECT units FROM holds WHERE account = ? AND reservation = ?", key).fetchone()
            held = row[0] if row else held
            db.execute("DELETE FROM holds WHERE account = ? AND reservation = ?", key)
        db.execute("DELETE FROM reservations WHERE id = ?", (reservation,))
        return held

    def _look(self, db: sqlite3.Connection, account: str, since: int) -> tuple[int, int]:
        """What an account spent since a moment, and what is reserved on it now."""
        now = self._now()
        row = db.execute("SELECT units, used FROM counters WHERE account = ? AND since = ?", (account, since)).fetchone()
        if row is None:
            halves = db.execute(f"SELECT {_SUM} FROM spends WHERE account = ? AND at >= ?", (account, since)).fetchone()  # noqa: S608
            spent = _whole(*halves) - self._forgiven(db, account, since)
            # A window that ended is not asked for again; should it be, its counter is made anew, of no more than it was.
            ended = "DELETE FROM counters WHERE account = ? AND ? - used > MAX(used - since, ?)"
            db.execute(ended, (account, now, _IDLE))
            db.execute("INSERT INTO counters VALUES (?, ?, ?, ?)", (account, since, str(spent), now))
        else:
            spent = int(row[0])
            if row[1] < now - _MINUTE:
                db.execute("UPDATE counters SET used = ? WHERE account = ? AND since = ?", (now, account, since))
        halves = db.execute(f"SELECT {_SUM} FROM holds WHERE account = ? AND expires > ?", (account, now)).fetchone()  # noqa: S608
        reserved = _whole(*halves)
        windows = self._known.setdefault(account, OrderedDict())
        windows[since] = (spent, reserved)
        windows.move_to_end(since)
        self._known.move_to_end(account)
        if len(windows) > _WINDOWS:
            windows.popitem(last=False)
        if len(self._known) > _ACCOUNTS:
            self._known.popitem(last=False)
        return spent, reserved

    @staticmethod
    def _forgiven(db: sqlite3.Connection, account: str, since: int) -> int:
        """What `reset` took off this window."""
        row = db.execute("SELECT value FROM meta WHERE name = ?", (_forgiven_key(account, since),)).fetchone()
        return 0 if row is None else int(row[0])

    def _looked(self, accounts: Iterable[str], spent: int, reserved: int) -> None:
        """Carry a committed change over to what `snapshot` shows."""
        for account in accounts:
            if (windows := self._known.get(account)) is None:
                continue
            for since, (known_spent, known_reserved) in windows.items():
                windows[since] = (known_spent + spent, max(known_reserved + reserved, 0))

    def _sweep(self, db: sqlite3.Connection, now: int) -> None:
        """Now and then drop what nobody will ask for: ended leases, and reservations long dead."""
        self._writes += 1
        if self._writes % 256 == 1:
            db.execute("DELETE FROM holds WHERE expires <= ?", (now,))
            db.execute("DELETE FROM reservations WHERE expires <= ?", (now - _KEEP_UNSETTLED,))

    def _now(self) -> int:
        return round(self._clock() * 1_000_000)

    # -- the connection --------------------------------------------------------------------------------------------

    def _queue(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Have the writer do `work` on the connection, after everything that was asked for before."""

        def call() -> T:
            try:
                return work(self._open())
            except (sqlite3.Error, OSError, OverflowError, UnicodeError) as error:
                raise LedgerError(f"ledger {self.path}: {error}") from error

        try:
            return self._writer.submit(call)
        except RuntimeError as error:
            raise LedgerError(f"ledger {self.path}: closed") from error

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await result_of(self._queue(work))

    async def _shielded(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """The same for what must be known to be done: waits until it is, as far as the event loop lets it."""
        job = self._queue(work)
        try:
            with anyio.CancelScope(shield=True):
                await result_of(job)
        except anyio.get_cancelled_exc_class():
            job.add_done_callback(complain)
            raise

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = connect(self.path, busy_s=self._busy_s, durable=self._durable)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _state(limit: Limit, spent: int, reserved: int) -> BudgetState:
    return BudgetState(scope=limit.scope, limit=limit.limit, spent=from_units(spent), reserved=from_units(reserved))


def _forgiven_key(account: str, since: int) -> str:
    return f"reset:{since}:{account}"


def _usage_text(usage: Usage | None) -> str | None:
    if usage is None:
        return None
    facts = usage.to_dict()
    del facts["input_tokens"]
    return json.dumps(facts)


def _entry(row: Sequence[Any]) -> Entry:
    id_, at, backend, model, tenant, session_id, tags, units, estimated, usage, outcome, request_id = row
    return Entry(
        id=id_,
        at=from_micros(at),
        backend=backend,
        model=model,
        tenant=tenant,
        session_id=session_id,
        tags=tuple(json.loads(tags)),
        amount=None if units is None else from_units(units),
        estimated=bool(estimated),
        usage=None if usage is None else Usage(**json.loads(usage)),
        outcome=outcome,
        request_id=request_id,
    )
