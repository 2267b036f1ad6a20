"""Durations as people write them: ``"800ms"``, ``"30s"``, ``"2m"``, ``"1h"``, ``"1d"``, or a number of seconds."""

from __future__ import annotations

import math
import re
from typing import Annotated, TypeAlias

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
PATTERN = r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)"

Duration: TypeAlias = Annotated[float, "duration"]
"""Seconds. A plug-in's option annotated with this may be written as ``"800ms"`` in a file; it arrives as a float."""


def parse_duration(value: str | float) -> float:
    """Seconds, above 0 and finite. Raises ValueError with a message that says what is accepted."""
    if isinstance(value, str):
        match = re.fullmatch(PATTERN, value)
        seconds = float(match[1]) * UNITS[match[2]] if match else math.nan
    elif isinstance(value, bool) or not isinstance(value, int | float):
        seconds = math.nan
    else:
        seconds = float(value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f'must be a duration like "800ms", "30s", "2m", "1h", or a number of seconds above 0, not {value!r}')
    return seconds
