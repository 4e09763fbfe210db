"""Contribution bounding: its bounds and its maximality by brute force, its law by enumeration."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dptrain.sampling.users import bounding
from dptrain.sampling.users.graph import AttributionGraph, BoundedGraph
from dptrain.sampling.users.graph_edges import gather


def random_graph(seed: int, examples: int = 60, users: int = 25) -> AttributionGraph:
    """One to four users an example, some users far more often than others."""
    rng = np.random.default_rng(seed)
    return AttributionGraph.from_lists(
        (users * rng.random(rng.integers(1, 5)) ** 2).astype(int) for _ in range(examples)
    )


def users_of(graph: AttributionGraph) -> list[set[int]]:
    """The users of each example."""
    return [set(row) for row in np.split(graph.members, graph.offsets[1:-1])]


def admissible(rows: list[set[int]], k: int, most: int | None) -> bool:
    """Whether these examples keep both bounds, by definition."""
    if max(Counter(itertools.chain.from_iterable(rows)).values()) > k:
        return False
    return most is None or all(sum(bool(row & other) for other in rows) <= most for row in rows)


CASES = [
    (k, duplicates, most, seed)
    for k in (1, 2, 3, 7)
    for duplicates in (False, True)
    for most in (None, 1, 3, 6)
    for seed in range(3)
]


@pytest.mark.parametrize("chunk", [3, 1 << 15])
@pytest.mark.parametrize(("k", "duplicates", "most", "seed"), CASES)
def test_bounds_hold_and_nothing_more_fits(
    k: int,
    duplicates: bool,
    most: int | None,
    seed: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounding, "_CHUNK", chunk)
    graph = random_graph(seed)
    bounded = graph.bound(k, duplicates=duplicates, max_neighbors=most, seed=seed)
    users = users_of(graph)
    rows = bounded.rows.tolist()
    assert rows == sorted(rows)
    assert bounded.rows.dtype == np.int64
    kept = [users[i] for i in rows]
    assert admissible(kept, k, most)
    if not duplicates:
        assert len(set(rows)) == len(rows)
    for example in range(graph.examples):
        if duplicates or example not in rows:
            assert not admissible([*kept, users[example]], k, most)
    # The graph is that of the rows.
    assert bounded.graph == graph.select(bounded.rows)
    assert bounded.graph.max_examples <= k
    if most is not None:
        assert bounded.graph.neighborhood_sizes().max() <= most
    again = graph.bound(k, duplicates=duplicates, max_neighbors=most, seed=seed)
    np.testing.assert_array_equal(bounded.rows, again.rows)


def greedy(order: tuple[int, ...], users: list[set[int]], k: int, most: int | None) -> list[int]:
    """One pass in this order, by definition."""
    rows: list[int] = []
    for example in order:
        if admissible([users[i] for i in [*rows, example]], k, most):
            rows.append(example)
    return rows


@pytest.mark.parametrize("most", [None, 3])
def test_law_is_that_of_a_uniform_order(most: int | None) -> None:
    graph = AttributionGraph.from_lists([["a", "b"], ["b", "c"], ["c"], ["a", "c"], ["b"]])
    users = users_of(graph)
    law = Counter(
        tuple(sorted(greedy(order, users, 2, most)))
        for order in itertools.permutations(range(graph.examples))
    )
    total, draws = sum(law.values()), 2000
    seen = Counter(
        tuple(graph.bound(2, max_neighbors=most, seed=seed).rows.tolist()) for seed in range(draws)
    )
    assert set(seen) <= set(law)
    assert len(law) > 2
    for rows, ways in law.items():
        p = ways / total
        assert abs(seen[rows] / draws - p) <= 6 * (p * (1 - p) / draws) ** 0.5


def test_duplicates_add_copies_in_the_order_of_the_first_pass() -> None:
    graph = random_graph(5)
    users = users_of(graph)
    first = graph.bound(3, seed=9).rows.tolist()
    both = graph.bound(3, duplicates=True, seed=9).rows.tolist()
    # Its pass is the first pass of the other, and copies are of examples that it kept.
    assert sorted(set(both)) == first
    # Three examples alone with one user each are copied up to the bound.
    alone = AttributionGraph.from_lists([["a"], ["b"], ["c"]])
    assert alone.bound(3, duplicates=True, seed=0).rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert max(Counter(u for i in both for u in users[i]).values()) <= 3


def test_all_fits_under_a_large_bound() -> None:
    graph = random_graph(1)
    bounded = graph.bound(graph.max_examples, seed=0)
    np.testing.assert_array_equal(bounded.rows, np.arange(graph.examples))
    assert bounded.graph == graph


def test_gathered_rows() -> None:
    graph = random_graph(2)
    rows = np.array([5, 5, 0, 59])
    offsets, members = gather(graph.offsets, graph.members, rows)
    parts = np.split(members, offsets[1:-1])
    assert [set(part) for part in parts] == [users_of(graph)[i] for i in rows]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pairs", [1, 40, 1 << 22])
def test_neighborhoods(seed: int, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptrain.sampling.users.neighbors._PAIRS", pairs)
    graph = random_graph(seed, examples=80)
    users = users_of(graph)
    expected = [sum(bool(row & other) for other in users) for row in users]
    assert graph.neighborhood_sizes().tolist() == expected


def test_neighborhood_of_many_shared_users() -> None:
    # 300 shared users: a count in eight bits would wrap round to 44, one of 256 to 0.
    for shared in (256, 300):
        graph = AttributionGraph.from_lists([range(shared), range(shared), [shared]])
        assert graph.neighborhood_sizes().tolist() == [2, 2, 1]


def small() -> BoundedGraph:
    graph = AttributionGraph.from_lists([["a"], ["b", "c"], ["c"], ["d", "a"], ["c"]])
    return graph.bound(2, duplicates=True, seed=1)


def test_subset_of_a_torch_dataset() -> None:
    bounded = small()
    dataset = TensorDataset(torch.arange(5) * 10)
    subset = bounded.subset(dataset)
    assert [int(row[0]) for row in subset] == (bounded.rows * 10).tolist()
    with pytest.raises(ValueError, match=r"has 4 examples and the attribution graph 5"):
        bounded.subset(TensorDataset(torch.arange(4)))


def test_subset_of_an_arrow_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    lists = [["a"], ["b", "c"], ["c"], ["d", "a"], ["c"]]
    dataset = datasets.Dataset.from_dict({"users": lists, "text": list("vwxyz")})
    bounded = AttributionGraph.from_dataset(dataset, "users").bound(2, duplicates=True, seed=1)
    subset = bounded.subset(dataset)
    assert isinstance(subset, datasets.Dataset)
    assert subset["text"] == ["vwxyz"[i] for i in bounded.rows]
    of_rows = AttributionGraph.from_dataset(subset, "users")
    assert (of_rows.users, of_rows.edges, of_rows.max_examples) == (
        bounded.graph.users,
        bounded.graph.edges,
        bounded.graph.max_examples,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0 must be at least 1"),
        ({"k": 1.5}, "k=1.5 must be an integer"),
        ({"k": True}, "k=True must be an integer"),
        ({"max_neighbors": 0}, "max_neighbors=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"duplicates": 1}, "duplicates=1 must be True or False"),
    ],
)
def test_bad_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        random_graph(0).bound(**{"k": 2, "seed": 0, **options})


def test_a_detached_graph_cannot_be_bounded() -> None:
    detached = AttributionGraph.from_dict(random_graph(0).to_dict())
    with pytest.raises(ValueError, match="holds no edges"):
        detached.bound(2, seed=0)
