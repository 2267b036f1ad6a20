"""Whose doing a failed attempt was."""

from __future__ import annotations

import pytest

from cachespec.blame import AT_DEADLINE_S, UNMEASURED_S, of_data, of_deadline
from cachespec.decision import Latency
from cachespec.errors import (
    BackendError,
    ConnectionFailedError,
    ContentFilteredError,
    OutOfPagesError,
    RequestTimeoutError,
    ServerError,
    StreamInterruptedError,
)

MEASURED = Latency(ttft_ms=200.0, total_ms=900.0, evidence="measured", ttft_high_ms=800.0)
ASSUMED = Latency(ttft_ms=200.0, total_ms=900.0, ttft_high_ms=800.0)
SLOW = Latency(ttft_ms=3000.0 * UNMEASURED_S, total_ms=None)
UNKNOWN = Latency(ttft_ms=None, total_ms=None)
LATE = RequestTimeoutError("not finished in time")


@pytest.mark.parametrize(
    ("latency", "waited_s", "own"),
    [
        (MEASURED, 0.7, True),
        (MEASURED, 0.9, False),
        (ASSUMED, 0.9, True),  # nobody knows yet how long it takes
        (ASSUMED, UNMEASURED_S, False),
        (UNKNOWN, UNMEASURED_S - 1, True),
        (UNKNOWN, UNMEASURED_S, False),
        (SLOW, 2 * UNMEASURED_S, True),
        (SLOW, 3 * UNMEASURED_S, False),
    ],
)
def test_a_deadline_is_the_callers_until_the_backend_had_a_fair_time(latency: Latency, waited_s: float, own: bool) -> None:
    assert of_deadline(LATE, latency=latency, waited_s=waited_s, left_s=0.0) is own


@pytest.mark.parametrize("left_s", [None, 2 * AT_DEADLINE_S])
def test_what_failed_before_the_deadline_was_not_ended_by_it(left_s: float | None) -> None:
    assert not of_deadline(LATE, latency=MEASURED, waited_s=0.01, left_s=left_s)


def test_a_reader_that_came_late_says_nothing() -> None:
    assert of_deadline(LATE, latency=MEASURED, waited_s=99.0, left_s=-2 * AT_DEADLINE_S)


def test_what_broke_by_itself_near_a_deadline_was_not_ended_by_it() -> None:
    error: BackendError = ConnectionFailedError("reset")
    assert not of_deadline(error, latency=MEASURED, waited_s=0.01, left_s=0.0)


@pytest.mark.parametrize(
    ("error", "local", "own"),
    [
        (ContentFilteredError("refused"), False, True),
        (OutOfPagesError("no room"), True, True),
        (ServerError("these parameters spoil the logits", retryable=False), True, True),
        (ServerError("these parameters spoil the logits", retryable=False), False, False),
        (ServerError("500", retryable=True), True, False),
        (StreamInterruptedError("cut"), False, False),
    ],
)
def test_what_a_request_holds_is_no_fault_of_its_backend(error: BackendError, local: bool, own: bool) -> None:
    assert of_data(error, local=local) is own
