"""genai-prices, read once per model into our own values. It is imported (and pydantic with it) at the first look-up.

Its matching names many models by a prefix or a part, and so would price ``gemini-3.7-flash-lite`` as
``gemini-3.7-flash``; such a match is refused here: an unknown model has no price, never another one's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cachespec._rates import INPUT, OUTPUT, READ, REASONING, REQUEST, WRITE, PriceList, Tiers, TokenRates
from cachespec.usage import MEDIA, WEB_SEARCH, exact

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice


def table_rates(provider: str | None, model: str, base_url: str | None) -> tuple[str, TokenRates] | None:
    """(vendor, prices) of a model, or None when the table does not know them."""
    from genai_prices import __version__
    from genai_prices.data_snapshot import get_snapshot

    found = _find(model, provider, base_url)
    if found is None:
        return None
    vendor, info, own = found
    dated = [(p.prices, p.constraint) for p in info.prices] if isinstance(info.prices, list) else [(info.prices, None)]
    lists = tuple(_price_list(prices, constraint) for prices, constraint in reversed(dated))
    if not any(INPUT in p.prices for p in lists):
        return None  # not sold by text tokens, or an empty entry
    rates = TokenRates(
        source=f"genai-prices {__version__}",
        price_date=_table_date(get_snapshot().providers),
        lists=lists,
        variants=tuple(_price_list(v.prices, v.constraint, v.when) for v in (info.price_variants or ()) if own),
    )
    return vendor, rates


def nearest_priced(model: str, base_url: str) -> str | None:
    """The model with a price whose name looks most like `model`, of the vendor whose own address `base_url` is; else None."""
    from genai_prices.data_snapshot import get_snapshot

    try:
        vendor = get_snapshot().find_provider(None, None, base_url)
    except LookupError:
        return None
    if not _is_at(base_url, vendor.api_pattern):
        return None
    found = get_close_matches(model.lower(), [m.id for m in vendor.models], n=len(vendor.models), cutoff=0.8)
    return next((name for name in found if table_rates(vendor.id, name, None) is not None), None)


_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "input_mtok": INPUT,
        "cache_read_mtok": READ,
        "cache_write_mtok": WRITE,
        "cache_write_5m_mtok": "5m",
        "cache_write_1h_mtok": "1h",
        "output_mtok": OUTPUT,
        "output_reasoning_mtok": REASONING,
        "requests_kcount": REQUEST,
        "web_searches_kcount": WEB_SEARCH,
        **{f"{side}_{medium}_mtok": f"{side}_{medium}" for side in (INPUT, OUTPUT) for medium in MEDIA},
    }
)


def _price_list(prices: ModelPrice, constraint: Any, when: Mapping[str, str] | None = None) -> PriceList:
    """Our own value of one of genai-prices' price lists."""
    table: dict[str, Tiers] = {}
    for key, name in _CLASSES.items():
        value = prices.__dict__.get(key)
        if value is None:
            continue
        scale = 1000 if name in (REQUEST, WEB_SEARCH) else 1  # priced per thousand, counted in millions here
        tiers = [(0, value)] if isinstance(value, Decimal) else [(0, value.base), *((t.start, t.price) for t in value.tiers)]
        with exact():
            table[name] = tuple((start, price * scale) for start, price in tiers)
    begin, end = getattr(constraint, "start_time", None), getattr(constraint, "end_time", None)
    return PriceList(
        prices=MappingProxyType(table),
        start=getattr(constraint, "start_date", None),
        hours=None if begin is None or end is None else (_utc_time(begin), _utc_time(end)),
        when=tuple((when or {}).items()),
    )


def _utc_time(value: time) -> time:
    if value.tzinfo is None:
        return value
    return datetime.combine(date(1970, 1, 1), value).astimezone(UTC).time()


