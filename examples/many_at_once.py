"""A hundred requests at once under one hard budget: those that do not fit are refused before they are sent.

python examples/many_at_once.py CONFIG
"""

from __future__ import annotations

import sys

import anyio

import cachespec


async def main(config: str) -> None:
    refused = 0

    async def ask(client: cachespec.Client, number: int) -> None:
        nonlocal refused
        try:
            await client.complete(f"Say the number {number}.", max_output_tokens=20)
        except cachespec.BudgetExceededError:
            refused += 1

    async with cachespec.connect(config) as client:
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(ask, client, number)
        totals = await client.ledger.totals()
    print(f"{totals.requests} answered for {totals.amount:f} USD, {refused} refused")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
