"""How soon a prefix comes back: gap statistics that borrow from each other, learned as traffic goes by.

A *place* is a prefix worth watching: a prompt's own end, the deepest part of it that was there before, the end of tools and
system. Each pass of a request opens a wait there, and the next pass ends it. What is estimated is the hazard of the gap
between the two, P(it ends in this span of time | it lasted until then), for each span of `EDGES`, and from the hazards the
chance that a gap is over by some time (the product-limit estimate of Kaplan and Meier, 1958). A wait that is still open counts
in every span it has survived, so silence is learned from as it happens. Both outcomes of a span are counted when the span is
over and not before: else early on, the ends would be known and the survivals not.

A wait belongs to a chain of ever finer classes (all ends; those of this traffic; of this length; of this session...). Each
class starts from what the coarser one knows, as if it had seen that in `BORROW` waits of its own (empirical Bayes), so a class
never met is as good as its parent, and one that differs is heard after a few dozen waits. Counts fade: when a class has seen
`MEMORY` waits, its counts are halved.

Memory is bounded: `places` prefixes and as many open waits; what was unused for longest is forgotten.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from cachespec.pieces import listed

Key = tuple[str | int, ...]
"""A class's name."""

EDGES = (20.0, 60.0, 150.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14_400.0, 43_200.0, 86_400.0)
"""Where the spans end, in seconds. The vendors' lifetimes (5 and 30 minutes, 1 and 12 hours) are among them."""
BORROW = 12.0
MEMORY = 2000.0
_SPANS = len(EDGES)
_PRIOR = (0.2, 0.2, 0.15, 0.15)
"""Hazards before anything was seen: every second prefix comes back within five minutes."""
_ONWARD = 0.5
"""Hazard of a later span that nobody has reached yet, over that of the span before: long lifetimes are not bought on hope."""
_GENERATION = 4096
_SAVED = 4096
_VERSION = 2
_OWN: Key = ("own",)
_FORGOTTEN = 32


class Gaps:
    """What one class saw, per span: waits that reached its end or ended in it, and those that ended."""

    __slots__ = ("ended", "key", "reached", "waits")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.waits = 0.0
        self.reached = [0.0] * _SPANS
        self.ended = [0.0] * _SPANS

    def opened(self) -> None:
        """One more wait."""
        self.waits += 1.0
        if self.waits > MEMORY:
            self.waits /= 2
            self.reached = [count / 2 for count in self.reached]
            self.ended = [count / 2 for count in self.ended]


Chain = tuple[Gaps, ...]


class Wait:
    """The time since the latest pass of a place. `span` is the span it is in; ``~span`` once it ended in that one.

    The rest is its owner's: `role` and `turn` say what the place is, `unread` how often it was written since it was last read,
    `credit` how often it came back in time meanwhile, `carries` that it was written for longer than what stood before it, `own`
    what it saw itself, `note` anything (not saved).
    """

    __slots__ = ("carries", "chain", "credit", "note", "opened", "own", "passes", "role", "span", "turn", "unread")

    def __init__(self, opened: float, chain: Chain, role: str, turn: int, before: Wait | None = None) -> None:
        self.opened = opened
        self.chain = chain
        self.span = 0
        self.role: str = role if before is None else before.role
        self.turn: int = turn if before is None else before.turn
        self.passes: int = 0 if before is None else before.passes + 1
        self.unread: int = 0 if before is None else before.unread
        self.credit: int = 0 if before is None else before.credit
        self.carries: bool = before is not None and before.carries
        self.own: Gaps | None = None if before is None else before.own
        self.note: Any = None


class Outlook:
    """The distribution of a gap, as estimated at one moment."""

    __slots__ = ("_lasts",)

    def __init__(self, hazards: Iterable[float]) -> None:
        lasts, left = [], 1.0
        for hazard in hazards:
            left *= 1.0 - hazard
            lasts.append(left)
        self._lasts = lasts

    def lasts(self, seconds: float) -> float:
        """P(gap > seconds). Within a span it falls evenly; after the last one known it stays."""
        before, left = 0.0, 1.0
        for edge, last in zip(EDGES, self._lasts, strict=False):
            if seconds < edge:
                return left + (last - left) * (seconds - before) / (edge - before)
            before, left = edge, last
        return left

    def within(self, seconds: float, *, after: float = 0.0) -> float:
        """P(gap <= after + seconds | gap > after)."""
        left = self.lasts(after) if after > 0 else 1.0
        return 0.0 if left <= 0 else 1.0 - self.lasts(after + seconds) / left


