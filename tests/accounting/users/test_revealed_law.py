"""Exclusion by others: against all controllers, and all draws on tiny graphs."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from dptrain.accounting import account
from dptrain.accounting.users.revealed import RevealedDraws
from dptrain.accounting.users.revealed_law import worst_blocking
from dptrain.accounting.users.squared_norm_grid import SquaredNormGrid
from dptrain.strategies import Dense
from tests.accounting.users.test_revealed import EPSILONS, MATRICES, given, mechanism
from tests.oracles.enumeration import toeplitz


def best_controller(k, p, b, matrix, sigma, epsilon):
    """max over all maps from the user's past draws to how many examples are left to draw.

    By enumeration of the maps' values along every history: the value of a history is the best
    choice's mean over what follows, histories being kept apart even where their sums agree.
    """
    n = len(matrix)

    def value(history):
        t = len(history)
        if t == n:
            return given(matrix, history, sigma, epsilon)
        barred = any(history[max(0, t - b + 1) :])
        choices = range(1 if barred else k + 1)
        return max(
            sum(binom.pmf(j, a, p) * value((*history, j)) for j in range(a + 1)) for a in choices
        )

    return value(())


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", ["identity", "cut columns", "unequal"])
@pytest.mark.parametrize(("k", "p"), [(1, 0.3), (2, 0.5)])
def test_worst_blocking_against_all_controllers(name, k, p):
    matrix, bands = MATRICES[name]
    for b in (bands, bands + 1, 9):
        both = mechanism(k, p, b, 4, strategy=Dense(matrix=matrix), exclusion="participation")
        found = RevealedDraws().profile(both, EPSILONS)
        for epsilon, delta in zip(EPSILONS, found.delta, strict=True):
            exact = best_controller(k, p, b, matrix, 1.3, epsilon)
            assert exact <= delta
            assert delta <= exact * (1 + (1e-8 if name == "identity" else 0.05))


def test_worst_blocking_finds_a_blocker_that_helps():
    # F rewards the heavy last step only: who is drawn at step 0 loses it, so blocking pays.
    grid = SquaredNormGrid(1.0, np.array([[1], [3]]), 4, 3.0)
    final = np.array([[0.0, 0.0, 0.0, 1.0, 1.0]])
    found = worst_blocking(grid, final, examples=1, probability=0.5, min_sep=2)
    assert found[0] == 0.5  # without blocking: .5 · .5


# Users of every example; u = 0 is interesting in each.
GRAPHS = {
    "disjoint": [[0], [0], [1]],
    "path": [[0, 1], [1, 2], [2]],
    "star": [[0, 1], [0, 2], [1], [2]],
    "shared twins": [[0, 1], [0, 1], [1]],
}


def batches(users, sampled, b, exclusion):
    """Algorithms 3 and 4 of Dong & Ganesh 2026, word by word."""
    m = len(users)
    neighbors = [{j for j in range(m) if set(users[i]) & set(users[j])} for i in range(m)]
    drawn = []
    for t, coins in enumerate(sampled):
        source = sampled if exclusion == "sampling" else drawn
        excluded = set().union(*(neighbors[e] for s in source[max(0, t - b + 1) : t] for e in s))
        drawn.append([e for e in coins if e not in excluded])
    return drawn


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("exclusion", ["sampling", "participation"])
def test_no_user_of_a_graph_is_above_the_claim(name, exclusion):
    users, n, b, p, sigma = GRAPHS[name], 3, 2, 0.35, 1.2
    m, matrix = len(users), toeplitz([1.0, 0.5], n)
    k = max(sum(u in row for row in users) for u in range(3))
    subsets = [tuple(c) for r in range(m + 1) for c in itertools.combinations(range(m), r)]
    weight = {s: p ** len(s) * (1 - p) ** (m - len(s)) for s in subsets}
    patterns: dict[tuple[int, tuple[int, ...]], float] = {}
    for sampled in itertools.product(subsets, repeat=n):
        chance = math.prod(weight[s] for s in sampled)
        drawn = batches(users, sampled, b, exclusion)
        for u in {u for row in users for u in row}:
            x = tuple(sum(u in users[e] for e in batch) for batch in drawn)
            patterns[u, x] = patterns.get((u, x), 0.0) + chance
    both = mechanism(k, p, b, n, sigma=sigma, strategy=Dense(matrix=matrix), exclusion=exclusion)
    known = "revealed-draws" + "-any-blocking" * (exclusion == "participation")
    for epsilon in EPSILONS:
        claimed = account(both, epsilon=epsilon + 1e-9, accountant=known).delta
        for user in {u for u, _ in patterns}:
            exact = sum(
                q * given(matrix, x, sigma, epsilon + 1e-9)
                for (u, x), q in patterns.items()
                if u == user
            )
            assert exact <= claimed
