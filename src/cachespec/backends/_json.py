"""JSON text for request bodies: deterministic bytes, and a place for text that is already JSON.

Keys keep their order, there are no spaces, and non-ASCII letters stand as they are, so that one input gives one body in
every process (contract P8). `Raw` lets the model's own argument text into a body untouched, and `Number` the numbers of
arguments that come as an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cachespec.errors import InputError


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that is JSON already and goes into the body as it is."""

    text: str


class Number(float):
    """A number of an answer, as it was written there: ``1.10`` and ``1e400`` are no other number for having been read.

    So are the constants ``NaN`` and ``Infinity``, which some servers write though they are no JSON.
    """

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Number:
        made = super().__new__(cls, text)
        made.text = text
        return made


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain).encode


def dumps(value: Any) -> str:
    """`value` as compact JSON. Raises: InputError where it holds what JSON cannot say (NaN, sets, objects)."""
    try:
        return text_of(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"cannot be sent as JSON: {error}") from error


def text_of(value: Any) -> str:
    """The same. Raises: TypeError, ValueError, RecursionError."""
    pieces: list[str] = []
    _write(value, pieces)
    return "".join(pieces)


def _write(value: Any, out: list[str]) -> None:
    if isinstance(value, Raw):
        out.append(value.text)
    elif isinstance(value, dict):
        mark = "{"
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no string")
            out.append(f"{mark}{_encode(key)}:")
            _write(item, out)
            mark = ","
        out.append("{}" if mark == "{" else "}")
    elif isinstance(value, list | tuple):
        mark = "["
        for item in value:
            out.append(mark)
            _write(item, out)
            mark = ","
        out.append("[]" if mark == "[" else "]")
    else:
        out.append(value.text if isinstance(value, Number) else _encode(value))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_parse = json.JSONDecoder(parse_constant=_no_constant).decode


def object_text(text: str) -> Raw | None:
    """`text` as the raw JSON object it is; None where it is anything else."""
    try:
        return Raw(text) if isinstance(_parse(text), dict) else None
    except (ValueError, RecursionError):
        return None
