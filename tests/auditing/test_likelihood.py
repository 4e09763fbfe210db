"""Likelihood ratios against the enumeration of every participation pattern."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dptrain.auditing import NoLikelihood, game_of, whitening_matrix
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import (
    BallsInBins,
    CyclicPoisson,
    MinSep,
    Poisson,
    RandomAllocation,
    Scheme,
    Shuffled,
)
from dptrain.strategies import BLT, BSR, BandMF, Dense, Identity, SquareRoot, Strategy, Tree


def poisson(p: float, x: tuple[int, ...]) -> float:
    return math.prod(p if taken else 1 - p for taken in x)


def min_sep(p: float, b: int, warm: bool, x: tuple[int, ...]) -> float:
    """By the definition of the chain, over all starts."""
    whole = 1 + (b - 1) * p if warm else 1.0
    starts = [(0, 1 / whole)] + [(s, p / whole) for s in range(1, b)] * warm
    total = 0.0
    for bar, chance in starts:
        for taken in x:
            if bar:
                chance *= not taken
                bar -= 1
            elif taken:
                chance *= p
                bar = b - 1
            else:
                chance *= 1 - p
        total += chance
    return total


def cyclic(p: float, b: int, x: tuple[int, ...]) -> float:
    """Of the first part."""
    return math.prod(
        (p if taken else 1 - p) if t % b == 0 else float(not taken) for t, taken in enumerate(x)
    )


def allocation(k: int, t: int, x: tuple[int, ...]) -> float:
    epochs = [x[start : start + t] for start in range(0, len(x), t)]
    return math.prod((sum(epoch) == k) / math.comb(t, k) for epoch in epochs)


def bins(b: int, x: tuple[int, ...]) -> float:
    return float(sum(x[:b]) == 1 and all(x[t] == x[t % b] for t in range(len(x)))) / b


CASES: list[tuple[Scheme, Strategy, object]] = [
    (Poisson(probability=0.3, dataset_size=9, steps=6), Identity(), lambda x: poisson(0.3, x)),
    (Poisson(probability=0.3, dataset_size=9, steps=6), BSR(bands=3), lambda x: poisson(0.3, x)),
    (Poisson(probability=0.3, dataset_size=9, steps=6), SquareRoot(), lambda x: poisson(0.3, x)),
    (
        MinSep(probability=0.4, min_sep=3, dataset_size=9, steps=8, warm_start=False),
        BandMF(bands=3),
        lambda x: min_sep(0.4, 3, False, x),
    ),
    (
        MinSep(probability=0.4, min_sep=3, dataset_size=9, steps=8),
        BandMF(bands=2),
        lambda x: min_sep(0.4, 3, True, x),
    ),
    (
        MinSep(probability=0.4, min_sep=3, dataset_size=9, steps=8),
        BSR(bands=5),
        lambda x: min_sep(0.4, 3, True, x),
    ),
    (
        MinSep(probability=0.7, min_sep=11, dataset_size=9, steps=8),
        BandMF(bands=8),
        lambda x: min_sep(0.7, 11, True, x),
    ),
    (
        MinSep(probability=0.2, min_sep=2, dataset_size=9, steps=7, warm_start=False),
        BLT(buffers=1, theta=(0.5,), omega=(0.25,)),
        lambda x: min_sep(0.2, 2, False, x),
    ),
    (
        CyclicPoisson(probability=0.6, cycle=3, dataset_size=9, steps=8),
        BSR(bands=3),
        lambda x: cyclic(0.6, 3, x),
    ),
    (BallsInBins(bins=3, epochs=3, dataset_size=9), BSR(bands=5), lambda x: bins(3, x)),
    (BallsInBins(bins=4, epochs=2, dataset_size=9), Tree(), lambda x: bins(4, x)),
    (Shuffled(batch_size=3, dataset_size=9, epochs=2, reshuffle=False), SquareRoot(), None),
    (
        RandomAllocation(steps_per_epoch=4, participations=2, epochs=2, dataset_size=9),
        Identity(),
        lambda x: allocation(2, 4, x),
    ),
    (
        RandomAllocation(steps_per_epoch=6, participations=1, epochs=1, dataset_size=9),
        BSR(bands=4),
        lambda x: allocation(1, 6, x),
    ),
]


@pytest.mark.parametrize("scale", [1.0, 1.7])
@pytest.mark.parametrize(("scheme", "strategy", "law"), CASES)
def test_every_pattern_counts_as_often_as_the_scheme_draws_it(scheme, strategy, law, scale):
    if law is None:  # a shuffled order that is kept: as in bins of equal size
        law = lambda x: bins(3, x)  # noqa: E731
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=0.8)
    game = game_of(mechanism)
    assert not game.inexact
    matrix = game.matrix
    outputs = np.random.default_rng(1).normal(size=(7, scheme.steps)) * 1.5 + 0.3
    density = np.zeros(len(outputs))
    total = 0.0
    for x in itertools.product((0, 1), repeat=scheme.steps):
        chance = law(x)
        total += chance
        mean = scale * matrix @ np.array(x)
        apart = np.sum((outputs - mean) ** 2 - outputs**2, axis=1)
        density += chance * np.exp(-apart / (2 * 0.8**2))
    assert total == pytest.approx(1, abs=1e-12)
    found = game.likelihood().log_ratio(outputs, scale)
    np.testing.assert_allclose(found, np.log(density), rtol=0, atol=1e-10)


def test_overlap_that_is_too_wide_is_said_and_scored_otherwise():
    scheme = MinSep(probability=0.1, min_sep=4, dataset_size=9, steps=60)
    game = game_of(MatrixMechanism(scheme=scheme, strategy=SquareRoot(), noise_multiplier=1.0))
    assert "60 bands with a separation of 4" in game.inexact
    with pytest.raises(NoLikelihood, match="60 bands"):
        game.likelihood()
    assert game.scores(np.zeros((3, 60))).shape == (3,)


def test_what_the_game_is_not_about_is_refused():
    cut = Poisson(probability=0.1, dataset_size=90, steps=6, max_batch_size=20)
    with pytest.raises(ValueError, match="max_batch_size=20"):
        game_of(MatrixMechanism(scheme=cut, strategy=Identity(), noise_multiplier=1.0))
    silent = Poisson(probability=0.1, dataset_size=90, steps=6)
    with pytest.raises(ValueError, match="without noise"):
        game_of(MatrixMechanism(scheme=silent, strategy=Identity(), noise_multiplier=0.0))


@pytest.mark.parametrize("strategy", [BandMF(bands=3), Tree(), Dense(epochs=2)])
def test_whitened_noise_has_unit_covariance(strategy):
    scheme = Poisson(probability=0.1, dataset_size=9, steps=8)
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    matrix, bound = whitening_matrix(mechanism), mechanism.strategy
    noise = matrix @ bound.solve(np.eye(bound.rows(8)))
    np.testing.assert_allclose(noise @ noise.T, np.eye(8), atol=1e-10)
    np.testing.assert_allclose(matrix, np.tril(matrix))
    # What C tells of a step, M tells too (a tree's noise is by the pseudo-inverse, or less).
    columns = bound.columns(8, np.arange(8))
    assert np.linalg.eigvalsh(columns.T @ columns - matrix.T @ matrix).min() > -1e-10
