"""The noise, bit for bit; the law it gives; the steps that shape the law."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cachespec.engine.sampling import Sampling, draw, gumbel, key, target, words
from cachespec.errors import InputError

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """The finaliser of SplitMix64, written again from its description."""
    z &= MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def plain_draw(row: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The rule with noise everywhere, one token at a time."""
    ids, scores = target(row, sampling)
    noise = [
        -math.log(-math.log(((mix(key(sampling.seed, position) + (int(x) + 1) * GAMMA) >> 12) + 0.5) / 2**52)) for x in ids
    ]
    totals = [s + n for s, n in zip(scores, noise, strict=True)]
    return int(ids[totals.index(max(totals))])


def test_the_generator_is_the_published_one() -> None:
    # The first outputs of SplitMix64 from state 0.
    assert [mix(GAMMA * i) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_fixed_vectors() -> None:
    ids = np.array([0, 1, 2, 49151, 151935])
    assert key(0, 0) == mix(mix(GAMMA) + GAMMA)
    assert (key(0, 0), key(1234, 56)) == (0xA706DD2F4D197E6F, 0xE021FB55DDED3BF6)
    few = words(1234, 56, ids[[0, 1, 3]])
    assert few.tolist() == [0xF1A4FD94E5612AE0, 0x57E6170AFB6E4731, 0xA963F5D50DF257DC]
    assert gumbel(few).tolist() == pytest.approx([2.852327755586834, -0.06671560178463515, 0.8843780950500935], rel=1e-15)
    for seed in (0, 1, 7, 2**63, 2**64 - 1, -1):
        for position in (0, 1, 4095):
            expected = [mix(mix(mix(seed + GAMMA) + (position + 1) * GAMMA) + (int(x) + 1) * GAMMA) for x in ids]
            assert words(seed, position, ids).tolist() == expected
    assert key(-1, 5) == key(2**64 - 1, 5)


def test_noise_depends_on_seed_position_and_token_only() -> None:
    ids = np.arange(1000)
    whole = words(42, 17, ids)
    assert (words(42, 17, ids[::-1].copy()) == whole[::-1]).all()
    assert words(42, 17, np.array([500]))[0] == whole[500]
    assert (words(43, 17, ids) != whole).all()
    assert (words(42, 18, ids) != whole).all()


def test_noise_is_finite_and_ordered_at_the_ends() -> None:
    # Uniforms are real and never 0 or 1 (they were only 0 or 1 elsewhere: vllm#13196).
    noise = gumbel(np.array([0, 2**12, 2**63, 2**64 - 1], dtype=np.uint64))
    assert np.isfinite(noise).all()
    assert all(a < b for a, b in pairwise(noise.tolist()))
    assert noise[0] == pytest.approx(-math.log(53 * math.log(2)))
    assert noise[3] == pytest.approx(53 * math.log(2))


def test_noise_is_standard_gumbel() -> None:
    noise = np.sort(gumbel(words(3, 0, np.arange(200_000))))
    law = np.exp(-np.exp(-noise))
    distance = np.abs(law - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.95 / math.sqrt(len(noise))  # Kolmogorov-Smirnov, one in a thousand; the seed is fixed


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=0),
        Sampling(seed=0, temperature=0.7),
        Sampling(seed=0, temperature=1.5, top_k=6),
        Sampling(seed=0, temperature=0.9, top_p=0.8),
        Sampling(seed=0, temperature=1.2, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_target_law(sampling: Sampling) -> None:
    """Chi-square over 200,000 draws, strong enough to see a distance of .03 (engines 2.8)."""
    row = (np.random.default_rng(5).normal(size=12) * 2).astype(np.float32)
    ids, scores = target(row, sampling)
    law = np.exp(scores) / np.exp(scores).sum()
    draws = 200_000
    # Every draw at another position, vectorised by hand: the same integers as `draw`, checked just below.
    totals = np.stack([scores[i] + gumbel(_over_positions(sampling.seed, draws, int(x))) for i, x in enumerate(ids)])
    chosen = ids[totals.argmax(axis=0)]
    for position in range(0, draws, draws // 50):
        assert draw(row, sampling, position) == chosen[position]
    counts = np.array([(chosen == x).sum() for x in ids])
    assert counts.sum() == draws
    chi = (((counts - draws * law) ** 2) / (draws * law)).sum()
    freedom = len(ids) - 1
    assert chi < freedom + 4.5 * math.sqrt(2 * freedom) + 4.5**2  # far beyond one in a thousand
    assert np.abs(counts / draws - law).sum() / 2 < 0.01


def _over_positions(seed: int, count: int, token: int) -> NDArray[np.uint64]:
    """`word` of one token at positions 0 to count - 1."""

    def mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)

    positions = np.arange(1, count + 1, dtype=np.uint64)
    keys = mixed(np.uint64(mix(seed + GAMMA)) + positions * np.uint64(GAMMA))
    return mixed(keys + np.uint64(((token + 1) * GAMMA) & MASK))


def test_temperature_0_takes_the_most_probable_without_noise() -> None:
    row = np.array([1.0, 5.0, 5.0, 2.0], dtype=np.float32)
    assert {draw(row, Sampling(seed=s, temperature=0), p) for s in range(5) for p in range(5)} == {1}  # ties: lowest id


def test_next_to_temperature_0_is_temperature_0() -> None:
    row = np.array([1.0, 5.0, 4.999, 2.0], dtype=np.float32)
    assert draw(row, Sampling(seed=1, temperature=1e-300), 3) == 1


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60),
    st.floats(0.1, 3),
    st.none() | st.integers(1, 70),
    st.none() | st.floats(0.01, 1),
    st.none() | st.floats(0, 1),
    st.integers(0, 2**64 - 1),
)
def test_the_short_way_draws_the_same_token(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, seed: int
) -> None:
    row = np.array(logits, dtype=np.float32)
    sampling = Sampling(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert draw(row, sampling, seed % 1000) == plain_draw(row, sampling, seed % 1000)


def test_the_short_way_on_a_whole_vocabulary() -> None:
    rng = np.random.default_rng(1)
    for seed in range(5):
        row = (rng.normal(size=20_000) * 3).astype(np.float32)
        for temperature in (0.3, 1.0, 8.0):
            sampling = Sampling(seed=seed, temperature=temperature)
            ids, scores = target(row, sampling)
            assert draw(row, sampling, 9) == ids[(scores + gumbel(words(seed, 9, ids))).argmax()]


@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=40),
    st.none() | st.integers(1, 45),
    st.none() | st.floats(0.01, 1),
    st.none() | st.floats(0, 1),
)
def test_target_by_hand(logits: list[int], top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """Temperature, then top-k, top-p, min-p, each on the law that the one before left; with many ties."""
    sampling = Sampling(seed=0, temperature=2.0, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp((logits[i] - max(logits)) / 2.0) for i in kept}
    if top_k is not None:
        kept = kept[:top_k]
    if top_p is not None and top_p < 1:
        total = sum(weight[i] for i in kept)
        mass, count = 0.0, 0
        while mass < top_p * total * (1 - 1e-12) and count < len(kept):
            mass += weight[kept[count]]
            count += 1
        kept = kept[:count]
    if min_p:
        kept = [i for i in kept if weight[i] >= min_p * (1 - 1e-12)]
    ids, scores = target(np.array(logits, dtype=np.float32), sampling)
    assert abs(len(ids) - len(kept)) <= (0 if top_p is None and min_p is None else 1)  # a sum on the edge of top-p
    if len(ids) == len(kept):
        assert ids.tolist() == sorted(kept)
        assert np.allclose(scores, [math.log(weight[i]) for i in sorted(kept)])


def test_a_wide_nucleus_is_found_in_steps() -> None:
    row = np.zeros(5000, dtype=np.float32)
    ids, _ = target(row, Sampling(seed=0, top_p=0.5))
    assert ids.tolist() == list(range(2500))


@pytest.mark.parametrize("temperature", [1e16, 1e20, 1e300])
@pytest.mark.parametrize("size", [5, 5000])
def test_a_nucleus_at_any_temperature_begins_with_the_most_probable(temperature: float, size: int) -> None:
    """All weights are rounded to one here, and the logits still differ."""
    row = np.arange(size, dtype=np.float32)
    for top_p, count in ((1e-9, 1), (0.4, size * 2 // 5)):
        ids, _ = target(row, Sampling(seed=0, temperature=temperature, top_p=top_p))
        assert ids.tolist() == list(range(size - count, size))
    sampling = Sampling(seed=0, temperature=temperature, top_p=1e-9, min_p=1.0)
    assert draw(row, sampling, 3) == size - 1
    assert draw(row, replace(sampling, top_p=0.5), 3) == size - 1


@pytest.mark.parametrize("row", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_maximum_is_an_error(row: list[float], temperature: float) -> None:
    with pytest.raises(ArithmeticError):
        draw(np.array(row, dtype=np.float32), Sampling(seed=0, temperature=temperature), 0)


def test_masked_tokens_never_come() -> None:
    row = np.array([-np.inf, 0.0, -np.inf, 0.0], dtype=np.float32)
    assert {draw(row, Sampling(seed=s), 0) for s in range(40)} == {1, 3}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", bad) for bad in (-0.1, math.nan, math.inf, 10**400)),
        ("top_k", 0),
        *(("top_p", bad) for bad in (0.0, 1.1, math.nan)),
        *(("min_p", bad) for bad in (-0.1, 1.5)),
    ],
)
def test_values_out_of_range_name_their_field(field: str, value: float) -> None:
    with pytest.raises(InputError) as caught:
        Sampling(seed=0, **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
