"""Prices behind one interface, exact and dated.

`Rates` is what a backend carries: resolved once per model, then pure arithmetic on decimals. An unknown price is None,
never 0 and never another model's (contract M2).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from cachespec.usage import Cost, Usage


class Rates(Protocol):
    """Prices of one model on one provider, or the price of a local engine's time."""

    source: str
    price_date: str | None

    def cost(
        self,
        usage: Usage,
        *,
        busy_s: float | None = None,
        billing: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> Cost:
        """The exact price of `usage`. `busy_s` is a local engine's seconds; `billing` what the response said of its tier."""

    def worst(self, *, input_tokens: int, output_tokens: int, seconds: float | None = None) -> Decimal | None:
        """An upper bound in USD: every input token at the dearest class that could apply, and all of the output."""
