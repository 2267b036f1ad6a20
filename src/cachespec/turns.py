"""How a conversation goes on, learned from those there were: how many turns follow, how soon, how much each adds.

A conversation either goes on after a request or has ended there, and where the chance of either is the same after each (a
geometric law), as many are still to come as went on for each that ended. One that is still open has not ended: counting it as
if it had would make long conversations look short for as long as they last (right-censored observations: Kalbfleisch and
Prentice, The Statistical Analysis of Failure Time Data, 3.3). Classes of traffic borrow from wider ones as in `outputs`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cachespec.decision import Ask
from cachespec.outputs import Class, classes
from cachespec.pieces import listed

PRIOR = 4.0
"""Turns expected to follow in a session about which nothing was learned. A request without a session has none until seen."""
IDLE_S = 600.0
"""After so long a silence a conversation is taken to have ended. One that goes on nevertheless is put right."""
BESIDE_S = 60.0
"""First requests of one session that begin within so long of each other are one conversation that fans out."""
MOST = 50.0
_BORROWED = 1.0  # conversations that ended which a class needs before it outweighs the one above it
_BORROWED_TURNS = 4.0  # the same for how soon turns come and what they add, in turns
_FADES = 1 - 1 / 256  # of the counts, with each turn: traffic changes
_SPANS = 16  # gaps by powers of two seconds
_CLASSES = 5_000
_SESSIONS = 20_000
_LARGEST = 1e9  # of a count
_GROWN = 10_000_000  # tokens that no turn adds

_Session: TypeAlias = tuple[str | None, str]


@dataclass(slots=True)
class _Row:
    """What is known of a class: turns that went on, conversations that ended, the turns' gaps, and the tokens they added."""

    went_on: float = 0.0
    ended: float = 0.0
    grown: float = 0.0
    growth: float = 0.0
    gaps: list[float] = field(default_factory=lambda: [0.0] * _SPANS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected to follow a request.

    Attributes:
        turns: further requests of its conversation, in the mean.
        growth: tokens that the prompt grows by with each, the answer before it included; None where nothing is known.
    """

    turns: float = 0.0
    growth: float | None = None
    _rows: tuple[_Row, ...] = ()

    def within(self, seconds: float) -> float:
        """The chance that a turn which follows does so within so many seconds; 1 where nothing is known."""
        chance = 1.0
        if seconds < math.inf:
            for row in self._rows:
                sooner, all_of_them = _sooner(row.gaps, seconds)
                chance = (sooner + _BORROWED_TURNS * chance) / (all_of_them + _BORROWED_TURNS)
        return chance


class Turns:
    """Turns that went on and conversations that ended, by class of traffic. Not for several threads at once."""

    def __init__(self) -> None:
        self._known: OrderedDict[Class, _Row] = OrderedDict()
        self._open: OrderedDict[_Session, _Last] = OrderedDict()  # by when they were heard of last
        self._idle: OrderedDict[_Session, _Last] = OrderedDict()

    def outlook(self, ask: Ask) -> Outlook:
        """What is expected to follow this request; at most `MOST` turns."""
        rows = []
        for key in classes(ask):
            if (row := self._known.get(key)) is None:
                break
            rows.append(row)
        turns, growth = 0.0 if ask.session_id is None else PRIOR, None
        for row in rows:
            turns = (row.went_on + _BORROWED * turns) / (row.ended + _BORROWED)
            if row.grown:
                borrowed = 0.0 if growth is None else _BORROWED_TURNS
                growth = (row.grown * row.growth + borrowed * (growth or 0.0)) / (row.grown + borrowed)
        return Outlook(turns=min(turns, MOST), growth=growth, _rows=tuple(rows))

    def learn(self, ask: Ask, *, backend: str, tokens: int | None) -> None:
        """A request was answered by `backend`, which counted a prompt of so many tokens; it began at `ask.now`."""
        self._silence(ask.now)
        keys, followed = tuple(classes(ask)), ask.previous_backend is not None
        if ask.session_id is None:
            # Without a name each conversation is over until a request shows, by what it answers, that it was not.
            self._count(keys, went_on=float(followed), ended=0.0 if followed else 1.0)
            return
        name = ask.tenant, ask.session_id
        idle = self._idle.pop(name, None)
        before = self._open.pop(name, None) or idle
        if not followed:
            if before is not None and idle is None and ask.now - before.at > BESIDE_S:
                self._count(before.keys, went_on=0.0, ended=1.0)  # the name is used again for another one
            self._count(keys, went_on=0.0, ended=0.0)
        else:
            taken_for_ended = before is None or idle is not None
            self._count(keys, went_on=1.0, ended=-1.0 if taken_for_ended else 0.0)
            if before is not None:
                self._went_on(keys, before, ask.now, backend, tokens)
        self._open[name] = _Last(at=ask.now, keys=keys, backend=backend, tokens=tokens)

    def pieces(self) -> Iterator[str]:
        """What it learned, as JSON in pieces (`cachespec.pieces`); the open conversations as ended, which is put right when
        they go on."""
        still = dict[Class, int]()
        for last in list(self._open.values()):
            for key in last.keys:
                still[key] = still.get(key, 0) + 1
            yield ""
        known = ((key, row) for key in list(self._known) if (row := self._known.get(key)) is not None)
        yield from listed(
            [list(key), row.went_on, row.ended + still.get(key, 0), row.grown, row.growth, row.gaps] for key, row in known
        )

    @classmethod
    def from_list(cls, data: Any) -> Turns:
        """What `pieces` gave; rows that cannot be that are left out."""
        made = cls()
        for given in data if isinstance(data, list) else ():
            match given:
                case [list() as key, went_on, ended, grown, growth, list() as gaps] if all(isinstance(k, str) for k in key):
                    numbers = (went_on, ended, grown, growth, *gaps)
                    fine = all(isinstance(n, int | float) and 0 <= n < _LARGEST for n in numbers) and growth <= _GROWN
                    if fine and key and len(gaps) == _SPANS:
                        counts = [float(n) for n in gaps]
                        made._known[tuple(key)] = _Row(float(went_on), float(ended), float(grown), float(growth), counts)
                case _:
                    continue
        return made

    def _silence(self, now: float) -> None:
        """Take those for ended that have not gone on for long, or that are too many to remember."""
        while self._open:
            name, last = next(iter(self._open.items()))
            if now - last.at < IDLE_S and len(self._open) < _SESSIONS:
                return
            self._idle[name] = self._open.pop(name)
            self._count(last.keys, went_on=0.0, ended=1.0)
            if len(self._idle) > _SESSIONS:
                self._idle.popitem(last=False)

    def _count(self, keys: tuple[Class, ...], *, went_on: float, ended: float) -> None:
        fades = _FADES if went_on else 1.0
        for key in keys:
            row = self._known.get(key)
            if row is None:
                row = self._known[key] = _Row()
            row.went_on = row.went_on * fades + went_on
            row.ended = max(row.ended * fades + ended, 0.0)
            self._known.move_to_end(key)
        while len(self._known) > _CLASSES:
            self._known.popitem(last=False)

    def _went_on(self, keys: tuple[Class, ...], before: _Last, now: float, backend: str, tokens: int | None) -> None:
        span = _span(max(now - before.at, 0.0))
        # Another backend counts otherwise: what it counts more is not what was added.
        grown = None if tokens is None or before.tokens is None or backend != before.backend else tokens - before.tokens
        for row in (row for key in keys if (row := self._known.get(key)) is not None):
            row.gaps = [count * _FADES for count in row.gaps]
            row.gaps[span] += 1.0
            if grown is not None and 0 <= grown <= _GROWN:
                row.grown = row.grown * _FADES + 1.0
                row.growth += (grown - row.growth) / row.grown


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """The newest turn of a conversation."""

    at: float
    keys: tuple[Class, ...]
    backend: str
    tokens: int | None


def _span(seconds: float) -> int:
    return min(int(math.log2(seconds + 1.0)), _SPANS - 1)


def _sooner(gaps: Sequence[float], seconds: float) -> tuple[float, float]:
    """How many gaps are shorter, evenly spread within their span, and how many there are."""
    span = _span(seconds)
    start, end = 2.0**span - 1.0, 2.0 ** (span + 1) - 1.0
    share = min(max((seconds - start) / (end - start), 0.0), 1.0)
    return sum(gaps[:span]) + share * gaps[span], sum(gaps)
