"""Partitions of attribution graphs: what slots owe to users, on small graphs and large ones."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from dptrain.core.json_value import JsonValue
from dptrain.sampling import AttributionGraph, GraphPartition
from dptrain.sampling.users.partition.coloring import colored
from dptrain.sampling.users.partition.packing import cover, packed
from dptrain.sampling.users.partition.pieces import METHODS, components, conflicts
from tests.helpers.user_graphs import LARGE, graph_of, random_lists
from tests.oracles.small_graphs import small_graphs

EVERY = small_graphs(5, 3)


def apart(one: int, other: int, cycle: int) -> int:
    """Steps between two slots, round the cycle."""
    return min((one - other) % cycle, (other - one) % cycle)


def users_slots(lists, slots):
    """The slots of every user's examples, as a list of lists, from the definition."""
    found: dict = {}
    for row, slot in zip(lists, slots, strict=True):
        for user in set(row):
            found.setdefault(user, []).append(int(slot))
    return found


def assert_is_what_it_says(partition, lists):
    """The facts of a partition, counted in Python."""
    slots = partition.slots
    assert partition.dropped == sum(slot < 0 for slot in slots)
    assert partition.sizes == tuple(int((slots == s).sum()) for s in range(partition.cycle))
    least = partition.cycle
    for mine in users_slots(lists, slots).values():
        kept = [slot for slot in mine if slot >= 0]
        for one, other in itertools.combinations(sorted(set(kept)), 2):
            least = min(least, apart(one, other, partition.cycle))
        if not kept:
            continue
        counts = sorted((kept.count(slot) for slot in set(kept)), reverse=True)
        smallest = min(partition.sizes[slot] for slot in kept)
        # Some profile has at least as many in each of at least as many slots, and none smaller.
        assert any(
            profile[0] <= smallest
            and len(profile) > len(counts)
            and all(p >= c for p, c in zip(profile[1:], counts, strict=False))
            for profile in partition.profiles
        )
    assert partition.separation == least


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("cycle", "spread"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (3, 3)])
def test_every_graph_of_five_examples_and_three_users(method, cycle, spread):
    for lists in EVERY:
        if cycle > len(lists):
            continue
        graph = graph_of(lists)
        partition = GraphPartition.of_graph(graph, cycle=cycle, spread=spread, method=method)
        assert_is_what_it_says(partition, lists)
        assert partition.separation >= cycle // spread
        most = -(-graph.max_examples // spread)
        for mine in users_slots(lists, partition.slots).values():
            kept = [slot for slot in mine if slot >= 0]
            assert all(kept.count(slot) <= most for slot in kept)
            assert len({slot % (cycle // spread) for slot in kept}) <= 1  # one part
        if cycle == spread == 1:
            assert partition.dropped == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("cycle", "spread"), [(7, 1), (16, 1), (16, 2), (12, 3)])
def test_large_graphs(method, cycle, spread):
    lists = random_lists(3, 3000, 2500, 2)
    graph = graph_of(lists).bound(3, seed=0).graph
    rows = [graph.members[a:b].tolist() for a, b in itertools.pairwise(graph.offsets.tolist())]
    partition = GraphPartition.of_graph(graph, cycle=cycle, spread=spread, method=method, seed=5)
    assert_is_what_it_says(partition, rows)
    assert partition.separation >= cycle // spread
    assert partition.dropped < 0.12 * graph.examples
    assert max(partition.sizes) <= 1.1 * min(partition.sizes)
    again = GraphPartition.of_graph(graph, cycle=cycle, spread=spread, method=method, seed=5)
    np.testing.assert_array_equal(again.slots, partition.slots)
    other = GraphPartition.of_graph(graph, cycle=cycle, spread=spread, method=method, seed=6)
    assert (other.slots != partition.slots).any()


def test_metis_cuts_less_than_the_greedy_order():
    """A giant component: 3,000 examples in a ring of rings."""
    lists = [[e, (e + 1) % 3000, 3000 + e % 60] for e in range(3000)]
    graph = graph_of(lists).bound(4, seed=0).graph
    few, many = (
        GraphPartition.of_graph(graph, cycle=8, method=method).dropped for method in METHODS
    )
    assert few <= many


def test_components_and_conflicts_are_those_of_the_definition():
    for lists in EVERY[::7]:
        graph = graph_of(lists)
        by_user, of_user = graph.by_user()
        pairs = {
            (i, j)
            for i, j in itertools.combinations(range(len(lists)), 2)
            if set(lists[i]) & set(lists[j])
        }
        left, right = conflicts(by_user, of_user)
        assert {tuple(sorted(p)) for p in zip(left.tolist(), right.tolist(), strict=True)} == pairs
        label = components(graph.examples, by_user, of_user)
        reach = {i: {i} for i in range(len(lists))}
        for _ in lists:
            for i, j in pairs:
                reach[i] |= reach[j]
                reach[j] |= reach[i]
        for i, j in itertools.combinations(range(len(lists)), 2):
            assert (label[i] == label[j]) == (j in reach[i])


def test_bipartite_conflicts_need_no_drop():
    """A path, a ring of even length and a tree have two colors; a ring of odd length loses one."""

    def ring(size):
        return [[e, (e + 1) % size] for e in range(size)]

    tree = [[e, *(2 * e + c for c in (1, 2))] for e in range(31)]  # each child shares one number
    for lists, lost in ((ring(40), 0), ([[e, e + 1] for e in range(50)], 0), (ring(41), 1)):
        whole = GraphPartition.of_graph(graph_of(lists), cycle=2, spread=2)
        assert whole.dropped == lost
        assert whole.separation == 1
    assert GraphPartition.of_graph(graph_of(tree), cycle=2, spread=2).dropped == 0


def test_compiled_and_plain_colors_agree():
    pytest.importorskip("numba")
    by_user, of_user = LARGE.by_user()
    part = np.arange(LARGE.examples) % 5 - (np.arange(LARGE.examples) % 50 == 0)
    both = [
        colored(
            LARGE.offsets,
            LARGE.members,
            by_user,
            of_user,
            part,
            parts=5,
            spread=3,
            most=2,
            compiled=compiled,
        )
        for compiled in (True, False)
    ]
    np.testing.assert_array_equal(*both)


def test_packing_is_level():
    rng = np.random.default_rng(0)
    sizes = np.concatenate((rng.integers(2, 40, size=200), np.ones(500, dtype=np.int64)))
    bins = packed(sizes, 7, rng)
    loads = np.bincount(bins, weights=sizes, minlength=7)
    assert loads.max() - loads.min() <= 1
    assert packed(np.array([5]), 3, rng).shape == (1,)
    level = np.bincount(packed(np.ones(10, dtype=np.int64), 4, rng), minlength=4)
    assert sorted(level.tolist()) == [2, 2, 3, 3]


def test_cover_leaves_no_pair():
    rng = np.random.default_rng(1)
    left, right = rng.integers(0, 40, size=60), rng.integers(40, 80, size=60)
    dropped = set(cover(left, right).tolist())
    assert all(a in dropped or b in dropped for a, b in zip(left, right, strict=True))
    star = cover(np.zeros(9, dtype=np.int64), np.arange(1, 10))
    assert star.tolist() == [0]


def test_json_keeps_the_facts_and_attach_the_slots():
    graph = graph_of(random_lists(4, 200, 150, 2)).bound(2, seed=0).graph
    partition = GraphPartition.of_graph(graph, cycle=8, spread=2)
    read = GraphPartition.from_dict(json.loads(json.dumps(partition.to_dict())))
    assert read == partition
    assert not read.attached
    with pytest.raises(ValueError, match="attach"):
        _ = read.slots
    for source in (graph, partition):
        np.testing.assert_array_equal(read.attach(source).slots, partition.slots)
    own = GraphPartition.from_slots(graph, partition.slots, cycle=8)
    assert own.fingerprint == partition.fingerprint
    assert own.profiles == partition.profiles
    assert own.separation == partition.separation
    np.testing.assert_array_equal(read.attach(own).slots, partition.slots)
    with pytest.raises(ValueError, match="from_slots"):
        own.attach(graph)
    moved = np.array(partition.slots)
    moved[:] = np.roll(moved, 1)
    with pytest.raises(ValueError, match="changed"):
        read.attach(GraphPartition.from_slots(graph, moved, cycle=8))
    with pytest.raises(ValueError, match="changed"):
        read.attach(graph_of(random_lists(5, 200, 150, 2)))
    assert isinstance(partition, JsonValue)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cycle": 0}, "cycle"),
        ({"cycle": 41}, "cycle=41"),
        ({"cycle": 4, "spread": 3}, "does not divide"),
        ({"cycle": 4, "spread": 0}, "spread"),
        ({"cycle": 4, "method": "kmeans"}, "kmeans"),
        ({"cycle": 4, "seed": -1}, "seed"),
        ({"cycle": 2.5}, "cycle"),
    ],
)
def test_bad_arguments(change, message):
    graph = graph_of(random_lists(6, 40, 30, 2))
    with pytest.raises((TypeError, ValueError), match=message):
        GraphPartition.of_graph(graph, **change)


@pytest.mark.parametrize(
    "slots",
    [
        [0, 1],
        [0.5] * 4,
        [0, 1, 2, -2],
        [0, 1, 2, 9],
        [-1] * 4,
        "abcd",
        [[0], [1, 2]],
        np.array([0, 1, 2, 2**64 - 1], dtype=np.uint64),  # no -1
    ],
)
def test_bad_slots(slots):
    graph = graph_of([[0], [1], [2], [3]])
    with pytest.raises(ValueError, match="cycle=1000000000000 slots"):  # and not out of memory
        GraphPartition.from_slots(graph, [0, 1, 2, 2], cycle=10**12)
    with pytest.raises((TypeError, ValueError), match="slots"):
        GraphPartition.from_slots(graph, slots, cycle=3)


def test_a_false_file_is_refused():
    partition = GraphPartition.of_graph(graph_of(random_lists(6, 40, 30, 2)), cycle=4)
    value = partition.to_dict()
    for change in (
        {"sizes": [10, 10, 10, 11]},
        {"separation": 5},
        {"profiles": []},
        {"profiles": [[9, 50]]},
        {"method": "magic"},
        {"sizes": [10.5, 10.5, 10.5, 10.5]},
        {"sizes": ["a"] * 4},
        {"profiles": [3]},
    ):
        with pytest.raises(ValueError, match=r"GraphPartition"):
            GraphPartition.from_dict({**value, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"profiles": [[5, 2]]}, "profiles"),  # nobody would have a second slot
        ({"sizes": [4, 6], "profiles": [[6, 1, 1]]}, "sizes"),  # a smaller chance in each
        ({"cycle": 3, "sizes": [5, 3, 2]}, "cycle"),  # fewer turns
        ({"separation": 2, "profiles": [[5, 2]]}, "separation"),  # room for more bands
        ({"profiles": [[5, 1]], "sizes": [5, 4], "dropped": 1}, "sizes"),
    ],
)
def test_facts_that_are_not_those_of_the_slots_are_not_attached(change, named):
    # Accountants read them: a user would be promised what is true of another partition.
    graph = graph_of([[e % 5] for e in range(10)])
    partition = GraphPartition.from_slots(graph, [0] * 5 + [1] * 5, cycle=2)
    assert partition.profiles == ((5, 1, 1),)
    assert partition.separation == 1
    forged = GraphPartition.from_dict({**partition.to_dict(), **change})
    assert forged != partition
    with pytest.raises(ValueError, match=f"states {named}="):
        forged.attach(partition)


