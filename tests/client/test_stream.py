"""The stream contract (DESIGN section 4, S1 to S7) on scripted backends; the wire tests repeat it on real bytes."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import anyio
import pytest

from cachespec.client import Client
from cachespec.errors import (
    AuthenticationError,
    ConnectionFailedError,
    NoRouteError,
    OverloadedError,
    RateLimitError,
    RequestRejectedError,
    RequestTimeoutError,
    StreamInterruptedError,
    StreamStateError,
)
from cachespec.events import (
    Finished,
    ReasoningDelta,
    ReasoningFinished,
    ResponseStarted,
    Retrying,
    TextDelta,
    ToolCallDelta,
    UsageReported,
)
from cachespec.ledger.memory import MemoryLedger
from cachespec.messages import ReasoningPart, TextPart, ToolCallPart
from cachespec.pricing import hosted_rates
from cachespec.testing import FakeClock, Reply, ScriptedBackend, say
from cachespec.usage import Usage

pytestmark = pytest.mark.anyio

RATES = hosted_rates(None, "scripted", prices={"input": "1", "cache_read": "0.1", "output": "10"})
USAGE = Usage(uncached=100, cache_read=1000, cache_write={}, output=20)


def client_of(*backends: ScriptedBackend, clock: FakeClock | None = None, attempts: int = 4, timeout: float = 30.0) -> Client:
    return Client(
        backends={b.name: b for b in backends},
        models={"assistant": [b.name for b in backends]},
        policies={"retries": {"attempts": attempts}},
        timeout=timeout,
        clock=clock or FakeClock(),
    )


async def test_a_whole_answer_is_one_completion_with_exact_cost() -> None:
    backend = ScriptedBackend(say("Hel", "lo", usage=USAGE), rates=RATES)
    async with client_of(backend) as client:
        async with client.stream("Hi") as stream:
            assert [text async for text in stream.text_stream] == ["Hel", "lo"]
            done = await stream.get_final_completion()
        assert done.text == "Hello"
        assert done.finish_reason == "stop"
        assert done.usage == USAGE
        assert done.cost == Decimal("0.0004")
        assert not done.estimated
        assert done.message.parts == (TextPart(text="Hello"),)
        assert done.decision.chosen == done.backend == "scripted"
        assert done.ttft_ms is not None
        assert done.total_ms >= done.ttft_ms
        totals = await client.ledger.totals()
        assert (totals.requests, totals.amount) == (1, Decimal("0.0004"))
    assert backend.open_attempts == 0


async def test_nothing_starts_before_entering_and_misuse_is_told() -> None:
    backend = ScriptedBackend()
    async with client_of(backend) as client:
        stream = client.stream("Hi")
        assert backend.requests == []
        for use in (stream.__anext__, stream.get_final_completion):
            with pytest.raises(StreamStateError, match="enter the stream first"):
                await use()
        async with stream:
            await stream.until_done()
        with pytest.raises(StreamStateError, match="entered once"):
            await stream.__aenter__()
        assert (await stream.get_final_completion()).text == "Hello there."


async def test_leaving_early_closes_and_settles_what_was_counted() -> None:
    backend = ScriptedBackend(say(*["word "] * 50, usage=USAGE), rates=RATES)
    async with client_of(backend) as client:
        async with client.stream("Hi" * 200) as stream:
            async for text in stream.text_stream:
                assert text == "word "
                break
        assert backend.open_attempts == 0
        entry = (await client.ledger.entries())[0]
        assert entry.outcome == "left"
        assert entry.usage is None
        assert entry.estimated
        assert entry.amount is not None
        assert 0 < entry.amount < Decimal("0.001")
        with pytest.raises(StreamStateError, match="was left"):
            await stream.get_final_completion()


async def test_cancelling_settles_exactly_once_and_raises_nothing_of_ours() -> None:
    backend = ScriptedBackend(say("a", "b", "c", delay_s=0.05), rates=RATES)
    async with client_of(backend) as client:
        with anyio.move_on_after(0.12) as scope:
            async with client.stream("Hi") as stream:
                await stream.until_done()
        assert scope.cancelled_caught
        assert backend.open_attempts == 0
        entries = await client.ledger.entries()
        assert [e.outcome for e in entries] == ["cancelled"]


async def test_an_end_without_the_terminal_event_is_an_interruption_with_the_partial_answer() -> None:
    cut = Reply(batches=((TextDelta("par"), TextDelta("tial")),))
    backend = ScriptedBackend(cut, rates=RATES)
    async with client_of(backend) as client:
        async with client.stream("Hi") as stream:
            with pytest.raises(StreamInterruptedError) as caught:
                await stream.until_done()
            with pytest.raises(StreamInterruptedError):
                await stream.get_final_completion()
        partial = caught.value.partial
        assert partial is not None
        assert partial.text == "partial"
        assert partial.usage is None
        assert partial.estimated
        assert partial.finish_reason is None
        assert len(backend.requests) == 1
        assert [e.outcome for e in await client.ledger.entries()] == ["failed"]


async def test_an_error_after_content_is_never_retried_and_keeps_its_cause() -> None:
    broken = Reply(batches=((TextDelta("a"),),), fail=OverloadedError("busy", backend="scripted", status=529))
    backend = ScriptedBackend(broken)
    other = ScriptedBackend(name="other")
    async with client_of(backend, other) as client, client.stream("Hi") as stream:
        with pytest.raises(StreamInterruptedError) as caught:
            await stream.until_done()
    assert isinstance(caught.value.__cause__, OverloadedError)
    assert caught.value.status == 529
    assert other.requests == []


async def test_a_cut_after_the_end_is_a_completion_without_usage() -> None:
    cut = Reply(batches=((TextDelta("all"), Finished(reason="stop")),), fail=ConnectionFailedError("reset"))
    async with client_of(ScriptedBackend(cut, rates=RATES)) as client:
        done = await client.complete("Hi")
        assert (done.text, done.usage, done.estimated) == ("all", None, True)
        assert done.cost is not None
        assert done.cost > 0
        assert any("reported no usage" in w for w in done.warnings)


async def test_before_content_the_next_backend_is_tried_at_once() -> None:
    first = ScriptedBackend(Reply(refuse=OverloadedError("busy", backend="first")), name="first", rates=RATES)
    second = ScriptedBackend(say("ok"), name="second")
    clock = FakeClock()
    async with client_of(first, second, clock=clock) as client, client.stream("Hi") as stream:
        events = [event async for event in stream]
        done = await stream.get_final_completion()
    assert isinstance(events[0], Retrying)
    assert (events[0].backend, events[0].next_backend, events[0].delay_s) == ("first", "second", 0.0)
    assert done.backend == "second"
    assert clock.sleeps == []
    out = next(c for c in done.decision.candidates if c.backend == "first")
    assert not out.eligible
    assert out.reasons[-1].code == "unhealthy"


async def test_a_preamble_does_not_commit_the_attempt() -> None:
    preamble = Reply(batches=((ResponseStarted(request_id="r1", model="m"),),), fail=ConnectionFailedError("cut"))
    backend = ScriptedBackend([preamble, say("ok")])
    clock = FakeClock()
    async with client_of(backend, clock=clock) as client:
        done = await client.complete("Hi")
    assert done.text == "ok"
    assert len(backend.requests) == 2
    assert len(clock.sleeps) == 1


async def test_an_empty_stream_is_retried_then_told() -> None:
    backend = ScriptedBackend(Reply())
    async with client_of(backend) as client:
        with pytest.raises(StreamInterruptedError, match="terminal event"):
            await client.complete("Hi")
    assert len(backend.requests) == 4


async def test_retry_after_is_honoured_and_one_budget_covers_all_attempts() -> None:
    limited = Reply(refuse=RateLimitError("slow down", backend="scripted", status=429, retry_after=7.0))
    backend = ScriptedBackend([limited, limited, say("ok")])
    clock = FakeClock()
    async with client_of(backend, clock=clock) as client:
        assert (await client.complete("Hi")).text == "ok"
    assert clock.sleeps == [pytest.approx(7.0, abs=0.5)] * 2
    for_ever = ScriptedBackend(limited)
    async with client_of(for_ever, attempts=3) as client:
        with pytest.raises(RateLimitError) as caught:
            await client.complete("Hi")
        assert len(caught.value.__notes__) == 2
        assert (await client.ledger.totals()).requests == 0
    assert len(for_ever.requests) == 3


async def test_a_retry_after_beyond_the_deadline_is_not_waited_for() -> None:
    backend = ScriptedBackend(Reply(refuse=RateLimitError("slow down", backend="scripted", retry_after=60.0)))
    clock = FakeClock()
    async with client_of(backend, clock=clock, timeout=5.0) as client:
        with pytest.raises(RateLimitError):
            await client.complete("Hi")
    assert clock.sleeps == []
    assert len(backend.requests) == 1


async def test_a_rejected_request_goes_nowhere_else() -> None:
    first = ScriptedBackend(Reply(refuse=RequestRejectedError("bad", backend="first", status=400)), name="first", rates=RATES)
    second = ScriptedBackend(name="second")
    async with client_of(first, second) as client:
        with pytest.raises(RequestRejectedError):
            await client.complete("Hi")
    assert second.requests == []


async def test_a_bad_key_moves_on_but_is_not_tried_twice() -> None:
    first = ScriptedBackend(Reply(refuse=AuthenticationError("no", backend="first", status=401)), name="first", rates=RATES)
    second = ScriptedBackend(name="second")
    async with client_of(first, second) as client:
        assert (await client.complete("Hi")).backend == "second"
    async with client_of(ScriptedBackend(Reply(refuse=AuthenticationError("no", status=401)), name="first")) as client:
        with pytest.raises(AuthenticationError):
            await client.complete("Hi")
    assert len(first.requests) == 1


async def test_the_deadline_covers_opening_reading_and_waiting() -> None:
    slow = ScriptedBackend(replace(say("a", "b"), delay_s=5.0))
    async with client_of(slow) as client:
        with anyio.fail_after(3):
            with pytest.raises(RequestTimeoutError):
                await client.complete("Hi", timeout=0.2)
        late = ScriptedBackend(say(*"abcdefghij", delay_s=0.06))
    async with client_of(late) as client:
        with pytest.raises(StreamInterruptedError) as caught:
            await client.complete("Hi", timeout=0.3)
        assert isinstance(caught.value.__cause__, RequestTimeoutError)
        assert caught.value.partial is not None
        assert caught.value.partial.text
    assert slow.open_attempts == late.open_attempts == 0


async def test_tool_calls_are_keyed_by_index_and_id_and_text_is_exact() -> None:
    deltas = (
        ToolCallDelta(0, "a", "first", ""),
        ToolCallDelta(0, "", "", '{"x" :'),
        ToolCallDelta(0, "b", "second", "{}"),
        ToolCallDelta(1, "c", "third", '{"y":'),
        ToolCallDelta(0, "", "", ""),
        ToolCallDelta(1, "", "", ' "é"}'),
        ToolCallDelta(0, "a", "", "1}"),
    )
    reply = Reply(batches=(deltas[:3], deltas[3:6], (Finished(reason="tool_calls"), UsageReported(USAGE))))
    async with client_of(ScriptedBackend(reply)) as client, client.stream("Hi") as stream:
        seen = [(e.id, e.name) async for e in stream if isinstance(e, ToolCallDelta)]
        done = await stream.get_final_completion()
    assert seen == [("a", "first"), ("a", "first"), ("b", "second"), ("c", "third"), ("b", "second"), ("c", "third")]
    calls = [(c.id, c.name, c.arguments) for c in done.tool_calls]
    assert calls == [("a", "first", '{"x" :'), ("b", "second", "{}"), ("c", "third", '{"y": "é"}')]


async def test_parts_keep_their_order_and_reasoning_its_raw_object() -> None:
    raw = ReasoningPart(text="hm", raw={"type": "thinking", "thinking": "hm", "signature": "s"}, provider="anthropic")
    batch = (
        ReasoningDelta("h", 0),
        ReasoningDelta("m", 0),
        ReasoningFinished(index=0, part=raw),
        TextDelta("one", 1),
        ToolCallDelta(2, "t", "tool", "{}"),
        TextDelta("two", 3),
        Finished(reason="tool_calls"),
    )
    async with client_of(ScriptedBackend(Reply(batches=(batch,)))) as client:
        done = await client.complete("Hi")
    call = ToolCallPart(id="t", name="tool", arguments="{}")
    assert done.message.parts == (raw, TextPart(text="one"), call, TextPart(text="two"))


async def test_two_readers_of_one_stream_are_refused() -> None:
    backend = ScriptedBackend(say("a", "b", delay_s=0.1))
    async with client_of(backend) as client, client.stream("Hi") as stream, anyio.create_task_group() as group:
        group.start_soon(stream.until_done)
        await anyio.sleep(0.02)
        with pytest.raises(StreamStateError, match="two tasks"):
            await stream.__anext__()


async def test_no_candidate_says_why_for_each() -> None:
    first, second = ScriptedBackend(name="first"), ScriptedBackend(name="second")
    client = Client(
        backends={"first": first, "second": second},
        models={"assistant": ["first", "second"]},
        policies={"rules": [{"when": {"tags": ["private"]}, "only": ["second"]}, {"exclude": ["second"]}]},
    )
    async with client:
        assert (await client.complete("Hi")).backend == "first"
        with pytest.raises(NoRouteError) as caught:
            await client.complete("Hi", tags=["private"])
        assert [r.code for r in caught.value.reasons["first"]] == ["rule"]
        assert client.plan("Hi", tags=["private"]).chosen is None


async def test_the_ledger_holds_a_reservation_only_while_a_request_runs() -> None:
    backend = ScriptedBackend(say("a", "b", usage=USAGE), rates=RATES)
    policies = {"budgets": [{"scope": "tenant", "limit": "50.00", "per": "day"}]}
    clock = FakeClock()
    ledger = MemoryLedger(clock=clock.time)
    client = Client(backends={"scripted": backend}, policies=policies, ledger=ledger, clock=clock)
    async with client:
        async with client.stream("Hi", tenant="acme", max_output_tokens=1000) as stream:
            held = client.plan("Hi", tenant="acme").budgets[0]
            assert held.reserved >= Decimal("0.01")
            await stream.until_done()
        state = client.plan("Hi", tenant="acme").budgets[0]
        assert state.reserved == 0
        assert state.spent == Decimal("0.0004")
