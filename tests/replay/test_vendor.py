"""The vendor's rules, one by one, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachespec.replay.vendor import VENDORS, Billed, Place, VendorCache

TERMS = VENDORS["anthropic"]
PATH = tuple(Place(key, key, 10 * key) for key in range(1, 6))
A, B, C, D, _ = PATH


def cache(vendor: str = "anthropic") -> VendorCache:
    return VendorCache(terms=VENDORS[vendor])


def billed(read: int, uncached: int, **writes: int) -> Billed:
    return Billed(read=read, uncached=uncached, writes=tuple((name[1:], count) for name, count in writes.items()))


def test_nothing_is_cached_without_a_mark() -> None:
    held = cache()
    assert held.request(0, 0, PATH, [], 57) == billed(0, 57)
    assert held.request(9, 1, PATH, [(C, "5m")], 57) == billed(0, 27, _5m=30)


def test_what_lies_between_is_written_for_each_mark() -> None:
    held = cache()
    assert held.request(0, 0, PATH, [(A, "1h"), (C, "1h"), (D, "5m")], 57) == billed(0, 17, _1h=30, _5m=10)
    assert held.request(400, 1, PATH, [(D, "5m")], 57) == billed(30, 17, _5m=10)


@pytest.mark.parametrize(("t", "read"), [(1.999, 0), (2, 20), (300, 20), (300.001, 0)])
def test_from_two_seconds_on_and_to_the_end_of_the_lifetime(t: float, read: int) -> None:
    held = cache()
    held.request(0, 0, PATH, [(B, "5m")], 20)
    assert held.request(t, 1, PATH, [(B, "5m")], 20).read == read


def test_only_up_to_the_last_mark() -> None:
    held = cache()
    held.request(0, 0, PATH, [(A, "5m"), (C, "5m")], 50)
    assert held.request(5, 1, PATH, [(B, "5m")], 50) == billed(10, 30, _5m=10)


def test_a_read_refreshes_what_is_before_and_nothing_deeper() -> None:
    held = cache()
    held.request(0, 0, PATH, [(A, "5m"), (B, "5m"), (C, "5m")], 50)
    held.request(200, 1, PATH, [(B, "5m")], 50)
    assert held.request(400, 2, PATH, [(C, "5m")], 50) == billed(20, 20, _5m=10)
    assert held.entries[A.key].expires_at == 700


def test_each_entry_keeps_its_own_lifetime() -> None:
    held = cache()
    held.request(0, 0, PATH, [(A, "1h"), (B, "5m")], 20)
    held.request(100, 1, PATH, [(B, "1h")], 20)  # read: pays nothing, changes nothing
    assert held.request(500, 2, PATH, [(B, "5m")], 20) == billed(10, 0, _5m=10)


def test_a_deeper_mark_keeps_the_whole_prefix() -> None:
    held = cache()
    held.request(0, 0, PATH, [(C, "5m")], 30)
    assert held.request(10, 1, PATH, [(D, "1h")], 40) == billed(30, 0, _1h=10)
    assert held.request(3_000, 2, PATH, [(D, "5m")], 40) == billed(40, 0)


def test_a_mark_inside_what_was_read_makes_an_entry_for_nothing() -> None:
    held = cache()
    held.request(0, 0, PATH, [(C, "5m")], 30)
    assert held.request(10, 1, PATH, [(A, "5m"), (C, "5m")], 30) == billed(30, 0)
    assert held.request(20, 2, PATH[:1], [(A, "5m")], 30) == billed(10, 20)


def test_writing_again_does_not_delay() -> None:
    held = cache()
    held.request(0, 0, PATH, [(B, "5m")], 20)
    assert held.request(1.5, 1, PATH, [(B, "5m")], 20) == billed(0, 0, _5m=20)
    assert held.request(2, 2, PATH, [(B, "5m")], 20) == billed(20, 0)


def test_the_own_end_is_found_at_its_whole_blocks() -> None:
    held = cache()
    end = Place(B.key, 2, 27)
    assert held.request(0, 0, PATH[:2], [(end, "5m")], 27) == billed(0, 0, _5m=27)
    assert held.request(5, 1, PATH[:2], [(end, "5m")], 27) == billed(20, 0, _5m=7)
    small = Place(-1, 0, 7)
    assert held.request(9, 2, (), [(small, "5m")], 7) == billed(0, 0, _5m=7)
    assert set(held.entries) == {B.key}


def test_keep_alives() -> None:
    held = cache()
    held.request(0, 0, PATH, [(A, "1h"), (C, "5m")], 30)
    assert held.keep_alive(290, 0, PATH, C, "5m") == billed(30, 0)
    assert held.entries[A.key].expires_at == 290 + 3_600
    assert held.request(580, 1, PATH, [(C, "5m")], 30) == billed(30, 0)
    assert held.keep_alive(900, 1, PATH, C, "1h") == billed(0, 0, _1h=30)
    assert held.request(901, 2, PATH, [(A, "1h")], 30).read == 10
    assert held.request(901, 2, PATH, [(C, "1h")], 30).read == 10  # not readable at once
    assert held.request(4_500, 3, PATH, [(C, "5m")], 30).read == 30


def test_explicit_breakpoints_are_found_exactly() -> None:
    held = cache("openai-5.6")
    held.request(0, 0, PATH, [(B, "30m")], 20)
    assert held.request(9, 1, PATH, [(C, "30m")], 30) == billed(0, 0, _30m=30)
    assert held.request(20, 2, PATH, [(C, "30m"), (D, "30m")], 40) == billed(30, 0, _30m=10)
    assert held.request(30, 3, PATH, [(PATH[4], "30m")], 50, implicit=True) == billed(40, 0, _30m=10)


def test_costs() -> None:
    one = Billed(read=100, uncached=7, writes=(("5m", 40), ("1h", 20)))
    assert one.written == 60
    assert one.cost(TERMS) == pytest.approx(10 + 7 + 50 + 40)
    assert one.cost(replace(TERMS, read=0.5)) == pytest.approx(50 + 7 + 50 + 40)
