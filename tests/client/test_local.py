"""The whole path on a real small model: reuse, leaving early, and what is booked."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from pathlib import Path

import anyio
import pytest

from cachespec.client import Client
from cachespec.errors import ContextLengthError

pytestmark = [pytest.mark.anyio, pytest.mark.model]
MANUAL = "The kettle boils one litre of water in three minutes. Never fill it above the upper line. " * 18


async def test_reuse_leaving_and_booking_on_a_real_model(anyio_backend_name: str) -> None:
    pytest.importorskip("llama_cpp")
    table = {"use": "llamacpp", "model": "smollm2", "context": 2048, "threads": 1, "cost": {"per_hour": "3.60"}}
    async with Client(backends={"laptop": table}) as client:
        first = await client.complete("How long?", system=MANUAL, max_output_tokens=8, temperature=0)
        assert first.usage is not None
        assert first.usage.cache_read == 0
        assert first.usage.input_tokens is not None
        assert first.usage.input_tokens > 300
        assert first.cost is not None
        assert first.cost > 0
        belief = client.plan("How much?", system=MANUAL).candidates[0].belief
        assert belief.state == "warm"
        second = await client.complete("How much?", system=MANUAL, max_output_tokens=8, temperature=0)
        assert second.usage is not None
        assert second.usage.cache_read is not None
        assert second.usage.cache_read >= first.usage.input_tokens - 24
        assert belief.tokens == second.usage.cache_read
        assert second.cost is not None
        assert second.cost < first.cost

        async with client.stream("Tell a long story.", system=MANUAL, temperature=0) as stream:
            async for _ in stream.text_stream:
                break
        left = (await client.ledger.entries())[0]
        # The engine counted, so nothing about it is an estimate.
        assert (left.outcome, left.estimated) == ("left", False)
        assert left.usage is not None
        assert left.usage.output is not None
        assert 1 <= left.usage.output < 50
        assert left.amount is not None
        assert Decimal(0) < left.amount < Decimal("0.05")

        other = await client.complete("How much?", system=MANUAL, tenant="other", max_output_tokens=4)
        assert other.usage is not None
        assert other.usage.cache_read == 0
        with pytest.raises(ContextLengthError):
            await client.complete("word " * 3000)


async def test_waiting_in_a_burst_is_not_taken_for_a_slow_engine(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    table = {"use": "llamacpp", "model": "smollm2", "context": 512, "threads": 1}
    ledger = {"use": "sqlite", "path": str(tmp_path / "ledger.db")}  # all decide before the first is under way
    async with Client(backends={"laptop": table}, ledger=ledger) as client:

        def first_token_ms() -> float:
            return client.plan("Say 3.", max_output_tokens=8).candidates[0].latency.ttft_ms or 0.0

        await client.complete("Say 3.", max_output_tokens=8)
        before = first_token_ms()
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(partial(client.complete, f"Say {number}.", max_output_tokens=8))
        assert first_token_ms() < 12 * before
