"""The suite of audits: every pair that can occur is audited, and what is broken fails."""

from __future__ import annotations

import itertools

import pytest

from dptrain.clipping.modes import MODES
from dptrain.engine.optimizer import PrivateOptimizer
from dptrain.strategies import strategy_types
from scripts import audit_suite
from scripts.audit_suite import AXES, CHANCE, FILTERS, SPARE, STEPS, STRATEGIES, refusal
from tests.helpers.power import power_against_scaled_noise

_AUDITS = 200  # more than the cover has


@pytest.mark.slow
def test_every_pair_of_choices_is_audited_and_passes(capsys):
    """Which pairs can occur is found here by asking for every combination, not for a cover."""
    found = audit_suite.run(progress=False)
    with capsys.disabled():
        print(f"\n{found}")
    assert found.failures == {}
    assert len(found.audited) < _AUDITS
    wanted = set()
    for names in itertools.product(*AXES.values()):
        if refusal(names[0], names[1], names[4]) is None:
            wanted |= {(i, names[i], j, names[j]) for i in range(5) for j in range(i)}
    done = {(i, c[i], j, c[j]) for c in found.audited for i in range(5) for j in range(i)}
    assert done == wanted
    assert len(wanted) > 300


def test_every_strategy_and_mode_of_the_library_is_a_choice():
    ours = {n for n, member in strategy_types().items() if member.__module__.startswith("dptrain.")}
    assert set(STRATEGIES) == ours
    assert set(AXES["mode"]) == set(MODES)


def test_what_has_no_game_is_refused_with_its_reason():
    assert "max_batch_size" in refusal("truncated Poisson", "Identity", "no filter")
    assert "independent noise only" in refusal("Poisson", "BSR", "RenyiFilter")
    assert all(refusal("full batches", "Identity", budget) is None for budget in FILTERS)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "combination",
    [
        ("balls in bins", "BLT", "PerLayer", "hooks", "no filter"),
        ("Poisson", "Identity", "Automatic", "bookkeeping", "RenyiFilter"),
    ],
)
def test_noise_of_nine_tenths_fails_any_audit_of_the_suite(monkeypatch, combination):
    """At the chance of a false alarm that is left to one audit of many; the power is computed."""
    confidence = 1 - CHANCE / _AUDITS
    alpha = (1 - confidence) / 4 / 3  # of four verdicts, and three findings of the noise
    assert power_against_scaled_noise(0.9, runs=SPARE, steps=STEPS, alpha=alpha) > 0.99
    assert audit_suite.audited(combination, seed=1, confidence=confidence).passed
    whole = PrivateOptimizer.add_noise

    def quieter(optimizer):
        sums = [p.summed_grad.clone() for p in optimizer.params]
        whole(optimizer)
        for p, clipped in zip(optimizer.params, sums, strict=True):
            p.grad.copy_(clipped + 0.9 * (p.grad - clipped))

    monkeypatch.setattr(PrivateOptimizer, "add_noise", quieter)
    broken = audit_suite.audited(combination, seed=1, confidence=confidence)
    assert any("noise" in each for each in broken.violations)
