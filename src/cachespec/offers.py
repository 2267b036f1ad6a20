"""Offers on their way through a decision: what takes one out or back, and the reason that is written on it.

Pure functions of offers, budgets and what the ledger last said of them; the policy that orders them is somebody else's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import islice

from cachespec.backends.base import Backend
from cachespec.decision import Ask, Belief, BudgetState, Decision, Latency, Offer, Quote, Reason, TokenEstimate
from cachespec.errors import BudgetExceededError, CachespecError, ConfigError, PriceUnknownError
from cachespec.ledger.base import Limit
from cachespec.policies.base import RoutingPolicy
from cachespec.policies.budgets import Applied
from cachespec.usage import EXACT, money_text

_NOTHING = TokenEstimate(input=None, cache_read=None, cache_write=None, uncached=None, output_expected=None, output_max=None)


def not_offered(backend: Backend, reasons: Sequence[Reason]) -> Offer:
    """A candidate that was not even priced."""
    return Offer(
        backend=backend.name,
        model=backend.model,
        eligible=False,
        reasons=tuple(reasons),
        quote=None,
        tokens=_NOTHING,
        latency=Latency(ttft_ms=None, total_ms=None),
        belief=Belief(state="unknown"),
    )


def left_out(offer: Offer) -> Offer:
    return without(offer, Reason("rule", "left out by the routing policy"))


def out(offer: Offer, error: CachespecError) -> Offer:
    return without(offer, refusal(error))


def refusal(error: CachespecError) -> Reason:
    code = {BudgetExceededError: "budget", PriceUnknownError: "price_unknown"}.get(type(error), "unhealthy")
    return Reason(code, str(error).removeprefix(f"{code} "))


def without(offer: Offer, reason: Reason) -> Offer:
    return replace(offer, eligible=False, reasons=(*offer.reasons, reason))


def moved(offers: list[Offer], ask: Ask) -> list[Offer]:
    """What leaving the session's backend costs is in each quote; here it is said."""
    if ask.previous_backend is None:
        return offers
    here = next((o for o in offers if o.backend == ask.previous_backend), None)
    warm = 0 if here is None else here.tokens.cache_read or 0
    if not warm:
        return offers
    told = []
    for offer in offers:
        lost = warm - (offer.tokens.cache_read or 0)
        if offer.backend != ask.previous_backend and offer.eligible and lost > 0:
            text = f"about {lost} tokens that are warm at {ask.previous_backend} are cold here"
            offer = replace(offer, reasons=(*offer.reasons, Reason("switch_cost", text)))
        told.append(offer)
    return told


def ranked_by(policy: RoutingPolicy, ask: Ask, eligible: Sequence[Offer]) -> list[Offer]:
    """The policy's order and its reasons. It is somebody else's code: what it does wrong is an error that names it, and all
    else that it makes of an offer (a price, a bound) is not taken."""
    where, name = "policies.routing", f"{type(policy).__qualname__}.rank"
    own = {o.backend: o for o in eligible}
    try:
        ranked = list(islice(policy.rank(ask, list(eligible)), len(own) + 1))
        told = [(o.backend, tuple(o.reasons)) if isinstance(o, Offer) else ("", ()) for o in ranked]
        names = {backend for backend, _ in told}
    except Exception as error:
        raise ConfigError(f"{name} failed: {type(error).__name__}: {error}", key=where) from error
    if not names <= own.keys() or len(names) < len(told):
        raise ConfigError(f"{name} must return offers it was given, each at most once", key=where)
    if not all(
        isinstance(reason, Reason) for backend, reasons in told if reasons is not own[backend].reasons for reason in reasons
    ):
        raise ConfigError(f"{name} must give reasons as Reason", key=where)
    if ask.tool_loop and ask.previous_backend in own and ask.previous_backend not in names:
        told.append((ask.previous_backend, ()))  # a tool loop's own place is not the policy's to take away
    return [_with_reasons(own[backend], reasons) for backend, reasons in told]


def _with_reasons(offer: Offer, reasons: Sequence[Reason]) -> Offer:
    """The offer with those of the `reasons` that it does not have."""
    if reasons is offer.reasons:
        return offer
    more = tuple(reason for reason in reasons if reason not in offer.reasons)
    return replace(offer, reasons=(*offer.reasons, *more)) if more else offer


