"""Token usage in disjoint buckets, and cost.

Vendors count differently (Anthropic's and Bedrock's input excludes cache tokens, everyone else's includes them). Each
shape is converted once, in `usage_shapes.py`; everything else in the package sees only `Usage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from decimal import (
    MAX_EMAX,
    MIN_EMIN,
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DivisionByZero,
    InvalidOperation,
    Overflow,
    localcontext,
)
from operator import attrgetter
from typing import Any

from cachespec.errors import InputError
from cachespec.shown import shown
from cachespec.values import quick

MOST_TOKENS = 2**53 - 1
"""A larger count is not believed: beyond this JSON's numbers stop being exact."""

EXACT = Context(
    prec=200, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[InvalidOperation, DivisionByZero, Overflow]
)
"""The context of money, for its methods, which need no `exact` around them; nobody sets anything in it."""

WRITE_TTLS = ("5m", "30m", "1h", "12h", "kv", "unspecified")

WEB_SEARCH = "web_search"
MEDIA = ("audio", "image", "video")
APART = (WEB_SEARCH, *(f"{side}_{medium}" for side in ("input", "output") for medium in MEDIA))
"""What may have a price of its own beside those of text: searches, and the tokens of each side that are no text."""


_COUNTED = ("uncached", "cache_read", "output", "reasoning", "drafted", "accepted")
_COUNTS = attrgetter(*_COUNTED)


def exact() -> AbstractContextManager[Context]:
    """Where money is added and multiplied: in a context of our own, whatever precision and traps the caller has set."""
    return localcontext(EXACT)


def money_text(amount: Decimal | None) -> str | None:
    """USD as a plain decimal string without exponent or trailing zeros; None stays None."""
    if amount is None:
        return None
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def is_count(value: object) -> bool:
    """Whether `value` is a number of tokens: whole, 0 to `MOST_TOKENS`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request. The three input buckets are disjoint: uncached + cache_read + writes = `input_tokens`.

    Attributes:
        uncached: input tokens neither read from nor written to a cache. When the vendor did not say how many were
            cached, all of its input total is here, and `cache_read` is None.
        cache_read: input tokens read from a cache (local engine: reused KV); None when not reported.
        cache_write: input tokens newly cached, by lifetime (`WRITE_TTLS`); None when the vendor does not report writes,
            empty when there were none. A local engine reports what it newly keeps as ``"kv"``.
        output: tokens generated, `reasoning` included.
        reasoning: the part of `output` spent on reasoning; None when not reported.
        drafted, accepted: tokens proposed by a drafter, and how many of them the target agreed with.
        apart: what may have a price of its own, by `APART`: searches at the vendor, and tokens that are no text, which are a
            part of `input_tokens` or of `output`. None where nothing of it was reported.
        requests: the requests that a vendor made for this one, where it says that they were several: each is of a size of its
            own, by which prices change, and maybe of another model. Together they are this usage; not compared.
        unread: whether something that may be billed besides, or is part of `requests`, was reported in a form that makes no
            sense: it is left out, and the cost an estimate; not compared.

    A count that nobody reported is None, never 0.
    """

    uncached: int | None
    cache_read: int | None
    cache_write: Mapping[str, int] | None
    output: int | None
    reasoning: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    apart: Mapping[str, int] | None = None
    requests: tuple[Made, ...] = field(default=(), compare=False, repr=False)
    unread: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for value, name in zip(_COUNTS(self), _COUNTED, strict=True):
            if value is None or (type(value) is int and 0 <= value <= MOST_TOKENS):  # nearly always, and asked very often
                continue
            if not is_count(value):
                raise InputError(f"must be a count of tokens or None, not {shown(value)}", field=name)
        for ttl, count in (self.cache_write or {}).items():
            if ttl not in WRITE_TTLS:
                raise InputError(f"unknown lifetime {ttl!r}; known: {', '.join(WRITE_TTLS)}", field="cache_write")
            if not is_count(count):
                raise InputError(f"must be a count of tokens, not {shown(count)}", field=f"cache_write.{ttl}")
        for name, count in (self.apart or {}).items():
            if name not in APART:
                raise InputError(f"unknown {name!r}; known: {', '.join(APART)}", field="apart")
            if not is_count(count):
                raise InputError(f"must be a count, not {shown(count)}", field=f"apart.{name}")

    @property
    def written(self) -> int | None:
        """All cache writes, whatever their lifetime."""
        return None if self.cache_write is None else sum(self.cache_write.values())

    @property
    def input_tokens(self) -> int | None:
        """Everything the vendor bills as input: uncached + cache_read + writes; None when nothing was reported."""
        if self.uncached is None:
            return None
        return self.uncached + (self.cache_read or 0) + (self.written or 0)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form used by every command; `apart` is in it where there is any."""
        told = {
            "input_tokens": self.input_tokens,
            "uncached": self.uncached,
            "cache_read": self.cache_read,
            "cache_write": None if self.cache_write is None else dict(self.cache_write),
            "output": self.output,
            "reasoning": self.reasoning,
            "drafted": self.drafted,
            "accepted": self.accepted,
        }
        return told if not self.apart else {**told, "apart": dict(self.apart)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A request that a vendor made for one of ours, and the model that it went to (None: the one that answered)."""

    usage: Usage
    model: str | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a request cost, or would cost. `amount` is USD, exact; None when the price is not known.

    `estimated` is True when part of it rests on an assumption (a write of unspecified lifetime, usage that never came).
    `source` and `price_date` say whose price it is and from when (ISO date).
    """

    amount: Decimal | None
    estimated: bool
    source: str | None
    price_date: str | None
