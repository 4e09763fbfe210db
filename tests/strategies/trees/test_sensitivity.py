"""Sensitivity of trees: the search and the bound against every pattern."""

import itertools

import numpy as np
import pytest

from dptrain.strategies.binding import participations, regular_pattern
from dptrain.strategies.trees import sensitivity as tree_sensitivity
from dptrain.strategies.trees.sensitivity import level_bound, regular_square, worst_square
from dptrain.strategies.trees.tree import Tree
from tests.oracles import strategy_trees as oracle


def worst_of_all(steps, height):
    """worst(m, b) of ‖C x‖² by enumeration of all 2^n patterns."""
    dense = oracle.restart_matrix(steps, height)
    x = (np.arange(2**steps)[:, None] >> np.arange(steps)) & 1
    squared = ((x @ dense.T.astype(np.int64)) ** 2).sum(axis=1)
    count = x.sum(axis=1)
    gap = np.full(len(x), steps)
    for distance in reversed(range(1, steps)):
        gap[(x[:, :-distance] & x[:, distance:]).any(axis=1)] = distance
    return lambda m, b: squared[(count <= m) & ((gap >= b) | (count <= 1))].max()


@pytest.mark.parametrize(
    ("steps", "height"),
    [(1, 1), (5, 1), (7, 3), (11, 2), (11, 3), (12, 4), (13, 3), (14, 4), (15, 4), (16, 5)],
)
def test_search_and_bound_against_every_pattern(steps, height):
    worst = worst_of_all(steps, height)
    for m, b in itertools.product(range(1, steps + 2), repeat=2):
        expected = worst(m, b)
        assert worst_square(steps, height, m, b) == (expected, True)
        m, b = participations(steps, m, b)
        assert tree_sensitivity._PatternSearch(height, m, b).worst(steps) == expected
        assert level_bound(steps, height, m, b) >= expected


def patterns_apart(steps, b):
    """Every pattern with gaps of at least b, as tuples."""
    found = [()]
    for pattern in found:  # grows while it is read
        start = pattern[-1] + b if pattern else 0
        found += [(*pattern, t) for t in range(start, steps)]
    return found[1:]


@pytest.mark.parametrize(
    ("steps", "height", "b"), [(40, 6, 7), (45, 5, 9), (37, 4, 6), (64, 7, 13), (58, 6, 11)]
)
def test_search_against_every_pattern_of_longer_runs(steps, height, b):
    dense = oracle.restart_matrix(steps, height)
    worst = {}
    for pattern in patterns_apart(steps, b):
        squared = int((dense[:, pattern].sum(axis=1) ** 2).sum())
        worst[len(pattern)] = max(worst.get(len(pattern), 0), squared)
    for m in range(1, len(worst) + 1):
        expected = max(worst[count] for count in range(1, m + 1))
        assert worst_square(steps, height, m, b) == (expected, True)
        assert level_bound(steps, height, m, b) >= expected


@pytest.mark.parametrize(("steps", "height"), [(33, 6), (50, 4), (100, 1), (100, 7)])
def test_the_regular_pattern_without_its_vector(steps, height):
    dense = oracle.restart_matrix(steps, height)
    for m, b in itertools.product([1, 2, 3, 7, 40, 100], [1, 2, 3, 5, 8, 13, 50, 99, 200]):
        m, b = participations(steps, m, b)
        squared = np.sum((dense @ regular_pattern(steps, m, b)) ** 2)
        assert regular_square(steps, height, m, b) == squared


def test_where_the_regular_pattern_attains_the_bound():
    for steps, height in [(100, 7), (77, 5), (64, 3)]:
        powers = [2**i for i in range(8)]
        wide = [2 ** (height - 1), 2 ** (height - 1) + 3, 90]
        for m, b in itertools.product([1, 2, 5, 100], powers + wide):
            m, b = participations(steps, m, b)
            bound = level_bound(steps, height, m, b)
            assert bound == regular_square(steps, height, m, b)
        assert level_bound(steps, height, 1, 3) == regular_square(steps, height, 1, 3) == height


def test_once_is_the_largest_column():
    for steps in (6, 16, 29):
        bound = Tree().bind(steps)
        once = bound.sensitivity(steps=steps, max_participations=1, min_sep=1)
        assert once == pytest.approx(bound.column_norms(steps).max(), rel=1e-15)
        assert once == np.sqrt(steps.bit_length())


def test_regular_participations_may_not_be_the_worst():
    # Five participations three apart in 16 steps: 0, 3, 8, 12, 15 has (2, 0, 1, 2) in the nodes of
    # four and (2, 3) in those of eight, 5 + 5 + 9 + 13 + 25 over all levels; 0, 3, 6, 9, 12 has
    # (2, 1, 1, 1) and (3, 2), 5 + 5 + 7 + 13 + 25.
    schedule = {"steps": 16, "max_participations": 5, "min_sep": 3}
    assert Tree().bind(16).sensitivity(**schedule) ** 2 == pytest.approx(57)
    assert regular_square(16, 5, 5, 3) == 55
    tree = Tree().bind(512)
    schedule = {"steps": 512, "max_participations": 32, "min_sep": 15}
    regular = np.linalg.norm(tree.apply(regular_pattern(512, 32, 15)))
    assert tree.sensitivity(**schedule) > regular
    assert tree.sensitivity_is_exact(**schedule)


def test_where_the_search_is_too_long_the_bound_takes_over_and_says_so(monkeypatch):
    cases = [(1000, 10, 20, 37), (1000, 7, 100, 9), (999, 10, 25, 39)]
    exact = [worst_square(*case) for case in cases]
    assert all(is_exact for _, is_exact in exact)
    monkeypatch.setattr(tree_sensitivity, "SEARCH_UP_TO", 10)
    worst_square.cache_clear()
    for case, (worst, _) in zip(cases, exact, strict=True):
        bound, is_exact = worst_square(*case)
        assert not is_exact
        assert worst <= bound <= 1.1 * worst
    worst_square.cache_clear()


def test_more_participations_or_closer_ones_cost_no_less():
    bound = Tree().bind(300)
    table = np.array(
        [
            [
                bound.sensitivity(steps=300, max_participations=m, min_sep=b)
                for b in (1, 2, 3, 5, 7, 11, 20, 33, 70)
            ]
            for m in (1, 2, 3, 5, 8, 20, 300)
        ]
    )
    assert np.all(np.diff(table, axis=0) >= 0)
    assert np.all(np.diff(table, axis=1) <= 0)


@pytest.mark.parametrize(
    ("steps", "height", "m", "b"), [(48, 6, 7, 5), (60, 6, 9, 6), (50, 4, 12, 3), (63, 6, 6, 9)]
)
def test_search_against_integer_programming(steps, height, m, b):
    expected = oracle.worst_square(oracle.restart_matrix(steps, height), m, b)
    assert worst_square(steps, height, m, b) == (expected, True)
