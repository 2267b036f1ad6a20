"""What the tests of a client share as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.client.caching_support import Vendor
from tests.wire.cache_rules import CacheRules
from tests.wire.server import WireServer

from cachespec.testing import FakeClock


@pytest.fixture
def vendor(wire_server: WireServer) -> Iterator[Vendor]:
    """The loopback server, which counts by the vendors' rules of caching, on a clock that stands still."""
    clock = FakeClock()
    rules = CacheRules(lambda: clock.now)
    wire_server.counts = rules
    yield Vendor(wire_server, rules, clock)
    wire_server.counts = None
