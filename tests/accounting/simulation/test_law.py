"""Samples without weights: terms with the ceiling 1, against mechanisms with a known δ."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from dptrain.accounting.losses import gaussian
from dptrain.contrib.accountants.any_matrix import MinSepAnyMatrix
from dptrain.core.guarantee import Guarantee, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.schemes.min_sep import MinSep
from dptrain.strategies import Identity

QUIET = MinSepAnyMatrix(seed=1, progress=False, threads=2)


def mechanism(p: float, steps: int, sigma: float = 1.0) -> MatrixMechanism:
    """Poisson sampling: b-min-sep with b = 1."""
    scheme = MinSep(probability=p, min_sep=1, steps=steps, dataset_size=50)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


def composed() -> object:
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(1.0, sampling_prob=0.2, value_discretization_interval=1e-4)
    return one.self_compose(10)


def test_guarantee_brackets_the_gaussian() -> None:
    # A mechanism with a known ε(δ); the answer is too low with probability 1e-6.
    with pytest.warns(UserWarning, match="not below 1/N"):
        got = QUIET.guarantee(mechanism(1.0, 1), delta=0.03)
    # No grid point below the top may be accepted wrongly, and the top is the truth itself.
    assert got.epsilon == pytest.approx(gaussian.epsilon(0.03, 1.0), rel=1e-9)
    assert got.kind is Kind.CONFIDENCE
    assert "1e-06" in got.notes[0]


@pytest.mark.slow
def test_guarantee_is_above_the_truth_and_close_to_it() -> None:
    truth = composed()
    got = QUIET.guarantee(mechanism(0.2, 10), delta=0.01)
    # Too low with probability 1e-6; thresholds reach .8 δ.
    assert truth.get_epsilon_for_delta(0.01) - 1e-3 <= got.epsilon  # type: ignore[attr-defined]
    assert got.epsilon <= truth.get_epsilon_for_delta(0.005)  # type: ignore[attr-defined]
    assert Guarantee.from_json(got.to_json()) == got
    assert QUIET.guarantee(mechanism(0.2, 10), delta=0.01) == got


@pytest.mark.slow
def test_profile_is_an_upper_bound_and_close_to_it() -> None:
    grid = np.linspace(0.1, 3, 9)
    profile = QUIET.profile(mechanism(0.2, 10), grid)
    exact = np.array([composed().get_delta_for_epsilon(e) for e in grid])  # type: ignore[attr-defined]
    # All nine cover at once except with probability 1e-6; 1e-5 for their discretization. The
    # interval is about sqrt(2 δ log(1/q') / s) wide, log(1/q') = 16.7; twice that is generous.
    assert (profile.delta >= exact - 1e-5).all()
    assert (profile.delta <= exact + 2 * np.sqrt(2 * 17 * exact / 480_000) + 2e-4).all()
    assert (np.diff(profile.remove) <= 0).all()
    assert profile.kind is Kind.CONFIDENCE


def test_no_noise_is_no_privacy() -> None:
    m = mechanism(0.1, 3, sigma=0.0)
    assert QUIET.guarantee(m, delta=0.01).epsilon == math.inf
    assert QUIET.profile(m, [1.0]).delta == [1.0]


def test_impossible_jobs_are_refused_before_they_start() -> None:
    m = mechanism(0.1, 3)
    for call in (
        lambda: QUIET.guarantee(m, delta=1e-12),
        lambda: QUIET.calibrate(m, epsilon=1.0, delta=1e-12),
    ):
        with pytest.raises(ValueError, match=r"above max_samples=1000000000; raise max_samples"):
            call()
    # The number that is named is the one that binds, however large.
    more = dataclasses.replace(QUIET, max_samples=2 * 10**9)
    with pytest.raises(ValueError, match=r"takes .* samples .*, above max_samples=2000000000"):
        more.guarantee(m, delta=1e-12)
    assert more._rule(more.law(m), 1e-7, 1e-10).looks(1.0)[-1] == 2 * 10**9
    for grid in ([], [2.0, 1.0], [-1.0], [math.nan]):
        with pytest.raises(ValueError, match="grid"):
            QUIET.profile(m, grid)
