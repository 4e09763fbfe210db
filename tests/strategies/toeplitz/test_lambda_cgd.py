"""Noise that takes back a part of the last step's."""

import math

import numpy as np
import pytest

from dptrain.strategies import Strategy
from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.strategies.toeplitz.lambda_cgd import LambdaCGD
from dptrain.testing import StrategyContract


class TestNothing(StrategyContract):
    def make_strategy(self):
        return LambdaCGD(cancellation=0.0)


class TestHalf(StrategyContract):
    def make_strategy(self):
        return LambdaCGD(cancellation=0.5)


class TestNearlyAll(StrategyContract):
    def make_strategy(self):
        return LambdaCGD(cancellation=0.99)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_errors_and_sensitivity_in_closed_form(part):
    # A C^-1 has the first column 1, 1-λ, 1-λ, …; ‖c‖² is a geometric series.
    n = 40
    bound = LambdaCGD(cancellation=part).bind(n)
    t = np.arange(n)
    np.testing.assert_allclose(bound.errors(n) ** 2, 1 + t * (1 - part) ** 2, rtol=1e-10)
    one = bound.sensitivity(steps=n, max_participations=1, min_sep=1)
    assert one == pytest.approx(math.sqrt((1 - part ** (2 * n)) / (1 - part**2)), rel=1e-12)
    every = bound.sensitivity(steps=n, max_participations=n, min_sep=1)
    sums = (1 - part ** (t + 1)) / (1 - part)
    assert every == pytest.approx(np.linalg.norm(sums), rel=1e-12)
    assert bound.sensitivity_is_exact(steps=n, max_participations=7, min_sep=5)


def test_half_is_the_inverse_square_root_of_two_bands():
    n = 30
    half, root = LambdaCGD(cancellation=0.5).bind(n), BISR(inverse_bands=2).bind(n)
    np.testing.assert_array_equal(half.columns(n, range(n)), root.columns(n, range(n)))


def test_noise_is_a_difference():
    z = np.random.default_rng(0).normal(size=50)
    y = LambdaCGD(cancellation=0.7).bind(50).solve(z)
    np.testing.assert_allclose(y[1:], z[1:] - 0.7 * z[:-1], rtol=0, atol=1e-14)


def test_reads_what_it_writes():
    bound = LambdaCGD(cancellation=0.3).bind(9)
    assert Strategy.from_dict(bound.to_dict()) == bound
    assert bound.coefficient_hash != LambdaCGD(cancellation=0.4).bind(9).coefficient_hash
    assert (bound.inverse_bands, bound.bands) == (2, 9)
    none = LambdaCGD(cancellation=0).bind(1)
    assert (none.inverse_bands, none.bands) == (1, 1)


def test_bad_input():
    for part in (-0.1, 1, 1.5, math.nan, "0.5", None, True):
        with pytest.raises((TypeError, ValueError), match="cancellation="):
            LambdaCGD(cancellation=part)
    with pytest.raises(ValueError, match="at most inverse_bands=1"):
        LambdaCGD(cancellation=0.5).bind(1)
    with pytest.raises(ValueError, match="bound to 9 steps, not 10"):
        LambdaCGD(cancellation=0.5, steps=9).bind(10)
    with pytest.raises(ValueError, match="is not bound"):
        _ = LambdaCGD(cancellation=0.5).bands