def test_a_file_in_which_everybody_has_fewer_examples_than_the_graph_is_refused():
    graph = graph_of([[0], [0], [0], [1]])
    value = GraphPartition.from_slots(graph, [0, 0, 0, 1], cycle=2).to_dict()
    assert value["profiles"] == [[1, 1], [3, 3]]
    with pytest.raises(ValueError, match="profiles"):
        GraphPartition.from_dict({**value, "profiles": [[1, 1]]})
    # With that many dropped they may indeed have fewer.
    few = GraphPartition.from_slots(graph, [0, -1, -1, 1], cycle=2)
    assert few.profiles == ((1, 1),)
    assert GraphPartition.from_dict(few.to_dict()) == few


def test_neither_a_graph_nor_a_partition_is_attached():
    partition = GraphPartition.of_graph(graph_of([[0], [1], [2], [3]]), cycle=2)
    for source in (partition.slots, None):
        with pytest.raises(TypeError, match="graph"):
            GraphPartition.from_dict(partition.to_dict()).attach(source)


def test_a_user_of_thousands_is_named_where_pairs_are_too_many():
    everybody = AttributionGraph.from_lists([[0, 1 + e] for e in range(20_000)])
    with pytest.raises(ValueError, match=r"bound\(\)"):
        GraphPartition.of_graph(everybody, cycle=2)


def test_the_plot_shows_components_slots_and_drops(tmp_path):
    pytest.importorskip("matplotlib")
    from dptrain.reporting import plot_graph

    bounded = graph_of(random_lists(8, 400, 300, 2)).bound(2, seed=0)
    partition = GraphPartition.of_graph(bounded.graph, cycle=8, spread=2)
    assert partition.component_sizes().values @ partition.component_sizes().counts == (
        bounded.graph.examples
    )
    plain, parted = tmp_path / "plain.png", tmp_path / "parted.png"
    plot_graph(bounded.statistics(progress=False), plain)
    plot_graph(bounded.statistics(progress=False), parted, partition)
    assert parted.stat().st_size > plain.stat().st_size > 10_000
