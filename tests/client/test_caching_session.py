"""A real agent session, turn by turn, against servers that keep the vendors' cache rules."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.client.caching_support import Recording, Vendor, marks_of, prefix_bytes
from tests.wire.cache_rules import CacheRules
from tests.wire.server import WireServer

from cachespec.testing import FakeClock

pytestmark = pytest.mark.anyio


def turns_of(path: Path) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """The recorded request, and its messages cut after each run of tool results."""
    request = json.loads(gzip.decompress(path.read_bytes()))
    messages = request["messages"]
    ends = [i for i in range(1, len(messages) + 1) if messages[i - 1]["role"] == "tool"]
    ends = [i for i in ends if i == len(messages) or messages[i]["role"] != "tool"]
    return request, [messages[:i] for i in ends]


@pytest.mark.shared
@pytest.mark.parametrize("policy", [Recording, None], ids=["fixed", "default"])
@pytest.mark.parametrize(
    ("model", "api"),
    [("claude-sonnet-5", "messages"), ("claude-haiku-4-5", "messages"), ("gpt-5.6-sol", "responses"), ("gpt-5.6-sol", "chat")],
)
async def test_every_turn_reads_what_the_turn_before_left(
    wire_server: WireServer, shared_data: Path, model: str, api: str, policy: type[Recording] | None
) -> None:
    request, turns = turns_of(shared_data / "agents" / "agentic_code_29.json.gz")
    assert len(turns) > 20
    clock = FakeClock()
    rules = CacheRules(lambda: clock.now, minimum=4096 if "haiku" in model else 1024)
    wire_server.counts = rules
    vendor = Vendor(wire_server, rules, clock)
    async with vendor.client(model, policy, api=api) as client:
        for messages in turns:
            await client.complete(messages=messages, tools=request["tools"], session_id="s")
            clock.advance(17)
    bodies = vendor.bodies
    assert [r.status for r in wire_server.requests] == [200] * len(turns)
    assert all(len(marks_of(body)) <= 4 for body in bodies)
    totals = [total for _, _, _, total in rules.log]
    for i in range(1, len(turns)):
        # All of the request before can be read again, once it is long enough to be cached.
        reusable = totals[i - 1] if totals[i - 1] >= rules.minimum else 0
        assert rules.log[i][1] >= 0.95 * reusable, f"turn {i + 1}"
    for earlier, later in pairwise(bodies):
        before, after = prefix_bytes(earlier), prefix_bytes(later)
        assert after[: len(before)] == before
        assert later.get("tools") is None or _plain_tools(later) == _plain_tools(earlier)


def _plain_tools(body: dict[str, Any]) -> str:
    return json.dumps([{k: v for k, v in tool.items() if k != "cache_control"} for tool in body["tools"]])
