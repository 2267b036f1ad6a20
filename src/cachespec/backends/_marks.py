"""The caller's own cache marks: which sets of them a vendor refuses, and how they are left out, however deep they are.

Rules as of 2026-11, from the vendors' guides. Anthropic: at most 4, the top-level one included; lifetimes of 5m (also where
none is given) and 1h, the longer before the shorter in wire order; none on empty text or thinking; a top-level mark is one on
the last block that may have one, and may not contradict it. OpenAI: only the values; it writes at most 4, but takes more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from cachespec.backends._profile import Api, Profile
from cachespec.errors import InputError
from cachespec.messages import CacheMark, Message, OpaquePart, Part, ReasoningPart, TextPart, Tool, ToolCallPart, ToolResultPart
from cachespec.recall import trace
from cachespec.request import Request

MARK: Mapping[str, str] = {"anthropic": "cache_control", "openai": "prompt_cache_breakpoint"}
MOST = 4
_KIND = {"anthropic": ("type", "ephemeral"), "openai": ("mode", "explicit")}
_LIFETIMES: Mapping[str, tuple[str, ...]] = {"anthropic": ("1h", "5m"), "openai": ("12h", "30m")}
_Markable = TypeVar("_Markable", Tool, TextPart)
_Found: TypeAlias = tuple[str, Mapping[str, Any], object]
"""Where a mark is, its fields, and what it is on."""


def check_marks(request: Request, profile: Profile, top: Mapping[str, Any] | None) -> None:
    """Raises InputError naming the mark that `profile`'s server would refuse; `top` is the body's own `cache_control`."""
    dialect = profile.marks
    if dialect is None:
        return
    found = list(wire_marks(request, profile.api, dialect))
    for at, fields, on in found:
        _check_values(f"{at}.{MARK[dialect]}", fields, dialect)
        if dialect == "anthropic":
            _check_place(f"{at}.cache_control", on)
    if dialect == "openai" or not (found or top is not None):
        return
    if top is not None:
        _check_values("cache_control", top, dialect)
        last = last_block(request)[0]
        if found and last is not None and found[-1][2] is (last.raw if isinstance(last, OpaquePart) else last):
            if _lifetime(found[-1][1]) != _lifetime(top):
                raise InputError("the last block has a mark with another ttl", field="cache_control")
        else:
            found.append(("", top, None))
    if len(found) > MOST:
        raise InputError(f"at most {MOST} cache marks a request, not {len(found)}", field=_field(found[MOST][0]))
    shorter = ""
    for at, fields, _ in found:
        if _lifetime(fields) == "5m":
            shorter = shorter or at
        elif shorter:
            text = f"a lifetime of 1h after one of 5m (at {shorter}); the longer must stand first"
            raise InputError(text, field=_field(at))


def _field(at: str) -> str:
    return f"{at}.cache_control" if at else "cache_control"


def _lifetime(fields: Mapping[str, Any]) -> str:
    return str(fields.get("ttl") or "5m")


def _check_values(field: str, fields: object, dialect: str) -> None:
    key, value = _KIND[dialect]
    if not isinstance(fields, Mapping) or fields.get(key) != value:
        raise InputError(f"must be an object with {key!r}: {value!r}", field=field)
    ttl = fields.get("ttl")
    if ttl is not None and ttl not in _LIFETIMES[dialect]:
        raise InputError(f"unknown lifetime {ttl!r}; known: {', '.join(_LIFETIMES[dialect])}", field=f"{field}.ttl")


def _check_place(field: str, on: object) -> None:
    if isinstance(on, ReasoningPart):
        raise InputError("not on a thinking block", field=field)
    if _is_blank(on):
        raise InputError("not on an empty text", field=field)


def _is_blank(on: object) -> bool:
    text = on.get("text") if isinstance(on, Mapping) and on.get("type") == "text" else getattr(on, "text", None)
    return isinstance(text, str) and not text.strip()


def last_block(request: Request) -> tuple[Part | Tool | None, int]:
    """Where Anthropic's automatic mark sits, the body's own: on the last block that may have a mark. How many segments of the
    prompt stand behind it, too; None where nothing may."""
    pieces: Iterator[Part | Tool | None] = chain(
        (part for message in reversed(request.messages) for part in (reversed(message.parts) if message.parts else (None,))),
        reversed(request.system),
        reversed(request.tools),
    )
    for behind, piece in enumerate(pieces):
        on = piece.raw if isinstance(piece, OpaquePart) else piece
        if piece is not None and not isinstance(piece, ReasoningPart) and not _is_blank(on):
            return piece, behind
    return None, 0


def wire_marks(request: Request, api: Api, dialect: str) -> Iterator[_Found]:
    """Every mark that goes into a body of `api`, in wire order: tools, system, messages; what is inside a block before it."""
    everywhere, key = api == "messages", MARK[dialect]
    for i, tool in trace(request.tools, _marked, 0)[1]:
        if everywhere or tool.raw is not None:
            yield from _own(f"tools[{i}]", tool.mark, tool, key)
    for i, said in trace(request.system, _marked, 0)[1]:
        yield from _own(f"system[{i}]", said.mark, said, key)
    for at, part in trace(request.messages, _marked_parts, (0, len(request.system)), len(request.system))[1]:
        if everywhere or not isinstance(part, ToolCallPart):
            yield from _of_part(at, part, key)


def unheard_marks(request: Request) -> tuple[str, ...]:
    """A warning for each of the caller's marks, where no mark means anything."""
    if request.cache != "auto":
        return ()
    found = {at: key for dialect, key in MARK.items() for at, _, _ in wire_marks(request, "messages", dialect)}
    return tuple(f"the cache mark at {at} was left out: {key} means nothing to this backend" for at, key in found.items())


