"""Budgets: which limits a request falls under, and in which window of time. Pure; the ledger holds the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cachespec.decision import Ask
from cachespec.ledger.base import Limit
from cachespec.rules import BudgetPeriod, BudgetRule


@dataclass(frozen=True, slots=True)
class Applied:
    """A budget that this request falls under."""

    rule: BudgetRule
    limit: Limit


def window(per: BudgetPeriod, timezone: str, now: float) -> tuple[datetime | None, datetime | None]:
    """Start and end of the current window, as UTC; (None, None) for ``total``. `now` is Unix time, seconds."""
    if per == "total":
        return None, None
    local = datetime.fromtimestamp(now, ZoneInfo(timezone))
    if per in ("minute", "hour"):
        # Counted in UTC, so that a repeated or skipped hour of local time changes no window.
        seconds = 60 if per == "minute" else 3600
        start = datetime.fromtimestamp(now - now % seconds, UTC)
        return start, start + timedelta(seconds=seconds)
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if per == "day":
        first, after = midnight, midnight + timedelta(days=1)
    elif per == "week":
        first = midnight - timedelta(days=midnight.weekday())
        after = first + timedelta(days=7)
    else:
        first = midnight.replace(day=1)
        after = (first + timedelta(days=32)).replace(day=1)
    return first.astimezone(UTC), after.astimezone(UTC)


def applied(rules: Sequence[BudgetRule], ask: Ask) -> tuple[Applied, ...]:
    """The budgets this request falls under, with the counters (`Limit.account`) it adds to."""
    return tuple(_applied(rule, member, ask.now) for rule in rules for member in _members(rule, ask))


def known(rules: Sequence[BudgetRule], accounts: Sequence[str], now: float) -> tuple[Applied, ...]:
    """Every budget as of `now` (Unix seconds), one for each member that the ledger's `accounts` name. None of requests."""
    found: list[Applied] = []
    for rule in rules:
        if rule.scope == "overall":
            found.append(_applied(rule, None, now))
        elif rule.key is not None:
            found.append(_applied(rule, rule.key, now))
        elif rule.scope != "request":
            prefix = f"{rule.scope}:"
            found += [_applied(rule, name[len(prefix) :], now) for name in accounts if name.startswith(prefix)]
    return tuple(found)


def _applied(rule: BudgetRule, member: str | None, now: float) -> Applied:
    since, resets_at = window(rule.per, rule.timezone, now)
    name = rule.scope if member is None else f"{rule.scope}:{member}"
    scope = f"{name} per {rule.per}" if rule.per != "total" else f"{name} in total"
    return Applied(rule, Limit(scope=scope, account=name, limit=rule.limit, since=since, resets_at=resets_at))


def accounts(ask: Ask) -> tuple[str, ...]:
    """Every counter that a request's spend is added to, whether a budget watches it today or not."""
    names = ["overall", f"alias:{ask.alias}"]
    names += [f"tenant:{ask.tenant}"] if ask.tenant is not None else []
    names += [f"session:{ask.session_id}"] if ask.session_id is not None else []
    names += [f"tag:{tag}" for tag in dict.fromkeys(ask.tags)]
    return tuple(names)


def _members(rule: BudgetRule, ask: Ask) -> tuple[str | None, ...]:
    if rule.scope in ("overall", "request"):
        return (None,)
    values: tuple[str | None, ...] = {
        "session": (ask.session_id,),
        "tenant": (ask.tenant,),
        "alias": (ask.alias,),
        "tag": tuple(dict.fromkeys(ask.tags)),
    }[rule.scope]
    return tuple(v for v in values if v is not None and rule.key in (None, v))
