"""Random crops and flips, the usual augmentation of small photographs."""

from __future__ import annotations

import dataclasses

import torch

from recipes.data.images import Transform

PADDING = 4  # pixels on every side before the crop


@dataclasses.dataclass(frozen=True)
class CropAndFlip:
    """Crops of the original size from the image padded by reflected pixels, each flipped or not.

    Offsets are uniform, the horizontal flip has probability ½. Of several views of an image every
    second one is flipped, beginning with the first or the second: two views without crops are the
    image and its mirror image. All is drawn from torch's global generator.

    Args:
        image_size: height and width in pixels; more than ``padding``, which are reflected.
        flips: whether there are flips: a flipped digit or letter is another sign.
        padding: pixels on every side before the crop; 0 is no crop.
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
                f"{self.padding} to reflect on a side; set augment or crops to false"
            )

    def __call__(self, image: torch.Tensor, views: int = 1) -> torch.Tensor:
        """Views of an image, (channels, image_size, image_size) of any type, stacked."""
        return torch.stack([self.view(image, *drawn) for drawn in self.draw(views)])

    def draw(self, views: int) -> list[tuple[int, int, bool]]:
        """For each, where its crop begins in the padded image, top and left, and the flip."""
        corners = torch.randint(0, 2 * self.padding + 1, (views, 2)).tolist()
        first = int(torch.randint(0, 2, ()))
        return [
            (top, left, self.flips and (first + view) % 2 == 1)
            for view, (top, left) in enumerate(corners)
        ]

    def view(self, image: torch.Tensor, top: int, left: int, flipped: bool) -> torch.Tensor:
        """One that ``draw`` names."""
        rows, columns = self._reflected(top), self._reflected(left)
        if flipped:
            columns = columns.flip(0)
            if self.mirrored is not None:
                image = image[list(self.mirrored)]
        return image[:, rows][:, :, columns]

    def _reflected(self, offset: int) -> torch.Tensor:
        """The row of the image for each row of a crop; rows outside are mirrored at the edge."""
        last = self.image_size - 1
        row = (torch.arange(self.image_size) + offset - self.padding).abs()
        return last - (last - row).abs()


@dataclasses.dataclass(frozen=True)
class Views:
    """The random views that a training set is shown in; by default each image as it is.

    Attributes:
        augment: random views of the training images, by ``crops`` and ``flips``.
        count: views of each training image; more than one needs ``augment``.
        crops: augment by crops of the image padded by four reflected pixels a side.
        flips: augment by mirror images.

    Raises:
        ValueError: for several views without augmentation, or augmentation by nothing.
    """

    augment: bool = False
    count: int = 1
    crops: bool = True
    flips: bool = True

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"views={self.count}: an example has at least one view")
        if self.augment and not self.crops and not self.flips:
            raise ValueError(
                "augment=true with crops=false and flips=false: a view would be the image itself; "
                "set one of them to true, or augment to false"
            )
        if self.count > 1 and not self.augment:
            raise ValueError(
                f"views={self.count} with augment=false: equal views cost {self.count} times the "
                "work and change nothing; set augment to true, or views to 1"
            )

    def of(self, image_size: int) -> Transform | None:
        """The transform that makes the views; ``None`` without augmentation.

        Raises:
            ValueError: if the images are too small to be cropped.
        """
        if not self.augment:
            return None
        return CropAndFlip(image_size, self.flips, PADDING if self.crops else 0)


PLAIN = Views()
