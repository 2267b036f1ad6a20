"""What a client has read before, recognised in equal copies: sequences that share a beginning are read once.

Requests repeat themselves: the same tools, the same system prompt, a history that only grows. A `Recall` keeps sequences
of values (tools, parts, messages) under keys that hold everything a reader can see of the given items, and hands the same
values out again for as many leading items as it has read already. What is worked out along a sequence (`trace`) is kept
with it. Nothing is ever taken for known by being the same object: a caller may have changed it.

A key tells apart what Python calls equal and JSON does not (``True``, ``1`` and ``1.0``; ``0.0`` and ``-0.0``; the order of an
object's keys). An item that no key can be made for is read anew each time, and so is all that follows it.
"""

from __future__ import annotations

import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar, TypeVarTuple, Unpack, get_args

from cachespec.messages import CacheMark, Message, Part, Tool

T = TypeVar("T")
S = TypeVar("S")
P = TypeVar("P")
More = TypeVarTuple("More")

Key: TypeAlias = tuple[Any, ...] | bytes
"""Equal keys: nothing that reads the items can tell them apart. Strings in it are the item's own, not copies."""

_ITEM_BYTES = 2_000
"""What an item takes in memory beside its text: its value, key, place in the index, and what is traced of it."""
_TRACES = 64  # kept of one sequence: one for each reader, and for each beginning before it (other tools, other parameters)
_LATELY = 8  # lists known as a whole
_DEEPEST = 200
_OURS = frozenset((CacheMark, Message, Tool, *get_args(Part)))
_LIGHT = frozenset({"text", "input_text", "output_text", "tool_use", "thinking", "redacted_thinking", "server_tool_use"})
"""Kinds of parts that are small enough to be copied into a key; others may hold a megabyte."""
_TREE = object()


@dataclass(slots=True, eq=False)
class _Trace:
    """`states` after 0, 1, 2... values; `pieces` that came out, and how many of them after 0, 1, 2... values."""

    states: list[Any]
    pieces: list[Any]
    ends: list[int]

    def to(self, count: int) -> _Trace:
        """The same for the first `count` values."""
        known = min(count + 1, len(self.states))
        return _Trace(self.states[:known], self.pieces[: self.ends[known - 1]], self.ends[:known])


@dataclass(slots=True, eq=False)
class _Run(Generic[T]):
    """One sequence; it grows at its end and never changes before. `skip` of the items are not among the values handed out."""

    keys: list[Key]
    items: list[T]
    skip: int
    places: list[Hashable] = field(default_factory=list)
    traces: dict[Hashable, _Trace] = field(default_factory=dict)
    cost: int = 0


class Seen(tuple[T, ...]):
    """A tuple that a `Recall` handed out: equal to any other of these values, and known to `trace`.

    `traced` are the results of going along it, by what was asked: the candidates of a decision ask the same of one prompt.
    """

    run: _Run[T]
    traced: dict[Hashable, tuple[Any, Sequence[Any]]]

    def __reduce__(self) -> tuple[type, tuple[list[T]]]:
        return tuple, (list(self),)


