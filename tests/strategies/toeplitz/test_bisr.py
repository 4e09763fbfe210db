"""The banded inverse square root."""

import numpy as np
import pytest

from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.strategies.toeplitz.square_root import SquareRoot
from dptrain.testing import StrategyContract

DECAYS = [(1.0, 0.0), (0.7, 0.0), (1.0, 0.9), (0.9, 0.5), (0.999, 0.998), (1.0, 0.999999)]


class TestOneBand(StrategyContract):
    def make_strategy(self):
        return BISR(inverse_bands=1)


class TestTwoBands(StrategyContract):
    def make_strategy(self):
        return BISR(inverse_bands=2)


class TestMomentum(StrategyContract):
    def make_strategy(self):
        return BISR(inverse_bands=3, alpha=0.99, beta=0.9)


class TestWeightDecay(StrategyContract):
    def make_strategy(self):
        return BISR(inverse_bands=4, alpha=0.6)


class TestAllBands(StrategyContract):
    def make_strategy(self):
        return BISR(inverse_bands=self.steps, beta=0.5)


@pytest.mark.parametrize("bands", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("alpha", "beta"), DECAYS)
def test_coefficients_do_not_increase(alpha, beta, bands):
    # The theorem of the class; rounding must not spoil it, nor the exactness that rests on it.
    n = 3000
    bound = BISR(inverse_bands=bands, alpha=alpha, beta=beta).bind(n)
    c = np.pad(bound.first_column(n), (0, n - bound.first_column(n).size))
    assert c.min() >= 0
    assert np.all(np.diff(c) <= 1e-15 * c[:-1])
    for m, b in ((3, 1), (10, 20), (3, 1000)):
        assert bound.sensitivity_is_exact(steps=n, max_participations=m, min_sep=b)


@pytest.mark.parametrize("bands", [1, 2, 5, 20])
@pytest.mark.parametrize(("alpha", "beta"), DECAYS)
def test_partial_sums_of_the_inverse_are_log_convex(alpha, beta, bands):
    # Step 2 and 3 of the proof: G_{k-1} G_{k+1} ≥ G_k² for the cut series.
    g = np.pad(BISR(inverse_bands=bands, alpha=alpha, beta=beta).filter(), (0, 10))
    partial = np.cumsum(g)
    assert partial.min() > 0
    assert np.all(partial[:-2] * partial[2:] - partial[1:-1] ** 2 >= -1e-13)


@pytest.mark.parametrize(("alpha", "beta"), DECAYS)
def test_all_bands_are_the_square_root(alpha, beta):
    n = 200
    bound = BISR(inverse_bands=n, alpha=alpha, beta=beta).bind(n)
    root = SquareRoot(alpha=alpha, beta=beta).bind(n)
    np.testing.assert_allclose(bound.first_column(n), root.first_column(n), rtol=1e-11)


def test_the_first_coefficients_are_those_of_the_square_root():
    # C and A^{1/2} differ only from lag inverse_bands on.
    c = BISR(inverse_bands=9).bind(30).first_column(30)
    root = SquareRoot().bind(30).first_column(30)
    np.testing.assert_allclose(c[:9], root[:9], rtol=1e-14)
    assert np.all(c[9:] < root[9:])


def test_two_bands_are_a_geometric_series():
    n = 20
    np.testing.assert_allclose(BISR(inverse_bands=2).bind(n).first_column(n), 0.5 ** np.arange(n))


def test_noise_is_a_short_convolution():
    z = np.random.default_rng(0).normal(size=50)
    y = BISR(inverse_bands=3).bind(50).solve(z)
    t = np.arange(2, 50)
    np.testing.assert_allclose(y[2:], z[t] - z[t - 1] / 2 - z[t - 2] / 8, rtol=0, atol=1e-14)


def test_bands_of_c_are_not_those_of_its_inverse():
    assert BISR(inverse_bands=3).bind(50).bands == 50
    assert BISR(inverse_bands=1).bind(50).bands == 1
    with pytest.raises(ValueError, match=r"BISR is not bound.*bind"):
        _ = BISR(inverse_bands=3).bands


def test_a_million_steps():
    n = 10**6
    bound = BISR(inverse_bands=8).bind(n)
    schedule = {"steps": n, "max_participations": 4, "min_sep": n // 4}
    assert bound.sensitivity_is_exact(**schedule)
    # c dies out within an epoch, so participations are orthogonal for all that matters.
    one = bound.sensitivity(steps=n, max_participations=1, min_sep=1)
    assert bound.sensitivity(**schedule) == pytest.approx(2 * one, rel=1e-9)


@pytest.mark.parametrize("bands", [0, -1, 1.5, "3", None, True])
def test_inverse_bands_must_be_a_positive_integer(bands):
    with pytest.raises((TypeError, ValueError), match="inverse_bands="):
        BISR(inverse_bands=bands)


def test_bad_input():
    with pytest.raises(ValueError, match="at most inverse_bands=7"):
        BISR(inverse_bands=8).bind(7)
    with pytest.raises(ValueError, match="at most inverse_bands=7"):
        BISR(inverse_bands=8, steps=7)
    with pytest.raises(ValueError, match="alpha="):
        BISR(inverse_bands=2, alpha=0)
    with pytest.raises(ValueError, match="beta="):
        BISR(inverse_bands=2, alpha=0.5, beta=0.5)
    bound = BISR(inverse_bands=2).bind(9)
    with pytest.raises(ValueError, match="bound to 9 steps, not 10"):
        bound.bind(10)
    with pytest.raises(ValueError, match="bound to 9"):
        bound.inverse_column(8)
    with pytest.raises(ValueError, match=r"bind\(5\)"):
        BISR(inverse_bands=2).first_column(5)
