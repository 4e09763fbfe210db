"""Profiles by simulation as curves: chords in e^ε between bounds that hold at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr

from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.simulation.draws import SharedDraws
from dptrain.contrib.accountants.any_matrix import MinSepAnyMatrix
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting.published_profile import chords
from dptrain.sampling import MinSep
from dptrain.strategies import Identity

P, SIGMA = 0.3, 0.8
COARSE = np.linspace(0.0, 2.4, 7)
FINE = np.linspace(0.0, 2.4, 241)
MEMBERS = {
    "plain": MinSepAnyMatrix(seed=4, profile_samples=200_000, progress=False, threads=1),
    "importance": MinSepImportance(seed=4, progress=False, threads=1),
}


def mechanism(steps: int = 1) -> MatrixMechanism:
    """Poisson sampling: b-min-sep with b = 1."""
    scheme = MinSep(probability=P, min_sep=1, steps=steps, dataset_size=100)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=SIGMA)


def one_step(epsilon: np.ndarray) -> dict[str, np.ndarray]:
    """δ of (1-p) N(0, σ²) + p N(1, σ²) against N(0, σ²): the likelihood ratio is increasing."""
    found = {}
    for direction, ratio in (("remove", np.exp(epsilon)), ("add", np.exp(-epsilon))):
        with np.errstate(divide="ignore", invalid="ignore"):
            at = 0.5 + SIGMA**2 * np.log((ratio - 1 + P) / P)
        at = np.where(ratio > 1 - P, at, -math.inf)
        plain, mixed = ndtr(at / SIGMA), (1 - P) * ndtr(at / SIGMA) + P * ndtr((at - 1) / SIGMA)
        if direction == "remove":
            found[direction] = (1 - mixed) - np.exp(epsilon) * (1 - plain)
        else:
            found[direction] = plain - np.exp(epsilon) * mixed
    return found


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())
def test_no_chord_is_below_a_known_profile(member) -> None:
    """One step in closed form, at 240 ε between the seven that are sampled (false: 1e-6)."""
    profile = member.profile(mechanism(), COARSE)
    assert profile.holds_at_once
    assert profile.failure_probability == member.failure_probability == 1e-6
    drawn, truth = chords(profile), one_step(FINE)
    for direction in ("remove", "add"):
        shown = np.interp(FINE, drawn.epsilon, getattr(drawn, direction))
        assert (shown >= truth[direction] * (1 - 1e-9)).all()
        # The chords' own slack, with room for what few samples know.
        gamma = np.exp(COARSE)
        tight = np.interp(np.exp(FINE), gamma, one_step(COARSE)[direction])
        assert (shown <= 1.2 * tight + 1e-3).all()


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())
def test_no_chord_is_below_a_known_composition(member) -> None:
    """Twelve steps against losses that dp_accounting rounds down, so that its δ is no more."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    truth = pld.from_gaussian_mechanism(
        SIGMA, sampling_prob=P, value_discretization_interval=1e-3, pessimistic_estimate=False
    ).self_compose(12)
    drawn = chords(member.profile(mechanism(12), np.linspace(0.0, 6.0, 9)))
    inside = drawn.epsilon[::20]
    exact = np.array([truth.get_delta_for_epsilon(each) for each in inside])
    assert (drawn.delta[::20] >= exact * (1 - 1e-9)).all()
    assert (np.diff(drawn.remove) <= 0).all()


def test_with_more_samples_a_profile_is_nearer_to_the_truth() -> None:
    """The margin falls as 1/√samples: with a hundredfold to a tenth, and what is twice that."""
    members = [
        MinSepImportance(seed=5, progress=False, threads=1, profile_samples=samples)
        for samples in (48_000, 4_800_000)
    ]
    at = np.array([1.2])
    truth = one_step(at)["remove"][0]
    few, many = (float(member.profile(mechanism(), at).remove[0] / truth) - 1 for member in members)
    assert 0.0 <= many <= 0.2 * few
    with pytest.raises(ValueError, match="profile_samples"):
        MinSepImportance(profile_samples=0)


@pytest.mark.slow
def test_curves_are_too_low_somewhere_no_more_often_than_stated() -> None:
    """200 seeds at q = .2: at most 40 expected, and six standard deviations above that 74."""
    truth = one_step(FINE)
    failures = 0
    for seed in range(200):
        member = MinSepAnyMatrix(
            seed=seed, profile_samples=2000, failure_probability=0.2, progress=False, threads=1
        )
        profile = member.profile(mechanism(), COARSE)
        assert profile.failure_probability == 0.2
        drawn = chords(profile)
        failures += any(
            (np.interp(FINE, drawn.epsilon, getattr(drawn, side)) < truth[side] * (1 - 1e-9)).any()
            for side in ("remove", "add")
        )
    assert failures <= 40 + 6 * math.sqrt(200 * 0.2 * 0.8)


@pytest.mark.slow
def test_weighted_samples_are_spread_over_the_grid(monkeypatch) -> None:
    """No stairs: every point of 81 is sampled, with as many samples in all as 24 points had."""
    asked: list[int] = []
    plain = SharedDraws.mean

    def counted(draws, terms, samples, stream):
        asked.append(samples)
        return plain(draws, terms, samples, stream)

    monkeypatch.setattr(SharedDraws, "mean", counted)
    profile = MEMBERS["importance"].profile(mechanism(), np.linspace(0.0, 2.0, 81))
    assert len(asked) >= 81
    assert sum(asked) <= 2 * 24 * 20_000
    ratio = profile.remove[1:] / profile.remove[:-1]
    assert (ratio < 1.0).all()
    MEMBERS["importance"].profile(mechanism(), [1.0])
    assert asked[-1] == 20_000  # of add nothing is left there
