"""User-level cyclic Poisson sampling: the contract, its law by enumeration, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from dptrain.sampling import GraphPartition, Scheme, UserCyclic
from dptrain.testing.scheme_contract import (
    SchemeContract,
    bernstein_tolerance,
    joint_counts,
    participation,
)
from tests.helpers.user_graphs import LARGE, SMALL, graph_of

SCHEME = UserCyclic(
    partition=GraphPartition.of_graph(SMALL, cycle=4, method="greedy"), batch_size=5.0, steps=20
)


class TestContract(SchemeContract):
    def scheme(self):
        return SCHEME

    def large_scheme(self):
        partition = GraphPartition.of_graph(LARGE, cycle=4, method="greedy")
        return dataclasses.replace(self.scheme(), partition=partition)

    def test_users_stay_in_their_slots(self):
        """Steps of a user are whole cycles apart, and its examples never more than the bound."""
        scheme = self.large_scheme()
        taken = participation(scheme.stream(self.seed), scheme.dataset_size)
        users = np.zeros((LARGE.users, scheme.steps), dtype=np.int64)
        for e, row in enumerate(taken):
            users[LARGE.members[LARGE.offsets[e] : LARGE.offsets[e + 1]]] += row
        assert users.max() <= scheme.max_per_batch
        assert (users > 0).sum(axis=1).max() <= scheme.max_participations
        for gap in range(1, scheme.min_sep):
            assert not ((users[:, gap:] > 0) & (users[:, :-gap] > 0)).any()
        assert not taken[scheme.partition.slots < 0].any()


class TestCutAndSpread(TestContract):
    def scheme(self):
        partition = GraphPartition.of_graph(SMALL, cycle=4, spread=2, method="greedy")
        return UserCyclic(partition=partition, batch_size=5.0, steps=20, max_batch_size=6)

    def large_scheme(self):
        partition = GraphPartition.of_graph(LARGE, cycle=4, spread=2, method="greedy")
        return dataclasses.replace(self.scheme(), partition=partition)


def test_every_example_tosses_a_coin_of_its_own():
    """Joint inclusion of 16,000 examples of one user each, against the definition."""
    graph = graph_of([[e] for e in range(16_000)])
    partition = GraphPartition.of_graph(graph, cycle=4)
    assert partition.sizes == (4000,) * 4
    scheme = UserCyclic(partition=partition, batch_size=1000.0, steps=12)
    taken = participation(scheme.stream(3), scheme.dataset_size)
    same = np.subtract.outer(np.arange(12), np.arange(12)) % 4 == 0
    expected = same * (0.25**2 / 4) + np.eye(12) * (0.25 - 0.25**2) / 4
    tolerance = bernstein_tolerance(16_000 * expected * (1 - expected))
    assert (np.abs(joint_counts(taken) - 16_000 * expected) <= tolerance).all()
    sizes = taken.sum(axis=0)
    assert (np.abs(sizes - 1000) <= bernstein_tolerance(4000 * 0.25 * 0.75)).all()


def test_cut_batches_keep_every_subset_alike():
    graph = graph_of([[e] for e in range(4)])
    partition = GraphPartition.of_graph(graph, cycle=1)
    scheme = UserCyclic(partition=partition, batch_size=3.0, steps=20_000, max_batch_size=2)
    counts = np.zeros((4, 4))
    for batch in scheme.stream(1):
        assert len(batch) <= 2
        counts[np.ix_(batch, batch)] += 1
    p = 0.75
    full = math.comb(4, 2) * p**2 * (1 - p) ** 2 + 4 * p**3 * (1 - p) + p**4
    pair = full / 6
    off = counts[~np.eye(4, dtype=bool)]
    assert (np.abs(off - 20_000 * pair) <= bernstein_tolerance(20_000 * pair * (1 - pair))).all()
    mean = 4 * p * (1 - p) ** 3 * 1 + full * 2
    assert scheme.expected_batch_size == pytest.approx(mean)
    assert scheme.physical_batch_size == 2


def test_slots_of_different_sizes_give_equal_batches():
    graph = graph_of([[e] for e in range(3000)])
    slots = np.minimum(np.arange(3000) // 500, 2)  # 500, 500, 2000
    partition = GraphPartition.from_slots(graph, slots, cycle=3)
    scheme = UserCyclic(partition=partition, batch_size=250.0, steps=300)
    sizes = np.array([len(batch) for batch in scheme.stream(0)]).reshape(100, 3).mean(axis=0)
    assert (np.abs(sizes - 250) <= 6 * np.sqrt(250 / 100)).all()
    assert [scheme.probability(m) for m in partition.sizes] == [0.5, 0.5, 0.125]


def test_who_has_no_slot_is_never_drawn_and_said():
    graph = graph_of([[0, 1], [1, 2], [2, 0]])  # a triangle of conflicts has no two colors
    scheme = UserCyclic.for_batch_size(graph=graph, batch_size=1.0, cycle=2, spread=2, steps=50)
    assert scheme.partition.dropped == 1
    (gone,) = np.flatnonzero(scheme.partition.slots < 0)
    assert all(gone not in batch for batch in scheme.stream(0))
    said = scheme.shortfall(0)
    assert said is not None
    assert "1 of 3 examples are never drawn" in said
    assert UserCyclic.for_batch_size(
        graph=graph, batch_size=1.0, cycle=1, steps=5
    ).shortfall(0) is None  # fmt: skip


def test_slots_without_a_turn_are_said():
    graph = graph_of([[e] for e in range(12)])
    scheme = UserCyclic.for_batch_size(graph=graph, batch_size=2.0, cycle=4, steps=3)
    drawn = {e for seed in range(50) for batch in scheme.stream(seed) for e in batch.tolist()}
    assert len(drawn) == 9
    said = scheme.shortfall(0)
    assert said is not None
    assert "3 of 12 examples are never drawn" in said
    assert dataclasses.replace(scheme, steps=4).shortfall(0) is None


def test_read_from_a_file_it_draws_once_attached():
    read = Scheme.from_dict(json.loads(json.dumps(SCHEME.to_dict())))
    assert isinstance(read, UserCyclic)
    with pytest.raises(ValueError, match="attach"):
        read.stream(0)
    attached = read.attach(SMALL)
    assert attached == SCHEME
    for one, other in zip(attached.stream(5), SCHEME.stream(5), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 21.0}, "smallest of cycle=4 slots has "),
        ({"batch_size": 0.0}, "batch_size"),
        ({"cycle": 100}, "cycle=100"),
        ({"spread": 3}, "does not divide"),
        ({"steps": 0}, "steps"),
        ({"max_batch_size": 0}, "max_batch_size"),
    ],
)
def test_bad_arguments(change, message):
    values = {"batch_size": 5.0, "cycle": 4, "steps": 8, "method": "greedy", **change}
    with pytest.raises((TypeError, ValueError), match=message):
        UserCyclic.for_batch_size(graph=SMALL, **values)
