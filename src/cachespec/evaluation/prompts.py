"""Reading PROMPTS: JSON lines (gzipped or not) of REQUEST, or of objects with `turns` or `prompt`; `category` groups them.

What else a line may say is in `Line`. Fields of a line with `turns` or `prompt` that mean nothing here (a data set's ids) are
left out, and told; in a REQUEST they are an error, as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from cachespec.bodies import KEYWORDS, request_from_body
from cachespec.checks import kind_of
from cachespec.errors import InputError
from cachespec.messages import Message, TextPart
from cachespec.request import Request
from cachespec.text_source import named, read_text

ANSWERS: Final = ("answer", "output", "response")
OTHERS: Final = "other"
"""The group of lines that name no category."""
_LATEST = 1e12  # seconds, some thirty thousand years: so that gaps of milliseconds can be told
_OURS = ("turns", "category", "t", "timestamp", "session_id", "tenant", *ANSWERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One conversation of the slice.

    Attributes:
        number: the line in the file, from 1.
        request: its first request, or its only one; `session_id` and `tenant` are the line's.
        turns: what the user says afterwards, each once the answer before it is there.
        answers: recorded answers, to the request and to each of `turns`; None: generate it.
        t: when it was asked, in seconds; None: not recorded.
        bench: it had `turns`, as benchmarks do, whose answers are drawn greedily.
    """

    number: int
    category: str
    request: Request
    turns: tuple[str, ...] = ()
    answers: tuple[str | None, ...] = (None,)
    t: float | None = None
    bench: bool = False

    def next(self, request: Request, answer: str, turn: int) -> Request:
        """The request of turn `turn` (from 1), after `request` got `answer`."""
        said = Message(role="assistant", parts=(TextPart(text=answer),))
        asked = Message(role="user", parts=(TextPart(text=self.turns[turn - 1]),))
        return replace(request, messages=(*request.messages, said, asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """All lines, in the order of the file. `ignored` are field names that meant nothing here."""

    name: str
    lines: tuple[Line, ...]
    ignored: tuple[str, ...] = ()

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(line.category for line in self.lines))

    def limited(self, limit: int | None) -> Slice:
        """At most so many lines of each category, spread evenly over those that there are."""
        if limit is None:
            return self
        kept: list[Line] = []
        for category in self.categories:
            lines = [line for line in self.lines if line.category == category]
            count = min(limit, len(lines))
            kept += (lines[i * len(lines) // count] for i in range(count))
        return replace(self, lines=tuple(sorted(kept, key=lambda line: line.number)))


def read_prompts(path: str) -> Slice:
    """The slice in a file, or on stdin for ``-``. Raises InputError that names file, line and field."""
    return parse_prompts(read_text(path).split("\n"), named(path))


def parse_prompts(lines: Iterable[str], name: str = "PROMPTS") -> Slice:
    """The same from lines of text; empty ones are skipped. Raises InputError; a slice has at least one line."""
    found: list[Line] = []
    ignored: dict[str, None] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text, parse_constant=_no_constant)
            if not isinstance(value, dict):
                raise InputError(f"must be a JSON object, not {kind_of(value)}")
            found.append(_line(value, number, ignored))
        except InputError as error:
            told = InputError(f"{name}:{number}: {error}")
            told.field = error.field
            raise told from error
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"{name}:{number}: is no JSON: {why}") from None
    if not found:
        raise InputError(f"{name}: holds no request")
    timed = [line for line in found if line.t is not None]
    if timed and len(timed) < len(found):
        bare = next(line for line in found if line.t is None)
        raise InputError(f"{name}:{bare.number}: has no time, and line {timed[0].number} has one", field="t")
    return Slice(name=name, lines=tuple(found), ignored=tuple(ignored))


def in_time(lines: Sequence[Line]) -> list[int]:
    """Places of requests in the order in which they were asked."""
    return sorted(range(len(lines)), key=lambda i: (lines[i].t or 0.0, i))


def _line(value: dict[str, Any], number: int, ignored: dict[str, None]) -> Line:
    turns = _turns(value)
    bench = turns is not None
    body = {key: item for key, item in value.items() if key not in _OURS}
    if bench or isinstance(value.get("prompt"), str):
        ignored.update(dict.fromkeys(key for key in body if key not in KEYWORDS))
        body = {key: item for key, item in body.items() if key in KEYWORDS}
    if turns is not None:
        if "prompt" in body or "messages" in body:
            raise InputError("a line has turns, or a prompt or messages, not both", field="turns")
        body["prompt"] = turns[0]
    for key in ("session_id", "tenant"):
        if value.get(key) is not None and (not isinstance(value[key], str) or not value[key]):
            raise InputError(f"must be text, not {kind_of(value[key])}", field=key)
    category = value.get("category")
    if category is not None and not isinstance(category, str):
        raise InputError(f"must be text, not {kind_of(category)}", field="category")
    request = replace(request_from_body(body), session_id=value.get("session_id"), tenant=value.get("tenant"))
    later = () if turns is None else tuple(turns[1:])
    return Line(
        number=number,
        category=category or OTHERS,
        request=request,
        turns=later,
        answers=_answers(value, 1 + len(later)),
        t=_time(value),
        bench=bench,
    )


def _turns(value: Mapping[str, Any]) -> list[str] | None:
    turns = value.get("turns")
    if turns is None:
        return None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InputError("must be a list of at least one text", field="turns")
    return turns


def _answers(value: Mapping[str, Any], count: int) -> tuple[str | None, ...]:
    key = next((key for key in ANSWERS if value.get(key) is not None), None)
    if key is None:
        return (None,) * count
    given = value[key] if isinstance(value[key], list) else [value[key]]
    if len(given) > count or not all(isinstance(answer, str) and answer for answer in given):
        raise InputError(f"must be the text of an answer, or a list of at most {count} (one a turn)", field=key)
    return (*given, *(None,) * (count - len(given)))


def _time(value: Mapping[str, Any]) -> float | None:
    """Seconds: a number, or an ISO 8601 date and time (UTC where it names no zone)."""
    key = next((key for key in ("t", "timestamp") if value.get(key) is not None), None)
    if key is None:
        return None
    given = value[key]
    if isinstance(given, str):
        try:
            read = datetime.fromisoformat(given)
        except ValueError:
            raise InputError(f"must be seconds or an ISO 8601 time, not {given!r}", field=key) from None
        return (read if read.tzinfo is not None else read.replace(tzinfo=UTC)).timestamp()
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InputError(f"must be seconds or an ISO 8601 time, not {kind_of(given)}", field=key)
    if not abs(given) <= _LATEST:
        raise InputError(f"must be seconds, at most {_LATEST:g} either way, not {str(given)[:20]}", field=key)
    return float(given)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
