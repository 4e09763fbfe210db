"""The optimum of banded inverses: loss, gradient, and what other optimizers find."""

import functools
import itertools
import math
import warnings

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.optimize import minimize
from scipy.signal import lfilter

from dptrain.strategies import BandMF
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.toeplitz.band_inv_mf import BandInvMF
from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.strategies.toeplitz.error_loss import final_error_loss
from dptrain.strategies.toeplitz.inverse_optimization import (
    above_floor,
    envelope_cost,
    from_hazards,
    hazard_slope,
    inverse_log_loss,
    to_hazards,
)
from dptrain.strategies.toeplitz.square_root import SquareRoot
from dptrain.strategies.workloads import PREFIX_SUMS


@functools.cache
def patterns(n, m, b):
    """Every x in {0, 1}^n with at most m ones, b apart, as columns."""
    chosen = (
        np.isin(np.arange(n), where)
        for count in range(1, m + 1)
        for where in itertools.combinations(range(n), count)
        if all(gap >= b for gap in np.diff(where))
    )
    return np.array(list(chosen), dtype=float).T


def dense_quality(g, n, m, b, objective):
    """(error × sensitivity)² with dense matrices and every pattern."""
    inverse = np.tril(toeplitz(np.pad(g, (0, n - len(g)))))
    rows = np.sum((np.tril(np.ones((n, n))) @ inverse) ** 2, axis=1)
    worst = np.max(np.sum((np.linalg.inv(inverse) @ patterns(n, m, b)) ** 2, axis=0))
    return (rows.mean() if objective == "mean" else rows.max()) * worst


def quality(strategy, n, m, b, objective="mean"):
    error = strategy.rmse(n) if objective == "mean" else strategy.max_error(n)
    return error * strategy.sensitivity(steps=n, max_participations=m, min_sep=b)


def numerical_slope(function, x, h=1e-6):
    steps = h * np.eye(x.size)
    return np.array([(function(x + s) - function(x - s)) / (2 * h) for s in steps])


# -- loss and gradient -----------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "p", "m", "b"), [(9, 3, 2, 4), (9, 9, 3, 3), (12, 4, 1, 1)])
def test_loss_against_dense_matrices(n, p, m, b, objective):
    a = np.random.default_rng(p).uniform(0.01, 0.9 / p, size=p - 1)
    loss, _ = inverse_log_loss(final_error_loss(PREFIX_SUMS, n, objective), n, m, b)(a)
    g = np.concatenate([[1.0], -a])
    scale = n if objective == "mean" else 1
    dense = dense_quality(g, n, m, b, objective) * scale
    c = np.linalg.inv(np.tril(toeplitz(np.pad(g, (0, n - p)))))[:, 0]
    if m == 1 or np.all(np.diff(c[b:]) <= 0):
        assert np.exp(loss) == pytest.approx(dense, rel=1e-10)
    else:
        assert np.exp(loss) >= dense * (1 - 1e-12)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "p", "m", "b"), [(30, 4, 3, 10), (30, 12, 4, 5), (40, 40, 1, 1)])
def test_gradient_against_finite_differences(n, p, m, b, objective):
    loss = inverse_log_loss(final_error_loss(PREFIX_SUMS, n, objective), n, m, b)
    a = np.random.default_rng(p).uniform(0.01, 0.9 / p, size=p - 1)  # c rises here and there
    slope = numerical_slope(lambda x: loss(x)[0], a)
    np.testing.assert_allclose(loss(a)[1], slope, rtol=1e-6, atol=1e-7)


def test_envelope_cost_against_finite_differences():
    c = np.random.default_rng(0).uniform(0.1, 1, size=20)
    value, slope = envelope_cost(c, 4, 3)
    above = c.copy()
    above[3:] = [c[k:].max() for k in range(3, 20)]
    product = sum(np.concatenate([np.zeros(i), above[: 20 - i]]) for i in (0, 3, 6, 9))
    assert value == pytest.approx(product @ product, rel=1e-12)
    numeric = numerical_slope(lambda x: envelope_cost(x, 4, 3)[0], c)
    np.testing.assert_allclose(slope, numeric, rtol=1e-6, atol=1e-6)


def test_hazards():
    h = np.random.default_rng(1).uniform(0, 2, size=7)
    a = from_hazards(h)
    assert a.min() >= 0
    assert 1 - a.sum() == pytest.approx(np.exp(-h.sum()), rel=1e-12)
    np.testing.assert_allclose(to_hazards(a), h, rtol=1e-12)
    target = np.arange(7.0)
    numeric = numerical_slope(lambda x: target @ from_hazards(x) ** 2, h)
    np.testing.assert_allclose(hazard_slope(h, 2 * target * a), numeric, rtol=1e-6, atol=1e-9)


