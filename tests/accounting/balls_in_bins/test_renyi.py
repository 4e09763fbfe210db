"""Balls-in-bins bounds against direct summation, known numbers and simulation."""

import itertools
import math

import numpy as np
import pytest

from dptrain.accounting.balls_in_bins.renyi import BallsInBinsCurve, BallsInBinsRenyi, log_delta_add
from dptrain.accounting.losses import gaussian
from dptrain.accounting.renyi.banded_program import banded_log_sums
from dptrain.accounting.renyi.bins import (
    remove_orders,
)
from dptrain.accounting.renyi.chords import epsilon_from_renyi, log_delta_from_renyi
from dptrain.accounting.renyi.gram import (
    banded_bound,
    cyclic_bandwidth,
    cyclic_distance,
    gram_matrix,
)
from dptrain.accounting.renyi.log_sums import (
    enumerated_log_sums,
    independent_log_sums,
    renyi_from_log_sums,
)
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep
from dptrain.strategies import BSR, Identity


def add_divergence(gram, sigma, orders):
    """Upper bound on R_α(Q‖P), real α > 1 (Schuchardt & Kalinin 2026, Lemma 3.4)."""
    bins, orders = gram.shape[0], np.asarray(orders, dtype=np.float64)
    mean = float(np.trace(gram)) / (2.0 * bins * sigma**2)
    return mean + (orders - 1.0) * float(gram.sum()) / (2.0 * bins**2 * sigma**2)


def summed_over_tuples(a, order):
    """log T_α by Lemma 3.2 as it stands: the sum over all b^α tuples of bins."""
    bins, total = len(a), 0.0
    for picks in itertools.product(range(bins), repeat=order):
        pairs = itertools.combinations(picks, 2)
        total += math.exp(sum(a[i, j] for i, j in pairs))
    return math.log(total) - order * math.log(bins) - math.lgamma(order + 1)


def random_gram(bins, bandwidth, seed):
    rng = np.random.default_rng(seed)
    a = rng.random((bins, bins))
    a = (a + a.T) / 4
    a[cyclic_distance(bins) >= bandwidth] = 0.0
    return a


