"""Random crops and flips, the usual augmentation of small photographs."""

from __future__ import annotations

import dataclasses

import torch

from recipes.data.images import Transform

PADDING = 4  # pixels on every side before the crop


@dataclasses.dataclass(frozen=True)
class CropAndFlip:
    """A crop of the original size from the image padded by reflected pixels, then a random flip.

    Offsets are uniform, the horizontal flip has probability ½. Both are drawn from torch's global
    generator.

    Args:
        image_size: height and width in pixels; more than ``padding``, which are reflected.
        flips: whether there are flips: a flipped digit or letter is another sign.
        padding: pixels on every side before the crop.
        mirrored: which channel of the image each channel of a flipped one is; ``None`` if they
            stay. Colors do, and directions do not.

    Raises:
        ValueError: if the images are too small.
    """

    image_size: int
    flips: bool = True
    padding: int = PADDING
    mirrored: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.image_size <= self.padding:
            raise ValueError(
                f"augment=true: images of {self.image_size}×{self.image_size} pixels have no "
                f"{self.padding} to reflect on a side; set augment to false"
            )

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """One view of an image, (channels, image_size, image_size), of any type."""
        return self.view(image, *self.draw())

    def draw(self) -> tuple[int, int, bool]:
        """Where a crop begins in the padded image, from the top and the left, and the flip."""
        top, left = torch.randint(0, 2 * self.padding + 1, (2,)).tolist()
        return top, left, self.flips and float(torch.rand(())) < 0.5

    def view(self, image: torch.Tensor, top: int, left: int, flipped: bool) -> torch.Tensor:
        """The view that ``draw`` names."""
        rows, columns = self._reflected(top), self._reflected(left)
        if flipped:
            columns = columns.flip(0)
            if self.mirrored is not None:
                image = image[list(self.mirrored)]
        return image[:, rows][:, :, columns]

    def _reflected(self, offset: int) -> torch.Tensor:
        """Which row of the image each row of a crop is; those outside are mirrored at the edge."""
        last = self.image_size - 1
        row = (torch.arange(self.image_size) + offset - self.padding).abs()
        return last - (last - row).abs()


def training_transform(
    image_size: int | None, *, augment: bool, views: int, flips: bool = True
) -> Transform | None:
    """The transform of a training set: ``CropAndFlip`` if ``augment``, else ``None``.

    Readers call it before they read as well, for what it refuses; the size may not be known then.

    Raises:
        ValueError: for several views without augmentation, or images too small to be cropped.
    """
    if views < 1:
        raise ValueError(f"views={views}: an example has at least one view")
    if augment:
        return CropAndFlip(PADDING + 1 if image_size is None else image_size, flips)
    if views > 1:
        raise ValueError(
            f"views={views} with augment=false: equal views cost {views} times the work and change "
            "nothing; set augment to true, or views to 1"
        )
    return None
