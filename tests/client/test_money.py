"""What requests cost, and whom their budgets hold together, on scripted backends and on the wire."""

from __future__ import annotations

from decimal import Decimal

import pytest

from cachespec.client import Client
from cachespec.errors import BudgetExceededError
from cachespec.pricing import hosted_rates
from cachespec.testing import ScriptedBackend, say
from cachespec.usage import Usage

pytestmark = pytest.mark.anyio


async def test_a_sessions_budget_is_each_tenants_own() -> None:
    """Whoever calls a session as another tenant does has its own limit, not the other's."""
    rates = hosted_rates(None, "m", prices={"input": "0", "output": "1000"})
    usage = Usage(uncached=10, cache_read=0, cache_write={}, output=100)
    backend = ScriptedBackend([say("Hi", usage=usage)] * 3, rates=rates)
    budgets = [{"scope": "session", "limit": "0.15"}]
    async with Client(backends={"scripted": backend}, policies={"budgets": budgets}) as client:
        for tenant in ("a", "b", None):
            done = await client.complete("Hi", tenant=tenant, session_id="chat-1", max_output_tokens=100)
            assert done.cost == Decimal("0.1")
            with pytest.raises(BudgetExceededError) as caught:
                await client.complete("Hi", tenant=tenant, session_id="chat-1", max_output_tokens=100)
            assert caught.value.spent == Decimal("0.1")
            assert caught.value.scope == f"session:{tenant}/chat-1 in total" if tenant else "session:chat-1 in total"
