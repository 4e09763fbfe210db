"""Images kept as bytes, scaled and augmented when they are asked for."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch.utils.data import Dataset

# From one image and a number of views to these, stacked.
Transform = Callable[[torch.Tensor, int], torch.Tensor]


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labelled images: uint8 in memory, float32 in [-1, 1] when read.

    Scaling is x / 127.5 - 1, a public constant: means or variances of the training set would leak
    past the guarantee. A random ``transform`` has to draw from torch's global generator, which the
    private loader seeds for every batch, so that a resumed run sees the same augmentations.

    Args:
        pixels: uint8, (N, C, H, W).
        labels: int64, (N,).
        transform: makes K views (K, C, H, W) of one uint8 image (C, H, W) before scaling; with
            ``None`` they are all the image.
        views: K, the augmentation multiplicity. With one view an example is (C, H, W), with K > 1
            it is (K, C, H, W).

    Raises:
        ValueError: for tensors of other types or shapes, or ``views`` below 1.
    """

    def __init__(
        self,
        pixels: torch.Tensor,
        labels: torch.Tensor,
        *,
        transform: Transform | None = None,
        views: int = 1,
    ) -> None:
        if pixels.dtype != torch.uint8 or pixels.dim() != 4:
            raise ValueError(
                f"pixels are {pixels.dtype} of shape {tuple(pixels.shape)}; give uint8 of shape "
                "(images, channels, height, width)"
            )
        if labels.dtype != torch.int64 or labels.shape != pixels.shape[:1]:
            raise ValueError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}; give int64 of shape "
                f"({len(pixels)},), one an image"
            )
        if views < 1:
            raise ValueError(f"views={views}: an example has at least one view")
        self.pixels = pixels
        self.labels = labels
        self.transform = transform
        self.views = views

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all pixels and labels; private, as it recognizes the training set."""
        sha = hashlib.sha256(str(tuple(self.pixels.shape)).encode())
        sha.update(self.pixels.contiguous().numpy().data)
        sha.update(self.labels.contiguous().numpy().data)
        return sha.hexdigest()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Several examples at once, as torch's loaders ask for them."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        images = self._transformed(self.pixels[rows])
        scaled = images.float().div_(127.5).sub_(1)
        return list(zip(scaled.unbind(), self.labels[rows].unbind(), strict=True))

    def _transformed(self, images: torch.Tensor) -> torch.Tensor:
        if self.transform is None:
            several = images.unsqueeze(1).expand(-1, self.views, -1, -1, -1)
        else:
            several = torch.stack([self.transform(image, self.views) for image in images])
        return several if self.views > 1 else several[:, 0]
