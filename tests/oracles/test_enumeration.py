"""The oracles themselves: closed forms that they have to give back."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.oracles import enumeration as oracle
from tests.oracles import quadrature


def test_cold_chain_of_three_steps_by_hand() -> None:
    p = 0.3
    law = oracle.min_sep_cold(3, p, 2)
    expected = {
        (0, 0, 0): (1 - p) ** 3,
        (1, 0, 0): p * (1 - p),
        (0, 1, 0): (1 - p) * p,
        (0, 0, 1): (1 - p) ** 2 * p,
        (1, 0, 1): p * p,
    }
    assert len(law.probabilities) == len(expected)
    for x, q in expected.items():
        assert law.of(x) == pytest.approx(q, rel=1e-14)


@pytest.mark.parametrize(("p", "b"), [(0.3, 2), (0.3, 5), (1.0, 4), (0.02, 8), (0.7, 1)])
def test_stationary_start_is_that_of_algorithm_2(p: float, b: int) -> None:
    free = 1 / (1 + (b - 1) * p)
    law = oracle.stationary_bars(p, b)
    np.testing.assert_allclose(law, [free] + [p * free] * (b - 1), atol=1e-13)
    marginals = oracle.min_sep_warm(6, p, b)
    np.testing.assert_allclose(
        marginals.probabilities @ marginals.patterns, np.full(6, p * free), atol=1e-13
    )


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_quadrature_gives_the_gaussian(mu: float, remove: bool, steps: int) -> None:
    """All steps taken with certainty: P and Q are Gaussians at the distance ‖C 1‖ = μσ."""
    law = oracle.poisson(steps, 1.0)
    matrix = oracle.toeplitz([1.0, 0.5][:steps], steps)
    sigma = float(np.linalg.norm(matrix @ np.ones(steps))) / mu
    for at in (0.0, mu, mu * mu / 2 + 4 * mu):
        value = quadrature.delta(law, matrix, sigma, at, remove=remove)
        assert value == pytest.approx(quadrature.gaussian_delta(at, mu), rel=1e-9, abs=1e-15)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("at", [0.0, 0.2, 0.6])
def test_two_steps_against_a_fine_grid(remove: bool, at: float) -> None:
    """A plain sum over a grid of spacing h: the kink at the threshold costs it O(h²)."""
    law = oracle.poisson(2, 0.3)
    axis = np.arange(-6.0, 8.0, 0.01)
    rows = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1)
    log_q = -(rows**2).sum(axis=-1) / 2 - math.log(2 * math.pi)
    ratio = np.add.outer(*(np.log(0.7 + 0.3 * np.exp(axis - 0.5)),) * 2)  # the steps' own ratios
    p, q = np.exp(log_q + ratio), np.exp(log_q)
    difference = p - math.exp(at) * q if remove else q - math.exp(at) * p
    direct = np.maximum(difference, 0).sum() * 0.01**2
    value = quadrature.delta(law, np.eye(2), 1.0, at, remove=remove)
    assert value == pytest.approx(direct, rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_quadrature_and_monte_carlo_agree_at_three_steps() -> None:
    """6 standard errors, two comparisons: fails by chance with probability below 1e-8."""
    law = oracle.min_sep_warm(3, 0.4, 2)
    matrix = oracle.toeplitz([1.0, 0.6], 3)
    estimates = oracle.monte_carlo_delta(law, matrix, 0.8, 0.3, size=200_000, seed=1)
    for estimate, remove in zip(estimates, (True, False), strict=True):
        value = quadrature.delta(law, matrix, 0.8, 0.3, remove=remove)
        assert estimate.error < 0.1 * estimate.mean
        assert abs(estimate.mean - value) < 6 * estimate.error


def test_renyi_moment_by_quadrature() -> None:
    """E_Q[(P/Q)^α] at n = 2 on a plain grid; the integrand peaks near α times a mean."""
    law = oracle.balls_in_bins(2, 1)
    matrix = oracle.toeplitz([1.0, 0.7], 2)
    sigma = 1.3
    axis = np.arange(-14.0, 24.0, 0.05)
    y = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1)
    log_q = -(y**2).sum(axis=-1) / (2 * sigma**2) - math.log(2 * math.pi * sigma**2)
    ratio = oracle.log_ratio(law, matrix, sigma, y)
    for order in (2, 3, 5):
        direct = math.log(np.exp(order * ratio + log_q).sum() * 0.05**2)
        assert oracle.renyi_moment(law, matrix, sigma, order) == pytest.approx(direct, abs=1e-9)


def test_certainty_has_the_unit_mean() -> None:
    """E_Q[P/Q] = 1 of the oracle itself: order 1 of the expansion, and by quadrature at n = 2."""
    law = oracle.min_sep_cold(2, 0.3, 2)
    assert oracle.renyi_moment(law, oracle.toeplitz([1.0, 2.0], 2), 0.7, 1) == pytest.approx(0.0)
