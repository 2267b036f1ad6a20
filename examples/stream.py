"""Stream one answer, then say who gave it and why.

python examples/stream.py [CONFIG]        without a file: whatever keys the environment has, or the small local model
"""

from __future__ import annotations

import sys

import anyio

import cachespec
from cachespec.usage import money_text


async def main(config: str | None) -> None:
    async with cachespec.connect(config) as client:
        async with client.stream("Name three rivers of Europe.", max_output_tokens=80) as stream:
            async for text in stream.text_stream:
                print(text, end="", flush=True)
            done = await stream.get_final_completion()
        print(f"\n\n{done.usage}\ncost: {money_text(done.cost) or 'not known'} (USD)")
        print(done.decision.explain())


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
