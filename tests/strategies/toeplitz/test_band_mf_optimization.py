"""Loss, gradient and optimum of banded Toeplitz strategies."""

import numpy as np
import pytest
from scipy.linalg import solve_triangular, toeplitz
from scipy.optimize import minimize

from dptrain.strategies import BSR, BandMF
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.toeplitz.band_mf_optimization import (
    SettledError,
    banded_errors,
    log_with_norm,
    optimal_coefficients,
    overlap_cost,
)
from dptrain.strategies.workloads import PREFIX_SUMS, DenseWorkload
from tests.helpers.schedules import linear_decay


def dense_workload(n):
    """Prefix sums with every row and column rescaled, so that the worst query is in the middle."""
    rng = np.random.default_rng(n)
    matrix = rng.uniform(0.5, 1.5, (n, n)) * np.exp(-np.abs(np.arange(n) / n - 0.6))[:, None]
    return DenseWorkload(entries=np.tril(matrix))


WORKLOADS = {
    "prefix": lambda n: PREFIX_SUMS,
    "momentum": lambda n: MomentumSGD(),
    "decay": lambda n: MomentumSGD(learning_rates=0.5, weight_decay=0.1),
    "schedule": lambda n: MomentumSGD(learning_rates=linear_decay(n), momentum=0.6),
    "dense": dense_workload,
}


def dense_error(c, n, objective, workload=PREFIX_SUMS):
    """‖A C^-1‖_F²/n or the largest squared row norm, times ‖c‖², with dense matrices."""
    dense = np.tril(toeplitz(np.pad(c, (0, n - len(c)))))
    rows = np.sum((workload.matrix(n) @ np.linalg.inv(dense)) ** 2, axis=1)
    return (rows.mean() if objective == "mean" else rows.max()) * (c @ c)


def log_loss(n, bands, objective, workload=PREFIX_SUMS):
    return log_with_norm(banded_errors(workload, n, bands, objective)[-1])


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "bands"), [(1, 1), (7, 1), (7, 3), (7, 7), (40, 5)])
@pytest.mark.parametrize("kind", WORKLOADS)
def test_loss_against_dense_matrices(kind, objective, n, bands):
    workload = WORKLOADS[kind](n)
    c = np.random.default_rng(n + bands).uniform(0.2, 1.0, size=bands)
    loss, _ = log_loss(n, bands, objective, workload)(c)
    expected = dense_error(c, n, objective, workload) * (n if objective == "mean" else 1)
    exact = workload.is_toeplitz or objective == "mean"
    assert np.exp(loss) == pytest.approx(expected, rel=1e-9 if exact else 1e-3)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "bands"), [(7, 3), (7, 7), (60, 8)])
@pytest.mark.parametrize("kind", WORKLOADS)
def test_gradient_against_finite_differences(kind, objective, n, bands):
    loss = log_loss(n, bands, objective, WORKLOADS[kind](n))
    c = BSR(bands=bands).first_column(n) * np.random.default_rng(1).uniform(0.9, 1.1, bands)
    _, gradient = loss(c)
    # Central differences are off by about h² = 1e-10, rounding by 1e-15/h = 1e-10; the p-norm has
    # third derivatives of p² = 10^7.
    h = 1e-5 if objective == "mean" else 1e-7
    for k in range(bands):
        step = h * np.eye(bands)[k]
        difference = (loss(c + step)[0] - loss(c - step)[0]) / (2 * h)
        assert gradient[k] == pytest.approx(difference, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("overlap", "decay"), [(0.0, 1.0), (0.3, 1.0), (0.2, 0.9), (1.0, 1.0)])
def test_overlap_cost_against_the_gram_matrix(overlap, decay):
    """Entry (d, d') of the weighted Gram matrix of c moved down by all steps, column by column."""
    c = np.random.default_rng(0).uniform(0, 1, 7)
    moved = np.stack([np.pad(c, (d, 6 - d)) for d in range(7)])
    weights = [1.0, *(2 * overlap * decay**d for d in range(1, 7))]
    value, gradient = overlap_cost(c, overlap, decay)
    assert value == pytest.approx(weights @ (moved @ moved[0]), rel=1e-12)
    for k in range(7):
        step = 1e-5 * np.eye(7)[k]
        up, down = overlap_cost(c + step, overlap, decay), overlap_cost(c - step, overlap, decay)
        assert gradient[k] == pytest.approx((up[0] - down[0]) / 2e-5, rel=1e-8)
    if overlap == 0:
        assert value == pytest.approx(c @ c, rel=1e-12)
    if overlap == decay == 1:
        assert value == pytest.approx(c.sum() ** 2, rel=1e-12)


@pytest.mark.parametrize("workload", [PREFIX_SUMS, MomentumSGD()])
def test_optimum_with_overlap_trades_error_for_it(workload):
    """Of two optima each is the better one by its own measure: so error rises and overlap falls."""
    n, bands = 300, 12
    columns = {
        k: BandMF(bands=bands, workload=workload, overlap=k).bind(n) for k in (0.0, 0.1, 0.4)
    }
    errors = {k: s.rmse(n, workload) for k, s in columns.items()}
    assert errors[0.0] < errors[0.1] < errors[0.4]
    for k in (0.1, 0.4):
        costs = {
            other: errors[other] ** 2 * overlap_cost(s.first_column(n), k, 1.0)[0]
            for other, s in columns.items()
        }
        assert costs[k] == min(costs.values())
        assert columns[k].first_column(n).min() >= 0
        again = BandMF.from_dict(columns[k].to_dict())
        assert again == columns[k]
        assert again.coefficient_hash == columns[k].coefficient_hash
        assert again.coefficient_hash != columns[0.0].coefficient_hash


