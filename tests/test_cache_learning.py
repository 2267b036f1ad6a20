"""What one client learns from what vendors report, request by request, and when it saves that."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.client.caching_support import Recording, text

import cachespec
from cachespec.backends.anthropic import AnthropicBackend
from cachespec.cache_learning import SAVE_EVERY_S, Caching, Sent
from cachespec.decision import Ask, Belief
from cachespec.errors import LedgerError
from cachespec.learned import Answer, Learned
from cachespec.ledger.memory import MemoryLedger
from cachespec.pieces import STRETCH_S
from cachespec.policies.caching import ExpectedCost
from cachespec.prompt import build_prompt
from cachespec.request import build_request
from cachespec.telemetry import Telemetry
from cachespec.testing import FakeClock, ScriptedBackend
from cachespec.usage import Usage
from cachespec.warmth import Warmth

BACKEND = AnthropicBackend(name="b", model="claude-sonnet-5", api_key="k")
SYSTEM = text(1500, "manual ")
START = 1_800_000_000.0


def ask_of(alias: str, at: float) -> Ask:
    return Ask(
        alias=alias,
        tenant=None,
        session_id="s",
        tags=(),
        tools=False,
        max_output_tokens=None,
        timeout_s=None,
        now=START + at,
    )


class Client:
    """A client's caching, with a conversation of three turns."""

    def __init__(self, policy: Any = None) -> None:
        self.caching = Caching(policy or Recording(), Telemetry(), Learned())
        said: list[Any] = [{"role": "user", "content": text(500, "one ")}]
        self.turns = [list(said)]
        for name in ("two ", "three "):
            said += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": text(500, name)}]
            self.turns.append(list(said))

    def send(self, turn: int, at: float, *, accepted: bool = True) -> Sent:
        prompt = build_prompt(build_request(messages=self.turns[turn], system=SYSTEM))
        ask = ask_of("b", at)
        planned = self.caching.planner.plan(BACKEND, prompt, ask)
        sent = self.caching.sent(planned, START + at)
        if accepted:
            self.caching.began(sent, START + at + 1)
        return sent

    def end(self, sent: Sent, at: float, read: int | None, written: int | None) -> None:
        writes = None if written is None else {"5m": written} if written else {}
        tokens = sent.planned.tokens
        total = 0 if tokens is None else tokens.input or 0
        usage = Usage(uncached=max(total - (read or 0) - (written or 0), 0), cache_read=read, cache_write=writes, output=1)
        self.caching.ended(sent, usage=usage, stop="stop", now=START + at)

    def belief(self, turn: int, at: float) -> Belief:
        found = self.send(turn, at, accepted=False).planned.belief
        assert found is not None
        return found


def test_what_was_accepted_is_believed_and_what_is_reported_is_sure() -> None:
    client = Client()
    sent = client.send(0, 0)
    assert client.belief(0, 0.5).state == "stale"  # being written
    assert client.belief(0, 2).evidence.startswith("sent, not yet reported")
    client.end(sent, 3, 0, 2010)
    found = client.belief(0, 4)
    assert (found.state, found.tokens) == ("warm", 2010)
    assert found.evidence.startswith("the vendor reported it")


def test_a_shorter_read_than_expected_drops_what_is_deeper() -> None:
    client = Client()
    client.end(client.send(0, 0), 3, 0, 2010)
    client.end(client.send(1, 10), 13, 2010, 510)
    client.end(client.send(2, 20), 23, 1505, 0)  # only the system prompt is left, and nothing was written
    found = client.belief(2, 25)
    assert found.tokens is not None
    assert 1400 < found.tokens < 1600


def test_a_request_that_was_not_accepted_leaves_nothing() -> None:
    client = Client()
    client.end(client.send(0, 0, accepted=False), 1, 0, 2010)
    assert client.belief(0, 2).state == "cold"


def test_ending_twice_is_ending_once() -> None:
    policy = Recording()
    client = Client(policy)
    sent = client.send(0, 0)
    client.end(sent, 3, 0, 2010)
    client.end(sent, 4, 0, 0)
    assert len(policy.told) == 1
    assert client.belief(0, 5).state == "warm"


def test_a_late_report_does_not_undo_a_newer_write() -> None:
    """One request found nothing and wrote nothing; before it says so, another has read what a third one wrote."""
    client = Client(Recording(end=None))
    client.end(client.send(0, 0), 3, 0, 1500)
    slow = client.send(1, 100)
    client.end(client.send(2, 150), 155, 1500, 0)
    client.end(slow, 160, 0, 0)
    assert client.belief(0, 161).state == "warm"
    client.end(client.send(1, 200), 205, 0, 0)
    assert client.belief(0, 210).state == "cold"


@pytest.mark.anyio
async def test_it_saves_now_and_then_and_only_what_changed() -> None:
    class Counting(MemoryLedger):
        saves = 0

        async def save(self, name: str, data: bytes) -> None:
            Counting.saves += name == "warmth"
            await super().save(name, data)

    ledger, client = Counting(), Client()
    await client.caching.restore(ledger, START)
    client.end(client.send(0, 0), 3, 0, 2010)
    await client.caching.save(ledger, START + 5)
    assert Counting.saves == 0  # not yet
    await client.caching.save(ledger, START + SAVE_EVERY_S + 1)
    assert Counting.saves == 1
    await client.caching.save(ledger, START + 10 * SAVE_EVERY_S)
    assert Counting.saves == 1  # nothing changed
    client.end(client.send(1, 400), 403, 0, 2010)
    await client.caching.save(ledger, START + 404, at_once=True)
    assert Counting.saves == 2
    after = Client()
    await after.caching.restore(ledger, START + 410)
    assert after.belief(1, 410).state == "warm"


