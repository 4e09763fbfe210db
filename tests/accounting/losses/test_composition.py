"""Composition of different losses against Gaussians, direct convolution and itself."""

import math

import numpy as np
import pytest

from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.composition import (
    Composition,
    HeterogeneousComposition,
    LossDistribution,
)
from dptrain.accounting.losses.gaussian_mixture import GaussianMixtures, common_spacing


def random_loss(rng, size, spacing=0.25, infinity=0.0):
    mass = rng.dirichlet(np.ones(size)) * (1.0 - infinity)
    mass[rng.integers(size)] = 0.0
    with np.errstate(divide="ignore"):
        return LossDistribution(spacing, int(rng.integers(-5, 2)), np.log(mass), infinity)


def summed(parts, epsilon):
    """δ by convolving all masses directly."""
    mass, lowest, finite = np.ones(1), 0, 1.0
    for loss, count in parts:
        for _ in range(count):
            mass = np.convolve(mass, np.exp(loss.log_mass))
            lowest += loss.lowest
            finite *= 1.0 - loss.infinity
    losses = parts[0][0].spacing * (lowest + np.arange(mass.size))
    return float(-np.expm1(np.minimum(epsilon - losses, 0.0)) @ mass) + 1.0 - finite


@pytest.mark.parametrize("infinity", [0.0, 1e-3])
@pytest.mark.parametrize("seed", range(6))
def test_equals_direct_convolution(seed, infinity):
    rng = np.random.default_rng(seed)
    parts = [
        (random_loss(rng, int(rng.integers(2, 12)), infinity=infinity), int(rng.integers(1, 4)))
        for _ in range(int(rng.integers(1, 6)))
    ]
    found = HeterogeneousComposition(parts)
    for epsilon in (0.0, 0.1, 0.25, 1.0, 2.6):
        exact = summed(parts, epsilon)
        claimed = float(found.delta(epsilon))
        if epsilon in (0.0, 0.25, 1.0):  # grid points: nothing but rounding
            assert exact * (1 - 1e-12) <= claimed <= exact * (1 + 2e-5) + 1e-15
        assert claimed >= exact * (1 - 1e-12)
        if infinity < exact * 0.5 < 0.4:
            assert summed(parts, found.epsilon(exact)) <= exact * (1 + 1e-9)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("remove", [True, False])
def test_hundreds_of_different_gaussians_are_one(remove):
    mu = np.geomspace(0.001, 0.2, 120)
    mixtures = GaussianMixtures(np.ones((mu.size, 1)), mu[:, None])
    counts = [1] * mu.size
    h = common_spacing(mixtures.spread(sigma=1.0, remove=remove), counts)
    losses = mixtures.discretized(sigma=1.0, spacing=h, remove=remove)
    found = HeterogeneousComposition(zip(losses, counts, strict=True))
    total = math.sqrt(float(mu @ mu))
    for delta in (1e-2, 1e-6, 1e-15, 1e-30):
        exact = gaussian.epsilon(delta, total)
        assert exact * (1 - 1e-12) <= found.epsilon(delta) <= exact * (1 + 3e-4)


def test_repeating_counting_and_order_do_not_matter():
    rng = np.random.default_rng(8)
    a, b = random_loss(rng, 40, 0.01), random_loss(rng, 60, 0.01)
    grid = np.array([0.0, 0.1, 0.3])
    counted = HeterogeneousComposition([(a, 3), (b, 2)]).delta(grid)
    listed = HeterogeneousComposition((part, 1) for part in [b, a, a, b, a]).delta(grid)
    np.testing.assert_allclose(counted, listed, rtol=1e-6)
    one = HeterogeneousComposition([(a, 2), (a, 3)]).delta(grid)
    np.testing.assert_allclose(one, Composition(a, 5).delta(grid), rtol=1e-6)


def test_refuses_bad_input():
    rng = np.random.default_rng(9)
    a, b = random_loss(rng, 4, 0.1), random_loss(rng, 4, 0.2)
    with pytest.raises(ValueError, match="spacing"):
        HeterogeneousComposition([(a, 1), (b, 1)])
    with pytest.raises(ValueError, match="count"):
        HeterogeneousComposition([(a, 0)])
    with pytest.raises(ValueError, match="at least one loss"):
        HeterogeneousComposition([])


@pytest.mark.parametrize("first", [1, 40, 1000])
@pytest.mark.parametrize("infinity", [0.0, 0.01])
def test_delta_below_all_losses(first, infinity):
    # All losses lie in a window far above ε: δ is 1 - e^ε E e^{-L}, not what it is at the window.
    h = 0.001
    masses = np.array([0.5, 0.3, 0.2]) * (1.0 - infinity)
    single = LossDistribution(h, first, np.log(masses), infinity)
    composed = HeterogeneousComposition([(single, 2)])
    totals = h * (2 * first + np.arange(5))
    weights = np.convolve(masses, masses)
    for epsilon in (0.0, 0.3 * totals[0], totals[0] - h / 3, totals[0], totals[2] + h / 2):
        exact = weights @ -np.expm1(np.minimum(epsilon - totals, 0.0)) + 1.0 - weights.sum()
        found = float(composed.delta(np.array([epsilon]))[0])
        assert exact <= found * (1 + 1e-12)
        assert found == pytest.approx(exact, rel=1e-6)
