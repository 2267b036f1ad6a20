"""What annotations mean to a file, and the words for it.

`Decimal` is money and wants text; `Duration` takes ``"800ms"`` or seconds; `EnvRef` and, where no table is expected, a
plug-in's `str` take ``{ env = "NAME" }``; a set takes a list or a single item; `BackendName` and `ModelName` are held
against what is configured; a parameter whose type no file can express (an HTTP client, say) cannot be set from one.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

Where: TypeAlias = tuple[str | int, ...]
PositiveInt: TypeAlias = Annotated[int, "positive"]
BackendName: TypeAlias = Annotated[str, "backend"]
"""An option that names a configured backend: a file is refused, with the nearest name, where there is none of it."""
ModelName: TypeAlias = Annotated[str, "model"]
"""An option that names what a request may ask for: an alias, a backend, a backend's model, or ``provider:model``."""
NAMES: Mapping[str, str] = types.MappingProxyType({"backend": "no backend", "model": "no alias or backend"})
MONEY = r"[0-9]+(?:\.[0-9]+)?"
SECRETS = ("api_key", "secret", "password", "token")
COLLECTIONS: Mapping[Any, Callable[[Iterable[Any]], Any]] = types.MappingProxyType(
    {list: list, tuple: tuple, Sequence: tuple, Iterable: tuple, set: frozenset, frozenset: frozenset}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRef:
    """A value that stands in an environment variable, so that no file holds a secret."""

    env: str


@dataclass(frozen=True, slots=True)
class PluginOf:
    """``Annotated[..., PluginOf("routing")]``: a table whose `use` names a plug-in of that family."""

    family: str


@dataclass(frozen=True, slots=True)
class Within:
    """``Annotated[float, Within(0, 1)]``: a number from `least` to `most`, both included; None: without an end."""

    least: float
    most: float | None = None

    def __str__(self) -> str:
        return f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"


Share: TypeAlias = Annotated[float, Within(0, 1)]
"""An option that is a probability, or another share of a whole."""


@dataclass(frozen=True, slots=True)
class Example:
    """``Annotated[..., Example('{ per_hour = "0.40" }')]``: how a file says it, for hints, where the type alone does not."""

    text: str


CostTable: TypeAlias = Annotated[Mapping[str, Any] | str | None, Example('{ per_hour = "0.40" }')]
"""An option that is a local engine's cost (`pricing.local_rates`)."""
PriceTable: TypeAlias = Annotated[Mapping[str, Any] | None, Example('{ input = "3.00", output = "15.00" }')]
"""An option that is a hosted model's price list (`pricing.hosted_rates`)."""
DraftTable: TypeAlias = Annotated[Mapping[str, Any] | None, Example('{ use = "suffix" }')]
AcceptanceTable: TypeAlias = Annotated[Mapping[str, Any] | None, Example('{ use = "goodput" }')]
"""Options that are a plug-in's table inside a backend's."""


class Unexpressible:
    """Stands for a type that no file can express."""


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; anything else alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def typed_dict_fields(annotation: Any) -> dict[str, tuple[Any, bool]]:
    """The annotation of each key, and whether it is required (which the class itself does not know of text annotations)."""
    fields: dict[str, tuple[Any, bool]] = {}
    for name, kind in typing.get_type_hints(annotation, include_extras=True).items():
        marked = get_origin(kind)
        if marked in (typing.Required, typing.NotRequired):
            fields[name] = (get_args(kind)[0], marked is typing.Required)
        else:
            fields[name] = (kind, annotation.__total__)
    return fields


def fields_of(annotation: Any) -> dict[str, tuple[Any, bool]]:
    """The fields of a dataclass or TypedDict, and whether they are required; none where it is neither, or not resolvable."""
    try:
        if typing.is_typeddict(annotation):
            return typed_dict_fields(annotation)
        if not (isinstance(annotation, type) and is_dataclass(annotation)):
            return {}
        kinds = typing.get_type_hints(annotation, include_extras=True)
    except Exception:  # noqa: BLE001 - an annotation may name what only a type checker can see, and fail in any way
        return {}
    return {f.name: (kinds[f.name], f.default is f.default_factory is MISSING) for f in fields(annotation) if f.init}


def is_secret_name(name: str) -> bool:
    """Whether an option of this name holds a secret, so that a file may only name where it is."""
    return name in SECRETS or name.endswith(tuple(f"_{word}" for word in SECRETS))


def dotted(where: Where) -> str:
    """``("policies", "budgets", 1, "limit")`` as ``policies.budgets[1].limit``, keys quoted where TOML wants it."""
    text = ""
    for step in where:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            bare = step.replace("-", "").replace("_", "").isalnum() or ("." in step and not text)
            text += ("." if text else "") + (step if bare else f'"{step}"')
    return text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, or None."""
    by_fold = {item.casefold(): item for item in known}
    found = get_close_matches(name.casefold(), by_fold, n=1, cutoff=0.55)
    return by_fold[found[0]] if found else None


def suggestion(name: str, known: Iterable[str], *, label: str = "known") -> str:
    """A hint: the nearest name, else all of them."""
    names = sorted(set(known))
    close = nearest(name, names)
    if close:
        return f"did you mean {close!r}?"
    return f"{label}: {', '.join(names)}" if names else f"{label}: none"


def show(value: Any) -> str:
    """A value for a message: short, and a table by its keys alone."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value) if isinstance(value, str | int | float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


NOT_IN_A_FILE = "something only code can give"
_WORDS: Mapping[Any, str] = types.MappingProxyType(
    {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        Decimal: 'an amount of USD as text, such as "0.40"',
        Path: "a path",
        EnvRef: 'a reference such as { env = "NAME" }',
        Any: "any value",
        object: "any value",
    }
)


def describe(annotation: Any) -> str:
    """What a person should write for this annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        return 'a duration such as "30s"' if "duration" in marks else describe(inner)
    if origin in (Union, types.UnionType):
        words = [describe(member) for member in get_args(annotation) if member is not type(None)]
        return " or ".join(dict.fromkeys(w for w in words if w != NOT_IN_A_FILE)) or NOT_IN_A_FILE
    if origin is Literal:
        return "one of " + ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in get_args(annotation))
    if isinstance(annotation, typing.NewType):
        return describe(annotation.__supertype__)
    base = origin or annotation
    if base in COLLECTIONS:
        inner = describe((get_args(annotation) or (Any,))[0])
        if inner == NOT_IN_A_FILE:
            return inner
        return f"{inner} or a list of it" if base in (set, frozenset) else f"a list ({inner} each)"
    if base in (dict, Mapping) or is_dataclass(annotation) or typing.is_typeddict(annotation):
        return "a table"
    return _WORDS.get(annotation, NOT_IN_A_FILE)
