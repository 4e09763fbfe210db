"""Runs of the real engine with canaries: what is right passes, what is broken is found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dptrain import account, profile
from dptrain.auditing import (
    StatedCurve,
    audit_canaries,
    count,
    game_of,
    run_canaries,
)
from dptrain.engine import Gradients
from dptrain.individual import GDPOdometer
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, BandMF, Identity
from tests.helpers.broken_engines import DELTA, FAULTS, VERDICT, stated

ALPHA = 0.01 / 4
# Everybody takes part in every step: the game is that of a Gaussian of μ = 1.
KNOWN = MatrixMechanism(
    scheme=Poisson(probability=1.0, dataset_size=2000, steps=4),
    strategy=Identity(),
    noise_multiplier=2.0,
)
OPTIMIZER = "dptrain.engine.optimizer.PrivateOptimizer"


def audited(mechanism: MatrixMechanism, delta: float = 1e-4, seed: int = 2, **options):
    epsilon = account(mechanism, delta=delta).epsilon
    stated = profile(mechanism, np.linspace(0.0, 1.5 * epsilon, 13))
    curve = StatedCurve(epsilon=stated.epsilon, remove=stated.remove, add=stated.add)
    found = run_canaries(mechanism, seed=seed, progress=False, **options)
    return audit_canaries(mechanism, found, epsilon=epsilon, delta=delta, curve=curve)


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_the_engine_passes(mode):
    # With δ nearer to 1/m the bound of one run shows nothing.
    audit = audited(KNOWN, delta=1e-6, gradients=Gradients(mode=mode))
    assert audit.passed, audit.violations
    assert 0 < audit.one_run.epsilon_lower < audit.epsilon
    value = json.loads(audit.to_json())
    assert value["canaries"] == 2000
    assert value["passed"] is True


def test_canaries_that_have_spent_their_budget_are_left_out():
    """Two steps of μ = 1/2 fit a budget of √2/2, and the release has them only."""
    budget = 0.5 * np.sqrt(2) * (1 + 1e-9)
    individual = GDPOdometer(increments=(budget,), target_delta=1e-4, max_steps=4)
    found = run_canaries(KNOWN, individual=individual, seed=3, progress=False)
    inside = found.released[found.included]
    assert (np.abs(inside.mean(axis=0) - [1, 1, 0, 0]) < 6 * 2.0 / np.sqrt(len(inside))).all()


@pytest.mark.parametrize(
    ("scheme", "strategy"),
    [
        (MinSep(probability=0.3, min_sep=3, dataset_size=800, steps=12), BandMF(bands=3)),
        (BallsInBins(bins=4, epochs=3, dataset_size=800), BSR(bands=4)),
    ],
)
def test_what_is_released_is_the_game(scheme, strategy):
    """Mean and spread of the whitened release, of canaries that are in and those that are out."""
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=3.0)
    found = run_canaries(mechanism, spare=800, seed=4, progress=False)
    matrix = game_of(mechanism).matrix
    inside = found.released[found.included] @ matrix.T
    expected = matrix @ np.full(scheme.steps, scheme.rate)
    spread = np.sqrt((9.0 + (matrix**2).sum(axis=1)) / len(inside))
    assert (np.abs(inside.mean(axis=0) - expected) < 6 * spread).all()
    outside = found.released[~found.included] @ matrix.T
    assert abs(outside.var() / 9.0 - 1) < 6 * np.sqrt(2 / outside.size)
    assert abs(outside.mean()) < 6 * 3.0 / np.sqrt(outside.size)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_broken_is_found(name):
    """At a chance of a millionth that what is right fails."""
    fault = FAULTS[name]
    assert fault.power() > 0.999
    assert fault.audited(seed=2) == ()
    with fault.broken():
        assert fault.audited(seed=2)
    assert fault.audited(seed=2) == ()


def test_the_power_of_counting_against_no_clipping_is_no_more_than_what_happens():
    """Counts of the test that the power is of, drawn from its rates: binomial, 6 sigma."""
    fault = FAULTS["clipping"]
    rng = np.random.default_rng(5)
    times, runs, caught = 400, 900, 0
    for _ in range(times):
        outside = rng.standard_normal(2 * runs)
        inside = rng.standard_normal(2 * runs) + np.where(np.arange(2 * runs) % 2, 1.0, 4.0)
        epsilon, curve = stated(fault.mechanism)
        caught += count(
            rng.permutation(inside),
            outside,
            alpha=VERDICT,
            epsilon=epsilon,
            delta=DELTA,
            curve=curve,
        ).violated
    assert caught > fault.power() * times - 6 * np.sqrt(times * 1e-3)


def test_noise_that_is_left_out_of_a_layer_is_found(monkeypatch):
    whole = _attribute("add_noise")

    def quiet(optimizer):
        total = optimizer.params[0].summed_grad.clone()
        whole(optimizer)
        optimizer.params[0].grad.copy_(total)

    monkeypatch.setattr(f"{OPTIMIZER}.add_noise", quiet)
    audit = audited(KNOWN, delta=1e-6)
    assert min(each.p_value for each in audit.noise) < 1e-50
    assert audit.one_run.epsilon_lower > 0


def _attribute(name: str):
    from dptrain.engine.optimizer import PrivateOptimizer

    return getattr(PrivateOptimizer, name)
