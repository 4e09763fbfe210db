"""The macro-averaged area under the ROC curve."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recipes.macro_auc import macro_auc, single_class

NAMES = ("a", "b", "c")


def _area(scores, labels):
    """The share of pairs that are ordered rightly, ties counted half."""
    pairs = [
        (float(high > low) + float(high == low) / 2)
        for high in scores[labels == 1]
        for low in scores[labels == 0]
    ]
    return float(np.mean(pairs))


def test_areas_are_shares_of_ordered_pairs():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(60, 3, generator=generator) < 0.3).float()
    scores = (torch.randn(60, 3, generator=generator) + labels).round(decimals=1)  # with ties
    found = macro_auc(scores, labels, NAMES)
    expected = [_area(scores[:, k].numpy(), labels[:, k].numpy()) for k in range(3)]
    assert list(found.by_label) == list(NAMES)
    assert list(found.by_label.values()) == pytest.approx(expected)
    assert found.mean == pytest.approx(np.mean(expected))
    assert found.left_out == ()


def test_labels_of_one_class_are_left_out_by_name():
    labels = torch.tensor([[0, 1, 0], [0, 1, 1], [0, 1, 1.0]])
    scores = torch.tensor([[0, 0, 0.9], [0, 0, 0.1], [0, 0, 0.95]])
    found = macro_auc(scores, labels, NAMES)
    assert found.left_out == ("a", "b")
    assert found.by_label == {"c": 0.5}
    assert found.mean == 0.5
    assert single_class(labels, NAMES) == ("a", "b")


def test_no_label_at_all_is_refused():
    with pytest.raises(ValueError, match=r"of the 2 examples.*not defined"):
        macro_auc(torch.zeros(2, 3), torch.ones(2, 3), NAMES)


def test_scores_that_are_no_numbers_have_no_area():
    labels = torch.tensor([[0, 1, 0], [1, 0, 1.0]])
    scores = torch.tensor([[0, math.nan, 0], [1, 0, 1.0]])
    found = macro_auc(scores, labels, NAMES)
    assert found.by_label["a"] == 1
    assert math.isnan(found.by_label["b"])
    assert math.isnan(found.mean)


def test_shapes_have_to_agree():
    with pytest.raises(ValueError, match="one score a label"):
        macro_auc(torch.zeros(2, 2), torch.zeros(2, 3), NAMES)
