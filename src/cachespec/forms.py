"""What to write into a file instead of a value that cannot be taken: the nearest word, another form of it, or an example."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cachespec.annotations import (
    COLLECTIONS,
    Example,
    PluginOf,
    Where,
    dotted,
    fields_of,
    members,
    nearest,
)

_LONGEST = 60  # characters of a value that is worth repeating
_DEPTH = 4  # tables and lists in one another; a type may hold itself


def form_hint(value: Any, annotation: Any, where: Where, fits: Callable[[Any, Any], bool]) -> str | None:
    """What to write instead of a value of the wrong form: the same in a form that `fits`, else an example where a table or a
    list was given or is wanted. None where neither helps."""
    if (word := _word(value, annotation)) is not None:
        return word
    key = f"{dotted(where[-1:])} = " if where and isinstance(where[-1], str) else ""
    told = any(isinstance(mark, Example) for mark in getattr(annotation, "__metadata__", ()))
    found = None if told else _fitting(value, annotation, fits)
    if found is not None and len(text := toml_text(found)) <= _LONGEST:
        return f"did you mean {key}{text}?"
    shown = example(annotation)
    if shown is None or not (isinstance(value, Mapping | list) or shown.startswith(("{", "["))):
        return None
    return f"such as {key}{shown}"


def _word(value: Any, annotation: Any) -> str | None:
    """What is meant by a value of the right form: the nearest of a choice of words, or an amount that is not text."""
    choices = [item for part in members(annotation) if get_origin(part) is Literal for item in get_args(part)]
    if isinstance(value, str):
        close = nearest(value, [item for item in choices if isinstance(item, str)])
        return f"did you mean {close!r}?" if close else None
    if Decimal in members(annotation) and isinstance(value, int | float) and not isinstance(value, bool):
        return f'money is written as text: "{value}"'
    return None


def _fitting(value: Any, annotation: Any, fits: Callable[[Any, Any], bool], depth: int = _DEPTH) -> Any:
    """`value` in a form that fits: alone where it stands in a list or table of one, in a list, or in a table under the one key
    that has to be there, or that comes first. None where there is none."""
    found: list[Any] = []
    if not depth:
        return None
    if isinstance(value, Mapping | list) and len(value) == 1:
        found += value.values() if isinstance(value, Mapping) else value
    for kind in members(annotation):
        inner, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if any(isinstance(mark, PluginOf) for mark in marks):
            found.append({"use": value})
        elif marks:
            found.append(_fitting(value, inner, fits, depth - 1))
        elif (get_origin(kind) or kind) in COLLECTIONS:
            item = _fit(value, (get_args(kind) or (Any,))[0], fits, depth)
            found += [] if item is None else [[item]]
        elif len(keys := _leading(fields_of(kind))) == 1:
            item = _fit(value, fields_of(kind)[keys[0]][0], fits, depth)
            found += [] if item is None else [{keys[0]: item}]
    return next((one for one in found if one is not None and fits(one, annotation)), None)


def _fit(value: Any, annotation: Any, fits: Callable[[Any, Any], bool], depth: int) -> Any:
    return value if fits(value, annotation) else _fitting(value, annotation, fits, depth - 1)


def _leading(known: Mapping[str, tuple[Any, bool]]) -> list[str]:
    """The keys that have to be there, else the first one."""
    return [name for name, (_, required) in known.items() if required] or list(known)[:1]


def example(annotation: Any, depth: int = _DEPTH) -> str | None:
    """A value for this annotation, as a file has it; None where the type does not tell, or not within so many tables."""
    if not depth:
        return None
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        told = [mark.text for mark in marks if isinstance(mark, Example)]
        told += ['{ use = "..." }' for mark in marks if isinstance(mark, PluginOf)]
        told += ['"30s"' for mark in marks if mark == "duration"]
        return told[0] if told else example(inner, depth)
    if origin in (Union, types.UnionType):
        return next((text for member in get_args(annotation) if (text := example(member, depth)) is not None), None)
    if origin is Literal:
        return toml_text(get_args(annotation)[0])
    if isinstance(annotation, typing.NewType):
        return example(annotation.__supertype__, depth)
    base = origin or annotation
    if base in COLLECTIONS or base in (dict, Mapping):
        inner = example((get_args(annotation) or (Any,))[-1 if base in (dict, Mapping) else 0], depth - 1)
        return None if inner is None else f"[{inner}]" if base in COLLECTIONS else f"{{ name = {inner} }}"
    known = fields_of(annotation)
    texts = {name: example(known[name][0], depth - 1) for name in _leading(known)}
    if texts and None not in texts.values():
        return "{ " + ", ".join(f"{name} = {text}" for name, text in texts.items()) + " }"
    return _SAMPLES.get(annotation)


_SAMPLES: Mapping[Any, str] = types.MappingProxyType(
    {
        str: '"..."',
        Path: '"..."',
        int: "1",
        float: "1.0",
        bool: "true",
        Decimal: '"0.40"',
    }
)


def toml_text(value: Any) -> str:
    """A value as a file has it, in one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{dotted((key,))} = {toml_text(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
