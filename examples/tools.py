"""A tool loop: the model asks, the program answers, until the model is done.

python examples/tools.py [CONFIG]         needs a backend that takes tools
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import anyio

import cachespec

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "population",
            "description": "How many people live in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def population(city: str) -> str:
    return json.dumps({"Zug": 31_000, "Bern": 134_000}.get(city))


async def main(config: str | None) -> None:
    messages: list[cachespec.Message | Mapping[str, Any]] = [{"role": "user", "content": "How many people live in Zug?"}]
    async with cachespec.connect(config) as client:
        while True:
            done = await client.complete(messages=messages, tools=TOOLS, max_output_tokens=200)
            messages.append(done.message)
            if not done.tool_calls:
                break
            for call in done.tool_calls:
                print(f"{call.name}({call.arguments})")
                answer = population(**json.loads(call.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    print(done.text)


if __name__ == "__main__":
    try:
        anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
    except cachespec.CachespecError as error:  # above all: this backend takes no tools
        sys.exit(f"{type(error).__name__}: {error}")
