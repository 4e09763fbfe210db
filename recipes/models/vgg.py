"""A small VGG with group normalization, which (unlike BatchNorm) keeps examples apart, or none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from recipes.models.symmetric import SIDES, BothSides, ByPlaces, MeanOfSides, OtherSide


def vgg(
    *,
    in_channels: int,
    classes: int,
    image_size: int = 32,
    channels: Sequence[int] = (32, 64, 128),
    groups: int = 8,
    hidden: int = 128,
    reduced: int = 0,
    symmetric: bool = False,
    mirrored: Sequence[int] | None = None,
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
        groups: groups of each GroupNorm; 0 for no normalization.
        hidden: width of the dense layer before the classifier; 0 for none.
        reduced: channels of a 1×1 convolution before the first block; 0 for none.
        symmetric: an image and its mirror image have the same logits. Every layer has as many
            channels for the image as for its mirror image, of the same weights.
        mirrored: of ``symmetric``, which channel of an image each channel of its mirror image is;
            ``None`` if they stay, as colors do.

    Raises:
        ValueError: if ``groups`` does not divide every channel count, or the image is too small to
            be halved that often.
    """
    check_vgg(
        image_size=image_size, channels=channels, groups=groups, hidden=hidden, reduced=reduced
    )
    side = image_size >> len(channels)
    layers: list[nn.Module] = [BothSides(mirrored)] if symmetric else []
    before = in_channels

    def join_sides() -> None:
        nonlocal before
        if len(layers) > 1:  # of images both sides have the same channels already
            layers.append(OtherSide())
            before *= SIDES

    def add(width: int, kernel: int) -> None:
        """A convolution and what follows it."""
        nonlocal before
        if symmetric:
            join_sides()
            padding = 0, kernel // 2, kernel // 2
            layers.append(nn.Conv3d(before, width, (1, kernel, kernel), padding=padding))
        else:
            layers.append(nn.Conv2d(before, width, kernel, padding=kernel // 2))
        if groups:
            layers.append(nn.GroupNorm(groups, width))
        layers.append(nn.ReLU())
        before = width

    if reduced:
        add(reduced, 1)
    for width in channels:
        add(width, 3)
        add(width, 3)
        layers.append(nn.MaxPool3d((1, 2, 2)) if symmetric else nn.MaxPool2d(2))
    if symmetric:
        join_sides()
        layers.append(ByPlaces())
    else:
        layers.append(nn.Flatten())
    width = before * side * side
    if hidden:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    layers.append(nn.Linear(width, classes))
    if symmetric:
        layers.append(MeanOfSides())
    return nn.Sequential(*layers)


def check_vgg(
    *,
    image_size: int | None,
    channels: Sequence[int],
    groups: int,
    hidden: int,
    reduced: int = 0,
) -> None:
    """Refuse what ``vgg`` cannot be made of, before the images are read; size unknown: ``None``.

    Raises:
        ValueError: as ``vgg``.
    """
    if hidden < 0:
        raise ValueError(f"hidden={hidden}: give the units of the dense layer, or 0 for none")
    if groups < 0:
        raise ValueError(f"groups={groups}: give the groups of each GroupNorm, or 0 for none")
    if reduced < 0:
        raise ValueError(f"reduced={reduced}: give the channels of the 1×1 layer, or 0 for none")
    if bad := [width for width in channels if width < 1]:
        raise ValueError(f"channels={list(channels)}: every block has at least one, not {bad}")
    if groups and (bad := [width for width in channels if width % groups]):
        raise ValueError(f"groups={groups} must divide every block's channels, not so for {bad}")
    if groups and reduced % groups:
        raise ValueError(f"groups={groups} must divide reduced={reduced}")
    if image_size is not None and image_size >> len(channels) < 1:
        raise ValueError(
            f"image_size={image_size} cannot be halved {len(channels)} times; "
            "use fewer blocks in channels or larger images"
        )
