"""log P/Q of b-min-sep sampling against the sum over all patterns."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import log_ratio
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep
from dptrain.strategies import BandMF
from tests.helpers.min_sep_losses import MinSepLosses, min_sep_means
from tests.oracles import enumeration as oracle
from tests.oracles import quadrature

COEFFICIENTS = [
    (1.0, 0.5, 0.375),
    (0.3, 1.4, 0.6),  # not monotone
    (1.0, 0.0, 0.9),
    (1.0, 0.5, 0.375, 0.3125),
    (0.2, 0.1, 0.7, 1.5),
    (1.0, 0.0, 0.0, 2.0),
]


def laws(
    c: tuple[float, ...], p: float, b: int, steps: int, *, warm: bool
) -> tuple[MinSepLaw, oracle.Law, np.ndarray]:
    theirs = MinSepLaw(
        coefficients=np.array(c), probability=p, min_sep=b, steps=steps, warm_start=warm
    )
    ours = (oracle.min_sep_warm if warm else oracle.min_sep_cold)(steps, p, b)
    return theirs, ours, oracle.toeplitz(c, steps)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("c", COEFFICIENTS)
def test_log_ratio_is_the_sum_over_patterns(c: tuple[float, ...], warm: bool) -> None:
    """b from the number of bands to beyond n; outputs near Q, near P and far away."""
    rng = np.random.default_rng(5)
    for steps in (1, 3, 5, 8):
        for b in sorted({len(c), len(c) + 2, steps, 2 * steps}):
            if b < len(c):
                continue
            for p in (0.05, 0.6, 1.0):
                theirs, ours, matrix = laws(c, p, b, steps, warm=warm)
                for sigma in (0.3, 1.0, 4.0):
                    y = np.concatenate(
                        [
                            sigma * rng.standard_normal((10, steps)),
                            oracle.sample_p(ours, matrix, sigma, rng, 10),
                            10 * rng.standard_normal((5, steps)),
                        ]
                    )
                    np.testing.assert_allclose(
                        log_ratio(theirs, sigma, y.T),
                        oracle.log_ratio(ours, matrix, sigma, y),
                        rtol=1e-10,
                        atol=1e-10,
                    )


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("b", [3, 5, 9])
def test_unit_mean(b: int, warm: bool) -> None:
    """E_Q[P/Q] = 1 through the loss code: 6 standard errors, six cases, error below 1e-7.

    The standard error comes from the exact E_Q[(P/Q)²], not from the draws.
    """
    theirs, ours, matrix = laws((0.3, 1.0, 0.4), 0.4, b, 8, warm=warm)
    size, sigma = 100_000, 1.5
    losses = MinSepLosses(theirs).draw([sigma], "add", np.random.default_rng(3), size)[0]
    error = np.sqrt(np.expm1(oracle.renyi_moment(ours, matrix, sigma, 2)) / size)
    assert error < 0.02
    assert abs(np.exp(-losses).mean() - 1) < 6 * error


@pytest.mark.parametrize("warm", [False, True])
def test_mean_of_the_ratio_under_p(warm: bool) -> None:
    """E_P[P/Q] = E_Q[(P/Q)²]: draws of P against the exact second moment, 6 standard errors."""
    theirs, ours, matrix = laws((0.3, 1.0, 0.4), 0.4, 4, 8, warm=warm)
    size, sigma = 100_000, 3.0
    losses = MinSepLosses(theirs).draw([sigma], "remove", np.random.default_rng(4), size)[0]
    second, third = (np.exp(oracle.renyi_moment(ours, matrix, sigma, k)) for k in (2, 3))
    error = np.sqrt((third - second**2) / size)
    assert error < 0.1 * (second - 1)
    assert abs(np.exp(losses).mean() - second) < 6 * error


def mechanism(p: float, b: int, c: tuple[float, ...], *, warm: bool) -> MatrixMechanism:
    return MatrixMechanism(
        scheme=MinSep(probability=p, min_sep=b, dataset_size=10, steps=2, warm_start=warm),
        strategy=BandMF(bands=len(c), coefficients=c),
        noise_multiplier=0.9,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("p", "warm"), [(0.3, False), (0.3, True), (1.0, True)])
def test_simulated_delta_against_quadrature(p: float, warm: bool) -> None:
    """Two steps. Means within 6 standard errors (18 comparisons: error below 1e-7), upper values
    and the guarantee's ε not below the truth (wrong with probability 1e-6 each by their own claim).
    """
    c, delta = (1.0, 0.6), 0.02
    made = mechanism(p, 2, c, warm=warm)
    law = (oracle.min_sep_warm if warm else oracle.min_sep_cold)(2, p, 2)
    matrix, grid = oracle.toeplitz(c, 2), np.array([0.05, 0.4, 1.2])
    accountant = MinSepImportance(seed=9, progress=False, threads=1)
    plain, upper = min_sep_means(made, grid, seed=9), accountant.profile(made, grid)
    least = accountant.guarantee(made, delta=delta).epsilon
    for remove in (True, False):
        truth = np.array([quadrature.delta(law, matrix, 0.9, e, remove=remove) for e in grid])
        mean = plain.remove if remove else plain.add
        error = plain.remove_error if remove else plain.add_error
        # Where δ is tiny no draw may hit, and the empirical error says nothing.
        checked = truth > 1e-4
        assert checked.any()
        assert (np.abs(mean - truth) < 6 * error)[checked].all()
        assert ((upper.remove if remove else upper.add) >= truth).all()
        assert quadrature.delta(law, matrix, 0.9, least, remove=remove) <= delta


def test_certain_warm_min_sep_has_the_epsilon_of_balls_in_bins() -> None:
    accountant = MinSepImportance(seed=11, progress=False, threads=1)
    one = mechanism(1.0, 2, (1.0, 0.6), warm=True)
    other = MatrixMechanism(
        scheme=BallsInBins(bins=2, epochs=1, dataset_size=10),
        strategy=one.strategy,
        noise_multiplier=one.noise_multiplier,
    )
    first, second = (accountant.guarantee(made, delta=0.02).epsilon for made in (one, other))
    assert first == second
    assert 0.1 < first < 3.0
