"""The circuit breaker: who is asked, who is not, and when again."""

from __future__ import annotations

import pytest

from cachespec.errors import (
    AuthenticationError,
    ConnectionFailedError,
    ContextLengthError,
    OutOfPagesError,
    OverloadedError,
    RateLimitError,
    ServerError,
    StreamInterruptedError,
)
from cachespec.health import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Health

NOW = 1_800_000_000.0


def fail(health: Health, error: Exception, now: float = NOW) -> None:
    health.started("a", now)
    health.failed("a", error, now)


def test_failures_in_a_row_open_it_and_an_answer_closes_it() -> None:
    health = Health()
    for i in range(FAILURES):
        assert health.refusal("a", NOW) is None, i
        fail(health, ServerError("500"))
    refusal = health.refusal("a", NOW)
    assert refusal is not None
    assert "ServerError after 3 failures in a row" in refusal
    assert health.refusal("b", NOW) is None
    later = NOW + FIRST_PAUSE_S
    assert health.refusal("a", later) is None
    health.started("a", later)
    health.answered("a")
    assert health.refusal("a", later) is None
    fail(health, ServerError("500"), later)
    assert health.refusal("a", later) is None  # it counts from the start again


def test_answers_between_failures_keep_it_closed() -> None:
    health = Health()
    for _ in range(10):
        fail(health, OverloadedError("529"))
        fail(health, OverloadedError("529"))
        health.started("a", NOW)
        health.answered("a")
    assert health.refusal("a", NOW) is None


def test_after_the_pause_one_request_tries_it_and_the_pause_doubles() -> None:
    health, now, pauses = Health(), NOW, []
    for _ in range(FAILURES):
        fail(health, ServerError("500"), now)
    for _ in range(9):
        begun = now
        while health.refusal("a", now) is not None:
            now += 0.5
        pauses.append(now - begun)
        health.started("a", now)
        assert "trying it now" in (health.refusal("a", now) or "")
        health.failed("a", ServerError("500"), now)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


@pytest.mark.parametrize(
    "error", [AuthenticationError("401"), ConnectionFailedError("refused"), RateLimitError("429", retry_after=7.0)]
)
def test_some_failures_are_enough_by_themselves(error: Exception) -> None:
    health = Health()
    fail(health, error)
    assert health.refusal("a", NOW) is not None


def test_a_server_that_says_when_is_believed() -> None:
    health = Health()
    fail(health, RateLimitError("429", retry_after=90.0))
    assert health.refusal("a", NOW + 89.0) is not None
    assert health.refusal("a", NOW + 90.0) is None


@pytest.mark.parametrize("error", [ContextLengthError("long"), OutOfPagesError("full"), ValueError("ours")])
def test_what_is_wrong_with_a_request_says_nothing_of_a_backend(error: Exception) -> None:
    health = Health()
    for _ in range(10):
        fail(health, error)
    assert health.refusal("a", NOW) is None
    assert health.load("a") == 0


def test_a_probe_that_was_left_leaves_room_for_the_next() -> None:
    health = Health()
    for _ in range(FAILURES):
        fail(health, StreamInterruptedError("cut"))
    later = NOW + FIRST_PAUSE_S
    health.started("a", later)
    assert health.refusal("a", later) is not None
    health.left("a")
    assert health.refusal("a", later) is None


def test_load_counts_what_is_under_way() -> None:
    health = Health()
    for _ in range(3):
        health.started("a", NOW)
    assert health.load("a") == 3
    health.answered("a")
    health.left("a")
    health.failed("a", ServerError("500"), NOW)
    health.left("a")
    assert health.load("a") == 0


def test_a_clock_that_is_set_back_keeps_nobody_out() -> None:
    health = Health()
    health.failed("a", ConnectionFailedError("refused", backend="a"), 100_000.0)
    assert health.refusal("a", 100_001.0) is not None
    assert health.refusal("a", 10_000.0) is None
    health.started("a", 10_000.0)
    assert health.refusal("a", 10_001.0) is not None  # that one is the probe
    health.answered("a")
    assert health.refusal("a", 10_002.0) is None