@pytest.mark.parametrize("bins", [1, 2, 3, 4])
def test_enumeration_equals_the_sum_over_tuples(bins):
    a = random_gram(bins, bins, seed=bins)
    found = enumerated_log_sums(a, 6)
    expected = [summed_over_tuples(a, m) for m in range(7)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# Rings shorter and longer than 3p-3, orders below and above the number of windows.
@pytest.mark.parametrize(
    ("bins", "bandwidth"), [(3, 2), (4, 2), (9, 2), (5, 3), (6, 3), (8, 3), (7, 4), (9, 4), (10, 4)]
)
def test_ring_program_equals_enumeration(bins, bandwidth):
    a = random_gram(bins, bandwidth, seed=bandwidth)
    found = banded_log_sums(a, bandwidth, 8)
    np.testing.assert_allclose(found, enumerated_log_sums(a, 8), rtol=0, atol=1e-12)
    tuples = [summed_over_tuples(a, m) for m in range(5)]
    np.testing.assert_allclose(found[:5], tuples, rtol=0, atol=1e-12)


@pytest.mark.parametrize("diagonal", [[0.3, 0.3, 0.3, 0.3], [0.1, 0.9, 0.4], [0.2, 0.2, 0.7]])
def test_independent_bins_equal_enumeration(diagonal):
    diagonal = np.array(diagonal)
    expected = enumerated_log_sums(np.diag(diagonal), 12)
    np.testing.assert_allclose(independent_log_sums(diagonal, 12), expected, rtol=0, atol=1e-11)


def test_order_two_in_closed_form():
    # E_Q[(P/Q)²] = b^-2 Σ_ij e^{G_ij/σ²}.
    gram, sigma = gram_matrix(BSR(bands=5), steps=90, bins=30), 3.0
    expected = math.log(np.exp(gram / sigma**2).mean())
    orders = remove_orders(gram, sigma, 1, narrower=False)
    assert orders.exact_up_to >= 2
    assert orders.divergence[2] == pytest.approx(expected, rel=1e-9)


def test_known_numbers_of_bsr_with_four_bands():
    gram, sigma = gram_matrix(BSR(bands=4), steps=100, bins=100), 2.0
    assert cyclic_bandwidth(gram) == 4
    true = remove_orders(gram, sigma, 0, narrower=False)
    assert true.divergence[2] == pytest.approx(0.013131, abs=5e-7)
    narrow, tau = banded_bound(gram, 2)
    value = renyi_from_log_sums(banded_log_sums(narrow / sigma**2, 2, 2))[2]
    assert value + 2 * tau / (2 * sigma**2) == pytest.approx(0.13686, abs=5e-6)


def test_effective_bandwidths_are_upper_bounds():
    gram, sigma = gram_matrix(BSR(bands=5), steps=36, bins=12), 2.0
    exact = renyi_from_log_sums(enumerated_log_sums(gram / sigma**2, 5))
    for p in (1, 2, 3, 4):
        banded, tau = banded_bound(gram, p)
        assert (gram <= banded + tau + 1e-15).all()
        a = banded / sigma**2
        sums = independent_log_sums(np.diag(a), 5) if p == 1 else banded_log_sums(a, p, 5)
        bound = renyi_from_log_sums(sums) + np.arange(6) * tau / (2 * sigma**2)
        assert (bound[2:] >= exact[2:]).all()


@pytest.mark.slow
def test_dense_strategy_is_exact_for_few_bins_and_bounded_for_many():
    few = remove_orders(gram_matrix(BSR(bands=16), steps=16, bins=4), 4.0, 0, narrower=False)
    assert few.exact_up_to > 10
    gram = gram_matrix(BSR(bands=60), steps=60, bins=20)
    many = remove_orders(gram, 6.0, 1, narrower=True)
    exact = renyi_from_log_sums(enumerated_log_sums(gram / 36.0, 4))
    assert (many.divergence[2:5] >= exact[2:5] * (1 - 1e-12)).all()
    assert (np.diff(many.divergence[2:]) >= 0).all()


def test_one_bin_is_the_gaussian():
    gram, sigma = gram_matrix(BSR(bands=3), steps=4, bins=1), 3.0
    mu = math.sqrt(gram[0, 0]) / sigma
    orders = remove_orders(gram, sigma, 1, narrower=False)
    alpha = np.arange(2, 30)
    np.testing.assert_allclose(orders.divergence[2:30], alpha * mu**2 / 2, rtol=1e-9)
    np.testing.assert_allclose(add_divergence(gram, sigma, alpha), alpha * mu**2 / 2, rtol=1e-12)
    epsilon = np.array([0.1, 1.0, 5.0])
    np.testing.assert_allclose(
        log_delta_add(gram, sigma, epsilon), gaussian.log_delta(epsilon, mu), atol=1e-8
    )
    curve = BallsInBinsCurve(gram)
    assert curve.epsilon(sigma, 1e-5) == pytest.approx(gaussian.epsilon(1e-5, mu), rel=1e-7)


def test_gram_matrix_of_columns():
    strategy, steps, bins = BSR(bands=7), 12, 4
    columns = strategy.columns(steps, np.arange(steps))
    means = sum(columns[:, j * bins : (j + 1) * bins] for j in range(3))
    np.testing.assert_allclose(gram_matrix(strategy, steps=steps, bins=bins), means.T @ means)


def test_conversion_inverts_itself():
    orders = 0.05 * np.arange(60.0)
    epsilon, best = epsilon_from_renyi(orders, 1e-6)
    log_delta, again = log_delta_from_renyi(orders, epsilon)
    assert best == pytest.approx(again, rel=1e-9)
    assert log_delta == pytest.approx(math.log(1e-6), abs=1e-9)


def test_gaussian_add_bound_beats_renyi_and_both_hold_for_one_bin():
    gram, sigma = gram_matrix(BSR(bands=4), steps=100, bins=100), 2.0
    alphas = np.arange(2.0, 400.0)
    divergence = np.concatenate(([np.inf, np.inf], add_divergence(gram, sigma, alphas)))
    for epsilon in (0.3, 0.5, 0.8):
        direct = float(log_delta_add(gram, sigma, np.array([epsilon]))[0])
        assert direct < log_delta_from_renyi(divergence, epsilon)[0]


def simulated_delta(gram, sigma, epsilon, samples, seed):
    """Means of (1 - e^{ε-L})_+ in both directions, with six standard errors.

    The inner products <m_i, y> are jointly Gaussian with covariance σ²G. Terms lie in [0, 1]; six
    standard errors leave about 1e-9 a comparison (the seeds are fixed).
    """
    rng = np.random.default_rng(seed)
    bins = gram.shape[0]
    root = np.linalg.cholesky(gram + 1e-12 * np.eye(bins))
    result = []
    for direction in ("remove", "add"):
        inner = sigma * rng.standard_normal((samples, bins)) @ root.T
        if direction == "remove":
            inner += gram[rng.integers(bins, size=samples)]
        loss = (inner - np.diag(gram) / 2) / sigma**2
        peak = loss.max(axis=1, keepdims=True)
        loss = peak[:, 0] + np.log(np.exp(loss - peak).mean(axis=1))
        loss = loss if direction == "remove" else -loss
        terms = np.maximum(-np.expm1(np.minimum(epsilon[:, None] - loss, 0.0)), 0.0)
        result.append((terms.mean(axis=1), 6 * terms.std(axis=1) / math.sqrt(samples)))
    return result


@pytest.mark.parametrize(
    ("strategy", "bins", "epochs", "sigma"),
    [(Identity(), 20, 1, 1.0), (BSR(bands=3), 12, 2, 2.5), (BSR(bands=24), 6, 4, 5.0)],
)
def test_bounds_are_above_the_simulated_truth(strategy, bins, epochs, sigma):
    gram = gram_matrix(strategy.bind(bins * epochs), steps=bins * epochs, bins=bins)
    epsilon = np.array([0.0, 0.1, 0.3, 0.7])
    bounds = BallsInBinsCurve(gram).delta(sigma, epsilon)
    for bound, (mean, error) in zip(
        bounds, simulated_delta(gram, sigma, epsilon, 100_000, seed=7), strict=True
    ):
        assert (bound >= mean - error).all()


@pytest.mark.parametrize(("sigma", "truth", "most"), [(1.0, 0.6176, 1.3), (0.6, 3.4303, 4.3)])
def test_known_brackets_for_independent_noise(sigma, truth, most):
    gram = gram_matrix(Identity(), steps=100, bins=100)
    assert truth <= BallsInBinsCurve(gram).epsilon(sigma, 1e-5) <= most


@pytest.mark.slow
def test_bsr_with_four_bands_is_above_the_truth_in_each_direction():
    # About .401 (remove) and .391 (add) at δ = 1e-5 by simulation.
    curve = BallsInBinsCurve(gram_matrix(BSR(bands=4), steps=100, bins=100))
    remove = curve.remove(2.0, np.array([0.400, 0.5]))
    add = curve.add(2.0, np.array([0.390, 0.6]))
    assert remove[0] > 1e-5 > remove[1]
    assert add[0] > 1e-5 > add[1]
    assert curve.epsilon(2.0, 1e-5) >= 0.401


def test_more_epochs_of_independent_noise_only_scale_sigma():
    # C = I keeps its bins, so G = epochs·I.
    once = BallsInBinsCurve(gram_matrix(Identity(), steps=30, bins=30))
    often = BallsInBinsCurve(gram_matrix(Identity(), steps=120, bins=30))
    assert often.epsilon(2.0, 1e-6) == pytest.approx(once.epsilon(1.0, 1e-6), rel=1e-9)


def test_min_sep_with_certain_participation_is_balls_in_bins():
    bins = BallsInBins(bins=8, epochs=3, dataset_size=1000)
    warm = MinSep(probability=1.0, min_sep=8, dataset_size=1000, steps=24, warm_start=True)
    answers = [
        BallsInBinsRenyi()
        .guarantee(
            MatrixMechanism(scheme=scheme, strategy=BSR(bands=2), noise_multiplier=2.0), delta=1e-5
        )
        .epsilon
        for scheme in (bins, warm)
    ]
    assert answers[0] == answers[1]
    cold = MinSep(probability=1.0, min_sep=8, dataset_size=1000, steps=24, warm_start=False)
    mechanism = MatrixMechanism(scheme=cold, strategy=BSR(bands=2), noise_multiplier=2.0)
    assert BallsInBinsRenyi().refusal(mechanism)


def test_directions_are_stated_apart():
    """ε of each direction suffices there by the profile; the guarantee is the larger."""
    for strategy, sigma in ((Identity(), 1.0), (BSR(bands=3), 2.0)):
        curve = BallsInBinsCurve(gram_matrix(strategy, steps=40, bins=20))
        both = curve.epsilons(sigma, 1e-5)
        assert max(both) == curve.epsilon(sigma, 1e-5)
        for direction in (0, 1):
            found = curve.delta(sigma, np.array([both[direction]]))[direction]
            assert found[0] <= 1e-5 * (1 + 1e-6)


def test_add_divergences_cover_unequal_bins():
    """Orthogonal means of different length: the largest norm stands for all."""
    diagonal = np.array([1.0, 0.3, 0.8, 0.5, 0.9, 0.7])
    curve = BallsInBinsCurve(np.diag(diagonal))
    assert "divergences" in curve.add_bound
    epsilon = np.array([0.0, 0.1, 0.3, 0.7])
    found = curve.add(1.2, epsilon)
    mean, error = simulated_delta(np.diag(diagonal), 1.2, epsilon, 100_000, seed=5)[1]
    assert (found >= mean - error).all()
    assert (found <= BallsInBinsCurve(np.eye(6)).add(1.2, epsilon) * (1 + 1e-9)).all()
