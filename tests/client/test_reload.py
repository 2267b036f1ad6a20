"""Hot reload: validated, then swapped; what did not change goes on; a bad file changes nothing."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.wire.server import WireServer

import cachespec
from cachespec.client import Client
from cachespec.config import load_config
from cachespec.errors import AuthenticationError, BudgetExceededError, ConfigError, InputError, StreamStateError
from cachespec.health import Health
from cachespec.ledger.memory import MemoryLedger
from cachespec.pricing import hosted_rates
from cachespec.request import build_request
from cachespec.telemetry import Decided, Reloaded, ReloadRefused
from cachespec.testing import FakeClock, ScriptedBackend, say
from cachespec.usage import Usage

PLUGIN = textwrap.dedent(
    """
    from cachespec.errors import AuthenticationError
    from cachespec.pricing import hosted_rates
    from cachespec.testing import ScriptedBackend, say
    from cachespec.usage import Usage

    MADE = []
    RATES = hosted_rates(None, "m", prices={"input": "1000", "output": "1000"})

    class Locked(ScriptedBackend):
        def __init__(self, *, name: str, api_key: str, price: str = "1") -> None:
            rates = hosted_rates(None, "m", prices={"input": price, "output": price})
            super().__init__(say("Hello"), name=name, rates=rates)
            self.key = api_key

        async def open(self, request, plan, *, timeout):
            if self.key != "good":
                raise AuthenticationError("bad key", backend=self.name)
            return await super().open(request, plan, timeout=timeout)

    class Backend(ScriptedBackend):
        def __init__(self, *, name: str, text: str, fails: bool = False, delay: float = 0.0) -> None:
            usage = Usage(uncached=100, cache_read=0, cache_write={}, output=0)
            super().__init__(say(text, text, usage=usage, delay_s=delay), name=name, model=text, rates=RATES)
            self.fails = fails
            MADE.append(self)

        async def start(self) -> None:
            await super().start()
            if self.fails:
                raise RuntimeError("no such device")
    """
)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Write a configuration of scripted backends by name and text, and return its path."""
    (tmp_path / "reload_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "cachespec.toml"
    count = [0]

    def make(*, more: str = "", ledger: str = "ledger.db", options: str = "", **texts: str) -> str:
        tables = [
            f'[backends.{name}]\nuse = "reload_plugin:Backend"\ntext = "{text}"\n{options}' for name, text in texts.items()
        ]
        names = ", ".join(f'"{name}"' for name in texts)
        client = f'[client]\nledger = {{ use = "sqlite", path = "{tmp_path / ledger}" }}\nmax_output_tokens = 10\n'
        path.write_text(client + "".join(tables) + f"[models.main]\nbackends = [{names}]\n{more}")
        count[0] += 1
        os.utime(path, ns=(count[0] * 10**9, count[0] * 10**9))
        return str(path)

    yield make
    sys.modules.pop("reload_plugin", None)


def pinned(name: str) -> str:
    return f'[policies]\nrouting = {{ use = "pinned", backend = "{name}" }}\n'


@pytest.mark.anyio
async def test_what_changed_changes_and_what_did_not_goes_on(write: Callable[..., str]) -> None:
    path = write(a="one", b="two", more=pinned("a"))
    async with Client.from_config(load_config(path)) as client:
        assert (await client.complete("Hi")).text == "oneone"
        assert client.plan("Hi").generation == 1
        kept = client.backends["b"]
        old: Any = client.backends["a"]
        write(a="new", b="two", more=pinned("a"))
        assert await client.reload() == 2
        assert (await client.complete("Hi")).text == "newnew"
        assert client.plan("Hi").generation == 2
        assert client.backends["b"] is kept
        with anyio.fail_after(10):
            while not old.closed:
                await anyio.sleep(0.05)
        assert not getattr(kept, "closed")  # noqa: B009 - a scripted backend's own
        assert getattr(kept, "started") == 1  # noqa: B009


@pytest.mark.anyio
async def test_a_bad_file_changes_nothing_and_names_the_line(write: Callable[..., str]) -> None:
    path = write(a="one", more=pinned("a"))
    async with Client.from_config(load_config(path)) as client:
        before = client.backends["a"]
        write(a="one", more=pinned("nobody"))
        with pytest.raises(ConfigError) as caught:
            await client.reload()
        assert (caught.value.path, caught.value.line) == (path, 10)
        write(a="one", c="two", options="fails = true\n", more=pinned("c"))
        with pytest.raises(RuntimeError, match="no such device"):
            await client.reload()
        import reload_plugin  # type: ignore[import-not-found]

        assert all(backend.closed for backend in reload_plugin.MADE if backend is not before)
        write(a="one", ledger="other.db")
        with pytest.raises(ConfigError, match="cannot change while the client runs"):
            await client.reload()
        assert client.config.generation == 1
        assert client.backends["a"] is before
        assert (await client.complete("Hi")).text == "oneone"


@pytest.mark.anyio
async def test_new_limits_hold_for_what_was_spent_under_the_old_ones(write: Callable[..., str]) -> None:
    def budget(limit: str) -> str:
        return f'[policies]\nbudgets = [{{ scope = "overall", limit = "{limit}", per = "day" }}]\n'

    path = write(a="one", more=budget("100"))
    async with Client.from_config(load_config(path)) as client:
        for _ in range(3):
            await client.complete("Hi")  # 0.1 USD each
        write(a="one", more=budget("0.35"))
        await client.reload()
        with pytest.raises(BudgetExceededError) as caught:
            await client.complete("Hi")
        assert (caught.value.limit, caught.value.spent) == (Decimal("0.35"), Decimal("0.3"))
        write(a="one", more=budget("50"))
        await client.reload()
        await client.complete("Hi")


@pytest.mark.anyio
async def test_under_load_no_request_sees_half_a_configuration(write: Callable[..., str]) -> None:
    """Each generation has one backend of its own name: a decision with a generation names that generation's backend."""
    path = write(g1="t1", options="delay = 0.003\n")
    decided: list[tuple[int, str | None]] = []

    def hook(details: Any) -> None:
        if isinstance(details, Decided):
            decided.append((details.decision.generation, details.decision.chosen))

    async with Client.from_config(load_config(path), hooks=[hook]) as client:
        stop = anyio.Event()
        answers: list[tuple[int, str, str]] = []

        async def ask() -> None:
            while not stop.is_set():
                done = await client.complete("Hi", model="main")
                answers.append((done.decision.generation, done.backend, done.text))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
            for number in range(2, 12):
                await anyio.sleep(0.02)
                write(**{f"g{number}": f"t{number}"}, options="delay = 0.003\n")
                assert await client.reload() == number
            await anyio.sleep(0.05)
            stop.set()
    assert len({generation for generation, _, _ in answers}) > 3
    assert all(backend == f"g{g}" and text == f"t{g}t{g}" for g, backend, text in answers)
    assert all(chosen == f"g{g}" for g, chosen in decided)


@pytest.mark.anyio
async def test_a_stream_that_was_open_ends_under_its_own_generation(write: Callable[..., str]) -> None:
    path = write(a="one")
    async with Client.from_config(load_config(path)) as client:
        old: Any = client.backends["a"]
        async with client.stream("Hi") as stream:
            write(b="two")
            await client.reload()
            await anyio.sleep(1.2)
            assert not old.closed
            assert (await stream.get_final_completion()).text == "oneone"
        assert (await client.complete("Hi")).text == "twotwo"
        with anyio.fail_after(10):
            while not old.closed:
                await anyio.sleep(0.05)


@pytest.mark.anyio
async def test_closing_closes_what_was_taken_out(write: Callable[..., str]) -> None:
    path = write(a="one")
    async with Client.from_config(load_config(path)) as client:
        old: Any = client.backends["a"]
        write(b="two")
        await client.reload()
    assert old.closed
    with pytest.raises(StreamStateError):
        await client.reload()


@pytest.mark.anyio
async def test_the_file_is_watched(write: Callable[..., str]) -> None:
    path = write(a="one")
    told: list[Any] = []
    async with cachespec.connect(path, hooks=[told.append]) as client:
        assert (await client.complete("Hi")).text == "oneone"
        write(a="two")
        with anyio.fail_after(20):
            while not any(isinstance(t, Reloaded) for t in told):
                await anyio.sleep(0.05)
        assert (await client.complete("Hi")).text == "twotwo"
        Path(path).write_text("[backends.a]\nuse = 3\n")
        with anyio.fail_after(20):
            while not any(isinstance(t, ReloadRefused) for t in told):
                await anyio.sleep(0.05)
        refused = next(t for t in told if isinstance(t, ReloadRefused))
        assert isinstance(refused.error, ConfigError)
        assert refused.generation == client.config.generation == 2
        Path(path).unlink()  # an editor may do so for a moment
        assert (await client.complete("Hi")).text == "twotwo"
    count = len(told)
    write(a="three")
    await anyio.sleep(1.5)
    assert len(told) == count


@pytest.mark.anyio
async def test_it_need_not_be_watched_and_code_has_no_file(write: Callable[..., str]) -> None:
    path = write(a="one")
    async with cachespec.connect(path, watch=False) as client:
        write(a="two")
        await anyio.sleep(2.5)
        assert client.config.generation == 1
    async with Client(backends={"a": ScriptedBackend(name="a")}, clock=FakeClock()) as client:
        with pytest.raises(InputError, match="not made from a file"):
            await client.reload()


@pytest.mark.anyio
async def test_a_stream_built_before_a_reload_begins_under_the_new_configuration(write: Callable[..., str]) -> None:
    async with Client.from_config(load_config(write(a="old"))) as client:
        built = client.stream("Hi")
        await client.complete("Hi")
        old = client.backends["a"]
        write(a="new")
        await client.reload()
        with anyio.fail_after(10):
            while not getattr(old, "closed"):  # noqa: B009 - a scripted one
                await anyio.sleep(0.05)
        async with built as stream:
            assert (await stream.get_final_completion()).text == "newnew"
            assert stream.decision.generation == 2


@pytest.mark.anyio
async def test_a_stream_whose_alias_is_gone_says_so_and_asks_nobody(write: Callable[..., str]) -> None:
    async with Client.from_config(load_config(write(a="old"))) as client:
        built, verdict = client.stream("Hi", model="main"), client.plan_request(build_request("Hi"))
        old: Any = client.backends["a"]
        await client.complete("Hi")
        path = Path(write(b="new"))
        path.write_text(path.read_text().replace("[models.main]", "[models.other]"))
        await client.reload()
        with anyio.fail_after(10):
            while not old.closed:
                await anyio.sleep(0.05)
        with pytest.raises(InputError, match="no model 'main'") as caught:
            async with built:
                pass
        assert not getattr(caught.value, "__notes__", [])
        assert len(old.requests) == 1
        with pytest.raises(InputError, match="generation 1, and its backend 'a' is gone"):
            client.wire(verdict)


@pytest.mark.anyio
async def test_a_stream_is_counted_in_the_window_in_which_it_is_entered() -> None:
    """Built ten seconds before midnight, entered ten after."""
    clock = FakeClock(datetime(2027, 3, 1, 23, 59, 50, tzinfo=UTC).timestamp())
    rates = hosted_rates(None, "m", prices={"input": "1000", "output": "1000"})
    spent = say("Hello", usage=Usage(uncached=900, cache_read=0, cache_write={}, output=0))
    policies = {"budgets": [{"scope": "overall", "limit": "1", "per": "day"}]}
    backends = {"a": ScriptedBackend(spent, name="a", rates=rates)}
    async with Client(backends=backends, clock=clock, ledger=MemoryLedger(clock=clock.time), policies=policies) as client:
        await client.complete("Hi", max_output_tokens=5)
        built = client.stream("Hi" * 100, max_output_tokens=5)
        with pytest.raises(BudgetExceededError):
            await client.complete("Hi" * 100, max_output_tokens=5)
        clock.advance(20)
        async with built as stream:
            (state,) = stream.decision.budgets
            assert state.spent == 0
            assert (await stream.get_final_completion()).cost == Decimal("0.9")
        with pytest.raises(BudgetExceededError) as caught:
            await client.complete("Hi" * 100, max_output_tokens=5)
        assert caught.value.resets_at is not None
        assert caught.value.resets_at.timestamp() > clock.time()


def locked(path: Path, key: str, price: str = "1", names: str = "ab") -> None:
    """Two backends: the first has this key, the second a good one and a high price."""
    variables = {"a": (key, price), "b": ("GOOD_KEY", "50")}
    tables = []
    for name in names:
        variable, amount = variables[name]
        table = f'use = "reload_plugin:Locked"\napi_key = {{ env = "{variable}" }}\nprice = "{amount}"\n'
        tables.append(f"[backends.{name}]\n{table}")
    path.write_text("".join(tables) + f"[models.main]\nbackends = {list(names)}\n")


@pytest.mark.anyio
@pytest.mark.parametrize("by_way_of_nothing", [False, True])
async def test_what_was_learned_of_a_name_ends_with_what_it_stood_for(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, by_way_of_nothing: bool
) -> None:
    monkeypatch.setenv("GOOD_KEY", "good")
    monkeypatch.setenv("BAD_KEY", "bad")
    path, clock = Path(write(a="x")), FakeClock()
    locked(path, "BAD_KEY")
    async with Client.from_config(load_config(path), clock=clock) as client:
        for _ in range(5):
            assert (await client.complete("Hi")).backend == "b"
            clock.advance(400)
        await client.complete("Hi")
        assert [r.code for o in client.plan("Hi").candidates if o.backend == "a" for r in o.reasons] == ["unhealthy"]
        assert client.plan("Hi").candidates[0].latency.evidence == "measured"
        if by_way_of_nothing:
            locked(path, "BAD_KEY", names="b")
            await client.reload()
        locked(path, "GOOD_KEY")
        await client.reload()
        assert (await client.complete("Hi")).backend == "a"
        latency = {o.backend: o.latency.evidence for o in client.plan("Hi").candidates}
        assert latency == {"a": "assumed", "b": "measured"}


def evidence(client: Client) -> str:
    return client.plan("Hi").candidates[0].latency.evidence


@pytest.mark.anyio
async def test_a_restart_with_another_model_begins_with_no_speeds_of_it(write: Callable[..., str]) -> None:
    async with Client.from_config(load_config(write(a="one"))) as client:
        for _ in range(3):
            await client.complete("Hi")
        assert evidence(client) == "measured"
    async with Client.from_config(load_config(write(a="two"))) as client:
        assert evidence(client) == "assumed"
        await client.complete("Hi")
    async with Client.from_config(load_config(write(a="one"))) as client:
        assert evidence(client) == "measured"


@pytest.mark.anyio
async def test_a_stream_that_outlives_a_reload_teaches_the_new_model_nothing(write: Callable[..., str]) -> None:
    path = write(a="one")
    async with Client.from_config(load_config(path)) as client:
        for _ in range(2):
            await client.complete("Hi")
        async with client.stream("Hi") as third, client.stream("Hi") as fourth:
            write(a="two")
            await client.reload()
            for _ in range(2):
                await client.complete("Hi")
            assert evidence(client) == "assumed"
            for stream in (third, fourth):
                assert (await stream.get_final_completion()).text == "oneone"
            assert evidence(client) == "assumed"
        write(a="one")
        await client.reload()
        assert evidence(client) == "measured"


@pytest.mark.anyio
async def test_what_a_variable_names_is_part_of_what_a_name_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cachespec.toml"
    url = '{ env = "SERVER" }'
    path.write_text(f'[backends.a]\nuse = "openai"\nmodel = "m"\nbase_url = {url}\napi_key = {{ env = "KEY" }}\n')
    monkeypatch.setenv("KEY", "k")
    found = []
    for port in (1, 2, 1):
        monkeypatch.setenv("SERVER", f"http://127.0.0.1:{port}/v1")
        client = Client.from_config(load_config(path))
        found.append(client._now.targets["a"])
        await client.aclose()
    assert found[0] == found[2] != found[1]


@pytest.mark.anyio
async def test_an_attempt_at_the_one_before_says_nothing_of_who_answers_by_its_name_now() -> None:
    health = Health()
    old = [health.started("a", 0.0) for _ in range(4)]
    health.failed(old.pop(), AuthenticationError("bad key", backend="a"), 1.0)
    assert health.refusal("a", 2.0) is not None
    health.forget("a")
    assert health.refusal("a", 2.0) is None
    for trial in old:
        health.failed(trial, AuthenticationError("bad key", backend="a"), 3.0)
    assert (health.refusal("a", 3.0), health.load("a")) == (None, 0)
    health.failed(health.started("a", 4.0), AuthenticationError("bad key", backend="a"), 5.0)
    assert health.refusal("a", 5.0) is not None


def claude(path: Path, url: str, key: str, *, price: str = "3", caching: str = "always") -> None:
    prices = f'{{ input = "{price}", cache_read = "0.3", cache_write = {{ "5m" = "3.75" }}, output = "15" }}'
    model = 'use = "anthropic"\nmodel = "claude-sonnet-4-5"\n'
    server = f'base_url = "{url}"\napi_key = {{ env = "{key}" }}\nprices = {prices}\n'
    path.write_text(f'[backends.claude]\n{model}{server}[policies]\ncaching = {{ use = "{caching}" }}\n')


@pytest.mark.anyio
async def test_what_one_account_cached_is_not_believed_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_1", "k1")
    monkeypatch.setenv("KEY_2", "k2")
    path, manual, clock = tmp_path / "c.toml", "word " * 8_000, FakeClock()
    counts = {"input_tokens": 10, "cache_creation_input_tokens": 12_000, "cache_read_input_tokens": 0, "output_tokens": 3}
    with WireServer() as first, WireServer() as second:
        first.counts = second.counts = lambda api, body, headers: lambda tokens: counts

        def state() -> str:
            return client.plan("Next?", system=manual, max_output_tokens=10).candidates[0].belief.state

        claude(path, first.url, "KEY_1")
        async with Client.from_config(load_config(path), clock=clock) as client:
            await client.complete("Hi", system=manual, max_output_tokens=10)
            clock.advance(3)
            warm = state()
            assert warm in ("warm", "partial")
            claude(path, first.url, "KEY_1", price="4")
            await client.reload()
            assert state() == warm  # it costs something else, and is the same
            for url, key in ((second.url, "KEY_1"), (first.url, "KEY_2")):
                claude(path, url, key)
                await client.reload()
                assert state() == "cold"
            claude(path, first.url, "KEY_1")
            await client.reload()
            assert state() == warm


async def generation_of(client: Client, number: int) -> None:
    with anyio.fail_after(20):
        while client.config.generation < number:
            await anyio.sleep(0.02)


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cachespec.client, "LOOK_S", 0.05)


