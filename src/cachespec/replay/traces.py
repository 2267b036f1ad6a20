"""Reading traces of prompts as blocks: the Mooncake format, and the coding-agent format.

Both are JSON lines, plain or gzipped; the first line tells which it is.

- Mooncake: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (512-token blocks; equal ids are equal
  prefixes everywhere; the last block may be partial). A trace is one session.
- Coding agent: ``trace`` (the session), ``t`` (s from its start), ``input``, ``blocks`` (runs ``[first id, count]``; equal ids
  are equal prefixes within a session), ``block_size``, ``tool_tokens``, ``system_tokens``, and what else the session knew.
  The lines of a session stand together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from cachespec.errors import InputError
from cachespec.text_source import named, read_text

TraceFormat = Literal["mooncake", "coding-agent"]
Run = tuple[int, int]
"""The first id and the count of blocks whose ids count up."""

MOONCAKE_BLOCK = 512
ASSUMED_SECONDS = 2.0
"""How long a request took whose trace does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. Times are seconds from the start of its session.

    Attributes:
        i: its place in the file, from 0.
        blocks: whole blocks, as runs of ids; equal ids are equal prefixes (within the session).
        rest: the id of the partial block after them, where the trace names one.
        fixed_tokens: tools and system together, where the trace says so.
        ended, stop, output_tokens: how it ended. Nothing may know this before `ended`.
    """

    i: int
    t: float
    input_tokens: int
    blocks: tuple[Run, ...]
    rest: int | None = None
    fixed_tokens: int | None = None
    traffic: tuple[str, ...] = ()
    input_types: tuple[str, ...] = ()
    ended: float
    stop: str | None = None
    output_tokens: int | None = None

    @property
    def block_count(self) -> int:
        """Whole blocks of the prompt."""
        return sum(count for _, count in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Requests that may share prefixes, in the order of time. `name` is None where the trace has no sessions."""

    name: str | None
    requests: tuple[TraceRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole trace. `any_block`: a mark may stand after any whole block, not only where a request ended."""

    name: str
    format: TraceFormat
    block_size: int
    any_block: bool
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for session in self.sessions for request in session.requests)


def read_trace(path: str) -> Trace:
    """The trace in a file, or on stdin for ``-``. Raises InputError that names file, line and field."""
    return parse_trace(read_text(path).split("\n"), named(path))


def parse_trace(lines: Iterable[str], name: str = "<trace>") -> Trace:
    """The trace in these lines. Empty lines are skipped. Raises InputError that names `name`, line and field."""
    rows = list(_rows(lines, name))
    if not rows:
        raise InputError(f"{name}: holds no request")
    first = rows[0]
    if first.has("hash_ids"):
        found = tuple(_mooncake(row, i) for i, row in enumerate(rows))
        return Trace(name=name, format="mooncake", block_size=MOONCAKE_BLOCK, any_block=True, sessions=(_session(None, found),))
    if first.has("blocks"):
        return _coding_agent(rows, name)
    raise first.error("is neither a Mooncake line (hash_ids) nor a coding-agent line (blocks)")


@dataclass(frozen=True, slots=True)
class _Row:
    """One line: its values by field, and where it stands."""

    values: Mapping[str, Any]
    where: str

    def has(self, field: str) -> bool:
        return field in self.values

    def error(self, message: str, field: str | None = None) -> InputError:
        error = InputError(f"{self.where}: {field + ': ' if field else ''}{message}")
        error.field = field  # said behind the place, which comes first
        return error

    def count(self, field: str) -> int:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"must be a count, not {_shown(value)}", field)
        return value

    def number(self, field: str) -> float:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
            raise self.error(f"must be a number from 0 on, not {_shown(value)}", field)
        return float(value)

    def text(self, field: str) -> str:
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.error(f"must be text, not {_shown(value)}", field)
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        value = self.values.get(field) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error("must be a list of texts", field)
        return tuple(value)

    def counts(self, field: str) -> list[int]:
        value = self.values.get(field)
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error("must be a list of block ids from 0 on", field)
        return value


def _shown(value: object) -> str:
    return "absent" if value is None else repr(value)[:40]


def _rows(lines: Iterable[str], name: str) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise InputError(f"{where}: must be a JSON object, not {type(values).__name__}")
        yield _Row(values, where)


def _session(name: str | None, requests: Iterable[TraceRequest]) -> Session:
    return Session(name=name, requests=tuple(sorted(requests, key=lambda request: request.t)))


def _mooncake(row: _Row, i: int) -> TraceRequest:
    tokens = row.count("input_length")
    ids = row.counts("hash_ids")
    whole = tokens // MOONCAKE_BLOCK
    if not whole <= len(ids) <= -(-tokens // MOONCAKE_BLOCK):
        raise row.error(f"{len(ids)} blocks of {MOONCAKE_BLOCK} tokens do not make {tokens} tokens", "hash_ids")
    at = row.number("timestamp") / 1000
    return TraceRequest(
        i=i,
        t=at,
        input_tokens=tokens,
        blocks=_runs(ids[:whole]),
        rest=ids[whole] if len(ids) > whole else None,
        ended=at + ASSUMED_SECONDS,
        output_tokens=row.count("output_length") if row.has("output_length") else None,
    )


def _runs(ids: list[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for _, group in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = [member for _, member in group]
        runs.append((members[0], len(members)))
    return tuple(runs)


def _coding_agent(rows: list[_Row], name: str) -> Trace:
    size = rows[0].count("block_size")
    if not size:
        raise rows[0].error("must be a count above 0", "block_size")
    sessions: list[Session] = []
    seen: set[str] = set()
    for session, members in groupby(enumerate(rows), key=lambda pair: pair[1].text("trace")):
        found = list(members)
        if session in seen:
            raise found[0][1].error(f"the lines of {session!r} do not stand together", "trace")
        seen.add(session)
        sessions.append(_session(session, [_agent_request(row, i, size) for i, row in found]))
    return Trace(name=name, format="coding-agent", block_size=size, any_block=False, sessions=tuple(sessions))


def _agent_request(row: _Row, i: int, size: int) -> TraceRequest:
    if row.count("block_size") != size:
        raise row.error(f"differs from the first line's {size}", "block_size")
    tokens, at = row.count("input"), row.number("t")
    blocks = row.values.get("blocks")
    if not isinstance(blocks, list) or not all(_is_run(run) for run in blocks):
        raise row.error("must be a list of runs [first id, count]", "blocks")
    if sum(count for _, count in blocks) != tokens // size:
        raise row.error(f"do not make the {tokens // size} whole blocks of {tokens} tokens", "blocks")
    took = row.values.get("api_time")
    stop = row.values.get("stop")
    return TraceRequest(
        i=i,
        t=at,
        input_tokens=tokens,
        blocks=tuple((first, count) for first, count in blocks),
        fixed_tokens=min(tokens, row.count("tool_tokens") + row.count("system_tokens")),
        traffic=tuple(row.text(field) for field in ("model", "agent") if row.values.get(field) is not None),
        input_types=row.texts("input_types"),
        ended=at + (ASSUMED_SECONDS if took is None else row.number("api_time")),
        stop=None if not stop else row.text("stop"),
        output_tokens=None if row.values.get("output") is None else row.count("output"),
    )


def _is_run(run: object) -> bool:
    return isinstance(run, list) and len(run) == 2 and all(type(item) is int for item in run) and run[0] >= 0 < run[1]