# -- the optimum -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "p", "m", "b"), [(8, 3, 1, 1), (10, 3, 2, 5), (12, 4, 3, 4)])
def test_no_worse_than_a_generic_optimizer_on_dense_matrices(n, p, m, b, objective):
    bound = BandInvMF(inverse_bands=p, objective=objective, max_participations=m, min_sep=b).bind(n)
    ours = dense_quality(np.array(bound.coefficients), n, m, b, objective)
    best = math.inf
    rng = np.random.default_rng(n)
    for _ in range(3):
        found = minimize(
            lambda a: dense_quality(np.concatenate([[1.0], -np.abs(a)]), n, m, b, objective),
            rng.uniform(0, 1 / p, size=p - 1),
            method="Nelder-Mead",
            options={"xatol": 1e-7, "fatol": 1e-10, "maxiter": 600},
        )
        best = min(best, found.fun)
    assert ours <= best * (1 + 1e-7)
    assert quality(bound, n, m, b, objective) ** 2 == pytest.approx(ours, rel=1e-10)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "p", "m", "b"), [(60, 4, 3, 20), (200, 8, 4, 50), (500, 16, 1, 1)])
def test_optimum_is_stationary_and_beats_bisr(n, p, m, b, objective):
    bound = BandInvMF(inverse_bands=p, objective=objective, max_participations=m, min_sep=b).bind(n)
    g = np.array(bound.coefficients)
    c = bound.first_column(n)
    assert np.linalg.norm(c) == pytest.approx(1, rel=1e-12)
    assert bound.sensitivity_is_exact(steps=n, max_participations=m, min_sep=b)
    a = -g[1:] / g[0]
    value, slope = inverse_log_loss(final_error_loss(PREFIX_SUMS, n, objective), n, m, b)(a)
    # First-order conditions of min over a ≥ 0; the slopes of log-losses at BISR are of order 1-100.
    assert np.abs(slope[a > 1e-9]).max() < 1e-3
    assert np.all(slope[a <= 1e-9] > -1e-3)
    scale = n if objective == "mean" else 1
    assert quality(bound, n, m, b, objective) ** 2 * scale == pytest.approx(np.exp(value), rel=1e-9)
    plain = BISR(inverse_bands=p).bind(n)
    assert quality(bound, n, m, b, objective) < quality(plain, n, m, b, objective)


def test_all_bands_and_one_participation_is_nearly_the_best_toeplitz_matrix():
    # With all n coefficients free, C and C^-1 range over the same matrices but for g_k ≤ 0;
    # the optimizer of BandMF searches from the other side.
    n = 40
    inverse, direct = BandInvMF(inverse_bands=n).bind(n), BandMF(bands=n).bind(n)
    ours, theirs = (quality(s, n, 1, 1) for s in (inverse, direct))
    assert theirs * (1 - 1e-7) <= ours <= theirs * (1 + 1e-3)


def test_the_square_root_is_best_for_the_worst_query():
    # w * c = a = (1, …, 1), and ‖w‖·‖c‖ is least at w = c; the other optimizer agrees.
    n = 40
    inverse = BandInvMF(inverse_bands=n, objective="max").bind(n)
    direct = BandMF(bands=n, objective="max").bind(n)
    ours, theirs = (quality(s, n, 1, 1, "max") for s in (inverse, direct))
    root = SquareRoot().bind(n).first_column(n)
    assert ours == pytest.approx(root @ root, rel=1e-6)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(("n", "m", "b"), [(500, 1, 500), (500, 5, 100)])
def test_more_bands_are_better(n, m, b):
    values = [
        quality(BandInvMF(inverse_bands=p, max_participations=m, min_sep=b).bind(n), n, m, b)
        for p in (1, 2, 4, 8, 16)
    ]
    assert np.all(np.diff(values) < 0)
    # No factorization beats the nuclear norm of A (one participation costs no more than m).
    j = np.arange(1, n + 1)
    assert values[-1] >= np.sum(1 / (2 * np.sin((2 * j - 1) * np.pi / (4 * n + 2)))) / n


@pytest.mark.slow
def test_longer_than_the_separation():
    # The regular pattern must not be dodged: the report for the schedule is what was optimized.
    n, m, b = 24, 4, 6
    for objective in ("mean", "max"):
        bound = BandInvMF(
            inverse_bands=n, objective=objective, max_participations=m, min_sep=b
        ).bind(n)
        reported = quality(bound, n, m, b, objective) ** 2
        true = dense_quality(np.array(bound.coefficients), n, m, b, objective)
        assert reported >= true * (1 - 1e-12)
        assert reported <= true * 1.02
        short = BandInvMF(inverse_bands=3, objective=objective, max_participations=m, min_sep=b)
        assert reported <= quality(short.bind(n), n, m, b, objective) ** 2 * (1 + 1e-3)


