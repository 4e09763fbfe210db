"""Runs of the real engine with canaries: what is right passes, what is broken is found."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import binom, norm

from dptrain import account, profile
from dptrain.auditing import (
    StatedCurve,
    audit_canaries,
    game_of,
    power_against_scaled_noise,
    power_of_counting,
    run_canaries,
)
from dptrain.engine import Gradients
from dptrain.individual import GDPOdometer
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, BandMF, Identity

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


def test_a_layer_that_is_not_clipped_is_found(monkeypatch):
    """Half of the canaries then count four times: μ = 4 for them."""
    t, epsilon = 2.5, 2.0
    stated = norm.cdf(0.5 - epsilon) - np.exp(epsilon) * norm.cdf(-0.5 - epsilon)
    power = power_of_counting(
        hit_rate=(norm.sf(t - 1) + norm.sf(t - 4)) / 2,
        false_rate=norm.sf(t),
        runs=470,  # half of those that are in, or fewer with probability below 1e-2 / 4
        epsilon=epsilon,
        delta=stated,
        alpha=ALPHA,
    )
    assert power > 0.99
    assert binom.cdf(939, 2000, 0.5) < 1e-2 / 2
    assert audited(KNOWN).counted.violated is False
    whole = _attribute("add_noise")

    def unclipped(optimizer):
        optimizer.params[-1].summed_grad.mul_(4.0)  # the norm of every gradient, over R
        whole(optimizer)

    monkeypatch.setattr(f"{OPTIMIZER}.add_noise", unclipped)
    audit = audited(KNOWN)
    assert audit.counted.violated
    assert not audit.passed


def test_a_divisor_that_follows_the_batch_is_found(monkeypatch):
    """The noise of a step shows its batch's size; the chance that it does is computed."""
    scheme = Poisson(probability=0.05, dataset_size=400, steps=10)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=4.0)
    spare = 2000
    sizes = np.arange(1, 61)
    seen = [
        power_against_scaled_noise(20 / size, runs=spare, steps=1, alpha=ALPHA / 3 / 10)
        for size in sizes
    ]
    at_a_step = float(binom.pmf(sizes, 400, 0.05) @ np.array(seen))
    assert 1 - (1 - at_a_step) ** 10 > 0.99
    assert audited(mechanism, spare=spare).passed

    def realized(optimizer):
        for p in optimizer.params:
            p.grad.div_(max(1, optimizer.rows_of_the_step))

    plain = _attribute("_step")

    def counted(optimizer, closure):
        optimizer.rows_of_the_step = len(optimizer.clipper.batch.indices)
        return plain(optimizer, closure)

    monkeypatch.setattr(f"{OPTIMIZER}.scale_grad", realized)
    monkeypatch.setattr(f"{OPTIMIZER}._step", counted)
    assert not audited(mechanism, spare=spare).passed


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
