"""Why a prompt missed: the first place where two prompts part, and what follows from it (contract P7).

A prefix cache reads as far as two requests are the same, so one changed character costs everything behind it. Here that
character is found, named by segment, path and offset, and sorted into kinds that tell what to do: a clock or an identifier in
the prompt belongs at its end; tools and their keys want a fixed order; parameters that enter the cache key stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cachespec.affinity import FROZEN
from cachespec.messages import TextPart, ToolResultPart
from cachespec.prompt import Prompt, Segment, build_prompt, canonical_json
from cachespec.request import Request
from cachespec.tokens import TokenModel, sizes_of

MissKind = Literal["appended", "datetime", "identifier", "reordered", "edited", "removed", "inserted", "params_changed"]
AROUND = 40
"""Characters shown of each side, at most."""
_LEAD = 12  # of them before the difference

_MONTH = (
    r"(?<![A-Za-z])(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?"
    r"|Aug(?:ust)?|Sep(?:t|tember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?<![A-Za-z])(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs?)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\.?)?"
_ZONE = r"(?:\s?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_YEAR = r"(?:19|20)\d{2}"
_MONTHS = """
jan feb mar apr may jun jul aug sep sept oct nov dec january february march april june july august september october
november december jän mär mrz mai okt dez januar jänner feber februar märz juni juli oktober dezember janv févr fév avr juil
août déc janvier février mars avril juin juillet septembre octobre novembre décembre ene abr ago dic enero febrero marzo
abril mayo junio julio agosto septiembre setiembre octubre noviembre diciembre fev set out janeiro fevereiro março maio
junho julho setembro outubro novembro dezembro gen mag giu lug ott gennaio febbraio aprile maggio giugno luglio settembre
ottobre dicembre mrt mei januari februari maart augustus maj marts augusti maret agustus desember gener febrer març maig
juny juliol agost setembre desembre tammikuuta helmikuuta maaliskuuta huhtikuuta toukokuuta kesäkuuta heinäkuuta elokuuta
syyskuuta lokakuuta marraskuuta joulukuuta stycznia lutego marca kwietnia maja czerwca lipca sierpnia września października
listopada grudnia ledna února března dubna května června července srpna září října listopadu prosince januára februára
apríla mája júna júla augusta septembra októbra novembra decembra siječnja veljače ožujka travnja svibnja lipnja srpnja
kolovoza rujna studenoga prosinca ianuarie februarie martie aprilie iunie iulie septembrie octombrie noiembrie decembrie
ocak şubat mart nisan mayıs haziran temmuz ağustos eylül ekim kasım aralık января февраля марта апреля мая июня июля августа
сентября октября ноября декабря січня лютого березня квітня травня червня липня серпня вересня жовтня листопада грудня
януари февруари март април май юни юли август септември октомври ноември декември ιανουαρίου φεβρουαρίου μαρτίου απριλίου
μαΐου ιουνίου ιουλίου αυγούστου σεπτεμβρίου οκτωβρίου νοεμβρίου δεκεμβρίου जनवरी फ़रवरी फरवरी मार्च अप्रैल मई जून जुलाई
अगस्त सितंबर अक्टूबर नवंबर दिसंबर يناير فبراير مارس أبريل مايو يونيو يوليو أغسطس سبتمبر أكتوبر نوفمبر ديسمبر
"""
"""Months as they are named before a year, in some 25 languages. Any word would make a date of "12 items 2024"."""
_OF_YEAR = rf"\.?,? (?:de )?{_YEAR}"
_NAME = rf"(?<![^\W\d_])(?=\S{{2,16}} (?:de )?{_YEAR})(?i:{'|'.join(_MONTHS.split())}){_OF_YEAR}"  # a glance ahead is faster
_DATE = "|".join(
    (
        rf"(?<!\d){_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:[T_ -]?\d{{4}}(?:\d{{2}})?(?:[.,]\d+)?Z?)?(?!\d)",
        rf"{_YEAR}-?W\d{{2}}(?:-?[1-7])?\b|Q[1-4][ /-]?{_YEAR}|{_YEAR}[ -]?Q[1-4]",
        r"\d{2,4}\s?[年년]\s?\d{1,2}\s?[月월](?:\s?\d{1,2}\s?[日일])?",
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}",
        r"\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}",
        rf"{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}",
        rf"\d{{1,2}}(?:\.|er|º|st|nd|rd|th)? (?:de |of |d['’])?{_NAME}|{_NAME}",
    )
)
_EPOCH = r"\b1\d{9}(?:\d{3})?(?:\.\d+)?\b"
_DATETIME = re.compile(rf"(?:{_DAY},? )?(?:{_DATE})(?:(?:[T ]|,? (?:at )?){_CLOCK}{_ZONE})?|{_CLOCK}{_ZONE}|{_DAY}\b|{_EPOCH}")
_WORD = re.compile(r"[A-Za-z0-9_\-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where request B is not what request A was.

    `segment` is its name, `path` leads to the value from the root, `offset_chars` is the first differing code point in the
    part's text, or in its canonical JSON where it is not text. `before` and `after` are A's and B's text around it.
    """

    segment: str
    path: str
    offset_chars: int
    kind: MissKind
    before: str
    after: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "segment": self.segment,
            "path": self.path,
            "offset_chars": self.offset_chars,
            "kind": self.kind,
            "before": self.before,
            "after": self.after,
        }

    @property
    def advice(self) -> str:
        """What to do about it, in a sentence; empty where nothing is to be done."""
        where = self.segment if self.path == self.segment else f"{self.segment} ({self.path})"
        return {
            "appended": "",
            "datetime": f"move the time out of {where}, to the end of the newest message: what stands behind it is read anew",
            "identifier": f"move the identifier out of {where}, to the end of the newest message, or keep it the same",
            "reordered": f"keep the order of {self.segment.partition('[')[0]} and of their keys the same in every request",
            "edited": f"leave {where} as it was sent before; say what is new in a message at the end",
            "removed": "keep what was sent before; a shortened history is a new prompt",
            "inserted": f"insert nothing before {where}; add it at the end",
            "params_changed": f"keep {self.path} the same within a session: it is part of what the vendor caches by",
        }[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What B shares with A and what it lost of it, in tokens (estimates), and the vendor's own word where there is one.

    `divergence` None: the prompts are identical.
    """

    divergence: Divergence | None
    shared_tokens: int
    lost_tokens: int
    vendor_reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "divergence": None if self.divergence is None else self.divergence.to_dict(),
            "shared_tokens": self.shared_tokens,
            "lost_tokens": self.lost_tokens,
            "vendor_reason": self.vendor_reason,
        }


def why(a: Request, b: Request, *, tokens: TokenModel | None = None, vendor_reason: str | None = None) -> Why:
    """Where request `b` stopped sharing request `a`'s prefix. `tokens`: what is learned of the model's tokens."""
    model = tokens or TokenModel()
    first, second = build_prompt(a), build_prompt(b)
    found = diverge(first, second)
    every = model.tokens(sizes_of(first.segments))
    if found is None:
        return Why(divergence=None, shared_tokens=every, lost_tokens=0, vendor_reason=vendor_reason)
    if found.kind == "appended":
        return Why(divergence=found, shared_tokens=every, lost_tokens=0, vendor_reason=vendor_reason)
    index = next((i for i, s in enumerate(first.segments) if s.name == found.segment), len(first.segments))
    whole = model.tokens(sizes_of(first.segments[:index]))
    shared = whole
    if 0 < index < len(first.segments):
        segment = first.segments[index]
        share = min(found.offset_chars / max(len(_text(segment, _parts(a))), 1), 1.0)
        shared += int(model.tokens(sizes_of([segment])) * share)
    shared = min(shared, every)
    return Why(divergence=found, shared_tokens=shared, lost_tokens=every - shared, vendor_reason=vendor_reason)


def diverge(a: Prompt, b: Prompt) -> Divergence | None:
    """The first place where prompt `b` differs from prompt `a`; None where they are the same."""
    settings = _settings(a.request), _settings(b.request)
    if settings[0] != settings[1]:
        path = _first_path(*settings) or ""
        return _at("params", f"params{path}", *map(canonical_json, settings), kind="params_changed")
    count = 1
    for x, y in zip(a.segments[1:], b.segments[1:], strict=False):
        if x.digest != y.digest:
            break
        count += 1
    left, right = a.segments[count:], b.segments[count:]
    parts = _parts(a.request), _parts(b.request)
    if not left:
        if not right:
            return None
        name = right[0].name
        return Divergence(
            segment=name, path=name, offset_chars=0, kind="appended", before="", after=_text(right[0], parts[1])[:AROUND]
        )
    if not right:
        name = left[0].name
        return Divergence(
            segment=name, path=name, offset_chars=0, kind="removed", before=_text(left[0], parts[0])[:AROUND], after=""
        )
    return _between(left, right, parts)


def _between(
    left: Sequence[Segment], right: Sequence[Segment], parts: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Divergence:
    x, y = left[0], right[0]
    # Another name at this place: one of the two ends its tools, its system texts, or a message here.
    if x.name != y.name:
        kind: MissKind = "removed" if _place(x) < _place(y) else "inserted"
        name = x.name if kind == "removed" else y.name
        before, after = _text(x, parts[0])[:AROUND], _text(y, parts[1])[:AROUND]
        return Divergence(segment=name, path=name, offset_chars=0, kind=kind, before=before, after=after)
    texts = _text(x, parts[0]), _text(y, parts[1])
    path = x.name + (_path(x, y) or "")
    here = _family(left, x), _family(right, y)
    if here[0] != here[1] and sorted(here[0]) == sorted(here[1]):
        return _at(x.name, x.name, *texts, kind="reordered")
    if texts[0] == texts[1]:
        if list(_keys(x.value)) != list(_keys(y.value)):
            # The same content with its keys in another order: where, canonical JSON cannot say.
            return _at(x.name, x.name, _as_sent(x.value), _as_sent(y.value), kind="reordered")
        return replace(_at(x.name, x.name, *texts, kind="edited"), offset_chars=0)  # whose it is, or what stands beside it
    identity = _own(x), _own(y)
    if identity[0] in {_own(s) for s in right[1:]} and identity[1] not in {_own(s) for s in left[1:]}:
        return _at(x.name, x.name, *texts, kind="inserted")
    if identity[1] in {_own(s) for s in left[1:]} and identity[0] not in {_own(s) for s in right[1:]}:
        return _at(x.name, x.name, *texts, kind="removed")
    return _at(x.name, path, *texts, kind=None)


def _at(segment: str, path: str, before: str, after: str, *, kind: MissKind | None) -> Divergence:
    offset = _first_difference(before, after)
    start = max(0, offset - _LEAD)
    return Divergence(
        segment=segment,
        path=path,
        offset_chars=offset,
        kind=_kind(before, after, offset) if kind is None else kind,
        before=before[start : start + AROUND],
        after=after[start : start + AROUND],
    )


def _first_difference(a: str, b: str) -> int:
    """The first code point that differs; the shorter one's length where one begins with the other."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # by halves: comparing long texts piece by piece in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _kind(a: str, b: str, offset: int) -> MissKind:
    """A clock, an identifier, or an edit: by the words in which the texts part, if what follows them is the same again."""
    for pattern, kind in ((_DATETIME, "datetime"), (_WORD, "identifier")):
        x, y = _span(pattern, a, offset), _span(pattern, b, offset)
        if x is None or y is None:
            continue
        if kind == "identifier" and not (_is_identifier(a[slice(*x)]) and _is_identifier(b[slice(*y)])):
            continue
        rest = a[x[1] : x[1] + 8], b[y[1] : y[1] + 8]
        if rest[0] == rest[1]:
            return kind  # type: ignore[return-value]
    return "edited"


def _span(pattern: re.Pattern[str], text: str, offset: int) -> tuple[int, int] | None:
    """The match that holds `offset`, or ends at it."""
    for match in pattern.finditer(text, max(0, offset - 64)):
        if match.start() > offset:
            return None
        if match.end() >= offset:
            return match.span()
    return None


def _is_identifier(word: str) -> bool:
    digits = sum(c.isdigit() for c in word)
    return digits > 0 and (digits == len(word) or len(word) >= 4)


def _settings(request: Request) -> dict[str, Any]:
    """The parameters that enter a vendor's cache key, as far as they are set."""
    choice, form, reasoning = request.tool_choice, request.response_format, request.reasoning
    values: dict[str, Any] = {
        "model": request.model,
        "tool_choice": None
        if choice is None
        else _set({"mode": choice.mode, "name": choice.name, "parallel": choice.parallel}),
        "response_format": None
        if form is None
        else _set({"kind": form.kind, "name": form.name, "schema": form.schema, "strict": form.strict}),
        "reasoning": None
        if reasoning is None
        else _set({"effort": reasoning.effort, "budget_tokens": reasoning.budget_tokens, "summary": reasoning.summary}),
    }
    for owner, fields in (*request.passthrough.items(), *request.extra.items()):
        own = {key: fields[key] for key in FROZEN if fields.get(key) is not None}
        if own:
            values[owner] = own
    return _set(values)


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _parts(request: Request) -> dict[str, Any]:
    """Every part by the name of its segment."""
    named: dict[str, Any] = {f"system[{i}]": part for i, part in enumerate(request.system)}
    number, system = 0, len(request.system)
    for message in request.messages:
        late = message.role in ("system", "developer")
        for j, part in enumerate(message.parts):
            named[f"system[{system + j}]" if late else f"messages[{number}][{j}]"] = part
        system += len(message.parts) if late else 0
        number += not late
    return named


def _text(segment: Segment, parts: Mapping[str, Any]) -> str:
    """What is compared: a part's text, that of a tool's result too; canonical JSON otherwise."""
    part = parts.get(segment.name)
    if isinstance(part, ToolResultPart) and len(part.content) == 1 and isinstance(part.content[0], TextPart):
        return part.content[0].text
    return segment.text


def _path(x: Segment, y: Segment) -> str | None:
    """Below the segment: the way to the first value that differs, in the order of canonical JSON."""
    if isinstance(x.value, str) or isinstance(y.value, str):
        return None
    return _first_path(_plain(x.value), _plain(y.value))


def _first_path(a: Any, b: Any) -> str | None:
    if a == b and type(a) is type(b):
        return None
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            if key not in a or key not in b:
                return f".{key}"
            below = _first_path(a[key], b[key])
            if below is not None:
                return f".{key}{below}"
        return None
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            below = _first_path(x, y)
            if below is not None:
                return f"[{i}]{below}"
        return f"[{min(len(a), len(b))}]"
    return ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _keys(inner)


def _family(segments: Sequence[Segment], of: Segment) -> list[str]:
    return [segment.text for segment in segments if segment.kind == of.kind]


def _own(segment: Segment) -> tuple[str, str]:
    return segment.kind, segment.text


_ORDER = ("params", "tools", "system", "turn")


def _place(segment: Segment) -> tuple[int, ...]:
    """Where a segment stands in prefix order, by its kind and its numbers."""
    return (_ORDER.index(segment.kind), *map(int, re.findall(r"\d+", segment.name)))


def _as_sent(value: Any) -> str:
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False)
