"""Durations as people write them: ``"800ms"``, ``"30s"``, ``"2m"``, ``"1h"``, ``"1d"``, or a number of seconds."""

from __future__ import annotations

import math
import re
from typing import Annotated, TypeAlias

from cachespec.shown import shown

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_S = 10 * 366 * UNITS["d"]
"""Ten years; a longer time to wait is a slip of the pen."""
PATTERN = r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)"

Duration: TypeAlias = Annotated[float, "duration"]
"""Seconds. A plug-in's option annotated with this may be written as ``"800ms"`` in a file; it arrives as a float."""


def parse_duration(value: str | float) -> float:
    """Seconds, above 0 and at most ten years. Raises ValueError with a message that says what is accepted."""
    if isinstance(value, str):
        match = re.fullmatch(PATTERN, value)
        seconds = float(match[1]) * UNITS[match[2]] if match else math.nan
    elif isinstance(value, bool) or not isinstance(value, int | float):
        seconds = math.nan
    else:
        # A whole number may be too large for a float.
        seconds = value if isinstance(value, float) else float(min(max(value, -1), 2 * LONGEST_S))
    if not 0 < seconds < math.inf:
        raise ValueError(
            f'must be a duration like "800ms", "30s", "2m", "1h", or a number of seconds above 0, not {shown(value)}'
        )
    if seconds > LONGEST_S:
        raise ValueError(f"must be at most ten years, not {shown(value)}")
    return seconds
