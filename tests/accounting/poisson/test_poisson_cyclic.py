"""Cyclic Poisson against quadrature over one example's law, and against plain Poisson."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from dptrain.accounting import account
from dptrain.accounting.poisson.parts import independent_sizes, truncated_curve
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.core.guarantee import Adjacency, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.schemes.cyclic_poisson import CyclicPoisson
from dptrain.sampling.schemes.poisson import Poisson
from dptrain.strategies import BSR, Dense, Identity
from dptrain.strategies.trees.tree import TreeRestart
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


def normalized(matrix):
    return matrix / np.linalg.norm(matrix, axis=0)


class TestContract(AccountantContract):
    def accountant(self):
        return PoissonPLD()

    def mechanism(self):
        return mechanism(scheme(), BSR(bands=3))

    def refused_mechanism(self):
        return mechanism(scheme(), BSR(bands=4))


class TestContractOfOnePart(AccountantContract):
    def accountant(self):
        return PoissonPLD()

    def mechanism(self):
        return mechanism(scheme(probability=0.1, cycle=1, steps=60))

    def refused_mechanism(self):
        return mechanism(scheme(0.1, 1, 60), BSR(bands=2))


class TestContractOfTruncation(TestContract):
    def mechanism(self):
        return mechanism(scheme(max_batch_size=220), BSR(bands=3))


class TestContractOfAddRemove(TestContract):
    def accountant(self):
        return PoissonPLD(adjacency=Adjacency.ADD_REMOVE)

    def mechanism(self):
        hidden = scheme(steps=60, assignment="independent", nominal_size=3000)
        return mechanism(hidden, BSR(bands=3), sigma=2.0)

    def refused_mechanism(self):
        return mechanism(scheme(assignment="equal", nominal_size=3000), BSR(bands=3))


class TestContractOfReplaceOne(TestContract):
    def accountant(self):
        return PoissonPLD(adjacency=Adjacency.REPLACE_ONE)


def worst_part(p, cycle, matrix, sigma, epsilon, *, remove):
    steps = len(matrix)
    laws = [law_of_part(part, cycle, steps, p) for part in range(min(cycle, steps))]
    return max(quadrature.delta(law, matrix, sigma, epsilon, remove=remove) for law in laws)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("cycle", "coefficients"), [(1, [1.0]), (2, [1.0, 0.6]), (3, [1.0, 0.6])])
@pytest.mark.parametrize("remove", [True, False])
def test_worst_part_by_quadrature_where_norms_are_equal(cycle, coefficients, remove):
    p, sigma = 0.3, 1.1
    matrix = normalized(toeplitz(coefficients, 2))
    found = PoissonPLD().profile(
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
    matrix = normalized(toeplitz([1.0, 0.6], 3))
    both = mechanism(scheme(p, 2, 3), Dense(matrix=matrix), sigma)
    found = PoissonPLD().profile(both, [epsilon])
    claimed = float((found.remove if remove else found.add)[0])
    exact = quadrature.delta(law_of_part(0, 2, 3, p), matrix, sigma, epsilon, remove=remove)
    assert exact * (1 - 2e-4) <= claimed <= exact * 1.005


def test_unequal_norms_are_bounded_by_the_largest():
    p, sigma, matrix = 0.3, 1.0, np.array([[0.7, 0.0], [0.0, 1.3]])
    found = PoissonPLD().profile(mechanism(scheme(p, 1, 2), Dense(matrix=matrix), sigma), EPSILONS)
    for remove, claimed in ((True, found.remove), (False, found.add)):
        for epsilon, delta in zip(EPSILONS, claimed, strict=True):
            assert worst_part(p, 1, matrix, sigma, epsilon, remove=remove) <= delta * (1 + 1e-6)


def test_one_part_is_poisson():
    for strategy in (Identity(), BSR(bands=1)):
        cyclic = mechanism(scheme(0.05, 1, 60), strategy)
        plain = mechanism(Poisson(probability=0.05, dataset_size=3000, steps=60), strategy)
        found = PoissonPLD().guarantee(cyclic, delta=1e-6)
        assert found.epsilon == PoissonPLD().guarantee(plain, delta=1e-6).epsilon
        assert found.kind is Kind.EXACT
    # The diagonal varies: the largest of it is a bound, not the value.
    varying = mechanism(scheme(0.05, 1, 2), Dense(matrix=np.diag([1.0, 0.5])))
    assert PoissonPLD().guarantee(varying, delta=1e-6).kind is Kind.UPPER_BOUND


@pytest.mark.parametrize("assignment", ["equal", "independent"])
@pytest.mark.parametrize("steps", [18, 19, 21])
def test_counts_turns_and_scales_with_the_column(assignment, steps):
    # ceil(n/b) Poisson steps of the same p, whatever the assignment; 5·C with 5σ is C with σ.
    cyclic = scheme(0.2, 3, steps, assignment=assignment)
    turns = Poisson(probability=0.2, dataset_size=3000, steps=-(-steps // 3))
    expected = PoissonPLD().guarantee(mechanism(turns), delta=1e-6).epsilon
    found = PoissonPLD().guarantee(mechanism(cyclic), delta=1e-6)
    assert found.epsilon == expected
    assert found.kind is Kind.UPPER_BOUND
    scaled = Dense(matrix=5.0 * np.eye(steps))
    assert PoissonPLD().guarantee(
        mechanism(cyclic, scaled, 6.0), delta=1e-6
    ).epsilon == pytest.approx(expected, rel=1e-9)


def test_cycle_beyond_the_run_is_one_turn():
    once = Poisson(probability=0.2, dataset_size=3000, steps=1)
    expected = PoissonPLD().guarantee(mechanism(once), delta=1e-6).epsilon
    assert PoissonPLD().guarantee(mechanism(scheme(0.2, 9, 4)), delta=1e-6).epsilon == (expected)


def test_trees_whose_nodes_do_not_outlive_the_cycle():
    # Four leaves, three levels: every column has norm sqrt(3).
    tree = mechanism(scheme(0.2, 4, 16), TreeRestart(height=3), sigma=2.0)
    turns = Poisson(probability=0.2, dataset_size=3000, steps=4)
    same = mechanism(turns, Dense(matrix=math.sqrt(3.0) * np.eye(4)), 2.0)
    found = account(tree, delta=1e-6)
    assert found.accountant == "poisson-pld"
    assert found.epsilon == pytest.approx(PoissonPLD().guarantee(same, delta=1e-6).epsilon)
    assert "bands" in (PoissonPLD().refusal(mechanism(scheme(), TreeRestart(height=3))) or "")


def test_refusals_name_the_remedy():
    why = PoissonPLD().refusal(mechanism(scheme(), BSR(bands=4)))
    assert why is not None
    assert "at most 3 bands" in why
    assert "cycle of at least 4" in why
    equal = PoissonPLD(adjacency=Adjacency.ADD_REMOVE).refusal(mechanism(scheme()))
    assert equal is not None
    assert "assignment='independent'" in equal


# --- truncation --------------------------------------------------------------------------------


def cut(cycle, size, largest, steps=12, p=0.3, **options):
    return CyclicPoisson(
        probability=p,
        cycle=cycle,
        dataset_size=size,
        steps=steps,
        max_batch_size=largest,
        **options,
    )


def turns(adjacency, size, largest, count, norm=1.0, p=0.3):
    return truncated_curve(
        adjacency,
        dataset_size=size,
        probability=p,
        max_batch_size=largest,
        steps=count,
        sensitivity=norm,
    )


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_one_truncated_part_is_truncated_poisson(adjacency):
    cyclic, plain = (each(adjacency=adjacency) for each in (PoissonPLD, PoissonPLD))
    same = Poisson(probability=0.3, dataset_size=40, steps=12, max_batch_size=15)
    one_part = cut(1, 40, 15)
    if adjacency is Adjacency.ADD_REMOVE:
        same, one_part = (dataclasses.replace(each, nominal_size=45) for each in (same, one_part))
    found = cyclic.guarantee(mechanism(one_part), delta=1e-6)
    assert found.epsilon == plain.guarantee(mechanism(same), delta=1e-6).epsilon
    assert any("truncation costs privacy" in note for note in found.notes)


def test_truncated_parts_of_one_size_are_turns_of_that_size():
    matrix = 2.0 * np.eye(12) + np.eye(12, k=-1)
    found = PoissonPLD().guarantee(mechanism(cut(4, 80, 9), Dense(matrix=matrix), 3.0), delta=1e-5)
    same = turns(Adjacency.ZERO_OUT, 20, 9, 3, norm=math.sqrt(5.0))
    assert found.epsilon == same.epsilon(3.0, 1e-5)


@pytest.mark.slow
@pytest.mark.sample(every=4)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("assignment", ["equal", "independent"])
def test_truncated_parts_average_over_their_sizes(assignment, adjacency):
    if assignment == "equal" and adjacency is Adjacency.ADD_REMOVE:
        return  # refused
    size, cycle, largest, sigma = 14, 4, 3, 1.3
    member = PoissonPLD(adjacency=adjacency)
    law, sizes = cut(cycle, size, largest, assignment=assignment), (size,)
    if adjacency is Adjacency.ADD_REMOVE:  # whatever number of examples the run had
        law, sizes = dataclasses.replace(law, dataset_size=5, nominal_size=size), range(1, size + 2)
    found = member.profile(mechanism(law, sigma=sigma), EPSILONS)
    worst = np.zeros((2, len(EPSILONS)))
    for whole in sizes:
        if assignment == "independent":
            weights = {
                m: math.comb(whole - 1, m - 1) * 3.0 ** (whole - m) / 4.0 ** (whole - 1)
                for m in range(1, whole + 1)
            }
        else:
            weights = {3: 6 / 14, 4: 8 / 14}
        assert math.isclose(sum(weights.values()), 1.0)
        mean = sum(
            weight * np.array(turns(adjacency, m, largest, 3).delta(sigma, EPSILONS))
            for m, weight in weights.items()
        )
        worst = np.maximum(worst, mean)
    claimed = np.array([found.remove, found.add])
    assert (claimed >= worst * (1 - 1e-6)).all()
    # Sizes are gathered into a few intervals, each bounded at once.
    slack = 1.001 if assignment == "equal" else 2.0
    if adjacency is Adjacency.ADD_REMOVE:
        slack = 2.5  # one statement for all sizes has q2 ≤ p, here .3 for .225 and less
    assert (claimed.max(axis=0) <= slack * worst.max(axis=0) + 1e-9).all()
    shown = member.guarantee(mechanism(law, sigma=sigma), delta=1e-3)
    back = member.profile(mechanism(law, sigma=sigma), [shown.epsilon * 0.999, shown.epsilon])
    assert back.delta[1] <= 1e-3 * (1 + 1e-6)
    assert back.delta[0] >= 1e-3 * (1 - 3e-3)


@pytest.mark.parametrize(("size", "cycle"), [(2, 2), (30, 3), (500, 7), (4, 100)])
def test_intervals_of_sizes_cover_their_law(size, cycle):
    found = independent_sizes(size, cycle)
    assert found[0][1] == 1
    assert found[-1][2] == size
    for (_, _, last), (_, first, _) in itertools.pairwise(found):
        assert first == last + 1
    for weight, least, most in found:
        chances = [
            math.comb(size - 1, m - 1) * (cycle - 1) ** (size - m) / cycle ** (size - 1)
            for m in range(least, most + 1)
        ]
        exact = math.fsum(chances)
        assert exact * (1 - 1e-12) <= weight <= exact * (1 + 1e-6) + 1e-200


def test_a_cap_that_nobody_reaches_is_no_truncation():
    free = PoissonPLD().guarantee(mechanism(cut(4, 80, 20)), delta=1e-5)
    plain = PoissonPLD().guarantee(mechanism(cut(4, 80, None)), delta=1e-5)
    assert free.epsilon == plain.epsilon