@pytest.mark.parametrize(
    ("bands", "momentum", "cost"),
    [
        (2, 0.0, 1e-6),
        (2, 0.9, 1e-6),
        (3, 0.0, 1e-3),
        (3, 0.9, 0.03),
        (5, 0.0, 1e-3),
        (5, 0.9, 0.03),
    ],
)
def test_cost_of_negative_coefficients(bands, momentum, cost):
    # One participation: error × ‖c‖ whatever the signs, as filters, over any g_1, g_2, …
    n = 200
    column = lfilter([1.0], [1.0, -momentum], np.ones(n))  # of A
    weights = np.arange(n, 0, -1.0) / n
    impulse = np.eye(1, n)[0]

    def log_quality(tail):
        with np.errstate(all="ignore"):
            w = lfilter([1.0, *tail], [1.0], column)
            c = lfilter([1.0], [1.0, *tail], impulse)
            value = np.log(weights @ (w * w)) + np.log(c @ c)
        return value / 2 if np.isfinite(value) else 1e3

    workload = MomentumSGD(momentum=momentum)
    bound = BandInvMF(inverse_bands=bands, workload=workload).bind(n)
    g = np.array(bound.coefficients)
    ours = bound.rmse(n, workload) * bound.sensitivity(steps=n, max_participations=1, min_sep=n)
    assert np.log(ours) == pytest.approx(log_quality(g[1:] / g[0]), abs=1e-9)
    free = g[1:] / g[0]
    for _ in range(4):
        options = {"xatol": 1e-9, "fatol": 1e-12, "maxfev": 3000}
        free = minimize(log_quality, free, method="Nelder-Mead", options=options).x
        free = minimize(log_quality, free, method="BFGS").x
    assert np.log(ours) <= log_quality(free) + cost


def test_two_steps_by_hand():
    # C = [[1, 0], [c, 1]] as for BandMF: derivative 2(2c³ - 3c² + 4c - 1), and g_1 = -c.
    real = [r.real for r in np.roots([2, -3, 4, -1]) if abs(r.imag) < 1e-12]
    g = BandInvMF(inverse_bands=2).bind(2).coefficients
    assert -g[1] / g[0] == pytest.approx(real[0], abs=1e-6)


def test_long_runs():
    n = 50_000
    schedule = {"max_participations": 4, "min_sep": n // 4}
    bound = BandInvMF(inverse_bands=4, **schedule).bind(n)
    assert bound.sensitivity_is_exact(steps=n, **schedule)
    plain = BISR(inverse_bands=4).bind(n)
    assert quality(bound, n, 4, n // 4) < 0.2 * quality(plain, n, 4, n // 4)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(
    ("n", "m", "b", "p", "most"),
    # Signs ≤ 0 reach 8.5951 and 5.3480; another library's optimizer 8.5504 and 5.3172.
    [(128, 8, 16, 8, 8.553), (128, 8, 16, 16, 8.5504), (128, 4, 32, 16, 5.3194),
     (128, 4, 32, 32, 5.3172)],
)  # fmt: skip
def test_free_signs_pay_where_the_filter_is_nearly_as_long_as_the_separation(n, m, b, p, most):
    bound = BandInvMF(inverse_bands=p, max_participations=m, min_sep=b).bind(n)
    g = np.array(bound.coefficients)
    assert (g[1:] > 0).any()
    inverse = np.tril(toeplitz(np.pad(g, (0, n - p))))
    c = np.linalg.inv(inverse)
    assert c.min() > -1e-14
    error = np.linalg.norm(np.tril(np.ones((n, n))) @ inverse) / math.sqrt(n)
    reported = quality(bound, n, m, b)
    sensitivity = bound.sensitivity(steps=n, max_participations=m, min_sep=b)
    assert reported == pytest.approx(error * sensitivity, rel=1e-9)
    assert reported <= most
    # No pattern costs more than what is reported.
    rng = np.random.default_rng(0)
    for slack in (np.zeros(m, int), *rng.multinomial(n - 1 - (m - 1) * b, np.ones(m) / m, 200)):
        x = np.zeros(n)
        x[np.cumsum(slack) + b * np.arange(m)] = 1.0
        assert np.linalg.norm(c @ x) <= sensitivity * (1 + 1e-12)


def test_the_floor_s_gradient_against_finite_differences():
    rng = np.random.default_rng(3)
    loss = inverse_log_loss(final_error_loss(PREFIX_SUMS, 30, "mean"), 30, 3, 10)
    bounded = above_floor(loss, rng.uniform(0.5, 2.0, 30), rng.uniform(0, 1, 30), 0.7)
    a = rng.uniform(-0.1, 0.2, size=5)
    slope = numerical_slope(lambda x: bounded(x)[0], a)
    np.testing.assert_allclose(bounded(a)[1], slope, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (64, {"inverse_bands": 8, "max_participations": 16, "min_sep": 4, "objective": "max"}),
        (256, {"inverse_bands": 16, "max_participations": 8, "min_sep": 16}),
        (256, {"inverse_bands": 8, "max_participations": 16, "min_sep": 4, "objective": "max"}),
    ],
)
def test_steps_that_grow_past_all_numbers_say_nothing(n, options):
    """The search for free signs tries some; one of these ended in an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound = BandInvMF(**options).bind(n)
    assert np.isfinite(bound.coefficients).all()
