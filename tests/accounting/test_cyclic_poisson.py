"""Cyclic Poisson against quadrature over one example's law, and against plain Poisson."""

import itertools
import math

import numpy as np
import pytest

from dptrain.accounting import account
from dptrain.accounting.cyclic_poisson import CyclicPoissonPLD
from dptrain.accounting.poisson_pld import PoissonPLD
from dptrain.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.cyclic_poisson import CyclicPoisson
from dptrain.sampling.poisson import Poisson
from dptrain.strategies import BSR, Dense, Identity
from dptrain.strategies.tree import TreeRestart
from dptrain.testing import AccountantContract
from tests.oracles import quadrature
from tests.oracles.enumeration import Law, toeplitz

EPSILONS = np.array([0.0, 0.3, 1.0, 2.5])


def scheme(probability=0.2, cycle=3, steps=20, **options):
    return CyclicPoisson(
        probability=probability, cycle=cycle, dataset_size=3000, steps=steps, **options
    )


def mechanism(scheme, strategy=None, sigma=1.2):
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def law_of_part(part, cycle, steps, p):
    """One example's patterns: a coin at every step of its part."""
    turns = range(part, steps, cycle)
    patterns, probabilities = [], []
    for coins in itertools.product((0, 1), repeat=len(turns)):
        x = np.zeros(steps)
        x[list(turns)] = coins
        patterns.append(x)
        probabilities.append(math.prod(p if coin else 1 - p for coin in coins))
    return Law(np.array(patterns), np.array(probabilities))


def normalised(matrix):
    return matrix / np.linalg.norm(matrix, axis=0)


class TestContract(AccountantContract):
    def accountant(self):
        return CyclicPoissonPLD()

    def mechanism(self):
        return mechanism(scheme(), BSR(bands=3))

    def refused_mechanism(self):
        return mechanism(scheme(), BSR(bands=4))


class TestContractOfOnePart(AccountantContract):
    def accountant(self):
        return CyclicPoissonPLD()

    def mechanism(self):
        return mechanism(scheme(probability=0.1, cycle=1, steps=60))

    def refused_mechanism(self):
        return mechanism(scheme(max_batch_size=300))


def worst_part(p, cycle, matrix, sigma, epsilon, *, remove):
    steps = len(matrix)
    laws = [law_of_part(part, cycle, steps, p) for part in range(min(cycle, steps))]
    return max(quadrature.delta(law, matrix, sigma, epsilon, remove=remove) for law in laws)


