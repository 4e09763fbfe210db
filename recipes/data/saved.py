"""Any images with labels in a table: saved by Hugging Face's ``datasets``, parquet or arrow."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from recipes.data.augment import PLAIN, Views
from recipes.data.class_folders import TESTS, TRAIN, test_name
from recipes.data.decode import decode, side
from recipes.data.packages import VISION, package
from recipes.data.parquet import Encoded, encoded_rows, opened_table
from recipes.data.parts import (
    Foreseen,
    checked_labels,
    existing_folder,
    image_split,
    unheard,
)
from recipes.data.split import Split

PLACES = (".", "data")  # where parquet and arrow files may lie
KINDS = ("parquet", "arrow")


def saved_images(
    root: str | pathlib.Path,
    *,
    image: str | None = None,
    label: str | None = None,
    test: str | None = None,
    views: Views = PLAIN,
    foreseen: Foreseen = unheard,
) -> Split:
    """Any data set of images that lies on disk as tables with an image and a label column.

    All images have one size, with height equal to width, and are embedded in the tables. If all are
    grey they keep one channel, otherwise grey ones become RGB. Labels are classes by name, or
    integers from 0 on of which the training part has each; text numbers the classes alphabetically.

    Args:
        root: what ``DatasetDict.save_to_disk`` wrote; or a folder, with or without a folder
            ``data`` in it, of files ``train.parquet``, ``train-*.parquet`` and the same for the
            test part, or ``.arrow``.
        image: name of the column of images; ``None``: the only one of that type.
        label: name of the column of labels; ``None``: the only one whose type names classes, or
            else the only one of integers.
        test: name of the test part; ``None`` finds it.
        views: of the training images.
        foreseen: is told the number of training images and their size before they are decoded.

    Raises:
        FileNotFoundError: if a part or file is missing.
        ValueError: naming what is ambiguous, or the table and row that cannot be used.
    """
    folder = existing_folder(root)
    parts = [
        [encoded_rows(rows, where, image=image, label=label) for rows, where in tables]
        for tables in _parts(folder, test)
    ]
    tables = [table for part in parts for table in part]
    names = [(table.where, row) for table in tables for row in range(len(table.images))]
    if not names:
        raise ValueError(f"{folder}: its tables hold no rows")
    classes, numbers = _numbered(parts)
    images = [encoded for table in tables for encoded in table.images]

    def name(row: int) -> str:
        return f"{names[row][0]}: row {names[row][1]}"

    count, image_size = sum(len(table.images) for table in parts[0]), side(images[0], name=name(0))
    foreseen(count, image_size)
    pixels = decode(images, image_size=image_size, name=name, description="reading images")
    return image_split(
        (pixels[:count], numbers[0]),
        (pixels[count:], numbers[1]),
        classes=classes,
        views=views,
    )


def _parts(folder: pathlib.Path, test: str | None) -> list[Iterator[tuple[Any, str]]]:
    """The tables of the training and of the test part, each with its name."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved_parts(folder, test)
    for place, kind in ((folder / name, kind) for kind in KINDS for name in PLACES):
        if files := _files(place, TRAIN, kind):
            found = [name for name in TESTS if _files(place, name, kind)]
            name = test_name(found, place, wanted=test)
            if not (others := _files(place, name, kind)):
                raise FileNotFoundError(f"{place} holds no {name}-*.{kind}")
            return [_opened(files), _opened(others)]
    raise FileNotFoundError(
        f"{folder} holds neither a data set that was written by save_to_disk nor {TRAIN}-*.parquet "
        f"or {TRAIN}-*.arrow, itself or in its folder data"
    )


def _saved_parts(folder: pathlib.Path, test: str | None) -> list[Iterator[tuple[Any, str]]]:
    datasets = package("datasets", purpose="reading saved data sets", extra=VISION)
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # pyarrow's and datasets' own kinds
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        raise ValueError(f"{folder} cannot be read as a saved data set: {reason}") from error
    if not isinstance(saved, datasets.DatasetDict):
        raise FileNotFoundError(
            f"{folder} holds one part and no test part; save it with both, e.g. "
            "dataset.train_test_split(0.2, seed=0).save_to_disk(DIR)"
        )
    name = test_name([name for name in TESTS if name in saved], folder, wanted=test)
    if missing := [part for part in (TRAIN, name) if part not in saved]:
        raise FileNotFoundError(f"{folder} has the parts {', '.join(saved)} and no {missing[0]}")
    return [iter([(saved[part], f"{folder / part}")]) for part in (TRAIN, name)]


def _files(folder: pathlib.Path, part: str, kind: str) -> list[pathlib.Path]:
    """``part.kind`` and ``part-*.kind`` in order.

    Raises:
        FileNotFoundError: if a shard is missing by the numbers in the names.
    """
    files = sorted({*folder.glob(f"{part}.{kind}"), *folder.glob(f"{part}-*.{kind}")})
    for file in files:
        match = re.fullmatch(rf"{part}-(\d+)-of-(\d+)(-\w+)?\.{kind}", file.name)
        if match is None:
            continue
        there = {name.name[: len(part) + 6] for name in files}
        for shard in range(int(match[2])):
            if f"{part}-{shard:05}" not in there:
                raise FileNotFoundError(
                    f"{folder / f'{part}-{shard:05}-of-{match[2]}'}*.{kind} is missing: {part} "
                    f"has {int(match[2])} such files"
                )
    return files


def _opened(files: list[pathlib.Path]) -> Iterator[tuple[Any, str]]:
    for file in files:
        with opened_table(file) as rows:
            yield rows, str(file)


def _numbered(parts: list[list[Encoded]]) -> tuple[int, list[torch.Tensor]]:
    """The number of classes, and the labels of each part."""
    tables = [table for part in parts for table in part]
    for table in tables[1:]:
        if table.classes != tables[0].classes:
            raise ValueError(f"{table.where} names other classes than {tables[0].where}")
    train = [label for table in parts[0] for label in table.labels]
    if tables[0].classes is not None:
        classes = len(tables[0].classes)
    elif all(isinstance(label, str) for label in train):
        order = {name: number for number, name in enumerate(sorted(set(train)))}
        classes = len(order)
        # A label that no training image has stays a text, which is refused below by its row.
        for table in tables:
            table.labels[:] = [order.get(label, label) for label in table.labels]
    else:
        numbers = {label for label in train if isinstance(label, int)}
        classes = 1 + max(numbers, default=-1)
        # More gaps than images: then these are no numbers of classes, whatever they are.
        if gaps := sorted(set(range(min(classes, len(train) + 1))) - numbers):
            raise ValueError(
                f"no training image has label {gaps[0]}, and others have up to {classes - 1}; "
                "number the classes from 0 on"
            )
    if classes < 2:
        raise ValueError(f"{tables[0].where}: {classes} class; there is nothing to tell apart")
    return classes, [
        torch.cat([checked_labels(table.labels, table.where, classes=classes) for table in part])
        for part in parts
    ]
