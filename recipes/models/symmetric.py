"""Layers of a net that gives an image and its mirror image the same scores.

The net has two sides, one for the image and one for its mirror image, with the same weights; each
layer sees the channels of both. Half of the weights of a net of as many channels are left to learn,
and to have noise added (Cohen & Welling 2016, arXiv 1602.07576, on groups of symmetries; Hölzl et
al. 2023, arXiv 2301.13104, on them in private training). The sides stand along a dimension of their
own, (batch, channels, 2, height, width), across which no kernel reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

SIDES = 2
_SIDE, _WIDTH = 2, 4  # dimensions


class BothSides(nn.Module):
    """An image, and beside it its mirror image: (B, C, H, W) to (B, C, 2, H, W).

    Args:
        mirrored: which channel of an image each channel of its mirror image is; ``None`` if they
            stay, as colors do.
    """

    order: torch.Tensor | None

    def __init__(self, mirrored: Sequence[int] | None = None) -> None:
        super().__init__()
        order = None if mirrored is None else torch.tensor(mirrored)
        self.register_buffer("order", order, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Both, the channels of a place next to each other in memory: convolutions are faster."""
        last = images.movedim(1, -1)
        other = last if self.order is None else last[..., self.order]
        return torch.stack([last, other.flip(2)], 1).movedim(-1, 1)


class OtherSide(nn.Module):
    """A side's channels and then the other's, mirrored: (B, C, 2, H, W) to (B, 2 C, 2, H, W)."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """The mirror image's maps, mirrored, lie over the image's."""
        return torch.cat([maps, maps.flip(_SIDE, _WIDTH)], 1)


class ByPlaces(nn.Module):
    """Numbers of each side in a row: (B, C, 2, H, W) to (B, 2, C H W)."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """A row for each side."""
        return maps.movedim(_SIDE, 1).flatten(2)


class MeanOfSides(nn.Module):
    """The scores of both sides, averaged: (B, 2, classes) to (B, classes)."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """The same for an image and its mirror image."""
        return scores.mean(1)
