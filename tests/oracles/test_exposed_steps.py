"""The exposed-steps claim against what attackers attain on tiny graphs, by enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles import exposed_steps as claim
from tests.oracles import user_level as oracle
from tests.oracles.test_user_level import CHAIN, PAIR, PLANE, SPACE, banded

STAR = ((0, 1, 2, 3), (1,), (2,), (3,))  # one example, a neighbor through each of three users
TWO_STARS = ((0, 1), (0, 2), (1,), (2,))
TRIANGLE = ((0, 1), (1, 2), (2, 0))  # u's two examples have one neighbor, the same
CLIQUE = ((0, 3), (1, 3), (2, 3), (0,))  # a user with three examples, shared by everyone else
FAR = ((0,), (0, 1), (1, 2), (2,))  # an example that u reaches only through others
GRAPHS = [PAIR, CHAIN, STAR, TWO_STARS, TRIANGLE, CLIQUE, FAR]


def holds(
    graph: oracle.Graph, matrix: np.ndarray, sigma: float, epsilon: float, p: float, b: int,
    burn_in: int, tolerance: float, users: set[int] | None = None,
) -> None:  # fmt: skip
    steps = len(matrix)
    law = oracle.batch_law(graph, p=p, b=b, steps=steps, burn_in=burn_in)
    for user in users or {u for own in graph for u in own}:
        k = sum(user in users for users in graph)
        d = claim.outside_neighbors(graph, user)
        shown = oracle.attained(oracle.revealed_mixtures(graph, law, user), matrix, sigma, epsilon)
        said = oracle.attained(
            claim.claimed_mixtures(k, d, p=p, b=b, steps=steps), matrix, sigma, epsilon
        )
        for one, other in zip(shown, said, strict=True):
            assert one <= other * (1 + tolerance) + 1e-13


@pytest.mark.sample(every=13)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("burn_in", [0, 1])
def test_no_user_loses_more_than_is_claimed_in_two_steps(graph: oracle.Graph, burn_in: int) -> None:
    for seed, (p, sigma, epsilon) in enumerate([(0.1, 1.0, 0.3), (0.6, 0.6, 1.0)]):
        holds(graph, banded(2, 2, seed, spread=0.7), sigma, epsilon, p, 2, burn_in, PLANE)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "b"), [(STAR, 3), (TRIANGLE, 2)])
def test_no_user_loses_more_than_is_claimed_in_three_steps(graph: oracle.Graph, b: int) -> None:
    holds(graph, banded(3, b, 1, spread=0.3), 1.0, 0.5, 0.15, b, 0, SPACE, {0})


@pytest.mark.parametrize(("leaves", "p"), [(1, 0.5), (5, 0.1), (30, 0.01), (100, 0.1)])
def test_stars_of_any_size(leaves: int, p: float) -> None:
    """The attack on the paper's theorem: a bound that is nearly attained for many leaves."""
    said = oracle.attained(
        claim.claimed_mixtures(1, leaves, p=p, b=2, steps=2), np.eye(2), 1.0, 1.0
    )
    shown = oracle.attained(oracle.star_mixtures(leaves, p), np.eye(2), 1.0, 1.0)
    if (leaves, p) == (100, 0.1):  # the attack has teeth: hiding everything is refuted
        own = oracle.own_chain(1, p=p, b=2, steps=2)
        assert max(shown) > 2 * max(oracle.attained([(1.0, own)], np.eye(2), 1.0, 1.0))
    for one, other in zip(shown, said, strict=True):
        assert one <= other * (1 + PLANE) + 1e-13


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("b", "steps"), [(2, 2), (3, 2)])
def test_more_neighbors_never_claim_less(k: int, b: int, steps: int) -> None:
    """From nobody (the user's own chain, hidden) up to everything revealed."""
    matrix = banded(steps, 2, 5)
    own = oracle.own_chain(k, p=0.2, b=b, steps=steps)
    values = [oracle.attained([(1.0, own)], matrix, 0.8, 0.5)]
    for d in (0, 1, 2, 5, 50, 5000):
        mixtures = claim.claimed_mixtures(k, d, p=0.2, b=b, steps=steps)
        values.append(oracle.attained(mixtures, matrix, 0.8, 0.5))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-9)
    assert (np.diff(np.array(values), axis=0) >= -PLANE * np.array(values)[1:]).all()
    assert max(values[-1]) <= oracle.own_chain_delta(own, matrix, 0.8, 0.5) * (1 + PLANE)


def test_participation_bars_less_than_sampling_coordinate_by_coordinate() -> None:
    """Why the recursion of Theorem 6.1 bounds exclusion by sampling on a disjoint graph."""
    rng = np.random.default_rng(0)
    for _ in range(3000):
        draws = rng.binomial(2, rng.choice([0.1, 0.4, 0.8]), size=12).tolist()
        b = int(rng.integers(1, 6))
        less, more = (claim.chain(draws, b, sampled=s) for s in (True, False))
        assert all(one <= other for one, other in zip(less, more, strict=True))
