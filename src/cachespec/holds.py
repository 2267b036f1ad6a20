"""What is reserved before anything is sent, and what soft budgets say to it."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from cachespec.decide import Asked
from cachespec.decision import Ask
from cachespec.ledger.base import Hold, Ledger, Limit
from cachespec.policies.budgets import accounts
from cachespec.telemetry import BudgetPassed
from cachespec.usage import exact, money_text


def hold_for(ask: Ask, limits: Iterable[Limit], *, backend: str, model: str, worst: Decimal, lease_s: float) -> Hold:
    """The reservation of a request that may cost `worst` USD there."""
    return Hold(
        amount=worst,
        backend=backend,
        model=model,
        tenant=ask.tenant,
        session_id=ask.session_id,
        tags=ask.tags,
        accounts=accounts(ask),
        limits=tuple(limits),
        lease_s=lease_s,
    )


def passed(asked: Asked, worst: Decimal, ledger: Ledger) -> list[BudgetPassed]:
    """The soft budgets under which `worst` USD do not fit, as far as is known: they let pass, and say so."""
    found: list[BudgetPassed] = []
    for budget in asked.budgets:
        if budget.rule.mode != "soft":
            continue
        limit = budget.limit
        states = () if budget.rule.scope == "request" else ledger.snapshot([limit])
        spent, reserved = (states[0].spent, states[0].reserved) if states else (asked.spent, Decimal(0))
        with exact():
            fits = spent + reserved + worst <= limit.limit
        if not fits:
            told = BudgetPassed(scope=limit.scope, limit=limit.limit, spent=spent, reserved=reserved, requested=worst)
            found.append(told)
    return found


def passed_text(told: BudgetPassed) -> str:
    """The same for a person."""
    return (
        f"soft budget {told.scope} of {money_text(told.limit)} USD may be passed: {money_text(told.spent)} spent, "
        f"{money_text(told.reserved)} reserved, and this request may cost {money_text(told.requested)}"
    )
