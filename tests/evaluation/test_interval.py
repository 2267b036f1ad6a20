"""Acceptance with its interval."""

from __future__ import annotations

import random

import pytest

from cachespec.evaluation.interval import acceptance, wilson


def test_wilson_s_interval_is_the_published_one() -> None:
    # Agresti and Coull (1998): 0 of 10 and 5 of 10.
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_nothing_scored_is_not_known() -> None:
    assert acceptance([]) is None
    assert acceptance([(0, 0), (0, 0)]) is None


def test_one_request_has_wilson_s_interval_not_a_point() -> None:
    found = acceptance([(5, 5), (0, 0)])
    assert found is not None
    assert (found.rate, found.scored) == (0.5, 10)
    assert (found.low, found.high) == wilson(5, 10)


def test_requests_that_differ_make_it_wider_than_independent_tokens_would() -> None:
    alike, apart = acceptance([(50, 50)] * 20), acceptance([(95, 5), (5, 95)] * 10)
    assert alike is not None
    assert apart is not None
    assert alike.rate == apart.rate == 0.5
    assert (alike.low, alike.high) == wilson(1000, 2000)
    assert apart.high - apart.low > 3 * (alike.high - alike.low)
    assert acceptance([(95, 5), (5, 95)] * 10) == apart, "the same counts, the same interval"


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(40):
        requests = []
        for _ in range(30):
            rate = rng.choice((0.3, 0.9))  # 0.6 over all
            right = sum(rng.random() < rate for _ in range(20))
            requests.append((right, 20 - right))
        found = acceptance(requests)
        assert found is not None
        held += found.low <= 0.6 <= found.high
    assert held >= 34
