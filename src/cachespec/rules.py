"""What a configuration says about money, about who may answer what, and about patience.

Frozen values that policies and client read. They check themselves, so that values from a file and values made in code
obey the same law; a wrong one is an `InputError` that names the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, TypeAlias
from zoneinfo import ZoneInfo

from cachespec.annotations import BackendName, ModelName
from cachespec.errors import InputError

BudgetScope: TypeAlias = Literal["request", "session", "tenant", "tag", "alias", "overall"]
BudgetPeriod: TypeAlias = Literal["minute", "hour", "day", "week", "month", "total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRule:
    """A spending limit in USD.

    `scope` says what is counted together: each request by itself, each session, tenant, tag or alias, or everything
    (``overall``). `key` narrows it to one tenant, tag, session or alias; None means that every one of them has this limit
    of its own. A window of `per` begins at the calendar's boundary in `timezone` (weeks on Monday); ``total`` never ends.
    ``hard`` refuses a request whose worst case does not fit, ``soft`` warns, and ``downgrade`` leaves what does not fit to
    cheaper backends: the cheapest one answers however full it is.
    """

    scope: BudgetScope
    limit: Decimal
    per: BudgetPeriod = "total"
    mode: Literal["hard", "soft", "downgrade"] = "hard"
    key: str | None = None
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if not self.limit.is_finite() or self.limit < 0:
            raise InputError("must be an amount of USD, 0 or more", field="limit")
        if self.scope == "request" and self.per != "total":
            raise InputError("a budget for each request has no window: leave `per` out, or choose another scope", field="per")
        if self.key is not None and self.scope in ("request", "overall"):
            raise InputError(f"a budget of scope {self.scope!r} has no key", field="key")
        try:
            ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError):  # not found; absolute or odd paths; a directory of zones
            raise InputError(f"no time zone is called {self.timezone!r}", field="timezone") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCondition:
    """When a rule applies: every given field must match. All of `tags` must be there; of the others one is enough.

    `model` holds aliases or backends as a request names them; `tools` is whether the request offers any.
    """

    tags: frozenset[str] = frozenset()
    tenant: frozenset[str] = frozenset()
    model: frozenset[ModelName] = frozenset()
    tools: bool | None = None

    def matches(self, *, tags: frozenset[str], tenant: str | None, model: str | None, tools: bool) -> bool:
        return (
            self.tags <= tags
            and (not self.tenant or tenant in self.tenant)
            and (not self.model or model in self.model)
            and (self.tools is None or self.tools == tools)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which backends may answer when `when` holds (always, if it is empty): none but `only`, and none of `exclude`."""

    when: RuleCondition = RuleCondition()
    only: frozenset[BackendName] | None = None
    exclude: frozenset[BackendName] = frozenset()

    def __post_init__(self) -> None:
        if self.only is None and not self.exclude:
            raise InputError("a rule needs `only` or `exclude`, a list of backends")
        if self.only is not None and not self.only - self.exclude:
            raise InputError("this rule leaves no backend", field="only")

    def allows(self, backend: str) -> bool:
        return (self.only is None or backend in self.only) and backend not in self.exclude


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """How often and how patiently an answer is tried for, over all backends together and before any content.

    `attempts` counts the first one. The wait before attempt n on the same backend is `first_delay_s` x 2^(n-2) seconds and
    up to half of `first_delay_s` more, by chance, at most `max_delay_s`; a server's ``Retry-After`` goes before it.
    """

    attempts: int = 4
    first_delay_s: float = 0.5
    max_delay_s: float = 8.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InputError("must be 1 or more; 1 means no retry", field="attempts")
        for name in ("first_delay_s", "max_delay_s"):
            if not getattr(self, name) >= 0:
                raise InputError("must be 0 or more seconds", field=name)
