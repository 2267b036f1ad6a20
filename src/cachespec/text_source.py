"""Text that a user hands over: a file or stdin, plain or gzipped."""

from __future__ import annotations

import gzip
import sys
import zlib
from pathlib import Path

from cachespec.errors import InputError

STDIN = "<stdin>"


def named(path: str) -> str:
    """What errors call a path: ``-`` is stdin."""
    return STDIN if path == "-" else path


def read_text(path: str) -> str:
    """A file's text, or stdin's for ``-``. Raises InputError that names it where it cannot be read, and the line where it is no
    UTF-8."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{named(path)}: cannot be read: {error.strerror or error}") from error
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{named(path)}: is no complete gzip file: {error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{named(path)}:{line}: is not UTF-8 text") from None
