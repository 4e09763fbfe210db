"""Correlation of the noise against dense covariance matrices."""

import numpy as np
import pytest

from dptrain.strategies import BSR, BandMF, Identity
from dptrain.strategies.toeplitz.toeplitz import noise_autocorrelation
from dptrain.strategies.trees.tree import Tree, TreeRestart


@pytest.mark.parametrize(
    "strategy", [BSR(bands=3), BandMF(bands=5), BSR(bands=12), Tree(), TreeRestart(height=3)]
)
@pytest.mark.parametrize("lags", [1, 4, 50])
def test_against_the_dense_covariance(strategy, lags):
    n = 12
    bound = strategy.bind(n)
    w = bound.solve(np.eye(bound.rows(n)))
    covariance = w @ w.T
    expected = [np.trace(covariance, -k) / np.trace(covariance) for k in range(min(lags, 11) + 1)]
    np.testing.assert_allclose(noise_autocorrelation(strategy, n, lags), expected, atol=1e-12)


def test_independent_noise_has_none():
    np.testing.assert_array_equal(noise_autocorrelation(Identity(), 6, 3), [1, 0, 0, 0])
    assert noise_autocorrelation(Identity(), 1, 3).tolist() == [1.0]


def test_two_bands_by_hand():
    # C = [[1, 0], [1/2, 1]]: y_0 = z_0, y_1 = z_1 - z_0/2, so the covariance is -1/2 and the
    # variances are 1 and 5/4.
    assert noise_autocorrelation(BSR(bands=2), 2, 1)[1] == pytest.approx(-0.5 / 2.25)
