"""The pages name everything there is: reasons, policies with their options, commands, what hooks are told, vocabularies."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from cachespec import telemetry
from cachespec.cli.main import COMMANDS
from cachespec.decision import REASON_CODES, Ask, Offer
from cachespec.registry import installed, load
from cachespec.rules import BudgetPeriod, BudgetRule, BudgetScope
from cachespec.why import MissKind

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}


@pytest.mark.parametrize("code", sorted(REASON_CODES))
def test_every_reason_is_explained(code: str) -> None:
    assert any(f"`{code}`" in text for text in PAGES.values())


@pytest.mark.parametrize(("family", "page"), [("routing", "routing"), ("caching", "caching"), ("acceptance", "local")])
def test_every_policy_is_there_with_its_options(family: str, page: str) -> None:
    names = installed(family)
    assert len(names) > 3
    for name in names:
        assert f"`{name}`" in PAGES[page], name
        if family != "acceptance":
            for option in inspect.signature(load(family, name)).parameters:
                assert f"`{option}" in PAGES[page], f"{name}: {option}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there(command: str) -> None:
    assert f"| `{command}" in PAGES["command-line"] or f", `{command}" in PAGES["command-line"]


@pytest.mark.parametrize("details", get_args(telemetry.Details), ids=lambda details: details.__name__)
def test_what_hooks_are_told_is_there(details: type) -> None:
    assert any(details.__name__ in text for text in PAGES.values())


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("money", get_args(BudgetScope)),
        ("money", get_args(BudgetPeriod)),
        ("money", get_args(get_type_hints(BudgetRule)["mode"])),
        ("caching", get_args(MissKind)),
        ("extending", tuple(Ask.__dataclass_fields__)),
        ("extending", tuple(name for name in Offer.__dataclass_fields__ if name != "eligible")),
    ],
)
def test_every_word_of_a_vocabulary_is_there(page: str, words: tuple[str, ...]) -> None:
    assert words
    assert [word for word in words if f"`{word}`" not in PAGES[page]] == []
