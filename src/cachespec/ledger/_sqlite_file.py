"""The file of an SQLite ledger: made where it is missing, and refused, untouched, where it is not ours."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachespec.errors import LedgerError

APPLICATION_ID = 0x63_73_70_63  # "cspc"
SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE reservations (
    id TEXT PRIMARY KEY, accounts TEXT NOT NULL, expires INTEGER NOT NULL,
    backend TEXT NOT NULL, model TEXT NOT NULL, tenant TEXT, session_id TEXT, tags TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE holds (
    account TEXT NOT NULL, reservation TEXT NOT NULL, units INTEGER NOT NULL, expires INTEGER NOT NULL,
    PRIMARY KEY (account, reservation)
) WITHOUT ROWID;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, reservation TEXT NOT NULL UNIQUE, at INTEGER NOT NULL,
    backend TEXT NOT NULL, model TEXT NOT NULL, tenant TEXT, session_id TEXT, tags TEXT NOT NULL,
    units INTEGER, estimated INTEGER NOT NULL, outcome TEXT NOT NULL, request_id TEXT, price_source TEXT,
    usage TEXT, uncached INTEGER NOT NULL, cache_read INTEGER NOT NULL, cache_write INTEGER NOT NULL, output INTEGER NOT NULL
);
CREATE INDEX entries_by_tenant ON entries (tenant, id);
CREATE TABLE spends (
    account TEXT NOT NULL, at INTEGER NOT NULL, entry INTEGER NOT NULL, units INTEGER NOT NULL,
    PRIMARY KEY (account, at, entry)
) WITHOUT ROWID;
CREATE TABLE counters (
    account TEXT NOT NULL, since INTEGER NOT NULL, units TEXT NOT NULL, used INTEGER NOT NULL,
    PRIMARY KEY (account, since)
) WITHOUT ROWID;
"""


def connect(path: Path, *, busy_s: float, durable: bool) -> sqlite3.Connection:
    """Open the ledger at `path`. Raises LedgerError for another program's file or a newer one's, and what SQLite raises."""
    if not path.exists():
        # Its own mode, because the file holds a secret; SQLite gives the log files the same.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    db = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        if _is_empty(db, path):
            _make(db, path, busy_s)
        db.execute("PRAGMA wal_autocheckpoint = 8000")  # the ledger does it itself, at better moments
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing; no other writer in between."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _make(db: sqlite3.Connection, path: Path, busy_s: float) -> None:
    deadline = time.monotonic() + busy_s
    while True:  # SQLite does not wait by itself where two processes change the mode at once
        try:
            db.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    with transaction(db):
        if _is_empty(db, path):
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _is_empty(db: sqlite3.Connection, path: Path) -> bool:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if not tables and application == 0:
        return True
    if application != APPLICATION_ID:
        raise LedgerError(f"ledger {path}: not a cachespec ledger (an SQLite file of another program)")
    if version != SCHEMA_VERSION:
        raise LedgerError(f"ledger {path}: schema version {version}, this cachespec reads {SCHEMA_VERSION}")
    return False
