"""Frozen values that are made as fast as open ones.

A decision makes some 200 of them. The `__init__` that `dataclasses` writes for a frozen class calls ``object.__setattr__`` for
each field, which takes more than twice the time of storing it.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


class _Made:
    """The default of a field that a factory makes, as signatures show it."""

    def __repr__(self) -> str:
        return "<factory>"


def quick(cls: type[T]) -> type[T]:
    """Above ``@dataclass(frozen=True, slots=True)``: the same class with an `__init__` that stores its fields directly.

    While it does so the new object, which nobody else knows yet, is of an open class with the same slots; then it is what it
    was. All else is dataclasses' own, and so is how a subclass is made. Raises TypeError for fields that are not arguments, or
    not in slots of this class.
    """
    own = fields(cls)  # type: ignore[arg-type]
    slots = cls.__dict__.get("__slots__", ())
    if cls.__bases__ != (object,) or tuple(field.name for field in own) != slots or not all(field.init for field in own):
        raise TypeError(f"{cls.__qualname__}: fields must be its slots, and arguments")
    opened = type(f"_Open{cls.__name__}", (), {"__slots__": slots})
    about: dict[str, Any] = {"_become": object.__dict__["__class__"].__set__, "_opened": opened, "_cls": cls, "_made": _Made()}
    about["_init"] = cls.__init__
    plain: list[str] = []
    named: list[str] = []
    values: dict[str, str] = {}
    for field in own:
        name, argument = field.name, field.name
        values[name] = name
        if field.default is not MISSING:
            about[f"_default_{name}"] = field.default
            argument = f"{name}=_default_{name}"
        elif field.default_factory is not MISSING:
            about[f"_make_{name}"] = field.default_factory
            argument, values[name] = f"{name}=_made", f"_make_{name}() if {name} is _made else {name}"
        (named if field.kw_only else plain).append(argument)
    body = ["if type(self) is not _cls:"]
    body.append(f"  return _init(self, {', '.join(f'{name}={value}' for name, value in values.items())})")
    body += ["_become(self, _opened)", *(f"self.{name} = {value}" for name, value in values.items()), "self.__class__ = _cls"]
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ", ".join(["self", *plain, *(["*", *named] if named else [])])
    exec(f"def __init__({arguments}):\n " + "\n ".join(body), about)  # noqa: S102 - names of fields alone
    init = about["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = dict(cls.__init__.__annotations__)
    cls.__init__ = init  # type: ignore[method-assign]
    return cls
