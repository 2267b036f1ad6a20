"""The backends behind the examples of README and docs: they answer from a script."""

from __future__ import annotations

from cachespec.events import Finished, ToolCallDelta, UsageReported
from cachespec.pricing import hosted_rates
from cachespec.testing import Reply, ScriptedBackend, say
from cachespec.usage import Usage

USAGE = Usage(uncached=20, cache_read=100, cache_write={}, output=12)
PRICES = {"input": "3", "cache_read": "0.3", "cache_write": {"5m": "3.75", "1h": "6"}, "output": "15"}


def talker(*, name: str, model: str) -> ScriptedBackend:
    """Answers with JSON, which is text as well."""
    return ScriptedBackend(
        say('{"names": ["Rhine", ', '"Reuss"]}', usage=USAGE),
        name=name,
        model=model,
        rates=hosted_rates(None, model, prices=PRICES),
    )


def tool_user(*, name: str, model: str) -> ScriptedBackend:
    """Calls a tool first, then answers."""
    call = (ToolCallDelta(0, "call_1", "population", '{"city":'), ToolCallDelta(0, "", "", ' "Zug"}'))
    asks = Reply(batches=(call, (Finished(reason="tool_calls"), UsageReported(USAGE))))
    return ScriptedBackend(
        [asks, say("31,000", usage=USAGE)], name=name, model=model, rates=hosted_rates(None, model, prices=PRICES)
    )
