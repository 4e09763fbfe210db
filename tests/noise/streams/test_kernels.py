"""The loops over a block: the same bits compiled and by numpy, and their results by fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from dptrain.noise.generators.compiled import can_compile, compiled
from dptrain.noise.streams import kernels
from dptrain.noise.streams.grid import UNIT

needs_numba = pytest.mark.skipif(not can_compile(), reason="numba is not installed")
LENGTHS = [0, 1, 8191, 8192, 8193, 20001, 1 << 15]  # pieces of 8192 entries


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
    compiled(kernels._add_past_in_loops, kernels._PAST)(loops, rows, weights, finer)
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
    compiled(kernels._decay_in_loops, kernels._DECAY)(loops, 0.977, noise)
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
    compiled(kernels._put_on_grid_in_loops, kernels._GRID)(loops, noise, 1 / grid, grid)
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


class Elsewhere(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU, so that torch's operations are taken."""

    device = torch.device("cuda", 0)


def elsewhere(values):
    return torch.from_numpy(values).as_subclass(Elsewhere)


def here(tensor):
    return tensor.as_subclass(torch.Tensor).numpy()


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_torch_operations_add_past_rows_up_to_the_last_bit(dtype):
    """A product and a sum may be rounded as one: a unit of the grid where a half is near."""
    length, finer = 5001, 2.0**17 if dtype == np.int32 else 1.0
    rows = rows_of(dtype, 5, length)
    weights = np.random.default_rng(2).normal(size=5).tolist()
    noise, expected = elsewhere(whole(length)), torch.from_numpy(whole(length))
    kernels.add_past(noise, elsewhere(rows), weights, finer)
    kernels.add_past(expected, torch.from_numpy(rows), weights, finer)
    apart = np.abs(here(noise) - expected.numpy())
    assert apart.max() <= 1
    assert np.mean(apart) < 0.02


def test_torch_operations_decay_and_put_on_the_grid():
    length, grid = 5001, 0.7 * 2.0**-27
    row, noise = rows_of(np.float64, 1, length)[0], whole(length)
    expected = torch.from_numpy(row.copy())
    kernels.decay(expected, 0.977, torch.from_numpy(noise))
    found = elsewhere(row.copy())
    kernels.decay(found, 0.977, elsewhere(noise))
    np.testing.assert_allclose(here(found), expected.numpy(), rtol=4 * UNIT, atol=2.0**-6)
    sums = np.random.default_rng(4).normal(size=length)
    for dtype in (np.float32, np.float64):
        total, other = elsewhere(sums.astype(dtype)), torch.from_numpy(sums.astype(dtype))
        kernels.put_on_grid(total, elsewhere(noise), grid)
        kernels.put_on_grid(other, torch.from_numpy(noise), grid)
        assert np.array_equal(here(total), other.numpy())


def test_bfloat16_rows_add_up():
    rows = torch.from_numpy(rows_of(np.float64, 3, 500)).to(torch.bfloat16)
    weights = [0.5, -0.25, 0.125]  # exact products
    noise, expected = torch.from_numpy(whole(500)), torch.from_numpy(whole(500))
    kernels.add_past(noise, rows, weights, 1.0)
    kernels.add_past(expected, rows.double(), weights, 1.0)
    assert torch.equal(noise, expected)
