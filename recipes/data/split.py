"""The result of every reader of the recipes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset, TensorDataset

from recipes.data.images import Images


@dataclasses.dataclass(frozen=True)
class Split:
    """A training set, a held-out test set, and what a model must know about them.

    Images are float32 of shape (channels, image_size, image_size) in [-1, 1], or several views of
    that shape stacked; labels are int64 from 0 to classes - 1. ``mirrored`` says which channel of
    an image each channel of its mirror image is; ``None`` if they stay, as colors do.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    channels: int
    classes: int
    image_size: int
    mirrored: tuple[int, ...] | None = None

    def hold_out(self, share: float, *, seed: int) -> Split:
        """The split of a part of the training set against the rest of it; the test set is left out.

        What is chosen by the held-out part does not lean on the test set. The held-out images are
        of the same people as the training set, and no guarantee covers what is measured on them.

        Args:
            share: of every class that is held out, in (0, 1).
            seed: of the draw; public.

        Raises:
            ValueError: if ``share`` is out of range, or leaves a class without an image on a side.
        """
        if not 0 < share < 1:
            raise ValueError(f"holdout={share}: must lie strictly between 0 and 1")
        labels = _labels(self.train)
        counts = torch.bincount(labels, minlength=self.classes)
        few = int(counts[counts > 0].min())
        if not 1 <= share * few <= few - 1:
            raise ValueError(
                f"holdout={share}: a class has {few} training images, so that a side would have "
                "none of it; take another share, or null to use the test set"
            )
        rest, held = train_test_split(
            range(len(labels)), test_size=share, random_state=seed, stratify=labels.numpy()
        )
        rest, held = sorted(rest), sorted(held)
        return dataclasses.replace(
            self, train=_rows(self.train, rest), test=_rows(self.train, held, plain=True)
        )


def left_for_training(examples: int, share: float) -> int:
    """The number of examples that ``Split.hold_out`` leaves."""
    return examples - math.ceil(share * examples)  # as scikit-learn rounds


def _labels(examples: Dataset[Any]) -> torch.Tensor:
    if isinstance(examples, Images):
        return examples.labels
    assert isinstance(examples, TensorDataset)
    return examples.tensors[1]


def _rows(examples: Dataset[Any], rows: list[int], *, plain: bool = False) -> Dataset[Any]:
    """Some rows; ``plain`` ones are not transformed, as a test set's are not."""
    if isinstance(examples, TensorDataset):
        return TensorDataset(*(tensor[rows] for tensor in examples.tensors))
    assert isinstance(examples, Images)
    kept: dict[str, Any] = (
        {} if plain else {"transform": examples.transform, "views": examples.views}
    )
    return Images(examples.pixels[rows], examples.labels[rows], **kept)
