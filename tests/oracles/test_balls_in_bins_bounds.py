"""Balls-in-bins: Rényi moments by direct summation, and no bound below the true δ(ε)."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.accounting import account, profile
from dptrain.accounting.renyi.banded_program import banded_log_sums
from dptrain.accounting.renyi.bins import remove_orders
from dptrain.accounting.renyi.gram import gram_matrix
from dptrain.accounting.renyi.log_sums import renyi_from_log_sums
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins
from dptrain.strategies import BandMF
from tests.oracles import enumeration as oracle
from tests.oracles import quadrature


def strategy(c: tuple[float, ...], steps: int) -> BandMF:
    return BandMF(bands=len(c), coefficients=c).bind(steps)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("c", "bins", "epochs"),
    [
        ((1.0,), 4, 2),
        ((1.0, 0.5), 2, 1),
        ((0.4, 1.1, 0.5), 4, 2),
        ((1.0, 0.5, 0.4, 0.3), 4, 2),  # as many bands as bins
        ((1.0, 0.5, 0.4, 0.3), 3, 2),  # more bands than bins: a participant meets itself
        ((0.2, 0.9, 0.3), 8, 1),
    ],
)
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_renyi_moments(c: tuple[float, ...], bins: int, epochs: int, sigma: float) -> None:
    steps = bins * epochs
    law, matrix = oracle.balls_in_bins(bins, epochs), oracle.toeplitz(c, steps)
    gram = gram_matrix(strategy(c, steps), steps=steps, bins=bins)
    found = remove_orders(gram, sigma, 0, narrower=False)
    assert found.exact_up_to >= 5
    for order in (2, 3, 4, 5):
        exact = oracle.renyi_moment(law, matrix, sigma, order) / (order - 1)
        assert found.divergence[order] == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize(
    ("bands", "bins"), [(2, 3), (2, 4), (2, 6), (3, 5), (3, 6), (3, 7), (4, 7), (4, 8), (4, 9)]
)
def test_program_around_the_cycle(bands: int, bins: int) -> None:
    """Also where b < 3·bands - 3 and pairs may be close on both sides; two epochs close the cycle.

    All m_i are different here: the last columns are cut, and the coefficients are not monotone.
    """
    c = (0.6, 1.0, 0.3, 0.8)[:bands]
    law, matrix, sigma = oracle.balls_in_bins(bins, 2), oracle.toeplitz(c, 2 * bins), 1.2
    gram = gram_matrix(strategy(c, 2 * bins), steps=2 * bins, bins=bins)
    found = renyi_from_log_sums(banded_log_sums(gram / sigma**2, bands, 5))
    for order in (2, 3, 4, 5):
        exact = oracle.renyi_moment(law, matrix, sigma, order) / (order - 1)
        assert found[order] == pytest.approx(exact, rel=1e-9)


@pytest.mark.sample(every=13)
@pytest.mark.parametrize(
    ("c", "sigma"), [((1.0,), 0.6), ((1.0, 0.6), 0.6), ((1.0, 0.6), 2.0), ((0.4, 1.2), 2.0)]
)
def test_two_bins_against_quadrature(c: tuple[float, ...], sigma: float) -> None:
    made = MatrixMechanism(
        scheme=BallsInBins(bins=2, epochs=1, dataset_size=10),
        strategy=strategy(c, 2),
        noise_multiplier=sigma,
    )
    law, matrix = oracle.balls_in_bins(2, 1), oracle.toeplitz(c, 2)

    def truth(epsilon: float, *, remove: bool) -> float:
        return quadrature.delta(law, matrix, sigma, epsilon, remove=remove)

    grid = np.array([0.0, 0.1, 0.5, 1.5, 4.0])
    claimed = profile(made, grid)
    for i, at in enumerate(grid):
        assert claimed.remove[i] >= truth(at, remove=True) * (1 - 1e-7)
        assert claimed.add[i] >= truth(at, remove=False) * (1 - 1e-7)
    for delta in (1e-2, 1e-6, 1e-10):
        epsilon = account(made, delta=delta).epsilon
        for remove in (True, False):
            assert truth(epsilon, remove=remove) <= delta * (1 + 1e-7)


@pytest.mark.sample(every=16)
@pytest.mark.parametrize(
    ("c", "bins", "epochs"),
    [((0.4, 1.1, 0.5), 4, 2), ((1.0, 0.5, 0.4, 0.3), 4, 2), ((1.0, 0.5, 0.4, 0.3), 8, 1)],
)
@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_never_below_monte_carlo(
    c: tuple[float, ...], bins: int, epochs: int, sigma: float
) -> None:
    """A bound at the truth itself would fail by 6 standard errors with probability 1e-9 each."""
    steps = bins * epochs
    made = MatrixMechanism(
        scheme=BallsInBins(bins=bins, epochs=epochs, dataset_size=10),
        strategy=strategy(c, steps),
        noise_multiplier=sigma,
    )
    law, matrix = oracle.balls_in_bins(bins, epochs), oracle.toeplitz(c, steps)
    grid = np.array([0.0, 0.3, 1.0])
    claimed = profile(made, grid)
    for i, at in enumerate(grid):
        remove, add = oracle.monte_carlo_delta(law, matrix, sigma, at, size=100_000, seed=i)
        assert claimed.remove[i] >= remove.mean - 6 * remove.error
        assert claimed.add[i] >= add.mean - 6 * add.error
        if at == 0.0:
            assert remove.mean > 50 * remove.error  # the comparison means something
