"""Tool results with more in them than text and images, on the wire: they are results like all others."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.caching_support import Vendor, marks_of, text

pytestmark = pytest.mark.anyio
TOOL = {"name": "look", "description": "Looks things up.", "input_schema": {"type": "object", "properties": {}}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text(1500, "found ")}}
FILE = {"type": "input_file", "filename": "x.txt", "file_data": f"data:text/plain,{text(1500)}"}


def conversation(api: str) -> list[dict[str, Any]]:
    """A question, a call with an id that not every vendor takes, and its result."""
    if api == "messages":
        call: dict[str, Any] = {"type": "tool_use", "id": "functions.look:0", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "functions.look:0", "content": [DOCUMENT]}
        return [
            {"role": "user", "content": text(1500, "task ")},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    call = {"type": "function_call", "call_id": "functions.look:0" + "x" * 60, "name": "look", "arguments": "{}"}
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": [FILE]}
    return [{"role": "user", "content": text(1500, "task ")}, call, answer]


async def test_empty_texts_of_a_system_and_of_results_are_not_sent_and_marks_keep_their_places(vendor: Vendor) -> None:
    empty = {"type": "text", "text": ""}
    given = conversation("messages")
    given[2]["content"][0]["content"] = [empty, {"type": "text", "text": text(1500, "found ")}, empty]
    async with vendor.client("claude-sonnet-5") as client:
        done = await client.complete(messages=given, system=["", text(1500), ""], tools=[TOOL], max_output_tokens=50)
    sent = vendor.bodies[-1]
    assert [block["text"] for block in sent["system"]] == [text(1500)]
    assert sent["messages"][2]["content"][0]["content"] == text(1500, "found ")
    assert [at for at, _ in marks_of(sent)] == ["system[0]", "messages[2].content[0]"]
    assert done.decision.plan is not None
    assert [mark.at for mark in done.decision.plan.marks] == ["system[1]", "messages[2][0]"]


@pytest.mark.parametrize(("model", "api"), [("claude-sonnet-5", "messages"), ("gpt-5.6-sol", "responses")])
async def test_a_result_with_a_document_is_written_in_its_own_turn_and_read_in_the_next(
    vendor: Vendor, model: str, api: str
) -> None:
    given = conversation(api)
    async with vendor.client(model) as client:
        first = await client.complete(messages=given, tools=[TOOL], max_output_tokens=50)
        again: list[Any] = [*given, *([first.message] if api == "messages" else []), {"role": "user", "content": "Go on."}]
        await client.complete(messages=again, tools=[TOOL], max_output_tokens=50)
    place = "messages[2].content[0]" if api == "messages" else "input[2].output[0]"
    assert place in [at for at, _ in marks_of(vendor.bodies[0])]
    assert vendor.reads[1] > 2500
    for sent in vendor.bodies:
        call, answer = (sent["messages"][i]["content"][0] for i in (1, 2)) if api == "messages" else sent["input"][1:3]
        ids = (call["id"], answer["tool_use_id"]) if api == "messages" else (call["call_id"], answer["call_id"])
        assert ids[0] == ids[1] != "functions.look:0"
