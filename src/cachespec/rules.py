"""What a configuration says about money and about who may answer what: frozen values that policies and client read."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, TypeAlias

BudgetScope: TypeAlias = Literal["request", "session", "tenant", "tag", "alias", "overall"]
BudgetPeriod: TypeAlias = Literal["minute", "hour", "day", "week", "month", "total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRule:
    """A spending limit in USD.

    `scope` says what is counted together: each request by itself, each session, tenant, tag or alias, or everything
    (``overall``). `key` narrows it to one tenant, tag, session or alias; None means that every one of them has this limit
    of its own. A window of `per` begins at the calendar's boundary in `timezone` (weeks on Monday); ``total`` never ends.
    ``hard`` refuses a request whose worst case does not fit, ``soft`` warns.
    """

    scope: BudgetScope
    limit: Decimal
    per: BudgetPeriod = "total"
    mode: Literal["hard", "soft"] = "hard"
    key: str | None = None
    timezone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCondition:
    """When a rule applies: every given field must match. Within a field one match is enough, but all `tags` must be there.

    `models` are aliases or backends as the request names them; `tools` is whether the request offers any.
    """

    tags: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    tools: bool | None = None

    def matches(self, *, tags: frozenset[str], tenant: str | None, model: str | None, tools: bool) -> bool:
        return (
            self.tags <= tags
            and (not self.tenants or tenant in self.tenants)
            and (not self.models or model in self.models)
            and (self.tools is None or self.tools == tools)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which backends may answer when `when` holds: none but `only`, and none of `exclude`."""

    when: RuleCondition
    only: frozenset[str] | None = None
    exclude: frozenset[str] = frozenset()

    def allows(self, backend: str) -> bool:
        return (self.only is None or backend in self.only) and backend not in self.exclude


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """How often and how patiently an answer is tried for, over all backends together and before any content.

    `attempts` counts the first one. The wait before attempt n is random up to `first_delay_s` x 2^(n-2), at most
    `max_delay_s`; a server's ``Retry-After`` is honoured where it is longer and fits the deadline.
    """

    attempts: int = 4
    first_delay_s: float = 0.5
    max_delay_s: float = 8.0
