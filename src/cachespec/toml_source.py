"""Where a key stands in a TOML file.

The standard parser keeps no positions, and a second parser of our own could disagree with it. So it is asked itself:
prefixes of the file are parsed to find the statement that makes
the key appear, then that statement's lines. It costs a few dozen parses, and only to report an error.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from cachespec.annotations import Where
from cachespec.errors import ConfigError


def read_text(path: str | Path) -> str:
    """A file's text. Raises ConfigError when it is missing, unreadable or no UTF-8."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", path=str(path)) from error
    return decode(data, str(path))


def decode(data: bytes, path: str) -> str:
    """UTF-8, with or without a byte-order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError("is not UTF-8 text", path=path, line=line) from None


def parse(text: str, path: str | None) -> dict[str, Any]:
    """The file as a tree. Raises ConfigError with the line of a syntax error."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        match = re.search(r" \(at line (\d+), column \d+\)$", said)
        line = int(match[1]) if match else text.count("\n") + 1
        raise ConfigError(said.split(" (at ")[0], path=path, line=line) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", path=path) from None


def line_of(text: str, where: Where) -> int | None:
    """The line of the key at `where`, or of the nearest table above it that is there; None for the root."""
    lines = [f"{line}\n" for line in text.split("\n")]
    tree = parse(text, None)
    while where and not _has(tree, where):
        where = where[:-1]
    if not where:
        return None
    # Between two lines that each end a statement, find the one statement that brings the key.
    before, after, top = 0, len(lines), len(lines)
    while top - before > 1:
        middle = (before + top) // 2
        end, found = next(((n, t) for n in range(middle, top) if (t := _try("".join(lines[:n]))) is not None), (top, None))
        if found is None:
            top = middle
        elif _has(found, where):
            after, top = end, middle
        else:
            before = end
    return _inside(lines, before, after, where)


def _inside(lines: list[str], start: int, end: int, where: Where) -> int:
    """The line within the statement that lies in ``lines[start:end]``: where closing the value early shows the key."""
    closers = _closers()
    an_array = False
    for number in range(start + 1, end):
        for found in (_try("".join(lines[:number]) + closer) for closer in closers):
            if found is not None:
                an_array = True
                if _has(found, where):
                    return number
    return end if an_array else start + 1


def _closers() -> tuple[str, ...]:
    """What may close a value cut between two of its lines: arrays, and inline tables where the parser lets them break."""
    breakable = "]}" if _try("a = {\n}") is not None else "]"
    return tuple("".join(p) for depth in range(1, 5) for p in product(breakable, repeat=depth))


def _try(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _has(tree: Any, where: Where) -> bool:
    for step in where:
        if isinstance(step, str):
            if not isinstance(tree, Mapping) or step not in tree:
                return False
        elif not isinstance(tree, list) or step >= len(tree):
            return False
        tree = tree[step]
    return True
