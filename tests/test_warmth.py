"""What is believed cached: entries, their bounds, and what survives a restart."""

from __future__ import annotations

import math
import os
import tracemalloc

import pytest

from cachespec.warmth import Entry, Warmth, scope_of

HERE, THERE = scope_of("b", "m", "tenant a"), scope_of("b", "m", "tenant b")
KEYS = [bytes([i]) * 16 for i in range(60)]


def entry(tokens: int = 1000, until: float = 400.0, **more: object) -> Entry:
    return Entry("5m", tokens, 100.0, until, **more)  # type: ignore[arg-type]


def test_an_entry_is_of_one_scope_and_lives_from_ready_to_expiry() -> None:
    warmth = Warmth()
    warmth.put(HERE, KEYS[0], entry(sure=0.25, exact=True))
    found = warmth.get(HERE, KEYS[0])
    assert found == Entry("5m", 1000, 100.0, 400.0, 0.25, exact=True)
    assert warmth.get(THERE, KEYS[0]) is None
    assert [found.live(now) for now in (99.0, 100.0, 399.0, 400.0)] == [False, True, True, False]
    warmth.drop(HERE, KEYS[0])
    warmth.drop(HERE, KEYS[0])
    assert len(warmth) == 0


def test_scopes_are_told_apart_by_every_name() -> None:
    assert scope_of("a", "b") != scope_of("ab") != scope_of("a", "", "b")


def test_a_look_finds_the_head_and_the_deepest() -> None:
    warmth = Warmth()
    for i, key in enumerate(KEYS):
        if i % 3 == 0:
            warmth.put(HERE, key, entry(i))
    found = warmth.look(HERE, KEYS, head=4, most=3)
    assert [i for i, _ in found] == [0, 3, 51, 54, 57]
    assert [e.tokens for _, e in found] == [0, 3, 51, 54, 57]
    assert warmth.look(THERE, KEYS, head=4, most=3) == []


def test_a_look_follows_what_is_dropped_forgotten_and_loaded() -> None:
    warmth = Warmth(most=3)
    for key in KEYS[:2]:
        warmth.put(HERE, key, entry())
        warmth.put(HERE, key, entry())  # again: it is still one

    def found(scope: bytes) -> list[int]:
        return [i for i, _ in warmth.look(scope, KEYS, head=0, most=60)]

    warmth.drop(HERE, KEYS[0])
    assert (found(HERE), found(THERE)) == ([1], [])
    for key in KEYS[3:6]:  # the last of the others goes
        warmth.put(THERE, key, entry())
    assert (found(HERE), found(THERE)) == ([], [3, 4, 5])
    warmth.drop(THERE, KEYS[4])
    warmth.put(HERE, KEYS[7], entry())
    again = Warmth(most=3)
    again.put(HERE, KEYS[7], entry())
    again.load(warmth.dump(), now=200.0)
    warmth = again
    assert (found(HERE), found(THERE)) == ([7], [3, 5])
    for scope, key in ((HERE, KEYS[7]), (THERE, KEYS[3]), (THERE, KEYS[5])):
        warmth.drop(scope, key)
    assert (found(HERE), found(THERE), len(warmth)) == ([], [], 0)


def test_the_longest_unused_is_forgotten_first() -> None:
    warmth = Warmth(most=10)
    for key in KEYS[:10]:
        warmth.put(HERE, key, entry())
    warmth.put(HERE, KEYS[0], entry(2000))
    for key in KEYS[20:25]:
        warmth.put(HERE, key, entry())
    assert len(warmth) == 10
    assert warmth.get(HERE, KEYS[0]) is not None
    assert warmth.get(HERE, KEYS[1]) is None


