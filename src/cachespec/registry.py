"""Plug-ins: finding, checking and making them. The only module that loads an implementation.

A family is an entry-point group ``cachespec.<family>``. `use` names an installed plug-in of the family, or something
importable as ``module:attribute``. Nothing is looked up or imported before it is asked for, and nothing is remembered.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from cachespec.annotations import Where, dotted, is_secret_name, nearest
from cachespec.errors import CachespecError, UnknownPluginError
from cachespec.options import Context, Problem, call, options_of, read_table

if TYPE_CHECKING:
    from cachespec.backends.base import Backend
    from cachespec.config import Config, PluginSpec
    from cachespec.ledger.base import Ledger
    from cachespec.policies.base import RoutingPolicy

FAMILIES = ("backends", "routing", "ledgers", "caching", "acceptance", "drafters", "middleware")
OWN = "cachespec"
# What the host gives to a family's factories: a file may not set it.
GIVEN: Mapping[str, tuple[str, ...]] = MappingProxyType({"backends": ("name",)})
# Options that are a plug-in's table themselves.
_NESTED: Mapping[str, str] = MappingProxyType({"draft": "drafters"})
# What a made plug-in must offer, as its family's base.py says: checked when it is made, not when a request needs it.
_MEMBERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "backends": ("name", "model", "rates", "capabilities", "start", "check", "estimate", "wire", "open", "aclose"),
        "routing": ("rank",),
        "ledgers": ("reserve", "settle", "release", "snapshot", "entries", "totals", "aclose"),
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


def check(family: str, use: str, options: Mapping[str, Any], where: Where, *, given: tuple[str, ...] = ()) -> None:
    """Load a plug-in and hold `options` against its signature, without making it or reading any secret.

    Raises `Problem` (unknown plug-in, unknown key, wrong type, something missing) or MissingDependencyError.
    """
    factory = _load_at(family, use, where)
    for key, inner in _NESTED.items():
        if isinstance(options.get(key), Mapping):
            nested(inner, options[key], (*where, key))
    read_table(factory, options, where, context=Context(plugin=nested, references=True), given=given)


def nested(family: str, table: Mapping[str, Any], where: Where) -> Any:
    """A plug-in's table inside a plug-in's options: checked now, made by whoever takes it."""
    use, options = split_use(table, where)
    check(family, use, options, where)
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
        return _make(family, use, options, (where,) if isinstance(where, str) else where, given or {}, environ)
    except Problem as problem:
        raise problem.error() from problem.__cause__


def _make(
    family: str, use: str, options: Mapping[str, Any], where: Where, given: Mapping[str, Any], environ: Mapping[str, str] | None
) -> Any:
    factory = _load_at(family, use, where)
    context = Context(plugin=nested, environ=os.environ if environ is None else environ, references=True)
    values = read_table(factory, options, where, context=context, given=tuple(given))
    taken, more = options_of(factory)
    values |= {name: value for name, value in given.items() if more or name in taken}
    return _offers(family, call(factory, values, where), where)


def _offers(family: str, made: Any, where: Where) -> Any:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """A configuration with what it names, made; nothing is started."""

    config: Config
    backends: Mapping[str, Backend]
    ledger: Ledger
    routing: RoutingPolicy


def build(config: Config, environ: Mapping[str, str] | None = None) -> Wired:
    """Make what a configuration names. Raises as `create`, with file and line."""
    return _wire(config, {}, environ)


def build_backend(config: Config, name: str, environ: Mapping[str, str] | None = None) -> Backend:
    """Make one of the backends of a configuration. Raises as `build`."""
    spec, where = config.backends[name], ("backends", name)
    try:
        return cast("Backend", _make("backends", spec.use, spec.options, where, {"name": name}, environ))
    except Problem as problem:
        raise config.error(problem) from problem.__cause__


def wire(
    *,
    backends: Mapping[str, Any],
    models: Mapping[str, Any] | None = None,
    policies: Mapping[str, Any] | None = None,
    ledger: Any = None,
    environ: Mapping[str, str] | None = None,
    **client: Any,
) -> Wired:
    """The same without a file: a backend, the ledger and ``policies["routing"]`` may each be a table or an object.

    Unlike a file, a table in code may hold a secret itself: it is handed over like a variable's value, so that no
    configuration, message or `repr` ever has it. `client` holds the other keys of ``[client]``. Raises ConfigError with the
    key, and as `create`.
    """
    from cachespec.config import PluginSpec, read_config

    made: dict[Where, Any] = {}
    handed: dict[str, str] = {}

    def table(value: Any, where: Where) -> Any:
        if isinstance(value, Mapping):
            return {key: hidden(item, (*where, key)) for key, item in value.items()}
        if value is None:
            return value
        made[where] = value
        return PluginSpec(use=f"{type(value).__module__}:{type(value).__qualname__}", made=True)

    def hidden(item: Any, where: Where) -> Any:
        if not isinstance(item, str) or not is_secret_name(str(where[-1])):
            return item
        name = f"<{dotted(where)}>"
        handed[name] = item
        return {"env": name}

    tree: dict[str, Any] = {
        "client": dict(client),
        "backends": {name: table(value, ("backends", name)) for name, value in backends.items()},
        "models": {alias: {"backends": names} for alias, names in (models or {}).items()},
        "policies": dict(policies or {}),
    }
    if ledger is not None:
        tree["client"]["ledger"] = table(ledger, ("client", "ledger"))
    if "routing" in tree["policies"]:
        tree["policies"]["routing"] = table(tree["policies"]["routing"], ("policies", "routing"))
    try:
        config = read_config(tree)
    except Problem as problem:
        raise problem.error() from problem.__cause__
    return _wire(config, made, {**(os.environ if environ is None else environ), **handed} if handed else environ)


def _wire(config: Config, made: Mapping[Where, Any], environ: Mapping[str, str] | None) -> Wired:
    def get(family: str, spec: PluginSpec, where: Where, given: Mapping[str, Any]) -> Any:
        if where in made:
            return _offers(family, made[where], where)
        return _make(family, spec.use, spec.options, where, given, environ)

    try:
        backends = {n: get("backends", spec, ("backends", n), {"name": n}) for n, spec in config.backends.items()}
        routing = get("routing", config.routing, ("policies", "routing"), {})
        # The ledger comes last: it may open a file, and nothing may be left open when another part fails.
        ledger = get("ledgers", config.ledger, ("client", "ledger"), {})
    except Problem as problem:
        raise config.error(problem) from problem.__cause__
    return Wired(config=config, backends=backends, ledger=ledger, routing=routing)


def _load_at(family: str, use: str, where: Where) -> Callable[..., Any]:
    try:
        return load(family, use)
    except UnknownPluginError as error:
        raise Problem((*where, "use"), str(error), unknown_plugin=True) from error


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
        return f"no module {error.name!r} can be imported here"
    return f"{type(error).__name__}: {error}" if not isinstance(error, AttributeError) else str(error)


def _well_formed(module: str, attribute: str) -> bool:
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def _singular(family: str) -> str:
    return {"backends": "backend", "ledgers": "ledger", "drafters": "drafter", "routing": "routing policy"}.get(family, family)
