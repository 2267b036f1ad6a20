"""The ready-made policy files: each is valid, and does what its first lines say, with scripted backends for the vendors'."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cachespec.client import Client
from cachespec.config import load_config
from cachespec.config_check import check_config
from cachespec.errors import BudgetExceededError, ConnectionFailedError, NoRouteError, OverloadedError
from cachespec.ledger.memory import MemoryLedger
from cachespec.pricing import hosted_rates
from cachespec.testing import FakeClock, Reply, ScriptedBackend, say
from cachespec.usage import Usage

FOLDER = Path(__file__).resolve().parents[1] / "policies"
FILES = sorted(FOLDER.glob("*.toml"))
CHEAP = hosted_rates(None, "cheap", prices={"input": "1", "output": "4"})
DEAR = hosted_rates(None, "dear", prices={"input": "5", "output": "25"})
FREE = hosted_rates(None, "free", prices={"input": "0", "output": "0"})
USAGE = Usage(uncached=1000, cache_read=0, cache_write={}, output=100)


def client(name: str, **scripts: Any) -> tuple[Client, dict[str, ScriptedBackend]]:
    """A client with the policies and aliases of a file. `scripts` are the backends' answers; claude is the dearer one."""
    tree = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    rates = {"claude": DEAR, "gpt": CHEAP, "laptop": FREE}
    backends = {n: ScriptedBackend(scripts.get(n, say("Hi", usage=USAGE)), name=n, rates=rates[n]) for n in tree["backends"]}
    models = {alias: table["backends"] for alias, table in tree["models"].items()}
    own = {key: tree["client"][key] for key in ("timeout", "max_output_tokens") if key in tree["client"]}
    clock = FakeClock()
    made = Client(
        backends=backends,
        models=models,
        policies=tree["policies"],
        model=tree["client"]["model"],
        ledger=MemoryLedger(clock=clock.time),
        clock=clock,
        **own,
    )
    return made, backends


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_is_valid_and_explained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(key, "k")
    assert load_config(path).models
    assert [f for f in check_config(str(path)) if f.level == "error"] == []
    assert path.read_text().startswith("# ")
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text()


def test_there_is_one_for_each_purpose() -> None:
    assert {path.stem for path in FILES} >= {"cost-first", "latency-first", "private-stays-local", "agent-loop", "batch"}


@pytest.mark.anyio
async def test_cost_first_takes_the_cheapest_and_ends_a_month() -> None:
    big = Usage(uncached=20_000_000, cache_read=0, cache_write={}, output=0)
    made, _ = client("cost-first", gpt=[say("Hi", usage=USAGE)] + [say("Hi", usage=big)] * 20)
    async with made:
        assert (await made.complete("Hi", max_output_tokens=100)).backend == "gpt"
        for _ in range(10):
            await made.complete("Hi", tenant="acme", max_output_tokens=100)  # 20 USD each, as it turns out
        with pytest.raises(BudgetExceededError) as caught:
            await made.complete("Hi", max_output_tokens=100)
        assert caught.value.scope == "overall per month"


@pytest.mark.anyio
async def test_cost_first_gives_what_a_tenants_day_has_no_room_for_to_the_cheaper_model() -> None:
    big = Usage(uncached=2_000_000, cache_read=0, cache_write={}, output=0)
    made, _ = client("cost-first", claude=[say("Hi", usage=big)])
    async with made:
        done = await made.complete("Hi", model="claude", tenant="acme", max_output_tokens=100)
        assert done.cost == Decimal(10)
        decision = made.plan("Hi", tenant="acme", max_output_tokens=100)
        assert decision.chosen == "gpt"
        assert [r.code for c in decision.candidates if c.backend == "claude" for r in c.reasons] == ["budget"]


@pytest.mark.anyio
async def test_latency_first_takes_the_faster_within_a_price() -> None:
    made, backends = client("latency-first")
    backends["claude"]._ttft_ms, backends["gpt"]._ttft_ms = 100.0, 900.0
    async with made:
        assert made.plan("Hi", max_output_tokens=100).chosen == "claude"
        assert made.plan("word " * 20_000, max_output_tokens=100).chosen == "gpt"  # more than five cents there


@pytest.mark.anyio
async def test_private_stays_local_whatever_happens() -> None:
    down = Reply(refuse=ConnectionFailedError("down", backend="laptop"))
    made, backends = client("private-stays-local", laptop=[say("Here"), down], claude=say("There"))
    async with made:
        assert (await made.complete("Hi")).text == "There"
        assert (await made.complete("Hi", tags=["private"])).text == "Here"
        for _ in range(3):
            with pytest.raises((ConnectionFailedError, NoRouteError)):
                await made.complete("Hi", tags=["private", "x"])
    assert len(backends["claude"].requests) == 1


@pytest.mark.anyio
async def test_agent_loop_stays_and_ends_a_loop_that_runs_away() -> None:
    big = Usage(uncached=1_000_000, cache_read=0, cache_write={}, output=0)
    over = Reply(refuse=OverloadedError("529", backend="gpt"))
    made, _ = client(
        "agent-loop", gpt=[over, say("Hi", usage=big)], claude=[say("Hi", usage=USAGE)] * 3 + [say("Hi", usage=big)]
    )
    async with made:
        assert (await made.complete("Hi", session_id="s")).backend == "claude"
        for _ in range(2):
            assert (await made.complete("Hi", session_id="s")).backend == "claude"  # although gpt is cheaper
        await made.complete("Hi", session_id="s")  # 5 USD
        with pytest.raises(BudgetExceededError) as caught:
            await made.complete("Hi", session_id="s")
        assert caught.value.scope == "session:s in total"
        await made.complete("Hi", session_id="another")


@pytest.mark.anyio
async def test_batch_waits_for_a_busy_server_and_has_a_budget_of_its_own() -> None:
    busy = Reply(refuse=OverloadedError("529", backend="x"))
    made, backends = client("batch", gpt=[busy] * 3 + [say("Done", usage=USAGE)], claude=busy)
    async with made:
        done = await made.complete("Hi", tags=["batch"], max_output_tokens=100)
        assert done.text == "Done"
        assert sum(len(b.requests) for b in backends.values()) > 4
        (budget,) = made.plan("Hi", tags=["batch"]).budgets
        assert (budget.scope, budget.limit) == ("tag:batch per day", Decimal(20))
        assert made.plan("Hi").budgets == ()
