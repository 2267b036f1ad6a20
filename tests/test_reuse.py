"""Gap statistics: what is learned, from what, how fast, and how it is kept."""

from __future__ import annotations

import json
import random
import tracemalloc
import zlib
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachespec.reuse import BORROW, EDGES, MEMORY, Chain, Key, Outlook, Reuse, Wait


def chain(reuse: Reuse, *keys: Key) -> Chain:
    return reuse.chain(keys, lambda: keys)


def pass_by(reuse: Reuse, key: Hashable, now: float, of: Chain) -> Wait:
    """One request whose only prefix is `key`."""
    known = -reuse.new([key])
    before = reuse.passed([key], known, now)
    return reuse.watch(key, of, now, "end", 0, before[0] if before else None)


def feed(
    reuse: Reuse, of: Chain, gaps: list[float | None], *, start: float = 0.0, name: str = "p", pause: float = 1.0
) -> float:
    """A prefix for each gap, seen once and again after it; None: never again. The time after which all is known."""
    events = [(start + i, 0, i) for i in range(len(gaps))]
    events += [(start + i + gap, 1, i) for i, gap in enumerate(gaps) if gap is not None]
    for now, second, i in sorted(events):
        if second:
            reuse.passed([(name, i)], 0, now)
        else:
            pass_by(reuse, (name, i), now, of)
    end = max(events)[0] + EDGES[-1] + 1
    reuse.advance(end)
    return end


def test_new_looks_at_what_is_new_and_at_one_more() -> None:
    reuse = Reuse()
    reuse.passed(["a", "b", "c"], -1, 0.0)
    looked: list[str] = []

    def keys() -> object:
        for key in reversed(["a", "b", "c", "d", "e"]):
            looked.append(key)
            yield key

    assert reuse.new(keys()) == 2  # type: ignore[arg-type]
    assert looked == ["e", "d", "c"]
    assert reuse.new(["x", "y"]) == 2
    assert reuse.new([]) == 0


def test_equal_keys_are_one_prefix() -> None:
    reuse = Reuse()
    reuse.passed([("tenant", "one")], -1, 0.0)
    assert reuse.new([("tenant", "".join(["o", "ne"]))]) == 0


def test_before_anything_was_seen_every_second_prefix_comes_back_within_five_minutes() -> None:
    reuse = Reuse()
    outlook = reuse.outlook(chain(reuse, ("end",)))
    assert outlook.within(300) == pytest.approx(0.54, abs=0.02)
    # What nobody has reached yet is not hoped for.
    assert outlook.within(3600) - outlook.within(300) < 0.1


def test_gaps_are_learned() -> None:
    reuse = Reuse()
    ends = chain(reuse, ("end",))
    gaps: list[float | None] = [100.0] * 60 + [400.0] * 30 + [None] * 110
    random.Random(1).shuffle(gaps)
    feed(reuse, ends, gaps)
    outlook = reuse.outlook(ends)
    assert outlook.within(60) < 0.03
    assert outlook.within(300) == pytest.approx(0.30, abs=0.03)
    assert outlook.within(3600) == pytest.approx(0.45, abs=0.03)
    assert outlook.within(300, after=300) == pytest.approx(30 / 140, abs=0.04)


def test_silence_is_learned_from_while_it_lasts() -> None:
    reuse = Reuse()
    ends = chain(reuse, ("end",))
    for i in range(200):
        pass_by(reuse, i, float(i), ends)
    before = reuse.outlook(ends).within(300)
    reuse.advance(199 + 301.0)
    assert reuse.outlook(ends).within(300) < 0.2 * before


def test_an_end_counts_when_those_that_last_count() -> None:
    """Half come back at once, half never: while the span is not over, neither is known, so nothing is biased."""
    reuse = Reuse()
    ends = chain(reuse, ("end",))
    prior = reuse.outlook(ends).within(20)
    for i in range(100):
        pass_by(reuse, i, 0.0, ends)
    for i in range(50):
        reuse.passed([i], 0, 5.0)
    assert reuse.outlook(ends).within(20) == pytest.approx(prior)
    reuse.advance(20.0)
    assert reuse.outlook(ends).within(20) == pytest.approx((50 + BORROW * prior) / (100 + BORROW))


