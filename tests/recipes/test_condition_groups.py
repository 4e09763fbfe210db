"""Groups of rows by their conditions."""

from __future__ import annotations

import re

import pytest
import torch

from recipes.data.multilabel import ConditionGroups
from recipes.data.phenotypes import INFARCTION, PHENOTYPES, PNEUMONIA
from recipes.data.phenotyping import phenotyping
from tests.helpers.phenotyping_files import write_parts

SMALL = ConditionGroups(conditions=(PNEUMONIA, INFARCTION), size=8, test_size=4)


def _fits(name, labels):
    if name == "no condition":
        return not labels.any()
    condition = name.removeprefix("without ").removeprefix("with ")
    return bool(labels[PHENOTYPES.index(condition)]) == name.startswith("with ")


def test_groups_are_the_papers(tmp_path):
    write_parts(tmp_path)
    data = phenotyping(tmp_path, groups=SMALL)
    for rows, groups, size in (
        (data.train, data.train_groups, 8),
        (data.test, data.test_groups, 4),
    ):
        assert list(groups) == [
            "no condition",
            f"with {PNEUMONIA}",
            f"without {PNEUMONIA}",
            f"with {INFARCTION}",
            f"without {INFARCTION}",
        ]
        members = torch.cat(list(groups.values()))
        assert len(members.unique()) == len(members) == 5 * size  # disjoint
        for name, indices in groups.items():
            assert all(_fits(name, labels) for labels in rows.tensors[1][indices])


def test_groups_take_what_there_is_and_depend_on_the_seed():
    labels = torch.tensor([[0, 0]] * 5 + [[1, 0]] * 3 + [[0, 1]] * 3, dtype=torch.float32)

    def draw(**changes):
        stated = {"conditions": ("a",), "size": 4, "seed": 0, **changes}
        return ConditionGroups(**stated).draw(labels, ("a", "b"), test=False)

    groups = {name: rows.tolist() for name, rows in draw().items()}
    assert len(groups["no condition"]) == 4
    assert set(groups["no condition"]) <= set(range(5))
    assert groups["with a"] == [5, 6, 7]
    # The rows without a that are left: three with b, one with no label.
    assert set(groups["without a"]) == set(range(11)) - set(groups["no condition"]) - {5, 6, 7}
    drawn = {tuple(draw(seed=seed)["no condition"].tolist()) for seed in range(20)}
    assert len(drawn) == 5  # each of the five rows is left out by some seed
    assert draw()["no condition"].tolist() == groups["no condition"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conditions": ("a", "c")}, "'c' is no label; the labels are a, b"),
        ({"conditions": ("a", "a")}, "each condition once"),
        ({"size": 0}, "size=0"),
        ({"test_size": 0}, "test_size=0"),
        ({"conditions": ("a", "b"), "size": 11}, "left for the group 'with b'.*lower size=11"),
    ],
)
def test_impossible_groups(changes, message):
    labels = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=torch.float32)
    with pytest.raises(ValueError, match=re.compile(message)):
        ConditionGroups(**{"conditions": ("a", "b"), **changes}).draw(
            labels, ("a", "b"), test=False
        )
