"""Plug-ins: finding, checking and making them. The only module that loads an implementation.

A family is an entry-point group ``cachespec.<family>``. `use` names an installed plug-in of the family, or something
importable as ``module:attribute``. Nothing is looked up or imported before it is asked for, and nothing is remembered.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from cachespec.annotations import Where, nearest
from cachespec.errors import CachespecError, UnknownPluginError
from cachespec.options import Context, Problem, call, options_of, problems_of, raise_all, read_table

FAMILIES = ("backends", "routing", "ledgers", "caching", "acceptance", "drafters", "middleware")
OWN = "cachespec"
# What the host gives to a family's factories: a file may not set it.
GIVEN: Mapping[str, tuple[str, ...]] = MappingProxyType({"backends": ("name",), "drafters": ("name", "target", "load")})
# Options that are a plug-in's table themselves.
_NESTED: Mapping[str, str] = MappingProxyType({"draft": "drafters", "acceptance": "acceptance"})
# What a made plug-in must offer, as its family's base.py says: checked when it is made, not when a request needs it.
_MEMBERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "backends": ("name", "model", "rates", "capabilities", "start", "check", "estimate", "wire", "open", "aclose"),
        "routing": ("rank",),
        "acceptance": ("max_length", "choose"),
        "drafters": ("name", "sources", "open", "prospects", "propose", "accept", "close", "stats", "stop"),
        "ledgers": (
            "reserve",
            "settle",
            "release",
            "snapshot",
            "refresh",
            "entries",
            "totals",
            "secret",
            "save",
            "load",
            "aclose",
        ),
        "caching": ("plan", "sent", "ended", "held", "dump", "load"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """One installed plug-in. `problem` says why it cannot be loaded; None: it can."""

    family: str
    name: str
    value: str
    distribution: str
    version: str
    problem: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "name": self.name,
            "value": self.value,
            "distribution": self.distribution,
            "version": self.version,
            "loadable": self.problem is None,
            "problem": self.problem,
        }


def load(family: str, use: str) -> Callable[..., Any]:
    """The factory that `use` names: an installed plug-in's name, or ``module:attribute``.

    Raises UnknownPluginError (with the nearest name and what is installed) where there is none or it cannot be imported,
    MissingDependencyError where its module says that it needs an extra.
    """
    if ":" in use:
        module, _, attribute = use.partition(":")
        point = EntryPoint(name=use, value=f"{module}:{attribute}", group=f"{OWN}.{family}")
        if not _well_formed(module, attribute):
            raise UnknownPluginError(f"{use!r} names no plug-in: write module:attribute, such as my_package.policies:Fair")
        return _import(point, family)
    found = _installed(family)
    if use not in found:
        close = nearest(use, found)
        maybe = f"; did you mean {close!r}?" if close else ""
        known = ", ".join(sorted(found)) or "none"
        raise UnknownPluginError(
            f"no plug-in for {family} is called {use!r}{maybe} (installed: {known}; one of your own: module:attribute)"
        )
    return _import(found[use], family)


def check(
    family: str,
    use: str,
    options: Mapping[str, Any],
    where: Where,
    *,
    given: tuple[str, ...] = (),
    names: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """Load a plug-in and hold `options` against its signature, without making it or reading any secret.

    `names` is what there is for options that name something configured, by kind. Raises `Problem`: unknown plug-in, unknown
    key, wrong type, unknown name, something missing, or (as `raised`) an extra that is not installed.
    """
    factory = _load_at(family, use, where)
    problems: list[Problem] = []
    for key, inner in _NESTED.items():
        if isinstance(options.get(key), Mapping):
            problems += problems_of(nested, inner, options[key], (*where, key))
    context = Context(plugin=nested, references=True, names=names)
    raise_all([*problems, *problems_of(read_table, factory, options, where, context=context, given=given)])


def nested(family: str, table: Mapping[str, Any], where: Where) -> Any:
    """A plug-in's table inside a plug-in's options: checked now, made by whoever takes it."""
    use, options = split_use(table, where)
    check(family, use, options, where, given=GIVEN.get(family, ()))
    return {"use": use, **options}


def create(
    family: str,
    use: str,
    options: Mapping[str, Any],
    *,
    where: str | Where,
    given: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Make a plug-in. Every option is a keyword argument of its factory, checked against signature and annotations.

    `where` is the place in the configuration, for messages (``"backends.claude"``). `given` are arguments that the host
    supplies, where the factory takes them; `options` may not set them. ``{"env": "NAME"}`` is looked up in `environ` (the
    process environment when None).

    Raises ConfigError (key, hint) for a wrong, missing or mistyped option and an unset variable; UnknownPluginError;
    MissingDependencyError; and what the factory itself raises.
    """
    try:
        return make(family, use, options, (where,) if isinstance(where, str) else where, given or {}, environ)
    except Problem as problem:
        raise problem.error() from problem.__cause__


