"""Vendors' prompt caches as data: one row for each group of models, every row with its source and date.

Sources are the vendors' guides as read in 2026-11. Prices are multiples of the input price; those in a row hold only where no
price list knows the model, else they are computed from its prices (`with_prices`). What is uncertain is said in `source`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from cachespec.caching import CacheTerms, Lifetime
from cachespec.usage import Usage

if TYPE_CHECKING:
    from decimal import Decimal

    from cachespec.pricing import Rates

Control: TypeAlias = Literal["blocks", "breakpoints", "routing"]
_DATE = "2026-11-29"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCache:
    """How a model caches prompts, and how a request steers that.

    Attributes:
        control: what a chosen lifetime becomes in a body. ``blocks``: Anthropic's `cache_control` on blocks;
            ``breakpoints``: OpenAI's `prompt_cache_breakpoint` with `prompt_cache_options`; ``routing``: nothing can be
            marked, prefixes are cached by themselves, a request has a key and a retention.
        api: the protocol, which says what may carry a mark.
        keys: what a `prompt_cache_key` does: ``partition`` (a cache of its own for each key) or ``route`` (which machine).
        late: what enters a cache's key from the messages on, so that tools and system are read whatever it is: ``tool_choice``,
            ``parallel_tool_calls``, ``images`` (whether there are any).
        never: what enters it nowhere.
        isolation: what keeps two tenants' entries apart when no key does, for a person; empty where keys do it.
        priced: which models cache is told by the price list only: those that have a price for reading.
    """

    terms: CacheTerms
    control: Control
    api: Literal["messages", "responses", "chat"]
    keys: Literal["partition", "route"] | None = None
    late: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    isolation: str = ""
    priced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    models: str
    terms: CacheTerms
    control: Control
    keys: Literal["partition", "route"] | None = None
    late: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    isolation: str = ""
    priced: bool = False


_ANTHROPIC = CacheTerms(
    # A lifetime counts from the start of the request that wrote or read; a read renews it.
    lifetimes=(Lifetime(name="5m", seconds=300, write=1.25), Lifetime(name="1h", seconds=3_600, write=2.0)),
    read=0.1,
    slots=4,
    lookback=20,
    source="Anthropic, prompt caching guide",
    date=_DATE,
)
_LATE = frozenset({"tool_choice", "parallel_tool_calls", "images"})  # the guide's table of what invalidates what
_WORKSPACE = "Anthropic keeps caches apart by workspace only: tenants of one workspace share entries"


def _anthropic(models: str, minimum: int, *, read: float = 0.1, source: str = "Anthropic, list of minimum lengths") -> _Row:
    terms = replace(_ANTHROPIC, minimum=minimum, read=read, source=f"{_ANTHROPIC.source}; {source}")
    return _Row(models=models, terms=terms, control="blocks", late=_LATE, isolation=_WORKSPACE)


_NOT_LISTED = "minimum not listed for this model, taken from its siblings"

ANTHROPIC: tuple[_Row, ...] = (
    _anthropic(r"claude-(fable|mythos)-5-2", 512, read=0.025, source=_NOT_LISTED),
    _anthropic(r"claude-(fable|mythos)-5-1", 512, read=0.025),
    _anthropic(r"claude-(fable|mythos)-5", 512),
    _anthropic(r"claude-(opus|sonnet)-5-5", 512, read=0.05),
    _anthropic(r"claude-(opus-5|haiku-5-5)", 512),
    _anthropic(r"claude-(opus-4-7|mythos-preview|haiku-3-5|3-5-haiku)", 2_048),
    _anthropic(r"claude-(haiku-4-5|opus-4-[56])", 4_096),
    _anthropic(r"claude-(opus-4-8|sonnet-5|sonnet-4|opus-4)", 1_024),
    _anthropic(r"", 1_024, source=_NOT_LISTED),
)

_MARKED = CacheTerms(
    # At least 30 minutes after the last write or reuse. 12h is offered only where its price is given: nobody publishes one.
    lifetimes=(Lifetime(name="30m", seconds=1_800, write=1.25),),
    read=0.1,
    slots=4,
    minimum=1_024,
    lookback=1,  # in explicit mode a lookup finds what ends exactly at one of the request's own breakpoints
    implicit="30m",
    opt_out=True,
    source="OpenAI, prompt caching guide (gpt-5.6 and later; confirmed by others for gpt-6-luna only)",
    date=_DATE,
)
TWELVE_HOURS = ("12h", 43_200.0)
_AUTOMATIC = CacheTerms(
    lifetimes=(Lifetime(name="in_memory", seconds=300, write=1.0), Lifetime(name="24h", seconds=86_400, write=1.0)),
    read=0.1,
    slots=1,
    minimum=1_024,
    implicit="in_memory",
    source="OpenAI, prompt caching guide (before gpt-5.6; 5 to 10 minutes idle, or up to a day; whole steps of 128 tokens)",
    date=_DATE,
)
_ONLY_A_DAY = replace(
    _AUTOMATIC,
    lifetimes=(Lifetime(name="24h", seconds=1_800, write=1.0),),
    minimum=2_048,
    implicit="24h",
    source="OpenAI, prompt caching guide (gpt-5.5: some 30 minutes, up to a day; boundaries every 2,048 tokens)",
)
_ONLY_MEMORY = replace(_AUTOMATIC, lifetimes=_AUTOMATIC.lifetimes[:1])
_NEVER = frozenset({"tool_choice"})  # the guide's list of what a prefix must have in common has only `parallel_tool_calls`
_ORGANISATION = "this model's cache is one for the whole organisation: a key only says which machine"


def _marked(models: str, read: float = 0.1) -> _Row:
    return _Row(models=models, terms=replace(_MARKED, read=read), control="breakpoints", keys="partition", never=_NEVER)


def _automatic(models: str, terms: CacheTerms, read: float = 0.1) -> _Row:
    row = replace(terms, read=read)
    return _Row(models=models, terms=row, control="routing", keys="route", never=_NEVER, isolation=_ORGANISATION)


OPENAI: tuple[_Row, ...] = (
    _marked(r"(ft:)?gpt-6\.1-(sol|terra)", 0.05),
    _marked(r"(ft:)?gpt-(5\.([6-9]|\d\d)|[6-9]|\d\d)"),
    _automatic(r"(ft:)?gpt-5\.5", _ONLY_A_DAY),
    _automatic(r"(ft:)?gpt-5", _AUTOMATIC),
    _automatic(r"(ft:)?gpt-4\.1", _AUTOMATIC, 0.25),
    _automatic(r"(ft:)?(o3-mini|gpt-4o|o1)", _ONLY_MEMORY, 0.5),
    _automatic(r"(ft:)?o[34]", _ONLY_MEMORY, 0.25),
)
"""A name that no row knows (a deployment's, a proxy's) is not second-guessed: it has no row."""


def _by_itself(source: str, seconds: float = 300.0) -> tuple[_Row, ...]:
    terms = CacheTerms(
        lifetimes=(Lifetime(name="in_memory", seconds=seconds, write=1.0),),
        read=1.0,  # no price list, no discount
        slots=1,
        minimum=1_024,  # from here on all of them do, as far as is known; some begin lower
        implicit="in_memory",
        source=source,
        date=_DATE,
    )
    whole = "this vendor's cache is one for the whole account"
    return (_Row(models="", terms=terms, control="routing", isolation=whole, priced=True),)


_NO_LIFETIME = "caches by itself; neither lifetime nor minimum is published, five minutes and 1,024 tokens are assumed"
ROWS: Mapping[str, tuple[_Row, ...]] = {
    "anthropic": ANTHROPIC,
    "openai": OPENAI,
    "deepseek": _by_itself("DeepSeek, context caching guide (hours to days, best effort)", 7_200.0),
    "groq": _by_itself("Groq, prompt caching guide (two hours without use)", 7_200.0),
    **{vendor: _by_itself(_NO_LIFETIME) for vendor in ("fireworks", "mistral", "together", "x-ai")},
}


def prompt_cache(vendor: str, api: Literal["messages", "responses", "chat"], model: str) -> PromptCache | None:
    """The rules for a model at a vendor (of the price list), at the row's own prices; None: not known."""
    name = claude_name(model) if vendor == "anthropic" else model
    for row in ROWS.get(vendor, ()):
        if re.match(row.models, name):
            return PromptCache(
                terms=row.terms,
                control=row.control,
                api=api,
                keys=row.keys,
                late=row.late,
                never=row.never,
                isolation=row.isolation,
                priced=row.priced,
            )
    return None


