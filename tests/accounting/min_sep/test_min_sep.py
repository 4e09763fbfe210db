"""The Monte Carlo accountant against mechanisms with a known δ."""

from __future__ import annotations

import math
import pathlib

import numpy as np
import pytest

from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.hockey_stick_terms import (
    declare_epsilons,
    hockey_stick,
    hockey_stick_moments,
)
from dptrain.accounting.min_sep.monte_carlo import MinSepMonteCarlo
from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.contrib.accountants.any_matrix import AnyMatrixMonteCarlo
from dptrain.core.guarantee import Guarantee, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.schemes.balls_in_bins import BallsInBins
from dptrain.sampling.schemes.min_sep import MinSep
from dptrain.sampling.schemes.poisson import Poisson
from dptrain.strategies import BandMF, Identity

QUIET = MinSepMonteCarlo(seed=1, progress=False, threads=2)


def mechanism(scheme: object, sigma: float, *coefficients: float) -> MatrixMechanism:
    strategy = (
        BandMF(bands=len(coefficients), coefficients=coefficients) if coefficients else Identity()
    )
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)  # type: ignore[arg-type]


def test_moments_equal_the_direct_means() -> None:
    losses = np.random.default_rng(1).normal(1.0, 3.0, 1000)
    grid = np.array([0.0, 0.3, 2.0, 5.0, 40.0])
    direct = np.stack([hockey_stick(losses, e) for e in grid], axis=1)
    expected = np.stack([direct.sum(0), (direct**2).sum(0)])
    np.testing.assert_allclose(hockey_stick_moments(losses, grid), expected, atol=1e-10)


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
        estimate = QUIET.estimate(mechanism(each, 0.8), grid)
        worse = np.maximum(estimate.remove, estimate.add)
        error = np.maximum(estimate.remove_error, estimate.add_error)
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
        estimate = QUIET.estimate(mechanism(scheme, sigma, *c), grid)
        for direction in DIRECTIONS:
            mean, error = balls_in_bins_delta(c, bins, epochs, sigma, grid, direction == "remove")
            ours = getattr(estimate, direction)
            own_error = getattr(estimate, direction + "_error")
            assert (abs(ours - mean) < 6 * np.hypot(error, own_error)).all()  # error 2e-9 each
            assert (own_error[:2] < 0.05 * ours[:2]).all()


@pytest.mark.slow
def test_cold_start_protects_less_at_the_first_step() -> None:
    # n = 1, b = 4, p = .5: cold is Poisson with .5, warm is Poisson with .5/2.5 = .2.
    for warm, p in ((False, 0.5), (True, 0.2)):
        scheme = MinSep(probability=0.5, min_sep=4, steps=1, dataset_size=9, warm_start=warm)
        same = Poisson(probability=p, steps=1, dataset_size=9)
        ours, theirs = (QUIET.estimate(mechanism(s, 1.0), [0.3]) for s in (scheme, same))
        assert abs(ours.remove - theirs.remove) < 6 * np.hypot(
            ours.remove_error, theirs.remove_error
        )


def test_guarantee_brackets_the_gaussian() -> None:
    # A mechanism with a known ε(δ); the answer is too low with probability 1e-6.
    scheme = Poisson(probability=1.0, steps=1, dataset_size=50)
    with pytest.warns(UserWarning, match="not below 1/N"):
        got = QUIET.guarantee(mechanism(scheme, 1.0), delta=0.03)
    truth = gaussian.epsilon(0.03, 1.0)
    # No grid point below the top may be accepted wrongly, and the top is the truth itself.
    assert truth * 0.999 <= got.epsilon <= truth
    assert got.kind is Kind.CONFIDENCE
    assert "1e-06" in got.notes[0]
    assert got.delta == 0.03


def test_guarantee_is_above_the_truth_and_close_to_it() -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    truth = pld.from_gaussian_mechanism(
        1.0, sampling_prob=0.2, value_discretization_interval=1e-4
    ).self_compose(10)
    m = mechanism(Poisson(probability=0.2, steps=10, dataset_size=90), 1.0)
    got = QUIET.guarantee(m, delta=0.01)
    # Too low with probability 1e-6; δ' is about .31 δ at 60/δ samples, hence the factor.
    assert truth.get_epsilon_for_delta(0.01) - 1e-3 <= got.epsilon
    assert got.epsilon <= truth.get_epsilon_for_delta(0.002)
    assert Guarantee.from_json(got.to_json()) == got
    assert QUIET.guarantee(m, delta=0.01) == got


def test_profile_is_an_upper_bound_and_the_estimate_lies_below() -> None:
    scheme = Poisson(probability=1.0, steps=1, dataset_size=50)
    m, grid = mechanism(scheme, 1.0), np.linspace(0, 4, 30)
    profile, estimate = QUIET.profile(m, grid), QUIET.estimate(m, grid)
    truth = gaussian.delta(grid, 1.0)
    for direction in DIRECTIONS:
        upper = getattr(profile, direction)
        assert (upper >= truth * (1 - 1e-8)).all()
        assert (upper <= truth * (1 + 1e-6)).all()  # capped by the Gaussian, which is exact here
        assert (abs(getattr(estimate, direction) - truth) < 0.01).all()
    assert profile.kind is Kind.CONFIDENCE