def _marked(i: int, value: _Markable) -> tuple[int, tuple[tuple[int, _Markable], ...]]:
    """The tools or texts that have a mark, and where they stand."""
    return i + 1, () if value.mark is None else ((i, value),)


def _marked_parts(numbers: tuple[int, int], message: Message) -> tuple[tuple[int, int], list[tuple[str, Part]]]:
    """The parts that have a mark on them or in them, by the names of their segments."""
    number, system = numbers
    late = message.role in ("system", "developer")
    found = [
        (f"system[{system + j}]" if late else f"messages[{number}][{j}]", part)
        for j, part in enumerate(message.parts)
        if any(True for key in MARK.values() for _ in _of_part("", part, key))
    ]
    return (number, system + len(message.parts)) if late else (number + 1, system), found


def _of_part(at: str, part: Part, key: str) -> Iterator[_Found]:
    if isinstance(part, ReasoningPart):
        yield from ((where, fields, part) for where, fields, _ in _inside(at, part.raw, key))
        return
    if isinstance(part, ToolResultPart):
        for i, inner in enumerate(part.content):
            yield from _own(f"{at}.content[{i}]", inner.mark, inner, key)
    elif isinstance(part, OpaquePart):
        yield from _inside(at, part.raw, key)
    yield from _own(at, part.mark, part.raw if isinstance(part, OpaquePart) else part, key)


def _own(at: str, mark: CacheMark | None, on: object, key: str) -> Iterator[_Found]:
    if mark is not None and MARK[mark.dialect] == key:
        yield at, mark.fields, on


def _inside(at: str, value: object, key: str) -> Iterator[_Found]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _NO_BLOCKS:
                yield from _inside(f"{at}.{name}", inner, key)
        if value.get(key) is not None and "type" in value:
            yield at, value[key], value
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _inside(f"{at}[{i}]", inner, key)


def without_marks(value: Any, keep: str | None) -> Any:
    """A vendor's own object without the marks in its blocks; `keep` is the key of those that stay."""
    if isinstance(value, Mapping):
        gone = {key for key in MARK.values() if key != keep} if "type" in value else ()
        return {k: v if k in _NO_BLOCKS else without_marks(v, keep) for k, v in value.items() if k not in gone}
    return [without_marks(item, keep) for item in value] if isinstance(value, list | tuple) else value


_NO_BLOCKS = ("input", "arguments", *MARK.values())
"""Keys whose values are somebody's data, not blocks."""
