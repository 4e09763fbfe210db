"""MNIST from disk: the original IDX files, the hub's parquet files, or class folders."""

from __future__ import annotations

import dataclasses
import pathlib

import torch

from recipes.data.augment import PLAIN, Views
from recipes.data.class_folders import TRAIN, read_parts
from recipes.data.idx import read_idx
from recipes.data.parquet import read_shards
from recipes.data.parts import (
    Foreseen,
    Part,
    checked_labels,
    existing_folder,
    image_split,
    note_size,
    unheard,
)
from recipes.data.split import Split

IMAGE_SIZE = 28
CLASSES = tuple(map(str, range(10)))
TRAIN_SIZE, TEST_SIZE = 60_000, 10_000
IDX_FOLDERS = (".", "raw", "MNIST/raw")  # the last ones as torchvision makes them
PARQUET_FOLDERS = (".", "mnist")
_PREFIXES = {"train": "train", "test": "t10k"}


def mnist(
    root: str | pathlib.Path,
    *,
    views: Views = PLAIN,
    foreseen: Foreseen = unheard,
) -> Split:
    """MNIST (LeCun et al. 1998): 60,000 training and 10,000 test images of 1×28×28.

    Nothing is downloaded. Another number of images than published is logged, not refused.

    Args:
        root: folder that holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the
            two files ``t10k-...`` (or the same names with ``.gz``), itself or in ``raw`` or
            ``MNIST/raw``; or ``train-*.parquet`` and ``test-*.parquet``, itself or in ``mnist``, as
            on the Hugging Face hub; or ``train`` and ``test``, each with folders 0 to 9 of images,
            which are read class by class. Other files beside these are ignored.
        views: of the training images; without flips, as a flipped digit is another sign.
        foreseen: is told the number of training images and their size before they are decoded.

    Raises:
        FileNotFoundError: if a folder or file is missing; the message says what belongs where.
        ValueError: naming the file (and image) that is damaged or is no part of MNIST.
    """
    views = dataclasses.replace(views, flips=False)
    train, test = read_mnist(root, foreseen=foreseen)
    return image_split(train, test, classes=len(CLASSES), views=views)


def read_mnist(root: str | pathlib.Path, *, foreseen: Foreseen = unheard) -> tuple[Part, Part]:
    """Training and test part of MNIST, as uint8; arguments and errors as for ``mnist``."""
    folder = existing_folder(root)
    idx = [path for path in (folder / name for name in IDX_FOLDERS) if any(path.glob("*-ubyte*"))]
    parquet = [
        path for path in (folder / name for name in PARQUET_FOLDERS) if any(path.glob("*.parquet"))
    ]
    folders = [path for path in (folder / TRAIN,) if path.is_dir()]
    if len(found := idx + parquet + folders) > 1:
        raise ValueError(
            f"{folder} holds MNIST more than once ({', '.join(map(str, found))}); name one of "
            "these folders, or move the others elsewhere"
        )
    if idx:
        pairs = [_idx_files(idx[0], part) for part in ("train", "test")]
        train, test = (_read_idx(*pair) for pair in pairs)
        foreseen(len(train[1]), IMAGE_SIZE)
    elif parquet:
        train, test = read_shards(
            parquet[0], image="image", image_size=IMAGE_SIZE, channels=1, foreseen=foreseen
        )
    elif folders:
        train, test = read_parts(
            folder, classes=CLASSES, image_size=IMAGE_SIZE, channels=1, foreseen=foreseen
        )
    else:
        raise FileNotFoundError(
            f"{folder} holds no MNIST; put train-images-idx3-ubyte.gz and the three files beside "
            "it there, or the hub's train-*.parquet and test-*.parquet, or the images into "
            f"{folder / TRAIN / '0'} to {folder / 'test' / '9'}"
        )
    return (
        note_size("MNIST's training set", train, TRAIN_SIZE),
        note_size("MNIST's test set", test, TEST_SIZE),
    )


def _idx_files(folder: pathlib.Path, part: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Images and labels; where both are there, the unpacked file and not its archive."""
    prefix, found = _PREFIXES[part], []
    for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        present = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        if not present:
            raise FileNotFoundError(f"{folder} lacks {name} or {name}.gz; download it again")
        found.append(present[0])
    return found[0], found[1]


def _read_idx(images: pathlib.Path, labels: pathlib.Path) -> Part:
    pixels, numbers = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
    if pixels.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE):
        height, width = pixels.shape[1:]
        raise ValueError(f"{images}: images are {width}×{height} pixels, not 28×28")
    if len(pixels) != len(numbers):
        raise ValueError(f"{images} holds {len(pixels)} images and {labels} {len(numbers)} labels")
    return torch.from_numpy(pixels).unsqueeze(1), checked_labels(numbers.tolist(), str(labels))
