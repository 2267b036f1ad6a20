"""Many requests at once on a scripted runtime: seats, chunked prefill, room, pins, the host tier."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence as List
from typing import Any

import pytest
from tests.engine.loop_support import finish, ids, job, read, read_all, running, text, usage
from tests.engine.scripted import ScriptedRuntime, forever, says, wait_until

from cachespec.engine.costs import CostModel
from cachespec.engine.scheduling import Pace, chunk_beside, shares
from cachespec.engine.sequence import Sequence
from cachespec.engine.speculation import CostTable
from cachespec.engine.toolcalls import Piece, PlainText
from cachespec.errors import OutOfPagesError, ServerError


def letters(start: int, count: int) -> str:
    return bytes(forever(range(start + i)) for i in range(count)).decode()


def test_as_many_as_there_are_seats_run_in_one_call() -> None:
    runtime = ScriptedRuntime(delay_s=0.001)
    with running(runtime, parallel=3) as engine:
        found = read_all([engine.submit(job(f"prompt {i} " * (i + 1), output=40)) for i in range(5)])
    for i, events in enumerate(found):
        assert text(events) == letters(9 * (i + 1), 40)
        assert finish(events).reason == "length"
    sizes = [len(spans) for spans in runtime.spans]
    assert max(sizes) == 3
    assert sum(size == 3 for size in sizes) > 30


def test_each_gets_its_own_row_whatever_the_order_of_slots() -> None:
    """Offsets of a mixed batch: prefill, decode and the last chunk of a prompt in one call (case 50)."""
    runtime = ScriptedRuntime(says("", after=0), delay_s=0.0005)
    runtime.following = lambda tokens: 65 + tokens[0] % 26
    with running(runtime, parallel=4, chunk=24) as engine:
        found = read_all([engine.submit(job(chr(97 + i) * (1 + 37 * i), output=30)) for i in range(8)])
    assert [set(text(events)) for events in found] == [{chr(65 + (97 + i) % 26)} for i in range(8)]


def test_a_long_prefill_does_not_stall_the_others_and_gets_on() -> None:
    costs = CostModel(CostTable({1: {1: 1.0, 33: 33.0}, 4: {4: 4.0, 132: 132.0}}))
    runtime = ScriptedRuntime(token_s=0.0002, width=256)
    with running(runtime, parallel=4, chunk=128, costs=costs, max_gap=4.0) as engine:
        streams = [engine.submit(job(f"{i}" * 5, output=60)) for i in range(3)]
        wait_until(lambda: any(len(spans) == 3 for spans in runtime.spans))
        big = engine.submit(job("x" * 800, output=1))
        read_all([*streams, big])
    mixed = [sum(len(s.tokens) for s in spans) for spans in runtime.spans if len(spans) == 4]
    assert len(mixed) > 10
    assert max(mixed) <= 4 * 3  # four times what the three take alone
    assert sorted(mixed)[len(mixed) // 2] >= 0.5 * 4 * 3  # and no less than half of that


def test_prefill_beside_streams_is_as_large_as_the_gap_allows() -> None:
    linear = CostTable({1: {1: 1.0, 16: 16.0}})
    flat = CostTable({1: {1: 1.0, 16: 1.1, 32: 1.2}})
    cases = [
        (linear, 0, 0, 128, 4.0, 128),
        (linear, 8, 8, 128, 4.0, 24),
        (linear, 8, 40, 128, 4.0, 120),
        (linear, 1, 1, 128, 1.0, 4),  # or it would never end
        (flat, 1, 1, 64, 4.0, 64),
        (None, 1, 1, 128, 4.0, 32),
        (linear, 1, 1, 2, 4.0, 2),
    ]
    for costs, streams, tokens, most, gap, expected in cases:
        assert chunk_beside(costs, Pace(), streams=streams, tokens=tokens, most=most, max_gap=gap) == expected


def test_without_measured_costs_the_pace_of_recent_steps_counts() -> None:
    pace = Pace()
    pace.observe(1.0, decoding=8, prefilling=0)
    assert pace.chunk(128, 4.0) == 32
    pace.observe(3.0, decoding=8, prefilling=20)  # a tenth of a quiet step each
    assert pace.chunk(128, 4.0) == 30
    pace.observe(0.9, decoding=8, prefilling=4)  # faster than a quiet one: says nothing
    assert pace.chunk(128, 4.0) == 30
    for _ in range(50):
        pace.observe(0.4, decoding=0, prefilling=100)
    assert pace.chunk(128, 4.0) == 128


@pytest.mark.parametrize("gap", [math.inf, 1e308])
def test_a_gap_without_end_takes_all_there_is(gap: float) -> None:
    pace = Pace()
    pace.observe(1.0, decoding=8, prefilling=0)
    pace.observe(3.0, decoding=8, prefilling=20)
    assert pace.chunk(128, gap) == 128
    costs = CostTable({1: {1: 1.0, 16: 16.0}})
    assert chunk_beside(costs, pace, streams=1, tokens=1, most=128, max_gap=gap) == 128
    runtime = ScriptedRuntime(delay_s=0.001)
    with running(runtime, parallel=2, max_gap=gap) as engine:
        first = engine.submit(job(output=200))
        wait_until(lambda: len(runtime.calls) > 10)
        assert len(text(read(engine.submit(job("p" * 400, output=5))))) == 5
        assert len(text(read(first))) == 200


@pytest.mark.parametrize(
    ("missing", "budget", "expected"),
    [
        ([], 10, []),
        ([5], 10, [5]),
        ([100], 10, [10]),
        ([100, 3], 10, [7, 3]),  # the oldest its half, the short one all it needs, the rest to the oldest
        ([100, 100, 4], 10, [6, 0, 4]),
        ([3, 100], 10, [3, 7]),
        ([100, 50], 11, [6, 5]),
        ([4], 0, [0]),
    ],
)
def test_shares_of_prefill(missing: List[int], budget: int, expected: List[int]) -> None:
    assert shares(missing, budget) == expected


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    runtime = ScriptedRuntime(says("", after=0), delay_s=0.001)
    ends: list[str] = []
    with running(runtime, parallel=4, chunk=32) as engine:
        named = {"long": engine.submit(job("x" * 2000)), "short": engine.submit(job("y" * 20))}
        for name, sequence in named.items():
            sequence.when_ready(lambda name=name: ends.append(name))  # type: ignore[misc]
    assert ends == ["short", "long"]


def test_a_narrow_call_serves_everybody_in_turn() -> None:
    """The deterministic mode may allow very few tokens a call."""
    runtime = ScriptedRuntime()
    with running(runtime, parallel=4, width=2) as engine:
        found = read_all([engine.submit(job("p" * (10 + i), output=30)) for i in range(5)])
    assert max(runtime.calls) <= 2
    assert [text(events) for events in found] == [letters(10 + i, 30) for i in range(5)]
    with running(ScriptedRuntime(), parallel=3, width=1) as engine:
        found = read_all([engine.submit(job("p" * (5 + i), output=20)) for i in range(4)])
    assert [text(events) for events in found] == [letters(5 + i, 20) for i in range(4)]


def test_of_those_that_need_the_same_beginning_one_computes_it() -> None:
    runtime = ScriptedRuntime(delay_s=0.002)
    with running(runtime, parallel=4, chunk=64) as engine:
        found = read_all([engine.submit(job("s" * 640 + str(i), output=3)) for i in range(4)])
    assert [usage(events).cache_read for events in found] == [0, 640, 640, 640]
    assert runtime.evaluated < 640 + 4 * 20


def test_those_that_follow_are_free_when_the_first_is_cancelled() -> None:
    runtime = ScriptedRuntime(says("ok", after=641), delay_s=0.01)
    with running(runtime, parallel=2, chunk=64) as engine:
        first, second = engine.submit(job("s" * 640 + "0")), engine.submit(job("s" * 640 + "1"))
        wait_until(lambda: len(runtime.calls) >= 2)
        first.cancel()
        assert text(read(second)) == "ok"
        assert 0 < (second.usage.cache_read or 0) < 640  # what the first one did is not lost
        assert first.usage.output == 0


def test_what_runs_is_not_interrupted_for_another_s_cancellation() -> None:
    runtime = ScriptedRuntime(delay_s=0.02)
    with running(runtime, parallel=2) as engine:
        staying, leaving = engine.submit(job("stay", output=20)), engine.submit(job("leave", output=3000))
        wait_until(lambda: any(len(spans) == 2 for spans in runtime.spans))
        leaving.cancel()
        assert text(read(staying)) == letters(4, 20)
        assert leaving.done
    assert len(runtime.calls) <= 20 + 3


def test_a_paused_reader_keeps_its_seat_when_nobody_wants_it() -> None:
    runtime = ScriptedRuntime()
    with running(runtime, parallel=2) as engine:
        lazy = engine.submit(job("lazy", output=300))
        wait_until(lambda: not lazy.room)
        assert len(text(read(engine.submit(job("busy", output=200))))) == 200
        held = runtime.evaluated
        assert text(read(lazy)) == letters(4, 300)
    assert runtime.evaluated - held < 300  # nothing was computed twice


def test_a_broken_row_fails_one_of_a_batch() -> None:
    runtime = ScriptedRuntime(delay_s=0.001)

    def following(tokens: List[int]) -> int:
        if tokens[0] == ord("b") and len(tokens) > 12:
            raise ArithmeticError("no number")
        return forever(tokens)

    runtime.following = following
    with running(runtime, parallel=3) as engine:
        bad, *good = [engine.submit(job(name * 5, output=30)) for name in ("b", "c", "d")]
        with pytest.raises(ServerError, match="no number"):
            read(bad)
        assert [text(events) for events in read_all(good)] == [letters(5, 30)] * 2
        assert engine.peek(ids("b" * 40), None)[0] == 0


# Room


def test_what_is_kept_goes_before_anybody_waits() -> None:
    runtime = ScriptedRuntime(says("", after=0), context=512, room=512)
    with running(runtime, parallel=2) as engine:
        for i in range(6):
            assert usage(read(engine.submit(job(str(i) * 200)))).cache_read == 0
        assert runtime.used <= 512
        stats = engine.report()["prefix"]
        assert stats.evicted_pages > 0
        assert usage(read(engine.submit(job("5" * 200)))).cache_read == 192  # the last one is still there


def test_when_room_runs_out_the_youngest_starts_over_and_nobody_notices() -> None:
    runtime = ScriptedRuntime(context=400, room=400, delay_s=0.0005)
    with running(runtime, parallel=4) as engine:
        found = read_all([engine.submit(job(f"{i}" * 50, output=150)) for i in range(6)])
        assert engine.report()["preempted"] > 0
    assert [text(events) for events in found] == [letters(50, 150)] * 6
    assert all(usage(events).output == 150 for events in found)


class Silent(PlainText):
    """Nothing to read, so nobody waits for a reader."""

    def push(self, text: str) -> list[Piece]:
        return []


@pytest.mark.parametrize("prompt", [300, 64])
def test_who_is_cancelled_off_its_slot_is_counted_what_it_read_and_what_stays_of_it(prompt: int) -> None:
    """In the middle of its prompt, and in the middle of its answer."""
    both, cancelled = threading.Event(), threading.Event()

    def following(tokens: List[int]) -> int:
        assert both.wait(20)
        assert not engine.report()["preempted"] or cancelled.wait(20)
        return forever(tokens)

    runtime = ScriptedRuntime(following, context=700, room=16 + prompt + 38, delay_s=0.0005)
    with running(runtime, parallel=2, chunk=16, max_gap=1.0) as engine:
        first = engine.submit(job("a" * 16, output=600, parser=Silent()))
        second = engine.submit(job("B" * prompt, output=200, parser=Silent()))
        both.set()
        wait_until(lambda: engine.report()["preempted"] > 0)
        second.cancel()
        cancelled.set()
        wait_until(lambda: second.done)
        first.cancel()
        used = second.usage
        evaluated = sum(len(s.tokens) for spans in runtime.spans for s in spans if s.tokens[0] == ord("B"))
    assert evaluated > 16
    assert used.input_tokens == evaluated
    assert used.cache_write == {"kv": evaluated // 16 * 16}
    assert bool(used.output) == (prompt == 64)


def test_a_request_that_is_alone_and_finds_no_room_fails_with_a_typed_error() -> None:
    """A runtime may have less room than it said: then the error is the request's, not the engine's."""
    runtime = ScriptedRuntime(says("fine", after=4), room=None)
    runtime.no_room_at = 0
    with running(runtime, parallel=2) as engine:
        with pytest.raises(OutOfPagesError):
            read(engine.submit(job("ask:")))
        assert text(read(engine.submit(job("ask:")))) == "fine"


def test_slots_that_copy_are_given_up_least_recently_used_first() -> None:
    runtime = ScriptedRuntime(says("", after=0), sequences=3, shares=False)
    with running(runtime, parallel=1) as engine:
        for name in ("a", "b", "c", "a", "d"):
            read(engine.submit(job(name * 100)))
        reads = [engine.peek(ids(name * 100), None)[0] for name in "abcd"]
    assert reads == [96, 0, 96, 96]


def test_a_session_s_kv_outlives_others() -> None:
    runtime = ScriptedRuntime(says("", after=0), sequences=3, shares=False)
    with running(runtime, parallel=1) as engine:
        read(engine.submit(job("mine" * 30, session="s", keep_s=60.0)))
        read(engine.submit(job("past" * 30, session="t", keep_s=0.0)))
        for i in range(5):
            read(engine.submit(job(f"{i}" * 100)))
        assert engine.peek(ids("mine" * 30), None)[0] == 112
        assert engine.peek(ids("past" * 30), None)[0] == 0
        assert engine.report()["prefix"].pins == 1


def test_pins_never_take_the_room_that_requests_need() -> None:
    runtime = ScriptedRuntime(says("", after=0), sequences=3, context=512, room=600)
    with running(runtime, parallel=2) as engine:
        for i in range(8):
            read(engine.submit(job(f"{i}" * 80, session=f"s{i}", keep_s=600.0)))
            assert engine.report()["prefix"].pins <= 1
        found = read_all([engine.submit(job(name * 250, output=3)) for name in "xyz"])
    assert all(finish(events).reason == "stop" for events in found)


def test_evicted_kv_comes_back_from_host_memory() -> None:
    runtime = ScriptedRuntime(says("", after=0), sequences=2, shares=False)
    with running(runtime, parallel=1, host_bytes=1 << 20) as engine:
        for name in "abc":
            read(engine.submit(job(name * 100)))
        assert engine.peek(ids("a" * 100), None)[:2] == (0, 96)
        before = runtime.evaluated
        assert usage(read(engine.submit(job("a" * 100)))).cache_read == 96
        assert runtime.evaluated - before == 4
        assert engine.report()["prefix"].restores == 1


def test_a_copy_that_cannot_be_restored_is_computed() -> None:
    runtime = ScriptedRuntime(says("fine", after=100), sequences=2, shares=False, imports=False)
    with running(runtime, parallel=1, host_bytes=1 << 20) as engine:
        for name in "abc":
            read(engine.submit(job(name * 100)))
        events = read(engine.submit(job("a" * 100)))
        assert text(events) == "fine"
        assert usage(events).cache_read == 0
        assert engine.report()["prefix"].failed_restores == 1


def test_the_backlog_counts_what_a_newcomer_waits_for() -> None:
    runtime = ScriptedRuntime(delay_s=0.01)
    with running(runtime, parallel=2, chunk=10) as engine:
        open_: list[Sequence] = [engine.submit(job("p" * 100, output=5)), engine.submit(job("q" * 50, output=5))]
        assert engine.backlog[1] == 1  # one of the two must end first
        open_.append(engine.submit(job("r" * 30, output=5)))
        tokens, ahead = engine.backlog
        assert ahead == 2
        assert 30 <= tokens <= 180
        read_all(open_)
        assert engine.backlog == (0, 0)


def test_time_is_split_by_tokens() -> None:
    runtime = ScriptedRuntime(says("", after=0), delay_s=0.05)
    with running(runtime, parallel=2, chunk=128) as engine:
        start = time.perf_counter()
        long, short = engine.submit(job("x" * 90)), engine.submit(job("y" * 10))
        read_all([long, short])
        took = time.perf_counter() - start
    assert long.busy_s > 3 * short.busy_s
    assert long.busy_s + short.busy_s <= took


class Smaller(ScriptedRuntime):
    """It has room for fewer tokens than it says, as where sequences that are alike turn out to share nothing."""

    def evaluate(self, spans: Any) -> list[int]:
        if self.used + sum(len(span.tokens) for span in spans) > 300:
            raise OutOfPagesError("no room")
        return super().evaluate(spans)


@pytest.mark.parametrize("host_bytes", [0, 20_000])
def test_a_count_of_room_that_is_wrong_costs_time_and_no_answer(host_bytes: int) -> None:
    with running(Smaller(room=10_000), parallel=3, chunk=32, host_bytes=host_bytes) as engine:
        prompts = [letter * 100 for letter in "abcde"]
        found = read_all([engine.submit(job(prompt, output=80)) for prompt in prompts])
        for events in found:
            assert text(events) == bytes(forever(range(100 + i)) for i in range(80)).decode()
        assert engine.report()["preempted"] < 30
