"""Orders between integers: against a law whose moments of every real order are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.accounting.renyi.chords import epsilon_from_renyi, log_delta_from_renyi
from dptrain.accounting.renyi.conversion import conversion_term
from dptrain.accounting.renyi.curve import log_delta_gaussian_loss


def log_moments(alpha, p, q):
    """log E_Q[(P/Q)^α] of two distributions on three points."""
    return np.log((q[:, None] * (p / q)[:, None] ** np.atleast_1d(alpha)).sum(axis=0))


@pytest.mark.parametrize("seed", range(6))
def test_chords_are_above_the_divergence_and_their_best_order_is_found(seed) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(3))
    whole = np.arange(2.0, 7.0)
    divergence = np.concatenate(([np.inf, np.inf], log_moments(whole, p, q) / (whole - 1.0)))
    if seed == 5:
        divergence[4] = np.inf  # an order that was not computed: no chord on either side of it
    top = float(np.log(p / q).max())
    fine = np.linspace(1.0 + 1e-9, 6.0, 20_001)
    ends = np.concatenate(([0.0], (whole - 1.0) * divergence[2:]))
    chord = np.array([np.interp(fine, np.arange(1.0, 7.0), ends)])[0]
    if seed == 5:
        chord[(fine > 3.0) & (fine < 5.0)] = np.inf
    assert (chord >= log_moments(fine, p, q) - 1e-12).all()
    for epsilon in (0.1 * top, 0.5 * top, 0.9 * top, 2.0 * top):
        found, order = log_delta_from_renyi(divergence, epsilon)
        tried = chord - (fine - 1.0) * epsilon + conversion_term(fine)
        # No order on the grid is better, and the grid is close to the best.
        assert found <= min(tried.min(), 0.0) + 1e-12
        assert found >= min(tried.min(), 0.0) - 1e-3
        assert 1.0 <= order <= 6.0
        truth = np.maximum(p - math.exp(epsilon) * q, 0.0).sum()
        assert truth <= math.exp(found) * (1.0 + 1e-12)
    for delta in (1e-9, 1e-3, 0.2, 0.7):
        found, _ = epsilon_from_renyi(divergence, delta)
        tried = (chord + conversion_term(fine) - math.log(delta)) / (fine - 1.0)
        assert found <= max(tried.min(), 0.0) + 1e-12
        assert found >= max(tried.min(), 0.0) - 1e-3 * (1.0 + abs(tried.min()))
        if found > 0.0:
            assert log_delta_from_renyi(divergence, found)[0] == pytest.approx(
                math.log(delta), abs=1e-9
            )


def test_nothing_is_known_without_orders() -> None:
    nothing = np.full(3, np.inf)
    assert epsilon_from_renyi(nothing, 1e-5)[0] == math.inf
    assert log_delta_from_renyi(nothing, 1.0)[0] == 0.0


def test_gaussian_loss_proves_more_than_its_divergence():
    """Converting a divergence that is linear in the order proves no more than the loss itself."""
    bins, epochs, sigma, delta = 50, 4, 1.2, 1e-6
    alpha = np.arange(2.0, 600.0)
    divergence = epochs * (1 / (2 * sigma**2) + (alpha - 1) / (2 * bins * sigma**2))
    converted, _ = epsilon_from_renyi(np.concatenate(([np.inf, np.inf], divergence)), delta)
    nu, xi = epochs / (2 * sigma**2), math.sqrt(epochs / bins) / sigma
    assert log_delta_gaussian_loss(nu, xi, np.array([converted]))[0] < math.log(delta)
