"""Tree strategies: the contract, refusals, and what n = 10^7 costs."""

import numpy as np
import pytest

from dptrain.strategies.trees.tree import Tree, TreeRestart
from dptrain.testing import StrategyContract
from tests.oracles import strategy_trees as oracle


class TestTreeCut(StrategyContract):
    """No power of two: the last nodes are cut off."""

    def make_strategy(self):
        return Tree()


class TestRestartCut(StrategyContract):
    def make_strategy(self):
        return TreeRestart(height=3)


class TestTreeFull(StrategyContract):
    steps = 8

    def make_strategy(self):
        return Tree()


class TestTreeOneStepShort(StrategyContract):
    steps = 7

    def make_strategy(self):
        return Tree()


class TestTreeOfOneStep(StrategyContract):
    steps = 1

    def make_strategy(self):
        return Tree()


class TestRestartOnce(StrategyContract):
    def make_strategy(self):
        return TreeRestart(height=4)


class TestRestartPairs(StrategyContract):
    def make_strategy(self):
        return TreeRestart(height=2)


class TestRestartLeavesOnly(StrategyContract):
    def make_strategy(self):
        return TreeRestart(height=1)


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 8, 13, 16, 21])
def test_rows_of_a_tree_are_its_complete_nodes(steps):
    strategy = Tree().bind(steps)
    expected = oracle.matrix(steps)
    assert strategy.rows(steps) == len(expected) == 2 * steps - steps.bit_count()
    np.testing.assert_array_equal(strategy.columns(steps, range(steps)), expected)


@pytest.mark.parametrize(("steps", "height"), [(1, 1), (4, 1), (9, 2), (12, 3), (15, 3), (21, 4)])
def test_rows_of_restarted_trees(steps, height):
    strategy = TreeRestart(height=height).bind(steps)
    expected = oracle.restart_matrix(steps, height)
    assert strategy.rows(steps) == len(expected)
    np.testing.assert_array_equal(strategy.columns(steps, range(steps)), expected)


def test_one_tree_is_the_tallest_restart():
    for steps in range(1, 40):
        tree, restart = Tree().bind(steps), TreeRestart(height=steps.bit_length())
        assert tree.bands == restart.bands
        np.testing.assert_array_equal(
            tree.columns(steps, range(steps)), restart.columns(steps, range(steps))
        )


def test_leaves_alone_are_the_identity():
    z = np.random.default_rng(0).normal(size=(6, 2))
    leaves = TreeRestart(height=1)
    np.testing.assert_array_equal(leaves.solve(z), z)
    np.testing.assert_array_equal(leaves.apply(z), z)
    np.testing.assert_allclose(leaves.errors(6), np.sqrt(np.arange(1, 7)))


def test_two_steps_by_hand():
    # Nodes x_0, x_1, x_0 + x_1. Prefix 1 averages y_2 (variance 1) and y_0 + y_1 (variance 2).
    w = Tree().bind(2).solve(np.eye(3))
    np.testing.assert_allclose(np.cumsum(w, axis=0), [[1, 0, 0], [1 / 3, 1 / 3, 2 / 3]], atol=1e-15)


@pytest.mark.parametrize("height", [0, -1, 2.0, 1.5, True, "3", None])
def test_refuses_what_is_no_height(height):
    with pytest.raises((TypeError, ValueError), match="height"):
        TreeRestart(height=height)


def test_refuses_trees_taller_than_the_run():
    with pytest.raises(ValueError, match=r"height=5.*at most height=4"):
        TreeRestart(height=5).bind(15)
    assert TreeRestart(height=5).bind(16).bands == 16


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "3"])
def test_refuses_what_is_no_number_of_steps(steps):
    with pytest.raises((TypeError, ValueError), match="steps"):
        Tree(steps=steps)


def test_a_bound_tree_refuses_another_length():
    bound = Tree().bind(6)
    rows = bound.rows(6)
    schedule = {"steps": 7, "max_participations": 1, "min_sep": 1}
    for call in (
        lambda: bound.bind(7),
        lambda: bound.rows(7),
        lambda: bound.columns(7, [0]),
        lambda: bound.apply(np.zeros(7)),
        lambda: bound.solve(np.zeros(rows + 1)),
        lambda: bound.column_norms(7),
        lambda: bound.errors(7),
        lambda: bound.rmse(7),
        lambda: bound.max_error(7),
        lambda: bound.sensitivity(**schedule),
        lambda: bound.sensitivity_is_exact(**schedule),
    ):
        with pytest.raises(ValueError, match="6 steps"):
            call()


def test_an_unbound_tree_asks_for_bind():
    for call in (
        lambda: Tree().bands,
        lambda: Tree().apply(np.zeros(3)),
        lambda: Tree().solve(np.zeros(4)),
        lambda: Tree().errors(3),
    ):
        with pytest.raises(ValueError, match="bind"):
            call()


@pytest.mark.parametrize("rows", [2, 5, 9])  # trees of four leaves have 1, 3, 4, 7, 8, 10, … rows
def test_refuses_noise_that_is_no_forest(rows):
    with pytest.raises(ValueError, match=f"{rows} rows"):
        TreeRestart(height=3).solve(np.zeros(rows))


def test_refuses_columns_that_are_no_integers():
    with pytest.raises(ValueError, match="indices"):
        TreeRestart(height=2).columns(4, [0.5])


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("strategy", [Tree(), TreeRestart(height=11)])
def test_ten_million_steps(strategy):
    n = 10_000_000
    bound = strategy.bind(n)
    errors = bound.errors(n)
    assert bound.rmse(n) == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-9)
    assert bound.max_error(n) == pytest.approx(errors.max(), rel=1e-12)
    # The leaf at 0 is in a node of every level; ten of them in ten roots or below are orthogonal.
    levels = bound.levels(n)
    assert bound.sensitivity(steps=n, max_participations=1, min_sep=1) == np.sqrt(levels)
    worst = bound.sensitivity(steps=n, max_participations=10, min_sep=1_000_000)
    assert worst >= np.sqrt(10 * min(levels, 20))
