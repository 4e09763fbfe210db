"""Attribution graphs: every way of building one gives the same edges, and bad input is named."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Hashable

import numpy as np
import pytest
import torch

from dptrain.sampling.users import graph_edges
from dptrain.sampling.users import graph_sources as graph_arrow
from dptrain.sampling.users import graph_sources as graph_build
from dptrain.sampling.users.graph import AttributionGraph

Lists = list[list[Hashable]]


def random_lists(rng: np.random.Generator, examples: int, users: int) -> Lists:
    """Lists of one to four ids, some repeated within a list."""
    return [
        [f"user {u}" for u in rng.integers(0, users, size=rng.integers(1, 5))]
        for _ in range(examples)
    ]


def sets_of(graph: AttributionGraph) -> list[set[int]]:
    """The users of each example, read off the rows one at a time."""
    return [
        set(graph.members[graph.offsets[e] : graph.offsets[e + 1]].tolist())
        for e in range(graph.examples)
    ]


def named(lists: Lists) -> list[set[int]]:
    """The same by definition: numbers in order of first appearance."""
    names: list[Hashable] = []
    for row in lists:
        names += [user for user in dict.fromkeys(row) if user not in names]
    return [{names.index(user) for user in row} for row in lists]


@pytest.fixture(params=range(4))
def lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lists:
    # Chunks of a few rows, so that their seams are within these tests' data.
    monkeypatch.setattr(graph_build, "EXAMPLES", 7)
    monkeypatch.setattr(graph_arrow, "READ", 7)
    monkeypatch.setattr(graph_arrow, "IDS", 30)
    monkeypatch.setattr(graph_edges, "CHUNK", 5)
    rng = np.random.default_rng(request.param)
    return random_lists(rng, examples=40, users=(1, 5, 30, 200)[request.param])


def test_lists(lists: Lists) -> None:
    graph = AttributionGraph.from_lists(lists)
    sets = sets_of(graph)
    assert sets == named(lists)
    assert graph.examples == len(lists)
    assert graph.users == len(set().union(*sets))
    assert graph.edges == sum(map(len, sets))  # an id twice in a list is one edge
    assert graph.max_examples == max(sum(u in row for row in sets) for u in range(graph.users))
    assert graph.offsets.dtype == np.int64
    assert graph.members.dtype == np.int32
    for e in range(graph.examples):
        row = graph.members[graph.offsets[e] : graph.offsets[e + 1]]
        assert (np.diff(row) > 0).all()
    with pytest.raises(ValueError, match="read-only"):
        graph.members[0] = 1


def test_any_iterable_once(lists: Lists) -> None:
    graph = AttributionGraph.from_lists(lists)
    stream = ((user for user in row) for row in lists)
    assert AttributionGraph.from_lists(stream) == graph
    numbers = [np.array([int(u.split()[1]) for u in row]) for row in lists]  # type: ignore[union-attr]
    assert AttributionGraph.from_lists(numbers) == graph
    assert AttributionGraph.from_lists([torch.from_numpy(row) for row in numbers]) == graph


def test_pairs(lists: Lists) -> None:
    graph = AttributionGraph.from_lists(lists)
    examples = np.repeat(np.arange(len(lists)), [len(row) for row in lists])
    users = [user for row in lists for user in row]
    numbers = np.array([int(str(user).split()[1]) for user in users])
    assert AttributionGraph.from_pairs(examples, users) == graph
    assert AttributionGraph.from_pairs(examples.tolist(), numbers.tolist()) == graph
    assert AttributionGraph.from_pairs(examples, np.array(users, dtype=object)) == graph
    # Mixed up, but the order within an example stays: the numbers are those of first appearance.
    mixed = np.argsort(np.random.default_rng(0).random(len(lists))[examples], kind="stable")
    for ids in (numbers, numbers.astype(np.uint16), np.array(users)):
        assert AttributionGraph.from_pairs(examples[mixed], ids[mixed]) == graph


def test_dataset(lists: Lists) -> None:
    datasets = pytest.importorskip("datasets")
    graph = AttributionGraph.from_lists(lists)
    dataset = datasets.Dataset.from_dict({"authors": lists, "other": list(range(len(lists)))})
    assert AttributionGraph.from_dataset(dataset, "authors") == graph
    assert AttributionGraph.from_dataset({"authors": lists}, "authors") == graph
    rows = np.random.default_rng(1).integers(0, len(lists), size=60)
    mapped = AttributionGraph.from_dataset(dataset.select(rows), "authors")
    assert mapped == AttributionGraph.from_lists([lists[i] for i in rows])
    shuffled = dataset.shuffle(seed=3)
    assert AttributionGraph.from_dataset(shuffled, "authors") == AttributionGraph.from_lists(
        shuffled["authors"]
    )
    sliced = dataset.select(range(11, 31))  # contiguous: arrow offsets that do not begin at 0
    assert AttributionGraph.from_dataset(sliced, "authors") == AttributionGraph.from_lists(
        lists[11:31]
    )


@pytest.mark.parametrize("kind", ["int64", "large_string", "dictionary", "fixed", "large_list"])
def test_arrow_types(kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    lists: Lists = [[3, 1], [1, 1], [2, 3], [0, 7]]
    text: Lists = [[str(user) for user in row] for row in lists]
    array = {
        "int64": lambda: pa.array(lists),
        "large_string": lambda: pa.array(text, type=pa.list_(pa.large_string())),
        "dictionary": lambda: pa.array(text, type=pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        "fixed": lambda: pa.array(lists, type=pa.list_(pa.int64(), 2)),
        "large_list": lambda: pa.array(text, type=pa.large_list(pa.string())),
    }[kind]()
    try:
        dataset = datasets.Dataset(pa.table({"users": array}))
    except (ValueError, NotImplementedError) as error:  # what the package itself cannot hold
        pytest.skip(f"datasets: {error}")
    assert AttributionGraph.from_dataset(dataset, "users") == AttributionGraph.from_lists(lists)


def test_csr(lists: Lists) -> None:
    graph = AttributionGraph.from_lists(lists)
    assert AttributionGraph.from_csr(graph.offsets, graph.members) == graph
    assert AttributionGraph.from_csr([0, 2, 3], [1, 0, 1]) == AttributionGraph.from_lists(
        [["a", "b"], ["b"]]
    )


def test_by_user(lists: Lists) -> None:
    graph = AttributionGraph.from_lists(lists)
    sets = sets_of(graph)
    offsets, examples = graph.by_user()
    for user in range(graph.users):
        owned = [e for e in range(graph.examples) if user in sets[e]]
        assert examples[offsets[user] : offsets[user + 1]].tolist() == owned
        assert graph.examples_per_user()[user] == len(owned)
    assert graph.users_per_example().tolist() == [len(row) for row in sets]
    assert graph.is_disjoint == all(len(row) == 1 for row in sets)


def test_disjoint_is_about_examples() -> None:
    assert AttributionGraph.from_lists([["a"], ["b"], ["a", "a"]]).is_disjoint
    assert not AttributionGraph.from_lists([["a"], ["b"], ["a", "b"]]).is_disjoint


def test_select(lists: Lists) -> None:
    graph = AttributionGraph.from_lists(lists)
    rows = np.random.default_rng(2).integers(0, graph.examples, size=15)
    part = graph.select(rows)
    before, after = [sets_of(graph)[i] for i in rows], sets_of(part)
    number = {user: i for i, user in enumerate(sorted(set().union(*before)))}
    assert after == [{number[user] for user in row} for row in before]
    assert part.users == len(number)
    assert graph.select(np.arange(graph.examples)) == graph


def test_fingerprint_tells_graphs_apart() -> None:
    seen = {
        AttributionGraph.from_csr(offsets, members).fingerprint
        for offsets, members in (
            ([0, 1, 2], [0, 1]),
            ([0, 1, 2], [1, 0]),
            ([0, 1, 2], [0, 0]),
            ([0, 2], [0, 1]),
            ([0, 1, 2, 3], [0, 1, 0]),
            ([0, 2, 3], [0, 1, 0]),
        )
    }
    assert len(seen) == 6


def test_json_and_attach() -> None:
    graph = AttributionGraph.from_lists([["a", "b"], ["b"]])
    detached = AttributionGraph.from_dict(graph.to_dict())
    assert detached == graph
    assert not detached.attached
    assert not detached.is_disjoint
    with pytest.raises(ValueError, match="holds no edges"):
        detached.by_user()
    assert detached.attach(graph) is graph
    other = AttributionGraph.from_lists([["a", "b"], ["a"]])
    with pytest.raises(ValueError, match="has changed"):
        detached.attach(other)
    # The fingerprint alone is not enough: an accountant reads the facts.
    with pytest.raises(ValueError, match="has changed"):
        dataclasses.replace(detached, max_examples=1, users=3).attach(graph)
    copy = pickle.loads(pickle.dumps(graph))
    assert copy == graph
    np.testing.assert_array_equal(copy.members, graph.members)


@pytest.mark.slow
def test_sets_of_users_are_read_alike_in_every_process() -> None:
    """Python orders a set of texts anew in every process; the graph must not follow."""
    code = (
        "from dptrain.sampling.users.graph import AttributionGraph as Graph\n"
        "rows = [set('abcdefgh'), {'x', 'c'}, frozenset({'y', 'a', 'z'})]\n"
        "print(Graph.from_lists(rows).fingerprint)"
    )
    root = pathlib.Path(__file__).parents[3]
    prints = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    sorted_lists = AttributionGraph.from_lists([list("abcdefgh"), ["c", "x"], ["a", "y", "z"]])
    assert prints == [sorted_lists.fingerprint] * 2
    assert AttributionGraph.from_lists([{3, 1}, {1}]) == AttributionGraph.from_lists([[1, 3], [1]])
