"""δ by tilted runs against closed forms, integrals and an accountant, in both directions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from dptrain import profile
from dptrain.auditing import NoLikelihood, TiltedRuns, game_of, tilted_runs
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, BandMF, Identity, SquareRoot


def runs_of(scheme, strategy, sigma, epsilon, samples=6000, seed=3) -> TiltedRuns:
    game = game_of(MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma))
    found = tilted_runs(game, epsilon=epsilon, samples=samples, seed=seed, progress=False)
    for mean, error in found.masses().values():
        assert abs(mean - 1) < 6 * error
    return found


def near(found, truth: float) -> None:
    assert found.measured
    assert abs(found.delta - truth) < 6 * found.standard_error
    assert found.standard_error < 0.1 * truth
    assert found.lower <= truth


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 2.0), (4.0, 1.0), (6.0, 1.1)])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_one_gaussian_in_disguise(epsilon, sigma, direction):
    """A single bin: the pattern is known, down to δ of 1e-8."""
    scheme = BallsInBins(bins=1, epochs=5, dataset_size=500)
    mu = float(np.linalg.norm(game_matrix := _columns_sum(BSR(bands=3), 5))) / sigma / 2.0
    assert game_matrix.shape == (5,)
    truth = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    found = runs_of(scheme, BSR(bands=3), 2.0 * sigma, epsilon)
    near(found.estimate(direction, epsilon, 0.001), float(truth))


def _columns_sum(strategy, steps: int) -> np.ndarray:
    return strategy.bind(steps).apply(np.ones(steps))


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_one_step_of_poisson_sampling(direction):
    p, sigma, epsilon = 0.2, 0.7, 0.15

    def gap(y: float) -> float:
        q = norm.pdf(y, 0, sigma)
        mixed = (1 - p) * q + p * norm.pdf(y, 1, sigma)
        high, low = (mixed, q) if direction == "remove" else (q, mixed)
        return max(high - np.exp(epsilon) * low, 0.0)

    truth = quad(gap, -8, 9, points=[0.0, 0.5, 1.0], limit=400)[0]
    scheme = Poisson(probability=p, dataset_size=500, steps=1)
    near(runs_of(scheme, Identity(), sigma, epsilon).estimate(direction, epsilon, 0.001), truth)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_two_bins(direction):
    """By a sum over a grid of the plane."""
    sigma, epsilon = 1.0, 0.4
    scheme = BallsInBins(bins=2, epochs=1, dataset_size=500)
    strategy = BSR(bands=2)
    columns = strategy.bind(2).columns(2, np.arange(2))
    y = np.arange(-8, 9, 0.02)
    first, second = np.meshgrid(y, y, indexing="ij")

    def density(mean: np.ndarray) -> np.ndarray:
        return norm.pdf(first, mean[0], sigma) * norm.pdf(second, mean[1], sigma)

    q = density(np.zeros(2))
    p = (density(columns[:, 0]) + density(columns[:, 1])) / 2
    high, low = (p, q) if direction == "remove" else (q, p)
    truth = float(np.maximum(high - np.exp(epsilon) * low, 0).sum() * 0.02**2)
    near(runs_of(scheme, strategy, sigma, epsilon).estimate(direction, epsilon, 0.001), truth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "strategy", "sigma", "epsilon", "tolerance"),
    [
        (Poisson(probability=0.05, dataset_size=2000, steps=40), Identity(), 0.9, 1.0, 0.05),
        (
            MinSep(probability=0.06, min_sep=4, dataset_size=2000, steps=40),
            BandMF(bands=4),
            1.6,
            1.0,
            0.2,
        ),
    ],
)
def test_an_accountant_is_met(scheme, strategy, sigma, epsilon, tolerance):
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    stated = profile(mechanism, [epsilon])
    found = runs_of(scheme, strategy, sigma, epsilon, samples=40_000)
    for direction, bound in (("remove", stated.remove[0]), ("add", stated.add[0])):
        mine = found.estimate(direction, epsilon, 0.001)
        assert mine.delta <= bound + 6 * mine.standard_error
        if direction == "remove":
            assert mine.delta >= (1 - tolerance) * bound - 6 * mine.standard_error


def test_no_tail_no_number():
    scheme = Poisson(probability=0.01, dataset_size=500, steps=3)
    found = runs_of(scheme, Identity(), 5.0, 12.0, samples=2000)
    rare = found.estimate("add", 12.0, 0.001)
    assert not rare.measured
    assert rare.lower == 0


def test_without_a_likelihood_there_are_no_tilted_runs():
    scheme = MinSep(probability=0.1, min_sep=4, dataset_size=9, steps=60)
    game = game_of(MatrixMechanism(scheme=scheme, strategy=SquareRoot(), noise_multiplier=1.0))
    with pytest.raises(NoLikelihood, match="60 bands"):
        tilted_runs(game, epsilon=1.0, samples=2000, seed=1)
