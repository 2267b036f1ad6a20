"""``config check``: everything that is wrong with a configuration file in one pass, and what this machine lacks for it.

What is wrong in one place hides nothing that is wrong in another: tables and names are read by `config`, then every backend
whose table is sound is made (not started), an option at a time where one is refused, its model's file is looked for, and
whether its price is known, without which a hard budget refuses whatever it would answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cachespec import registry
from cachespec.annotations import Where, dotted, is_secret_name
from cachespec.backends.base import Backend, Located
from cachespec.config import Config, PluginSpec, read_config, references, table_at
from cachespec.errors import CachespecError, ConfigError, MissingDependencyError
from cachespec.options import Problem, options_of, problems_of
from cachespec.toml_source import line_of, parse, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of `config check`. Errors make the file unusable; a warning is about this machine or a likely slip."""

    level: Literal["error", "warning"]
    message: str
    path: str | None = None
    line: int | None = None
    key: str | None = None
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        names = ("level", "path", "line", "key", "message", "hint")
        return {name: getattr(self, name) for name in names}


def check_config(path: str | Path, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Everything that is wrong with a file, in its order; then what this machine lacks for it.

    No finding: `connect` will accept it. Starts, sends and changes nothing.
    """
    try:
        text = read_text(path)
    except ConfigError as error:
        return [_finding(error)]
    return check_text(text, str(path), environ)


def check_text(text: str, path: str, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """The same for a text; `path` is for messages. What is wrong in one place hides nothing that is wrong in another."""
    environ = os.environ if environ is None else environ
    try:
        tree = parse(text, path)
    except ConfigError as error:
        return [_finding(error)]
    problems = problems_of(read_config, tree, path, text)
    wrong = {problem.where[:2] for problem in problems}
    sound = {
        name: PluginSpec(use=table["use"], options={key: value for key, value in table.items() if key != "use"})
        for name, table in table_at(tree, "backends").items()
        if ("backends", name) not in wrong and isinstance(table, Mapping) and "use" in table
    }
    config = Config(backends=sound, path=path, text=text)
    policies = {
        family: PluginSpec(use=table["use"], options={key: value for key, value in table.items() if key != "use"})
        for family in registry.POLICIES
        if (table := table_at(tree, "policies", family)) and ("policies", family) not in wrong
    }
    missing = {where: name for where, name in references(tree) if not environ.get(name)}
    needs = [_needs_price(tree, name) for name in sound]
    found = [f for name, need in zip(sound, needs, strict=True) for f in _try_backend(config, name, environ, missing, need)]
    for family, spec in policies.items():
        try:
            registry.build_policy(config, family, spec, environ)
        except CachespecError as error:
            found.append(_finding(error))
    warnings = [Problem(where, f"the environment variable {name} is not set") for where, name in missing.items()]
    models = [table for table in table_at(tree, "models").values() if isinstance(table, Mapping)]
    if models:
        unused = sound.keys() - {name for table in models for name in table.get("backends", ()) if isinstance(name, str)}
        told = "no alias of [models] uses this backend; requests must name it"
        warnings += [Problem(("backends", name), told) for name in sorted(unused)]
    found += [_told(problem, path, text) for problem in problems]
    found += [_told(problem, path, text, "warning") for problem in warnings]
    return sorted(found, key=lambda finding: (finding.level, finding.line or 0))


def _try_backend(
    config: Config, name: str, environ: Mapping[str, str], missing: Mapping[Where, str], needs: str | None
) -> Iterator[Finding]:
    """What a backend itself says of its options, each wrong one apart, whether a local model's file is there, and whether its
    price is; `needs` is the budget that refuses it without one.

    A secret that is not set here is no reason not to ask for the rest.
    """
    where: Where = ("backends", name)
    lacking = {path[-1] for path in missing if path[:2] == where}
    if not all(is_secret_name(str(key)) for key in lacking):
        return
    stand_in = "<unset>"
    environ = {**environ, stand_in: "unset", **{missing[path]: "unset" for path in missing if path[:2] == where}}
    options = dict(config.backends[name].options)
    takes, _ = options_of(registry.load("backends", config.backends[name].use))
    for _ in range(len(takes) + 1):
        spec = replace(config.backends[name], options=options)
        try:
            backend = registry.build_backend(replace(config, backends={name: spec}), name, environ)
            if isinstance(backend, Located):
                yield from _locate(config, where, backend)
            if len(options) >= len(config.backends[name].options):  # else what it costs may be what was wrong
                yield from _priced(config, where, backend, needs)
            break
        except MissingDependencyError as error:
            yield Finding(level="warning", message=f"backend {name}: {error}", path=config.path)
            return
        except ConfigError as error:
            error = config.place(error, where)
            key = (error.key or "").removeprefix(dotted(where)).strip(".").partition(".")[0]
            # No key in the environment is this machine's lack, not the file's fault.
            lacks = is_secret_name(key) and key not in options
            yield _finding(error, "warning" if lacks else "error")
            if lacks and key in takes:
                options[key] = {"env": stand_in}
            elif key in options and not takes[key].required:
                del options[key]  # without it, what else is wrong?
            else:
                break
        except CachespecError as error:
            yield _finding(error)
            break


def _locate(config: Config, where: Where, backend: Located) -> Iterator[Finding]:
    try:
        backend.locate()
    except ConfigError as error:
        yield _finding(config.place(error, where), "warning")  # another machine may have it


def _needs_price(tree: Mapping[str, Any], backend: str) -> str | None:
    """The first hard budget, as a key of the file, that requests to this backend may fall under."""
    budgets = table_at(tree, "policies").get("budgets")
    for i, budget in enumerate(budgets if isinstance(budgets, list) else ()):
        if not isinstance(budget, Mapping) or budget.get("mode", "hard") != "hard":
            continue
        key = budget.get("key") if budget.get("scope") == "alias" else None
        if not isinstance(key, str):
            return dotted(("policies", "budgets", i))
        alias = table_at(tree, "models", key).get("backends")
        names = alias if isinstance(alias, list) else (key,)
        if backend in names or key.rpartition(":")[2] == table_at(tree, "backends", backend).get("model"):
            return dotted(("policies", "budgets", i))
    return None


def _priced(config: Config, where: Where, backend: Backend, needs: str | None) -> Iterator[Finding]:
    """That a price is not known: where a hard budget `needs` it, and where the model's name is likely a slip."""
    if backend.rates is not None and backend.rates.worst(input_tokens=1, output_tokens=1, seconds=1.0) is not None:
        return
    from cachespec._price_table import nearest_priced

    url = getattr(backend, "base_url", None)
    near = nearest_priced(backend.model, url) if isinstance(url, str) else None
    if needs is None and near is None:
        return
    local = backend.capabilities.local and not isinstance(url, str)
    remedy = 'cost = "0", where it is paid already' if local else 'prices = { input = "3.00", output = "15.00" }, what it costs'
    what = f"the price of {backend.model!r} is not known"
    told = what if needs is None else f"{what}, and the hard budget {needs} refuses what has no price (PriceUnknownError)"
    hint = remedy if near is None or near == backend.model else f"did you mean {near!r}? Else {remedy}"
    yield _told(Problem((*where, "model"), told, hint=hint), config.path or "", config.text or "", "warning")


def _told(problem: Problem, path: str, text: str, level: Literal["error", "warning"] = "error") -> Finding:
    if isinstance(problem.raised, MissingDependencyError):
        level = "warning"  # another machine may have it
    line, key = line_of(text, problem.where), dotted(problem.where) or None
    return Finding(level=level, message=problem.message, path=path, line=line, key=key, hint=problem.hint)


def _finding(error: CachespecError, level: Literal["error", "warning"] = "error") -> Finding:
    if isinstance(error, ConfigError):
        return Finding(level=level, message=error.message, path=error.path, line=error.line, key=error.key, hint=error.hint)
    return Finding(level=level, message=str(error))
