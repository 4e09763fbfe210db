"""Closed forms of BLTs against dense matrices, exact arithmetic and long series."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.signal import lfilter

from dptrain.strategies.blt.forms import (
    inverse_column,
    inverse_poles,
    partial_fractions,
    partial_fractions_adjoint,
    powers_error,
    prefix_weights,
    regular_norm,
)
from tests.oracles import strategy_matrices as matrices

CASES = [
    ((0.7,), (0.4,)),
    ((0.5,), (1.3,)),  # θ̂ = -0.8
    ((0.9, 0.2), (0.1, 0.3)),
    ((0.2, 0.9, 0.6), (0.3, 0.1, 0.2)),  # not sorted
    ((1 - 1e-9, 0.99999, 0.3), (1e-4, 1e-3, 0.4)),
    ((0.5, 0.5 + 1e-12), (0.2, 0.2)),
    ((0.8, 0.3), (1e-18, 0.3)),
]


def distances(theta, omega):
    return 1 - np.array(theta), np.array(omega)


@pytest.mark.parametrize(("theta", "omega"), CASES)
def test_poles_of_the_inverse_solve_the_secular_equation(theta, omega):
    p, omega = distances(theta, omega)
    q, _ = inverse_poles(p, omega)
    assert np.all(np.diff(q) > 0)

    def secular(x):  # falls between two neighboring p, from +∞ to -∞
        return sum(Fraction(w) / (x - Fraction(d)) for d, w in zip(p, omega, strict=True)) - 1

    for root in q:
        # The root is a float: it can be on the side of a pole that is less than a rounding away.
        step = Fraction(root) / 10**14
        touches = any(abs(Fraction(root) - Fraction(d)) <= step for d in p)
        assert touches or secular(Fraction(root) - step) > 0 > secular(Fraction(root) + step)


@pytest.mark.parametrize(("theta", "omega"), CASES)
def test_inverse_column_against_forward_substitution(theta, omega):
    g = inverse_column(*inverse_poles(*distances(theta, omega)), 60)
    expected = matrices.inverse(matrices.blt(theta, omega, 60))[:, 0]
    np.testing.assert_allclose(g, expected, rtol=1e-11, atol=1e-15)


def test_buffers_without_weight_leave_no_trace():
    p, omega = distances((0.9, 0.5, 0.1), (0.2, 0.0, 0.3))
    q, weights = inverse_poles(p, omega)
    fewer, fewer_weights = inverse_poles(p[[0, 2]], omega[[0, 2]])
    np.testing.assert_array_equal(q, fewer)
    np.testing.assert_array_equal(weights, fewer_weights)
    assert inverse_poles(p, 0 * omega)[0].size == 0


@pytest.mark.parametrize(("theta", "omega"), CASES)
@pytest.mark.parametrize("n", [1, 2, 50])
def test_errors_against_dense_matrices(theta, omega, n):
    p, omega = distances(theta, omega)
    w = np.tril(np.ones((n, n))) @ matrices.inverse(matrices.blt(theta, omega, n))
    ratios, weights = prefix_weights(p, omega, *inverse_poles(p, omega))
    assert weights.sum() == pytest.approx(1, rel=1e-13)
    mean, largest = (powers_error(ratios, weights, n, kind)[0] for kind in ("mean", "max"))
    assert mean == pytest.approx(np.sum(w**2), rel=1e-12)
    assert largest == pytest.approx(np.sum(w**2, axis=1).max(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("theta", [(1 - 1e-7, 0.9999, 0.9), (1 - 1e-9, 1 - 1e-8, 0.5)])
def test_errors_against_a_series_of_ten_million_terms(theta):
    n = 10**7
    p, omega = distances(theta, (1e-3, 1e-2, 0.2))
    q, omega_hat = inverse_poles(p, omega)
    ratios, weights = prefix_weights(p, omega, q, omega_hat)
    # w = A C^-1 e_0 by d filters and running sums: no powers, no partial fractions of A.
    impulse = np.zeros(n)
    impulse[0] = 1
    g = impulse.copy()
    for distance, weight in zip(q, omega_hat, strict=True):
        g -= lfilter([0, weight], [1, distance - 1], impulse)
    w = np.cumsum(g)
    mean, largest = (powers_error(ratios, weights, n, kind)[0] for kind in ("mean", "max"))
    assert mean == pytest.approx(float(np.sum(np.arange(n, 0, -1.0) * w * w)), rel=1e-7)
    assert largest == pytest.approx(float(w @ w), rel=1e-7)


SCHEDULES = [(1, 1, 1), (1, 1, 9), (2, 2, 1), (30, 1, 4), (30, 4, 7), (30, 5, 7), (30, 30, 1)]
SCHEDULES += [(30, 2, 29), (31, 3, 15), (2500, 1250, 2)]  # the last one sums its states in blocks


@pytest.mark.parametrize(("n", "m", "b"), SCHEDULES)
@pytest.mark.parametrize(("theta", "omega"), CASES)
def test_norm_of_the_regular_pattern(theta, omega, n, m, b):
    c = np.concatenate([[1.0], np.power(theta, np.arange(n - 1)[:, None]) @ omega])
    x = np.zeros(n)
    x[: m * b : b] = 1
    expected = np.sum(np.convolve(c, x)[:n] ** 2)
    assert regular_norm(*distances(theta, omega), n, m, b)[0] == pytest.approx(expected, rel=1e-12)


def test_norm_of_a_long_pattern():
    n, m, b = 10**6, 9, 110_000
    theta, omega = (1 - 1e-7, 1 - 1e-4), (1e-4, 1e-2)
    x = np.zeros(n)
    x[: m * b : b] = 1
    y = x.copy()
    for decay, weight in zip(theta, omega, strict=True):
        y += lfilter([0, weight], [1, -decay], x)
    found = regular_norm(*distances(theta, omega), n, m, b)[0]
    assert found == pytest.approx(float(y @ y), rel=1e-9)


def slopes(function, x, h):
    """Central differences of a function of an array."""
    steps = h * x * np.eye(x.size)
    return np.array([(function(x + s) - function(x - s)) / (2 * s.sum()) for s in steps])


@pytest.mark.parametrize(("n", "m", "b"), [(30, 1, 1), (30, 4, 7), (30, 30, 1), (5000, 2500, 2)])
def test_gradient_of_the_norm(n, m, b):
    p, omega = distances((0.999, 0.9, 0.2), (0.01, 0.1, 0.3))
    _, to_p, to_omega = regular_norm(p, omega, n, m, b)
    by_p = slopes(lambda x: regular_norm(x, omega, n, m, b)[0], p, 1e-5)
    by_omega = slopes(lambda x: regular_norm(p, x, n, m, b)[0], omega, 1e-5)
    np.testing.assert_allclose(to_p, by_p, rtol=1e-6)
    np.testing.assert_allclose(to_omega, by_omega, rtol=1e-6)


@pytest.mark.parametrize("objective", ["mean", "max"])
def test_gradient_of_the_error(objective):
    r, a = np.array([1e-4, 0.1, 0.6, 1.3]), np.array([0.2, 0.3, 0.4, 0.1])
    _, to_r, to_a = powers_error(r, a, 500, objective)
    by_r = slopes(lambda x: powers_error(x, a, 500, objective)[0], r, 1e-5)
    by_a = slopes(lambda x: powers_error(r, x, 500, objective)[0], a, 1e-5)
    np.testing.assert_allclose(to_r, by_r, rtol=1e-6)
    np.testing.assert_allclose(to_a, by_a, rtol=1e-6)


def test_partial_fractions_are_the_rational_function():
    poles, zeros = np.array([0.1, 0.5, 1.2]), np.array([0.3, 0.8])
    weights = partial_fractions(poles, zeros)
    for u in (2.0, -3.0, 1.7):
        expected = np.prod(u - (1 - zeros)) / np.prod(u - (1 - poles))
        assert np.sum(weights / (u - (1 - poles))) == pytest.approx(expected, rel=1e-12)
    direction = np.array([1.0, -2.0, 0.5])
    to_poles, to_zeros = partial_fractions_adjoint(poles, zeros, weights, direction)
    by_poles = slopes(lambda x: direction @ partial_fractions(x, zeros), poles, 1e-6)
    by_zeros = slopes(lambda x: direction @ partial_fractions(poles, x), zeros, 1e-6)
    np.testing.assert_allclose(to_poles, by_poles, rtol=1e-7)
    np.testing.assert_allclose(to_zeros, by_zeros, rtol=1e-7)