def test_what_is_dumped_is_loaded_below_what_is_known() -> None:
    old, new = Warmth(), Warmth()
    old.put(HERE, KEYS[0], Entry("1h", 5, 1.0, 3601.0, 0.75, exact=True))
    old.put(HERE, KEYS[1], entry(1))
    old.put(HERE, KEYS[2], entry(2, until=-90_000.0))  # died more than a day ago
    new.put(THERE, KEYS[5], Entry("30m", 7, 1.0, 1801.0))
    new.put(HERE, KEYS[1], entry(99))
    new.load(old.dump(), now=500.0)
    assert len(new) == 3
    assert new.get(HERE, KEYS[0]) == Entry("1h", 5, 1.0, 3601.0, 0.75, exact=True)
    known = new.get(HERE, KEYS[1])
    assert known is not None
    assert known.tokens == 99
    assert new.get(HERE, KEYS[2]) is None
    again = Warmth()
    again.load(new.dump(), now=500.0)
    assert [again.get(scope, key) for scope in (HERE, THERE) for key in KEYS] == [
        new.get(scope, key) for scope in (HERE, THERE) for key in KEYS
    ]


def test_what_is_renewed_or_dropped_while_it_is_dumped() -> None:
    old, new = Warmth(), Warmth()
    for key in KEYS[:3]:
        old.put(HERE, key, entry())
    pieces = old.pieces()
    begun = next(pieces)
    old.put(HERE, KEYS[0], Entry("1h", 5, 1.0, 3601.0))  # a lifetime that no entry had
    old.drop(HERE, KEYS[1])
    new.load(begun + b"".join(pieces), now=200.0)
    assert [new.get(HERE, key) for key in KEYS[:3]] == [entry(), None, entry()]


def test_a_load_keeps_to_the_bound() -> None:
    old, new = Warmth(), Warmth(most=10)
    for key in KEYS:
        old.put(HERE, key, entry())
    new.load(old.dump(), now=200.0)
    assert len(new) == 10
    assert new.get(HERE, KEYS[-1]) is not None


@pytest.mark.parametrize(
    "data", [b"", b"something else", b"cachespec warmth 1\n5m\nabc", b"cachespec warmth 2\n5m\n", b"cachespec warmth 1\n"]
)
def test_what_is_no_dump_is_left_aside(data: bytes) -> None:
    warmth = Warmth()
    warmth.put(HERE, KEYS[0], entry())
    warmth.load(data, now=200.0)
    assert len(warmth) == 1
    row = HERE + KEYS[1] + bytes([9]) + bytes(25)  # a lifetime that the dump does not name
    warmth.load(b"cachespec warmth 1\n5m\n" + row, now=200.0)
    assert len(warmth) == 1


def test_a_hundred_thousand_prefixes_take_30_megabytes() -> None:
    keys = [os.urandom(16) for _ in range(100_000)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    warmth = Warmth()
    for key in keys:
        warmth.put(HERE, key, entry())
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(warmth) == 100_000
    assert size < 30e6
    warmth.put(HERE, KEYS[0], entry())
    assert len(warmth) == 100_000


def test_entries_that_cannot_be_are_left_out_of_a_dump() -> None:
    warmth = Warmth()
    for i, (ready, until, sure) in enumerate(
        [(100.0, 400.0, 1.0), (100.0, math.inf, 1.0), (math.nan, 400.0, 1.0), (100.0, 400.0, 7.0), (1e6, 1e6 + 300, 1.0)]
    ):
        warmth.put(HERE, KEYS[i], Entry("5m", 1000, ready, until, sure))
    new = Warmth()
    new.load(warmth.dump(), now=200.0)  # the last one by a clock that ran days ahead
    assert [new.get(HERE, key) is not None for key in KEYS[:5]] == [True, False, False, False, False]
    many = Warmth()
    names = "\t".join(f"{i}" for i in range(300)).encode()
    many.put(HERE, KEYS[0], entry())
    many.load(b"cachespec warmth 1\n" + names + b"\n" + (HERE + KEYS[1] + bytes([200]) + bytes(25)), now=0.0)
    assert len(many) == 1
