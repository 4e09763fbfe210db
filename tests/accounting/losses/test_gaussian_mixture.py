"""Discretised Gaussian mixtures against closed forms, other code and exact identities."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import brentq
from scipy.special import logsumexp, ndtr

from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.composition import Composition, HeterogeneousComposition
from dptrain.accounting.losses.gaussian_mixture import GaussianMixtures, common_spacing
from dptrain.accounting.losses.subsampled_gaussian import subsampled_gaussian


def composed(mixtures, sigma, counts, *, remove):
    spacing = common_spacing(mixtures.spread(sigma=sigma, remove=remove), counts)
    losses = mixtures.discretized(sigma=sigma, spacing=spacing, remove=remove)
    return HeterogeneousComposition(zip(losses, counts, strict=True))


def one_step_delta(epsilon, weights, means, sigma, *, remove):
    """δ of one step: the loss grows with x, so the worst set is a half line."""
    sign = 1.0 if remove else -1.0

    def loss(x):
        exponent = (x * means - means**2 / 2) / sigma**2
        return logsumexp(exponent, b=weights)

    low, high = -60.0 * sigma, means.max() + 60.0 * sigma
    if loss(low) >= sign * epsilon:
        return 0.0 if not remove else 1.0 - math.exp(epsilon)
    x = brentq(lambda at: loss(at) - sign * epsilon, low, high, xtol=1e-13)
    p = float(weights @ ndtr(sign * (means - x) / sigma))
    q = float(ndtr(-sign * x / sigma))
    return p - math.exp(epsilon) * q if remove else q - math.exp(epsilon) * p


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize(("sigma", "count"), [(1.0, 1), (0.05, 1), (5.0, 1), (30.0, 1000)])
def test_one_component_is_the_gaussian(sigma, count, remove):
    mixtures = GaussianMixtures(np.ones((1, 1)), np.ones(1))
    found = composed(mixtures, sigma, [count], remove=remove)
    for delta in (1e-2, 1e-5, 1e-12, 1e-30):
        exact = gaussian.epsilon(delta, math.sqrt(count) / sigma)
        assert exact * (1 - 1e-12) <= found.epsilon(delta) <= exact * (1 + 2e-4)


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize(("p", "sigma", "count"), [(0.01, 1.0, 100), (0.3, 2.0, 20), (0.9, 0.7, 1)])
def test_two_components_are_the_subsampled_gaussian(p, sigma, count, remove):
    mixtures = GaussianMixtures(np.array([[1 - p, p]]), np.array([0.0, 1.0]))
    found = composed(mixtures, sigma, [count], remove=remove)
    single = subsampled_gaussian(probability=p, sigma=sigma, count=count, remove=remove)
    other = Composition(single, count)
    for delta in (1e-2, 1e-6, 1e-9):
        assert found.epsilon(delta) == pytest.approx(other.epsilon(delta), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_one_step_is_the_closed_form(seed, remove):
    rng = np.random.default_rng(seed)
    weights, means = rng.dirichlet(np.full(6, 0.3)), np.sort(rng.random(6)) * 3
    sigma = float(np.exp(rng.uniform(-1, 1)))
    found = composed(GaussianMixtures(weights[None], means), sigma, [1], remove=remove)
    for epsilon in (0.0, 0.1, 0.7, 2.0, 5.0):
        exact = one_step_delta(epsilon, weights, means, sigma, remove=remove)
        claimed = float(found.delta(epsilon))
        assert claimed >= exact * (1 - 1e-9)
        assert claimed <= exact * 1.01 + 1e-12


def test_agrees_with_dp_accounting():
    weights, means, sigma = np.array([0.7, 0.2, 0.1]), np.array([0.0, 0.5, 1.5]), 1.3
    theirs = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma, list(means), list(weights), value_discretization_interval=5e-3
    ).self_compose(25)
    for remove, pmf in ((True, theirs._pmf_remove), (False, theirs._pmf_add)):
        found = composed(GaussianMixtures(weights[None], means), sigma, [25], remove=remove)
        for epsilon in (0.2, 1.0, 3.0):
            other = pmf.get_delta_for_epsilon(epsilon)
            assert float(found.delta(epsilon)) == pytest.approx(other, rel=3e-3)


@pytest.mark.parametrize("remove", [True, False])
def test_both_masses_are_kept(remove):
    # Σ p = 1 and Σ p e^{-L} = 1: what is split keeps both masses, nothing is lost.
    rng = np.random.default_rng(5)
    mixtures = GaussianMixtures(rng.dirichlet(np.ones(5), size=3), rng.random((3, 5)) * 2)
    for loss in mixtures.discretized(sigma=0.8, spacing=0.01, remove=remove):
        mass = np.exp(loss.log_mass)
        assert mass.sum() + loss.infinity == pytest.approx(1.0, abs=1e-12)
        assert mass @ np.exp(-loss.losses) == pytest.approx(1.0, abs=1e-10)
        assert loss.infinity < 1e-39


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("sigma", [1.0, 0.01])
@pytest.mark.parametrize("remove", [True, False])
def test_shared_means_are_a_table_of_the_same_numbers(sigma, remove):
    # At σ = 0.01 the exponents leave the range of exp(): summed row by row instead.
    rng = np.random.default_rng(6)
    weights = rng.dirichlet(np.full(40, 0.1), size=7)
    weights[:, 3] = 0.0
    weights[1] = np.eye(40)[0]
    weights /= weights.sum(axis=1, keepdims=True)
    means = 0.05 * np.arange(40)
    together = GaussianMixtures(weights, means)
    alone = GaussianMixtures(weights, np.tile(means, (7, 1)))
    h = common_spacing(together.spread(sigma=sigma, remove=remove), [1] * 7)
    pairs = zip(
        together.discretized(sigma=sigma, spacing=h, remove=remove),
        alone.discretized(sigma=sigma, spacing=h, remove=remove),
        strict=True,
    )
    for one, other in pairs:
        # Cells are laid out over the largest mean: not the same ones, but both close to the truth.
        first, second = HeterogeneousComposition([(one, 1)]), HeterogeneousComposition([(other, 1)])
        for epsilon in (0.0, 0.5, 5.0):
            a, b = float(first.delta(epsilon)), float(second.delta(epsilon))
            assert a == pytest.approx(b, rel=2e-2, abs=1e-30)


def test_means_that_are_all_zero_cost_nothing():
    (loss,) = GaussianMixtures(np.ones((1, 2)) / 2, np.zeros(2)).discretized(
        sigma=1.0, spacing=0.1, remove=True
    )
    assert loss.losses.tolist() == [0.0]
    assert loss.infinity == 0.0


def test_larger_means_cost_more():
    rng = np.random.default_rng(7)
    weights, means = rng.dirichlet(np.ones(4)), rng.random(4)
    for remove in (True, False):
        one, other = (
            composed(GaussianMixtures(weights[None], m), 1.0, [3], remove=remove)
            for m in (means, means * 1.1)
        )
        grid = np.array([0.0, 0.3, 1.0])
        assert (one.delta(grid) < other.delta(grid)).all()


@pytest.mark.parametrize(
    ("weights", "means", "named"),
    [
        ([[0.5, 0.4]], [0.0, 1.0], "weights"),
        ([[1.1, -0.1]], [0.0, 1.0], "weights"),
        ([[1.0]], [-1.0], "means"),
        ([[1.0]], [math.nan], "means"),
        ([[0.5, 0.5]], [1.0], "means"),
        ([1.0], [1.0], "weights"),
    ],
)
def test_refuses_bad_input(weights, means, named):
    with pytest.raises(ValueError, match=named):
        GaussianMixtures(np.array(weights), np.array(means))
