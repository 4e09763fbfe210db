"""What every reader of the recipes hands over."""

from __future__ import annotations

import dataclasses

from torch.utils.data import TensorDataset

from recipes.data.images import Images


@dataclasses.dataclass(frozen=True)
class Split:
    """A training set, a held-out test set, and what a model must know about them.

    Images are float32 of shape (channels, image_size, image_size) in [-1, 1], or several views of
    that shape stacked; labels are int64 from 0 to classes - 1.
    """

    train: TensorDataset | Images
    test: TensorDataset | Images
    channels: int
    classes: int
    image_size: int
