"""Losses of b-min-sep sampling against mechanisms with a known δ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.schemes.balls_in_bins import BallsInBins
from dptrain.sampling.schemes.min_sep import MinSep
from dptrain.sampling.schemes.poisson import Poisson
from dptrain.strategies import BandMF, Identity
from tests.helpers.min_sep_losses import min_sep_means

QUIET = MinSepImportance(seed=1, progress=False, threads=2)


def mechanism(scheme: object, sigma: float, *coefficients: float) -> MatrixMechanism:
    strategy = (
        BandMF(bands=len(coefficients), coefficients=coefficients) if coefficients else Identity()
    )
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)  # type: ignore[arg-type]


@pytest.mark.slow
def test_poisson_agrees_with_composition() -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    single = pld.from_gaussian_mechanism(
        0.8, sampling_prob=0.1, value_discretization_interval=1e-4
    ).self_compose(30)
    scheme = Poisson(probability=0.1, steps=30, dataset_size=1000)
    alike = MinSep(probability=0.1, min_sep=1, steps=30, dataset_size=1000)
    grid = [0.5, 1.5, 3.0]
    truth = np.array([single.get_delta_for_epsilon(e) for e in grid])
    for each in (scheme, alike):
        found = min_sep_means(mechanism(each, 0.8), grid)
        worse = np.maximum(found.remove, found.add)
        error = np.maximum(found.remove_error, found.add_error)
        assert (abs(worse - truth) < 6 * error + 1e-5).all()  # 1e-5: their discretization
        assert (error < 0.05 * truth).all()


def balls_in_bins_delta(
    c: list[float], bins: int, epochs: int, sigma: float, grid: np.ndarray, remove: bool
) -> tuple[np.ndarray, np.ndarray]:
    """δ by b-dimensional simulation: <m_i, y> is Gaussian with covariance σ²G, G = MᵀM."""
    n, size, rng = bins * epochs, 150_000, np.random.default_rng(3)
    matrix = sum(v * np.eye(n, k=-k) for k, v in enumerate(c))
    m = matrix @ np.tile(np.eye(bins), (epochs, 1))
    gram = m.T @ m
    inner = sigma * np.linalg.cholesky(gram) @ rng.standard_normal((bins, size))
    if remove:
        inner += gram[:, rng.integers(bins, size=size)]
    exponent = (inner - np.diag(gram)[:, None] / 2) / sigma**2
    losses = np.logaddexp.reduce(exponent, axis=0) - math.log(bins)
    terms = np.stack([hockey_stick(losses if remove else -losses, e) for e in grid])
    return terms.mean(1), terms.std(1) / math.sqrt(size)


@pytest.mark.slow
def test_balls_in_bins_agrees_with_simulation_in_bins() -> None:
    c, bins, epochs, sigma = [0.9, 0.5, 0.7], 5, 3, 1.5
    grid = np.array([0.2, 1.0, 2.0])
    schemes = (
        BallsInBins(bins=bins, epochs=epochs, dataset_size=100),
        MinSep(probability=1.0, min_sep=bins, steps=bins * epochs, dataset_size=100),
    )
    for scheme in schemes:
        found = min_sep_means(mechanism(scheme, sigma, *c), grid)
        for direction in DIRECTIONS:
            mean, error = balls_in_bins_delta(c, bins, epochs, sigma, grid, direction == "remove")
            ours = getattr(found, direction)
            own_error = getattr(found, direction + "_error")
            assert (abs(ours - mean) < 6 * np.hypot(error, own_error)).all()  # error 2e-9 each
            assert (own_error[:2] < 0.05 * ours[:2]).all()


@pytest.mark.slow
def test_cold_start_protects_less_at_the_first_step() -> None:
    # n = 1, b = 4, p = .5: cold is Poisson with .5, warm is Poisson with .5/2.5 = .2.
    for warm, p in ((False, 0.5), (True, 0.2)):
        scheme = MinSep(probability=0.5, min_sep=4, steps=1, dataset_size=9, warm_start=warm)
        same = Poisson(probability=p, steps=1, dataset_size=9)
        ours, theirs = (min_sep_means(mechanism(s, 1.0), [0.3]) for s in (scheme, same))
        assert abs(ours.remove - theirs.remove) < 6 * np.hypot(
            ours.remove_error, theirs.remove_error
        )


def test_more_bands_than_separation_are_refused() -> None:
    scheme = MinSep(probability=0.1, min_sep=2, steps=9, dataset_size=50)
    m = mechanism(scheme, 1.0, 1.0, 0.5, 0.2)
    assert "3 bands exceed" in (QUIET.refusal(m) or "")
    for call in (
        lambda: QUIET.guarantee(m, delta=0.01),
        lambda: QUIET.profile(m, [1.0]),
        lambda: QUIET.calibrate(m, epsilon=1.0, delta=0.01),
    ):
        with pytest.raises(ValueError, match="does not cover"):
            call()
    assert QUIET.refusal(mechanism(scheme, 1.0, 1.0, 0.5)) is None


def test_a_profile_knows_what_an_absent_example_loses() -> None:
    """δ ≤ Pr[x ≠ 0], and nothing from -log Pr[x = 0] on in the add direction, without a sample."""
    p, steps = 0.01, 6
    scheme = MinSep(probability=p, min_sep=3, dataset_size=100, steps=steps, warm_start=False)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=2), noise_multiplier=0.05)
    absent = (1 - p) ** steps
    limit = -math.log(absent)
    member = MinSepImportance(seed=1, progress=False, profile_samples=2_000, threads=1)
    found = member.profile(mechanism, [0.0, 0.5 * limit, limit * (1 + 1e-9), 1.0])
    assert (found.remove <= (1 - absent) * (1 + 1e-9)).all()
    assert found.add[1] > 0.0
    assert found.add[2] == found.add[3] == 0.0