def _table_date(providers: Iterable[Any]) -> str | None:
    """The newest dated change that the table knows of and that is in force: the table is at least as new as that."""
    today = datetime.now(UTC).date()
    starts = (
        getattr(p.constraint, "start_date", None)
        for provider in providers
        for model in provider.models
        for p in (*(model.prices if isinstance(model.prices, list) else ()), *(model.price_variants or ()))
    )
    return max((s.isoformat() for s in starts if s is not None and s <= today), default=None)


def _find(model: str, provider: str | None, base_url: str | None) -> tuple[str, ModelInfo, bool] | None:
    """(provider id, model, whether the model is the provider's own), or None when genai-prices does not know it."""
    from genai_prices.data_snapshot import get_snapshot

    if not provider and not base_url:
        return None
    snapshot = get_snapshot()
    for provider_id, url in ((provider or None, None), (None, base_url)):
        if provider_id is None and url is None:
            continue
        try:
            vendor, info = snapshot.find_provider_model(model, None, provider_id, url)
        except LookupError:
            continue
        if url is not None and not _is_at(url, vendor.api_pattern):
            return None
        own = any(info is m for m in vendor.models)  # a model borrowed from another vendor has no variants there
        ref = model.lower()
        named = ref == info.id.lower() or _names(info.match, ref) or _names(info.match, _COMPACT_DATE.sub(r"-\1-\2-\3", ref))
        return (vendor.id, info, own) if named else None
    return None


def _is_at(url: str, pattern: str) -> bool:
    """Whether a vendor's pattern, which need not end where the host does, names all of the host of `url`.

    Where it stops before the country (``api.moonshot.``) the rest is one label.
    """
    scheme, _, rest = url.partition("://")
    host = re.split(r"[/?#:]", rest, maxsplit=1)[0]
    end = len(scheme) + 3 + len(host)
    # What looks like a host in a path is none.
    found = re.match(pattern, url[:end] + url[end:].replace(".", "_"))
    left = "" if found is None else url[found.end() : end]
    return found is not None and (not left or (url[found.end() - 1] == "." and "." not in left))


# The table matches many models by a prefix or a part of the name, and so would price `gemini-3.7-flash-lite` as
# `gemini-3.7-flash`. What a clause does not spell out may only be a release: a date, `latest`, a revision, a region.
_COMPACT_DATE = re.compile(r"-(20\d\d)(\d\d)(\d\d)(?=-|:|$)")
_DATE = r"(?:20\d\d-?[01]\d-?[0-3]\d|\d\d-\d\d(?:-20\d\d)?|\d\d-20\d\d|\d{3,4})"
_RELEASE = re.compile(rf"(?:[-@]{_DATE}|[-@](?:latest|preview|exp|default)|-v[0-2](?::\d+)?|:0)*")
_CUT_DATE = re.compile(r"[-@](?:20\d\d-?)?$")


def _names(clause: Any, ref: str) -> bool:
    """Whether a match clause of genai-prices spells out this model, up to the release."""
    if not clause.is_match(ref):
        return False
    kind = type(clause).__name__
    if kind == "ClauseOr":
        return any(_names(c, ref) for c in clause.or_)
    if kind == "ClauseAnd":
        return any(_names(c, ref) for c in clause.and_)
    if kind == "ClauseEquals":
        return True
    if kind == "ClauseRegex":
        found = re.search(clause.regex, ref)
        if found is None or not found.group():
            return False
        start, end = found.span()
        if clause.regex.endswith(r"\d"):  # the start of a date
            end -= 1
    else:
        text = next(getattr(clause, name) for name in ("starts_with", "ends_with", "contains") if hasattr(clause, name)).lower()
        start = ref.rfind(text) if kind == "ClauseEndsWith" else ref.find(text)
        end = start + len(text)
    spelled, rest = ref[start:end], ref[end:]
    if spelled.startswith("ft:") or spelled.endswith(".ft-"):  # a fine-tuned model: its base, then the owner's own name
        return True
    cut = _CUT_DATE.search(spelled)
    if cut:
        spelled, rest = spelled[: cut.start()], spelled[cut.start() :] + rest
    return bool(_RELEASE.fullmatch(rest)) and (start == 0 or ref[start - 1] in "/.:")
