"""What goes over the wire stays what it is: bytes of the prefix, the caller's marks and a model's own text, planned or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.client.caching_support import PRICES, Recording, Vendor, marks_of, prefix_bytes, text

from cachespec.client import Client
from cachespec.request import build_request

pytestmark = pytest.mark.anyio
CLAUDE, GPT, OLD = "claude-sonnet-5", "gpt-5.6-sol", "gpt-5.4"
SYSTEM = text(1500, "manual ")
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}
CALL = {"type": "tool_use", "id": "c1", "name": "look", "input": {"z": 1, "a": [True, None]}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "found"}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


HISTORY: list[dict[str, Any]] = [user({"type": "text", "text": "é Hi"}), {"role": "assistant", "content": [CALL]}, user(RESULT)]


@pytest.mark.parametrize("model", [CLAUDE, GPT])
async def test_b7_a_mark_on_a_tool_result_survives_conversion_and_is_counted(vendor: Vendor, model: str) -> None:
    key = "cache_control" if model == CLAUDE else "prompt_cache_breakpoint"
    mark = {"type": "ephemeral"} if model == CLAUDE else {"mode": "explicit"}
    results = [{"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": text(1200), key: mark}]}]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat: list[Any] = [{"role": "user", "content": "Hi"}, asked, *results]
    async with vendor.client(model, Recording(end=None)) as client:
        done = await client.complete(messages=chat, system=SYSTEM, tools=[TOOL])
    paths = [path for path, _ in marks_of(vendor.bodies[0])]
    assert len(paths) == 2  # ours at the system prompt, the caller's on the result
    assert paths[1].startswith("messages[2].content[0]" if model == CLAUDE else "input[3].output[0]")
    assert done.decision.plan is not None
    assert len(done.decision.plan.marks) == 2


CODE = """
import hashlib, json, sys
from cachespec.client import Client
from cachespec.request import build_request
history, tool = json.loads(sys.argv[1]), json.loads(sys.argv[2])
backends = {
    "a": {"use": "anthropic", "model": "claude-sonnet-5", "api_key": "k"},
    "o": {"use": "openai", "model": "gpt-5.6-sol", "api_key": "k"},
    "c": {"use": "openai", "model": "gpt-5.4", "api": "chat", "api_key": "k"},
}
client = Client(backends=backends, models={"m": list(backends)})
for name in backends:
    seen = set()
    for _ in range(int(sys.argv[3])):
        request = build_request(messages=history, tools=[tool], system="x " * 4000, model=name)
        seen.add(client.wire(client.plan_request(request)).body)
    (body,) = seen
    print(name, hashlib.sha256(body.encode()).hexdigest())
"""


async def test_b17_bodies_are_the_same_in_every_run_and_process(vendor: Vendor) -> None:
    told = []
    for seed, runs in (("0", "334"), ("1", "1"), ("4242", "1")):
        arguments = [sys.executable, "-c", CODE, json.dumps(HISTORY), json.dumps(TOOL), runs]
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        told.append(subprocess.run(arguments, capture_output=True, text=True, check=True, env=environ).stdout)
    assert told[0].count("\n") == 3
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("model", [CLAUDE, GPT])
async def test_b17_a_mark_that_comes_or_goes_moves_no_byte_of_the_prefix(vendor: Vendor, model: str) -> None:
    long = [user({"type": "text", "text": text(1200)}), *HISTORY[1:]]
    async with vendor.client(model) as marked, vendor.client(model, Recording(head=None, warm=None, end=None)) as plain:
        for client in (marked, plain):
            await client.complete(messages=long, system=SYSTEM, tools=[TOOL])
    with_marks, without = vendor.bodies
    assert marks_of(with_marks)
    assert not marks_of(without)
    assert prefix_bytes(with_marks) == prefix_bytes(without)


@pytest.mark.parametrize("model", [CLAUDE, GPT, OLD])
async def test_b19_a_models_argument_text_goes_back_as_it_came(vendor: Vendor, model: str) -> None:
    arguments = '{"z": 1,  "a":[true,null], "é":"\\u00e9"}'
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    said: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "c1", "content": text(1200)})
    async with vendor.client(model) as client:
        await client.complete(messages=said, tools=[TOOL])
    raw = vendor.server.requests[0].body.decode()
    assert (arguments if model == CLAUDE else json.dumps(arguments, ensure_ascii=False)) in raw


async def test_b23_unknown_keys_of_a_mark_survive_and_who_cannot_honour_it_is_told(vendor: Vendor) -> None:
    given = {"type": "ephemeral", "ttl": "1h", "scope": "organization", "new": {"a": 1}}
    said = [user({"type": "text", "text": text(1200), "cache_control": given})]
    async with vendor.client(CLAUDE) as client:
        await client.complete(messages=said)
    assert vendor.bodies[0]["messages"][0]["content"][0]["cache_control"] == given
    async with vendor.client(GPT, Recording(end=None)) as client:
        done = await client.complete(messages=said)
    assert "cache_control" not in vendor.server.requests[1].body.decode()
    assert any("cache_control means nothing to this backend" in warning for warning in done.warnings)


async def test_b25_nothing_of_one_vendor_crosses_to_another_on_a_fallback(vendor: Vendor) -> None:
    server, shared = vendor.server, {"api_key": "k", "prices": PRICES}
    backends = {
        "claude": {"use": "anthropic", "model": "claude-sonnet-5@500-9", "base_url": server.url, **shared},
        "gpt": {"use": "openai", "model": "gpt-5.6-sol@ok-5", "base_url": server.openai_url, **shared},
        "old": {"use": "openai", "model": "gpt-5.4@ok-5", "api": "chat", "base_url": server.openai_url, **shared},
    }
    marked = [user({"type": "text", "text": text(1200), "cache_control": {"type": "ephemeral"}}), *HISTORY[1:]]
    for order in (["claude", "gpt"], ["claude", "old"]):
        async with Client(
            backends={name: backends[name] for name in order},
            models={"any": order},
            policies={
                "caching": Recording(),
                "routing": {"use": "pinned", "backend": "claude"},
                "retries": {"first_delay": 0.01, "attempts": 6},
            },
            clock=vendor.clock,
        ) as client:
            request = build_request(messages=marked, system=SYSTEM, tools=[TOOL], session_id="s", tenant="t")
            async with client.stream_request(request) as stream:
                done = await stream.get_final_completion()
        assert done.backend == order[1]
        assert "cache_control" not in server.requests[-1].body.decode()
    sent = [request.json for request in server.requests]
    assert all("prompt_cache" not in json.dumps(body) for body in sent if body["model"].startswith("claude"))
    assert "prompt_cache_options" in sent[-1] or sent[-1]["prompt_cache_key"]
    assert "prompt_cache_breakpoint" not in json.dumps(sent[-1])  # older models refuse them
