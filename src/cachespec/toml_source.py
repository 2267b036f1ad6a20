"""Where a key stands in a TOML file.

The standard parser says what a file means and keeps no positions. So a text that it has accepted is gone through once more,
for its statements, keys and brackets alone; that takes time in proportion to its length, and nothing is decided by it but the
line that an error names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from cachespec.annotations import Where, dotted
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
        said, key = said.split(" (at ")[0], None
        if said == "Cannot overwrite a value" and (clash := _Walk(text).clash) is not None:
            said, key, line = "is there already", dotted(clash[0]), clash[1]
        raise ConfigError(said, path=path, line=line, key=key) from None
    except ValueError:
        found = re.search(r"[0-9_]{640,}", text)
        where = None if found is None else text.count("\n", 0, found.start()) + 1
        raise ConfigError("holds a number that is too long", path=path, line=where) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", path=path) from None


def line_of(text: str, where: Where) -> int | None:
    """The line of the key at `where`, or of the nearest table above it that is there; None for the root.

    Raises ConfigError for a text that is no TOML.
    """
    lines = _lines(text)
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where)


@lru_cache(maxsize=1)  # a file with many errors is asked about once for each
def _lines(text: str) -> Mapping[Where, int]:
    parse(text, None)
    return _Walk(text).lines


_TOKEN = re.compile(
    r"""
      (?P<space> [ \t\r]+ | \#[^\n]* )
    | (?P<string> \"""(?:[^\\]|\\.)*?"{3,5} | '''.*?'{3,5} | "(?:[^"\\\n]|\\.)*" | '[^'\n]*' )
    | (?P<mark> [][{}=,.\n] )
    | (?P<bare> [^][{}=,.\s"'\#]+ )
    """,
    re.VERBOSE | re.DOTALL,
)


class _Walk:
    """One walk through a text.

    `lines` has every key's, table's and array item's line; `clash` is the first key that stands where there is a value
    already, and its line. Of a text that is no TOML they say what they can.
    """

    def __init__(self, text: str) -> None:
        self.lines: dict[Where, int] = {}
        self.clash: tuple[Where, int] | None = None
        self._values: set[Where] = set()
        self._items: dict[Where, int] = {}  # how many tables an array of tables has so far
        self._tokens = self._read(text)
        self._sign, self._line = next(self._tokens)
        with suppress(IndexError, StopIteration, RecursionError, tomllib.TOMLDecodeError):  # no TOML
            self._statements()

    def _statements(self) -> None:
        table: Where = ()
        while self._sign:
            if self._sign == "\n":
                self._next()
            elif self._sign == "[":
                table = self._header()
            else:
                self._pair(table)

    def _read(self, text: str) -> Iterator[tuple[str, int]]:
        line = 1
        for match in _TOKEN.finditer(text):
            if match.lastgroup != "space":
                yield match[0], line
            line += match[0].count("\n")
        yield "", line

    def _next(self) -> None:
        self._sign, self._line = next(self._tokens)

    def _skip(self) -> None:
        while self._sign == "\n":
            self._next()

    def _header(self) -> Where:
        """``[table]`` or ``[[item of an array of tables]]``."""
        line = self._line
        self._next()
        many = self._sign == "["
        if many:
            self._next()
        parts = self._key()
        where: Where = ()
        for part in parts:
            where = (*self._latest(where), part)
            self._note(where, line)
        if many:
            self._items[where] = self._items.get(where, 0) + 1
        where = self._latest(where)
        self.lines.setdefault(where, line)
        while self._sign == "]":
            self._next()
        return where

    def _note(self, where: Where, line: int, *, new: bool = False) -> None:
        if self.clash is None and (where in self._values or (new and where in self.lines)):
            self.clash = where, line
        self.lines.setdefault(where, line)

    def _latest(self, where: Where) -> Where:
        return (*where, self._items[where] - 1) if where in self._items else where

    def _key(self) -> list[str]:
        """A dotted key; the next token is what ends it."""
        parts: list[str] = []
        while True:
            quoted = self._sign[0] in "\"'"
            parts.append(tomllib.loads(f"key = {self._sign}")["key"] if quoted else self._sign)
            self._next()
            if self._sign != ".":
                return parts
            self._next()

    def _pair(self, table: Where) -> None:
        line, where, parts = self._line, table, self._key()
        for i, part in enumerate(parts):
            where = (*where, part)
            self._note(where, line, new=i == len(parts) - 1)
        self._values.add(where)
        self._next()  # the equals sign
        self._value(where)

    def _value(self, where: Where) -> None:
        opened = self._sign
        if opened not in ("[", "{"):
            while self._sign not in ("\n", ",", "]", "}", ""):  # numbers and dates may be several tokens
                self._next()
            return
        self._next()
        self._skip()
        index = 0
        while self._sign not in ("]", "}", ""):
            if opened == "{":
                self._pair(where)
            else:
                self.lines[*where, index] = self._line
                self._value((*where, index))
            index += 1
            self._skip()
            if self._sign == ",":
                self._next()
                self._skip()
        self._next()
