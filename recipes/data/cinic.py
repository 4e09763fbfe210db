"""CINIC-10 from disk: a folder of PNG files for every split and class."""

from __future__ import annotations

import pathlib

import torch

from recipes.data.augment import training_transform
from recipes.data.decode import decode
from recipes.data.packages import torchvision_part
from recipes.data.photographs import (
    CLASSES,
    IMAGE_SIZE,
    Part,
    existing_folder,
    note_size,
    photograph_split,
)
from recipes.data.split import Split

SPLITS = ("train", "valid", "test")
SPLIT_SIZE = 90_000


def cinic10(
    root: str | pathlib.Path,
    *,
    train_on_valid: bool = False,
    augment: bool = False,
    views: int = 1,
) -> Split:
    """CINIC-10 (Darlow et al. 2018): three splits of 90,000 images of 3×32×32.

    Nothing is downloaded. All images are decoded once; grey ones become RGB, and those of another
    size or mode are refused. Labels number the classes alphabetically, as for CIFAR-10. Another
    number of images than published is logged, not refused.

    Args:
        root: folder that holds ``train``, ``valid`` and ``test``, each with a folder for each of
            the ten classes.
        train_on_valid: train on the validation split as well (180,000 images).
        augment: random crops and flips of the training images.
        views: random views of each training image; more than one needs ``augment``.

    Raises:
        FileNotFoundError: naming the split, class folder or class of images that is missing.
        ValueError: naming a folder that is no class or an image that cannot be used, or if
            torchvision, which lists the files, cannot be used; the message says what to install.
    """
    training_transform(IMAGE_SIZE, augment=augment, views=views)  # before minutes of reading
    folder = existing_folder(root)
    for split in SPLITS:
        _check_folders(folder, split)
    train = _read(folder, "train")
    if train_on_valid:
        valid = _read(folder, "valid")
        train = (torch.cat([train[0], valid[0]]), torch.cat([train[1], valid[1]]))
    return photograph_split(train, _read(folder, "test"), augment=augment, views=views)


def _check_folders(root: pathlib.Path, split: str) -> None:
    folder = root / split
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{root} lacks the folder {split!r}; CINIC-10 unpacks into {', '.join(SPLITS)}"
        )
    found = {entry.name for entry in folder.iterdir() if entry.is_dir()}
    if missing := [name for name in CLASSES if name not in found]:
        raise FileNotFoundError(
            f"{folder} lacks the class folder{'s'[: len(missing) > 1]} {', '.join(missing)}; "
            "unpack CINIC-10 again"
        )
    if extra := sorted(found - set(CLASSES)):
        raise ValueError(
            f"{folder} holds {', '.join(extra)}, which is no class of CINIC-10 and would shift the "
            "numbers of the others; move it elsewhere"
        )


def _read(root: pathlib.Path, split: str) -> Part:
    image_folder = torchvision_part("datasets", purpose="listing CINIC-10's files").ImageFolder
    listing = image_folder(root / split)  # names a class without images by FileNotFoundError
    assert tuple(listing.classes) == CLASSES
    paths = [path for path, _ in listing.samples]
    pixels = decode(
        paths, image_size=IMAGE_SIZE, name=lambda row: paths[row], description=f"reading {split}"
    )
    labels = torch.tensor(listing.targets, dtype=torch.int64)
    return note_size(f"CINIC-10's split {split!r}", (pixels, labels), SPLIT_SIZE)
