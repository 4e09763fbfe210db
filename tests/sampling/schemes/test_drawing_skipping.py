"""Geometric skipping: exactly a coin for every trial."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dptrain.sampling.schemes.drawing import successes
from dptrain.testing.scheme_contract import bernstein_tolerance


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 0.9])
def test_every_pattern_has_its_probability(probability):
    """All 2^5 outcomes of five coins, the first and the last trial included (2e-9 each)."""
    rng = np.random.default_rng(1)
    rows = 30_000
    counts = dict.fromkeys(itertools.product((0, 1), repeat=5), 0)
    for _ in range(rows):
        outcome = np.zeros(5, dtype=int)
        outcome[successes(rng, 5, probability)] = 1
        counts[tuple(outcome.tolist())] += 1
    for pattern, count in counts.items():
        chance = probability ** sum(pattern) * (1 - probability) ** (5 - sum(pattern))
        tolerance = bernstein_tolerance(rows * chance * (1 - chance))
        assert abs(count - rows * chance) <= tolerance, pattern


class Scripted:
    """Hands out given distances in blocks of whatever size is asked for."""

    def __init__(self, distances):
        self.distances = list(distances)

    def geometric(self, probability, size):
        block, self.distances = self.distances[:size], self.distances[size:]
        assert len(block) == size
        return np.array(block)


def test_blocks_join_without_a_seam():
    """Distances far shorter than expected, so that several blocks are needed."""
    distances = np.random.default_rng(2).integers(1, 4, size=5_000)
    expected = np.cumsum(distances) - 1  # the first success is at distance - 1
    expected = expected[expected < 1_000].tolist()
    scripted = Scripted(distances)
    assert successes(scripted, 1_000, 0.01).tolist() == expected
    assert len(expected) > 300
    assert len(distances) - len(scripted.distances) > 5 * 30  # blocks here are about 30 long


def test_ends_of_the_range():
    rng = np.random.default_rng(3)
    assert successes(rng, 0, 0.5).tolist() == []
    assert successes(rng, 0, 0.5).dtype == np.int64
    assert successes(rng, 7, 1.0).tolist() == list(range(7))
    assert successes(rng, 1, 1.0).tolist() == [0]
    assert successes(rng, 10**9, 1e-8).max() < 10**9
