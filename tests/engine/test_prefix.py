"""The prefix index: against a naive model, and case by case."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachespec.engine import prefix as module
from cachespec.engine.pages import PAGE, Tokens, agreement, namespace, packed
from cachespec.engine.prefix import Cut, NearMiss, PrefixIndex
from cachespec.errors import InputError

NS = b"a" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(*pages: int, tail: int = 0) -> list[int]:
    """A prompt of whole pages, each filled with its number, and some tokens more."""
    return [n * 100 + i for n in pages for i in range(PAGE)] + [7] * tail


def kept(index: PrefixIndex, slot: int, tokens: Tokens, ns: bytes | None = NS) -> list[Cut]:
    """Insert and retire, doing what the runtime would."""
    index.insert(slot, tokens, ns)
    cuts = index.retire(slot)
    for cut in cuts:
        index.cut(cut.slot, cut.length)
    index.check()
    return cuts


def test_a_match_is_whole_pages_and_never_the_whole_prompt() -> None:
    index = PrefixIndex(page_bytes=1)
    kept(index, 3, run(1, 2, 3, tail=5))
    assert index.match(run(1, 2, 3, tail=5), NS).tokens == 3 * PAGE
    whole = index.match(run(1, 2, 3), NS)  # vllm#11186: all of it is there, its last token is computed again
    assert whole.tokens == 2 * PAGE < whole.queried
    assert index.match(run(1, 2, 3)[:PAGE], NS).tokens == 0
    assert index.match(run(1, 2, 3)[: PAGE + 1], NS).tokens == PAGE
    for short in ([], [100]):
        assert index.match(short, NS).tokens == 0
    found = index.match(run(1, 2, 9, tail=1), NS)
    assert (found.tokens, found.slot, found.adopt) == (2 * PAGE, 3, False)
    assert index.match(run(1, 2, 3, tail=1), NS).adopt


def test_arrays_and_lists_are_the_same() -> None:
    index = PrefixIndex(page_bytes=1)
    tokens = run(1, 2, 3, tail=1)
    kept(index, 0, np.array(tokens, dtype=np.int32))
    wide = np.repeat(np.array(tokens, dtype=np.int32), 2)[::2]  # not contiguous
    for form in (tokens, tuple(tokens), np.array(tokens), np.array(tokens, dtype=np.int64), wide):
        assert index.match(form, NS).tokens == 3 * PAGE
    wrongs: list[Any] = [[1.5] * 20, [2**40] * 20, ["a"] * 20]
    for wrong in wrongs:
        with pytest.raises(InputError):
            index.match(wrong, NS)
    assert index.peek(tokens, NS) == (3 * PAGE, 0)
    assert index.peek(tokens, None) == index.peek([1], NS) == (0, 0)


def test_a_hit_misses_at_most_a_page_of_what_is_common() -> None:
    index, rng = PrefixIndex(page_bytes=1), random.Random(1)
    long = [rng.randrange(50_000) for _ in range(1000)]
    kept(index, 0, long)
    for common in range(0, 1000, 7):
        other = [*long[:common], 60_000, *long[common:]]
        hit = index.match(other, NS).tokens
        assert common - PAGE < hit <= common


def test_crafted_collisions_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weak(bytes):
        """Every slice has the same hash."""

        def __hash__(self) -> int:
            return 0

        def __eq__(self, other: object) -> bool:
            return bytes.__eq__(self, other)

        def __getitem__(self, key: slice) -> Weak:  # type: ignore[override]
            return Weak(bytes.__getitem__(self, key))

    monkeypatch.setattr(module, "packed", lambda tokens: Weak(packed(tokens)))
    index = PrefixIndex(page_bytes=1)
    assert hash(Weak(b"a" * 64)[0:64]) == hash(Weak(b"b" * 64)[0:64])
    kept(index, 0, run(1, 2, 3))
    kept(index, 1, run(4, 2, 3))
    assert index.match(run(1, 2, 3, tail=1), NS).slot == 0
    assert index.match(run(4, 2, 3, tail=1), NS).slot == 1
    assert index.match(run(5, 2, 3, tail=1), NS).tokens == 0
    assert index.match(run(1, 3, 2, tail=1), NS).tokens == PAGE


def test_the_same_page_after_something_else_is_another_page() -> None:
    index = PrefixIndex(page_bytes=1)
    kept(index, 0, run(1, 2))
    assert index.match(run(2, 1, tail=1), NS).tokens == 0
    assert index.match(run(2, tail=1), NS).tokens == 0


of = partial(namespace, model=b"m" * 16, dtype="f16")


def test_whatever_changes_kv_is_another_namespace() -> None:
    variants = [
        of(),
        namespace(model=b"n" * 16, dtype="f16"),
        namespace(model=b"m" * 16, dtype="q8_0"),
        of(adapter=b"content-1"),  # same name or not: another content misses (vllm#30931)
        of(adapter=b"content-2"),
        of(adapter=b"content-1/load-2"),  # reloaded under the same name (vllm#42125)
        of(salt=b"content-1"),  # the same bytes in another field (vllm#51899)
        of(salt=b""),
        of(salt=b"tenant"),
        of(images=[(5, b"cat")]),  # same placeholder tokens, another image (ROCm/ATOM#1358)
        of(images=[(5, b"dog")]),
        of(images=[(6, b"cat")]),
        of(images=[(5, b"cat"), (6, b"dog")]),
        of(images=[(5, b"cat")], adapter=b"content-1", salt=b"tenant"),
        namespace(model=b"m" * 15, dtype="mf16"),
    ]
    assert len(set(variants)) == len(variants)
    assert all(v is not None and len(v) == 16 for v in variants)
    assert of(salt=b"tenant") == of(salt=b"tenant")
    index = PrefixIndex(page_bytes=1)
    for slot, name in enumerate(variants):
        kept(index, slot, run(1, 2), name)
    for slot, name in enumerate(variants):
        assert index.match(run(1, 2, tail=1), name).slot == slot


def test_what_cannot_be_identified_is_not_kept() -> None:
    unknown = [
        namespace(model=b"", dtype="f16"),
        of(adapter=b""),
        of(images=[(0, b"")]),
        of(images=[(-1, b"cat")]),
    ]
    assert unknown == [None] * 4
    index = PrefixIndex(page_bytes=1)
    assert index.insert(0, run(1, 2), None) == 0
    assert index.retire(0) == [Cut(0, 0)]
    assert index.match(run(1, 2, tail=1), None).tokens == 0
    assert index.stats().pages == 0
    assert index.pin("s", run(1), None, 1.0) == 0


def test_where_a_prompt_left_what_is_kept() -> None:
    index = PrefixIndex(page_bytes=1)
    kept(index, 0, run(1, 2, 3))
    kept(index, 1, run(1, 5, 6))
    edited = run(1, 2, 3, tail=1)
    edited[20] = 9
    assert index.match(edited, NS).near == NearMiss(20, kept=204, given=9)
    first = run(1)
    first[3] = 9
    assert index.match([*first, 1], NS).near == NearMiss(3, kept=103, given=9)
    assert index.match(run(1, 2, 9, tail=1), NS).near == NearMiss(2 * PAGE, kept=300, given=900)
    assert index.match(run(8, 9, tail=1), NS).near is None  # nothing in common
    assert index.match(run(1, 2, 3, tail=4), NS).near is None  # it goes on
    assert index.match(run(1, 2, 3), NS).near is None  # it is all there
    assert index.match(run(1, 2)[: PAGE + 3], NS).near is None  # it ends inside
    assert index.match(edited, b"b" * 16).near is None
    stats = index.stats()
    assert (stats.near_misses, stats.queries, stats.hits, stats.misses) == (3, 8, 5, 3)
    assert stats.last_near_miss == NearMiss(2 * PAGE, kept=300, given=900)
    assert stats.to_dict()["last_near_miss"] == {"position": 32, "kept": 300, "given": 900}
    assert stats.hit_tokens == 16 * (1 + 0 + 2 + 0 + 3 + 2 + 1 + 0)


def test_running_sequences_share_and_retired_ones_that_add_nothing_go() -> None:
    index = PrefixIndex(page_bytes=1)
    index.insert(0, run(1, 2), NS)
    found = index.match(run(1, 2, 3, tail=1), NS)
    assert (found.slot, found.adopt) == (0, False)
    assert index.insert(1, run(1, 2), NS) == 2 * PAGE
    assert index.insert(1, run(1, 2, 3, tail=1), NS) == 3 * PAGE
    assert index.stats().device_pages == 3
    assert index.room(10**6) == []  # both run
    assert index.victim() is None
    assert index.retire(1) == [Cut(1, 3 * PAGE)]
    assert index.retire(0) == [Cut(0, 0)]  # all of it is in the other slot
    index.cut(0, 0)
    index.check()
    assert index.match(run(1, 2, 3, tail=1), NS).slot == 1
    kept(index, 2, run(1, 2, 3, 4))
    assert index.stats().device_slots == 1  # the shorter one went when the longer one came
    assert index.retire(9) == [Cut(9, 0)]


def test_a_slot_only_grows() -> None:
    index = PrefixIndex(page_bytes=1)
    index.insert(0, run(1, 2), NS)
    for wrong, ns in ((run(1), NS), (run(1, 3), NS), (run(1, 2), b"b" * 16)):
        with pytest.raises(InputError, match="slot 0"):
            index.insert(0, wrong, ns)
        index.check()
    assert index.stats().pages == 2


def test_the_tail_goes_before_the_head_and_the_oldest_first() -> None:
    index = PrefixIndex(page_bytes=1)
    kept(index, 0, run(1, 2, 3))
    kept(index, 1, run(1, 2, 4))
    kept(index, 2, run(5, 6))
    index.match(run(1, 2, 3, tail=1), NS)
    # Page 4 was used least recently, then 6 and 5, then 3; 1 and 2 were used with 3.
    assert index.room(1) == [Cut(1, 0)]  # what remains of slot 1 is in slot 0
    assert index.room(2 * PAGE) == [Cut(1, 0), Cut(2, PAGE)]
    assert index.room(3 * PAGE) == [Cut(1, 0), Cut(2, 0)]
    cuts = index.room(4 * PAGE)
    assert cuts == [Cut(1, 0), Cut(2, 0), Cut(0, 2 * PAGE)]
    for cut in cuts:
        index.cut(cut.slot, cut.length)
        index.check()
    assert index.match(run(1, 2, 3, tail=1), NS).tokens == 2 * PAGE
    assert index.stats().evicted_pages == 4


def test_a_head_is_as_fresh_as_the_tail_that_went() -> None:
    index = PrefixIndex(page_bytes=1)
    kept(index, 0, run(1, 2))
    kept(index, 1, run(3))
    index.match(run(1, 2, tail=1), NS)
    index.cut(0, PAGE)
    assert index.room(1) == [Cut(1, 0)]


def test_a_dropped_page_is_gone_at_once() -> None:
    index = PrefixIndex(page_bytes=1)
    kept(index, 0, run(1, 2, 3))
    index.cut(0, 0)
    assert index.match(run(1, 2, 3, tail=1), NS).tokens == 0
    kept(index, 0, run(4, 5, 6))  # the same numbers, other pages (kvcached#362)
    assert index.match(run(1, 2, 3, tail=1), NS).tokens == 0
    assert index.match(run(4, 5, 6, tail=1), NS).tokens == 3 * PAGE
    assert index.stats().pages == 3


def test_what_is_acquired_or_pinned_stays() -> None:
    clock = Clock()
    index = PrefixIndex(page_bytes=1, clock=clock)
    kept(index, 0, run(1, 2, 3))
    kept(index, 1, run(1, 4))
    match = index.match(run(1, 2, tail=1), NS)
    index.acquire(match)
    index.acquire(match)
    assert index.room(10**6) == [Cut(0, 2 * PAGE), Cut(1, 0)]
    assert index.victim() == Cut(1, 0)
    index.release(match)
    assert index.victim() == Cut(1, 0)
    index.release(match)
    assert index.room(10**6) == [Cut(0, 0), Cut(1, 0)]
    assert index.pin("session", run(1, 4, 9), NS, deadline=10.0) == 2 * PAGE
    assert index.victim() == Cut(0, 0)
    assert index.room(10**6) == [Cut(0, 0)]
    for cut in index.room(10**6):
        index.cut(cut.slot, cut.length)
    assert index.victim() is None
    clock.now = 10.0
    assert index.victim() == Cut(1, 0)
    assert index.stats().pins == 0
    index.pin("session", run(1, 4), NS, deadline=20.0)
    index.unpin("session")
    index.unpin("session")
    assert index.victim() == Cut(1, 0)
    index.pin("session", run(1, 4), NS, deadline=20.0)
    index.cut(1, 0)  # a cut is a fact, whatever was wished
    index.check()
    assert index.stats().pins == 0


def test_a_page_kept_in_two_slots_loses_only_one_of_them() -> None:
    index = PrefixIndex(page_bytes=1)
    kept(index, 0, run(1, 2, 3))
    kept(index, 1, run(1, 2, 4))
    index.pin("session", run(1, 2), NS, deadline=float("inf"))
    for cut in index.room(10**6):
        index.cut(cut.slot, cut.length)
    index.check()
    assert index.match(run(1, 2, tail=1), NS).tokens == 2 * PAGE
    assert index.stats().device_slots == 1


def test_budget_and_accounting_where_forks_share_and_where_they_copy() -> None:
    for shared, expected in ((True, 3), (False, 4)):
        index = PrefixIndex(page_bytes=100, budget=250, shared=shared)
        kept(index, 0, run(1, 2))
        kept(index, 1, run(1, 3))
        assert index.used_bytes == expected * 100
        assert index.excess() == (expected * 100 - 250 + 99) // 100 * PAGE
        for cut in index.room(index.excess()):
            index.cut(cut.slot, cut.length)
        assert index.excess() == 0
        index.check()
    assert PrefixIndex(page_bytes=1).excess() == 0
    for size, budget, host in ((0, 1, 1), (1, -1, 0), (1, None, -1)):
        with pytest.raises(InputError):
            PrefixIndex(page_bytes=size, budget=budget, host_budget=host)


def test_the_host_tier_restores_and_may_fail_to() -> None:
    index = PrefixIndex(page_bytes=1, host_budget=100)
    kept(index, 0, run(1, 2, 3))
    assert not index.stash(0, b"x" * 101)  # more than its whole budget
    assert index.stash(0, b"x" * 60)
    assert not index.stash(0, b"y" * 60)  # it is there already
    index.cut(0, 0)
    found = index.match(run(1, 2, 9, tail=1), NS)
    assert (found.tokens, found.slot, found.stored) == (0, None, 2 * PAGE)
    assert index.payload(found) == b"x" * 60
    assert index.match(run(1, 2, 9, tail=1), b"b" * 16).stored == 0  # this tier too knows namespaces (vllm#44250)
    assert index.peek(run(1, 2, 9, tail=1), NS) == (0, 2 * PAGE)
    kept(index, 0, run(1))
    found = index.match(run(1, 2, 3, tail=1), NS)
    assert (found.tokens, found.slot, found.stored) == (PAGE, 0, 3 * PAGE)
    index.lost(found)  # llama.cpp#17078: there was no room to import it
    index.lost(found)
    index.check()
    assert index.payload(found) == b""
    assert index.match(run(1, 2, 3, tail=1), NS).stored == 0
    stats = index.stats()
    assert (stats.restores, stats.failed_restores, stats.host_bytes, stats.host_pages) == (1, 2, 0, 0)


def test_host_copies_go_by_last_use_and_their_own_beginnings_first() -> None:
    index = PrefixIndex(page_bytes=1, host_budget=100)
    kept(index, 0, run(1, 2))
    index.stash(0, b"a" * 40)
    kept(index, 1, run(3))
    index.stash(1, b"b" * 40)
    kept(index, 0, run(1, 2, 3))
    assert index.stash(0, b"c" * 50)  # its beginning goes, not the other one
    assert (index.stats().host_bytes, index.stats().evicted_copies) == (90, 0)
    kept(index, 2, run(5))
    index.match(run(3, tail=1), NS)
    assert index.stash(2, b"d" * 50)
    assert (index.stats().host_bytes, index.stats().evicted_copies) == (90, 1)
    assert index.peek(run(1, 2, tail=1), NS)[1] == 0
    index.pin("a", run(3), NS, float("inf"))
    index.pin("b", run(5), NS, float("inf"))
    kept(index, 3, run(6))
    assert not index.stash(3, b"e" * 50)  # what is pinned stays
    assert not PrefixIndex(page_bytes=1).stats().host_bytes
    index.check()


def test_the_benchmark_runs_and_keeps_its_budgets() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "prefix_index.py"
    lines = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True).stdout.splitlines()
    figures = {line[:34].strip(): line for line in lines}
    memory = float(figures["memory a page, 1,000,000 tokens"].split("tokens")[1].split()[0])
    assert memory <= 300  # times are for a quiet machine and stand in the results


def test_integrity_is_really_checked() -> None:
    index = PrefixIndex(page_bytes=1, host_budget=10)
    kept(index, 0, run(1, 2))
    index.stash(0, b"abc")
    index._table.on["device"] += 1
    index._copies.bytes += 1
    index._guards[77] = 1
    index._pins["x"] = (99, 1.0)
    index._slots[0].path.pop()
    index._table._spare.append(0)
    with pytest.raises(RuntimeError, match=r"do not add up.*counted.*spare.*host tier.*acquired.*pinned"):
        index.check()


def test_agreement_counts_tokens() -> None:
    a, b = packed([1, 2, 3]), packed([1, 2, 4])
    assert (agreement(a, b), agreement(a, a), agreement(a, b""), agreement(a, packed([1]))) == (2, 3, 0, 1)
    # Tokens that differ in one byte only, or whose bytes agree across their border, are told apart.
    assert agreement(packed([0x0100]), packed([0x0000])) == 0


PAGES = st.lists(st.integers(0, 2), max_size=5)
SLOTS = st.integers(0, 5)


class Machine(RuleBasedStateMachine):
    """The index against lists of tokens. Few slots and few different pages, so that everything meets everything."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.index = PrefixIndex(page_bytes=1, budget=6, host_budget=30, clock=self.clock)
        self.device: dict[int, tuple[bytes, list[int]]] = {}
        self.busy: set[int] = set()
        self.copies: dict[bytes, tuple[bytes, list[int]]] = {}
        self.pins: dict[int, tuple[bytes, list[int], float]] = {}
        self.names = (NS, b"b" * 16)

    def reach(self, tokens: list[int], ns: bytes, cap: int, among: list[tuple[bytes, list[int]]]) -> int:
        best = 0
        for name, held in among:
            size = 0
            while size < min(cap, len(held) // PAGE) and held[: (size + 1) * PAGE] == tokens[: (size + 1) * PAGE]:
                size += 1
            best = max(best, size if name == ns else 0)
        return best

    def apply(self, cut: Cut) -> None:
        self.index.cut(cut.slot, cut.length)
        if cut.length == 0:
            self.device.pop(cut.slot, None)
            self.busy.discard(cut.slot)
        elif cut.slot in self.device:
            name, held = self.device[cut.slot]
            self.device[cut.slot] = name, held[: cut.length]

    @rule(slot=SLOTS, more=PAGES, tail=st.integers(0, 3), other=st.booleans())
    def insert(self, slot: int, more: list[int], tail: int, other: bool) -> None:
        name, held = self.device.get(slot, (self.names[other], []))
        tokens = held + run(*more)
        assert self.index.insert(slot, tokens + [5] * tail, name) == len(tokens)
        self.device[slot] = name, tokens
        self.busy.add(slot)

    @rule(slot=SLOTS)
    def retire(self, slot: int) -> None:
        before = [self.reach(held, name, 99, list(self.device.values())) for name, held in self.device.values()]
        owners = list(self.device.values())
        self.busy.discard(slot)
        for cut in self.index.retire(slot):
            self.apply(cut)
        after = [self.reach(held, name, 99, list(self.device.values())) for name, held in owners]
        assert before == after, "retiring lost something"

    @rule(pages=PAGES, tail=st.integers(0, 3), other=st.booleans())
    def match(self, pages: list[int], tail: int, other: bool) -> None:
        tokens, name = run(*pages) + [5] * tail, self.names[other]
        cap = max(0, len(tokens) - 1) // PAGE
        found = self.index.match(tokens, name)
        device = self.reach(tokens, name, cap, list(self.device.values()))
        host = self.reach(tokens, name, cap, list(self.copies.values()))
        assert (found.tokens, found.stored) == (device * PAGE, host * PAGE if host > device else 0)
        assert self.index.peek(tokens, name) == (device * PAGE, host * PAGE)
        if found.slot is not None:
            assert self.device[found.slot][1][: found.tokens] == tokens[: found.tokens]
            assert found.adopt == (found.slot not in self.busy and len(self.device[found.slot][1]) == found.tokens)
        if found.stored:
            held = self.copies[self.index.payload(found)][1]
            assert held[: found.stored] == tokens[: found.stored]
        if found.near is not None:
            at, everything = found.near.position, [*self.device.values(), *self.copies.values()]
            assert tokens[at] == found.near.given != found.near.kept
            assert any(n == name and h[:at] == tokens[:at] and h[at] == found.near.kept for n, h in everything if len(h) > at)

    @rule(slot=SLOTS, size=st.integers(1, 12))
    def stash(self, slot: int, size: int) -> None:
        if slot in self.device:
            payload = bytes([len(self.copies)]) * size + random.randbytes(4)
            done = self.index.stash(slot, payload)
            left = {copy.payload for copy in self.index._copies.all.values()}
            self.copies = {p: c for p, c in self.copies.items() if p in left}
            if done:
                self.copies[payload] = self.device[slot]

    @rule(owner=st.integers(0, 2), pages=PAGES, lasts=st.integers(0, 4))
    def pin(self, owner: int, pages: list[int], lasts: int) -> None:
        size = self.index.pin(owner, run(*pages), NS, self.clock.now + lasts)
        self.pins[owner] = NS, run(*pages)[:size], self.clock.now + lasts

    @rule()
    def wait(self) -> None:
        self.clock.now += 1

    @precondition(lambda self: self.index.excess() > 0)
    @rule()
    def shrink(self) -> None:
        over, before = self.index.excess(), self.index.used_bytes
        held = {
            o: self.reach(t, n, 99, list(self.device.values())) for o, (n, t, end) in self.pins.items() if end > self.clock.now
        }
        cuts = self.index.room(over)
        assert not {cut.slot for cut in cuts} & self.busy
        for cut in cuts:
            self.apply(cut)
        for owner, size in held.items():
            name, tokens, _ = self.pins[owner]
            assert self.reach(tokens, name, 99, list(self.device.values())) == size, "a pinned page went"
        if self.index.excess():
            assert self.index.room(1) == [], "it could have given more"
        else:
            assert before - self.index.used_bytes == over // PAGE, "it gave more than it had to"

    @rule()
    def free_one(self) -> None:
        cut = self.index.victim()
        if cut is not None:
            assert cut.slot not in self.busy
            self.apply(cut)

    @invariant()
    def sound(self) -> None:
        self.index.check()
        expected = {(name, tuple(held[: i + PAGE])) for name, held in self.device.values() for i in range(0, len(held), PAGE)}
        assert self.index.stats().device_pages == len(expected)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
