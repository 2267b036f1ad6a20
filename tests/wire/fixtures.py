"""The `wire_server` fixture; the root conftest names this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.wire.server import WireServer


@pytest.fixture(scope="session")
def _wire_server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


@pytest.fixture
def wire_server(_wire_server: WireServer) -> WireServer:
    """The loopback server, with nothing recorded yet. One server serves the whole run."""
    _wire_server.keep_alive, _wire_server.counts = 5.0, None
    _wire_server.reset()
    return _wire_server
