"""Attribution graphs that cannot be: the error names the argument, the value and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

import numpy as np
import pytest
import torch

from dptrain.sampling.users.graph import AttributionGraph

Lists = list[list[Hashable]]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([], "no example"),
        ([["a"], [], ["b"], []], r"example 1 has no user \(2 of 4 examples"),
        (["abc", "d"], "example 0 has a str .*put a single user into a list"),
        ("abc", "must be an iterable with one list of users per example"),
        ([["a"], None], "example 1 has a NoneType"),
        ([["a"], {"a", 1}], "example 1 has a set .*use a list"),
        ([["a"], {frozenset("a"), frozenset("b")}], "example 1 has a set .*use a list"),
        ([["a"], set()], "example 1 has no user"),
        ([["a"], ["b", None]], "example 1: a user id is None"),
        ([["a"], ["b"], [{"name": "c"}]], "example 2: user ids must be hashable.*dict"),
        ([["a"], [float("nan")]], "example 1: a user id is NaN"),
        ([["a"], [object()]], "example 1: .*equal to no other object"),
        ([[torch.tensor(1)], [torch.tensor(1)]], "example 0: .*equal to no other object"),
    ],
)
def test_bad_lists(column: list[list[Hashable]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttributionGraph.from_lists(column)


@pytest.mark.parametrize(
    ("examples", "users", "size", "message"),
    [
        ([], [], None, "no pairs"),
        ([0, 1], ["a"], None, "2 examples and 1 users"),
        ([0, -1], ["a", "b"], None, "example index -1 is out of range"),
        ([0, 3], ["a", "b"], 3, "example index 3 is out of range for dataset_size=3"),
        ([0, 2], ["a", "b"], None, r"example 1 has no user \(1 of 3 examples"),
        ([0, 1], ["a", "b"], 5, r"example 2 has no user \(3 of 5 examples"),
        ([0, 1], ["a", "b"], 0, "dataset_size=0 must be at least 1"),
        ([0.0, 1.0], ["a", "b"], None, "array of example indices"),
        ([[0, 1]], ["a"], None, "array of example indices"),
        ([0, 1], np.array([[1], [2]]), None, "array of user ids"),
        ([1, 0], [["a"], "b"], None, "pair 0: user ids must be hashable"),
        ([0, 1], np.array([0.5, np.nan]), None, "pair 1: a user id is NaN"),
    ],
)
def test_bad_pairs(examples: list[int], users: list[str], size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttributionGraph.from_pairs(examples, users, dataset_size=size)


@pytest.mark.parametrize(
    ("offsets", "members", "message"),
    [
        ([0], [], "no example"),
        ([0, 1, 1, 2], [0, 1], "example 1 has no user"),
        ([0, 1, 2], [0, 2], "user 1 has no example"),
        ([0, 1, 2], [0, 9], "user number that is too large"),
        ([0, 1, 2], [0, -1], "user number that is negative"),
        ([0, 2, 3], [1, 1, 0], "example 0 lists a user twice"),
        ([0, 1, 4], [0, 1, 0, 1], "example 1 lists a user twice"),
        ([0, 1, 3], [0, 1], "must ascend from 0"),
        ([1, 2], [0, 0], "must ascend from 0"),
        ([0, 2, 1, 3], [0, 1, 2], "must ascend from 0"),
        ([0.0, 1.0], [0], "array of integers"),
    ],
)
def test_bad_csr(offsets: list[int], members: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttributionGraph.from_csr(offsets, members)


def test_bad_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict(
        {
            "text": ["a", "b", "c"],
            "empty": [["a"], [], ["b"]],
            "null": [["a"], ["b"], None],
            "hole": [["a"], ["b", None], ["c"]],
            "nested": [[["A", "B"]], [["C", "D"]], [["E", "F"]]],
            "real": [[0.5], [1.5], [0.5]],
        }
    )
    for column, message in (
        ("missing", "column='missing' is not in the data set"),
        ("text", "column='text' holds string, not lists"),
        ("empty", r"example 1 has no user \(1 of 3 examples"),
        ("null", "example 2 has no user"),
        ("hole", "example 1 has a null user id"),
        ("nested", "user ids of type list.*map them to text"),
        ("real", "user ids of type double"),
    ):
        with pytest.raises(ValueError, match=message):
            AttributionGraph.from_dataset(dataset, column)
    with pytest.raises(ValueError, match="no example"):
        AttributionGraph.from_dataset(dataset.select([]), "empty")
    with pytest.raises(ValueError, match="has no such column"):
        AttributionGraph.from_dataset({"authors": [["a"]]}, "users")
    with pytest.raises(ValueError, match="one split"):
        AttributionGraph.from_dataset(datasets.DatasetDict(train=dataset), "empty")


@pytest.mark.parametrize("rows", [[], [3], [-1], [0.5]])
def test_bad_selection(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="rows"):
        AttributionGraph.from_lists([["a"], ["b"], ["a"]]).select(rows)


def test_impossible_facts() -> None:
    facts = {"examples": 3, "users": 2, "edges": 4, "max_examples": 2, "fingerprint": "x"}
    AttributionGraph(**facts)
    for change in ({"edges": 2}, {"edges": 5}, {"max_examples": 4}, {"examples": 0}):
        with pytest.raises(ValueError, match="AttributionGraph"):
            AttributionGraph(**{**facts, **change})


@dataclasses.dataclass(frozen=True)
class Person:
    name: str
    born: float


class Plain:
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: ("smith", float("nan")),
        lambda: (("smith", (float("nan"),)), 3),
        lambda: frozenset({"smith", float("nan")}),
        lambda: Person("smith", float("nan")),
        lambda: ("smith", None),
        lambda: ("smith", Plain()),
        lambda: ("smith", torch.tensor(3)),
    ],
)
def test_ids_that_are_unequal_inside(make: Callable[[], Hashable]) -> None:
    """Fifty such ids look like fifty people, each with one example: k would be 50 times too low."""
    with pytest.raises(ValueError, match=r"user id"):
        AttributionGraph.from_lists([[make()] for _ in range(50)])
    with pytest.raises(ValueError, match=r"user id"):
        AttributionGraph.from_pairs(list(range(50)), [make() for _ in range(50)])


def test_ids_made_of_parts_are_one_user() -> None:
    ids: list[Callable[[], Hashable]] = [
        lambda: ("smith", "j", 3),
        lambda: Person("smith", 1970.0),
        lambda: frozenset({"a", "b"}),
    ]
    for make in ids:
        graph = AttributionGraph.from_lists([[make()] for _ in range(5)])
        assert (graph.users, graph.max_examples) == (1, 5)
