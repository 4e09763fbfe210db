"""The digits as a table with several labels a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from recipes.data.digit_conditions import digit_conditions
from recipes.data.multilabel import ConditionGroups


@pytest.fixture(scope="module")
def data():
    return digit_conditions()


def _digits(rows):
    """Which digit each row shows, from its pixels."""
    raw = load_digits()
    known = {
        pixels.tobytes(): digit
        for pixels, digit in zip(raw.data.astype(np.int64), raw.target, strict=True)
    }
    pixels = ((rows.tensors[0] + 1) * 8).round().to(torch.int64).numpy()
    return np.array([known[row.tobytes()] for row in pixels])


def test_features_are_the_pixels_by_their_public_range(data):
    assert len(data.features) == data.train.tensors[0].shape[1] == 64
    assert (len(data.train), len(data.test)) == (1437, 360)
    both = torch.cat([data.train.tensors[0], data.test.tensors[0]]).numpy()
    raw = load_digits().data / 8 - 1  # 0 to 16 becomes -1 to 1

    def ordered(rows):
        return rows[np.lexsort(rows.T)]

    assert np.allclose(ordered(both), ordered(raw.astype(np.float32)), atol=1e-6)


def test_labels_are_facts_about_the_digit(data):
    def prime(n):
        return n > 1 and all(n % k for k in range(2, n))

    facts = {
        **{str(digit): lambda n, digit=digit: n == digit for digit in range(1, 10)},
        "odd": lambda n: n % 2 == 1,
        "prime": prime,
        "power of two": lambda n: n > 0 and n & (n - 1) == 0,
        "above four": lambda n: n > 4,
    }
    assert data.labels == tuple(facts)
    for rows in (data.train, data.test):
        shown = _digits(rows)
        expected = [[float(fact(int(n))) for fact in facts.values()] for n in shown]
        assert rows.tensors[1].tolist() == expected


def test_zeros_are_the_rows_without_a_condition(data):
    for rows in (data.train, data.test):
        assert np.array_equal(rows.tensors[1].sum(1).numpy() == 0, _digits(rows) == 0)


def test_groups(data):
    for rows, groups, size in (
        (data.train, data.train_groups, 100),
        (data.test, data.test_groups, 30),
    ):
        assert list(groups) == [
            "no condition",
            "with 8",
            "without 8",
            "with prime",
            "without prime",
        ]
        members = torch.cat(list(groups.values()))
        assert len(members) == len(members.unique()) == 5 * size
        shown = _digits(rows)
        assert set(shown[groups["no condition"]]) == {0}
        assert set(shown[groups["with 8"]]) == {8}
        assert 8 not in shown[groups["without 8"]]
        assert set(shown[groups["with prime"]]) == {2, 3, 5, 7}
        assert not {2, 3, 5, 7} & set(shown[groups["without prime"]])


def test_split_and_groups_are_the_same_for_the_same_seeds_only(data):
    again = digit_conditions()
    assert again.train.fingerprint == data.train.fingerprint
    assert digit_conditions(seed=1).train.fingerprint != data.train.fingerprint
    other = ConditionGroups(conditions=("8", "prime"), size=100, test_size=30, seed=1)
    groups = digit_conditions(groups=other).train_groups
    assert not torch.equal(groups["with prime"], data.train_groups["with prime"])
    assert torch.equal(again.train_groups["with prime"], data.train_groups["with prime"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"groups": ConditionGroups(conditions=("eight",))}, "'eight' is no label"),
        (
            {"groups": ConditionGroups(conditions=("8", "7"), size=2000)},
            "no training row is left for",
        ),
    ],
)
def test_impossible_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        digit_conditions(**changes)
