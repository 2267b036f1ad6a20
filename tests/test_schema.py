"""The published schema accepts what the reader accepts, and refuses what it refuses."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from jsonschema import Draft202012Validator

from cachespec.annotations import PositiveInt, Share, Within
from cachespec.config import parse_config
from cachespec.errors import CachespecError, UnknownPluginError
from cachespec.schema import config_schema, schema_of

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
        ('use = "anthropic"', 'use = "vllm"'),
        ('model = "claude-sonnet-5-5"', ""),
        ('backends = ["laptop", "claude"]', "backends = 3"),
        ('"50.00"', "50.00"),
        ('"50.00"', '"1e3"'),
        ('"hard"', '"upgrade"'),
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


class Price(TypedDict):
    """A table with a fixed set of keys."""

    input: Decimal
    token: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with a signature."""

    size: PositiveInt
    where: Path | None = None
    part: Share = 0.5
    least: Annotated[int, Within(0)] = 0


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (Price, {"input": {"type": "string"}, "token": {"$ref": "#/$defs/env"}}),
        (Table, {"size": {"type": "integer", "minimum": 1}, "where": {"type": "string"}}),
        (
            Table,
            {
                "size": {},
                "part": {"type": "number", "minimum": 0, "maximum": 1, "default": 0.5},
                "least": {"type": "integer", "minimum": 0, "default": 0},
            },
        ),
    ],
)
def test_tables(annotation: Any, schema: dict[str, Any]) -> None:
    found = schema_of(annotation, references=True)
    assert found is not None
    assert found["additionalProperties"] is False
    assert found["required"] == [next(iter(schema))]
    for name, expected in schema.items():
        assert expected.items() <= found["properties"][name].items()


def test_other_annotations() -> None:
    assert schema_of(Any) == {}
    assert schema_of(Callable[[], int]) is None
    assert schema_of(Mapping[str, int]) == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert schema_of(int | bool) == {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}
    assert schema_of(Literal["a", 1]) == {"enum": ["a", 1]}


def test_a_plugin_that_cannot_be_loaded_is_accepted_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(family: str, use: str) -> Any:
        raise UnknownPluginError(use)

    monkeypatch.setattr("cachespec.registry.load", fail)
    validator = Draft202012Validator(config_schema())
    assert list(validator.iter_errors({"backends": {"a": {"use": "openai", "anything": 1}}})) == []
