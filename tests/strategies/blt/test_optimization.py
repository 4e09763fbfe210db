"""The optimizer of BLTs against generic ones, and against what its dense family can reach."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.signal import fftconvolve, lfilter

from dptrain.strategies.blt.blt import BLT
from dptrain.strategies.blt.optimization import Chain, poles_cost, poles_errors
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.toeplitz.square_root_series import square_root_coefficients
from dptrain.strategies.workloads import PREFIX_SUMS, DenseWorkload
from tests.oracles import strategy_optima as optima

MOMENTUM = MomentumSGD(momentum=0.9)
SCHEDULE = MomentumSGD(momentum=0.5, learning_rates=tuple(np.linspace(1.0, 0.1, 30).tolist()))


def reached(blt, n, m=1, b=1):
    """Error × sensitivity as the objective has it, from the methods for columns."""
    errors = blt.errors(n, blt.workload)
    error = np.sqrt(np.mean(errors**2)) if blt.objective == "mean" else errors.max()
    return error * blt.sensitivity(steps=n, max_participations=m, min_sep=b)


# -- gradient and map ----------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize("workload", [PREFIX_SUMS, MOMENTUM, SCHEDULE])
@pytest.mark.parametrize("d", [1, 2, 4])
def test_gradient_of_the_loss(d, workload, objective):
    n = 30
    chain = Chain(buffers=d, steps=n)
    x = np.random.default_rng(d).normal(size=2 * d)
    for part in (*poles_errors(workload, n, objective), poles_cost(n, 3, 7)):

        def loss(x, part=part):
            value, to_p, to_q = part(*chain.poles(x))
            return np.log(value), chain.adjoint(x, to_p / value, to_q / value)

        by_differences = [
            (loss(x + step)[0] - loss(x - step)[0]) / 2e-5 for step in 1e-5 * np.eye(2 * d)
        ]
        np.testing.assert_allclose(loss(x)[1], by_differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("d", [1, 3, 6])
@pytest.mark.parametrize("n", [1, 2, 50, 10**7])
def test_the_map_gives_interlacing_poles_of_stable_non_increasing_strategies(n, d):
    chain = Chain(buffers=d, steps=n)
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 5.0):
        p, q = chain.poles(np.clip(scale * rng.normal(size=2 * d), -chain.box, chain.box))
        both = np.stack([p, q], axis=1).ravel()
        assert np.all(np.diff(both) > 0)
        assert p[0] > 0
        assert p[-1] < 1
        assert q[-1] < 2
        assert np.sum(q - p) < 1  # Σω


def test_variables_undo_the_map():
    chain = Chain(buffers=3, steps=1000)
    p, q = chain.poles(np.array([1.0, -0.5, 0.3, 0.0, -1.0, 0.7]))
    again_p, again_q = chain.poles(chain.variables(p, q))
    np.testing.assert_allclose(again_p, p, rtol=1e-12)
    np.testing.assert_allclose(again_q, q, rtol=1e-12)


# -- optimum -------------------------------------------------------------------------------------


@pytest.mark.sample(every=16)
@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("m", "b"), [(1, 1), (2, 3), (6, 1)])
@pytest.mark.parametrize("workload", [PREFIX_SUMS, MOMENTUM])
def test_tiny_runs_against_a_dense_optimizer(workload, m, b, objective):
    n, d = 6, 2
    best, _, _ = optima.blt(workload.matrix(n), d, m, b, objective)
    blt = BLT(
        buffers=d, objective=objective, workload=workload, max_participations=m, min_sep=b
    ).bind(n)
    assert reached(blt, n, m, b) <= best * (1 + 1e-5)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("objective", ["mean", "max"])
def test_workloads_that_are_not_toeplitz(objective):
    n = 6
    dense = np.tril(np.random.default_rng(0).uniform(0.5, 1.5, size=(n, n)))
    best, _, _ = optima.blt(dense, 2, 2, 3, objective)
    workload = DenseWorkload(entries=dense)
    blt = BLT(
        buffers=2, objective=objective, workload=workload, max_participations=2, min_sep=3
    ).bind(n)
    # "max" descends a smooth bound within n^(1/4096) = 1.0004 of the largest variance.
    assert reached(blt, n, 2, 3) <= best * (1 + (1e-5 if objective == "mean" else 1e-3))


def restarts(n, d, objective, m, b, seeds, momentum=0.0):
    """The best of generic runs on (θ, ω), with series instead of closed forms."""
    x = np.zeros(n)
    x[: m * b : b] = 1
    weights = np.arange(n, 0, -1.0) / n if objective == "mean" else np.ones(n)
    column = lfilter([1.0], [1.0, -momentum], np.ones(n))  # of A

    def loss(variables):
        slow, omega = np.exp(variables[:d]), np.exp(variables[d:])
        theta = 1 / (1 + slow)
        if omega.sum() > 1:
            return 1e3 * omega.sum()
        # C as a rational function in powers of the shift: den + Σ_j ω_j x Π_{i≠j} (1 - θ_i x).
        den = np.poly(theta)
        num = den + sum(
            w * np.concatenate([[0.0], np.atleast_1d(np.poly(np.delete(theta, j)))])
            for j, w in enumerate(omega)
        )
        w = lfilter(den, num, column)
        y = lfilter(num, den, x)
        return np.log(weights @ (w * w)) / 2 + np.log(y @ y) / 2

    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        start = np.concatenate(
            [rng.uniform(np.log(1 / n), 1, d), np.log(rng.uniform(0.02, 0.9 / d, d))]
        )
        found.append(minimize(loss, start, method="BFGS").fun)
    return np.exp(min(found))


@pytest.mark.sample(every=26)
@pytest.mark.parametrize(
    ("n", "d", "objective", "m", "b"),
    [
        (60, 2, "mean", 1, 1),
        (60, 3, "max", 4, 15),
        (200, 3, "mean", 8, 25),
        (2000, 3, "mean", 1, 1),
        (2000, 3, "max", 1, 1),
        (2000, 3, "mean", 4, 500),
        (2000, 5, "mean", 1, 1),
        # Few steps apart: minima with no fast buffer, or too many.
        (8, 1, "max", 3, 2),
        (1000, 2, "mean", 50, 20),
        (1000, 2, "mean", 20, 50),
        (1000, 3, "max", 50, 20),
        (2000, 3, "max", 100, 20),
    ],
)
def test_no_worse_than_the_best_of_five_random_restarts(n, d, objective, m, b):
    blt = BLT(buffers=d, objective=objective, max_participations=m, min_sep=b).bind(n)
    assert reached(blt, n, m, b) <= restarts(n, d, objective, m, b, seeds=5) * (1 + 1e-6)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("n", "d", "objective", "m", "b"), [(1000, 4, "mean", 3, 2), (100, 2, "max", 5, 1)]
)
def test_no_worse_than_random_restarts_with_momentum(n, d, objective, m, b):
    blt = BLT(
        buffers=d, objective=objective, max_participations=m, min_sep=b, workload=MOMENTUM
    ).bind(n)
    best = restarts(n, d, objective, m, b, seeds=5, momentum=0.9)
    assert reached(blt, n, m, b) <= best * (1 + 1e-6)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("n", "objective", "m", "b"), [(2000, "mean", 1, 1), (500, "max", 4, 100)])
def test_more_buffers_are_never_worse(n, objective, m, b):
    values = [
        reached(
            BLT(buffers=d, objective=objective, max_participations=m, min_sep=b).bind(n), n, m, b
        )
        for d in (1, 2, 3, 4)
    ]
    assert np.all(np.array(values[1:]) <= np.array(values[:-1]) * (1 + 1e-7))


def test_worst_query_within_two_percent_of_the_dense_family():
    # Among all Toeplitz matrices the square root has the least worst error for one participation
    # (Dvijotham et al. 2024): c * w = 1 and Cauchy-Schwarz; its error × sensitivity is Σ c_t².
    n = 2000
    best = np.sum(square_root_coefficients(n) ** 2)
    assert best <= reached(BLT(objective="max").bind(n), n) <= 1.02 * best


@pytest.mark.slow
def test_mean_error_within_two_percent_of_the_dense_family():
    n = 2000
    weights = np.arange(n, 0, -1.0) / n

    def loss(tail):
        """log(error × ‖c‖) of any Toeplitz matrix; the adjoint of C w = 1 is C^T v = u ∘ w."""
        c = np.concatenate([[1.0], tail])
        w = lfilter([1.0], c, np.ones(n))
        v = lfilter([1.0], c, (weights * w)[::-1])
        slope = fftconvolve(v, w)[:n][::-1]
        error, norm = weights @ (w * w), c @ c
        return (np.log(error) + np.log(norm)) / 2, (c / norm - slope / error)[1:]

    result = minimize(
        loss,
        square_root_coefficients(n)[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * (n - 1),
        options={"maxiter": 200},
    )
    assert reached(BLT().bind(n), n) <= 1.02 * np.exp(result.fun)


# -- long runs -----------------------------------------------------------------------------------


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("m", "b"), [(1, 1), (10, 10**6), (10**5, 100)])
def test_ten_million_steps_by_closed_forms(m, b, monkeypatch):
    def fail(*args):
        raise AssertionError("a column of n entries")

    monkeypatch.setattr("dptrain.strategies.blt.blt.sum_of_powers", fail)
    monkeypatch.setattr("dptrain.strategies.blt.blt.inverse_column", fail)
    n = 10**7
    blt = BLT(max_participations=m, min_sep=b).bind(n)
    value = blt.rmse(n) * blt.sensitivity(steps=n, max_participations=m, min_sep=b)
    one = BLT(buffers=1, max_participations=m, min_sep=b).bind(n)
    assert value <= one.rmse(n) * one.sensitivity(steps=n, max_participations=m, min_sep=b)
    # DP-SGD: rmse sqrt((n+1)/2), participations orthogonal.
    assert value < np.sqrt((n + 1) / 2) * np.sqrt(m)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_runs_shorter_than_the_buffers(n):
    blt = BLT(buffers=3).bind(n)
    best = BLT(buffers=1).bind(n)
    assert reached(blt, n) <= reached(best, n) * (1 + 1e-7)
