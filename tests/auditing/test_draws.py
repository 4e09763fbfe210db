"""Runs of the game are drawn by the scheme's own streams and the strategy's own noise."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.auditing import check_participations, game_of, noises, participations
from dptrain.mechanism import MatrixMechanism
from dptrain.noise import noise_stream
from dptrain.sampling import (
    BallsInBins,
    CyclicPoisson,
    MinSep,
    Poisson,
    RandomAllocation,
    Shuffled,
)
from dptrain.strategies import BandMF, Identity

SCHEMES = [
    Poisson(probability=0.3, dataset_size=50, steps=10),
    MinSep(probability=0.3, min_sep=3, dataset_size=50, steps=10),
    MinSep(probability=0.3, min_sep=3, dataset_size=50, steps=10, warm_start=False),
    CyclicPoisson(probability=0.3, cycle=3, dataset_size=50, steps=10),
    CyclicPoisson(probability=0.3, cycle=3, dataset_size=50, steps=10, assignment="independent"),
    BallsInBins(bins=5, epochs=2, dataset_size=50),
    RandomAllocation(steps_per_epoch=5, participations=2, epochs=2, dataset_size=50),
]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda each: type(each).__name__)
def test_draws_follow_the_rates_and_the_separation(scheme):
    game = game_of(MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0))
    taken = participations(scheme, 20_000, seed=1)
    assert taken.shape == (20_000, 10)
    # 6 sigma of a normal law, before the correction for the number of steps.
    assert min(each.p_value for each in check_participations(game, taken)) > 2e-9


def test_all_examples_of_a_stream_are_used():
    scheme = Poisson(probability=0.3, dataset_size=50, steps=10)
    assert participations(scheme, 120, seed=1).any(axis=1).sum() > 100
    few, many = participations(scheme, 30, seed=1), participations(scheme, 120, seed=1)
    np.testing.assert_array_equal(few, many[:30])
    assert not np.array_equal(many[:50], many[50:100])


def test_a_shuffled_run_has_one_draw():
    """The others' places follow from it."""
    scheme = Shuffled(batch_size=4, dataset_size=8, epochs=2, reshuffle=False)
    taken = participations(scheme, 4000, seed=1)
    np.testing.assert_array_equal(taken[:, :2], taken[:, 2:])
    assert abs(taken[:, 0].mean() - 0.5) < 6 * 0.5 / np.sqrt(4000)
    # Draws of one stream would be as often in as out: no spread at all.
    halves = taken[:, 0].reshape(-1, 8).sum(axis=1)
    assert halves.var() > 1.0


def test_noise_is_the_optimizers():
    scheme = Poisson(probability=0.3, dataset_size=50, steps=6)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=3), noise_multiplier=2.0)
    found = noises(mechanism, 5000, seed=7)
    white = found @ game_of(mechanism).matrix.T / 2.0
    covariance = white.T @ white / 5000
    assert np.abs(covariance - np.eye(6)).max() < 6 * np.sqrt(2 / 5000)


def test_the_stream_that_is_opened_is_that_of_the_strategy(monkeypatch):
    opened = []

    def watched(strategy, **options):
        opened.append(strategy)
        return noise_stream(strategy, **options)

    monkeypatch.setattr("dptrain.auditing.draws.noise_stream", watched)
    scheme = Poisson(probability=0.3, dataset_size=50, steps=6)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=3), noise_multiplier=2.0)
    noises(mechanism, 3, seed=7)
    assert opened == [mechanism.strategy]
