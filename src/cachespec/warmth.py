"""What is believed cached where, and until when (contract P4).

An entry is a prefix at one backend: made when a request that marks it is accepted, confirmed or dropped by what the vendor
reports, dead when its lifetime is over, counted from the *start* of the request that wrote or read it. Dead entries stay for
a while: that something was there and ran out is worth knowing. The store knows no vendor; `cachespec.cache_learning` does.

It is bounded: the entry unused for longest goes first. An entry takes about 250 bytes, packed as they are, so 100,000 are
25 MB.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cachespec.values import quick

MOST = 100_000
_PACKED = struct.Struct("<BBfIdd")  # lifetime's code, exact, sure, tokens, ready_at, expires_at
_SCOPE, _KEY = 8, 16
_ROW = _SCOPE + _KEY + _PACKED.size
_HEAD = b"cachespec warmth 1\n"
_UNSURE, _SURE = 0.5, 1.0
_AHEAD_S = 60.0
_PIECE = 512  # entries
_LIFETIMES = 64  # names in a dump: the vendors have half a dozen


@quick
@dataclass(frozen=True, slots=True)
class Entry:
    """A prefix believed cached. Times are Unix seconds; `sure` is 0 to 1; `exact`: the vendor counted its tokens."""

    ttl: str
    tokens: int
    ready_at: float
    expires_at: float
    sure: float = _UNSURE
    exact: bool = False

    def live(self, now: float) -> bool:
        """Whether it can be read at `now`, as far as is known."""
        return self.ready_at <= now < self.expires_at


def scope_of(*names: str) -> bytes:
    """What tells entries of the same content apart: backend, model, partition and what else enters a cache's key."""
    return blake2b("\0".join(names).encode("utf-8", "surrogatepass"), digest_size=_SCOPE).digest()


class Warmth:
    """Entries by scope and prefix digest. One event loop uses it; every call is microseconds."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._names: list[str] = []  # of lifetimes, by code
        self._codes: dict[str, int] = {}
        self._held: dict[bytes, int] = {}  # entries by scope
        self.changes = 0
        """How often anything changed: what was saved at one count need not be saved again at the same."""

    def __len__(self) -> int:
        return len(self._entries)

    def look(
        self, scope: bytes, keys: Sequence[bytes], *, head: int, most: int, later: bytes | None = None
    ) -> list[tuple[int, Entry]]:
        """The entries among `keys`, dead ones too, with their index, ascending: all among the first `head`, the last `most` of
        the others. (A long session has one at each turn's end, and only the deepest are of use.) `later` is the scope of those
        others, where it is another one."""
        entries = self._entries
        found: list[tuple[int, Entry]] = []
        later = scope if later is None else later
        if later in self._held:
            for i in range(len(keys) - 1, head - 1, -1):
                if later + keys[i] in entries:
                    found.append((i, self._unpack(entries[later + keys[i]])))
                    if len(found) == most:
                        break
        if scope not in self._held:
            return found[::-1]
        early = range(min(head, len(keys)) - 1, -1, -1)
        found += [(i, self._unpack(entries[scope + keys[i]])) for i in early if scope + keys[i] in entries]
        found.reverse()
        return found

    def get(self, scope: bytes, key: bytes) -> Entry | None:
        packed = self._entries.get(scope + key)
        return None if packed is None else self._unpack(packed)

    def put(self, scope: bytes, key: bytes, entry: Entry) -> None:
        """Make or replace an entry; it is then the last to be forgotten."""
        whole = scope + key
        if whole not in self._entries:
            self._held[scope] = self._held.get(scope, 0) + 1
        times = entry.ready_at, entry.expires_at
        self._entries[whole] = _PACKED.pack(
            self._code(entry.ttl), entry.exact, entry.sure, min(entry.tokens, 2**32 - 1), *times
        )
        self._entries.move_to_end(whole)
        self.changes += 1
        self._shrink()

    def drop(self, scope: bytes, key: bytes) -> None:
        if self._entries.pop(scope + key, None) is not None:
            self._gone(scope)
            self.changes += 1

    def _shrink(self) -> None:
        while len(self._entries) > self._most:
            whole, _ = self._entries.popitem(last=False)
            self._gone(whole[:_SCOPE])

    def _gone(self, scope: bytes) -> None:
        left = self._held[scope] - 1
        if left:
            self._held[scope] = left
        else:
            del self._held[scope]

    def pieces(self) -> Iterator[bytes]:
        """`dump` in pieces (`cachespec.pieces`): 50 bytes an entry, the longest unused first. Entries are written as they are
        now, since the names of their lifetimes are, and left out if they are dropped before their piece is made."""
        entries = self._entries
        keys, rows = list(entries), list(entries.values())
        yield _HEAD + "\t".join(self._names).encode() + b"\n"
        for start in range(0, len(keys), _PIECE):
            some = zip(keys[start : start + _PIECE], rows[start : start + _PIECE], strict=True)
            yield b"".join([key + row for key, row in some if key in entries])

    def dump(self) -> bytes:
        """Everything, to be kept across a restart."""
        return b"".join(self.pieces())

    def load(self, data: bytes, *, now: float, forget_after_s: float = 86_400.0) -> None:
        """Take up what `dump` gave, below what is known already; what died more than `forget_after_s` ago is left out.

        Data that is no dump, or of another version, is left aside.
        """
        known, self._entries, self._held = self._entries, OrderedDict(), {}
        for whole, entry in _rows(data):
            # What began after now was written by another clock: nobody knows how long it lives.
            if entry.expires_at > now - forget_after_s and entry.ready_at <= now + _AHEAD_S:
                self.put(whole[:_SCOPE], whole[_SCOPE:], entry)
        for whole, packed in known.items():
            if whole not in self._entries:
                self._held[whole[:_SCOPE]] = self._held.get(whole[:_SCOPE], 0) + 1
            self._entries[whole] = packed
        self._shrink()

    def _unpack(self, packed: bytes) -> Entry:
        return _entry(packed, self._names)

    def _code(self, ttl: str) -> int:
        code = self._codes.get(ttl)
        if code is None:
            code = self._codes[ttl] = len(self._names)
            self._names.append(ttl)
        return code


def _entry(packed: bytes, names: Sequence[str]) -> Entry:
    code, exact, sure, tokens, ready_at, expires_at = _PACKED.unpack(packed)
    return Entry(names[code], tokens, ready_at, expires_at, sure, bool(exact))


def _rows(data: bytes) -> Iterator[tuple[bytes, Entry]]:
    if not data.startswith(_HEAD):
        return
    line, found, rows = data[len(_HEAD) :].partition(b"\n")
    if not found or len(rows) % _ROW:
        return
    names = line.decode("utf-8", "replace").split("\t")
    for whole, packed in _split(rows) if len(names) <= _LIFETIMES else ():
        if packed[0] < len(names):
            entry = _entry(packed, names)
            if math.isfinite(entry.ready_at + entry.expires_at) and 0 <= entry.sure <= 1:
                yield whole, entry


def _split(rows: bytes) -> Iterable[tuple[bytes, bytes]]:
    for start in range(0, len(rows), _ROW):
        cut = start + _SCOPE + _KEY
        yield rows[start:cut], rows[cut : start + _ROW]
