"""Saving what is large without holding up the event loop: it is made in pieces, and others run between them.

A thread would not help. Whatever makes JSON of Python's values holds the interpreter's lock, and what is saved would change
under its hands; between two pieces it changes as well, but every row is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from time import perf_counter

import anyio.lowlevel

STRETCH_S = 0.002
"""How long the event loop waits for pieces at a time, by one piece at most exceeded."""
_ROWS = 16
_json = json.JSONEncoder(separators=(",", ":")).encode


def listed(rows: Iterable[object]) -> Iterator[str]:
    """A JSON list of many small rows, in pieces. The rows are asked for as the pieces are."""
    left, before = iter(rows), "["
    while some := list(islice(left, _ROWS)):
        yield before + _json(some)[1:-1]
        before = ","
    yield "]" if before == "," else "[]"


async def gathered(pieces: Iterable[bytes]) -> bytes:
    """All pieces, joined. Others run meanwhile, whenever `STRETCH_S` are over; cancelling it leaves nothing behind."""
    parts: list[bytes] = []
    until = perf_counter() + STRETCH_S
    for piece in pieces:
        parts.append(piece)
        if perf_counter() >= until:
            await anyio.lowlevel.checkpoint()
            until = perf_counter() + STRETCH_S
    return b"".join(parts)
