"""Images and their mirror images, to be classified together."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from recipes.data.images import Images


def flipped(examples: Dataset[Any]) -> Dataset[Any]:
    """The mirror images of a part whose images are not augmented, left for right."""
    if isinstance(examples, Images):
        return Images(examples.pixels.flip(-1), examples.labels)
    assert isinstance(examples, TensorDataset)
    images, labels = examples.tensors
    return TensorDataset(images.flip(-1), labels)


class SideBySide(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Two parts of the same labels, an example's images stacked: (2, channels, height, width)."""

    def __init__(self, first: Any, second: Any) -> None:
        self.parts = first, second

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        (image, label), (other, _) = (part[index] for part in self.parts)
        return torch.stack((image, other)), label
