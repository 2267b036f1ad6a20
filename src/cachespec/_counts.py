"""Counts read out of a vendor's usage object, and how they lie to each other: inside a total, or beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from cachespec.errors import InputError
from cachespec.shown import shown
from cachespec.usage import MEDIA, WEB_SEARCH, is_count

_T = TypeVar("_T")


class Fields:
    """Reads counts out of a vendor's object and remembers where it is, for errors.

    Attributes:
        unread: what `aside` could not read, anywhere in the object; one list for all that lies in it.
    """

    __slots__ = ("_path", "_values", "unread")

    def __init__(self, values: object, path: str = "", unread: list[InputError] | None = None) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise InputError(f"must be an object, not {shown(values)}", field=path or "usage")
        self._values: Mapping[str, Any] = values or {}
        self._path = path
        self.unread: list[InputError] = [] if unread is None else unread

    def name(self, key: str) -> str:
        """A field of it, dotted from the root."""
        return f"{self._path}.{key}" if self._path else key

    def inside(self, key: str) -> Fields:
        """An object in it; an empty one where it is absent or null."""
        return Fields(self._values.get(key), self.name(key), self.unread)

    def aside(self, read: Callable[[], _T]) -> _T | None:
        """What `read` reads of it beside the totals, which hold without it: None, and in `unread`, what makes no sense."""
        try:
            return read()
        except InputError as error:
            self.unread.append(error)
            return None

    def items(self, key: str) -> list[Fields]:
        """The objects of a list in it; none where it is absent or null."""
        values = self._values.get(key)
        if values is None:
            return []
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise InputError(f"must be a list, not {shown(values)}", field=self.name(key))
        return [Fields(value, f"{self.name(key)}[{i}]", self.unread) for i, value in enumerate(values)]

    def text(self, key: str) -> str | None:
        """A string; None when absent or null."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise InputError(f"must be a string, not {shown(value)}", field=self.name(key))
        return value

    def count(self, key: str, *, integral_float: bool = False) -> int | None:
        """A count of tokens; None when absent or null. `integral_float` takes ``5.0`` too."""
        value = self._values.get(key)
        if value is None:
            return None
        if integral_float and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_count(value):
            raise InputError(f"must be a whole number of tokens, not {shown(value)}", field=self.name(key))
        count: int = value
        return count


def first(*counts: int | None) -> int | None:
    """The first that was reported."""
    return next((c for c in counts if c is not None), None)


def added(*counts: int | None) -> int | None:
    """The sum of what was reported; None when nothing was."""
    known = [c for c in counts if c is not None]
    return sum(known) if known else None


def named(counts: Mapping[str, int | None]) -> dict[str, int]:
    """Those by name of which there are any."""
    return {name: n for name, n in counts.items() if n}


def inclusive(
    total: int | None, read: int | None, writes: Mapping[str, int] | None, *, total_field: str, part_field: str
) -> tuple[int | None, int | None, Mapping[str, int] | None]:
    """Split an input total that includes reads and writes."""
    parts = (read or 0) + sum((writes or {}).values())
    if total is None:
        if read is not None or writes is not None:
            raise InputError(f"missing, though {part_field} is reported", field=total_field)
        return None, None, None
    if parts > total:
        raise InputError(f"cached and written tokens ({parts}) exceed {total_field} ({total})", field=part_field)
    return total - parts, read, writes


def part_of(part: int | None, total: int | None, *, part_field: str, total_field: str) -> int | None:
    """`part`, after a look at whether it fits into its total."""
    if part is not None:
        if total is None:
            raise InputError(f"missing, though {part_field} is reported", field=total_field)
        if part > total:
            raise InputError(f"{part} exceeds {total_field} ({total})", field=part_field)
    return part


def media_of(details: Fields) -> Mapping[str, int | None]:
    """The tokens that are no text, of the details of one side, as told: no more of them are billed than the side has."""
    return {medium: details.aside(partial(details.count, f"{medium}_tokens")) for medium in MEDIA}


def apart_of(searches: int | None, **sides: Mapping[str, int | None]) -> Mapping[str, int] | None:
    """`Usage.apart` of searches, and of the media of the input and of the output."""
    media = {f"{side}_{medium}": n for side, media in sides.items() for medium, n in media.items()}
    return named({WEB_SEARCH: searches, **media}) or None


def exclusive(
    fields: Fields,
    uncached: int | None,
    read: int | None,
    written: int | None,
    split: Mapping[str, int | None],
    *,
    names: tuple[str, str, str],
) -> tuple[int | None, int | None, Mapping[str, int] | None]:
    """Input counts that lie beside each other; what a lifetime split leaves over is ``"unspecified"``."""
    input_key, written_key, split_key = names
    known = added(*split.values())
    written = first(written, known)
    if uncached is None and (read is not None or written is not None):
        raise InputError("missing, though cache counts are reported", field=fields.name(input_key))
    if written is None:
        return uncached, read, None
    rest = written - (known or 0)
    if rest < 0:
        raise InputError(f"the split ({known}) exceeds {written_key} ({written})", field=fields.name(split_key))
    return uncached, read, named({**split, "unspecified": rest})
