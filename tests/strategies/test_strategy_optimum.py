"""Loss, gradient and optimum of banded Toeplitz strategies."""

import time

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dptrain.strategies import BSR, BandMF
from dptrain.strategies.optimize import (
    error_weights,
    log_loss_and_gradient,
    optimal_coefficients,
)


def dense_error(c, n, objective):
    """‖A C^-1‖_F²/n or the largest squared row norm, times ‖c‖², with dense matrices."""
    dense = np.tril(toeplitz(np.pad(c, (0, n - len(c)))))
    rows = np.sum((np.tril(np.ones((n, n))) @ np.linalg.inv(dense)) ** 2, axis=1)
    return (rows.mean() if objective == "mean" else rows.max()) * (c @ c)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "bands"), [(1, 1), (7, 1), (7, 3), (7, 7), (40, 5)])
def test_loss_against_dense_matrices(objective, n, bands):
    c = np.random.default_rng(n + bands).uniform(0.2, 1.0, size=bands)
    loss, _ = log_loss_and_gradient(c, error_weights(n, objective))
    scale = n if objective == "mean" else 1
    assert np.exp(loss) / scale == pytest.approx(dense_error(c, n, objective), rel=1e-10)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "bands"), [(7, 3), (7, 7), (60, 8)])
def test_gradient_against_finite_differences(objective, n, bands):
    weights = error_weights(n, objective)
    c = BSR(bands=bands).first_column(n) * np.random.default_rng(1).uniform(0.9, 1.1, bands)
    _, gradient = log_loss_and_gradient(c, weights)
    h = 1e-5  # central differences are off by about h² = 1e-10, rounding by 1e-16/h = 1e-11
    for k in range(bands):
        step = h * np.eye(bands)[k]
        up, _ = log_loss_and_gradient(c + step, weights)
        down, _ = log_loss_and_gradient(c - step, weights)
        assert gradient[k] == pytest.approx((up - down) / (2 * h), rel=1e-6, abs=1e-8)


def test_loss_ignores_scale():
    weights = error_weights(30, "mean")
    c = BSR(bands=6).first_column(30)
    loss, gradient = log_loss_and_gradient(c, weights)
    assert log_loss_and_gradient(7 * c, weights)[0] == pytest.approx(loss, rel=1e-12)
    assert gradient @ c == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("n", "bands", "best_known"), [(1000, 16, 6.278163), (10_000, 64, 9.852664)]
)
def test_no_worse_than_the_best_known(n, bands, best_known):
    bound = BandMF(bands=bands).bind(n)
    c = bound.first_column(n)
    assert np.linalg.norm(c) == pytest.approx(1.0, rel=1e-12)
    assert c.min() >= 0
    assert bound.rmse(n) <= best_known
    square_root = BSR(bands=bands)
    assert bound.rmse(n) < square_root.rmse(n) * np.linalg.norm(square_root.first_column(n))


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "bands"), [(2, 2), (10, 4), (30, 30), (200, 9)])
def test_optimum_is_stationary_and_beats_the_square_root(objective, n, bands):
    c = optimal_coefficients(n, bands, objective)
    _, gradient = log_loss_and_gradient(c, error_weights(n, objective))
    # First-order conditions of min over c ≥ 0.
    assert np.abs(gradient[c > 0]).max() < 1e-5
    assert np.all(gradient[c == 0] >= 0)
    start = BSR(bands=bands).first_column(n)
    assert dense_error(c, n, objective) <= dense_error(start, n, objective) * (1 + 1e-12)
    rng = np.random.default_rng(0)
    for _ in range(50):
        near = np.maximum(c + rng.normal(scale=0.02, size=bands), 0)
        near[0] = max(near[0], 0.1)
        assert dense_error(near, n, objective) >= dense_error(c, n, objective) * (1 - 1e-9)


def test_two_steps_two_bands_by_hand():
    # C = [[1, 0], [c, 1]]: A C^-1 = [[1, 0], [1 - c, 1]], so the mean objective is
    # (1 + c²)(2 + (1 - c)²). Its derivative is 2(2c³ - 3c² + 4c - 1).
    real = [r.real for r in np.roots([2, -3, 4, -1]) if abs(r.imag) < 1e-12]
    c = optimal_coefficients(2, 2, "mean")
    assert c[1] / c[0] == pytest.approx(real[0], abs=1e-7)


@pytest.mark.parametrize(("n", "bands", "limit"), [(1000, 16, 0.020), (10_000, 64, 0.100)])
def test_binding_is_quick(n, bands, limit):
    # Best of several: other work on the machine only ever adds time.
    times = []
    for _ in range(5):
        start = time.perf_counter()
        BandMF(bands=bands).bind(n)
        times.append(time.perf_counter() - start)
    assert min(times) <= limit
