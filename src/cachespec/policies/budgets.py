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
    return tuple(_applied(rule, member, now) for rule in rules for member in _known(rule, accounts))


def _known(rule: BudgetRule, accounts: Sequence[str]) -> Sequence[str | None]:
    if rule.scope in ("overall", "request"):
        return (None,) if rule.scope == "overall" else ()
    prefix = f"{rule.scope}:"
    spent = [name[len(prefix) :] for name in accounts if name.startswith(prefix)]
    if rule.key is None:
        return spent
    if rule.scope != "session":
        return (rule.key,)
    key = session_name(None, rule.key)
    return (key, *(name for name in spent if name != key and name.rpartition("/")[2] == key))


def session_name(tenant: str | None, session_id: str) -> str:
    """What a session's counter is called: sessions are each tenant's own, ``acme/chat-7``, and without one ``chat-7``.

    A ``/`` in either is written as in a URL, so that no two of them are ever called the same.
    """
    named = (session_id,) if tenant is None else (tenant, session_id)
    return "/".join(name.replace("%", "%25").replace("/", "%2F") for name in named)


def _applied(rule: BudgetRule, member: str | None, now: float) -> Applied:
    since, resets_at = window(rule.per, rule.timezone, now)
    name = rule.scope if member is None else f"{rule.scope}:{member}"
    scope = f"{name} per {rule.per}" if rule.per != "total" else f"{name} in total"
    return Applied(rule, Limit(scope=scope, account=name, limit=rule.limit, since=since, resets_at=resets_at))


def accounts(ask: Ask) -> tuple[str, ...]:
    """Every counter that a request's spend is added to, whether a budget watches it today or not."""
    names = ["overall", f"alias:{ask.alias}"]
    names += [f"tenant:{ask.tenant}"] if ask.tenant is not None else []
    names += [f"session:{session_name(ask.tenant, ask.session_id)}"] if ask.session_id is not None else []
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
    found = tuple(v for v in values if v is not None and rule.key in (None, v))
    return tuple(session_name(ask.tenant, v) for v in found) if rule.scope == "session" else found
