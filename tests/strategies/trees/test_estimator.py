"""The online estimator: unbiased, of least variance, and its error in closed form."""

import fractions

import numpy as np
import pytest

from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.trees.estimator import node_variance
from dptrain.strategies.trees.tree import Tree, TreeRestart
from tests.oracles import strategy_trees as oracle
from tests.oracles import strategy_workloads as workloads


def strategies(steps):
    heights = range(1, steps.bit_length() + 1)
    return [Tree().bind(steps), *(TreeRestart(height=height) for height in heights)]


def left_inverse(strategy, steps):
    return strategy.solve(np.eye(strategy.rows(steps)))


def completed(dense):
    """Index of the last step that a node covers, for every row."""
    return np.array([np.flatnonzero(row)[-1] for row in dense])


def test_variance_of_a_node_recursively_and_in_closed_form():
    exact = fractions.Fraction(1)
    for level in range(40):
        assert node_variance(level) == pytest.approx(float(exact), rel=1e-15)
        assert exact == fractions.Fraction(2**level, 2 ** (level + 1) - 1)
        exact = 1 / (1 + 1 / (2 * exact))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 13, 16, 22])
def test_left_inverse_against_least_squares(steps):
    found = left_inverse(Tree().bind(steps), steps)
    np.testing.assert_allclose(found, oracle.left_inverse(steps), atol=1e-12)


@pytest.mark.parametrize(("steps", "height"), [(5, 1), (9, 2), (12, 3), (15, 3), (21, 4)])
def test_left_inverse_of_restarts_against_least_squares(steps, height):
    found = left_inverse(TreeRestart(height=height), steps)
    np.testing.assert_allclose(found, oracle.restart_left_inverse(steps, height), atol=1e-12)


@pytest.mark.parametrize("steps", [1, 6, 16, 23])
def test_unbiased_and_online(steps):
    for strategy in strategies(steps):
        dense = strategy.columns(steps, range(steps))
        w = left_inverse(strategy, steps)
        np.testing.assert_allclose(w @ dense, np.eye(steps), atol=1e-12)
        later = completed(dense)[None, :] > np.arange(steps)[:, None]
        assert np.all(w[later] == 0)


@pytest.mark.parametrize("steps", [1, 6, 16, 23])
def test_least_variance_for_every_prefix_from_all_nodes_complete_by_then(steps):
    # Of all u with u C = (1, …, 1, 0, …, 0) the pseudoinverse gives the shortest.
    for strategy in strategies(steps):
        dense = strategy.columns(steps, range(steps))
        prefixes = np.cumsum(left_inverse(strategy, steps), axis=0)
        for t in range(steps):
            seen = completed(dense) <= t
            target = (np.arange(steps) <= t).astype(float)
            best = target @ np.linalg.pinv(dense[seen])
            np.testing.assert_allclose(prefixes[t, seen], best, atol=1e-12)


@pytest.mark.parametrize("steps", [*range(1, 35), 48, 63, 64, 65, 100])
def test_errors_in_closed_form(steps):
    sums = workloads.prefix_sums(steps)
    for strategy in strategies(steps):
        w = left_inverse(strategy, steps)
        errors = workloads.errors(sums, w)
        np.testing.assert_allclose(strategy.errors(steps), errors, rtol=1e-12)
        assert strategy.rmse(steps) == pytest.approx(workloads.rmse(sums, w), rel=1e-12)
        assert strategy.max_error(steps) == pytest.approx(errors.max(), rel=1e-12)


def test_errors_of_another_workload():
    steps = 21
    workload = MomentumSGD(momentum=0.9)
    dense = workloads.heavy_ball(steps, 0.9)
    for strategy in strategies(steps):
        w = left_inverse(strategy, steps)
        errors = workloads.errors(dense, w)
        np.testing.assert_allclose(strategy.errors(steps, workload), errors, rtol=1e-11)
        found = strategy.rmse(steps, workload), strategy.max_error(steps, workload)
        assert found == pytest.approx((workloads.rmse(dense, w), errors.max()), rel=1e-11)


def test_a_root_is_worth_half_its_variance_and_the_mean_error_grows_with_the_log():
    # Of the l lower bits half are set, each of them worth v → 1/2 and a little more.
    for power in (10, 16, 23):
        squared = Tree().bind(2**power).rmse(2**power) ** 2
        assert power / 4 < squared < power / 4 + 1