def limits_of(budgets: Sequence[Applied]) -> list[Limit]:
    """What the ledger counts: all but those of a single request."""
    return [b.limit for b in budgets if b.rule.scope != "request"]


def over_budget(
    backend: Backend, budgets: Sequence[Applied], priced: Quote | None, unbounded: Sequence[str], spent: Decimal
) -> tuple[Reason, CachespecError] | None:
    """Why a hard budget keeps this candidate out whatever others spend: there is no bound on its price, or with what the
    request `spent` before it is over that of a single one."""
    hard = [b for b in budgets if b.rule.mode == "hard"]
    if not hard:
        return None
    worst = None if priced is None else priced.worst
    if worst is None:
        scope = hard[0].limit.scope
        if priced is None or priced.expected is None:
            detail = (
                f"the hard budget {scope} needs a price, and that of {backend.model} is not known:"
                " say it with `prices` (a model in this process: `cost`)"
            )
        else:
            why = "; ".join(unbounded) or "nobody knows how long it is, or what the tier it asks for costs"
            detail = f"the hard budget {scope} needs a bound on what this may cost, and there is none ({why})"
        return Reason("price_unknown", detail), PriceUnknownError(f"{backend.name}: {detail}")
    for budget in hard:
        if budget.rule.scope == "request" and EXACT.add(spent, worst) > budget.limit.limit:
            error = _exceeded(budget.limit, spent, Decimal(0), worst)
            return refusal(error), error
    return None


def _exceeded(limit: Limit, spent: Decimal, reserved: Decimal, requested: Decimal) -> BudgetExceededError:
    return BudgetExceededError(
        scope=limit.scope,
        limit=limit.limit,
        spent=spent,
        reserved=reserved,
        requested=requested,
        resets_at=limit.resets_at,
    )


def downgraded(
    offers: list[Offer], budgets: Sequence[Applied], states: Sequence[BudgetState], spent: Decimal, ask: Ask
) -> list[Offer]:
    """Where the worst case does not fit a budget that downgrades, only the cheapest offer, and those that fit, are left; and
    the one that is in the middle of a tool loop, which moves for no budget (contract D2)."""
    loop = ask.previous_backend if ask.tool_loop else None
    rules = [b for b in budgets if b.rule.mode == "downgrade"]
    known = dict(zip(limits_of(budgets), states, strict=False))  # not by scope: a hard limit may watch the same one
    for budget in rules:
        state = known.get(budget.limit)
        left = budget.limit.limit - spent if state is None else state.limit - state.spent - state.reserved
        priced = [(o.quote.expected, o.backend) for o in offers if o.eligible and o.quote and o.quote.expected is not None]
        cheapest = min(priced, key=lambda pair: pair[0])[1] if priced else None
        for i, offer in enumerate(offers):
            worst = None if offer.quote is None else offer.quote.worst
            stays = offer.backend in (cheapest, loop)
            if offer.eligible and not stays and cheapest is not None and (worst is None or worst > left):
                most = "any sum" if worst is None else f"{money_text(worst)} USD"
                text = f"may cost {most}, and {budget.limit.scope} has {money_text(max(left, Decimal(0)))} USD left"
                offers[i] = without(offer, Reason("budget", f"{text}: left to cheaper ones"))
    return offers


def refused_by(budgets: Sequence[Applied], decision: Decision) -> dict[str, CachespecError]:
    """Whose worst case does not fit a hard budget as it stands in the decision, and what the ledger would say."""
    hard = {b.limit for b in budgets if b.rule.mode == "hard"}
    refused: dict[str, CachespecError] = {}
    for limit, state in zip(limits_of(budgets), decision.budgets, strict=False):
        for offer in decision.candidates:
            worst = None if offer.quote is None else offer.quote.worst
            if limit in hard and offer.eligible and worst is not None and state.spent + state.reserved + worst > limit.limit:
                error = _exceeded(limit, state.spent, state.reserved, worst)
                refused.setdefault(offer.backend, error)
    return refused