class Recall(Generic[T]):
    """Sequences of values by what they were read from, the longest unused forgotten first.

    `most_bytes` bounds the memory they take, roughly; `weight` is what a byte of text in an item takes when it was read.
    Safe for any number of threads.
    """

    def __init__(self, *, most_bytes: int, weight: int) -> None:
        self._most, self._weight = most_bytes, weight
        self._index: dict[Hashable, _Run[T]] = {}
        self._runs: OrderedDict[int, _Run[T]] = OrderedDict()
        self._bytes = 0
        self._lately: OrderedDict[Hashable, tuple[bytes, tuple[T, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self,
        given: Sequence[Any],
        read: Callable[[int], T],
        check: Callable[[Sequence[T]], int] = lambda _: 0,
        *,
        salt: Hashable = None,
    ) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """The values of the given items: those that are skipped, and the others.

        `read(i)` reads item i where it is not known; what it gives must share nothing mutable with the item. `check` sees
        all values when some are new; it says how many leading ones are to be skipped, or raises. Sequences of different
        `salt` know nothing of each other. Whatever these raise leaves everything as it was.
        """
        return self._read(given, *_keys(given), read, check, salt)

    def _read(
        self,
        given: Sequence[Any],
        keys: list[Key],
        ends: list[int],
        read: Callable[[int], T],
        check: Callable[[Sequence[T]], int],
        salt: Hashable,
    ) -> tuple[tuple[T, ...], tuple[T, ...]]:
        run, count = self._longest(keys, ends, salt)
        if run is not None and count == len(given) and count > run.skip:
            items = run.items
            skip = run.skip
        else:
            items = [] if run is None else run.items[:count]
            items += [read(i) for i in range(count, len(given))]
            skip = check(items)
            if len(keys) < len(given):
                return tuple(items[:skip]), tuple(items[skip:])
            run = self._keep(run, count, keys, ends, items, skip, salt)
        seen = Seen(items[skip : len(given)])
        seen.run, seen.traced = run, {}
        return tuple(items[:skip]), seen

    def whole(self, given: Sequence[Any], read: Callable[[], tuple[T, ...]], *, salt: Hashable = None) -> tuple[T, ...]:
        """What `read` gives for all of these items: at once where they were given like this lately, as lists of tools are.

        This takes a third of the time of keys for each item, and knows fewer equals of theirs as such.
        """
        data = exact_bytes(given, 4)
        if data is None:
            return read()
        place = len(data), data[-32:], salt
        with self._lock:
            known, values = self._lately.get(place, (b"", ()))
            if known == data:
                self._lately.move_to_end(place)
                return values
        values = read()
        if len(data) <= self._most // 128:
            with self._lock:
                self._lately[place] = data, values
                if len(self._lately) > _LATELY:
                    self._lately.popitem(last=False)
        return values

    def known(self, values: tuple[T, ...], own: Callable[[int], T]) -> tuple[T, ...]:
        """The same values, recognised where all have a key; `own(i)` gives value i without anything that others may change."""
        if isinstance(values, Seen) or not values:
            return values
        keys, ends = _keys(values)
        return values if len(keys) < len(values) else self._read(values, keys, ends, own, lambda _: 0, None)[1]

    def _longest(self, keys: list[Key], ends: list[int], salt: Hashable) -> tuple[_Run[T] | None, int]:
        """The run that shares the longest beginning with these keys, and how long that is."""
        with self._lock:
            for count in range(len(keys), 0, -1):
                run = self._index.get(_place(keys, ends, count, salt))
                if run is not None and run.keys[:count] == keys[:count]:
                    self._runs.move_to_end(id(run))
                    return run, count
        return None, 0

    def _keep(
        self,
        run: _Run[T] | None,
        count: int,
        keys: list[Key],
        ends: list[int],
        items: list[T],
        skip: int,
        salt: Hashable,
    ) -> _Run[T]:
        """The run with these items: the given one, grown, where it ended there, else a new one that begins like it."""
        with self._lock:
            grown = run is not None and len(run.keys) == count and run.skip == skip and id(run) in self._runs
            if run is None or not grown:
                old = run
                run = _Run([], [], skip)
                if old is not None and old.skip == skip and count >= skip:
                    run.keys, run.items = old.keys[:count], old.items[:count]
                    run.places, run.cost = old.places[:count], _ITEM_BYTES * count
                    run.traces = {name: trace.to(count - skip) for name, trace in list(old.traces.items())}
                self._runs[id(run)] = run
                self._bytes += run.cost
            at = len(run.keys)
            cost = sum(_ITEM_BYTES + self._weight * _size(key) for key in keys[at:])
            places = [_place(keys, ends, i + 1, salt) for i in range(at, len(keys))]
            run.keys += keys[at:]
            run.items += items[at:]
            run.places += places
            run.cost += cost
            self._bytes += cost
            self._index.update(dict.fromkeys(places if grown else run.places, run))
            while self._bytes > self._most:
                _, gone = self._runs.popitem(last=False)
                self._bytes -= gone.cost
                for place in gone.places:
                    if self._index.get(place) is gone:
                        del self._index[place]
        return run


def trace(
    values: tuple[T, ...],
    step: Callable[[S, T, Unpack[More]], tuple[S, Iterable[P]]],
    start: S,
    name: Hashable = None,
    *more: *More,
) -> tuple[S, Sequence[P]]:
    """Go along values: `step` takes the state and a value (and `more`), and gives the next state and what comes out there.

    Returns the last state and everything that came out. What was gone along before is not gone along again, so `step` must be
    a function of its arguments alone that has a name (no lambda), states and pieces must be immutable, and `name` must tell
    apart any two values of `start`, and of `more` as far as `step` looks at it.
    """
    if not isinstance(values, Seen):
        state = start
        out: list[P] = []
        for value in values:
            state, pieces = step(state, value, *more)
            out += pieces
        return state, out
    key = step, name
    result = values.traced.get(key)
    if result is not None:
        return result
    run, count = values.run, len(values)
    known = run.traces.get(key)
    if known is None or len(known.states) <= count:
        # Made aside and put in its place at once: other threads read the old one or the new one.
        known = _Trace([start], [], [0]) if known is None else known.to(count)
        state = known.states[-1]
        for value in values[len(known.states) - 1 :]:
            state, pieces = step(state, value, *more)
            known.states.append(state)
            known.pieces += pieces
            known.ends.append(len(known.pieces))
        if len(run.traces) >= _TRACES and key not in run.traces:
            run.traces.pop(next(iter(run.traces)), None)
        run.traces[key] = known
    if len(values.traced) >= _TRACES:
        values.traced.clear()
    result = values.traced[key] = known.states[count], known.pieces[: known.ends[count]]
    return result


def _place(keys: list[Key], ends: list[int], count: int, salt: Hashable) -> Hashable:
    """Where to look for the first `count` keys: cheap to make, rarely the same for different ones. `ends` sums their sizes."""
    return count, ends[count - 1], _tail(keys[count - 1]), _tail(keys[count // 2]), _tail(keys[0]), salt


def _tail(key: Key) -> str | bytes:
    return key[-32:] if isinstance(key, bytes) else "" if key[0] is _TREE else key[1][-32:]


def _size(key: Key) -> int:
    return len(key) if isinstance(key, bytes) else key[1] if key[0] is _TREE else len(key[1])


def _keys(given: Sequence[object]) -> tuple[list[Key], list[int]]:
    """The keys of items, as many as have one, and the size of all up to each."""
    keys: list[Key] = []
    ends: list[int] = []
    end = 0
    for item in given:
        # Nearly all messages are these two; what they hold is not copied. The order of such keys means nothing to a reader.
        if type(item) is dict and type(content := item.get("content")) is str and type(role := item.get("role")) is str:
            if len(item) == 2:
                keys.append((role, content))
                end += len(content)
                ends.append(end)
                continue
            if len(item) == 3 and type(call := item.get("tool_call_id")) is str:
                keys.append((role, content, call))
                end += len(content)
                ends.append(end)
                continue
        key = _key(item)
        if key is None:
            break
        keys.append(key)
        end += _size(key)
        ends.append(end)
    return keys, ends


def _key(item: object) -> Key | None:
    """Everything a reader can see of a dictionary, or of one of our own values; None where that cannot be told."""
    if type(item) is dict:
        content = item.get("content")
        if type(content) is not list or _light(content):
            return exact_bytes(item)
    elif type(item) not in _OURS:
        return None
    try:
        size, tree = _tree(item, 0)
    except _NoKeyError:
        return None
    return _TREE, size, tree


def _light(parts: list[Any], *, deep: bool = True) -> bool:
    """Whether these parts hold nothing that tends to be large."""
    for part in parts:
        kind = part.get("type") if type(part) is dict else None
        if kind == "tool_result" and deep:
            inner = part.get("content")
            if type(inner) is list and not _light(inner, deep=False):
                return False
        elif type(kind) is not str or kind not in _LIGHT:
            return False
    return True


def exact_bytes(value: Any, version: int = 2) -> bytes | None:
    """Plain JSON data as bytes that are equal only for data that is the same in every respect; None for anything else.

    Version 2 of the format gives the same bytes for all such data; version 4 is faster, and its bytes may differ for equal
    data, depending on who else holds its strings.
    """
    try:
        return marshal.dumps(value, version)
    except ValueError:
        return None


class _NoKeyError(Exception):
    """There is something in it that we do not know to be immutable, or plain data."""


def _tree(value: Any, depth: int) -> tuple[int, Any]:
    """How many characters a value holds, and the value as tuples, with the strings as they are."""
    kind = type(value)
    if kind is str:
        return len(value), value
    if value is None or kind is bool:
        return 0, value
    if kind is int:
        return 0, (int, value)
    if kind is float:
        return 0, (float, repr(value))
    if depth > _DEEPEST:
        raise _NoKeyError
    if kind is dict:
        inner = [one for pair in value.items() for one in pair]
    elif kind is list or kind is tuple:
        inner = value
    elif kind in _OURS:
        inner = [getattr(value, name) for name in kind.__slots__]
    else:
        raise _NoKeyError
    pairs = [_tree(one, depth + 1) for one in inner]
    return sum(size for size, _ in pairs), (kind, *(tree for _, tree in pairs))
