"""The banded square root with momentum and weight decay, and the series behind it."""

import math

import numpy as np
import pytest
from scipy.linalg import sqrtm, toeplitz

from dptrain.strategies.toeplitz import square_root_series
from dptrain.strategies.toeplitz.bsr import BSR, square_root_coefficients
from dptrain.strategies.toeplitz.square_root_series import inverse_square_root_coefficients
from dptrain.testing import StrategyContract

DECAYS = [(1.0, 0.0), (0.7, 0.0), (1.0, 0.9), (0.9, 0.5), (0.999, 0.998), (1.0, 0.999999)]


class TestWeightDecay(StrategyContract):
    def make_strategy(self):
        return BSR(bands=4, alpha=0.8)


class TestMomentum(StrategyContract):
    def make_strategy(self):
        return BSR(bands=4, beta=0.9)


class TestBothFull(StrategyContract):
    def make_strategy(self):
        return BSR(bands=self.steps, alpha=0.95, beta=0.4)


class TestOneBand(StrategyContract):
    def make_strategy(self):
        return BSR(bands=1, alpha=0.5, beta=0.2)


def workload(n, alpha, beta):
    """A_{α,β} = (Toeplitz of powers of α)(Toeplitz of powers of β), dense."""
    k = np.arange(n)
    return np.tril(toeplitz(alpha**k)) @ np.tril(toeplitz(beta**k))


@pytest.mark.parametrize(("alpha", "beta"), DECAYS)
def test_square_is_the_workload(alpha, beta):
    n = 30
    root = BSR(bands=n, alpha=alpha, beta=beta).columns(n, np.arange(n))
    np.testing.assert_allclose(root @ root, workload(n, alpha, beta), rtol=1e-13, atol=1e-13)


def test_against_the_square_root_of_a_dense_matrix():
    # Small n: a Toeplitz triangle is one Jordan block, on which sqrtm loses digits.
    dense = np.real(sqrtm(workload(6, 0.9, 0.4)))
    np.testing.assert_allclose(square_root_coefficients(6, 0.9, 0.4), dense[:, 0], atol=1e-6)


@pytest.mark.parametrize("name", ["root", "inverse"])
@pytest.mark.parametrize(("alpha", "beta"), DECAYS)
def test_against_the_product_of_two_series(alpha, beta, name):
    n = 2000
    k = np.arange(1, n)
    factors = 1 - 0.5 / k if name == "root" else 1 - 1.5 / k
    series = np.cumprod(np.concatenate([[1.0], factors]))
    powers = np.arange(n)
    direct = np.convolve(series * alpha**powers, series * beta**powers)[:n]
    if name == "root":
        np.testing.assert_allclose(square_root_coefficients(n, alpha, beta), direct, rtol=1e-11)
    else:  # terms of both signs: absolute precision only
        ours = inverse_square_root_coefficients(n, alpha, beta)
        np.testing.assert_allclose(ours, direct, atol=1e-13)


@pytest.mark.parametrize(("alpha", "beta"), DECAYS)
def test_the_two_series_are_reciprocal(alpha, beta):
    n = 400
    c = square_root_coefficients(n, alpha, beta)
    g = inverse_square_root_coefficients(n, alpha, beta)
    np.testing.assert_allclose(np.convolve(c, g)[:n], np.eye(n)[0], atol=1e-13)


@pytest.mark.parametrize(("alpha", "beta"), DECAYS)
def test_signs_and_order(alpha, beta):
    n = 3000
    c = square_root_coefficients(n, alpha, beta)
    g = inverse_square_root_coefficients(n, alpha, beta)
    assert c.min() >= 0
    assert np.all(np.diff(c) <= 0)
    assert g[0] == 1
    assert np.all(g[1:] <= 0)
    assert -g[1:].sum() <= 1


def test_defaults_are_prefix_sums_bit_for_bit():
    for count in (1, 2, 3, 1000):
        plain = np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, count)]))
        np.testing.assert_array_equal(BSR(bands=count).first_column(count), plain)


def test_published_fractions():
    np.testing.assert_allclose(
        inverse_square_root_coefficients(6), [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128, -7 / 256]
    )
    a, b = 0.9, 0.6
    by_hand = [1, (a + b) / 2, (3 * a * a + 2 * a * b + 3 * b * b) / 8]
    np.testing.assert_allclose(square_root_coefficients(3, a, b), by_hand, rtol=1e-15)


@pytest.mark.parametrize("a", [0.5, 1.5])
def test_blocks_do_not_show(monkeypatch, a):
    whole = square_root_series._beta_moments(500, 1.0, 0.9, a)
    monkeypatch.setattr(square_root_series, "_BLOCK", 7)
    np.testing.assert_allclose(
        square_root_series._beta_moments(500, 1.0, 0.9, a), whole, rtol=1e-14
    )


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_far_coefficients_follow_the_singularity(beta):
    # Near x = 1 the series is (1-β)^{-1/2} (1-x)^{-1/2}: c_k = (1 + O(1/k))/sqrt((1-β) π k).
    k = 10**6
    c = square_root_coefficients(k + 1, 1.0, beta)
    assert c[k] == pytest.approx(1 / math.sqrt((1 - beta) * math.pi * k), rel=20 / k)


@pytest.mark.parametrize("alpha", [0.0, -0.5, 1.0001, math.nan, math.inf, "1", True, None])
def test_bad_weight_decay(alpha):
    with pytest.raises((TypeError, ValueError), match="alpha="):
        BSR(bands=2, alpha=alpha)


@pytest.mark.parametrize("beta", [-0.1, 0.9, 0.95, math.nan, -math.inf, "0", False, None])
def test_bad_momentum(beta):
    with pytest.raises((TypeError, ValueError), match="beta="):
        BSR(bands=2, alpha=0.9, beta=beta)


def test_numbers_of_other_types_become_floats():
    assert BSR(bands=2, alpha=1, beta=np.float32(0.5)) == BSR(bands=2, beta=0.5)
    assert BSR(bands=2, beta=-0.0).coefficient_hash == BSR(bands=2).coefficient_hash


@pytest.mark.parametrize("bands", [2, 5, 40])
@pytest.mark.parametrize(("alpha", "beta"), DECAYS)
def test_the_inverse_does_not_grow(alpha, beta, bands):
    g = BSR(bands=bands, alpha=alpha, beta=beta).inverse_column(5000)
    assert np.abs(g).max() <= 2
