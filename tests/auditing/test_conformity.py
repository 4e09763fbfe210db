"""Audits find what is broken, with a computed power of .99 or more; what is right passes.

The power of a test is the chance that it finds the error: of a law that is known in closed form,
computed; of the audit as a whole, runs with fixed seeds are beside it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2, norm

from dptrain import account, profile
from dptrain.auditing import (
    StatedCurve,
    audit_mechanism,
    check_noise,
    check_participations,
    count,
    game_of,
    least_probability,
    noises,
    participations,
)
from dptrain.mechanism import MatrixMechanism
from dptrain.noise import noise_stream
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, BandMF, Identity
from tests.helpers.power import power_against_scaled_noise, power_of_counting

SCHEME = MinSep(probability=0.2, min_sep=4, dataset_size=2000, steps=24)
MECHANISM = MatrixMechanism(scheme=SCHEME, strategy=BandMF(bands=4), noise_multiplier=2.5)
RUNS, ALPHA = 2000, 0.01


def broken_noise(monkeypatch, change) -> None:
    """Every stream that the audit opens releases noise that ``change`` has seen."""

    class Changed:
        def __init__(self, stream):
            self.stream, self.before = stream, None

        def release(self, sums, deviation):
            (row,) = self.stream.release(sums, deviation)
            self.before = change(self.stream.step - 1, row, self.before)
            return [self.before]

    monkeypatch.setattr(
        "dptrain.auditing.draws.noise_stream",
        lambda *args, **options: Changed(noise_stream(*args, **options)),
    )


def scaled(factor: float):
    return lambda step, row, before: factor * row


def repeated(step: int, row: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """The noise of step 10 is that of step 9 once more."""
    return before if step == 10 else row


class Unseparated:
    """A stream that draws everybody at the rate of the scheme and bars nobody."""

    def __init__(self, scheme: MinSep, seed: int) -> None:
        self.stream = Poisson(
            probability=scheme.rate, dataset_size=scheme.dataset_size, steps=scheme.steps
        ).stream(seed)

    def state_dict(self):
        return self.stream.state_dict()

    def __iter__(self):
        return iter(self.stream)


def p_values(monkeypatch, seed: int = 1) -> list[float]:
    game = game_of(MECHANISM)
    found = check_noise(game, noises(MECHANISM, RUNS, seed))
    found += check_participations(game, participations(SCHEME, RUNS, seed))
    return [each.p_value for each in found]


@pytest.mark.slow
def test_what_is_right_passes_as_often_as_stated(monkeypatch):
    """100 audits of the draws, of five findings each: 6 sigma above the stated chance at most."""
    times = 100
    alarms = sum(min(p_values(monkeypatch, seed)) < ALPHA / 5 for seed in range(times))
    assert alarms <= ALPHA * times + 6 * math.sqrt(ALPHA * times)


def test_noise_of_nine_tenths_is_found(monkeypatch):
    power = power_against_scaled_noise(0.9, runs=RUNS, steps=SCHEME.steps, alpha=ALPHA / 5)
    assert power > 1 - 1e-12
    broken_noise(monkeypatch, scaled(0.9))
    assert p_values(monkeypatch)[0] < 1e-100


def test_the_power_against_scaled_noise_is_that_of_chi_square():
    low, high = chi2.ppf([0.005, 0.995], 50)
    drawn = 0.81 * np.random.default_rng(1).chisquare(50, 200_000)
    seen = np.mean((drawn < low) | (drawn > high))
    power = power_against_scaled_noise(0.9, runs=10, steps=5, alpha=0.01)
    assert abs(seen - power) < 6 * math.sqrt(power / 200_000)
    assert power_against_scaled_noise(1.0, runs=10, steps=5, alpha=0.01) == pytest.approx(0.01)


def test_noise_that_is_used_twice_is_found(monkeypatch):
    """Whitened, z_10 gets a share of z_9 for ever: a correlation that thousands of runs must show.

    Of the correlation r of two steps Fisher's transformation is normal, of spread 1/sqrt(m).
    """
    matrix = game_of(MECHANISM).matrix
    noise = np.linalg.inv(matrix)
    noise[10] = noise[9]
    covariance = matrix @ noise @ (matrix @ noise).T
    scale = np.sqrt(np.diag(covariance))
    r = np.abs(covariance / np.outer(scale, scale) - np.eye(24)).max()
    pairs = 24 * 23 / 2
    needed = norm.isf(ALPHA / 5 / pairs / 2) / math.sqrt(RUNS)
    assert norm.sf(math.sqrt(RUNS) * (needed - math.atanh(r))) > 1 - 1e-12
    broken_noise(monkeypatch, repeated)
    assert p_values(monkeypatch)[2] < 1e-50


def test_a_sampler_without_separation_is_found(monkeypatch):
    """One pair of participations that are too near is proof; the chance of none is computed."""
    p, steps = SCHEME.rate, SCHEME.steps
    # Of a run of independent coins: no two within b = 4 steps, by the states of the last three.
    free, barred = 1.0, [0.0, 0.0, 0.0]
    for _ in range(steps):
        free, barred = (
            free * (1 - p) + barred[2] * (1 - p),
            [free * p, barred[0] * (1 - p), barred[1] * (1 - p)],
        )
    none = (free + sum(barred)) ** RUNS
    assert none < 1e-100
    monkeypatch.setattr(MinSep, "stream", lambda scheme, seed: Unseparated(scheme, seed))
    assert p_values(monkeypatch)[3] == 0.0


def curve_of(mechanism) -> tuple[StatedCurve, float]:
    grid = np.linspace(0.0, 2.0, 11)
    found = profile(mechanism, grid)
    delta = account(mechanism, epsilon=1.0).delta
    return StatedCurve(epsilon=found.epsilon, remove=found.remove, add=found.add), delta


# A mechanism whose participations everybody knows: the trade-off is Gaussian, in closed form.
KNOWN = MatrixMechanism(
    scheme=BallsInBins(bins=1, epochs=8, dataset_size=1000),
    strategy=BSR(bands=3),
    noise_multiplier=4.0,
)


@pytest.mark.slow
def test_counting_alone_finds_noise_of_nine_tenths_by_the_curve(monkeypatch):
    """No look at the draws: at ε = 0 the test of the mean has rates that are known."""
    curve, delta = curve_of(KNOWN)
    mu = float(np.linalg.norm(game_of(KNOWN).matrix.sum(axis=1))) / 4.0
    runs = 40_000
    power = power_of_counting(
        hit_rate=norm.cdf(mu / 0.9 / 2),
        false_rate=norm.cdf(-mu / 0.9 / 2),
        runs=runs,
        epsilon=0.0,
        delta=float(curve.remove[0]),
        alpha=0.0025,
    )
    assert power > 0.99
    broken_noise(monkeypatch, scaled(0.9))
    audit = audit_mechanism(
        KNOWN, epsilon=1.0, delta=delta, curve=curve, runs=2 * runs, samples=4000, progress=False
    )
    assert audit.counted.violated
    assert not audit.passed


@pytest.mark.slow
def test_the_right_mechanism_passes_the_same_audit():
    curve, delta = curve_of(KNOWN)
    audit = audit_mechanism(
        KNOWN, epsilon=1.0, delta=delta, curve=curve, runs=20_000, samples=20_000, progress=False
    )
    assert audit.passed, audit.violations
    assert audit.epsilon_estimate == pytest.approx(1.0, abs=0.05)
    assert 0.9 < audit.epsilon_lower <= 1.0
    assert 0.3 < audit.shown.epsilon_lower < 1.0


def test_a_statement_that_is_too_good_is_refuted():
    """An ε of 20 % less than what the mechanism has, as by an accountant with a bug."""
    epsilon = account(KNOWN, delta=1e-5).epsilon
    audit = audit_mechanism(
        KNOWN, epsilon=0.8 * epsilon, delta=1e-5, runs=1000, samples=20_000, progress=False
    )
    assert not audit.passed
    assert 0.8 * epsilon < audit.epsilon_lower < epsilon
    assert "by the likelihood ratio" in str(audit)


def test_a_step_that_is_left_without_noise_is_counted():
    """Whatever the score is for: what is released without noise is told by it at once."""
    scheme = Poisson(probability=0.5, dataset_size=1000, steps=4)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=4.0)
    game = game_of(mechanism)
    taken = participations(scheme, 4000, 1)
    worlds = []
    for k, x in enumerate((taken, np.zeros_like(taken))):
        noise = noises(mechanism, 4000, 2 + k)
        noise[:, 3] = 0.0
        outputs = x + noise
        # What a reader of the release does who sees that the last sum is a whole number.
        worlds.append(game.scores(outputs) + 100.0 * (outputs[:, 3] == 1.0))
    found = count(*worlds, alpha=0.01, epsilon=1.0, delta=1e-3)
    assert found.violated
    assert binom.sf(0, 2000, 0.5) > 1 - 1e-12
    assert found.delta_lower > 0.4 > least_probability(700, 2000, 0.005)
