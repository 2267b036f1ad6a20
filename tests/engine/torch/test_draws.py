"""The rule of `engine.sampling` in torch operations, beside the rule itself."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.torch.support import torch

from cachespec.engine.runtimes.torch.draws import draw_rows, signed, uniform, words
from cachespec.engine.sampling import Sampling, draw, gumbel, key
from cachespec.engine.sampling import words as rule

SEEDS = (0, 1, 2**63 - 1, 2**63, 2**64 - 1, -5, 123456789123456789)


def test_the_noise_is_the_same_to_the_bit() -> None:
    places = [(seed, at) for seed in SEEDS for at in (0, 1, 700, 100_000)]
    keys = torch.tensor([signed(key(seed, at)) for seed, at in places])
    found = words(keys, 5000)
    ids = np.arange(5000)
    for row, (seed, at) in enumerate(places):
        wanted = rule(seed, at, ids)
        assert np.array_equal(found[row].numpy().view(np.uint64), wanted)
        exact = ((wanted >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        assert np.array_equal(uniform(found[row]).numpy(), exact)
        noise = -torch.log(-torch.log(uniform(found[row])))
        assert np.allclose(noise.numpy(), gumbel(wanted), rtol=1e-14, atol=1e-14)


def test_tokens_are_those_of_the_rule() -> None:
    """Rows of one call with parameters of their own, flat and peaked laws."""
    rng = np.random.default_rng(3)
    for scale in (0.5, 3.0, 10.0):
        rows = (rng.standard_normal((60, 1200)) * scale).astype(np.float32)
        ways = [
            Sampling(
                seed=int(rng.integers(0, 2**62)),
                temperature=float(rng.choice([0.0, 0.2, 1.0, 1.7])),
                top_k=int(k) if (k := rng.integers(0, 80)) else None,
                top_p=float(rng.choice([0.1, 0.7, 0.95, 1.0])),
                min_p=float(rng.choice([0.0, 0.02, 0.3])),
            )
            for _ in rows
        ]
        positions = [int(i) for i in rng.integers(0, 10_000, len(rows))]
        wanted = [draw(row, how, at) for row, how, at in zip(rows, ways, positions, strict=True)]
        assert draw_rows(torch.from_numpy(rows), ways, positions) == wanted


def test_the_whole_law_and_its_parts_alone() -> None:
    rows = np.random.default_rng(4).standard_normal((8, 3000)).astype(np.float32)
    for options in ({}, {"top_k": 1}, {"top_k": 5000}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        ways = [Sampling(seed=9, **options) for _ in rows]
        wanted = [draw(row, how, at) for at, (row, how) in enumerate(zip(rows, ways, strict=True))]
        assert draw_rows(torch.from_numpy(rows), ways, range(8)) == wanted


def test_filters_at_extreme_parameters_are_those_of_the_rule() -> None:
    rows = np.random.default_rng(5).standard_normal((6, 400)).astype(np.float32)
    for temperature in (5e-324, 1e-300, 1e16, 1e20, 1e300):
        for top_p in (5e-324, 1e-9, 0.3, None):
            for min_p in (None, 0.5, 1.0):
                ways = [Sampling(seed=i, temperature=temperature, top_p=top_p, min_p=min_p) for i in range(6)]
                wanted = [draw(row, how, 4) for row, how in zip(rows, ways, strict=True)]
                assert draw_rows(torch.from_numpy(rows), ways, [4] * 6) == wanted, (temperature, top_p, min_p)


def test_ties_go_to_the_lowest_id() -> None:
    rows = torch.zeros(2, 50)
    rows[:, 7:20] = 1.0
    assert draw_rows(rows, [Sampling(seed=1, temperature=0.0)] * 2, [0, 1]) == [7, 7]
    assert draw_rows(rows, [Sampling(seed=1, top_k=1)] * 2, [0, 1]) == [7, 7]


def test_masked_tokens_are_never_drawn() -> None:
    rows = torch.full((1, 50), float("-inf"))
    rows[0, 3] = -1e30
    assert draw_rows(rows, [Sampling(seed=1)], [0]) == [3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_finite_maximum_is_an_error(bad: float) -> None:
    rows = torch.zeros(3, 10)
    rows[1, 4] = bad
    for how in (Sampling(seed=1), Sampling(seed=1, temperature=0.0), Sampling(seed=1, top_p=0.5)):
        with pytest.raises(ArithmeticError):
            draw_rows(rows, [how] * 3, [0, 1, 2])
    with pytest.raises(ArithmeticError):
        draw_rows(torch.full((1, 10), float("-inf")), [Sampling(seed=1)], [0])
