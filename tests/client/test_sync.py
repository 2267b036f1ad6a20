"""The blocking client has what the async one has, opens at its first use, and is closed from any thread."""

from __future__ import annotations

import inspect
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pytest

import cachespec
import cachespec.session
import cachespec.stream
from cachespec import sync
from cachespec.client import Client
from cachespec.errors import ConfigError, InputError, StreamStateError
from cachespec.ledger.base import Ledger, Limit
from cachespec.ledger.memory import MemoryLedger
from cachespec.pricing import hosted_rates
from cachespec.request import build_request
from cachespec.testing import ScriptedBackend, say

RATES = hosted_rates(None, "m", prices={"input": "1", "output": "2"})
FILE = """
[backends.b]
use = "tests.docs_support:talker"
model = "claude-sonnet-5-5"
[models]
assistant = {{ backends = ["b"] }}
[policies]
routing = {{ use = "{routing}" }}
"""


def blocking(*replies: Any, **arguments: Any) -> tuple[sync.Client, ScriptedBackend]:
    backend = ScriptedBackend(list(replies), name="b", rates=RATES)
    return sync.Client(Client(backends={"b": backend}, **arguments)), backend


def loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "cachespec-sync"}


def names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("ours", "theirs", "apart"),
    [
        (sync.Client, Client, {"aclose": "close", "from_config": None}),
        (sync.Session, cachespec.Session, {}),
        (sync.ResponseStream, cachespec.ResponseStream, {"aclose": "close", "until_done": None}),
        (sync.ResponseStream, cachespec.session.SessionStream, {"aclose": "close"}),
        (
            sync.Ledger,
            Ledger,
            dict.fromkeys(("aclose", "load", "release", "renew", "reserve", "save", "secret", "settle", "snapshot")),
        ),
    ],
)
def test_it_has_what_the_async_one_has(ours: type, theirs: type, apart: dict[str, str | None]) -> None:
    expected = {name for given in names(theirs) if (name := apart.get(given, given)) is not None}
    assert expected <= names(ours)
    for name in expected & names(theirs):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if callable(mine):
            assert inspect.signature(mine).parameters == inspect.signature(other).parameters, name


def test_it_opens_at_its_first_use_and_closes_once() -> None:
    before = loops()
    client, backend = blocking(say("one"), say("two"))
    assert (backend.started, loops()) == (0, before)
    assert client.complete("Hi").text == "one"
    with client.stream("Hi") as stream:
        assert stream.get_final_text() == "two"
        assert stream.completion is not None
        assert stream.request_id == "req_scripted"
    with client as same:
        assert same is client
        assert backend.started == 1
    assert (backend.closed, backend.open_attempts) == (True, 0)
    client.close()
    for use in (lambda: client.complete("Hi"), lambda: client.ledger, lambda: client.config, client.start, client.__enter__):
        with pytest.raises(StreamStateError, match="the client is closed"):
            use()
    assert loops() == before


def test_one_that_was_never_used_closes_what_it_was_given() -> None:
    client, backend = blocking()
    client.close()
    assert (backend.started, backend.closed) == (0, True)
    sync.connect("nowhere.toml").close()


def test_the_ledger_and_what_is_configured() -> None:
    with blocking(say("one"))[0] as client:
        done = client.complete("Hi", tenant="acme")
        totals = client.ledger.totals()
        assert (totals.requests, totals.amount) == (1, done.cost)
        assert client.ledger.totals(tenant="other").requests == 0
        (entry,) = client.ledger.entries(limit=5, tenant="acme")
        assert (entry.backend, entry.amount) == ("b", done.cost)
        assert list(client.backends) == ["b"]
        assert client.config.generation == 1
        with pytest.raises(InputError, match="not made from a file"):
            client.reload()


def test_budgets_are_read_and_reset() -> None:
    budget = {"scope": "tenant", "limit": "5.00", "per": "total"}
    with blocking(say("one"), policies={"budgets": [budget]})[0] as client:
        cost = client.complete("Hi", tenant="acme").cost
        (account,) = [name for name in client.ledger.accounts() if "acme" in name]
        limit = Limit(scope="tenant:acme", account=account, limit=Decimal(5))
        (state,) = client.ledger.refresh([limit])
        assert state.spent == cost
        client.ledger.reset([limit])
        assert client.ledger.refresh([limit])[0].spent == 0


