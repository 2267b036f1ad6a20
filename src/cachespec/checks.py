"""Checks of plain values that come from outside: each returns the value, or raises `InputError` naming its field."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from cachespec.durations import parse_duration
from cachespec.errors import InputError
from cachespec.shown import shown

MOST = 2**63 - 1
_WRITABLE_BITS = 2_000
"""Integers up to here can be written as JSON under every limit that Python may be set to (600 digits)."""
MAX_DEPTH = 200
"""JSON nested deeper than this is refused, which also ends a structure that contains itself."""


def kind_of(value: object) -> str:
    """The name of a value's type as a person writing JSON would say it."""
    names: dict[type, str] = {
        bytes: "bytes",
        type(None): "null",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        tuple: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def refuse(field: str, wanted: str, value: object) -> NoReturn:
    """Raise: `field` must be `wanted`, and is not."""
    raise InputError(f"must be {wanted}, not {kind_of(value)}", field=field)


def nearest(name: str, known: Collection[str]) -> str:
    """``, did you mean 'x'?`` for the known name closest to `name`, or nothing when none is close."""
    close = get_close_matches(name, known, 1, 0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def check_keys(given: Mapping[str, Any], known: Collection[str], where: str, *, meant: Collection[str] = ()) -> None:
    """Refuse the first key that is not known; `meant` are further names that a wrong one may have been meant for."""
    for key in given:
        if key not in known:
            hint = nearest(key, {*known, *meant}) if isinstance(key, str) else ""
            known_text = "" if hint else f"; known: {', '.join(sorted(set(known)))}"
            raise InputError(f"unknown field{hint}{known_text}", field=f"{where}.{key}" if where else str(key))


def needed(given: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of a key that must be there. Where one much like it is there instead, that is what is wrong."""
    value = given.get(key)
    if value is None:
        slip = get_close_matches(key, [name for name in given if isinstance(name, str) and name != key], 1, 0.6)
        if slip:
            raise InputError(f"unknown field, did you mean {key!r}?", field=f"{where}.{slip[0]}" if where else slip[0])
    return value


def check_text(value: object, field: str) -> str:
    """A string that can be encoded (no lone surrogates)."""
    if not isinstance(value, str):
        refuse(field, "a string", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"holds a lone surrogate at character {error.start}", field=field) from None
    return value


def check_name(value: object, field: str) -> str:
    """A string that is not empty."""
    text = check_text(value, field)
    if not text:
        raise InputError("is empty", field=field)
    return text


def check_mapping(value: object, field: str) -> Mapping[str, Any]:
    """A mapping; its keys are checked by whoever reads them."""
    if not isinstance(value, Mapping):
        refuse(field, "an object", value)
    return value


def check_list(value: object, field: str, *, wanted: str = "a list") -> Sequence[Any]:
    """A list or tuple (text and mappings are none). `wanted` says what else the caller takes."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        refuse(field, wanted, value)
    return value


def check_bool(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        refuse(field, "true or false", value)
    return value


def check_int(value: object, field: str, *, low: int | None = None, high: int | None = None) -> int:
    """A whole number within bounds, 64 bits at most; booleans are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(field, "an integer", value)
    _bounds(value, field, -MOST if low is None else low, MOST if high is None else high)
    return value


def check_number(value: object, field: str, *, low: float | None = None, high: float | None = None) -> float:
    """A finite number within bounds; booleans are none. An integer stays one, so that bodies repeat what was given."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, "a number", value)
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"must be finite, not {value}", field=field)
    _bounds(value, field, -sys.float_info.max if low is None else low, sys.float_info.max if high is None else high)
    return value


def _bounds(value: float, field: str, low: float, high: float) -> None:
    if not low <= value <= high:
        wanted = f"at least {low}" if value < low and high >= MOST else f"between {low} and {high}"
        raise InputError(f"must be {wanted}, not {shown(value)}", field=field)


def check_seconds(value: object, field: str) -> float:
    """A positive time in seconds, or text such as ``30s``, ``800ms``, ``2m``."""
    if not isinstance(value, str | int | float):
        refuse(field, "a duration", value)
    try:
        return parse_duration(value)
    except ValueError as error:
        raise InputError(str(error), field=field) from None


def copy_json(value: Any, field: str, depth: int = 0) -> Any:
    """A deep copy of a JSON value: later changes of the caller's objects do not reach it. Key order is kept."""
    match value:
        case str():
            return check_text(value, field)
        case None | bool():
            return value
        case int():
            if value.bit_length() > _WRITABLE_BITS:
                raise InputError(f"is too long a number: {shown(value)}", field=field)
            return value
        case float():
            return check_number(value, field)
    if depth > MAX_DEPTH:
        raise InputError(f"is nested deeper than {MAX_DEPTH} levels", field=field)
    match value:
        case Mapping():
            out: dict[str, Any] = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise InputError(f"keys must be strings, not {key!r}", field=field)
                out[check_text(key, field)] = copy_json(item, f"{field}.{key}", depth + 1)
            return out
        case list() | tuple():
            return [copy_json(item, f"{field}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InputError(f"must be JSON, not {kind_of(value)}", field=field)
