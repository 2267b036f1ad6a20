"""Each public name is a decision: this list changes on purpose or not at all."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import cachespec
from cachespec import errors

EVENTS = (
    "DraftVerified Finished LogprobsReported ReasoningDelta ReasoningFinished ResponseStarted Retrying TextDelta ToolCallDelta "
    "UsageReported"
)
PARTS = "ImagePart Message ReasoningPart TextPart Tool ToolCallPart ToolResultPart"
VALUES = "Completion Cost Decision Offer Plan Quote Reason TokenLogprob Usage"
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.CachespecError)]
CLIENT = "Client ResponseStream Session __version__ connect sync"
PUBLIC = sorted([*CLIENT.split(), *EVENTS.split(), *PARTS.split(), *VALUES.split(), *ERRORS])


def test_the_public_names() -> None:
    assert sorted(cachespec.__all__) == PUBLIC
    assert dir(cachespec) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_is_there(name: str) -> None:
    assert getattr(cachespec, name) is not None


def test_names_come_from_where_the_type_checker_sees_them() -> None:
    tree = ast.parse(Path(inspect.getfile(cachespec)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = set()
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert node.module is not None
                want = importlib.import_module(f"{node.module}.{alias.name}") if node.module == "cachespec" else None
                want = want or getattr(importlib.import_module(node.module), alias.name)
                assert getattr(cachespec, alias.name) is want
                seen.add(alias.name)
    assert seen | {"__version__"} == set(PUBLIC)


def test_anything_else_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cachespec.nothing  # noqa: B018


def test_the_version_is_the_installed_one() -> None:
    assert cachespec.__version__.count(".") == 2