def test_a_class_never_met_borrows_from_its_parent_and_one_that_differs_is_heard() -> None:
    reuse = Reuse()
    often = chain(reuse, ("end",), ("end", "chat"))
    end = feed(reuse, often, [10.0] * 300)
    new = chain(reuse, ("end",), ("end", "batch"))
    parent = reuse.outlook(chain(reuse, ("end",))).within(300)
    assert reuse.outlook(new).within(300) == pytest.approx(parent)
    feed(reuse, new, [None] * 60, start=end, name="q")
    assert reuse.outlook(new).within(300) < 0.2
    assert reuse.outlook(often).within(300) > 0.85


def test_old_counts_fade() -> None:
    reuse = Reuse()
    ends = chain(reuse, ("end",))
    end = feed(reuse, ends, [10.0] * int(2 * MEMORY))
    assert ends[0].waits <= MEMORY
    feed(reuse, ends, [None] * int(2 * MEMORY), start=end, name="q")
    assert reuse.outlook(ends).within(300) < 0.3  # and not the half that came back of all


def test_a_place_that_is_passed_often_has_statistics_of_its_own() -> None:
    reuse = Reuse()
    ends = chain(reuse, ("end",))
    end = feed(reuse, ends, [None] * 200)
    for i in range(40):
        wait = pass_by(reuse, "system", end + 100.0 * i, ends)
    assert wait.own is not None
    assert reuse.outlook(ends).within(300) < 0.3
    assert reuse.outlook(ends, wait.own).within(300) > 0.7


def test_further_classes_join_an_open_wait_from_there_on() -> None:
    reuse = Reuse()
    ends, stop = chain(reuse, ("end",)), chain(reuse, ("stop",))
    wait = pass_by(reuse, "a", 0.0, ends)
    reuse.advance(200.0)
    reuse.join(wait, stop)
    reuse.advance(700.0)
    assert stop[0].reached[:6] == [0, 0, 0, 1, 1, 0]
    reuse.passed(["a"], 0, 800.0)
    reuse.join(wait, chain(reuse, ("late",)))
    reuse.advance(2000.0)
    assert stop[0].ended[5] == 1
    assert chain(reuse, ("late",))[0].waits == 0


def test_places_are_bounded_and_the_longest_unused_go() -> None:
    reuse = Reuse(places=100)
    ends = chain(reuse, ("end",))
    for i in range(1000):
        pass_by(reuse, i, float(i), ends)
        pass_by(reuse, "used", float(i), ends)
        assert len(reuse) <= 101
    assert reuse.new(["used"]) == 0
    assert reuse.new([0]) == 1
    assert reuse.new([999]) == 0


def test_open_waits_are_bounded() -> None:
    reuse = Reuse(places=100)
    ends = chain(reuse, ("end",))
    for i in range(1000):
        pass_by(reuse, i, i * 0.001, ends)
    assert sum(len(queue) for queue in reuse._due) <= 100
    reuse.advance(EDGES[-1] + 2)
    assert sum(len(queue) for queue in reuse._due) == 0
    assert ends[0].reached[0] == 100  # the others were given up, and count neither way


def test_classes_are_bounded_and_coarse_ones_stay() -> None:
    reuse = Reuse()
    for i in range(20_000):
        pass_by(reuse, i, float(i), chain(reuse, ("end",), ("end", "session", i)))
    assert len(reuse._classes) + len(reuse._classes_old) < 10_000
    assert len(reuse._chains) < 10_000
    assert chain(reuse, ("end",))[0].reached[0] > 500


