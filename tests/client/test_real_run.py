"""A real run: the small model and two vendors on loopback, whose prices and speeds change, and one of which dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.wire.server import WireServer

from cachespec.client import Client
from cachespec.config import load_config

pytestmark = [pytest.mark.anyio, pytest.mark.model]
CONFIG = """
[client]
model = "main"
max_output_tokens = 6
ledger = {{ use = "sqlite", path = "{ledger}" }}
[backends.claude]
use = "anthropic"
model = "claude-sonnet-4-5@ok-3"
base_url = "{claude}"
api_key = {{ env = "TEST_KEY" }}
prices = {{ input = "{low}", output = "{low}" }}
[backends.gpt]
use = "openai"
model = "gpt-4.1@ok-3"
base_url = "{gpt}"
api_key = {{ env = "TEST_KEY" }}
prices = {{ input = "{high}", output = "{high}" }}
[backends.laptop]
use = "llamacpp"
model = "smollm2"
context = 1024
threads = 1
cost = {{ per_hour = "900" }}
[models.main]
backends = ["claude", "gpt", "laptop"]
[policies]
routing = {{ use = "cheapest", max_ttft = "2s" }}
retries = {{ first_delay = "10ms" }}
"""


@pytest.fixture
def servers() -> Iterator[tuple[WireServer, WireServer]]:
    with WireServer() as claude, WireServer() as gpt:
        yield claude, gpt


async def test_the_route_follows_prices_speeds_and_deaths(
    servers: tuple[WireServer, WireServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    monkeypatch.setenv("TEST_KEY", "k")
    claude, gpt = servers
    path = tmp_path / "cachespec.toml"

    def write(low: str, high: str) -> None:
        urls = {"claude": claude.url, "gpt": gpt.openai_url, "ledger": tmp_path / "ledger.db"}
        path.write_text(CONFIG.format(low=low, high=high, **urls))

    write("1", "3")
    count = 0
    answered: Counter[str] = Counter()

    async with Client.from_config(load_config(path)) as client:

        async def ask() -> str:
            nonlocal count
            count += 1
            done = await client.complete(f"Question number {count}, please.")
            assert done.text, count
            assert done.cost is not None
            answered[done.backend] += 1
            return done.backend

        async def until(name: str, most: int = 20) -> None:
            """Within so many requests the route is `name`, and stays there."""
            route: list[str] = []
            while route[-3:] != [name] * 3:
                assert len(route) < most + 3, route
                route.append(await ask())

        await until("claude")
        write("3", "1")  # prices change: gpt is the cheaper one now
        await client.reload()
        await until("gpt")
        gpt.slow_s = 3.0  # and gets slow: above the limit
        await until("claude")
        claude.stop()  # and the other one dies: the local model is what keeps the limit
        await until("laptop")
        assert sum(answered.values()) == count  # none was lost
        decision = client.plan("One more.")
        why = {c.backend: [r.code for r in c.reasons] for c in decision.candidates}
        assert why["claude"] == ["unhealthy"]
        assert "latency_limit" in why["gpt"]
        gpt.slow_s = 0.0
        async with anyio.create_task_group() as tasks:  # under load, too
            for _ in range(20):
                tasks.start_soon(ask)
        totals = await client.ledger.totals()
        assert totals.requests == count
    sent: Counter[int] = Counter()
    for server in servers:
        for request in server.requests:
            if request.status == 200 and request.disconnected_at is None:
                sent[number(request.json)] += 1
    assert max(sent.values()) == 1  # nothing that was answered was sent twice


def number(body: dict[str, Any]) -> int:
    """Which question a body asks."""
    text = str(body.get("messages") or body["input"])
    return int(text.partition("Question number ")[2].partition(",")[0])
