"""From a configuration to what it names: backends, policies and a ledger, wired and not started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from cachespec.annotations import Where, dotted, is_secret_name
from cachespec.options import Problem, check_names
from cachespec.plugins import (
    FAMILIES,
    GIVEN,
    OWN,
    PluginInfo,
    check,
    create,
    installed,
    load,
    make,
    nested,
    offers,
    plugins,
    split_use,
    takes,
)

if TYPE_CHECKING:
    from cachespec.backends.base import Backend
    from cachespec.caching import CachingPolicy
    from cachespec.config import Config, PluginSpec
    from cachespec.ledger.base import Ledger
    from cachespec.policies.base import RoutingPolicy

__all__ = [
    "FAMILIES",
    "GIVEN",
    "OWN",
    "POLICIES",
    "PluginInfo",
    "Wired",
    "build",
    "build_backend",
    "build_policy",
    "check",
    "create",
    "installed",
    "load",
    "nested",
    "plugins",
    "rebuild",
    "split_use",
    "takes",
    "wire",
]


POLICIES = ("routing", "caching", "acceptance")
"""Families of which a configuration names one in ``[policies]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """A configuration with what it names, made; nothing is started."""

    config: Config
    backends: Mapping[str, Backend]
    ledger: Ledger
    routing: RoutingPolicy
    caching: CachingPolicy
    secret: str | None = field(default=None, repr=False)


def build(config: Config, environ: Mapping[str, str] | None = None) -> Wired:
    """Make what a configuration names. Raises as `create`, with file and line."""
    return _wire(config, {}, environ)


def rebuild(config: Config, before: Wired, environ: Mapping[str, str] | None = None) -> Wired:
    """The same for the next generation of a configuration: what is as it was is taken over, not made again.

    Raises as `build`, and ConfigError where another ledger is named: what was spent is in the one that is open.
    """
    old = before.config
    if config.ledger != old.ledger:
        problem = Problem(("client", "ledger"), "cannot change while the client runs", hint="restart, or leave it as it was")
        raise config.error(problem)
    kept: dict[Where, Any] = {("client", "ledger"): before.ledger}
    for name, spec in config.backends.items():
        if old.backends.get(name) == spec and _acceptance(config, spec, {}) == _acceptance(old, spec, {}):
            kept["backends", name] = before.backends[name]
    if config.routing == old.routing:
        kept["policies", "routing"] = before.routing
    if config.caching == old.caching:
        kept["policies", "caching"] = before.caching
    return _wire(config, kept, environ)


def build_backend(config: Config, name: str, environ: Mapping[str, str] | None = None) -> Backend:
    """Make one of the backends of a configuration. Raises as `build`."""
    spec = config.backends[name]
    given = {"name": name, **_acceptance(config, spec, {})}
    return cast("Backend", _build_one(config, "backends", spec, ("backends", name), given, environ))


def build_policy(config: Config, family: str, spec: PluginSpec, environ: Mapping[str, str] | None = None) -> Any:
    """Make a policy of one of the families `POLICIES`, as if a configuration named it. Raises as `build`."""
    return _build_one(config, family, spec, ("policies", family), {}, environ)


def _build_one(
    config: Config, family: str, spec: PluginSpec, where: Where, given: Mapping[str, Any], environ: Mapping[str, str] | None
) -> Any:
    try:
        return make(family, spec.use, spec.options, where, given, environ)
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
    """The same without a file: a backend, the ledger and the policies ``routing``, ``caching`` and ``acceptance`` are tables or
    objects.

    Unlike a file, a table in code may hold a secret itself: it is handed over like a variable's value, so that no
    configuration, message or `repr` ever has it. An alias is a list of backends, or a table as in the file. `client` holds
    the other keys of ``[client]``. Raises ConfigError with the key, and as `create`.
    """
    from cachespec.config import PluginSpec, names_in, read_config

    made: dict[Where, Any] = {}
    handed: dict[str, str] = {}

    def table(value: Any, where: Where) -> Any:
        if isinstance(value, Mapping):
            return {key: hidden(item, (*where, key)) for key, item in value.items()}
        if value is None:
            return value
        made[where] = value
        model = getattr(value, "model", None)
        options = {"model": model} if isinstance(model, str) else {}
        return PluginSpec(use=f"{type(value).__module__}:{type(value).__qualname__}", options=options, made=True)

    def hidden(item: Any, where: Where) -> Any:
        if not isinstance(item, str) or not is_secret_name(str(where[-1])):
            return item
        name = f"<{dotted(where)}>"
        handed[name] = item
        return {"env": name}

    tree: dict[str, Any] = {
        "client": {key: hidden(value, ("client", key)) for key, value in client.items()},
        "backends": {name: table(value, ("backends", name)) for name, value in backends.items()},
        "models": {a: names if isinstance(names, Mapping) else {"backends": names} for a, names in (models or {}).items()},
        "policies": dict(policies or {}),
    }
    if ledger is not None:
        tree["client"]["ledger"] = table(ledger, ("client", "ledger"))
    for policy in POLICIES:
        if policy in tree["policies"]:
            tree["policies"][policy] = table(tree["policies"][policy], ("policies", policy))
    try:
        config = read_config(tree)
        for where, value in made.items():
            check_names(value, type(value), where, names_in(tree))
    except Problem as problem:
        raise problem.error() from problem.__cause__
    return _wire(config, made, {**(os.environ if environ is None else environ), **handed} if handed else environ)


def _wire(config: Config, made: Mapping[Where, Any], environ: Mapping[str, str] | None) -> Wired:
    def get(family: str, spec: PluginSpec, where: Where, given: Mapping[str, Any]) -> Any:
        if where in made:
            return offers(family, made[where], where)
        return make(family, spec.use, spec.options, where, given, environ)

    try:
        if config.acceptance is not None:  # what is wrong with it is told where it stands, not at the backends that take it
            get("acceptance", config.acceptance, ("policies", "acceptance"), {})
        secret = None if config.secret is None else _variable(config.secret.env, ("client", "secret"), environ)
        backends = {
            n: get("backends", spec, ("backends", n), {"name": n, **_acceptance(config, spec, made)})
            for n, spec in config.backends.items()
        }
        routing = get("routing", config.routing, ("policies", "routing"), {})
        caching = get("caching", config.caching, ("policies", "caching"), {})
        # The ledger comes last: it may open a file, and nothing may be left open when another part fails.
        ledger = get("ledgers", config.ledger, ("client", "ledger"), {})
    except Problem as problem:
        raise config.error(problem) from problem.__cause__
    return Wired(config=config, backends=backends, ledger=ledger, routing=routing, caching=caching, secret=secret)


def _variable(name: str, where: Where, environ: Mapping[str, str] | None) -> str:
    found = (os.environ if environ is None else environ).get(name)
    if not found:
        raise Problem(where, f"the environment variable {name} is not set")
    return found


def _acceptance(config: Config, spec: PluginSpec, made: Mapping[Where, Any]) -> dict[str, Any]:
    """The acceptance policy of all backends that speculate, for one that takes it and has none of its own."""
    policy = config.acceptance
    if policy is None or spec.made or "acceptance" in spec.options or not takes("backends", spec.use, "acceptance"):
        return {}
    return {"acceptance": made.get(("policies", "acceptance"), {"use": policy.use, **policy.options})}