def test_requests_that_are_built_already_and_prewarming() -> None:
    with blocking(say("one"))[0] as client:
        request = build_request("Hi")
        client.refresh(request)
        verdict = client.plan_request(request)
        assert verdict.decision.chosen == "b"
        assert client.wire(verdict) is None
        with client.stream_request(request) as stream:
            assert "".join(stream.text_stream) == "one"
        warmed = client.prewarm(system="Be brief.", tenant="acme")
        assert (warmed.sent, warmed.backend) == (False, "b")
        with pytest.raises(InputError, match="tenant"):
            client.prewarm(tenant="")


def test_a_session_with_all_its_turns_may_take() -> None:
    client, backend = blocking(say("one"), say("two"))
    with client:
        stored = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
        session = client.session(messages=stored, system="Be brief.")
        assert session.complete("x", seed=1, model="b", reasoning="low").text == "one"
        with session.stream("y", stop="END", tags=["t"]) as turn:
            assert turn.get_final_completion().text == "two"
        assert len(session.messages) == 6
        assert len(session.cache_report()) == 2
    first, second = (request for request, _ in backend.requests)
    assert (first.seed, first.model, len(first.messages)) == (1, "b", 3)
    assert (second.stop, second.tags) == (("END",), ("t",))


def test_a_file_is_read_at_the_first_use_and_again_by_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "cachespec.toml"
    client = sync.connect(path, watch=False)
    with pytest.raises(ConfigError):
        client.complete("Hi")
    path.write_text(FILE.format(routing="cheapest"), encoding="utf-8")
    try:
        assert client.complete("Hi").backend == "b"
        path.write_text(FILE.format(routing="fastest"), encoding="utf-8")
        assert client.reload() == client.config.generation == 2
    finally:
        client.close()


def test_threads_that_use_it_first_at_once_open_one() -> None:
    before = loops()
    client, backend = blocking(say("x"))
    together, texts = threading.Barrier(8), []

    def ask() -> None:
        together.wait()
        texts.append(client.complete("Hi").text)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["x"] * 8
    assert backend.started == 1
    assert len(loops() - before) == 1
    client.close()


class Slow(MemoryLedger):
    """Whose totals take for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    async def totals(self, *, tenant: str | None = None) -> Any:
        self.asked.set()
        await anyio.sleep_forever()


def test_who_waits_in_another_thread_is_told_that_it_was_closed() -> None:
    ledger = Slow()
    client, backend = blocking(say("a", "b", delay_s=60), ledger=ledger)
    told: list[str] = []
    entered = threading.Event()

    def ask() -> None:
        try:
            client.ledger.totals()
        except StreamStateError as error:
            told.append(str(error))

    def read() -> None:
        try:
            with client.stream("Hi") as stream:
                entered.set()
                stream.get_final_completion()
        except StreamStateError as error:
            told.append(str(error))

    threads = [threading.Thread(target=work) for work in (ask, read)]
    for thread in threads:
        thread.start()
    assert ledger.asked.wait(30)
    assert entered.wait(30)
    client.close()
    for thread in threads:
        thread.join(30)
    assert len(told) == 2
    assert (backend.closed, backend.open_attempts) == (True, 0)


def test_a_stream_that_is_open_when_its_client_is_closed_is_left_quietly() -> None:
    client, backend = blocking(say("a", "b"))
    with client.stream("Hi") as stream:
        assert next(stream.text_stream) == "a"
        client.close()
        with pytest.raises(StreamStateError):
            stream.get_final_completion()
    stream.close()
    assert backend.open_attempts == 0


def test_a_client_that_cannot_start_is_closed_by_with_and_may_try_again_without() -> None:
    class Broken(ScriptedBackend):
        async def start(self) -> None:
            await super().start()
            if self.started == 1:
                raise ConfigError("no such model")

    again = Broken(name="b")
    client = sync.Client(Client(backends={"b": again}))
    with pytest.raises(ConfigError, match="no such model"):
        client.complete("Hi")
    assert client.complete("Hi").backend == "b"
    client.close()
    once = Broken(name="b")
    client = sync.Client(Client(backends={"b": once}))
    with pytest.raises(ConfigError, match="no such model"):
        client.__enter__()
    with pytest.raises(StreamStateError, match="the client is closed"):
        client.complete("Hi")
    assert once.closed
