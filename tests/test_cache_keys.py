"""Cache keys: who shares one, and when one becomes several."""

from __future__ import annotations

import subprocess
import sys

from cachespec.cache_keys import PER_MINUTE, CacheKeys

PREFIX, OTHER = b"p" * 16, b"o" * 16


def keys(secret: bytes | None = b"s" * 32) -> CacheKeys:
    made = CacheKeys()
    made.secret = secret
    return made


def test_a_partition_is_of_one_tenant_and_one_secret() -> None:
    one = keys()
    assert one.partition("a") == keys().partition("a")
    assert len({one.partition("a"), one.partition("b"), keys(b"t" * 32).partition("a")}) == 3
    assert one.partition(None) is None
    assert keys(None).partition("a") is None


def test_a_route_is_of_tenant_and_prefix_not_of_the_conversation() -> None:
    one = keys()
    assert one.route("a", PREFIX, b"x", 0.0) == one.route("a", PREFIX, b"y", 0.0)
    assert len({one.route(t, p, b"x", 0.0) for t in ("a", "b", None) for p in (PREFIX, OTHER)}) == 6
    assert keys(None).route("a", PREFIX, b"x", 0.0) is None
    assert keys(None).route(None, PREFIX, b"x", 0.0) == one.route(None, PREFIX, b"x", 0.0)
    assert one.route("", PREFIX, b"x", 0.0) != one.route(None, PREFIX, b"x", 0.0)


def test_a_key_says_nothing_and_fits() -> None:
    key = keys().route("acme", PREFIX, b"x", 0.0)
    assert key is not None
    assert "acme" not in key
    assert len(key) <= 40


def test_shared_keys_are_the_same_in_every_process() -> None:
    code = "from cachespec.cache_keys import CacheKeys; print(CacheKeys().route(None, b'p' * 16, b'x', 0.0))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert told == CacheKeys().route(None, PREFIX, b"x", 0.0)


def test_above_the_rate_a_prefix_gets_a_power_of_two_of_keys_and_conversations_keep_theirs() -> None:
    made = keys()
    for i in range(int(PER_MINUTE) * 3):
        made.sent("a", PREFIX, 600.0 + i)
    spread = {n: made.route("a", PREFIX, str(n).encode(), 650.0) for n in range(200)}
    assert len(set(spread.values())) == 4
    assert spread == {n: made.route("a", PREFIX, str(n).encode(), 660.0) for n in range(200)}
    assert len({made.route("a", OTHER, str(n).encode(), 650.0) for n in range(50)}) == 1
    made.sent("a", PREFIX, 700.0)  # quiet for a moment: nothing moves
    assert spread[3] == made.route("a", PREFIX, b"3", 700.0)
    assert len({made.route("a", PREFIX, str(n).encode(), 10_000.0) for n in range(50)}) == 1  # quiet for long


def test_a_steady_rate_below_the_limit_is_one_key() -> None:
    made = keys()
    for i in range(200):
        made.sent("a", PREFIX, i * 60 / 14)
    assert len({made.route("a", PREFIX, str(n).encode(), 200 * 60 / 14) for n in range(50)}) == 1
