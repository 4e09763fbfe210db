"""The loops over a block: the same bits compiled and by numpy, and what they compute by fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from dptrain.noise.generators.rounded import can_compile
from dptrain.noise.streams import kernels
from dptrain.noise.streams.grid import UNIT

needs_numba = pytest.mark.skipif(not can_compile(), reason="numba is not installed")
LENGTHS = [0, 1, 2047, 2048, 2049, 5001, 1 << 15]  # pieces of 2048 entries


def rows_of(dtype, rows, length, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == np.int32:
        return rng.integers(-(1 << 31), 1 << 31, (rows, length), dtype=np.int32)
    return rng.normal(size=(rows, length)) * 2.0**44


def whole(length, bits=44, seed=1):
    return np.rint(np.random.default_rng(seed).normal(size=length) * 2.0**bits)


@needs_numba
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_past_rows_add_up_to_the_same_bits(dtype, count, length):
    rows = rows_of(dtype, count, length)
    weights = np.random.default_rng(2).normal(size=count)
    finer = 2.0**17 if dtype == np.int32 else 1.0
    loops, plain = whole(length), whole(length)
    kernels._compiled(kernels._add_past_in_loops, kernels._PAST)(loops, rows, weights, finer)
    kernels._add_past(plain, rows, weights, finer)
    assert np.array_equal(loops, plain)
    assert np.array_equal(loops, np.rint(loops))
    # The function that chooses, of a buffer with more rows than weights.
    chosen = torch.from_numpy(whole(length))
    buffer = torch.from_numpy(np.vstack([rows, rows_of(dtype, 2, length, seed=3)]))
    kernels.add_past(chosen, buffer, weights.tolist(), finer)
    assert np.array_equal(chosen.numpy(), plain)


@needs_numba
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_decay_to_the_same_bits(length):
    loops, plain = (rows_of(np.float64, 1, length)[0] for _ in range(2))
    noise = whole(length)
    kernels._compiled(kernels._decay_in_loops, kernels._DECAY)(loops, 0.977, noise)
    kernels._decay(plain, 0.977, noise)
    chosen = torch.from_numpy(rows_of(np.float64, 1, length)[0])
    kernels.decay(chosen, 0.977, torch.from_numpy(noise))
    assert np.array_equal(loops, plain)
    assert np.array_equal(chosen.numpy(), plain)
    exact = rows_of(np.float64, 1, length)[0]
    np.testing.assert_allclose(plain, 0.977 * exact + noise, rtol=4 * UNIT, atol=2.0**-6)


@needs_numba
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("grid", [0.7 * 2.0**-44, 3.1 * 2.0**-27, 2.0**-30])
def test_sums_go_on_the_grid_to_the_same_bits(grid, dtype, length):
    sums = (np.random.default_rng(4).normal(size=length) * 30).astype(dtype)
    noise = whole(length, bits=40)
    loops = sums.copy()
    kernels._compiled(kernels._put_on_grid_in_loops, kernels._GRID)(loops, noise, 1 / grid, grid)
    chosen = torch.from_numpy(sums.copy())
    kernels.put_on_grid(chosen, torch.from_numpy(noise), grid)
    assert np.array_equal(chosen.numpy(), loops)
    # Without the compiler, and of entries that do not lie one after the other.
    apart = torch.from_numpy(np.stack([sums, sums], axis=1))[:, 0]
    kernels.put_on_grid(apart, torch.from_numpy(noise), grid)
    assert np.array_equal(apart.numpy(), loops)


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_sum_of_past_rows_is_within_the_error_that_is_counted(dtype, count):
    """Of ``error_of_sums``: (terms + 1) units of the largest products, and the roundings."""
    length, finer = 60, 2.0**17 if dtype == np.int32 else 1.0
    rows = rows_of(dtype, count, length)
    weights = np.random.default_rng(5).normal(size=count)
    noise, drawn = whole(length), whole(length)
    kernels._add_past(noise, rows, weights, finer)
    for i in range(length):
        terms = [
            Fraction(w) * Fraction(r) for w, r in zip(weights, rows[:, i].tolist(), strict=True)
        ]
        exact = (Fraction(drawn[i]) + Fraction(finer) * sum(terms)) / Fraction(finer)
        summing = (count + 1) * Fraction(UNIT) * sum(abs(term) for term in terms)
        half_of_finer = Fraction(1, 2) / Fraction(finer)
        half = Fraction(1, 2) if finer > 1 else 0  # what is whole is rounded once
        assert abs(Fraction(noise[i]) - exact) <= half + half_of_finer + summing


def test_the_tensors_of_a_device_give_the_same_numbers_up_to_a_unit():
    """By torch's operations, as for a GPU; here bfloat16 rows, whose products are exact or near."""
    rows = torch.from_numpy(rows_of(np.float64, 3, 500)).to(torch.bfloat16)
    weights = [0.5, -0.25, 0.125]  # exact products
    noise, expected = torch.from_numpy(whole(500)), torch.from_numpy(whole(500))
    kernels.add_past(noise, rows, weights, 1.0)
    kernels.add_past(expected, rows.double(), weights, 1.0)
    assert torch.equal(noise, expected)
