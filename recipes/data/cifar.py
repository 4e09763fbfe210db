"""CIFAR-10 from disk: the original pickled batches, the hub's parquet files, or class folders."""

from __future__ import annotations

import pathlib

import numpy as np
import torch

from recipes.data.augment import PLAIN, Views
from recipes.data.batch_pickle import read_batch_pickle
from recipes.data.class_folders import TRAIN as TRAIN_FOLDER
from recipes.data.class_folders import read_parts
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
from recipes.data.photographs import CLASSES, IMAGE_SIZE
from recipes.data.split import Split

BATCHES = "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
META = "batches.meta"
TRAIN_SIZE, TEST_SIZE = 50_000, 10_000
PARQUET = "plain_text"


def cifar10(
    root: str | pathlib.Path,
    *,
    views: Views = PLAIN,
    foreseen: Foreseen = unheard,
) -> Split:
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 3×32×32.

    Nothing is downloaded. Another number of images than published is logged, not refused.

    Args:
        root: folder that holds ``cifar-10-batches-py`` (or is it), as torchvision unpacks it; or
            one that holds ``train-*.parquet`` and ``test-*.parquet``, itself or in its folder
            ``plain_text``, as the data set ``cifar10`` lies on the Hugging Face hub; or one that
            holds ``train`` and ``test``, each with a folder of images for every class, which are
            read class by class in alphabetical order.
        views: of the training images.
        foreseen: is told the number of training images and their size before they are decoded.

    Raises:
        FileNotFoundError: if a folder or file is missing; the message says what belongs where.
        ValueError: naming the file (and image) that is damaged or is no part of CIFAR-10.
    """
    folder = existing_folder(root)
    batches = [path for path in (folder, folder / BATCHES) if _holds_batches(path)]
    parquet = [path for path in (folder, folder / PARQUET) if any(path.glob("*.parquet"))]
    folders = [path for path in (folder / TRAIN_FOLDER,) if path.is_dir()]
    if len(found := batches + parquet + folders) > 1:
        raise ValueError(
            f"{folder} holds CIFAR-10 more than once ({', '.join(map(str, found))}); "
            "name one of these folders, or move the others elsewhere"
        )
    if batches:
        train, test = _read_batches(batches[0])
        foreseen(len(train[1]), IMAGE_SIZE)
    elif parquet:
        train, test = read_shards(parquet[0], image="img", image_size=IMAGE_SIZE, foreseen=foreseen)
    elif folders:
        train, test = read_parts(folder, classes=CLASSES, image_size=IMAGE_SIZE, foreseen=foreseen)
    else:
        raise FileNotFoundError(
            f"{folder} holds no CIFAR-10; unpack cifar-10-python.tar.gz there, which makes the "
            f"folder {BATCHES} with {TRAIN[0]} to {TRAIN[-1]} and {TEST}, put the hub's "
            f"train-*.parquet and test-*.parquet into {folder / PARQUET}, or the images into "
            f"{folder / 'train' / 'CLASS'} and {folder / 'test' / 'CLASS'}"
        )
    return image_split(
        note_size("CIFAR-10's training set", train, TRAIN_SIZE),
        note_size("CIFAR-10's test set", test, TEST_SIZE),
        classes=len(CLASSES),
        views=views,
    )


def _holds_batches(folder: pathlib.Path) -> bool:
    named = folder.name == BATCHES and folder.is_dir()
    return named or any((folder / name).exists() for name in (*TRAIN, TEST))


def _read_batches(folder: pathlib.Path) -> tuple[Part, Part]:
    if missing := [name for name in (*TRAIN, TEST) if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}; unpack cifar-10-python.tar.gz again"
        )
    if (folder / META).is_file():
        _check_classes(folder / META)
    parts = [_read_batch(folder / name) for name in TRAIN]
    pixels, labels = zip(*parts, strict=True)
    return (torch.cat(pixels), torch.cat(labels)), _read_batch(folder / TEST)


def _check_classes(path: pathlib.Path) -> None:
    names = read_batch_pickle(path).get("label_names")
    if not isinstance(names, list):
        raise ValueError(f"{path} has no list label_names; it is no batches.meta of CIFAR-10")
    found = tuple(name.decode() if isinstance(name, bytes) else name for name in names)
    if found != CLASSES:
        raise ValueError(f"{path} names the classes {found}, not CIFAR-10's {CLASSES}")


def _read_batch(path: pathlib.Path) -> Part:
    content = read_batch_pickle(path)
    if missing := sorted({"data", "labels"} - set(content)):
        raise ValueError(f"{path} lacks {missing}; it is no batch of CIFAR-10")
    data, labels = content["data"], content["labels"]
    width = 3 * IMAGE_SIZE**2
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != width:
        shape = data.shape if isinstance(data, np.ndarray) else type(data).__name__
        raise ValueError(f"{path}: data has shape {shape}, not (images, {width})")
    if not isinstance(labels, list) or len(labels) != len(data):
        count = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"{path}: labels are {count}, not a list of {len(data)}, one an image")
    pixels = torch.from_numpy(data.copy()).view(-1, 3, IMAGE_SIZE, IMAGE_SIZE)
    return pixels, checked_labels(labels, str(path))
