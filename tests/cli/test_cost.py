"""``cachespec cost`` and ``cachespec ledger``."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result
from tests.cli.conftest import failure

from cachespec.cli._io import money
from cachespec.cli.main import cli
from cachespec.ledger.base import Hold, Settlement
from cachespec.ledger.sqlite import SqliteLedger
from cachespec.usage import Usage

CLAUDE = {
    "provider": "anthropic",
    "model": "claude-sonnet-5-5",
    "api": "messages",
    "usage": {
        "input_tokens": 4,
        "cache_creation_input_tokens": 300,
        "cache_read_input_tokens": 9_000,
        "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
        "output_tokens": 290,
        "output_tokens_details": {"thinking_tokens": 19},
        "service_tier": "standard",
    },
    "at": "2026-11-29T12:00:00Z",
}


def run(*args: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, args, input=text)


def cost(document: Any, *args: str) -> Result:
    return run("cost", "-", *args, text=json.dumps(document))


def test_the_json_document_is_the_contract() -> None:
    result = cost(CLAUDE, "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document.pop("source").startswith("genai-prices ")
    assert document.pop("price_date") >= "2026-11-01"
    assert document == {
        "usage": {
            "input_tokens": 9304,
            "uncached": 4,
            "cache_read": 9000,
            "cache_write": {"5m": 100, "1h": 200},
            "output": 290,
            "reasoning": 19,
            "drafted": None,
            "accepted": None,
        },
        "cost": "0.004858",
        "estimated": False,
    }


def test_searches_at_the_vendor_are_told_and_priced() -> None:
    usage = {"input_tokens": 1000, "output_tokens": 100, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    searched = {**usage, "server_tool_use": {"web_search_requests": 5}}
    document = {"provider": "anthropic", "model": "claude-opus-5-5", "api": "messages", "usage": searched}
    told = json.loads(cost(document, "--json").stdout)
    assert (told["cost"], told["estimated"]) == ("0.056", False)
    assert told["usage"]["apart"] == {"web_search": 5}
    assert "apart" not in json.loads(cost({**document, "usage": usage}, "--json").stdout)["usage"]
    assert re.search(r"searches\W+5\b", cost(document).stdout)


def test_prices_of_ones_own() -> None:
    prices = {"input": "2.50", "cache_read": "1.25", "output": "10"}
    usage = {"prompt_tokens": 2006, "completion_tokens": 300, "prompt_tokens_details": {"cached_tokens": 1920}}
    document = json.loads(cost({"api": "chat", "usage": usage, "prices": prices}, "--json").stdout)
    assert {key: document[key] for key in ("cost", "estimated", "source", "price_date")} == {
        "cost": "0.005615",
        "estimated": False,
        "source": "override",
        "price_date": None,
    }


def test_the_price_of_that_day() -> None:
    usage = {"input_tokens": 1000, "output_tokens": 0, "input_tokens_details": {"cached_tokens": 0}}
    base = {"provider": "openai", "model": "gpt-5.6-sol", "api": "responses", "usage": usage}
    costs = [json.loads(cost(base | {"at": at}, "--json").stdout)["cost"] for at in ("2026-08-01", "2026-11-29")]
    assert costs == ["0.005", "0.004"]


def test_the_tier_that_the_usage_object_names() -> None:
    batch = CLAUDE | {"usage": CLAUDE["usage"] | {"service_tier": "batch"}}  # type: ignore[operator]
    assert json.loads(cost(batch, "--json").stdout)["cost"] == "0.002429"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "claude-sonnet-7"}, "no price is known for anthropic:claude-sonnet-7"),
        ({"usage": {"output_tokens": 3}}, "not every count was reported"),
        ({"prices": {"input": "3"}}, "class that has no price"),
    ],
)
def test_an_unknown_cost_is_null_with_a_warning(change: dict[str, Any], says: str) -> None:
    result = cost(CLAUDE | change, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["cost"] is None
    assert says in result.stderr


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"usage": {"input_tokens": -1, "output_tokens": 1}}, "usage.input_tokens"),
        ({"usage": {"cache_read_input_tokens": 1}}, "usage.input_tokens"),
        ({"usage": None}, "usage"),
        ({"usage": [1]}, "usage"),
        ({"api": "soap"}, "api"),
        ({"api": None}, "api"),
        ({"model": None}, "model"),
        ({"provider": 3}, "provider"),
        ({"at": "yesterday"}, "at"),
        ({"at": 5}, "at"),
        ({"at": "0001-01-01T00:00:00+14:00"}, "at"),
        ({"at": "9999-12-31T23:59:59-14:00"}, "at"),
        ({"usage": {"input_tokens": 10**25, "output_tokens": 1}}, "usage.input_tokens"),
        ({"prices": {"input": "9e999999"}}, "prices.input"),
        ({"prices": {"input": "1_000"}}, "prices.input"),
        ({"prices": {"input": " 1 "}}, "prices.input"),
        ({"prices": {"input": "٣"}}, "prices.input"),
        ({"prices": {"input": "1" * 41}}, "prices.input"),
        ({"prices": {"cache_write": {"5m": "-0"}}}, "prices.cache_write.5m"),
        ({"prices": {"input": 3.0}}, "prices.input"),
        ({"prices": []}, "prices"),
        ({"modle": "x"}, "modle: unknown field; did you mean 'model'?"),
    ],
)
def test_bad_input_names_the_field_and_exits_with_2(change: dict[str, Any], field: str) -> None:
    result = cost(CLAUDE | change, "--json")
    assert (result.exit_code, failure(result)["type"]) == (2, "InputError")
    assert result.stderr.startswith(f"error: {field}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"usage": NaN}'])
def test_what_is_no_json_object(text: str) -> None:
    result = run("cost", "-", text=text)
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_file_and_a_table_for_people(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    path.write_text(json.dumps(CLAUDE), encoding="utf-8")
    result = run("cost", str(path))
    assert result.exit_code == 0
    for shown in ("9,304", "read from cache", "written for 1h", "cost: $0.004858", "genai-prices"):
        assert shown in result.stdout
    unsaid = run("cost", "-", text=json.dumps(CLAUDE | {"usage": {"input_tokens": 5, "output_tokens": 1}, "model": "?"}))
    assert "not reported" in unsaid.stdout
    assert "cost: unknown" in unsaid.stdout
    assert run("cost", str(tmp_path / "none.json")).exit_code == 2


@pytest.mark.shared
def test_every_recorded_object_has_an_answer(shared_data: Path) -> None:
    from tests.test_usage_shapes import api_of

    for line in (shared_data / "usage" / "recorded_usage.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        document = {"provider": "openrouter", "model": record["model"] or "x", "api": api_of(record), "usage": record["usage"]}
        result = cost(document, "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["usage"]["input_tokens"] > 0


# -- ledger -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"

    async def fill() -> None:
        store = SqliteLedger(str(path))
        counted = Usage(uncached=1200, cache_read=300, cache_write={"5m": 20}, output=40)
        partly = Usage(uncached=50, cache_read=None, cache_write=None, output=None)
        for tenant, amount, usage in (("acme", "0.25", counted), ("[bold]zeta", None, counted), ("beta", "0", partly)):
            hold = Hold(
                amount=Decimal(1), backend="claude", model="claude-sonnet-5-5", tenant=tenant, session_id=None, tags=("a",)
            )
            settlement = Settlement(
                amount=None if amount is None else Decimal(amount), estimated=True, usage=usage, outcome="left", request_id="r1"
            )
            await store.settle(await store.reserve(hold), settlement)
        await store.aclose()

    anyio.run(fill)
    return path


def test_totals_and_the_last_entries(ledger: Path, tmp_path: Path) -> None:
    document = json.loads(run("ledger", str(ledger), "--json").stdout)
    assert document["totals"] == {
        "requests": 3,
        "amount": "0.25",
        "estimated": 3,
        "unpriced": 1,
        "uncounted": 1,
        "uncached": 2450,
        "cache_read": 600,
        "cache_write": 40,
        "output": 80,
    }
    cut, newest, oldest = document["entries"]
    assert (cut["usage"]["input_tokens"], cut["usage"]["output"]) == (50, None)
    assert (newest["tenant"], newest["amount"]) == ("[bold]zeta", None)
    assert oldest["usage"]["input_tokens"] == 1520
    assert (oldest["id"], oldest["amount"], oldest["outcome"], oldest["tags"], oldest["request_id"]) == (
        1,
        "0.25",
        "left",
        ["a"],
        "r1",
    )
    config = tmp_path / "cachespec.toml"
    config.write_text(
        f'[client]\nledger = {{ use = "sqlite", path = "{ledger}" }}\n[backends.one]\nuse = "llamacpp"\nmodel = "smollm2"\n',
        encoding="utf-8",
    )
    assert json.loads(run("ledger", "-c", str(config), "--json").stdout) == document
    acme = json.loads(run("ledger", str(ledger), "--tenant", "acme", "--json").stdout)
    assert acme["totals"]["requests"] == len(acme["entries"]) == 1
    assert len(json.loads(run("ledger", str(ledger), "-n", "1", "--json").stdout)["entries"]) == 1


def test_the_ledger_for_people(ledger: Path) -> None:
    result = run("ledger", str(ledger))
    assert result.exit_code == 0
    for shown in (
        "[bold]zeta",
        "~0.25",
        "unknown",
        "3 requests, $0.25 (3 estimated, 1 without a known price)",
        "1 whose tokens were not reported in full",
    ):
        assert shown in result.stdout


@pytest.mark.parametrize(("width", "left_out"), [(60, "written, read"), (80, None)])
def test_the_ledger_in_a_narrow_window(ledger: Path, monkeypatch: pytest.MonkeyPatch, width: int, left_out: str | None) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("ledger", str(ledger)).stdout.splitlines()
    rows = [line for line in lines if re.match(r"\d\d-\d\d-\d\d \d\d:\d\d ", line)]
    assert len(rows) == 3
    assert all(len(line) <= width for line in lines[:-1])
    assert "~0.25" in rows[-1]
    assert (f"left out for want of room: {left_out} " in lines[-2]) == (left_out is not None)


def test_writes_whose_lifetime_nobody_told() -> None:
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 300, "output_tokens": 2}
    shown = run("cost", "-", text=json.dumps(CLAUDE | {"usage": usage})).stdout
    assert "written, for how long is not told" in shown
    assert "unspecified" not in shown


def test_small_amounts_for_people() -> None:
    told = [money(Decimal(text)) for text in ("0", "1E-7", "0.0000015", "1E+2", "0.25")]
    assert told == ["$0", "less than $0.000001", "$0.000002", "$100", "$0.25"]


def test_a_ledger_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "ledger.db"
    result = run("ledger", str(missing))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"no ledger at {missing}" in result.stderr
    assert not missing.exists()
    assert run("ledger").exit_code == 2
    config = tmp_path / "cachespec.toml"
    config.write_text('[backends.one]\nuse = "llamacpp"\nmodel = "smollm2"\n', encoding="utf-8")
    assert "in memory" in run("ledger", "-c", str(config)).stderr


def test_a_ledger_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "diary.db"
    path.write_bytes(b"dear diary " * 500)
    result = run("ledger", str(path), "--json")
    assert (result.exit_code, failure(result)["type"]) == (1, "LedgerError")
    assert str(path) in result.stderr
