"""User-level, cyclic and unamplified claims against what attackers attain in tiny runs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from dptrain.accounting import account
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import CyclicPoisson, Scheme, UserMinSep
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.strategies import Dense, Identity, Strategy
from tests.oracles import enumeration, quadrature
from tests.oracles import user_level as oracle

# What quadrature can be off by, with the dimension; closed forms and sums to rounding.
PLANE, SPACE, ROUNDING = 1e-5, 2e-3, 1e-9

PAIR = ((0, 1), (0,), (1,))  # two users with two examples each, one of them shared
CHAIN = ((0, 1), (1, 2), (2, 0), (2,))
ALONE = ((0,), (0,))
UNEVEN = ((0,), (0, 1), (0,), (2, 1))


def counts(mixtures: list[tuple[float, oracle.Mixture]]) -> dict[tuple[int, ...], float]:
    """The law of x whatever is revealed."""
    law: dict[tuple[int, ...], float] = {}
    for q, given in mixtures:
        for x, share in given.items():
            law[x] = law.get(x, 0.0) + q * share
    return law


def banded(steps: int, bands: int, seed: int, *, spread: float = 0.0) -> np.ndarray:
    """A random C ≥ 0; column norms differ by up to 10^spread beyond the randomness."""
    rng = np.random.default_rng(seed)
    lag = np.subtract.outer(np.arange(steps), np.arange(steps))
    entries = np.where((lag >= 0) & (lag < bands), rng.random((steps, steps)) + 0.05, 0.0)
    return np.asarray(entries * 10 ** rng.uniform(-spread, spread, steps))


def claimed(scheme: Scheme, matrix: np.ndarray, sigma: float, epsilon: float, **by: Any) -> float:
    identity = np.array_equal(matrix, np.eye(len(matrix)))
    strategy: Strategy = Identity() if identity else Dense(matrix=matrix)
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    return account(mechanism, epsilon=epsilon, **by).delta


def users(
    graph: oracle.Graph, *, p: float, b: int, steps: int, sampled: bool = True, burn_in: int = 0
) -> UserMinSep:
    return UserMinSep(
        graph=AttributionGraph.from_lists(graph),
        probability=p,
        min_sep=b,
        steps=steps,
        batch_size=1,
        exclusion="sampling" if sampled else "participation",
        burn_in=burn_in,
    )


# The oracle itself.


def test_quadrature_of_two_kinds_agrees() -> None:
    for steps, tolerance in ((1, ROUNDING), (2, PLANE)):
        law = enumeration.min_sep_cold(steps, 0.3, 2)
        mixture = {
            tuple(int(v) for v in x): q
            for x, q in zip(law.patterns, law.probabilities, strict=True)
        }
        matrix = enumeration.toeplitz([1, 0.5], steps)
        for remove in (True, False):
            here = oracle.mixture_delta(mixture, matrix, 0.8, 0.4, remove=remove)
            there = quadrature.delta(law, matrix, 0.8, 0.4, remove=remove)
            assert here == pytest.approx(there, rel=tolerance, abs=1e-12)


def test_a_lone_user_of_one_example_is_poisson_without_separation() -> None:
    for sampled in (True, False):
        law = oracle.batch_law(((0,),), p=0.3, b=1, steps=3, sampled=sampled)
        poisson = enumeration.poisson(3, 0.3)
        for batches, q in law.items():
            assert q == pytest.approx(poisson.of([len(batch) for batch in batches]))


def test_without_separation_counts_are_binomial_whoever_is_near() -> None:
    """b = 1 is Poisson group privacy: others reveal nothing, x_t ~ Bin(k, p)."""
    law = oracle.batch_law(CHAIN, p=0.3, b=1, steps=2)
    (chance, mixture), *others = oracle.revealed_mixtures(CHAIN, law, 2)
    assert not others
    assert chance == pytest.approx(1.0)
    for x, q in mixture.items():
        assert q == pytest.approx(math.prod(math.comb(3, j) * 0.3**j * 0.7 ** (3 - j) for j in x))


def test_certain_draws() -> None:
    """p = 1: with sampling-based exclusion all stop after the first step."""
    once = (frozenset({0, 1, 2}), frozenset(), frozenset())
    assert oracle.batch_law(PAIR, p=1.0, b=2, steps=3) == {once: 1.0}
    used = (*once[:2], once[0])
    assert oracle.batch_law(PAIR, p=1.0, b=2, steps=3, sampled=False) == {used: 1.0}
    assert oracle.batch_law(PAIR, p=1.0, b=2, steps=2, burn_in=3) == {once[1:]: 1.0}


def test_both_rules_agree_on_single_examples_with_two_steps() -> None:
    """The first step bars by samples that were used; more steps tell the rules apart."""
    two = [oracle.batch_law(((0,),), p=0.4, b=2, steps=2, sampled=s) for s in (True, False)]
    three = [oracle.batch_law(((0,),), p=0.4, b=2, steps=3, sampled=s) for s in (True, False)]
    assert two[0] == pytest.approx(two[1])
    assert three[0] != pytest.approx(three[1])


@pytest.mark.parametrize("burn_in", [0, 2])
def test_a_user_alone_follows_its_own_chain(burn_in: int) -> None:
    law = oracle.batch_law(ALONE, p=0.3, b=2, steps=3, burn_in=burn_in)
    own = oracle.own_chain(2, p=0.3, b=2, steps=3, burn_in=burn_in)
    assert counts(oracle.revealed_mixtures(ALONE, law, 0)) == pytest.approx(own)


def test_others_only_remove_participations_under_sampling() -> None:
    law = counts(oracle.revealed_mixtures(CHAIN, oracle.batch_law(CHAIN, p=0.4, b=2, steps=2), 0))
    own = oracle.own_chain(2, p=0.4, b=2, steps=2)
    for t, j in itertools.product(range(2), (1, 2)):
        here, there = (sum(q for x, q in found.items() if x[t] >= j) for found in (law, own))
        assert here <= there + 1e-12


def test_stars_by_counting_and_by_enumeration() -> None:
    graph = ((0, 1, 2, 3), (1,), (2,), (3,))
    law = oracle.batch_law(graph, p=0.3, b=2, steps=2)
    for epsilon in (0.1, 1.0):
        enumerated, counted = (
            oracle.attained(found, np.eye(2), 0.8, epsilon)
            for found in (oracle.revealed_mixtures(graph, law, 0), oracle.star_mixtures(3, 0.3))
        )
        assert enumerated == pytest.approx(counted, rel=PLANE, abs=1e-12)


def test_revealing_what_was_drawn_costs_privacy() -> None:
    own = oracle.own_chain(2, p=0.3, b=2, steps=2)
    hidden = oracle.attained([(1.0, own)], np.eye(2), 1.0, 0.5)
    assert max(hidden) < oracle.own_chain_delta(own, np.eye(2), 1.0, 0.5)


# Claims against the oracle.


def test_the_attack_on_the_theorem_is_covered() -> None:
    """n = b = 2, one shared user for each of 400 neighbors: nearly
    p·δ_Gauss is attained, above what Theorem 6.1 says and not above any claim."""
    p, leaves, epsilon = 0.1, 400, 1.0
    attained = max(oracle.attained(oracle.star_mixtures(leaves, p), np.eye(2), 1.0, epsilon))
    assert attained == pytest.approx(p * oracle.gaussian_delta(epsilon, 1.0), rel=1e-6)
    theorem = oracle.mixture_delta(
        oracle.disjoint_claim(1, p=p, b=2, steps=2), np.eye(2), 1.0, epsilon, remove=True
    )
    assert attained > 2 * theorem
    graph = [tuple(range(leaves + 1)), *((i,) for i in range(1, leaves + 1))]
    for sampled in (True, False):
        scheme = users(graph, p=p, b=2, steps=2, sampled=sampled)
        assert claimed(scheme, np.eye(2), 1.0, epsilon) >= attained


@pytest.mark.sample(every=13)
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("graph", [PAIR, CHAIN, ALONE, UNEVEN])
@pytest.mark.parametrize("burn_in", [0, 1])
def test_no_user_loses_more_than_is_claimed(
    graph: oracle.Graph, sampled: bool, burn_in: int
) -> None:
    for seed, (p, sigma, epsilon) in enumerate([(0.2, 1.0, 0.3), (0.7, 0.6, 1.0), (0.95, 2, 0.1)]):
        matrix = banded(2, 2, seed, spread=0.7)
        attained = oracle.worst_user(
            graph, matrix, sigma, epsilon, p=p, b=2, sampled=sampled, burn_in=burn_in
        )
        scheme = users(graph, p=p, b=2, steps=2, sampled=sampled, burn_in=burn_in)
        assert claimed(scheme, matrix, sigma, epsilon) >= attained * (1 - PLANE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_no_user_loses_more_than_is_claimed_in_three_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = [PAIR, ALONE, UNEVEN][seed % 3]
    b, sampled, burn_in = int(rng.integers(1, 4)), bool(rng.integers(2)), int(rng.integers(2))
    p, epsilon = float(rng.choice([0.1, 0.5, 0.9])), float(rng.choice([0.05, 0.5, 2.0]))
    matrix = banded(3, int(rng.integers(1, b + 1)), seed, spread=float(rng.choice([0.0, 1.0])))
    attained = oracle.worst_user(
        graph, matrix, 1.0, epsilon, p=p, b=b, sampled=sampled, burn_in=burn_in
    )
    scheme = users(graph, p=p, b=b, steps=3, sampled=sampled, burn_in=burn_in)
    assert claimed(scheme, matrix, 1.0, epsilon) >= attained * (1 - SPACE)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("b", [1, 2, 4])
def test_revealed_draws_are_the_worst_own_chain(p: float, b: int) -> None:
    """Without rounding (equal norms) it is the maximum itself, over *fewer* examples too."""
    k, steps = 2, 6
    for matrix, exact in ((np.eye(steps), True), (banded(steps, min(b, 2), 3), False)):
        for epsilon in (0.2, 2.0):
            worst = max(
                oracle.own_chain_delta(
                    oracle.own_chain(few, p=p, b=b, steps=steps), matrix, 1.0, epsilon
                )
                for few in range(1, k + 1)
            )
            scheme = users(((0,), (0,), (1,)), p=p, b=b, steps=steps)
            found = claimed(scheme, matrix, 1.0, epsilon, accountant="revealed-draws")
            assert found >= worst * (1 - ROUNDING)
            if exact:
                assert found == pytest.approx(worst, rel=1e-7)


def test_a_user_of_fewer_examples_can_be_the_worst() -> None:
    """Whoever has more is barred more often; a claim for exactly k would be false for others."""
    few, many = (
        oracle.own_chain_delta(
            oracle.own_chain(k, p=0.8, b=3, steps=7), np.diag([0.05] + 6 * [1.0]), 1.0, 1.0
        )
        for k in (1, 2)
    )
    assert few > many
    scheme = users(((0,), (0,), (1,)), p=0.8, b=3, steps=7)
    assert (
        claimed(scheme, np.diag([0.05] + 6 * [1.0]), 1.0, 1.0, accountant="revealed-draws") >= few
    )


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_any_blocking_is_the_worst_controller(p: float, b: int) -> None:
    steps = 4
    for matrix, exact in ((np.eye(steps), True), (banded(steps, min(b, 2), 3, spread=1), False)):
        worst = oracle.any_blocking_delta(2, p=p, b=b, matrix=matrix, sigma=1.0, epsilon=0.7)
        scheme = users(PAIR, p=p, b=b, steps=steps, sampled=False)
        name = "revealed-draws"
        found = claimed(scheme, matrix, 1.0, 0.7, accountant=name)
        assert found >= worst * (1 - ROUNDING)
        if exact:
            assert found == pytest.approx(worst, rel=1e-7)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("assignment", ["equal", "independent"])
@pytest.mark.parametrize(("cycle", "bands"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_cyclic_poisson(assignment: str, cycle: int, bands: int) -> None:
    for seed, (p, epsilon) in enumerate([(0.05, 0.5), (0.5, 0.1), (1.0, 1.0)]):
        matrix = banded(2, bands, seed, spread=0.5)
        scheme = CyclicPoisson(
            probability=p, cycle=cycle, dataset_size=5, steps=2, assignment=assignment
        )
        found = claimed(scheme, matrix, 0.8, epsilon)
        for hidden in (False, True):
            cases = oracle.cyclic_mixtures(rate=p, cycle=cycle, steps=2, hidden_part=hidden)
            attained = max(max(oracle.attained(c, matrix, 0.8, epsilon)) for c in cases)
            assert found >= attained * (1 - PLANE)