def claude_name(model: str) -> str:
    """A Claude model's name without a date, as Anthropic writes it: clouds and proxies have a path or a region before it and a
    version behind it (``us.anthropic.claude-haiku-4-5-20251001-v1:0``, ``anthropic/claude-haiku-4.5``)."""
    name = model.lower()
    start = name.find("claude-")
    return model if start < 0 else re.sub(r"([-@]\d{8})?(-v\d+(:\d+)?)?$", "", name[start:]).replace(".", "-")


def at_prices(cache: PromptCache, rates: Rates | None) -> PromptCache | None:
    """`with_prices`; None where only a price for reading would tell that the model caches, and there is none below input's."""
    made = with_prices(cache, rates)
    return None if cache.priced and made.terms.read >= 1.0 else made


def with_prices(cache: PromptCache, rates: Rates | None) -> PromptCache:
    """The same rules with the multiples that `rates` have; a class without a price of its own keeps the row's."""
    if rates is None:
        return cache
    terms = cache.terms
    known = tuple(
        replace(lifetime, write=_multiple(rates, lifetime.name) or lifetime.write) if cache.control != "routing" else lifetime
        for lifetime in terms.lifetimes
    )
    name, seconds = TWELVE_HOURS
    if cache.control == "breakpoints" and (write := _multiple(rates, name)) is not None:
        known = (*known, Lifetime(name=name, seconds=seconds, write=write))
    read = _multiple(rates, None)
    return replace(cache, terms=replace(terms, lifetimes=known, read=terms.read if read is None else read))


def _multiple(rates: Rates, ttl: str | None) -> float | None:
    """What a write with lifetime `ttl` costs (None: a read) in multiples of plain input; None where that has no price."""
    count = 1_000
    plain = _amount(rates, Usage(uncached=count, cache_read=0, cache_write={}, output=0))
    if ttl is None:
        priced = _amount(rates, Usage(uncached=0, cache_read=count, cache_write={}, output=0))
    else:
        priced = _amount(rates, Usage(uncached=0, cache_read=0, cache_write={ttl: count}, output=0))
    nothing = _amount(rates, Usage(uncached=0, cache_read=0, cache_write={}, output=0))
    if plain is None or priced is None or nothing is None or plain <= nothing:
        return None
    return round(float((priced - nothing) / (plain - nothing)), 6)


def _amount(rates: Rates, usage: Usage) -> Decimal | None:
    cost = rates.cost(usage)
    return None if cost.estimated else cost.amount