@pytest.mark.parametrize(("cycle", "coefficients"), [(1, [1.0]), (2, [1.0, 0.6]), (3, [1.0, 0.6])])
@pytest.mark.parametrize("remove", [True, False])
def test_worst_part_by_quadrature_where_norms_are_equal(cycle, coefficients, remove):
    p, sigma = 0.3, 1.1
    matrix = normalised(toeplitz(coefficients, 2))
    found = CyclicPoissonPLD().profile(
        mechanism(scheme(p, cycle, 2), Dense(matrix=matrix), sigma), EPSILONS
    )
    claimed = found.remove if remove else found.add
    for epsilon, delta in zip(EPSILONS, claimed, strict=True):
        exact = worst_part(p, cycle, matrix, sigma, epsilon, remove=remove)
        assert exact * (1 - 1e-6) <= delta
        assert delta == pytest.approx(exact, rel=5e-3, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("remove", [True, False])
def test_two_turns_by_quadrature(remove):
    p, sigma, epsilon = 0.3, 1.1, 0.8
    matrix = normalised(toeplitz([1.0, 0.6], 3))
    both = mechanism(scheme(p, 2, 3), Dense(matrix=matrix), sigma)
    found = CyclicPoissonPLD().profile(both, [epsilon])
    claimed = float((found.remove if remove else found.add)[0])
    exact = quadrature.delta(law_of_part(0, 2, 3, p), matrix, sigma, epsilon, remove=remove)
    assert exact * (1 - 2e-4) <= claimed <= exact * 1.005


def test_unequal_norms_are_bounded_by_the_largest():
    p, sigma, matrix = 0.3, 1.0, np.array([[0.7, 0.0], [0.0, 1.3]])
    found = CyclicPoissonPLD().profile(
        mechanism(scheme(p, 1, 2), Dense(matrix=matrix), sigma), EPSILONS
    )
    for remove, claimed in ((True, found.remove), (False, found.add)):
        for epsilon, delta in zip(EPSILONS, claimed, strict=True):
            assert worst_part(p, 1, matrix, sigma, epsilon, remove=remove) <= delta * (1 + 1e-6)


def test_one_part_is_poisson():
    for strategy in (Identity(), BSR(bands=1)):
        cyclic = mechanism(scheme(0.05, 1, 60), strategy)
        plain = mechanism(Poisson(probability=0.05, dataset_size=3000, steps=60), strategy)
        found = CyclicPoissonPLD().guarantee(cyclic, delta=1e-6)
        assert found.epsilon == PoissonPLD().guarantee(plain, delta=1e-6).epsilon
        assert found.kind is Kind.EXACT
    # The diagonal varies: the largest of it is a bound, not the value.
    varying = mechanism(scheme(0.05, 1, 2), Dense(matrix=np.diag([1.0, 0.5])))
    assert CyclicPoissonPLD().guarantee(varying, delta=1e-6).kind is Kind.UPPER_BOUND


@pytest.mark.parametrize("assignment", ["equal", "independent"])
@pytest.mark.parametrize("steps", [18, 19, 21])
def test_counts_turns_and_scales_with_the_column(assignment, steps):
    # ceil(n/b) Poisson steps of the same p, whatever the assignment; 5·C with 5σ is C with σ.
    cyclic = scheme(0.2, 3, steps, assignment=assignment)
    turns = Poisson(probability=0.2, dataset_size=3000, steps=-(-steps // 3))
    expected = PoissonPLD().guarantee(mechanism(turns), delta=1e-6).epsilon
    found = CyclicPoissonPLD().guarantee(mechanism(cyclic), delta=1e-6)
    assert found.epsilon == expected
    assert found.kind is Kind.UPPER_BOUND
    scaled = Dense(matrix=5.0 * np.eye(steps))
    assert CyclicPoissonPLD().guarantee(
        mechanism(cyclic, scaled, 6.0), delta=1e-6
    ).epsilon == pytest.approx(expected, rel=1e-9)


def test_cycle_beyond_the_run_is_one_turn():
    once = Poisson(probability=0.2, dataset_size=3000, steps=1)
    expected = PoissonPLD().guarantee(mechanism(once), delta=1e-6).epsilon
    assert CyclicPoissonPLD().guarantee(mechanism(scheme(0.2, 9, 4)), delta=1e-6).epsilon == (
        expected
    )


def test_trees_whose_nodes_do_not_outlive_the_cycle():
    # Four leaves, three levels: every column has norm sqrt(3).
    tree = mechanism(scheme(0.2, 4, 16), TreeRestart(height=3), sigma=2.0)
    turns = Poisson(probability=0.2, dataset_size=3000, steps=4)
    same = mechanism(turns, Dense(matrix=math.sqrt(3.0) * np.eye(4)), 2.0)
    found = account(tree, delta=1e-6)
    assert found.accountant == "cyclic Poisson PLD"
    assert found.epsilon == pytest.approx(PoissonPLD().guarantee(same, delta=1e-6).epsilon)
    assert "bands" in (CyclicPoissonPLD().refusal(mechanism(scheme(), TreeRestart(height=3))) or "")


def test_refusals_name_the_remedy():
    why = CyclicPoissonPLD().refusal(mechanism(scheme(), BSR(bands=4)))
    assert why is not None
    assert "at most 3 bands" in why
    assert "cycle of at least 4" in why
    truncated = mechanism(scheme(max_batch_size=300))
    with pytest.raises(ValueError, match="max_batch_size=None"):
        account(truncated, delta=1e-6)
    with pytest.raises(ValueError, match=r"no accountant yet .* accountant='gaussian' is valid"):
        account(truncated, delta=1e-6)
    assert account(truncated, delta=1e-6, accountant="gaussian").epsilon > 0