@pytest.mark.anyio
@pytest.mark.usefixtures("_often")
async def test_a_change_between_reading_and_watching_is_seen(write: Callable[..., str]) -> None:
    config = load_config(write(a="one"))
    write(a="two")
    async with Client.from_config(config, watch=True) as client:
        await generation_of(client, 2)
        assert (await client.complete("Hi")).text == "twotwo"
        await anyio.sleep(0.3)  # the same text is no change at first, and later only when it is saved again
        assert client.config.generation == 2
        write(a="two")
        await generation_of(client, 3)


@pytest.mark.anyio
@pytest.mark.usefixtures("_often")
async def test_a_relative_path_is_the_one_it_was_loaded_from(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = Path(write(a="one"))
    monkeypatch.chdir(path.parent)
    async with cachespec.connect(path.name) as client:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        write(a="two")
        await generation_of(client, 2)
        assert (await client.complete("Hi")).text == "twotwo"
        assert await client.reload() == 3


@pytest.mark.anyio
@pytest.mark.usefixtures("_often")
async def test_a_pipe_in_the_files_place_is_refused_and_keeps_nobody_waiting(write: Callable[..., str]) -> None:
    path = Path(write(a="one"))
    told: list[Any] = []
    with anyio.fail_after(20):
        async with Client.from_config(load_config(path), hooks=[told.append], watch=True) as client:
            path.unlink()
            os.mkfifo(path)
            while not any(isinstance(t, ReloadRefused) for t in told):
                await anyio.sleep(0.02)
            with pytest.raises(ConfigError, match="no regular file"):
                await client.reload()
            path.unlink()
            write(a="two")
            await generation_of(client, 2)


class Stubborn(ScriptedBackend):
    """Takes its time to close, and fails at it."""

    gone = False

    async def aclose(self) -> None:
        await super().aclose()
        await anyio.sleep(0.2)
        self.gone = True
        raise RuntimeError("it does not want to")


@pytest.mark.anyio
async def test_retired_backends_are_closed_to_the_end_each_of_them(caplog: pytest.LogCaptureFixture) -> None:
    old = [Stubborn(name="a"), Stubborn(name="b")]
    client = Client(backends={backend.name: backend for backend in old})
    async with client:
        await client.start()
        client._now = replace(client._now, wired=replace(client._now.wired, backends={}))
        client._retired.add(old)
        with anyio.fail_after(10):
            while not old[0].closed:
                await anyio.sleep(0.02)
    assert [backend.gone for backend in old] == [True, True]
    assert caplog.text.count("could not be closed") == 2


class Slow(ScriptedBackend):
    def __init__(self, *, name: str) -> None:
        super().__init__(name=name)
        self.begun = anyio.Event()

    async def start(self) -> None:
        self.closed = False
        self.begun.set()
        await anyio.sleep(0.05)
        await super().start()


@pytest.mark.anyio
async def test_a_client_that_is_closed_while_it_starts_leaves_nothing_open() -> None:
    first, second = Slow(name="a"), Slow(name="b")
    client = Client(backends={"a": first, "b": second})

    async def start() -> None:
        with pytest.raises(StreamStateError, match="closed"):
            await client.start()

    async with anyio.create_task_group() as group:
        group.start_soon(start)
        await first.begun.wait()
        await client.aclose()
    assert (first.started, first.closed, second.started) == (1, True, 0)
