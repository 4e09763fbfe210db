"""Users drawn as examples are elsewhere, and which of their examples come along."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import numpy as np
import pytest

from dptrain.configuration import build_scheme
from dptrain.core import Unit
from dptrain.sampling import (
    AttributionGraph,
    BallsInBins,
    CyclicPoisson,
    MinSep,
    PerUser,
    Poisson,
    RandomAllocation,
    Scheme,
    Shuffled,
    UserFixed,
    UserMinSep,
)
from dptrain.testing.scheme_contract import SchemeContract, bernstein_tolerance

SIZES = (1, 2, 3, 7, 1, 12, 5, 2)


def graph_with(sizes, seed=0):
    """Users of so many examples each, whose examples lie mixed up."""
    users = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(seed).shuffle(users)
    return AttributionGraph.from_lists([[int(u)] for u in users])


def owned(graph):
    """The examples of each user, in the numbers of the graph."""
    return [np.flatnonzero(graph.members == u) for u in range(graph.users)]


SMALL = graph_with(np.tile(SIZES, 5))
LARGE = graph_with(np.tile(SIZES, 2000), seed=1)

USERS = {
    "Poisson": lambda m: Poisson(probability=0.2, dataset_size=m, steps=20),
    "Poisson, cut": lambda m: Poisson(probability=0.2, dataset_size=m, steps=20, max_batch_size=7),
    "CyclicPoisson": lambda m: CyclicPoisson(probability=0.5, cycle=4, dataset_size=m, steps=20),
    "MinSep": lambda m: MinSep(probability=0.2, min_sep=3, dataset_size=m, steps=20),
    "BallsInBins": lambda m: BallsInBins(bins=5, epochs=4, dataset_size=m),
    "RandomAllocation": lambda m: RandomAllocation(
        steps_per_epoch=5, participations=2, epochs=4, dataset_size=m
    ),
    "Shuffled": lambda m: Shuffled(batch_size=6, dataset_size=m, epochs=3),
}


def per_user(graph, name="Poisson", group_size=3):
    return PerUser(graph=graph, users=USERS[name](graph.users), group_size=group_size)


class _Contract(SchemeContract):
    name = ""

    def scheme(self):
        return per_user(SMALL, self.name)

    def large_scheme(self):
        return per_user(LARGE, self.name)


class TestOverPoisson(_Contract):
    name = "Poisson"


class TestOverCutPoisson(_Contract):
    name = "Poisson, cut"


class TestOverMinSep(_Contract):
    name = "MinSep"


class TestOverBallsInBins(_Contract):
    name = "BallsInBins"


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("group", [1, 3, 12])
def test_users_follow_their_scheme_and_bring_up_to_g_of_their_examples(name, group):
    """Users of a step are those that their own scheme draws with this seed, no law to be tested."""
    scheme, mine = per_user(SMALL, name, group), owned(SMALL)
    for batch, drawn in zip(scheme.stream(11), scheme.users.stream(11), strict=True):
        assert sorted(set(SMALL.members[batch])) == drawn.tolist()
        for user in drawn:
            assert np.isin(batch, mine[user]).sum() == min(group, len(mine[user]))


def test_batches_come_user_by_user():
    scheme = per_user(SMALL)
    for batch in scheme.stream(3):
        rows, sizes = scheme.grouped(batch)
        assert sorted(rows) == batch.tolist()
        groups = np.split(rows, np.cumsum(sizes)[:-1]) if len(sizes) else []
        found = [set(SMALL.members[group].tolist()) for group in groups]
        assert all(len(users) == 1 for users in found)
        assert len(set().union(*found)) == len(found)
        assert sizes.dtype == np.int64
    rows, sizes = scheme.grouped(np.zeros(0, dtype=np.int64))
    assert len(rows) == len(sizes) == 0


def test_every_choice_of_examples_is_as_likely_and_new_each_time():
    """Frequencies of the pairs out of four examples, within a step and over two steps."""
    copies = 6000
    graph = AttributionGraph.from_lists([[u] for u in range(copies) for _ in range(4)])
    scheme = PerUser(
        graph=graph, users=Poisson(probability=1.0, dataset_size=copies, steps=2), group_size=2
    )
    pairs = {pair: k for k, pair in enumerate(itertools.combinations(range(4), 2))}
    drawn = [
        [pairs[tuple(pair)] for pair in (batch.reshape(copies, 2) % 4).tolist()]
        for batch in scheme.stream(5)
    ]
    counts = np.zeros((6, 6))
    np.add.at(counts, tuple(drawn), 1)
    p = 1 / 36
    assert (np.abs(counts - copies * p) <= bernstein_tolerance(copies * p * (1 - p))).all()


def test_the_choice_is_independent_of_who_takes_part():
    """Accountants need it: of users in both steps and in one, the same share brings example 0."""
    copies = 20_000
    graph = AttributionGraph.from_lists([[u] for u in range(copies) for _ in range(2)])
    users = Poisson(probability=0.5, dataset_size=copies, steps=2)
    taken = np.zeros((2, copies, 2), dtype=bool)
    scheme = PerUser(graph=graph, users=users, group_size=1)
    for step, batch in enumerate(scheme.stream(7)):
        taken[step, batch // 2, batch % 2] = True
    part = taken.any(axis=2)
    for step, other in ((0, 1), (1, 0)):
        for also in (False, True):
            here = part[step] & (part[other] == also)
            count = int(here.sum())
            found = int(taken[step, here, 0].sum())
            assert abs(found - count / 2) <= bernstein_tolerance(count / 4)


def test_both_streams_draw_other_numbers():
    """With one generator for both, keys and coins would be the same numbers."""
    scheme = per_user(SMALL)
    stream = scheme.stream(9)
    assert stream._rng.random() != scheme.users.stream(9)._rng.random()


def test_public_numbers_count_users():
    scheme = per_user(SMALL, group_size=4)
    assert scheme.expected_batch_size == pytest.approx(0.2 * 40)
    assert scheme.rate == 0.2
    assert (scheme.dataset_size, scheme.population) == (SMALL.examples, 40)
    assert scheme.unit == Unit(kind="user", max_examples=None)
    assert scheme.max_per_batch == 1
    assert scheme.participants is scheme.users
    assert scheme.physical_batch_size is None
    assert per_user(SMALL, "Poisson, cut", 4).physical_batch_size == 28


def test_shared_examples_are_refused_with_the_remedy():
    graph = AttributionGraph.from_lists([[0], [0, 1], [1]])
    users = Poisson(probability=0.5, dataset_size=2, steps=3)
    for make in (
        lambda: PerUser(graph=graph, users=users, group_size=2),
        lambda: PerUser.for_batch_size(graph=graph, batch_size=1, steps=3, group_size=2),
    ):
        with pytest.raises(ValueError, match=r"exactly one user. Use UserCyclic or UserMinSep"):
            make()


def test_unfit_schemes_of_users_are_refused():
    for users, said in (
        (Poisson(probability=0.5, dataset_size=39, steps=3), "dataset_size=39.*40 users"),
        (Poisson(probability=0.5, dataset_size=40, steps=3, nominal_size=50), "nominal_size"),
        (per_user(SMALL), "its own units"),
        (
            UserMinSep(graph=SMALL, probability=0.1, min_sep=2, steps=3, batch_size=3.0),
            "its own units",
        ),
        (UserFixed(graph=SMALL, batch_size=3, min_sep=2, steps=3), "its own units"),
    ):
        with pytest.raises(ValueError, match=said):
            PerUser(graph=SMALL, users=users, group_size=2)
    with pytest.raises(TypeError, match="users"):
        PerUser(graph=SMALL, users="Poisson", group_size=2)
    for group_size in (0, -1):
        with pytest.raises(ValueError, match="group_size"):
            dataclasses.replace(per_user(SMALL), group_size=group_size)


@pytest.mark.parametrize(
    ("users", "kind"),
    [
        ("Poisson", Poisson),
        ({"type": "MinSep", "min_sep": 2}, MinSep),
        ({"type": "Poisson", "max_batch_size": 20}, Poisson),
        ({"type": "BallsInBins"}, BallsInBins),
        ({"type": "CyclicPoisson", "cycle": 2}, CyclicPoisson),
    ],
)
def test_for_batch_size_counts_users(users, kind):
    scheme = PerUser.for_batch_size(graph=SMALL, batch_size=10, steps=20, group_size=3, users=users)
    assert type(scheme.users) is kind
    assert scheme.steps == 20
    assert scheme.expected_batch_size == pytest.approx(10, rel=1e-3)
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


@pytest.mark.parametrize(
    ("users", "said"),
    [
        ({"type": "Poisso"}, "Poisson"),
        ({"type": "UserFixed", "min_sep": 2}, "draws the examples of users itself"),
        ({"type": "PerUser", "group_size": 2}, "draws the examples of users itself"),
        ({"type": "Poisson", "cycle": 2}, r"users\.cycle=2"),
        ({"type": "Poisson", "steps": 2}, r"users\.steps=2"),
        ({"type": "MinSep"}, "min_sep"),
        ({"type": "BallsInBins", "epochs": 2}, r"users\.epochs=2"),
    ],
)
def test_bad_ways_to_take_part_are_refused(users, said):
    with pytest.raises(ValueError, match=said):
        PerUser.for_batch_size(graph=SMALL, batch_size=10, steps=20, group_size=3, users=users)
    with pytest.raises(TypeError, match="users"):
        PerUser.for_batch_size(graph=SMALL, batch_size=10, steps=20, group_size=3, users=7)


@pytest.mark.parametrize("size", [{"batch_size": 10}, {"epoch_length": 4}])
def test_a_configuration_states_it(size):
    """Batches and epochs are of users: of 40, 10 a step are an epoch in 4."""
    scheme = build_scheme(
        {"type": "PerUser", **size, "group_size": 3, "users": {"type": "MinSep", "min_sep": 2}},
        dataset_size=SMALL.examples,
        steps=12,
        graph=SMALL,
    )
    assert scheme == PerUser.for_batch_size(
        graph=SMALL,
        batch_size=10,
        steps=12,
        group_size=3,
        users={"type": "MinSep", "min_sep": 2},
    )


def test_a_detached_graph_is_attached_to_draw():
    scheme = per_user(SMALL)
    read = Scheme.from_dict(json.loads(json.dumps(scheme.to_dict())))
    with pytest.raises(ValueError, match="attach"):
        read.stream(1)
    again = list(read.attach(SMALL).stream(1))
    for batch, expected in zip(again, scheme.stream(1), strict=True):
        np.testing.assert_array_equal(batch, expected)


def test_a_copy_of_a_stream_shares_the_examples():
    stream = per_user(SMALL).stream(1)
    assert copy.deepcopy(stream)._own is stream._own


def test_there_is_no_room_for_more_examples_than_anybody_has():
    graph = AttributionGraph.from_lists([[0], [0], [1], [1], [1]])
    users = Poisson(probability=0.5, dataset_size=2, steps=3, max_batch_size=2)
    scheme = PerUser(graph=graph, users=users, group_size=10**9)
    assert scheme.physical_batch_size == 6
    same = PerUser(graph=graph, users=users, group_size=3)
    assert scheme == same
    for one, other in zip(scheme.stream(1), same.stream(1), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["Poisson", "BallsInBins", "Shuffled"])
@pytest.mark.parametrize("size", [float("nan"), "7", 0.0])
def test_a_batch_size_that_is_none_is_named(kind, size):
    with pytest.raises((TypeError, ValueError), match="PerUser: batch_size"):
        PerUser.for_batch_size(graph=SMALL, batch_size=size, steps=20, group_size=1, users=kind)


def test_a_state_of_two_different_steps_is_refused():
    stream = per_user(SMALL).stream(0)
    next(stream)
    state = stream.state_dict()
    with pytest.raises(ValueError, match="step 1"):
        per_user(SMALL).stream(0).load_state_dict({**state, "users.step": 5})
