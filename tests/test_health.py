"""The circuit breaker: who is asked, who is not, and when again."""

from __future__ import annotations

from typing import Any

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
from cachespec.health import FAILURES, FIRST_PAUSE_S, LONGEST_ASKED_S, LONGEST_PAUSE_S, Health

NOW = 1_800_000_000.0


def fail(health: Health, error: Exception, now: float = NOW) -> None:
    health.failed(health.started("a", now), error, now)


def answer(health: Health, now: float = NOW) -> None:
    health.answered(health.started("a", now))


def test_a_probe_that_is_answered_lets_others_in_before_its_end() -> None:
    health = Health()
    fail(health, ConnectionFailedError("refused"))
    later = NOW + FIRST_PAUSE_S + 1
    probe = health.started("a", later)
    refusal = health.refusal("a", later)
    assert refusal is not None
    assert "trying it now" in refusal
    health.began(health.started("a", later))  # another one says nothing
    assert health.refusal("a", later) is not None
    health.began(probe)
    assert health.refusal("a", later) is None
    health.failed(probe, StreamInterruptedError("cut"), later)
    assert health.refusal("a", later) is None


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
    answer(health, later)
    assert health.refusal("a", later) is None
    fail(health, ServerError("500"), later)
    assert health.refusal("a", later) is None  # it counts from the start again


def test_answers_between_failures_keep_it_closed() -> None:
    health = Health()
    for _ in range(10):
        fail(health, OverloadedError("529"))
        fail(health, OverloadedError("529"))
        answer(health)
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
        probe = health.started("a", now)
        assert "trying it now" in (health.refusal("a", now) or "")
        health.failed(probe, ServerError("500"), now)
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
    probe, beside = health.started("a", later), health.started("a", later)
    health.left(beside)  # asked although a probe was under way: not the probe
    assert health.refusal("a", later) is not None
    health.left(probe)
    assert health.refusal("a", later) is None


def test_load_counts_what_is_under_way() -> None:
    health = Health()
    first, second, third = (health.started("a", NOW) for _ in range(3))
    assert health.load("a") == 3
    health.answered(first)
    health.left(second)
    assert health.load("a") == 1
    health.failed(third, ServerError("500"), NOW)
    assert health.load("a") == 0


def test_one_fault_opens_it_once_however_many_requests_were_under_way() -> None:
    health = Health()
    trials = [health.started("a", NOW) for _ in range(20)]
    for i, trial in enumerate(trials[:-2]):
        health.failed(trial, ConnectionFailedError("blip"), NOW + i / 100)
    assert health.refusal("a", NOW + 1) == "ConnectionFailedError after 1 failure in a row; tried again in 4 s"
    later = NOW + FIRST_PAUSE_S
    assert health.refusal("a", later) is None
    probe = health.started("a", later)
    health.failed(trials[-2], ConnectionFailedError("blip"), later)  # it began before the breaker opened: the same fault
    assert "trying it now" in (health.refusal("a", later) or "")
    health.answered(probe)
    health.failed(trials[-1], ConnectionFailedError("blip"), later + 1)
    assert health.refusal("a", later + 1) is None


def test_an_answer_from_before_it_opened_does_not_close_it() -> None:
    health = Health()
    early = health.started("a", NOW)
    fail(health, RateLimitError("429", retry_after=90.0))
    health.answered(early)
    assert health.refusal("a", NOW + 1) is not None
    answer(health, NOW + 1)  # one that was sent although it was open does
    assert health.refusal("a", NOW + 1) is None


def test_requests_sent_although_it_is_open_do_not_prolong_its_pause() -> None:
    """Where all are ill all are asked: their failures say what is known already."""
    health = Health()
    fail(health, ConnectionFailedError("refused"))
    for i in range(20):
        fail(health, ConnectionFailedError("refused"), NOW + i / 10)
    assert health.refusal("a", NOW + FIRST_PAUSE_S) is None
    fail(health, ConnectionFailedError("refused"), NOW + FIRST_PAUSE_S)
    again = NOW + FIRST_PAUSE_S
    assert health.refusal("a", again + 2 * FIRST_PAUSE_S - 0.1) is not None
    assert health.refusal("a", again + 2 * FIRST_PAUSE_S) is None
    fail(health, RateLimitError("429", retry_after=60.0), again + 1)  # but what the server asks for is heard
    assert health.refusal("a", again + 60) is not None


@pytest.mark.parametrize("asked", [1.7e9, 1e300, float("inf")])
def test_nobody_is_taken_out_for_longer_than_an_hour_at_a_time(asked: float) -> None:
    health = Health()
    fail(health, RateLimitError("429", retry_after=asked))
    assert health.refusal("a", NOW + LONGEST_ASKED_S - 1) is not None
    assert health.refusal("a", NOW + LONGEST_ASKED_S) is None


@pytest.mark.parametrize("asked", [float("nan"), "soon"])
def test_a_pause_that_is_no_number_is_none(asked: Any) -> None:
    health = Health()
    fail(health, RateLimitError("429", retry_after=asked))
    assert health.refusal("a", NOW) is None


def test_a_clock_that_is_set_back_keeps_nobody_out() -> None:
    health = Health()
    fail(health, ConnectionFailedError("refused", backend="a"), 100_000.0)
    assert health.refusal("a", 100_001.0) is not None
    assert health.refusal("a", 10_000.0) is None
    probe = health.started("a", 10_000.0)
    assert health.refusal("a", 10_001.0) is not None  # that one is the probe
    health.answered(probe)
    assert health.refusal("a", 10_002.0) is None
