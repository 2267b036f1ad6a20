"""``cachespec budget``: what is left, and beginning anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import anyio
import click
import pytest
from tests.cli.conftest import Run, document

from cachespec.ledger.base import Hold, Settlement
from cachespec.ledger.sqlite import SqliteLedger

App = Callable[..., str]
BUDGETS = """budgets = [
    { scope = "overall", limit = "10.00", per = "month", timezone = "Europe/Berlin" },
    { scope = "tenant", limit = "2.00", per = "day", mode = "soft" },
    { scope = "tag", key = "batch", limit = "1.00" },
    { scope = "request", limit = "0.50" },
]
"""


@pytest.fixture
def spent(app: App, tmp_path: Path) -> str:
    """A configuration whose ledger holds two tenants' spending and one open reservation."""
    path = tmp_path / "ledger.db"
    config = app(more=f'{BUDGETS}[client]\nledger = {{ use = "sqlite", path = "{path}" }}\n')

    async def fill() -> None:
        ledger = SqliteLedger(str(path))
        for tenant, amount in (("acme", "0.30"), ("zeta", "0.20"), ("acme", None)):
            accounts = ("overall", f"tenant:{tenant}")
            hold = Hold(amount=Decimal("0.5"), backend="b", model="m", tenant=tenant, session_id=None, accounts=accounts)
            reservation = await ledger.reserve(hold)
            if amount is not None:
                settled = Settlement(amount=Decimal(amount), estimated=False, usage=None, outcome="completed")
                await ledger.settle(reservation, settled)
        await ledger.aclose()

    anyio.run(fill)
    return config


def test_show(run: Run, spent: str) -> None:
    rows = document(run("budget", "show", "-c", spent, "--json"))["budgets"]
    seen = [(r["scope"], r["spent"], r["reserved"], r["limit"], r["mode"]) for r in rows]
    assert seen == [
        ("overall per month", "0.5", "0.5", "10", "hard"),
        ("tenant:acme per day", "0.3", "0.5", "2", "soft"),
        ("tenant:zeta per day", "0.2", "0", "2", "soft"),
        ("tag:batch in total", "0", "0", "1", "hard"),
    ]
    assert rows[0]["resets_at"].endswith("+00:00")
    assert rows[3]["resets_at"] is None
    shown = run("budget", "show", "-c", spent)
    assert shown.exit_code == 0
    assert "tenant:acme per day" in shown.stdout
    assert "never" in shown.stdout


def test_a_narrow_terminal_folds_names_and_no_amounts(
    run: Run, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    config = app(more=f'{BUDGETS}[client]\nledger = {{ use = "sqlite", path = "{path}" }}\n')

    async def fill() -> None:
        ledger = SqliteLedger(str(path))
        accounts = ("overall", "tenant:a-customer-of-a-very-long-name-4711")
        hold = Hold(amount=Decimal("0.5"), backend="b", model="m", tenant=None, session_id=None, accounts=accounts)
        settled = Settlement(amount=Decimal("0.123456789012"), estimated=False, usage=None, outcome="completed")
        await ledger.settle(await ledger.reserve(hold), settled)
        await ledger.aclose()

    anyio.run(fill)
    for columns, terminal in itertools.product((20, 40, 80, 200), (False, True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("FORCE_COLOR" if terminal else "NOTHING", "1")  # what makes it a terminal to rich
        shown = click.unstyle(run("budget", "show", "-c", config).stdout)
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        head, *lines = shown.splitlines()
        assert head.split() == ["budget", "mode", "spent", "reserved", "limit", "left", "resets", "(UTC)"]
        # A name is folded where there is a window, which leaves the other cells in the first of its lines.
        assert any({"hard", "0.123456789012", "0", "10", "9.876543210988"} <= set(line.split()) for line in lines)
        name = "tenant:a-customer-of-a-very-long-name-4711 per day"
        assert (name in shown) == (not terminal or columns == 200)
        folded = "".join(line[: head.index("mode")].strip() for line in lines)
        assert name.replace(" ", "") in folded.replace(" ", "")
        if terminal and columns == 80:
            assert max(map(len, shown.splitlines())) <= 100


def test_what_is_called_so_in_full_is_reset_and_no_member_of_that_name(run: Run, app: App, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    config = app(more=f'{BUDGETS}[client]\nledger = {{ use = "sqlite", path = "{path}" }}\n')

    async def fill() -> None:
        ledger = SqliteLedger(str(path))
        for tenant in ("acme", "acme per day"):
            accounts = (f"tenant:{tenant}",)
            hold = Hold(amount=Decimal(1), backend="b", model="m", tenant=tenant, session_id=None, accounts=accounts)
            settled = Settlement(amount=Decimal("0.5"), estimated=False, usage=None, outcome="completed")
            await ledger.settle(await ledger.reserve(hold), settled)
        await ledger.aclose()

    def left() -> dict[str, str]:
        return {r["scope"]: r["spent"] for r in document(run("budget", "show", "-c", config, "--json"))["budgets"]}

    anyio.run(fill)
    reset = document(run("budget", "reset", "tenant:acme per day", "-c", config, "--json"))["reset"]
    assert [r["scope"] for r in reset] == ["tenant:acme per day"]
    assert (left()["tenant:acme per day"], left()["tenant:acme per day per day"]) == ("0", "0.5")
    document(run("budget", "reset", "tenant:acme per day per day", "-c", config, "--json"))
    assert left()["tenant:acme per day per day"] == "0"


def test_reset_one_and_leave_the_others(run: Run, spent: str) -> None:
    assert document(run("budget", "reset", "tenant:acme", "-c", spent, "--json"))["reset"][0]["spent"] == "0.3"
    rows = document(run("budget", "show", "-c", spent, "--json"))["budgets"]
    assert [(r["spent"], r["reserved"]) for r in rows] == [("0.5", "0.5"), ("0", "0.5"), ("0.2", "0"), ("0", "0")]
    said = run("budget", "reset", "overall per month", "tenant:zeta per day", "-c", spent)
    assert said.stdout.splitlines() == [
        "overall per month: counted from nothing again",
        "tenant:zeta per day: counted from nothing again",
    ]
    rows = document(run("budget", "show", "-c", spent, "--json"))["budgets"]
    assert [r["spent"] for r in rows] == ["0", "0", "0", "0"]


def test_what_cannot_be_shown_or_reset(run: Run, app: App, spent: str, tmp_path: Path) -> None:
    wrong = run("budget", "reset", "tenant:acne", "tenant:zeta", "-c", spent)
    assert wrong.exit_code == 2
    assert "tenant:acne" in wrong.stderr
    rows = document(run("budget", "show", "-c", spent, "--json"))["budgets"]
    assert rows[2]["spent"] == "0.2"  # nothing was reset
    assert run("budget", "show").exit_code == 2
    absent = f'[client]\nledger = {{ use = "sqlite", path = "{tmp_path}/none.db" }}\n'
    for more, said in (("", "no budgets"), (BUDGETS, "in memory"), (BUDGETS + absent, "no ledger at")):
        result = run("budget", "show", "-c", app(more=more))
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "none.db").exists()
