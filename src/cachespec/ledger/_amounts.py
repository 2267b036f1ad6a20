"""What every ledger shares: money as whole numbers of 1e-12 USD (so sums are exact everywhere), times, accounts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

from cachespec.errors import InputError, LedgerError
from cachespec.ledger.base import Hold
from cachespec.usage import exact

UNITS = 12
MOST = 2**63 - 1
"""The largest amount of one request, in units (`base.MOST_USD`): what an SQLite integer holds."""
_NO_LIMIT = 10**40  # units; more than any number of requests can spend
_MOST_LEASE_S = 100 * 366 * 86_400.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def reserved_units(amount: Decimal) -> int:
    """A bound in USD to units, rounded up. Raises InputError for what is no amount, or is more than a ledger holds."""
    units = _units(amount, field="amount", rounding=ROUND_CEILING)
    if units > MOST:
        raise InputError(f"{amount} USD is more than a ledger holds for one request", field="amount")
    return units


def spent_units(amount: Decimal | None) -> int | None:
    """What was spent, in USD, to units, to the nearest; None stays None. Raises LedgerError for more than a ledger holds."""
    if amount is None:
        return None
    units = _units(amount, field="amount", rounding=ROUND_HALF_EVEN)
    if units > MOST:
        raise LedgerError(f"{amount} USD is more than a ledger holds for one request")
    return units


def limit_units(limit: Decimal) -> int:
    """A limit to units, rounded down; it may be larger than any amount."""
    return _units(limit, field="limits.limit", rounding=ROUND_FLOOR)


def _units(amount: Decimal, *, field: str, rounding: str) -> int:
    if not isinstance(amount, Decimal) or not amount.is_finite() or amount < 0:
        raise InputError(f"must be a finite decimal >= 0, not {amount!r}", field=field)
    if amount.adjusted() > 27:
        return _NO_LIMIT
    with exact():
        return int(amount.scaleb(UNITS).to_integral_value(rounding))


def from_units(units: int) -> Decimal:
    """Units to USD, exactly, without trailing zeros (5 USD stays ``5``)."""
    with exact():
        short = Decimal(units).scaleb(-UNITS).normalize()
        return short if short.as_tuple().exponent <= 0 else short.quantize(Decimal(1))  # type: ignore[operator]


def lease_micros(seconds: float) -> int:
    """The length of a lease in microseconds. Raises InputError for what is no time, or longer than a hundred years."""
    if not 0 <= seconds <= _MOST_LEASE_S:
        raise InputError(f"must be seconds from 0 to {_MOST_LEASE_S:g}, not {seconds!r}", field="lease_s")
    return round(seconds * 1_000_000)


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