@pytest.mark.anyio
async def test_no_request_waits_for_saving() -> None:
    class Locked(MemoryLedger):
        async def save(self, name: str, data: bytes) -> None:
            await opened.wait()
            await super().save(name, data)

    clock, ledger, opened = FakeClock(), Locked(), anyio.Event()
    async with cachespec.Client(backends={"a": ScriptedBackend(name="a")}, ledger=ledger, clock=clock) as client:
        await client.complete("Hi")
        clock.advance(SAVE_EVERY_S + 1)
        for _ in range(3):
            await client.complete("Hi")
        assert await ledger.load("learned") is None
        opened.set()
        with anyio.fail_after(10):
            while await ledger.load("learned") is None:
                await anyio.sleep(0.01)
        await client.complete("Hi")
        last = client._learned.dump()
    assert await ledger.load("learned") == last  # at the end, whenever that was


@pytest.mark.anyio
async def test_a_store_that_fails_costs_what_was_learned_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryLedger):
        async def save(self, name: str, data: bytes) -> None:
            raise LedgerError("disk full")

    client = Client()
    client.end(client.send(0, 0), 3, 0, 2010)
    await client.caching.save(Full(), START, at_once=True)
    assert "disk full" in caplog.text


class Slow(Recording):
    """A policy that learned so much that each piece of it takes as long as the event loop may wait."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.left = pieces

    def pieces(self) -> Iterator[bytes]:
        for number in range(self.left):
            until = perf_counter() + STRETCH_S
            while perf_counter() < until:
                pass
            yield b"%d," % number


@pytest.mark.anyio
async def test_saving_lets_others_run_and_what_they_learn_is_saved_later() -> None:
    ledger, client, turns = MemoryLedger(), Client(Slow(20)), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()
            if turns == 5:
                client.end(client.send(0, 10), 13, 0, 2010)

    client.end(client.send(0, 0), 3, 0, 2010)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        await client.caching.save(ledger, START + 4, at_once=True)
        tasks.cancel_scope.cancel()
    assert turns >= 20
    saved = await ledger.load(client.caching._policy_name)
    assert saved == b"".join(b"%d," % number for number in range(20))
    await ledger.save("warmth", b"")
    await client.caching.save(ledger, START + 20, at_once=True)  # for what was learned meanwhile
    assert await ledger.load("warmth") == client.caching.warmth.dump()


@pytest.mark.anyio
async def test_what_is_cancelled_is_not_saved_and_what_is_asked_for_meanwhile_waits_its_turn() -> None:
    ledger, client = MemoryLedger(), Client(Slow(50))
    client.end(client.send(0, 0), 3, 0, 2010)
    name = client.caching._policy_name
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.caching.save(ledger, START + 4, at_once=True))
            while not client.caching._saving.locked():
                await anyio.lowlevel.checkpoint()
            await client.caching.save(ledger, START + 10 * SAVE_EVERY_S)  # somebody is at it: no second one, and no waiting
            assert await ledger.load(name) is None
            scope.cancel()
    assert await ledger.load(name) is None
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(lambda: client.caching.save(ledger, START + 5, at_once=True))
    assert await ledger.load(name) == b"".join(b"%d," % number for number in range(50))
    assert await ledger.load("learned") == client.caching._learned.dump()


@pytest.mark.anyio
async def test_a_policy_that_fails_to_say_what_it_learned_keeps_nobody_else_from_saying_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Recording):
        def pieces(self) -> Iterator[bytes]:
            yield b"half"
            raise RuntimeError("lost it")

    ledger, client = MemoryLedger(), Client(Broken())
    client.end(client.send(0, 0), 3, 0, 2010)
    await client.caching.save(ledger, START + 4, at_once=True)
    assert "lost it" in caplog.text
    assert await ledger.load(client.caching._policy_name) is None
    assert await ledger.load("warmth") == client.caching.warmth.dump()


def test_what_is_learned_between_two_pieces_leaves_every_row_whole() -> None:
    client = Client(ExpectedCost())
    learned, policy, warmth = client.caching._learned, client.caching.policy, client.caching.warmth
    assert isinstance(policy, ExpectedCost)

    def learn(number: int) -> None:
        sent = client.send(number % 3, 10 * number)
        client.end(sent, 10 * number + 3, 0, 2010)
        ask = ask_of(f"alias {number}", 10 * number)
        usage = Usage(uncached=9, cache_read=0, cache_write={}, output=number)
        answer = Answer(
            ask=ask,
            backend=f"b{number}",
            model="m",
            sizes=None,
            usage=usage,
            own=None,
            own_output=None,
            load=0,
            ttft_ms=1.0,
            total_ms=2.0,
        )
        learned.answered(answer, now=ask.now)

    for number in range(40):
        learn(number)
    parts: list[list[bytes]] = [[], [], []]
    for part, pieces in zip(parts, (learned.pieces(), policy.pieces(), warmth.pieces()), strict=True):
        for piece in pieces:
            part.append(piece)
            number += 1
            learn(number)
    again, heir, others = Learned(), ExpectedCost(), Warmth()
    again.load(b"".join(parts[0]))
    heir.load(b"".join(parts[1]))
    others.load(b"".join(parts[2]), now=START + 10 * number)
    assert {again.outputs.expected(ask_of(f"alias {n}", 0)) for n in range(40)} == {float(n) for n in range(40)}
    assert heir.dump() != ExpectedCost().dump()
    assert len(others) > 0
