"""Users whose draws stay hidden: every small graph by enumeration, single steps by quadrature."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dptrain.accounting import account, accountants_for, calibrate, find_accountants, profile
from dptrain.accounting.poisson.groups import BinomialMixtureCurve, Tosses
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import AttributionGraph, GraphPartition, Poisson, UserCyclic, UserMinSep
from dptrain.strategies import BandMF, Identity
from dptrain.testing.accountant_contract import AccountantContract
from tests.helpers.user_graphs import SMALL, graph_of
from tests.oracles.small_graphs import known_others, small_graphs, step_law, two_step_delta

EPSILON = 0.4


def run(scheme, sigma=1.0, strategy=None):
    strategy = Identity() if strategy is None else strategy
    return MatrixMechanism(
        scheme=scheme, strategy=strategy.bind(scheme.steps), noise_multiplier=sigma
    )


class TestUserPoisson(AccountantContract):
    def accountant(self):
        return find_accountants(self.mechanism())[0]

    def mechanism(self):
        return run(UserMinSep(graph=SMALL, probability=0.1, min_sep=1, steps=20, batch_size=8.0))

    def refused_mechanism(self):
        return run(Poisson(probability=0.1, dataset_size=50, steps=20))


class TestUserCyclic(AccountantContract):
    def accountant(self):
        return find_accountants(self.mechanism())[0]

    def mechanism(self):
        partition = GraphPartition.of_graph(SMALL, cycle=4, method="greedy")
        return run(UserCyclic(partition=partition, batch_size=4.0, steps=20), 4.0, BandMF(bands=4))

    def refused_mechanism(self):
        return run(UserMinSep(graph=SMALL, probability=0.1, min_sep=2, steps=20, batch_size=8.0))


def one_step(k, q, sigma, epsilon):
    """δ (remove, add) of Bin(k, q) + σz against σz, by the crossing of the densities."""
    weights = binom.pmf(np.arange(k + 1), k, q)

    def loss(y):
        return math.log(
            sum(w * math.exp((j * y - j * j / 2) / sigma**2) for j, w in enumerate(weights))
        )

    def crossing(level):
        low, high = -60.0 * sigma, 60.0 * sigma
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if loss(middle) < level else (low, middle)
        return high

    at = crossing(epsilon)
    p = sum(w * norm.sf((at - j) / sigma) for j, w in enumerate(weights))
    remove = p - math.exp(epsilon) * norm.sf(at / sigma)
    if math.log(weights[0]) >= -epsilon:
        return remove, 0.0
    at = crossing(-epsilon)
    p = sum(w * norm.cdf((at - j) / sigma) for j, w in enumerate(weights))
    return remove, norm.cdf(at / sigma) - math.exp(epsilon) * p


@pytest.mark.parametrize(("k", "q"), [(1, 0.3), (2, 0.3), (3, 0.05), (5, 0.9)])
def test_users_of_independent_coins_by_quadrature(k, q):
    """A single step, under either rule of exclusion; a user with fewer examples loses less."""
    graph = graph_of([[0]] * k + [[1, 2], [1]])
    for exclusion in ("sampling", "participation"):
        scheme = UserMinSep(
            graph=graph, probability=q, min_sep=1, steps=1, batch_size=1.0, exclusion=exclusion
        )
        for sigma in (0.5, 2.0):
            found = profile(run(scheme, sigma), [0.1, 0.5, 2.0])
            assert found.accountant == "user-poisson-pld"
            assert found.kind is Kind.EXACT
            for place, epsilon in enumerate((0.1, 0.5, 2.0)):
                remove, add = one_step(max(k, 2), q, sigma, epsilon)
                for mine, true in ((found.remove[place], remove), (found.add[place], add)):
                    assert true - 1e-12 <= mine <= true * (1 + 2e-3) + 1e-9
                assert one_step(1, q, sigma, epsilon)[0] <= remove + 1e-12


def test_one_slot_is_poisson_and_so_is_no_separation():
    """cycle=1 and min_sep=1 are one law."""
    partition = GraphPartition.of_graph(SMALL, cycle=1)
    cyclic = UserCyclic(partition=partition, batch_size=8.0, steps=20)
    plain = UserMinSep(graph=SMALL, probability=0.1, min_sep=1, steps=20, batch_size=8.0)
    one, other = (account(run(scheme), delta=1e-4).epsilon for scheme in (cyclic, plain))
    assert one == pytest.approx(other, rel=1e-9)
    alone = graph_of([[e] for e in range(50)])
    single = UserMinSep(graph=alone, probability=0.1, min_sep=1, steps=20, batch_size=5.0)
    known = account(run(Poisson(probability=0.1, dataset_size=50, steps=20)), delta=1e-4)
    assert account(run(single), delta=1e-4).epsilon == pytest.approx(known.epsilon, rel=1e-3)


def test_it_takes_a_fraction_of_the_noise_of_revealed_draws():
    graph = AttributionGraph(
        examples=134_077, users=279_716, edges=360_000, max_examples=2, fingerprint="a stand-in"
    )
    scheme = UserMinSep(
        graph=graph, probability=1024 / 134_077, min_sep=1, steps=1000, batch_size=1024.0
    )
    sigma = [
        calibrate(
            scheme=scheme, strategy=Identity(), epsilon=8.0, delta=2e-6, accountant=name
        ).mechanism.noise_multiplier
        for name in (None, "revealed-draws")
    ]
    assert 3.5 < sigma[1] / sigma[0] < 4.5  # .0616 and .0156 in the published table of errors


@functools.cache
def claimed(partition, batch_size, largest, matrix, sigma):
    scheme = UserCyclic(partition=partition, batch_size=batch_size, steps=2, max_batch_size=largest)
    strategy = Identity() if matrix is None else BandMF(bands=2)
    found = profile(run(scheme, sigma, strategy), [EPSILON])
    return float(found.remove[0]), float(found.add[0])


def truth(partition, batch_size, largest, user, lists, c, sigma):
    """What the user loses when everything that others do is seen, from the definition."""
    laws = []
    for t in range(2):
        slot = t % partition.cycle
        members = tuple(np.flatnonzero(partition.slots == slot).tolist())
        mine = frozenset(e for e in members if user in lists[e])
        law = step_law(members, min(1.0, batch_size / max(1, len(members))), largest)
        laws.append(known_others(law, mine))
    return two_step_delta(laws, c, sigma, EPSILON)


def check_graphs(graphs, cases, sigma):
    """Every user of every graph; returns how many were compared and the best tightness."""
    compared, tight = 0, 0.0
    for lists, (cycle, spread, banded, largest) in itertools.product(graphs, cases):
        if cycle > len(lists):
            continue
        graph = graph_of(lists)
        partition = GraphPartition.of_graph(graph, cycle=cycle, spread=spread, method="greedy")
        if min(partition.sizes) == 0:
            continue
        size = 0.3 * min(partition.sizes)
        c = np.eye(2)
        if banded:
            c = BandMF(bands=2).bind(2).columns(2, [0, 1])
        found = claimed(partition, size, largest, True if banded else None, sigma)
        worst = [0.0, 0.0]
        for user in range(graph.users):
            true = truth(partition, size, largest, user, lists, c, sigma)
            compared += 1
            for side in (0, 1):
                assert true[side] <= found[side] * (1 + 1e-6) + 2e-7, (lists, cycle, user)
                worst[side] = max(worst[side], true[side])
        tight = max(tight, worst[0] / found[0])
    return compared, tight


CASES = [(1, 1, False, None), (2, 1, True, None), (2, 2, False, None), (3, 1, True, None)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("examples", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_no_user_of_any_small_graph_loses_more_than_is_claimed(examples, case):
    """All graphs of so many examples and 3 users, two steps, both directions; and it is attained.

    With independent noise somebody loses what is claimed, up to a hundredth.
    """
    compared, tight = check_graphs(small_graphs(examples, 3), [case], 1.0)
    assert compared > {1: 250, 2: 60, 3: 5}[case[0]]
    if not case[2]:
        assert tight > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1, 2, 3])
def test_cut_batches_of_users_cost_no_more_than_is_claimed(largest):
    """Whoever was kept among others shows what the user drew: enumerated, coin by coin."""
    cases = [(1, 1, False, largest), (2, 1, False, largest), (2, 2, False, largest)]
    compared, _ = check_graphs(small_graphs(3 if largest == 1 else 4, 3), cases, 0.8)
    assert compared > 50


def test_cutting_costs_little_where_it_is_rare_and_more_where_it_is_not():
    graph = graph_of([[e // 2] for e in range(4000)])
    partition = GraphPartition.of_graph(graph, cycle=4)

    def epsilon(largest):
        scheme = UserCyclic(partition=partition, batch_size=100.0, steps=40, max_batch_size=largest)
        return account(run(scheme, 1.0), delta=1e-6).epsilon

    whole = epsilon(None)
    assert epsilon(1000) == pytest.approx(whole, rel=1e-9)
    assert whole < epsilon(160) < whole * 1.02
    assert epsilon(105) > epsilon(130) > whole * 1.001
    by_publishing = account(
        run(UserCyclic(partition=partition, batch_size=100.0, steps=40, max_batch_size=1)),
        delta=1e-6,
        accountant="gaussian",
    ).epsilon
    assert epsilon(1) <= by_publishing * (1 + 1e-9)


def test_slots_too_near_each_other_cost_more():
    """Slots 0 and 3 of 4 with two bands: columns meet, and the product would be a lie."""
    graph = graph_of([[0], [0], *[[1 + e] for e in range(6)]])
    partition = GraphPartition.from_slots(graph, [0, 3, 0, 1, 1, 2, 2, 3], cycle=4)
    assert partition.separation == 1
    scheme = UserCyclic(partition=partition, batch_size=1.0, steps=8)
    with pytest.raises(ValueError, match="bands <= 1"):
        account(run(scheme, strategy=BandMF(bands=2)), delta=1e-3,
                accountant="user-poisson-pld")  # fmt: skip
    # The truth at steps 3 and 4, against the product of two separate columns.
    c = BandMF(bands=2).bind(8).columns(8, [3, 4])[3:6]
    y = np.linspace(-8, 10, 121)
    weight = np.exp(-0.5 * y**2) * (y[1] - y[0]) / math.sqrt(2 * math.pi)
    q = weight[:, None, None] * weight[None, :, None] * weight[None, None, :]
    grid = np.meshgrid(y, y, y, indexing="ij")

    def delta(matrix):
        ratio = np.zeros_like(q)
        for draw in itertools.product((0, 1), repeat=2):
            at = matrix @ np.array(draw, float)
            shift = sum(a * g for a, g in zip(at, grid, strict=True))
            ratio += 0.25 * np.exp(shift - 0.5 * float(at @ at))
        return float((q * np.maximum(ratio - math.exp(EPSILON), 0)).sum())

    lengths = np.linalg.norm(c, axis=0)
    separate = np.array([[lengths[0], 0.0], [0.0, lengths[1]], [0.0, 0.0]])
    assert delta(c) > 1.05 * delta(separate)


def test_the_worst_kind_of_user_decides():
    """(2) once a cycle against (1, 1) twice: neither covers the other, both are asked."""
    graph = graph_of([[0], [0], [1], [1]] + [[2 + e] for e in range(12)])
    slots = [0, 0, 0, 2] + [s for s in range(4) for _ in range(3)]
    partition = GraphPartition.from_slots(graph, slots, cycle=4)
    assert {(1, 1), (2,)} <= {p[1:] for p in partition.profiles}
    scheme = UserCyclic(partition=partition, batch_size=1.0, steps=40)
    found = account(run(scheme, 0.9), delta=1e-4).epsilon
    alone = [
        BinomialMixtureCurve(tosses, 1.0).epsilon(0.9, 1e-4)
        for tosses in ((Tosses(2, 1 / 6, 10),), (Tosses(1, 1 / 4, 20),))
    ]
    assert found == pytest.approx(max(alone), rel=1e-6)


def test_wider_noise_correlation_than_slots_is_refused_with_a_remedy():
    partition = GraphPartition.of_graph(SMALL, cycle=4, spread=2, method="greedy")
    scheme = UserCyclic(partition=partition, batch_size=4.0, steps=20)
    table = {a.name: a.reason for a in accountants_for(run(scheme, strategy=BandMF(bands=4)))}
    assert "bands <= 2" in str(table["user-poisson-pld"])
    assert table["gaussian"] is not None  # by name only: the refused one would be tighter
