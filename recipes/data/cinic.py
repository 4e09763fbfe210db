"""CINIC-10 from disk: a folder of PNG files for every split and class."""

from __future__ import annotations

import pathlib

import torch

from recipes.data.augment import PLAIN, Views
from recipes.data.class_folders import list_classes, read_listing
from recipes.data.parts import Foreseen, existing_folder, image_split, note_size, unheard
from recipes.data.photographs import CLASSES, IMAGE_SIZE
from recipes.data.split import Split

SPLITS = ("train", "valid", "test")
SPLIT_SIZE = 90_000


def cinic10(
    root: str | pathlib.Path,
    *,
    train_on_valid: bool = False,
    views: Views = PLAIN,
    foreseen: Foreseen = unheard,
) -> Split:
    """CINIC-10 (Darlow et al. 2018): three splits of 90,000 images of 3×32×32.

    Nothing is downloaded. All images are decoded once; grey ones become RGB, and those of another
    size or mode are refused. Labels number the classes alphabetically, as for CIFAR-10. Another
    number of images than published is logged, not refused.

    Args:
        root: folder that holds ``train``, ``valid`` and ``test``, each with a folder for each of
            the ten classes.
        train_on_valid: train on the validation split as well (180,000 images).
        views: of the training images.
        foreseen: is told the number of training images and their size before they are decoded.

    Raises:
        FileNotFoundError: naming the split, class folder or class of images that is missing.
        ValueError: naming a folder that is no class or an image that cannot be used.
    """
    folder = existing_folder(root)
    for split in SPLITS:
        if not (folder / split).is_dir():
            raise FileNotFoundError(
                f"{folder} lacks the folder {split!r}; CINIC-10 unpacks into {', '.join(SPLITS)}"
            )
    # All are listed before the first of them is decoded, which takes minutes.
    listings = {split: list_classes(folder / split, classes=CLASSES) for split in SPLITS}
    trained_on = ("train", "valid") if train_on_valid else ("train",)
    foreseen(sum(len(listings[split].paths) for split in trained_on), IMAGE_SIZE)
    parts = {
        split: note_size(
            f"CINIC-10's split {split!r}",
            read_listing(listings[split], image_size=IMAGE_SIZE),
            SPLIT_SIZE,
        )
        for split in (*trained_on, "test")
    }
    train = parts["train"]
    if train_on_valid:
        valid = parts["valid"]
        train = (torch.cat([train[0], valid[0]]), torch.cat([train[1], valid[1]]))
    return image_split(
        train,
        parts["test"],
        classes=len(CLASSES),
        views=views,
    )
