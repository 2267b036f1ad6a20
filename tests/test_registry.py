"""Plug-ins: how they are found, how their options are held against their signatures, what they are made of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from cachespec.annotations import EnvRef, PositiveInt, dotted, nearest, suggestion
from cachespec.durations import Duration
from cachespec.errors import ConfigError, MissingDependencyError, UnknownPluginError
from cachespec.ledger.memory import MemoryLedger
from cachespec.options import options_of
from cachespec.policies.routing import Cheapest, Pinned
from cachespec.registry import create, load, plugins, wire
from cachespec.rules import Rule
from cachespec.testing import ScriptedBackend

if TYPE_CHECKING:
    import httpx2

HERE = __name__


class Price(TypedDict):
    """A table with a fixed set of keys."""

    input: Decimal
    note: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """A table with a signature."""

    depth: int = 1
    names: frozenset[str] = frozenset()


class Everything:
    """One option of each kind."""

    def __init__(
        self,
        *,
        text: str = "",
        count: PositiveInt = 1,
        ratio: float = 0.5,
        flag: bool = False,
        price: Decimal | None = None,
        wait: Duration | None = None,
        mode: Literal["fast", "slow", 3] = "fast",
        path: Path | None = None,
        many: Sequence[int] = (),
        table: Mapping[str, float] | None = None,
        either: int | float | None = None,
        money_or_table: Decimal | Nested | None = None,
        nested: Nested | None = None,
        typed: Price | None = None,
        api_key: str | None = None,
        http: httpx2.AsyncClient | None = None,
        call: Callable[[], int] | None = None,
        anything: Any = None,
    ) -> None:
        self.values = {k: v for k, v in locals().items() if k not in ("self",)}


def everything(environ: Mapping[str, str] | None = None, **options: Any) -> dict[str, Any]:
    made = create("middleware", f"{HERE}:Everything", options, where="plug", environ=environ or {})
    values: dict[str, Any] = made.values
    return {name: values[name] for name in options}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file under a name that `module:attribute` can reach, whatever the runner calls it."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"text": "x"}, {"text": "x"}),
        ({"ratio": 1}, {"ratio": 1.0}),
        ({"price": "0.40"}, {"price": Decimal("0.40")}),
        ({"wait": "800ms"}, {"wait": 0.8}),
        ({"wait": 3}, {"wait": 3.0}),
        ({"mode": 3}, {"mode": 3}),
        ({"path": "a/b"}, {"path": Path("a/b")}),
        ({"many": [1, 2]}, {"many": (1, 2)}),
        ({"table": {"a": 1, "b": 2.5}}, {"table": {"a": 1.0, "b": 2.5}}),
        ({"either": 2}, {"either": 2}),
        ({"either": 2.5}, {"either": 2.5}),
        ({"money_or_table": "1"}, {"money_or_table": Decimal(1)}),
        ({"money_or_table": {"depth": 4}}, {"money_or_table": Nested(depth=4)}),
        ({"nested": {"names": ["a"]}}, {"nested": Nested(names=frozenset({"a"}))}),
        ({"nested": {"names": "a"}}, {"nested": Nested(names=frozenset({"a"}))}),
        ({"typed": {"input": "2"}}, {"typed": {"input": Decimal(2)}}),
        ({"anything": {"env": "X"}}, {"anything": {"env": "X"}}),
        ({"price": None}, {"price": None}),
    ],
)
def test_values_as_annotated(options: dict[str, Any], values: dict[str, Any]) -> None:
    found = everything(**options)
    assert found == values
    assert [type(v) for v in found.values()] == [type(v) for v in values.values()]


def test_references_are_looked_up_when_the_plugin_is_made() -> None:
    assert everything({"K": "secret"}, api_key={"env": "K"}, text={"env": "K"}) == {"api_key": "secret", "text": "secret"}
    with pytest.raises(ConfigError, match="variable K is not set"):
        everything({}, api_key={"env": "K"})


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"texd": 1}, "plug.texd", "did you mean 'text'"),
        ({"text": 1}, "plug.text", "must be text, not 1"),
        ({"flag": 1}, "plug.flag", "must be true or false, not 1"),
        ({"count": True}, "plug.count", "whole number above 0, not true"),
        ({"ratio": True}, "plug.ratio", "must be a number, not true"),
        ({"ratio": float("inf")}, "plug.ratio", "must be a number"),
        ({"price": 0.4}, "plug.price", 'money is written as text: "0.4"'),
        ({"price": "1e3"}, "plug.price", "amount of USD"),
        ({"mode": "fsat"}, "plug.mode", "did you mean 'fast'"),
        ({"mode": "3"}, "plug.mode", "one of"),
        ({"many": [1, "2"]}, "plug.many[1]", "must be a whole number, not '2'"),
        ({"many": 1}, "plug.many", "must be a list"),
        ({"table": {"a": "b"}}, "plug.table.a", "must be a number"),
        ({"either": "x"}, "plug.either", "must be a whole number or a number"),
        ({"money_or_table": {"dept": 4}}, "plug.money_or_table.dept", "did you mean 'depth'"),
        ({"money_or_table": 4}, "plug.money_or_table", "or a table"),
        ({"nested": []}, "plug.nested", "must be a table, not a list"),
        ({"typed": {}}, "plug.typed", "'input' is missing"),
        ({"typed": {"input": "1", "not": "x"}}, "plug.typed.not", "did you mean 'note'"),
        ({"api_key": "sk-1"}, "plug.api_key", "not written into a file"),
        ({"api_key": 5}, "plug.api_key", "must name a variable"),
        ({"http": "x"}, "plug.http", "cannot be set in a file"),
        ({"call": "x"}, "plug.call", "cannot be set in a file"),
    ],
)
def test_wrong_options(options: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        everything(**options)
    assert caught.value.key == key
    assert message in str(caught.value)
    assert "sk-1" not in str(caught.value)


def needs(*, name: str, size: int) -> tuple[str, int]:
    return name, size


def open_ended(**options: Any) -> dict[str, Any]:
    return options


def raises_value_error(*, size: int = 0) -> None:
    raise ValueError(f"no size {size}")


def raises_missing(*, size: int = 0) -> None:
    raise MissingDependencyError("needs more", extra="torch")


def raises_config_error(*, size: int = 0) -> None:
    raise ConfigError("is odd", key="size")


def make(use: str, options: Mapping[str, Any], **more: Any) -> Any:
    return create("middleware", f"{HERE}:{use}", options, where="plug", **more)


def test_what_the_host_gives_is_not_for_the_file() -> None:
    assert make("needs", {"size": 3}, given={"name": "x", "other": 1}) == ("x", 3)
    with pytest.raises(ConfigError, match="plug: 'size' is missing"):
        make("needs", {}, given={"name": "x"})
    with pytest.raises(ConfigError, match=r"plug\.name: unknown key"):
        make("needs", {"size": 3, "name": "y"}, given={"name": "x"})
    assert make("open_ended", {"a": 1}, given={"name": "x"}) == {"a": 1, "name": "x"}


def test_what_a_factory_raises() -> None:
    with pytest.raises(ConfigError, match="plug: no size 4"):
        make("raises_value_error", {"size": 4})
    with pytest.raises(ConfigError, match=r"plug\.size: is odd"):
        make("raises_config_error", {})
    with pytest.raises(MissingDependencyError, match=r"cachespec\[torch\]"):
        make("raises_missing", {})


def test_a_plugin_must_be_what_its_family_says() -> None:
    with pytest.raises(ConfigError, match="dict is no routing policy: it lacks rank"):
        create("routing", f"{HERE}:open_ended", {}, where="policies.routing")


def test_unknown_names() -> None:
    with pytest.raises(UnknownPluginError, match="did you mean 'cheapest'") as caught:
        load("routing", "cheepest")
    assert "balanced, cheapest" in str(caught.value)
    for family, use in (("caching", "clairvoyant"), ("acceptance", "always"), ("drafters", "oracle"), ("backends", "vllm")):
        with pytest.raises(UnknownPluginError, match=f"no plug-in for {family} is called '{use}'"):
            load(family, use)
    with pytest.raises(UnknownPluginError, match="not callable"):
        load("routing", f"{HERE}:HERE")


def test_names_and_paths_load_the_same() -> None:
    assert load("routing", "cheapest") is Cheapest
    assert load("routing", "cachespec.policies.routing:Cheapest") is Cheapest


class _Distribution:
    def __init__(self, name: str) -> None:
        self.name, self.version = name, "1.0"


def _points(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str, str]) -> None:
    made = []
    for dist, name, value in points:
        point = EntryPoint(name=name, value=value, group="cachespec.routing")
        vars(point)["dist"] = _Distribution(dist)
        made.append(point)
    monkeypatch.setattr("cachespec.plugins.entry_points", lambda group: made if group == "cachespec.routing" else [])


def test_installed_plugins_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _points(
        monkeypatch,
        ("other", "cheapest", f"{HERE}:open_ended"),
        ("cachespec", "cheapest", "cachespec.policies.routing:Cheapest"),
        ("other", "fair", f"{HERE}:open_ended"),
        ("other", "broken", "no_such_module:Thing"),
    )
    assert load("routing", "fair") is open_ended
    assert load("routing", "cheapest") is Cheapest, "nobody takes a built-in name over"
    found = {plugin.name: plugin for plugin in plugins()}
    assert list(found) == ["broken", "cheapest", "fair"]
    assert "no module 'no_such_module'" in (found["broken"].problem or "")
    assert found["fair"].to_dict() == {
        "family": "routing",
        "name": "fair",
        "value": f"{HERE}:open_ended",
        "distribution": "other",
        "version": "1.0",
        "loadable": True,
        "problem": None,
    }


def test_every_plugin_of_our_own_loads() -> None:
    found = [plugin for plugin in plugins() if plugin.distribution == "cachespec"]
    assert {("backends", "llamacpp"), ("routing", "cheapest"), ("ledgers", "sqlite")} <= {(p.family, p.name) for p in found}
    assert [p.problem for p in found if p.problem] == []


def test_loading_backends_loads_no_sdk() -> None:
    code = (
        "import sys; from cachespec.registry import plugins; plugins();"
        "print([m for m in ('openai', 'anthropic', 'torch', 'llama_cpp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wire_takes_objects_and_tables() -> None:
    backend, ledger = ScriptedBackend(name="a"), MemoryLedger()
    wired = wire(
        backends={"a": backend, "b": {"use": "llamacpp", "model": "smollm2", "cost": "0"}},
        models={"both": ["a", "b"]},
        policies={"routing": {"use": "pinned", "backend": "b"}, "budgets": [{"scope": "overall", "limit": Decimal(3)}]},
        ledger=ledger,
        model="both",
        timeout="5s",
    )
    assert wired.backends["a"] is backend
    assert wired.backends["b"].name == "b"
    assert wired.ledger is ledger
    assert wired.routing == Pinned(backend="b")
    assert wired.config.timeout == 5.0
    assert wired.config.budgets[0].limit == 3
    assert wired.config.backends["a"].made
    policy = Cheapest()
    assert wire(backends={"a": backend}, policies={"routing": policy}, timeout=None).routing is policy


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        ({"backends": {}}, "backends", "no backend"),
        ({"backends": {"a": 3}}, "backends.a", "int is no backend"),
        ({"backends": {"a": {"use": "llamacpp"}}}, "backends.a", "'model' is missing"),
        ({"models": {"m": ["x"]}}, "models.m.backends[0]", "'x'"),
        ({"models": {"m": {"backends": ["x"]}}}, "models.m.backends[0]", "'x'"),
        ({"policies": {"routing": Pinned(backend="aa")}}, "policies.routing.backend", "'aa'"),
        ({"policies": {"rules": [Rule(only=frozenset({"aa"}))]}}, "policies.rules[0].only[0]", "'aa'"),
        ({"model": "scripted-modle"}, "client.model", "'scripted-modle'"),
        ({"policies": {"rooting": {}}}, "policies.rooting", "'routing'"),
        ({"policies": {"routing": 1}}, "policies.routing", "no routing policy"),
        ({"ledger": object()}, "client.ledger", "no ledger"),
        ({"timeout": "soon"}, "client.timeout", "must be a duration"),
    ],
)
def test_wrong_wiring(arguments: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wire(**{"backends": {"a": ScriptedBackend(name="a")}, **arguments})
    assert caught.value.key == key
    assert message in str(caught.value)


def annotated(*, plain: Annotated[int, "unknown mark"] = 1, missing: NoSuchName = None) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Annotations that mean nothing here."""


def test_annotations_that_cannot_be_resolved_are_for_code_alone() -> None:
    options, more = options_of(annotated)
    assert list(options) == ["plain", "missing"]
    assert not more
    with pytest.raises(ConfigError, match="cannot be set in a file"):
        create("middleware", f"{HERE}:annotated", {"missing": 1}, where="plug")
    assert create("middleware", f"{HERE}:annotated", {"plain": 2}, where="plug") is None


def test_words() -> None:
    assert dotted(("policies", "budgets", 1, "limit")) == "policies.budgets[1].limit"
    assert dotted(("backends", "my.one", "api-key")) == 'backends."my.one".api-key'
    assert nearest("Timout", ["timeout", "model"]) == "timeout"
    assert nearest("zzz", ["timeout"]) is None
    assert suggestion("zzz", ["b", "a"]) == "known: a, b"
    assert suggestion("zzz", []) == "known: none"
    assert EnvRef(env="X") == EnvRef(env="X")
