"""Halves of characters: JSON may spell one as two escapes (``\\ud83d\\ude00``), and some servers cut a delta between them.

A half that waits at the end of a block's text is kept for that block's next delta; one whose other half never comes is
U+FFFD, as in any other broken text, so that nothing we give out is text that cannot be encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

from cachespec.events import Event, Finished, ReasoningDelta, ReasoningFinished, TextDelta, ToolCallDelta, UsageReported

_Delta: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta


def joined(text: str) -> str:
    """`text` with the halves of a character as one, and U+FFFD for a half that stands alone."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Halves:
    """The halves that wait, by kind of delta and block."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: dict[tuple[type[_Delta], int], str] = {}

    def mend(self, events: Iterable[Event]) -> list[Event]:
        """The events with whole characters only."""
        out: list[Event] = []
        for event in events:
            if isinstance(event, _Delta):
                out += self._delta(event)
            elif isinstance(event, UsageReported):
                out.append(event)
            else:
                if isinstance(event, Finished):
                    out += self.end()
                elif isinstance(event, ReasoningFinished) and self.waiting.pop((ReasoningDelta, event.index), ""):
                    out.append(ReasoningDelta("\ufffd", event.index))
                out.append(_whole(event))
        return out

    def end(self) -> list[Event]:
        """What still waits, as the broken text it is."""
        waiting, self.waiting = self.waiting, {}
        return [_broken(kind, index) for kind, index in waiting]

    def _delta(self, event: _Delta) -> list[Event]:
        key = type(event), event.index
        text = self.waiting.pop(key, "") + (event.arguments if isinstance(event, ToolCallDelta) else event.text)
        if text and "\ud800" <= text[-1] <= "\udbff":
            self.waiting[key] = text[-1]
            text = text[:-1]
        text = joined(text)
        if isinstance(event, ToolCallDelta):
            return [ToolCallDelta(event.index, joined(event.id), joined(event.name), text)]
        return [type(event)(text, event.index)] if text else []


def _broken(kind: type[_Delta], index: int) -> Event:
    if kind is ToolCallDelta:
        return ToolCallDelta(index, "", "", "\ufffd")
    return TextDelta("\ufffd", index) if kind is TextDelta else ReasoningDelta("\ufffd", index)


def _whole(value: Any) -> Any:
    """A value with every text in it joined."""
    if isinstance(value, str):
        return joined(value)
    if isinstance(value, Mapping):
        return {_whole(key): _whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_whole, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _whole(getattr(value, f.name)) for f in fields(value)})
    return value