def test_memory_for_a_hundred_thousand_prefixes() -> None:
    count = 10_000
    keys = [b"%016d" % i for i in range(count)]
    tracemalloc.start()
    try:
        reuse = Reuse()
        for i, key in enumerate(keys):
            pass_by(reuse, key, i * 0.1, chain(reuse, ("end",), ("end", "session", i // 20)))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / count < 550  # with 50 bytes for the key itself: 60 MB


def test_what_was_learned_survives_a_restart() -> None:
    reuse = Reuse()
    classes = ("end",), ("end", "chat")
    end = feed(reuse, chain(reuse, *classes), [100.0] * 100 + [None] * 100)
    for i in range(40):
        pass_by(reuse, b"system", end + 200.0 * i, chain(reuse, *classes))
    pass_by(reuse, 7, end + 8000.0, chain(reuse, *classes))
    reuse.passed(["plain"], -1, end + 8000.0)
    after = Reuse()
    after.load(reuse.dump())
    ours, theirs = reuse.outlook(chain(reuse, *classes)), after.outlook(chain(after, *classes))
    assert [theirs.within(edge) for edge in EDGES] == pytest.approx([ours.within(edge) for edge in EDGES], abs=0.001)
    assert after.new([b"system"]) == after.new([7]) == after.new(["plain"]) == 0
    wait, own = after.wait(b"system"), reuse.wait(b"system")
    assert wait is not None
    assert own is not None
    assert wait.own is not None
    assert own.own is not None
    assert wait.own.reached == own.own.reached
    assert (wait.opened, wait.span, wait.passes, wait.role) == (own.opened, own.span, own.passes, own.role)
    # A wait that was open goes on, and what ends it is learned from by the classes of now.
    learned = chain(after, *classes)[1]
    reached = learned.reached[0]
    after.passed([7], 0, end + 8010.0)
    after.advance(end + 9000.0)
    assert learned.reached[0] > reached
    assert learned.ended[0] == 1


def test_what_is_known_here_stays_when_a_dump_is_taken_up() -> None:
    old, new = Reuse(), Reuse()
    feed(old, chain(old, ("end",)), [10.0] * 50)
    feed(new, chain(new, ("end",)), [None] * 50)
    before = new.outlook(chain(new, ("end",))).within(300)
    new.load(old.dump())
    assert new.outlook(chain(new, ("end",))).within(300) == before


def test_a_dump_is_small() -> None:
    reuse = Reuse()
    for i in range(30_000):
        pass_by(reuse, b"%032d" % i, float(i), chain(reuse, ("end",)))
    data = reuse.dump()
    assert len(data) < 2_000_000
    after = Reuse()
    after.load(data)
    assert after.new([b"%032d" % 29_999]) == 0


def _document(change: object) -> bytes:
    return zlib.compress(json.dumps(change).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        _document(None),
        _document([1, [], []]),
        _document([2, [], [[["end"], [1.0]]]]),
        _document([2, [], [[["end"], [1.0], [1.0] * 13, []]]]),
        _document([2, [], [[["end"], [1.0], [float("nan")], []]]]),
        _document([2, [], [[["end"], [-1.0], [], []]]]),
        _document([2, [], [[["end"], ["x"], [], []]]]),
        _document([2, [], [[["end", ["x"]], [1.0], [], []]]]),
        _document([2, [], [[[{}], [1.0], [], []]]]),
        _document([2, [["a", [0.0, 0, [5], "end", 0, 0, 0, 0, None]]], []]),
        _document([2, [["a", [0.0, 99, [], "end", 0, 0, 0, 0, None]]], []]),
        _document([2, [["a", [float("inf"), 0, [], "end", 0, 0, 0, 0, None]]], []]),
        _document([2, [[{"b": "zz"}, None]], []]),
        _document([2, [[[1], None]], []]),
    ],
)
def test_what_is_no_dump_is_left_aside(data: bytes) -> None:
    reuse = Reuse()
    reuse.load(data)
    assert len(reuse) == 0
    assert reuse.dump() == Reuse().dump()


@given(st.binary(max_size=200))
def test_any_bytes_can_be_offered(data: bytes) -> None:
    reuse = Reuse()
    reuse.load(data)
    reuse.load(zlib.compress(data))
    assert len(reuse) == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=len(EDGES)), st.floats(0, 2e5), st.floats(0, 2e5))
def test_an_outlook_is_a_distribution(hazards: list[float], a: float, b: float) -> None:
    outlook = Outlook(hazards)
    low, high = sorted((a, b))
    assert 0 <= outlook.within(low) <= outlook.within(high) + 1e-12 <= 1 + 2e-12
    assert 0 <= outlook.within(low, after=high) <= 1
