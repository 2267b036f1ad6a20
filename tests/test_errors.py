"""What errors say where a person has to decide by it."""

from __future__ import annotations

from decimal import Decimal

import pytest

from cachespec.errors import BudgetExceededError


@pytest.mark.parametrize(
    ("reserved", "said"), [("0", "reserved 0, this"), ("0.5", "reserved 0.5 until the requests that run now end, this")]
)
def test_a_refusal_says_that_what_is_reserved_frees_itself(reserved: str, said: str) -> None:
    error = BudgetExceededError(
        scope="overall per day",
        limit=Decimal(1),
        spent=Decimal("0.25"),
        reserved=Decimal(reserved),
        requested=Decimal("0.8"),
        resets_at=None,
    )
    assert said in str(error)
    assert (error.limit, error.spent, error.reserved) == (Decimal(1), Decimal("0.25"), Decimal(reserved))
