"""The engine's loop on a scripted runtime: order, reuse, back-pressure, cancellation, crash, shutdown."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from tests.engine.loop_support import finish, ids, job, read, running, text, usage
from tests.engine.scripted import END, ScriptedRuntime, engine_threads, forever, says, wait_until

from cachespec.engine.averages import Average, shared_prefix
from cachespec.engine.loop import Engine
from cachespec.engine.sequence import CAPACITY, Sequence
from cachespec.errors import ContextLengthError, EngineStoppedError, InputError, OutOfPagesError, ServerError
from cachespec.usage import Usage


def test_an_answer_with_its_end_and_its_counts() -> None:
    runtime = ScriptedRuntime(says("Grüße!", after=6))
    with running(runtime) as engine:
        events = read(engine.submit(job()))
    assert text(events) == "Grüße!"
    assert finish(events).reason == "stop"
    assert (finish(events).busy_s or 0) > 0
    assert usage(events) == Usage(uncached=6, cache_read=0, cache_write={}, output=8)
    assert events[-1] == finish(events)


def test_the_end_token_in_mid_run_ends_the_request() -> None:
    def following(tokens: list[int]) -> int:
        return END if len(tokens) == 9 else 120

    with running(ScriptedRuntime(following)) as engine:  # type: ignore[arg-type]
        events = read(engine.submit(job()))
    assert text(events) == "xxx"
    assert usage(events).output == 3


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_prefill_in_chunks(length: int) -> None:
    runtime = ScriptedRuntime(says("ok", after=length))
    with running(runtime, chunk=128) as engine:
        assert text(read(engine.submit(job("p" * length)))) == "ok"
    whole, rest = divmod(length, 128)
    assert runtime.calls == [128] * whole + [rest] * (rest > 0) + [1, 1]


def test_output_limit_is_length_and_clips_nothing_else() -> None:
    with running(ScriptedRuntime()) as engine:
        events = read(engine.submit(job(output=5)))
    assert finish(events).reason == "length"
    assert usage(events).output == 5
    assert len(text(events)) == 5


def test_a_job_up_to_the_last_position_of_the_context() -> None:
    runtime = ScriptedRuntime(context=64)
    with running(runtime) as engine:
        events = read(engine.submit(job("p" * 40, output=24)))
        assert usage(events).output == 24
        events = read(engine.submit(job("q" * 63, output=1)))
        assert usage(events).output == 1
        with pytest.raises(ContextLengthError):
            engine.submit(job("q" * 63, output=2))
        with pytest.raises(InputError):
            engine.submit(job(""))
        assert engine.active == 0


# Prefix reuse in whole pages (cases 1, 2, 11, 15, 17, 29)


def test_a_shared_prefix_is_read_and_only_the_rest_is_evaluated() -> None:
    runtime = ScriptedRuntime(says("", after=0))
    with running(runtime) as engine:
        read(engine.submit(job("x" * 400 + "first")))
        before = runtime.evaluated
        events = read(engine.submit(job("x" * 400 + "other one, which is longer")))
    assert usage(events) == Usage(uncached=10, cache_read=400, cache_write={"kv": 16}, output=0)
    assert runtime.evaluated - before == 26


def test_the_same_prompt_again_recomputes_its_last_page_at_most() -> None:
    runtime = ScriptedRuntime(says("answer", after=32))
    with running(runtime) as engine:
        first = read(engine.submit(job("question" * 4)))
        before = runtime.evaluated
        second = read(engine.submit(job("question" * 4)))
    assert text(first) == text(second) == "answer"
    assert usage(second) == Usage(uncached=0, cache_read=16, cache_write={"kv": 16}, output=6)
    assert runtime.evaluated - before == 16 + 6


def test_an_answer_that_comes_back_in_the_next_prompt_is_read() -> None:
    runtime = ScriptedRuntime(says("answer" * 3, after=20))
    with running(runtime) as engine:
        read(engine.submit(job("ask:" * 5)))
        runtime.following = says("", after=0)
        events = read(engine.submit(job("ask:" * 5 + "answer" * 3 + ", and now?")))
    assert usage(events).cache_read == 32


def test_another_tenant_reads_nothing() -> None:
    runtime = ScriptedRuntime(says("", after=0))
    secret = "secret" * 10
    with running(runtime) as engine:
        read(engine.submit(job(secret, namespace="a")))
        assert engine.peek(ids(secret), "a")[0] == 48
        assert engine.peek(ids(secret), "b") == (0, 0, None)
        names = ["b", None, None, "a", ""]
        reads = [usage(read(engine.submit(job(secret, namespace=name)))).cache_read for name in names]
    assert reads == [0, 0, 48, 48, 0]


def test_cache_off_neither_reads_nor_keeps_and_leaves_others_alone() -> None:
    runtime = ScriptedRuntime(says("", after=0))
    with running(runtime) as engine:
        off = read(engine.submit(job("p" * 50, cache="off")))
        after = read(engine.submit(job("p" * 50)))
        again = read(engine.submit(job("p" * 50, cache="off")))
        last = read(engine.submit(job("p" * 50)))
    assert usage(off) == usage(again) == Usage(uncached=50, cache_read=0, cache_write={}, output=0)
    assert [usage(e).cache_read for e in (after, last)] == [0, 48]


def test_no_write_reads_and_keeps_nothing_new() -> None:
    runtime = ScriptedRuntime(says("", after=0))
    with running(runtime) as engine:
        nothing = read(engine.submit(job("p" * 50, cache="no-write")))
        read(engine.submit(job("p" * 50)))
        quiet = read(engine.submit(job("p" * 50 + "new" * 10, cache="no-write")))
        after = read(engine.submit(job("p" * 50 + "new" * 10)))
    assert usage(nothing) == Usage(uncached=50, cache_read=0, cache_write={}, output=0)
    assert usage(quiet) == Usage(uncached=32, cache_read=48, cache_write={}, output=0)
    assert usage(after).cache_read == 48


def test_a_model_that_cannot_be_cut_computes_anew_and_says_so() -> None:
    runtime = ScriptedRuntime(says("answer", after=40), forgets=True)
    with running(runtime) as engine:
        first = read(engine.submit(job("question" * 5)))
        again = read(engine.submit(job("question" * 5)))
    assert text(first) == text(again) == "answer"
    assert usage(again) == Usage(uncached=40, cache_read=0, cache_write={}, output=6)


def test_a_model_that_says_it_cannot_rewind_goes_on_from_a_checkpoint() -> None:
    runtime = ScriptedRuntime(says("answer", after=40), rewinds=False)
    with running(runtime, host_bytes=1 << 20) as engine:
        first = usage(read(engine.submit(job("question" * 5))))
        before = runtime.evaluated
        longer = usage(read(engine.submit(job("question" * 5 + " and then some more text"))))
        assert runtime.evaluated - before == 64 - 32
        # The longer checkpoint does not replace the shorter one: what goes on otherwise finds it still.
        other = usage(read(engine.submit(job("question" * 4 + "but here it differs"))))
        assert other.cache_read == 32
    assert first == Usage(uncached=8, cache_read=0, cache_write={"kv": 32}, output=6)
    assert longer.cache_read == 32
    assert max(runtime.truncations, default=99) >= 32  # nothing was ever cut within


def test_nothing_of_a_stop_string_is_shown_counted_or_kept() -> None:
    runtime = ScriptedRuntime(says("fine and good\n\nUser: hello there", after=4))
    asked = "ask:fine and good\n\nUser: hello there"
    with running(runtime) as engine:
        events = read(engine.submit(job("ask:", stop=("\n\nUser", "zzz"))))
        assert engine.peek(ids(asked), None)[0] == 16  # 17 tokens count
    assert text(events) == "fine and good"
    assert finish(events).reason == "stop"
    assert usage(events).output == 13


def test_a_near_miss_is_reported() -> None:
    with running(ScriptedRuntime(says("", after=0))) as engine:
        read(engine.submit(job("x" * 40 + "Monday" + "y" * 40)))
        reach, _, near = engine.peek(ids("x" * 40 + "Friday" + "y" * 40), None)
        assert reach == 32
        assert near is not None
        assert (near.position, near.kept, near.given) == (40, ord("M"), ord("F"))
        assert engine.report()["prefix"].near_misses == 0  # looking is no query


def test_broken_bytes_at_the_limit_are_flushed_once() -> None:
    with running(ScriptedRuntime(says("a👍".encode(), after=4))) as engine:
        events = read(engine.submit(job("ask:", output=3)))
    assert text(events) == "a\ufffd"
    assert usage(events).output == 3


# Order and back-pressure (S7)


def test_first_come_first_served() -> None:
    runtime = ScriptedRuntime(says("", after=0), delay_s=0.01)
    ends: list[str] = []
    with running(runtime) as engine:
        jobs = {name: engine.submit(job(name * 20)) for name in "abcde"}
        for name, sequence in jobs.items():
            sequence.when_ready(lambda name=name: ends.append(name))  # type: ignore[misc]
        wait_until(lambda: engine.active == 0)
    assert ends == list("abcde")


def test_a_slow_reader_stops_the_engine() -> None:
    runtime = ScriptedRuntime()
    with running(runtime) as engine:
        sequence = engine.submit(job(output=3000))
        wait_until(lambda: not sequence.room)
        time.sleep(0.05)
        calls = len(runtime.calls)
        time.sleep(0.1)
        assert len(runtime.calls) == calls <= CAPACITY + 2
        first = sequence.take()
        assert len(first) == CAPACITY
        rest = read(sequence)
    assert len(text(first) + text(rest)) == 3000


def test_a_reader_who_never_reads_does_not_hold_up_the_others() -> None:
    runtime = ScriptedRuntime()
    with running(runtime) as engine:
        lazy = engine.submit(job("lazy", output=200))
        busy = engine.submit(job("busy", output=200))
        assert len(text(read(busy))) == 200
        assert not lazy.done
        events = read(lazy)
    expected = bytes(forever(range(4 + i)) for i in range(200)).decode()
    assert text(events) == expected  # it went on exactly where it was
    assert usage(events) == Usage(uncached=4, cache_read=0, cache_write={}, output=200)


def test_many_lazy_readers_take_turns() -> None:
    runtime = ScriptedRuntime()
    with running(runtime) as engine:
        many = [engine.submit(job(f"prompt {i}", output=150)) for i in range(5)]
        for sequence in reversed(many):
            assert len(text(read(sequence))) == 150
        assert engine.active == 0


# Cancellation (cases 23, C12)


def test_cancel_while_queued_is_at_once_and_costs_nothing() -> None:
    runtime = ScriptedRuntime(delay_s=0.02)
    with running(runtime) as engine:
        first = engine.submit(job(output=20))
        queued = engine.submit(job("other"))
        queued.cancel()
        wait_until(lambda: queued.done)
        assert not first.done
        assert queued.busy_s == 0
        assert queued.take() == []
        read(first)


def test_cancel_in_prefill_does_not_wait_for_the_chunk() -> None:
    runtime = ScriptedRuntime(delay_s=5.0)
    with running(runtime) as engine:
        sequence = engine.submit(job("p" * 1000))
        wait_until(lambda: len(runtime.calls) == 1)
        start = time.monotonic()
        sequence.cancel()
        wait_until(lambda: sequence.done)
        assert time.monotonic() - start < 1.0
        assert engine.active == 0
        runtime.delay_s = 0.0
        runtime.following = says("", after=0)
        assert finish(read(engine.submit(job("next")))).reason == "stop"


def test_a_prefill_that_was_cancelled_says_nothing_of_the_speed() -> None:
    """Nothing was evaluated in the time that it took."""
    runtime = ScriptedRuntime(token_s=0.0001)
    with running(runtime) as engine:
        read(engine.submit(job("a" * 300, output=2)))
        before = engine.prefill_speed.value
        runtime.delay_s = 5.0
        for i in range(5):
            calls = len(runtime.calls)
            sequence = engine.submit(job(f"{i}" * 900, output=2))
            wait_until(lambda calls=calls: len(runtime.calls) > calls)  # type: ignore[misc]
            sequence.cancel()
            wait_until(lambda sequence=sequence: sequence.done)  # type: ignore[misc]
            assert sequence.busy_s > 0
        assert engine.prefill_speed.value == before
        runtime.delay_s = 0.0


def test_cancel_in_decode_keeps_the_prompt_and_nothing_generated() -> None:
    runtime = ScriptedRuntime()
    with running(runtime) as engine:
        sequence = engine.submit(job("prompt" * 6, output=3000))
        wait_until(lambda: bool(sequence.take()))
        sequence.cancel()
        sequence.cancel()
        wait_until(lambda: sequence.done)
        assert sequence.take() == []
        assert runtime.held == list(b"prompt" * 6)[:32]
        assert (sequence.usage.output or 0) > 0
        assert sequence.busy_s > 0


def test_an_interrupted_step_of_another_is_done_again() -> None:
    """An interruption may hit a sequence that was not meant; it loses nothing but time."""
    runtime = ScriptedRuntime(says("whole", after=6), delay_s=0.002)
    with running(runtime) as engine:
        sequence = engine.submit(job())
        for _ in range(50):
            runtime.interrupt()
            time.sleep(0.0005)
        assert text(read(sequence)) == "whole"


@pytest.mark.parametrize(("parallel", "room"), [(1, None), (4, None), (4, 4096 + 600), (3, 4096)])
def test_ten_thousand_cancellations_at_random_moments_leave_nothing(parallel: int, room: int | None) -> None:
    """A quarter of them each: queued, in prefill, in decode; alone, side by side, and with too little room for all."""
    runtime = ScriptedRuntime(room=room)
    chance = random.Random(7 + parallel)
    with running(runtime, chunk=64, parallel=parallel) as engine:
        threads = engine_threads()
        open_: list[Sequence] = []
        for i in range(2500):
            beginning = "p" * chance.randint(1, 200) + str(i % 50)
            mode = chance.choice(["auto", "auto", "auto", "off", "no-write"])
            sequence = engine.submit(job(beginning, output=chance.randint(1, 400), cache=mode))
            open_.append(sequence)
            moment = chance.random()
            if moment < 0.3:
                sequence.take()
            elif moment < 0.5:
                time.sleep(chance.random() * 0.002)
            while len(open_) > 6:
                open_.pop(chance.randrange(len(open_))).cancel()
        for sequence in open_:
            sequence.cancel()
        wait_until(lambda: engine.active == 0)
        assert engine_threads() == threads
        stats = engine.report()["prefix"]
        assert stats.device_slots <= runtime.sequences
        runtime.following = says("alive", after=4)
        assert text(read(engine.submit(job("ask:")))) == "alive"


# Failure and shutdown


def test_a_crash_fails_everyone_and_refuses_more() -> None:
    runtime = ScriptedRuntime(crash_at=3)
    with running(runtime) as engine:
        first, second = engine.submit(job("first")), engine.submit(job("second"))
        for sequence in (first, second):
            with pytest.raises(EngineStoppedError, match="fell off") as caught:
                read(sequence)
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert caught.value.backend == "test"
        with pytest.raises(EngineStoppedError):
            engine.submit(job())
        assert engine.active == 0
        wait_until(lambda: runtime.closed)


def test_no_room_fails_one_request_only() -> None:
    runtime = ScriptedRuntime(says("fine", after=4), no_room_at=0)
    with running(runtime) as engine:
        with pytest.raises(OutOfPagesError):
            read(engine.submit(job("ask:")))
        assert text(read(engine.submit(job("ask:")))) == "fine"


def test_a_row_without_numbers_fails_one_request_and_is_not_kept() -> None:
    runtime = ScriptedRuntime(says("fine", after=4), nan_at=0)
    with running(runtime) as engine:
        with pytest.raises(ServerError, match="finite"):
            read(engine.submit(job("ask:")))
        events = read(engine.submit(job("ask:")))
    assert usage(events).cache_read == 0
    assert text(events) == "fine"


@pytest.mark.parametrize("delay", [0.0, 5.0])
def test_closing_ends_what_is_running_and_queued(delay: float) -> None:
    runtime = ScriptedRuntime(delay_s=delay)
    engine = Engine(runtime, name="test")
    engine.start()
    sequences = [engine.submit(job(output=3000)) for _ in range(3)]
    wait_until(lambda: len(runtime.calls) > 0)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 2.0
    assert runtime.closed
    for sequence in sequences:
        with pytest.raises(EngineStoppedError, match="closed"):
            read(sequence)
    with pytest.raises(EngineStoppedError):
        engine.submit(job())
    engine.close()


def test_closing_an_engine_that_never_started_frees_the_model() -> None:
    runtime = ScriptedRuntime()
    engine = Engine(runtime)
    engine.close()
    engine.close()
    assert runtime.closed


def test_a_reader_whose_loop_is_gone_counts_as_cancelled() -> None:
    def gone() -> None:
        raise RuntimeError("Event loop is closed")

    with running(ScriptedRuntime(delay_s=0.005)) as engine:
        sequence = engine.submit(job(output=3000))
        assert sequence.when_ready(gone)
        wait_until(lambda: engine.active == 0)


def test_usage_may_be_read_at_any_time() -> None:
    with running(ScriptedRuntime(delay_s=0.001)) as engine:
        sequence = engine.submit(job("prompt", output=100))
        seen: list[Usage] = []
        while not sequence.done:
            seen.append(sequence.usage)
            sequence.take()
        assert all(u.input_tokens == 6 for u in seen if u.output)
        assert all(u.input_tokens is not None and 0 <= u.input_tokens <= 6 for u in seen)
        outputs = [u.output or 0 for u in seen]
        assert outputs == sorted(outputs)
        assert sequence.usage == Usage(uncached=6, cache_read=0, cache_write={}, output=100)


def test_speeds_and_backlog_are_measured() -> None:
    runtime = ScriptedRuntime(delay_s=0.002)
    with running(runtime, chunk=50) as engine:
        untouched = Average()
        assert untouched.value is None
        first, second = engine.submit(job("p" * 100, output=10)), engine.submit(job("q" * 30, output=10))
        tokens, ahead = engine.backlog
        assert ahead == 2
        assert 30 <= tokens <= 130
        read(first)
        read(second)
        assert engine.backlog == (0, 0)
        prefill, decode = engine.prefill_speed, engine.decode_speed
        assert (prefill.value or 0) > (decode.value or 0) > 0
        assert engine.answer_length.value == pytest.approx(10)


@pytest.mark.parametrize("make", [list, tuple])
def test_shared_prefix(make: Callable[[bytes], list[int]]) -> None:
    for a, b, expected in [
        (b"", b"", 0),
        (b"a", b"", 0),
        (b"abc", b"abd", 2),
        (b"abc", b"abc", 3),
        (b"abc", b"abcd", 3),
        (b"x", b"y", 0),
    ]:
        assert shared_prefix(make(a), make(b)) == expected
    long = bytes(range(256)) * 40
    for at in (0, 1, 255, 5000, len(long) - 1):
        other = long[:at] + bytes([long[at] ^ 1]) + long[at + 1 :]
        assert shared_prefix(make(long), make(other)) == at


def test_an_average_forgets() -> None:
    average = Average()
    average.add(100, 1)
    assert average.value == 100
    for _ in range(500):
        average.add(10, 1)
    assert average.value == pytest.approx(10, rel=0.01)
