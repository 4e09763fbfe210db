"""A split of images by their scattering features, each normalized, with random views of them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset
from tqdm import tqdm

from recipes.data.augment import CropAndFlip
from recipes.data.images import Images
from recipes.data.mirrored import SideBySide
from recipes.data.opponent import opponent
from recipes.data.scattered_layout import FeatureLayout
from recipes.data.scattering import STRIDE, check_scattered, scattering
from recipes.data.split import Split

_CHUNK = 10  # images at once, which stay in the cache


class ScatteredViews(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Features of random views of images, of which each image's were computed once.

    A view moves the places of an image's features by at most one, reflected at the border, or is
    that of the mirror image, or both; it is then normalized, as an image without views is.

    Args:
        maps: features as ``scattering`` returns them, (N, channels, H, W), float32.
        labels: int64, (N,).
        layout: of the features.
        crops: whether places are moved.
        flips: whether there are mirror images.
        views: of an example, at least 1. With one it is (channels, H, W), with K > 1
            (K, channels, H, W).
        fingerprint: recognizes the training set; private.
    """

    def __init__(
        self,
        maps: torch.Tensor,
        labels: torch.Tensor,
        layout: FeatureLayout,
        *,
        crops: bool,
        flips: bool,
        views: int,
        fingerprint: str,
    ) -> None:
        self.maps, self.labels, self.layout = maps, labels, layout
        self.views, self.fingerprint = views, fingerprint
        self._transform = CropAndFlip(
            maps.shape[-1],
            flips,
            padding=1 if crops else 0,
            mirrored=tuple(layout.mirrored()),
        )
        self._orders: dict[tuple[int, int, bool], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Several examples at once, as torch's loaders ask for them."""
        flat, shape = self.maps.flatten(1), (self.views,) if self.views > 1 else ()
        found = torch.stack(
            [
                flat[row][self._order(drawn)]
                for row in indices
                for drawn in self._transform.draw(self.views)
            ]
        )
        normal = self.layout.normalized(found.view(-1, *self.maps.shape[1:]))
        normal = normal.unflatten(0, (len(indices), *shape))
        return list(zip(normal.unbind(), self.labels[list(indices)].unbind(), strict=True))

    def _order(self, drawn: tuple[int, int, bool]) -> torch.Tensor:
        """The feature of an image for each feature of a view, out of few."""
        if drawn not in self._orders:
            numbers = torch.arange(self.maps[0].numel()).view(self.maps.shape[1:])
            self._orders[drawn] = self._transform.view(numbers, *drawn).flatten()
        return self._orders[drawn]


def scattered(split: Split, *, mirrored: bool = False) -> Split:
    """Scattering features in place of the images, each example's normalized.

    Those of color images are of ``opponent`` colors.
    Of augmented images views are drawn of the features, as ``ScatteredViews`` does. With
    ``mirrored`` a test image has those of its mirror image beside it.

    Raises:
        ValueError: for images of another size than ``scattering`` takes.
    """
    check_scattered(split.image_size)
    layout = FeatureLayout(split.channels)
    return dataclasses.replace(
        split,
        train=_training_part(split.train, layout),
        test=_test_part(split.test, layout, mirrored=mirrored),
        channels=layout.channels,
        image_size=split.image_size // STRIDE,
        mirrored=tuple(layout.mirrored()),
    )


def _training_part(examples: Dataset[Any], layout: FeatureLayout) -> TensorDataset | ScatteredViews:
    maps, labels = _features(examples, "of training images")
    if not isinstance(examples, Images) or examples.transform is None:
        return TensorDataset(_all_normalized(maps, layout), labels)
    transform, known = examples.transform, f"scattering of opponents of {examples.fingerprint}"
    assert isinstance(transform, CropAndFlip)
    return ScatteredViews(
        maps,
        labels,
        layout,
        crops=transform.padding > 0,
        flips=transform.flips,
        views=examples.views,
        fingerprint=hashlib.sha256(known.encode()).hexdigest(),
    )


def _test_part(
    examples: Dataset[Any], layout: FeatureLayout, *, mirrored: bool
) -> TensorDataset | SideBySide:
    maps, labels = _features(examples, "of test images")
    other = maps.flip(-1)[:, layout.mirrored()] if mirrored else None
    plain = TensorDataset(_all_normalized(maps, layout), labels)
    if other is None:
        return plain
    return SideBySide(plain, TensorDataset(_all_normalized(other, layout), labels))


def _features(examples: Dataset[Any], what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of a part's images, as ``scattering`` returns them of opponents, and its labels."""
    if isinstance(examples, Images):
        rows, labels = examples.pixels, examples.labels
    else:
        assert isinstance(examples, TensorDataset)
        rows, labels = examples.tensors
    found: torch.Tensor | None = None
    for start in tqdm(range(0, len(rows), _CHUNK), f"features {what}", unit_scale=_CHUNK, delay=2):
        part = rows[start : start + _CHUNK]
        images = part.float().div(127.5).sub(1) if part.dtype == torch.uint8 else part
        maps = scattering(opponent(images))
        if found is None:
            found = maps.new_empty(len(rows), *maps.shape[1:])
        found[start : start + len(part)] = maps
    if found is None:
        raise ValueError(f"features {what}: there are none")
    return found, labels


def _all_normalized(maps: torch.Tensor, layout: FeatureLayout) -> torch.Tensor:
    """In place, a chunk at a time: the features of a training set are gigabytes."""
    for part in maps.split(_CHUNK):
        part.copy_(layout.normalized(part))
    return maps