def test_loss_ignores_scale():
    loss = log_loss(30, 6, "mean")
    c = BSR(bands=6).first_column(30)
    value, gradient = loss(c)
    assert loss(7 * c)[0] == pytest.approx(value, rel=1e-12)
    assert gradient @ c == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize("workload", [PREFIX_SUMS, MomentumSGD()])
def test_settled_sums_are_the_whole_sums(workload, objective):
    n, bands = 30_000, 8
    error = SettledError(workload, n, bands, objective)
    whole = SettledError(workload, n, bands, objective)
    whole.run_in_full()
    rng = np.random.default_rng(0)
    for _ in range(20):
        # Falling coefficients: C^-1 is stable.
        c = BSR(bands=bands).first_column(n) * np.sort(rng.uniform(0.8, 1.2, bands))[::-1]
        value, slope = error(c)
        assert error.length < n
        expected, expected_slope = whole(c)
        assert whole.length == n
        assert value == pytest.approx(expected, rel=1e-12)
        assert error.full(c) == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-8)


@pytest.mark.parametrize("workload", [PREFIX_SUMS, MomentumSGD(momentum=0.5)])
def test_filters_that_never_settle_are_summed_to_the_end(workload):
    n = 1500
    error = SettledError(workload, n, 2, "mean")
    assert error.length < n
    for second in (1.0, 1.05):  # C^-1 swings for ever, or grows
        c = np.array([1.0, second])
        dense = np.tril(toeplitz(np.pad(c, (0, n - 2))))
        w = solve_triangular(dense, workload.apply(np.eye(1, n)[0]), lower=True)
        assert error(c)[0] == pytest.approx(np.sum(np.arange(n, 0, -1) * w**2), rel=1e-9)
    # It forgets about that and settles again.
    error(np.array([1.0, 0.1]))
    assert error.length < n


def test_a_line_search_that_overflows_is_sent_back():
    value, gradient = log_loss(3000, 2, "mean")(np.array([1.0, 5.0]))  # 5^3000
    assert value > log_loss(3000, 2, "mean")(np.array([1.0, 1.1]))[0]
    np.testing.assert_array_equal(gradient, 0)


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
    _, gradient = log_loss(n, bands, objective)(c)
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


def generic_optimum(n, bands, objective, workload):
    """The least dense_error that Nelder-Mead, without gradients, finds from several starts."""

    def loss(tail):
        return np.log(dense_error(np.append(1.0, np.abs(tail)), n, objective, workload))

    rng = np.random.default_rng(0)
    starts = [BSR(bands=bands).first_column(n)[1:], *rng.uniform(0, 1.2, (3, bands - 1))]
    options = {"xatol": 1e-7, "fatol": 1e-12, "maxfev": 3000, "adaptive": True}
    return np.exp(min(minimize(loss, s, method="Nelder-Mead", options=options).fun for s in starts))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("n", "bands"), [(5, 2), (8, 4)])
@pytest.mark.parametrize("kind", WORKLOADS)
def test_optimum_is_that_of_a_generic_optimizer(kind, objective, n, bands):
    workload = WORKLOADS[kind](n)
    c = optimal_coefficients(n, bands, objective, workload)
    found = dense_error(c, n, objective, workload)
    best = generic_optimum(n, bands, objective, workload)
    smooth = workload.is_toeplitz or objective == "mean"
    assert found <= best * (1 + 1e-8 if smooth else n ** (1 / 4096))
    assert found >= best * (1 - 1e-6)  # both are global


@pytest.mark.parametrize("objective", ["mean", "max"])
def test_optimum_for_a_schedule_of_many_steps(objective):
    # Too many coefficients for the generic optimizer, but neighbors must not be better.
    n, bands = 120, 12
    workload = MomentumSGD(learning_rates=linear_decay(n))
    c = optimal_coefficients(n, bands, objective, workload)
    found = dense_error(c, n, objective, workload)
    slack = 1e-9 if objective == "mean" else n ** (1 / 4096) - 1
    rng = np.random.default_rng(0)
    for scale in (0.02, 0.005, 0.001):
        for _ in range(100):
            near = np.maximum(c + rng.normal(scale=scale, size=bands), 0)
            near[0] = max(near[0], 0.1)
            assert dense_error(near, n, objective, workload) >= found * (1 - slack)
    for other in (optimal_coefficients(n, bands, objective), BSR(bands=bands).first_column(n)):
        assert found < dense_error(other, n, objective, workload)


def test_two_steps_two_bands_by_hand():
    # C = [[1, 0], [c, 1]]: A C^-1 = [[1, 0], [1 - c, 1]], so the mean objective is
    # (1 + c²)(2 + (1 - c)²). Its derivative is 2(2c³ - 3c² + 4c - 1).
    real = [r.real for r in np.roots([2, -3, 4, -1]) if abs(r.imag) < 1e-12]
    c = optimal_coefficients(2, 2, "mean")
    assert c[1] / c[0] == pytest.approx(real[0], abs=1e-7)


def test_long_runs():
    # Found from shorter runs with settled sums: stationary for the whole sums too.
    n = 200_000
    for workload in (PREFIX_SUMS, MomentumSGD()):
        c = optimal_coefficients(n, 8, "mean", workload)
        error = SettledError(workload, n, 8, "mean")
        error.run_in_full()
        _, gradient = log_with_norm(error)(c / c[0])
        assert np.abs(gradient[1:]).max() < 1e-5
