"""A hundred requests at once under one hard budget: those that do not fit are refused before they are sent.

python examples/many_at_once.py CONFIG     a configuration with a hard budget, for instance of 0.01 USD
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
    print(f"{100 - refused} answered, {refused} refused; {totals.amount:f} USD are in the ledger")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/many_at_once.py CONFIG")
    anyio.run(main, sys.argv[1])
