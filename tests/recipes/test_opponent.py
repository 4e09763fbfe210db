"""Opponent colors, and that features of color images are of them."""

from __future__ import annotations

import math

import torch
from torch.utils.data import TensorDataset

from recipes.data.images import Images
from recipes.data.opponent import opponent
from recipes.data.scattered import scattered
from recipes.data.scattered_layout import FeatureLayout
from recipes.data.scattering import scattering
from recipes.data.split import Split


def test_a_turn_of_the_colors() -> None:
    """Lengths and angles stay, so that no color counts more than before."""
    images = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    found = opponent(images)
    assert found.shape == images.shape
    assert torch.allclose(found.square().sum(1), images.square().sum(1), atol=1e-12)
    basis = opponent(torch.eye(3, dtype=torch.float64)[..., None, None])[..., 0, 0]
    assert torch.allclose(basis @ basis.T, torch.eye(3, dtype=torch.float64), atol=1e-12)


def test_grey_has_brightness_alone() -> None:
    found = opponent(torch.full((1, 3, 2, 2), 0.5, dtype=torch.float64))
    assert torch.allclose(found[:, 0], torch.tensor(math.sqrt(0.75), dtype=torch.float64))
    assert found[:, 1:].abs().max() < 1e-15


def test_red_against_green_and_both_against_blue() -> None:
    warm = opponent(torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)).flatten()
    cold = opponent(torch.tensor([0.0, 0.0, 1.0]).view(1, 3, 1, 1)).flatten()
    assert all(warm[1:] > 0)
    assert cold[1] == 0
    assert cold[2] < 0


def test_other_channels_are_left_alone() -> None:
    images = torch.randn(2, 1, 4, 4)
    assert opponent(images) is images


def test_features_of_color_images_are_of_opponents() -> None:
    pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(6) % 2
    split = Split(Images(pixels, labels), Images(pixels, labels), 3, 2, 8)
    assert isinstance(train := scattered(split).train, TensorDataset)
    layout = FeatureLayout(3)
    expected = layout.normalized(scattering(opponent(pixels / 127.5 - 1)))
    assert torch.allclose(train.tensors[0], expected, atol=1e-5)
    other = layout.normalized(scattering(pixels / 127.5 - 1))
    assert (train.tensors[0] - other).abs().max() > 0.1
