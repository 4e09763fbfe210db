"""Statistics of bounded graphs: by definition, and batch sizes by enumeration of all draws."""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics

import numpy as np
import pytest

from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.graph_statistics import Distribution
from dptrain.sampling.users.neighbors import expected_batch_size

LISTS = [["a", "b"], ["b", "c"], ["c"], ["d"]]


@pytest.mark.parametrize("data", [[3], [1, 4], [5, 1, 1], [2, 2, 9, 3], [0, 0, 0, 7, 7]])
def test_distribution(data: list[int]) -> None:
    distribution = Distribution.of(np.array(data))
    assert distribution.mean == pytest.approx(statistics.mean(data))
    assert distribution.median == statistics.median(data)
    assert distribution.largest == max(data)
    counts = {str(value): data.count(value) for value in set(data)}
    assert distribution.to_dict()["counts"] == counts


@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize("p", [0.1, 0.6, 1.0])
def test_expected_batch_size_by_enumeration(p: float, b: int) -> None:
    """The mean size of the batch of step b, over all draws S_1..S_b of every example."""
    near = [[f for f, theirs in enumerate(LISTS) if set(users) & set(theirs)] for users in LISTS]
    n = len(LISTS)
    expected = 0.0
    for draws in itertools.product(itertools.product((0, 1), repeat=n), repeat=b):
        heads = sum(map(sum, draws))
        weight = p**heads * (1 - p) ** (n * b - heads)
        *past, last = draws
        used = [e for e in range(n) if last[e] and not any(s[f] for s in past for f in near[e])]
        expected += weight * len(used)
    graph = AttributionGraph.from_lists(LISTS)
    sizes = graph.neighborhood_sizes()
    assert expected_batch_size(sizes, probability=p, min_sep=b) == pytest.approx(expected)
    # The statistics hold the same graph by its distinct sizes.
    kept = graph.bound(2, seed=0).statistics()
    assert kept.expected_batch_size(probability=p, min_sep=b) == pytest.approx(expected)


def test_statistics() -> None:
    rng = np.random.default_rng(3)
    lists = [rng.integers(0, 12, size=rng.integers(1, 4)).tolist() for _ in range(50)]
    graph = AttributionGraph.from_lists(lists)
    bounded = graph.bound(3, duplicates=True, max_neighbors=6, seed=4)
    found = bounded.statistics(progress=False)
    kept = [set(lists[i]) for i in bounded.rows]
    per_user = [sum(u in row for row in kept) for u in set().union(*kept)]
    near = [sum(bool(row & other) for other in kept) for row in kept]
    assert (found.k, found.max_neighbors) == (3, 6)
    assert (found.examples_before, found.users_before) == (50, 12)
    assert (found.examples, found.examples_distinct) == (len(kept), len(set(bounded.rows)))
    assert (found.users, found.users_at_bound) == (len(per_user), per_user.count(3))
    before = [sum(u in row for row in lists) for u in range(12)]
    for distribution, data in (
        (found.examples_per_user, per_user),
        (found.examples_per_user_before, before),
        (found.users_per_example, [len(row) for row in kept]),
        (found.users_per_example_before, [len(set(row)) for row in lists]),
        (found.neighbors, near),
    ):
        assert distribution.to_dict() == Distribution.of(np.array(data)).to_dict()
    designs = [(0.01, 1), (0.25, 4)]
    value = json.loads(json.dumps(found.to_dict(designs)))
    assert value["examples_per_user"]["max"] == max(per_user)
    assert value["expected_batch_sizes"][0] == {
        "probability": 0.01,
        "min_sep": 1,
        "batch_size": pytest.approx(0.01 * len(kept)),
    }
    table = found.table(designs)
    assert f"{len(set(bounded.rows)) / 50:.1%} kept" in table
    assert f"{value['expected_batch_sizes'][1]['batch_size']:.6g}" in table
    assert "at the bound 3" in table


@pytest.mark.parametrize(("p", "b"), [(0.0, 2), (1.5, 2), (0.5, 0)])
def test_bad_designs(p: float, b: int) -> None:
    with pytest.raises(ValueError, match="expected_batch_size"):
        expected_batch_size(np.array([1, 2]), probability=p, min_sep=b)


@pytest.mark.parametrize("users", [3, 200])
def test_plot(users: int, tmp_path: pathlib.Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    from dptrain.reporting.plots import plot_graph

    graph = AttributionGraph.from_lists([i % users, "all"] for i in range(120))
    found = graph.bound(80, max_neighbors=100, seed=0).statistics()
    plot_graph(found, tmp_path / "new" / "graph.png")
    assert image.imread(tmp_path / "new" / "graph.png").std() > 0
