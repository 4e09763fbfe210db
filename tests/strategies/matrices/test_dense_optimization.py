"""Optimal dense strategies against certificates, generic optimizers and orthogonality."""

import numpy as np
import pytest
from scipy.optimize import minimize

from dptrain.accounting import account
from dptrain.accounting.losses import gaussian
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, Shuffled
from dptrain.strategies import BSR
from dptrain.strategies.matrices.dense import Dense
from dptrain.strategies.matrices.dense_optimization import (
    optimal_for_epochs,
    workload_factor,
)
from dptrain.strategies.matrices.gram_sensitivity import fixed_epoch_sensitivity
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.workloads import PREFIX_SUMS, DenseWorkload
from tests.oracles.strategy_optima import duality_gap


def lag(n):
    return np.abs(np.subtract.outer(np.arange(n), np.arange(n)))


def error(factor, c):
    return float(np.sum((factor @ np.linalg.inv(c)) ** 2))


def generic_optimum(factor, free):
    """Least tr(M X^-1) over the free entries of X, by SciPy on X itself (diagonal of ones)."""
    n = len(factor)
    t, j = np.nonzero(np.tril(free))

    def loss(entries):
        x = np.eye(n)
        x[t, j] = x[j, t] = entries
        if np.linalg.eigvalsh(x)[0] < 1e-9:
            return 1e12
        return float(np.trace(factor.T @ factor @ np.linalg.inv(x)))

    best = np.zeros(len(t))
    if not len(t):
        return loss(best)
    for _ in range(4):  # a simplex method needs restarts
        options = {"maxiter": 40_000, "maxfev": 40_000, "xatol": 1e-10, "fatol": 1e-12}
        best = minimize(loss, best, method="Nelder-Mead", options=options).x
        best = minimize(loss, best, method="Powell", options={"xtol": 1e-12, "ftol": 1e-14}).x
    return loss(best)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(("n", "epochs"), [(2, 1), (4, 1), (4, 2), (4, 4), (5, 1), (6, 3), (6, 2)])