def make(
    family: str, use: str, options: Mapping[str, Any], where: Where, given: Mapping[str, Any], environ: Mapping[str, str] | None
) -> Any:
    """As `create`, for those who know where a `Problem` stands in a file."""
    factory = _load_at(family, use, where)
    context = Context(plugin=nested, environ=os.environ if environ is None else environ, references=True)
    values = read_table(factory, options, where, context=context, given={*given, *GIVEN.get(family, ())})
    taken, more = options_of(factory)
    values |= {name: value for name, value in given.items() if more or name in taken}
    return offers(family, call(factory, values, where), where)


def offers(family: str, made: Any, where: Where) -> Any:
    """What was made, if it is what its family's contract says. Raises `Problem`."""
    missing = [name for name in _MEMBERS.get(family, ()) if not hasattr(made, name)]
    if missing:
        raise Problem(where, f"{type(made).__name__} is no {_singular(family)}: it lacks {', '.join(missing)}")
    return made


def plugins() -> list[PluginInfo]:
    """Every installed plug-in of every family, each loaded once to see whether it can be."""
    result = []
    for family in FAMILIES:
        for name, point in sorted(_installed(family).items()):
            try:
                _import(point, family)
                problem = None
            except CachespecError as error:
                problem = str(error)
            dist = point.dist
            result.append(
                PluginInfo(
                    family=family,
                    name=name,
                    value=point.value,
                    distribution="" if dist is None else dist.name,
                    version="" if dist is None else dist.version,
                    problem=problem,
                )
            )
    return result


def installed(family: str) -> list[str]:
    """The names of the installed plug-ins of a family, sorted. Imports none of them."""
    return sorted(_installed(family))


def takes(family: str, use: str, option: str) -> bool:
    """Whether a plug-in has an option of this name."""
    return option in options_of(load(family, use))[0]


def split_use(table: Mapping[str, Any], where: Where) -> tuple[str, dict[str, Any]]:
    """`use` and the options of a plug-in's table. Raises `Problem`."""
    options = dict(table)
    use = options.pop("use", None)
    if use is None:
        raise Problem(where, "'use' is missing", hint='name a plug-in: use = "..."')
    if not isinstance(use, str) or not use:
        raise Problem((*where, "use"), "must name a plug-in, as text")
    return use, options


def _load_at(family: str, use: str, where: Where) -> Callable[..., Any]:
    try:
        return load(family, use)
    except CachespecError as error:
        raise Problem((*where, "use"), str(error), raised=error) from error


def _installed(family: str) -> dict[str, EntryPoint]:
    """By name; our own first, so that no other package can take a built-in name over."""
    points = sorted(entry_points(group=f"{OWN}.{family}"), key=lambda p: p.dist is None or p.dist.name != OWN)
    found: dict[str, EntryPoint] = {}
    for point in points:
        found.setdefault(point.name, point)
    return found


def _import(point: EntryPoint, family: str) -> Callable[..., Any]:
    try:
        factory = importlib.import_module(point.module)
        for step in point.attr.split("."):
            factory = getattr(factory, step)
    except CachespecError:
        raise
    except Exception as error:
        # A plug-in's module is foreign code and may fail in any way; whoever named it wants to know how.
        raise UnknownPluginError(f"the plug-in {point.name!r} for {family} cannot be loaded: {_why(error)}") from error
    if not callable(factory):
        raise UnknownPluginError(f"the plug-in {point.name!r} for {family} cannot be loaded: {point.value} is not callable")
    return cast("Callable[..., Any]", factory)


def _why(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"no module {error.name!r} in {Path(sys.path[0] or '.').resolve()} or elsewhere on Python's path"
    return f"{type(error).__name__}: {error}" if not isinstance(error, AttributeError) else str(error)


def _well_formed(module: str, attribute: str) -> bool:
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def _singular(family: str) -> str:
    return {
        "backends": "backend",
        "ledgers": "ledger",
        "drafters": "drafter",
        "routing": "routing policy",
        "acceptance": "acceptance policy",
        "caching": "caching policy",
    }.get(family, family)
