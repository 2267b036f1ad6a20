"""What one client learns from what vendors report, request by request, and when it saves that."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.caching_support import Recording, text

from cachespec.backends.anthropic import AnthropicBackend
from cachespec.cache_learning import SAVE_EVERY_S, Caching, Sent
from cachespec.decision import Ask, Belief
from cachespec.errors import LedgerError
from cachespec.learned import Learned
from cachespec.ledger.memory import MemoryLedger
from cachespec.prompt import build_prompt
from cachespec.request import build_request
from cachespec.telemetry import Telemetry
from cachespec.usage import Usage

BACKEND = AnthropicBackend(name="b", model="claude-sonnet-5", api_key="k")
SYSTEM = text(1500, "manual ")
START = 1_800_000_000.0


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
        ask = Ask(
            alias="b",
            tenant=None,
            session_id="s",
            tags=(),
            tools=False,
            max_output_tokens=None,
            timeout_s=None,
            now=START + at,
        )
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
async def test_a_store_that_fails_costs_what_was_learned_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryLedger):
        async def save(self, name: str, data: bytes) -> None:
            raise LedgerError("disk full")

    client = Client()
    client.end(client.send(0, 0), 3, 0, 2010)
    await client.caching.save(Full(), START, at_once=True)
    assert "disk full" in caplog.text