@pytest.mark.parametrize("workload", [PREFIX_SUMS, MomentumSGD(momentum=0.6)])
def test_against_a_generic_optimizer(n, epochs, workload):
    factor = workload.matrix(n)
    found = optimal_for_epochs(factor, epochs)
    free = (lag(n) > 0) & (lag(n) % (n // epochs) != 0)
    best = generic_optimum(factor, free)
    assert found.loss <= best * (1 + 2e-6)
    # The certificate is a lower bound on whatever anybody finds.
    assert found.loss * (1 - found.gap) <= best * (1 + 1e-9)


@pytest.mark.parametrize("n", [4, 6])
def test_single_participation_against_all_lower_triangular_matrices(n):
    # Not in X: over C itself, with the worst column norm as the sensitivity.
    sums = np.tril(np.ones((n, n)))
    t, j = np.tril_indices(n)

    def log_loss(entries):
        c = np.zeros((n, n))
        c[t, j] = entries
        if np.min(np.abs(np.diag(c))) < 1e-3:
            return 1e6
        return np.log(error(sums, c)) + 2 * np.log(np.linalg.norm(c, axis=0).max())

    rng = np.random.default_rng(0)
    start = BSR(bands=n).columns(n, np.arange(n))[t, j]
    best = min(
        minimize(
            log_loss,
            start * rng.uniform(0.9, 1.1, start.size),
            method="Powell",
            options={"maxfev": 60_000, "xtol": 1e-9, "ftol": 1e-13},
        ).fun
        for _ in range(2)
    )
    c = Dense(epochs=1).bind(n).columns(n, np.arange(n))
    assert np.log(error(sums, c)) <= best + 1e-6


@pytest.mark.parametrize(("n", "epochs"), [(4, 2), (8, 2), (8, 4), (60, 3), (60, 12)])
def test_a_learning_rate_of_zero_amid_the_run(n, epochs):
    # AᵀA is singular and the optimum a limit, hence the ridge of workload_factor.
    rates = np.random.default_rng(n).uniform(0.2, 1.0, n)
    rates[[1, n // 2 + 1] if n > 4 else 1] = 0.0
    workload = MomentumSGD(momentum=0.6, learning_rates=tuple(rates.tolist()))
    found = optimal_for_epochs(workload_factor(workload, n), epochs)
    assert -1e-8 <= found.gap <= 1e-4  # a bound to the rounding of roots of small eigenvalues
    actual = error(workload.matrix(n), found.matrix)
    # The ridge only adds to the error, and hardly anything.
    assert actual <= found.loss <= actual * (1 + 1e-4)


def test_two_steps_by_hand():
    # X = [[1, x], [x, 1]], M = [[2, 1], [1, 1]]: tr(M X^-1) = (3 - 2x)/(1 - x²), least where
    # x² - 3x + 1 = 0.
    x = (3 - np.sqrt(5)) / 2
    found = optimal_for_epochs(np.tril(np.ones((2, 2))), 1)
    assert found.loss == pytest.approx((3 - 2 * x) / (1 - x * x), rel=1e-6)
    gram = found.matrix.T @ found.matrix
    assert gram[0, 1] == pytest.approx(x, abs=1e-2)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("n", "epochs"), [(60, 1), (60, 3), (60, 12), (60, 60), (200, 4)])
@pytest.mark.parametrize("kind", ["sums", "momentum", "warm-up", "dense"])
def test_certificates(n, epochs, kind):
    if kind == "warm-up":
        workload = MomentumSGD(learning_rates=tuple(np.minimum(1, np.arange(n) / 20)))
    elif kind == "dense":
        rng = np.random.default_rng(0)
        workload = DenseWorkload(entries=np.tril(rng.uniform(0.2, 1, (n, n))) + np.eye(n))
    else:
        workload = PREFIX_SUMS if kind == "sums" else MomentumSGD(momentum=0.9)
    factor = workload_factor(workload, n)
    found = optimal_for_epochs(factor, epochs)
    assert -1e-8 <= found.gap <= 1e-4  # a bound to the rounding of roots of small eigenvalues
    assert found.loss == pytest.approx(error(factor, found.matrix), rel=1e-9)
    np.testing.assert_allclose(np.linalg.norm(found.matrix, axis=0), 1, rtol=1e-14)
    assert np.all(np.triu(found.matrix, 1) == 0)
    fixed = (lag(n) > 0) & (lag(n) % (n // epochs) == 0)
    gram = found.matrix.T @ found.matrix
    assert np.abs(gram[fixed]).max(initial=0) <= 1e-11
    # The same bound from the matrix alone, which is infinite if it is far from an optimum.
    assert duality_gap(found.matrix, factor, (lag(n) > 0) & ~fixed) <= 1e-3


def test_sensitivity_of_the_optimum_for_epochs():
    strategy = Dense(epochs=4).bind(40)
    assert fixed_epoch_sensitivity(strategy, steps=40, epochs=4) == pytest.approx(2, rel=1e-10)
    # Participations that are only *at least* 10 apart cost more.
    assert strategy.sensitivity(steps=40, max_participations=4, min_sep=10) > 2


def test_no_other_strategy_is_better():
    n = 50
    factor = np.tril(np.ones((n, n)))
    for epochs in (1, 5):
        best = Dense(epochs=epochs).bind(n)
        cost = fixed_epoch_sensitivity(best, steps=n, epochs=epochs) * best.rmse(n)
        for bands in (1, 5, 10, 50):
            other = BSR(bands=bands)
            worst = fixed_epoch_sensitivity(other, steps=n, epochs=epochs) * other.rmse(n)
            assert cost <= worst * (1 + 1e-6)
    single = Dense(epochs=1).bind(n).columns(n, np.arange(n))
    assert single.min() >= 0
    assert duality_gap(single, factor, lag(n) > 0) <= 1e-4


def test_all_bands_are_the_optimum_for_one_participation():
    one, banded = Dense(epochs=1).bind(12), Dense(bands=12).bind(12)
    assert banded.matrix == one.matrix


def test_banded_optimum_has_a_small_gap():
    n, bands = 60, 7
    c = Dense(bands=bands).bind(n).columns(n, np.arange(n))
    factor = np.tril(np.ones((n, n)))
    assert duality_gap(c, factor, (lag(n) > 0) & (lag(n) < bands)) <= 1e-6


@pytest.mark.slow
def test_many_steps():
    found = optimal_for_epochs(np.tril(np.ones((500, 500))), 5)
    assert found.gap <= 1e-5


@pytest.mark.sample(every=10)
@pytest.mark.parametrize(("n", "epochs"), [(2, 1), (4, 2), (4, 4), (6, 3), (6, 2)])
def test_free_norms_against_a_generic_optimizer(n, epochs):
    """X with its free entries and the shares of each block's norms as unknowns."""
    factor, period = PREFIX_SUMS.matrix(n), n // epochs
    t, j = np.nonzero(np.tril((lag(n) > 0) & (lag(n) % period != 0)))

    def loss(entries):
        shares = np.exp(entries[:n].reshape(epochs, period))
        norms = np.sqrt(epochs * shares / shares.sum(axis=0)).ravel()
        x = np.eye(n)
        x[t, j] = x[j, t] = entries[n:]
        if np.linalg.eigvalsh(x)[0] < 1e-9:
            return 1e12
        inverse = np.linalg.inv(x) / norms / norms[:, None]
        return float(np.trace(factor.T @ factor @ inverse))

    best = np.zeros(n + len(t))
    for _ in range(4):
        options = {"maxiter": 40_000, "maxfev": 40_000, "xatol": 1e-10, "fatol": 1e-12}
        best = minimize(loss, best, method="Nelder-Mead", options=options).x
        best = minimize(loss, best, method="Powell", options={"xtol": 1e-12, "ftol": 1e-14}).x
    found = optimal_for_epochs(factor, epochs, equal_norms=False)
    assert found.loss <= loss(best) * (1 + 2e-6)
    assert found.loss * (1 - found.gap) <= loss(best) * (1 + 1e-9)
    assert found.loss == pytest.approx(error(factor, found.matrix), rel=1e-9)


@pytest.mark.parametrize(("n", "epochs", "known"), [(64, 4, 4.40785), (128, 8, 7.50922)])
def test_free_norms_reach_what_is_known_of_the_exact_separation(n, epochs, known):
    """RMSE × sensitivity by another library's optimizer (Choquette-Choo et al. 2022)."""
    bound = Dense(epochs=epochs, equal_norms=False).bind(n)
    sensitivity = fixed_epoch_sensitivity(bound, steps=n, epochs=epochs)
    assert sensitivity == pytest.approx(np.sqrt(epochs), rel=1e-9)
    assert bound.rmse(n) * sensitivity == pytest.approx(known, rel=2e-6)
    equal = Dense(epochs=epochs).bind(n)
    assert bound.rmse(n) < 0.98 * equal.rmse(n)


def test_free_norms_need_epochs():
    with pytest.raises(ValueError, match="equal_norms=False"):
        Dense(bands=2, equal_norms=False)
    with pytest.raises(TypeError, match="equal_norms='no'"):
        Dense(epochs=2, equal_norms="no")
    assert "equal_norms=False" in repr(Dense(epochs=2, equal_norms=False))


@pytest.mark.parametrize(
    "scheme",
    [
        BallsInBins(bins=16, epochs=4, dataset_size=640),
        Shuffled(batch_size=40, epochs=4, dataset_size=640, reshuffle=False),
    ],
)
def test_schemes_that_keep_the_distance_have_the_exact_sensitivity(scheme):
    strategy = Dense(epochs=4, equal_norms=False).bind(64)
    pair = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=2.0)
    found = account(pair, delta=1e-5, accountant="gaussian").epsilon
    # Four orthogonal columns whose squared norms add up to 4.
    assert found == pytest.approx(gaussian.epsilon(1e-5, 2.0 / 2.0), rel=1e-8)


def test_a_scheme_that_reshuffles_pays_for_the_least_distance():
    strategy = Dense(epochs=4, equal_norms=False).bind(64)
    scheme = Shuffled(batch_size=40, epochs=4, dataset_size=640, reshuffle=True)
    pair = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=2.0)
    assert account(pair, delta=1e-5).epsilon > 1.05 * gaussian.epsilon(1e-5, 1.0)
