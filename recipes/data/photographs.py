"""What CIFAR-10 and CINIC-10 have in common: ten classes of 32×32 colour photographs."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence

import numpy as np
import torch

from recipes.data.augment import training_transform
from recipes.data.images import Images
from recipes.data.split import Split

IMAGE_SIZE = 32
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

Part = tuple[torch.Tensor, torch.Tensor]  # uint8 pixels (N, 3, 32, 32) and int64 labels (N,)

_log = logging.getLogger(__name__)


def photograph_split(train: Part, test: Part, *, augment: bool, views: int) -> Split:
    """The split of two parts; only the training part is augmented."""
    transform = training_transform(IMAGE_SIZE, augment=augment, views=views)
    return Split(
        train=Images(*train, transform=transform, views=views),
        test=Images(*test),
        channels=3,
        classes=len(CLASSES),
        image_size=IMAGE_SIZE,
    )


def checked_labels(labels: Sequence[object], where: str) -> torch.Tensor:
    """Labels as int64.

    Raises:
        ValueError: naming the first that is no integer from 0 to 9.
    """
    for row, label in enumerate(labels):
        number = isinstance(label, int | np.integer) and not isinstance(label, bool)
        if not (number and 0 <= label < len(CLASSES)):  # type: ignore[operator]
            raise ValueError(f"{where}: label {label!r} of image {row} is no class from 0 to 9")
    return torch.tensor(labels, dtype=torch.int64)


def existing_folder(root: str | pathlib.Path) -> pathlib.Path:
    """``root`` as a path.

    Raises:
        FileNotFoundError: if there is no such folder.
    """
    folder = pathlib.Path(root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    return folder


def note_size(name: str, part: Part, expected: int) -> Part:
    """The part itself; a note is logged if it has another number of images than published."""
    if len(part[1]) != expected:
        _log.warning("%s has %d images here, not %d as published", name, len(part[1]), expected)
    return part
