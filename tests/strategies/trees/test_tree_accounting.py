"""Accountants that take a general C, on trees: against the dense C and against tiny runs' truth."""

import numpy as np
import pytest

from dptrain.accounting import account, profile
from dptrain.accounting.renyi.bins import remove_orders
from dptrain.accounting.renyi.gram import gram_matrix
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, Poisson
from dptrain.strategies.trees.tree import Tree, TreeRestart
from tests.oracles import enumeration, quadrature, strategy_patterns, strategy_trees

CASES = [
    (Tree(), 2, 2),
    (Tree(), 3, 2),
    (Tree(), 4, 2),
    (TreeRestart(height=2), 3, 2),
    (TreeRestart(height=2), 2, 3),
    (TreeRestart(height=3), 3, 3),
    (TreeRestart(height=1), 3, 2),
]


def dense(strategy, steps):
    if isinstance(strategy, Tree):
        return strategy_trees.matrix(steps)
    return strategy_trees.restart_matrix(steps, strategy.height)


def balls_in_bins(strategy, bins, epochs, sigma):
    scheme = BallsInBins(bins=bins, epochs=epochs, dataset_size=100)
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)


@pytest.mark.parametrize(("strategy", "bins", "epochs"), CASES)
def test_renyi_moments_of_balls_in_bins(strategy, bins, epochs):
    steps, sigma = bins * epochs, 2.5
    law, matrix = enumeration.balls_in_bins(bins, epochs), dense(strategy, steps)
    gram = gram_matrix(strategy.bind(steps), steps=steps, bins=bins)
    np.testing.assert_allclose(gram, law.patterns @ matrix.T @ matrix @ law.patterns.T)
    found = remove_orders(gram, sigma, 0, narrower=False)
    for order in (2, 3, 4):
        exact = enumeration.renyi_moment(law, matrix, sigma, order) / (order - 1)
        assert found.divergence[order] == pytest.approx(exact, rel=1e-8)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("strategy", [Tree(), TreeRestart(height=2), TreeRestart(height=1)])
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_two_bins_against_quadrature(strategy, sigma):
    # All that P and Q differ in lies in the span of the two means, so that any two means with the
    # same inner products have the same δ(ε): those of a triangular 2x2 root of the Gram matrix.
    made = balls_in_bins(strategy, 2, 2, sigma)
    means = dense(strategy, 4) @ enumeration.balls_in_bins(2, 2).patterns.T
    root = np.linalg.cholesky(means.T @ means).T
    law = enumeration.balls_in_bins(2, 1)

    def truth(epsilon, *, remove):
        return quadrature.delta(law, root, sigma, epsilon, remove=remove)

    claimed = profile(made, [0.1, 1.0, 4.0])
    for i, at in enumerate(claimed.epsilon):
        assert claimed.remove[i] >= truth(at, remove=True) * (1 - 1e-7)
        assert claimed.add[i] >= truth(at, remove=False) * (1 - 1e-7)
    epsilon = account(made, delta=1e-5).epsilon
    for remove in (True, False):
        assert truth(epsilon, remove=remove) <= 1e-5
    assert max(truth(0.7 * epsilon, remove=remove) for remove in (True, False)) > 1e-5


@pytest.mark.parametrize(("strategy", "bins", "epochs"), CASES)
def test_unsampled_gaussian_has_the_largest_of_all_patterns(strategy, bins, epochs):
    made = balls_in_bins(strategy, bins, epochs, 3.0)
    worst = strategy_patterns.sensitivity(dense(strategy, made.steps), epochs, bins)
    claimed = profile(made, [0.0, 0.5, 2.0], accountant="gaussian")
    for at, delta in zip(claimed.epsilon, claimed.delta, strict=True):
        truth = quadrature.gaussian_delta(at, worst / 3.0)
        assert truth <= delta <= truth * (1 + 1e-8)  # rounded up
    assert account(made, delta=1e-5).epsilon <= account(
        made, delta=1e-5, accountant="gaussian"
    ).epsilon * (1 + 1e-9)


def test_poisson_takes_every_tree_and_never_says_more_than_the_gaussian():
    scheme = Poisson(probability=0.1, steps=8, dataset_size=100)
    leaves = MatrixMechanism(scheme=scheme, strategy=TreeRestart(height=1), noise_multiplier=1.0)
    assert account(leaves, delta=1e-5).accountant == "poisson-pld"
    taller = MatrixMechanism(scheme=scheme, strategy=TreeRestart(height=2), noise_multiplier=1.0)
    plain = account(taller, delta=1e-5, accountant="gaussian").epsilon
    assert account(leaves, delta=1e-5).epsilon < account(taller, delta=1e-5).epsilon <= plain


def test_a_mechanism_reads_its_tree_back():
    for strategy in (Tree(), TreeRestart(height=2)):
        made = balls_in_bins(strategy, 3, 2, 1.0)
        assert MatrixMechanism.from_json(made.to_json()) == made
