"""What groups of examples have spent: the table, its file, and what it refuses."""

import csv
import math
import stat

import numpy as np
import pytest
import torch

from tests.helpers.individual_reports import report

LOSSES = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_groups_by_index_and_by_mask():
    groups = {"ill": [5, 0, 1], "healthy": np.array([0, 0, 1, 1, 0, 0], dtype=bool)}
    for losses in (LOSSES, LOSSES.tolist(), torch.tensor(LOSSES, requires_grad=True)):
        ill, healthy = report().by_group(groups, losses).rows
        assert (ill.group, ill.size, healthy.group, healthy.size) == ("ill", 3, "healthy", 2)
        assert ill.mean_epsilon == pytest.approx((0.1 + 0.2 + 0.6) / 3)
        assert healthy.mean_epsilon == pytest.approx(0.35)
        assert (ill.share_active, healthy.share_active) == (pytest.approx(2 / 3), 1.0)
        assert (ill.mean_loss, healthy.mean_loss) == (3.0, 3.5)
    tensors = {"ill": torch.tensor([5, 0, 1]), "healthy": torch.tensor([0, 0, 1, 1, 0, 0]).bool()}
    assert report().by_group(tensors, LOSSES) == report().by_group(groups, LOSSES)


def test_losses_of_examples_in_no_group_are_not_needed():
    losses = np.where(np.arange(6) < 2, LOSSES, math.nan)
    (row,) = report().by_group({"a": [0, 1]}, losses).rows
    assert row.mean_loss == 1.5
    (row,) = report().by_group({"a": [0, 1]}).rows
    assert row.mean_loss is None


@pytest.mark.parametrize(
    ("groups", "losses", "words"),
    [
        ({}, None, "name at least one"),
        ({"a\nb": [0]}, None, "line break"),
        ({"a": []}, None, r"groups\['a'\] is empty"),
        ({"a": np.zeros(6, dtype=bool)}, None, r"groups\['a'\] selects no example"),
        ({"a": np.ones(5, dtype=bool)}, None, "mask of 5 entries, but there are 6"),
        (
            {"a": [0, 6, -1]},
            None,
            "contains 6, -1, which do not exist: examples are numbered 0 to 5",
        ),
        ({"a": [0, 1, 1]}, None, "example 1 twice"),
        ({"a": [0.5]}, None, "float64"),
        ({"a": [[0], [1]]}, None, "shape"),
        ({"a": [0]}, LOSSES[:5], r"losses has shape \(5,\)"),
        ({"a": [0]}, LOSSES[:, None], "losses has shape"),
        (
            {"fine": [0], "bad": [0, 2, 3]},
            np.where(np.isin(np.arange(6), (2, 3)), math.nan, LOSSES),
            "NaN for example 2, 3 of group 'bad'",
        ),
    ],
)
def test_wrong_groups_are_refused(groups, losses, words):
    with pytest.raises(ValueError, match=words):
        report().by_group(groups, losses)


def test_an_error_does_not_list_thousands_of_examples():
    with pytest.raises(ValueError, match="and 995 more") as raised:
        report().by_group({"a": np.arange(6, 1006)})
    assert len(str(raised.value)) < 200


def test_the_table_is_marked(tmp_path):
    table = report().by_group({"a|b c": [0, 1], "d, e": [4]}, LOSSES)
    assert str(table).startswith("not for release")
    assert "a/b c" in table.to_markdown()
    assert {line.count("|") for line in table.to_markdown().splitlines()} == {6}
    assert "0.15" in str(table)
    assert "0.15" not in repr(table)
    path = table.save(tmp_path)
    assert "NOT_FOR_RELEASE" in path.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open(encoding="utf-8", newline="") as file:
        assert file.readline().startswith("# NOT FOR RELEASE")
        assert file.readline() == "# delta = 1e-05\n"
        rows = list(csv.DictReader(file))
    assert [row["group"] for row in rows] == ["a|b c", "d, e"]
    assert [float(row["mean_epsilon"]) for row in rows] == [r.mean_epsilon for r in table.rows]
    assert [float(row["mean_loss"]) for row in rows] == [1.5, 5.0]
    assert {row["note"] for row in rows} == {"not for release"}
    with pytest.raises(ValueError, match="already exists"):
        table.save(tmp_path)


def test_a_table_without_losses_has_no_such_column(tmp_path):
    table = report().by_group({"a": [0, 1]})
    assert "loss" not in table.to_markdown()
    with table.save(tmp_path).open(encoding="utf-8", newline="") as file:
        assert next(csv.DictReader(file.readlines()[2:]))["mean_loss"] == ""