class Reuse:
    """Places, their waits, and the classes that learn from them. Calls come in the order of time (Unix seconds)."""

    def __init__(self, *, places: int = 100_000) -> None:
        self._most = max(places, 2)
        # Two generations: what is used moves to the young one; when that is full, the old one is taken down bit by bit.
        self._young: dict[Hashable, Wait | None] = {}
        self._old: dict[Hashable, Wait | None] = {}
        self._dying: dict[Hashable, Wait | None] = {}
        self._classes: dict[Key, Gaps] = {}
        self._classes_old: dict[Key, Gaps] = {}
        self._chains: dict[Hashable, Chain] = {}
        self._due: tuple[deque[Wait], ...] = tuple(deque() for _ in EDGES)
        self._waiting = 0
        self.changes = 0
        """How often anything was learned: what was worked out at one count still holds at the same."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def new(self, keys: Iterable[Hashable]) -> int:
        """How many of a prompt's prefixes no prompt had before. `keys`, the deepest first, are read only so far."""
        young, old, count = self._young, self._old, 0
        for key in keys:
            if key in young or key in old:
                break
            count += 1
        return count

    def wait(self, key: Hashable) -> Wait | None:
        """The latest wait at a place; None where none was opened."""
        return self._young.get(key) or self._old.get(key)

    def chain(self, name: Hashable, classes: Callable[[], Iterable[Key]]) -> Chain:
        """The chain called `name`, whose `classes`, coarse to fine, are made when it is first asked for."""
        found = self._chains.get(name)
        if found is None:
            found = self._chains[name] = tuple([self._class(key) for key in classes()])
        return found

    def outlook(self, chain: Chain, own: Gaps | None = None, *, until: float = EDGES[-1]) -> Outlook:
        """What the finest class of a chain, or a place itself, expects with what it borrows. It holds up to `until` seconds."""
        spans = next((i + 1 for i, edge in enumerate(EDGES) if edge >= until), _SPANS)
        coarsest = chain[0]
        hazards: list[float] = []
        for i in range(spans):
            prior = _PRIOR[i] if i < len(_PRIOR) else _ONWARD * hazards[-1]
            hazards.append((coarsest.ended[i] + BORROW * prior) / (coarsest.reached[i] + BORROW))
        for gaps in (*chain[1:], own) if own is not None else chain[1:]:
            if gaps.waits:
                hazards = [
                    (ended + BORROW * hazard) / (reached + BORROW)
                    for hazard, reached, ended in zip(hazards, gaps.reached, gaps.ended, strict=False)
                ]
        return Outlook(hazards)

    def advance(self, now: float) -> None:
        """Let time go on to `now`: the spans that are over by then are counted."""
        for span, queue in enumerate(self._due):
            born = now - EDGES[span]
            while queue and queue[0].opened <= born:
                self.changes += 1
                self._count(queue.popleft(), span)

    def passed(self, keys: Sequence[Hashable], known: int, now: float) -> list[Wait | None]:
        """A request went by with these prefixes, of which `known` is the deepest that was there before (`new`).

        Ends the waits on its path, remembers what is new, and gives the waits at the prefixes up to `known`.
        """
        self.changes += 1
        self.advance(now)
        young, old = self._young, self._old
        get, get_old, known_keys = young.get, old.get, keys[: known + 1]
        waits = [get(key) or get_old(key) for key in known_keys]
        for wait in waits:
            if wait is not None and wait.span >= 0:
                wait.span = ~wait.span
        if known >= 0 and keys[known] not in young:
            young.update(zip(known_keys, waits, strict=True))
        for key in keys[known + 1 :]:
            young[key] = None
        for _ in range(min(len(self._dying), len(keys) + _FORGOTTEN)):
            self._dying.popitem()
        if 2 * len(young) > self._most:
            self._dying, self._old, self._young = old, young, {}
        return waits

    def watch(self, key: Hashable, chain: Chain, now: float, role: str, turn: int, before: Wait | None = None) -> Wait:
        """Open a wait at a place; `before` is the one that ended there, whose history it goes on with."""
        self.changes += 1
        wait = Wait(now, chain, role, turn, before)
        if wait.own is None and wait.passes > 1:  # worth statistics of its own from the third pass on
            wait.own = Gaps(_OWN)
        if wait.own is not None:
            wait.own.opened()
        self._young[key] = wait
        for gaps in chain:
            gaps.opened()
        self._due[0].append(wait)
        self._waiting += 1
        if self._waiting > self._most:  # give up on the longest of all waits, uncounted
            next(queue for queue in reversed(self._due) if queue).popleft()
            self._waiting -= 1
        return wait

    def join(self, wait: Wait, chain: Chain) -> None:
        """Have further classes learn from an open wait from here on."""
        if wait.span >= 0:
            self.changes += 1
            wait.chain += chain
            for gaps in chain:
                gaps.opened()

    def dump(self) -> bytes:
        """The classes and the places used latest, with what waits there. Keys that are no text, bytes or whole number are left
        out, as are notes."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """`dump` in pieces (`cachespec.pieces`). A span that ends meanwhile is in one of them, or counted twice."""
        packer = zlib.compressobj(1)
        for text in self._texts():
            yield packer.compress(text.encode())
        yield packer.flush()

    def _texts(self) -> Iterator[str]:
        numbers: dict[int, int] = {}
        classes: list[Gaps] = []

        def number(gaps: Gaps) -> int:
            if id(gaps) not in numbers:
                numbers[id(gaps)] = len(classes)
                classes.append(gaps)
            return numbers[id(gaps)]

        yield f"[{_VERSION},"
        yield from listed(self._place(key, number) for key in list(islice(self._latest(), _SAVED)))
        for known in (self._classes_old, self._classes):
            for gaps in known.values():
                if gaps.waits:
                    number(gaps)
        yield ","
        yield from listed([list(gaps.key), _short([gaps.waits]), _short(gaps.reached), _short(gaps.ended)] for gaps in classes)
        yield "]"

    def load(self, data: bytes) -> None:
        """Take up what `dump` gave; what is known here already stays. Data that is no dump, or of another version, is left
        aside."""
        try:
            version, places, classes = json.loads(zlib.decompress(data))
            if version != _VERSION:
                return
            made = [_restored(key, *counts) for key, *counts in classes]
            read = [(_name(name), None if saved is None else _wait(saved, made)) for name, saved in places]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, zlib.error):
            return
        self.changes += 1
        for gaps in made:
            if gaps.key != _OWN:
                self._classes.setdefault(gaps.key, gaps)
        queues = [list(queue) for queue in self._due]
        for key, wait in reversed(read):
            if key in self._young or key in self._old or 2 * len(self._young) >= self._most:
                continue
            self._young[key] = wait
            if wait is not None:
                wait.chain = tuple([self._classes.get(gaps.key, gaps) for gaps in wait.chain])
                span = wait.span if wait.span >= 0 else ~wait.span
                if span < _SPANS:
                    queues[span].append(wait)
        self._due = tuple(deque(sorted(queue, key=lambda wait: wait.opened)) for queue in queues)
        self._waiting = sum(len(queue) for queue in self._due)

    def _latest(self) -> Iterator[str | int | bytes]:
        """Places that can be saved, those that came latest first."""
        for known in (self._young, self._old):
            for key in reversed(known):
                if isinstance(key, str | int | bytes) and not isinstance(key, bool):
                    yield key

    def _place(self, key: str | int | bytes, number: Callable[[Gaps], int]) -> list[Any]:
        wait = self.wait(key)
        return [{"b": key.hex()} if isinstance(key, bytes) else key, None if wait is None else self._saved(wait, number)]

    def _saved(self, wait: Wait, number: Callable[[Gaps], int]) -> list[Any]:
        own = None if wait.own is None else number(wait.own)
        chain = [number(gaps) for gaps in wait.chain]
        return [wait.opened, wait.span, chain, wait.role, wait.turn, wait.passes, wait.unread, wait.credit, own]

    def _count(self, wait: Wait, span: int) -> None:
        """A span is over for a wait that reached it."""
        over = wait.span == ~span
        own = wait.own
        for gaps in wait.chain if own is None else (*wait.chain, own):
            gaps.reached[span] += 1.0
            if over:
                gaps.ended[span] += 1.0
        if over or span + 1 == _SPANS:
            wait.span = ~span
            self._waiting -= 1
        else:
            wait.span = span + 1
            self._due[span + 1].append(wait)

    def _class(self, key: Key) -> Gaps:
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = self._classes_old.get(key) or Gaps(key)
            if len(self._classes) > _GENERATION:
                self._classes_old, self._classes = self._classes, {}
                self._chains = {}
        return found


def _short(counts: list[float]) -> list[float]:
    """Rounded, without the zeros at the end."""
    last = max((i for i, count in enumerate(counts) if count), default=-1)
    return [round(count, 2) if count % 1 else int(count) for count in counts[: last + 1]]


def _restored(key: list[str | int], waits: list[float], reached: list[float], ended: list[float]) -> Gaps:
    if not all(isinstance(part, str | int) for part in key):
        raise TypeError("no name of a class")
    gaps = Gaps(tuple(key))
    gaps.waits = sum(_long(waits, 1))
    gaps.reached, gaps.ended = _long(reached, _SPANS), _long(ended, _SPANS)
    return gaps


def _long(counts: list[float], length: int) -> list[float]:
    values = [float(count) for count in counts]
    if len(values) > length or not all(0 <= value < 1e9 for value in values):
        raise ValueError("no counts")
    return values + [0.0] * (length - len(values))


def _name(name: Any) -> Hashable:
    if isinstance(name, dict):
        return bytes.fromhex(name["b"])
    if not isinstance(name, str | int):
        raise TypeError("no key")
    return name


def _wait(saved: list[Any], classes: list[Gaps]) -> Wait:
    opened, span, chain, role, turn, passes, unread, credit, own = saved
    wait = Wait(float(opened), tuple([classes[number] for number in chain]), str(role), int(turn))
    wait.span, wait.passes, wait.unread, wait.credit = int(span), int(passes), int(unread), int(credit)
    if not (-_SPANS - 1 <= wait.span < _SPANS and -1e12 < wait.opened < 1e12 and wait.chain):
        raise ValueError("no wait")
    wait.own = None if own is None else classes[own]
    return wait