def test_profile_of_an_amplified_mechanism_covers_the_truth() -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    truth = pld.from_gaussian_mechanism(
        1.0, sampling_prob=0.2, value_discretization_interval=1e-4
    ).self_compose(10)
    m = mechanism(Poisson(probability=0.2, steps=10, dataset_size=90), 1.0)
    grid = np.linspace(0.1, 3, 9)
    profile = QUIET.profile(m, grid)
    exact = np.array([truth.get_delta_for_epsilon(e) for e in grid])
    # All nine cover at once except with probability 1e-6; 1e-5 for their discretization. The
    # interval is about sqrt(2 δ log(1/q') / s) wide, log(1/q') = 16.7; twice that is generous.
    assert (profile.delta >= exact - 1e-5).all()
    assert (profile.delta <= exact + 2 * np.sqrt(2 * 17 * exact / 200_000) + 2e-4).all()
    assert (np.diff(profile.remove) <= 0).all()


def test_calibrate_states_a_verified_guarantee(tmp_path: pathlib.Path) -> None:
    scheme = MinSep(probability=0.2, min_sep=4, steps=20, dataset_size=40)
    accountant = MinSepMonteCarlo(seed=3, cache=tmp_path, progress=False)
    m = mechanism(scheme, 0.0, 1.0, 0.6, 0.4)
    got = accountant.calibrate(m, epsilon=1.0, delta=0.01)
    assert (got.epsilon, got.delta, got.kind) == (1.0, 0.01, Kind.VERIFIED)
    assert got.mechanism_hash == m.with_noise(got.noise_multiplier).hash
    assert Guarantee.from_json(got.to_json()) == got
    assert accountant.calibrate(m, epsilon=1.0, delta=0.01) == got
    # An independent estimate at that σ: δ lies below δ with room for the certificate's margin.
    estimate = QUIET.estimate(m.with_noise(got.noise_multiplier), [1.0])
    assert estimate.remove + 6 * estimate.remove_error < 0.01
    assert estimate.add + 6 * estimate.add_error < 0.01
    # Amplification is real: the unamplified Gaussian would need far more noise.
    assert got.noise_multiplier < 0.8 * got.certificate["ceiling"]["noise_multiplier"]  # type: ignore[index]


def test_no_noise_is_no_privacy() -> None:
    m = mechanism(Poisson(probability=0.1, steps=3, dataset_size=50), 0.0)
    assert QUIET.guarantee(m, delta=0.01).epsilon == math.inf
    assert QUIET.profile(m, [1.0]).delta == [1.0]
    with pytest.raises(ValueError, match="without noise"):
        QUIET.estimate(m, [1.0])


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


def test_impossible_jobs_are_refused_before_they_start() -> None:
    m = mechanism(Poisson(probability=0.1, steps=3, dataset_size=50), 1.0)
    with pytest.raises(ValueError, match="max_samples"):
        QUIET.guarantee(m, delta=1e-12)
    with pytest.raises(ValueError, match="max_samples"):
        QUIET.calibrate(m, epsilon=1.0, delta=1e-12)
    few = MinSepMonteCarlo(samples=100, progress=False)
    with pytest.raises(ValueError, match="use at least 1376"):
        few.guarantee(m, delta=0.01)
    for grid in ([], [2.0, 1.0], [-1.0], [math.nan]):
        with pytest.raises(ValueError, match="grid"):
            QUIET.profile(m, grid)


@pytest.mark.parametrize(
    "options",
    [{"samples": 0}, {"threads": 0}, {"failure_probability": 0.0}, {"seed": -1}],
)
def test_bad_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        MinSepMonteCarlo(**options)


def test_declared_epsilons() -> None:
    grid = declare_epsilons(7.0)
    assert grid[0] == 0.0
    assert (np.diff(grid) > 0).all()
    assert grid[-1] < 7.0
    assert np.diff(grid).max() <= 0.07
    assert declare_epsilons(0.0).size == 0
    assert declare_epsilons(1e4)[-1] < 500


@pytest.mark.parametrize("bands", [2, 4])
def test_a_simulated_profile_knows_what_an_absent_example_loses(bands: int) -> None:
    """δ ≤ Pr[x ≠ 0], and nothing from -log Pr[x = 0] on in the add direction, without a sample."""
    p, steps = 0.01, 6
    scheme = MinSep(probability=p, min_sep=3, dataset_size=100, steps=steps, warm_start=False)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=bands), noise_multiplier=0.05)
    absent = (1 - p) ** steps
    limit = -math.log(absent)
    kind = MinSepMonteCarlo if bands <= 3 else AnyMatrixMonteCarlo
    member = kind(seed=1, progress=False, profile_samples=2_000, threads=1)
    found = member.profile(mechanism, [0.0, 0.5 * limit, limit * (1 + 1e-9), 1.0])
    assert (found.remove <= (1 - absent) * (1 + 1e-9)).all()
    assert found.add[1] > 0.0
    assert found.add[2] == found.add[3] == 0.0
