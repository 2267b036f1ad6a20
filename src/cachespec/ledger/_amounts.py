"""What every ledger shares: money as whole numbers of 1e-12 USD (so sums are exact everywhere), times, accounts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal

from cachespec.errors import InputError
from cachespec.ledger.base import Hold

UNITS = 12
MOST = 2**63 - 1
"""The largest amount of one request, in units (about 9.2 million USD): what an SQLite integer holds."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_units(amount: Decimal, *, field: str, up: bool = False) -> int:
    """USD to units. `up` rounds a bound upwards; else half to even. Raises InputError for what is no amount."""
    if not isinstance(amount, Decimal) or not amount.is_finite() or amount < 0:
        raise InputError(f"must be a finite decimal >= 0, not {amount!r}", field=field)
    units = int(amount.scaleb(UNITS).to_integral_value(ROUND_CEILING if up else ROUND_HALF_EVEN))
    if units > MOST:
        raise InputError(f"{amount} USD is more than a ledger holds for one request", field=field)
    return units


def limit_units(limit: Decimal) -> int:
    """A limit to units, rounded down; it may be larger than any amount."""
    if not isinstance(limit, Decimal) or not limit.is_finite() or limit < 0:
        raise InputError(f"must be a finite decimal >= 0, not {limit!r}", field="limits.limit")
    return int(limit.scaleb(UNITS))


def from_units(units: int) -> Decimal:
    """Units to USD, exactly, without trailing zeros (5 USD stays ``5``)."""
    amount = Decimal(units).scaleb(-UNITS)
    short = amount.normalize()
    return short if short.as_tuple().exponent <= 0 else short.quantize(Decimal(1))  # type: ignore[operator]


def to_micros(moment: datetime | None) -> int:
    """Microseconds since 1970; None (since ever) is 0. Naive times are UTC."""
    if moment is None:
        return 0
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return (aware - _EPOCH) // timedelta(microseconds=1)


def from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def accounts_of(hold: Hold) -> tuple[str, ...]:
    """Every counter that a hold adds to, once each: its own, and those of its limits."""
    return tuple(dict.fromkeys((*hold.accounts, *(limit.account for limit in hold.limits))))
