"""A small VGG with group normalisation, which (unlike BatchNorm) keeps examples apart, or none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def vgg(
    *,
    in_channels: int,
    classes: int,
    image_size: int = 32,
    channels: Sequence[int] = (32, 64, 128),
    groups: int = 8,
    hidden: int = 128,
) -> nn.Sequential:
    """Blocks of two 3×3 convolutions and a 2×2 max-pool, then two dense layers, or one.

    Every convolution is followed by GroupNorm and ReLU, or with ``groups=0`` by ReLU alone: the VGG
    of the literature on private training. Input: (batch, in_channels, image_size, image_size);
    output: logits, (batch, classes).

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        image_size: height and width in pixels.
        channels: channels of each block; every block halves height and width. With none, and
            ``hidden=0``, the model is linear.
        groups: groups of each GroupNorm; 0 for no normalisation.
        hidden: width of the dense layer before the classifier; 0 for none.

    Raises:
        ValueError: if ``groups`` does not divide every channel count, or the image is too small to
            be halved that often.
    """
    check_vgg(image_size=image_size, channels=channels, groups=groups, hidden=hidden)
    side = image_size >> len(channels)
    layers: list[nn.Module] = []
    before = in_channels
    for width in channels:
        for _ in range(2):
            layers.append(nn.Conv2d(before, width, 3, padding=1))
            if groups:
                layers.append(nn.GroupNorm(groups, width))
            layers.append(nn.ReLU())
            before = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    width = before * side * side
    if hidden:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    layers.append(nn.Linear(width, classes))
    return nn.Sequential(*layers)


def check_vgg(*, image_size: int | None, channels: Sequence[int], groups: int, hidden: int) -> None:
    """Refuse what ``vgg`` cannot be made of, before the images are read; size unknown: ``None``.

    Raises:
        ValueError: as ``vgg``.
    """
    if hidden < 0:
        raise ValueError(f"hidden={hidden}: give the units of the dense layer, or 0 for none")
    if groups < 0:
        raise ValueError(f"groups={groups}: give the groups of each GroupNorm, or 0 for none")
    if bad := [width for width in channels if width < 1]:
        raise ValueError(f"channels={list(channels)}: every block has at least one, not {bad}")
    if groups and (bad := [width for width in channels if width % groups]):
        raise ValueError(f"groups={groups} must divide every block's channels, not so for {bad}")
    if image_size is not None and image_size >> len(channels) < 1:
        raise ValueError(
            f"image_size={image_size} cannot be halved {len(channels)} times; "
            "use fewer blocks in channels or larger images"
        )
