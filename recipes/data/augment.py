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
        """Which row of the image each row of a crop is; those outside are mirrored at the edge."""
        last = self.image_size - 1
        row = (torch.arange(self.image_size) + offset - self.padding).abs()
        return last - (last - row).abs()


def training_transform(
    image_size: int | None, *, augment: bool, views: int, crops: bool = True, flips: bool = True
) -> Transform | None:
    """The transform of a training set: ``CropAndFlip`` if ``augment``, else ``None``.

    Readers call it before they read as well, for what it refuses; the size may not be known then.

    Raises:
        ValueError: for several views without augmentation, augmentation by nothing, or images too
            small to be cropped.
    """
    if views < 1:
        raise ValueError(f"views={views}: an example has at least one view")
    if augment:
        if not crops and not flips:
            raise ValueError(
                "augment=true with crops=false and flips=false: a view would be the image itself; "
                "set one of them to true, or augment to false"
            )
        padding = PADDING if crops else 0
        return CropAndFlip(padding + 1 if image_size is None else image_size, flips, padding)
    if views > 1:
        raise ValueError(
            f"views={views} with augment=false: equal views cost {views} times the work and change "
            "nothing; set augment to true, or views to 1"
        )
    return None
