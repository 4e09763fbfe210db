"""Covers of all pairs against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scripts.covering import all_pairs, covered


def occurs(i, a, j, b, combinations) -> bool:
    return any(each[i] == a and each[j] == b for each in combinations)


@pytest.mark.parametrize("seed", range(40))
def test_every_pair_that_is_possible_is_in_the_cover(seed):
    """Axes of random lengths, of whose combinations a random part is not possible."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, size=rng.integers(2, 6))
    every = list(itertools.product(*(range(length) for length in lengths)))
    possible = [each for each in every if rng.random() < rng.choice([0.2, 0.6, 1.0])]
    cover = all_pairs(possible)
    assert set(cover) <= set(possible)
    assert len(set(cover)) == len(cover)
    pairs = 0
    for i, j in itertools.combinations(range(len(lengths)), 2):
        for a, b in itertools.product(range(lengths[i]), range(lengths[j])):
            there = occurs(i, a, j, b, possible)
            pairs += there
            assert occurs(i, a, j, b, cover) == there
    assert pairs == len(covered(possible)) == len(covered(cover))


def test_a_cover_is_small():
    """Of 4^6 combinations 16 are needed, as 16 pairs of two axes exclude each other.

    Greedy covers take at most 1 + 1/2 + ... + 1/15 times the least, which for 4^6 is at most 25
    (the first six columns of an orthogonal array of 25 rows on five levels, two of them merged).
    """
    cover = all_pairs(list(itertools.product(range(4), repeat=6)))
    assert 16 <= len(cover) <= 25 * sum(1 / k for k in range(1, 16))


def test_none_are_covered_by_none():
    assert all_pairs([]) == []
    assert covered([]) == frozenset()
