"""The published schema accepts what the reader accepts, and refuses what it refuses."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cachespec.config import parse_config
from cachespec.errors import CachespecError
from cachespec.schema import config_schema

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLE = """
[client]
model = "assistant"
ledger = { use = "sqlite", path = "cachespec.db" }
timeout = "120s"
max_output_tokens = 4096
[backends.claude]
use = "anthropic"
model = "claude-sonnet-5-5"
api_key = { env = "ANTHROPIC_API_KEY" }
[backends.laptop]
use = "llamacpp"
model = "smollm2"
context = 8192
cost = { per_hour = "0.40" }
[backends.own]
use = "my_package.backends:Mine"
whatever = 1
[models.assistant]
backends = ["laptop", "claude"]
[policies]
routing = { use = "cheapest", max_ttft = "800ms" }
budgets = [{ scope = "tenant", limit = "50.00", per = "day", mode = "hard" }]
rules = [{ when = { tags = ["private"] }, only = ["laptop"] }]
"""


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = config_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(json.loads(json.dumps(schema)))


def test_it_accepts_the_example(validator: Draft202012Validator) -> None:
    assert list(validator.iter_errors(tomllib.loads(EXAMPLE))) == []


def test_it_accepts_the_readme(validator: Draft202012Validator) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    for block in blocks:
        assert list(validator.iter_errors(tomllib.loads(block))) == []
        parse_config(block, "README.md")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[client]", "[clinet]"),
        ("timeout", "timout"),
        ('"120s"', '"120 s"'),
        ('"120s"', "0"),
        ("4096", '"4096"'),
        ("4096", "0"),
        ("max_ttft", "max_tft"),
        ("context", "contxt"),
        ("8192", '"8192"'),
        ('{ env = "ANTHROPIC_API_KEY" }', '"sk-secret"'),
        ('{ env = "ANTHROPIC_API_KEY" }', '{ evn = "ANTHROPIC_API_KEY" }'),
        ('use = "sqlite"', 'use = "sqlit"'),
        ('use = "anthropic"', 'use = "torch"'),
        ('model = "claude-sonnet-5-5"', ""),
        ('backends = ["laptop", "claude"]', "backends = 3"),
        ('"50.00"', "50.00"),
        ('"50.00"', '"1e3"'),
        ('"hard"', '"downgrade"'),
        ('scope = "tenant"', 'scope = "tenent"'),
        ("only =", "onyl ="),
        ('when = { tags = ["private"] }', 'when = { tag = ["private"] }'),
        ('model = "assistant"', 'model = { env = "X" }'),
    ],
)
def test_it_refuses_what_the_reader_refuses(validator: Draft202012Validator, old: str, new: str) -> None:
    assert old in EXAMPLE
    text = EXAMPLE.replace(old, new, 1)
    assert list(validator.iter_errors(tomllib.loads(text))) != []
    with pytest.raises(CachespecError):
        parse_config(text.replace('[backends.own]\nuse = "my_package.backends:Mine"\nwhatever = 1\n', ""))


def test_what_only_code_can_give_is_not_in_it() -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value.get("properties", ())) | {k for v in value.values() for k in keys(v)}
        return {k for v in value for k in keys(v)} if isinstance(value, list) else set()

    found = keys(config_schema())
    assert {"api_key", "max_ttft", "path", "context"} <= found
    assert not {"name", "clock", "http"} & found
