"""The VGG of the literature: no normalization layer."""

from __future__ import annotations

import itertools

import pytest
import torch

from recipes.models import vgg


def test_without_groups_it_is_the_vgg_of_the_literature():
    model = vgg(in_channels=3, classes=10, groups=0)
    kinds = [type(layer).__name__ for layer in model]
    block = ["Conv2d", "ReLU", "Conv2d", "ReLU", "MaxPool2d"]
    assert kinds == [*block, *block, *block, "Flatten", "Linear", "ReLU", "Linear"]
    # Convolutions 3-32-32-64-64-128-128 of 3×3 with biases, then 128·4·4-128-10.
    widths = [3, 32, 32, 64, 64, 128, 128]
    convolutions = sum(a * b * 9 + b for a, b in itertools.pairwise(widths))
    dense = (128 * 16 + 1) * 128 + 129 * 10
    assert sum(p.numel() for p in model.parameters()) == convolutions + dense
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_group_normalization_starts_from_the_same_weights():
    """It draws nothing, so that runs with and without it compare."""
    torch.manual_seed(0)
    plain = vgg(in_channels=1, classes=10, image_size=16, groups=0)
    torch.manual_seed(0)
    grouped = vgg(in_channels=1, classes=10, image_size=16)
    ours = [p for p in plain.parameters() if p.dim() > 1]
    theirs = [p for p in grouped.parameters() if p.dim() > 1]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": -1}, "groups=-1.*0 for none"),
        ({"groups": 0, "channels": [0]}, r"channels=\[0\]"),
        ({"groups": 0, "channels": [4, -2]}, r"not \[-2\]"),
    ],
)
def test_impossible_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        vgg(in_channels=1, classes=10, **changes)
