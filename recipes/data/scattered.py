"""A split of images by their scattering features, each normalized, with random views of them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import group_norm
from torch.utils.data import Dataset, TensorDataset
from tqdm import tqdm

from recipes.data.augment import CropAndFlip
from recipes.data.images import Images
from recipes.data.mirrored import SideBySide
from recipes.data.scattering import ANGLES, PATHS, STRIDE, check_scattered, scattering
from recipes.data.split import Split

GROUPS = 27
_CHUNK = 10  # images at once, which stay in the cache


class ScatteredViews(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Features of random views of images, of which each image's were computed once.

    A view moves the places of an image's features by at most one, reflected at the border, and may
    be that of the mirror image, in which a wave's direction is mirrored too. That is the mirror
    image itself, moved by three pixels. A view is then normalized, as an image without views is.

    Args:
        maps: features as ``scattering`` returns them, (N, 81 C, H, W), float32.
        labels: int64, (N,).
        flips: whether there are mirror images.
        views: of an example, at least 1. With one it is (81 C, H, W), with K > 1 (K, 81 C, H, W).
        fingerprint: recognises the training set; private.
    """

    def __init__(
        self,
        maps: torch.Tensor,
        labels: torch.Tensor,
        *,
        flips: bool,
        views: int,
        fingerprint: str,
    ) -> None:
        self.maps, self.labels, self.views, self.fingerprint = maps, labels, views, fingerprint
        self._transform = CropAndFlip(
            maps.shape[-1], flips, padding=1, mirrored=mirrored_paths(maps.shape[1] // PATHS)
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
            [flat[row][self._order()] for row in indices for _ in range(self.views)]
        )
        normal = group_norm(found.view(-1, *self.maps.shape[1:]), GROUPS)
        normal = normal.unflatten(0, (len(indices), *shape))
        return list(zip(normal.unbind(), self.labels[list(indices)].unbind(), strict=True))

    def _order(self) -> torch.Tensor:
        """Which feature of an image each feature of a view is that is drawn now; there are few."""
        drawn = self._transform.draw()
        if drawn not in self._orders:
            numbers = torch.arange(self.maps[0].numel()).view(self.maps.shape[1:])
            self._orders[drawn] = self._transform.view(numbers, *drawn).flatten()
        return self._orders[drawn]


def mirrored_paths(colours: int) -> tuple[int, ...]:
    """Which feature of an image each feature of its mirror image is: waves at π - θ for θ."""
    turned = [-angle % ANGLES for angle in range(ANGLES)]
    fine = 1
    coarse, both = fine + ANGLES, fine + 2 * ANGLES
    one = [0, *(fine + angle for angle in turned), *(coarse + angle for angle in turned)]
    one += [both + ANGLES * first + second for first in turned for second in turned]
    return tuple(PATHS * colour + path for colour in range(colours) for path in one)


def scattered(split: Split) -> Split:
    """Scattering features in place of the images, each example's normalized in 27 groups of 9.

    Of augmented images views are drawn of the features, as ``ScatteredViews`` does.

    Raises:
        ValueError: for images of another size than ``scattering`` takes.
    """
    check_scattered(split.image_size)
    return dataclasses.replace(
        split,
        train=scattered_images(split.train, "of training images"),
        test=scattered_images(split.test, "of test images"),
        channels=PATHS * split.channels,
        image_size=split.image_size // STRIDE,
    )


def scattered_images(
    examples: Dataset[Any], what: str
) -> TensorDataset | ScatteredViews | SideBySide:
    """The same for a part, of whose images a progress bar says what they are."""
    if isinstance(examples, SideBySide):
        return SideBySide(*(scattered_images(part, what) for part in examples.parts))
    what, augmented = f"features {what}", False
    if isinstance(examples, Images):
        rows, labels = examples.pixels, examples.labels
        augmented = examples.transform is not None
    else:
        assert isinstance(examples, TensorDataset)
        rows, labels = examples.tensors
    found: torch.Tensor | None = None
    for start in tqdm(range(0, len(rows), _CHUNK), desc=what, unit_scale=_CHUNK, delay=2):
        part = rows[start : start + _CHUNK]
        images = part.float().div(127.5).sub(1) if part.dtype == torch.uint8 else part
        maps = scattering(images)
        maps = maps if augmented else group_norm(maps, GROUPS)
        if found is None:
            found = maps.new_empty(len(rows), *maps.shape[1:])
        found[start : start + len(part)] = maps
    if found is None:
        raise ValueError(f"{what}: there are none")
    if not augmented:
        return TensorDataset(found, labels)
    assert isinstance(examples, Images)
    transform = examples.transform
    return ScatteredViews(
        found,
        labels,
        flips=isinstance(transform, CropAndFlip) and transform.flips,
        views=examples.views,
        fingerprint=hashlib.sha256(f"scattering of {examples.fingerprint}".encode()).hexdigest(),
    )
