"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ("tests.wire.fixtures",)
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on both event loops."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What engines measure is kept here during the tests: none reads or writes the user's own."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public traces, prompts and recorded usage beside the checkout; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared data at {SHARED}")
    return SHARED
