"""Random crops and flips, the usual augmentation of small photographs."""

from __future__ import annotations

from recipes.data.images import Transform
from recipes.data.packages import torchvision_part

PADDING = 4  # pixels on every side before the crop


def crop_and_flip(image_size: int, *, flips: bool = True) -> Transform:
    """A crop of the original size from the image padded by 4 reflected pixels, then a random flip.

    Offsets are uniform, the horizontal flip has probability ½. Both are drawn from torch's global
    generator.

    Args:
        image_size: height and width in pixels; at least 5, as there must be 4 pixels to reflect.
        flips: whether there are flips: a flipped digit or letter is another sign.

    Raises:
        ValueError: if torchvision cannot be used; the message says what to install.
    """
    v2 = torchvision_part("transforms.v2", purpose="augmentation (crops and flips)")
    crop = v2.RandomCrop(image_size, padding=PADDING, padding_mode="reflect")
    transform: Transform = v2.Compose([crop, v2.RandomHorizontalFlip()]) if flips else crop
    return transform


def training_transform(
    image_size: int | None, *, augment: bool, views: int, flips: bool = True
) -> Transform | None:
    """The transform of a training set: ``crop_and_flip`` if ``augment``, else ``None``.

    Readers call it before they read as well, for what it refuses; the size may not be known then.

    Raises:
        ValueError: for several views without augmentation, images too small to be cropped, or if
            torchvision cannot be used.
    """
    if views < 1:
        raise ValueError(f"views={views}: an example has at least one view")
    if augment:
        if image_size is not None and image_size <= PADDING:
            raise ValueError(
                f"augment=true: images of {image_size}×{image_size} pixels have no {PADDING} to "
                "reflect on a side; set augment to false"
            )
        return crop_and_flip(PADDING + 1 if image_size is None else image_size, flips=flips)
    if views > 1:
        raise ValueError(
            f"views={views} with augment=false: equal views cost {views} times the work and change "
            "nothing; set augment to true, or views to 1"
        )
    return None
