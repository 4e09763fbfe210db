"""scikit-learn's handwritten digits (1,797 real 8×8 images), ready for a convolutional net."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

from recipes.data.split import Split

LARGEST_VALUE = 16.0  # by the data set's description, not by looking at the images


def digits(*, image_size: int = 32, test_fraction: float = 0.2, seed: int = 0) -> Split:
    """The digits, resized bilinearly to ``image_size`` and split with equal class shares.

    Scaling uses the public range 0 to 16, never statistics of the training set, which would leak
    past the guarantee.

    Args:
        image_size: height and width in pixels.
        test_fraction: share of the images held out, in (0, 1).
        seed: of the split; public, it only names which images are held out.

    Raises:
        ValueError: if a value is out of range.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction={test_fraction}: must lie strictly between 0 and 1")
    if image_size < 1:
        raise ValueError(f"image_size={image_size}: must be at least 1 pixel")
    raw = load_digits()
    images = torch.from_numpy(raw.images).float().unsqueeze(1) / LARGEST_VALUE * 2 - 1
    images = torch.nn.functional.interpolate(
        images, size=(image_size, image_size), mode="bilinear", align_corners=False
    )
    labels = torch.from_numpy(raw.target).long()
    train, test = train_test_split(
        range(len(labels)), test_size=test_fraction, random_state=seed, stratify=raw.target
    )
    return Split(
        train=TensorDataset(images[train], labels[train]),
        test=TensorDataset(images[test], labels[test]),
        channels=1,
        classes=10,
        image_size=image_size,
    )
