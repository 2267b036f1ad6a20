"""What a drafter's options may be: said once, for a file (by annotation) and for code (by `check_option`)."""

from __future__ import annotations

from math import inf
from typing import Annotated, TypeAlias

from cachespec.annotations import Within
from cachespec.errors import InputError

Bytes: TypeAlias = Annotated[int, Within(0)]
"""An amount of memory."""


def check_option(name: str, value: float, *, least: float, most: float | None = None) -> None:
    """Raises InputError, naming the option, unless it is a number within these bounds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= (inf if most is None else most):
        raise InputError(f"must be {Within(least, most)}, not {value!r}", field=name)
