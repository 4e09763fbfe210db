"""Steps that all readers of images share: checks, and the split into two parts."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from recipes.data.augment import Views
from recipes.data.images import Images
from recipes.data.split import Split

# uint8 pixels (images, channels, height, width) and int64 labels (images,)
Part = tuple[torch.Tensor, torch.Tensor]
# What a reader tells before the images are decoded, which takes long: how many there are to train
# on, and their height and width. Whoever hears that they do not fit the run raises ValueError.
Foreseen = Callable[[int, int], None]

_log = logging.getLogger(__name__)


def unheard(examples: int, image_size: int) -> None:
    """What a reader tells where nobody listens."""


def image_split(train: Part, test: Part, *, classes: int, views: Views) -> Split:
    """The split of two parts of square images; only the training part is augmented."""
    _, channels, _, image_size = train[0].shape
    return Split(
        train=Images(*train, transform=views.of(image_size), views=views.count),
        test=Images(*test),
        channels=channels,
        classes=classes,
        image_size=image_size,
    )


def checked_labels(labels: Sequence[object], where: str, *, classes: int = 10) -> torch.Tensor:
    """Labels as int64.

    Raises:
        ValueError: naming the first that is no integer from 0 to ``classes`` - 1.
    """
    for row, label in enumerate(labels):
        number = isinstance(label, int | np.integer) and not isinstance(label, bool)
        if not (number and 0 <= label < classes):  # type: ignore[operator]
            raise ValueError(
                f"{where}: label {label!r} of image {row} is no class from 0 to {classes - 1}"
            )
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
