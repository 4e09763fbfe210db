"""Images in parquet and arrow files, read through Hugging Face's ``datasets``, offline."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from recipes.data.decode import decode
from recipes.data.packages import VISION, package
from recipes.data.parts import Foreseen, Part, checked_labels

ROWS = 4096  # read at once


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The rows of one table, not yet decoded.

    Attributes:
        where: what to call the table in an error.
        images: the encoded image of each row.
        labels: of each row, as the table holds them.
        classes: names of the classes, where the table states them.
    """

    where: str
    images: list[bytes]
    labels: list[Any]
    classes: tuple[str, ...] | None


def parquet_files(folder: pathlib.Path, part: str) -> list[pathlib.Path]:
    """The files ``<part>*.parquet`` in order.

    Raises:
        FileNotFoundError: if there is none, or a shard is missing by the numbers in the names
            (``train-00000-of-00002.parquet``).
    """
    files = sorted(folder.glob(f"{part}*.parquet"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no {part}*.parquet; put the hub's files of that part there"
        )
    for match in [re.fullmatch(r"(.*-)\d+-of-(\d+)\.parquet", file.name) for file in files]:
        if match is None:
            continue
        prefix, count = match.groups()
        for shard in range(int(count)):
            wanted = folder / f"{prefix}{shard:05}-of-{count}.parquet"
            if wanted not in files:
                raise FileNotFoundError(f"{wanted} is missing: {part} has {int(count)} such files")
    return files


def read_shards(
    folder: pathlib.Path,
    *,
    image: str,
    image_size: int,
    channels: int = 3,
    foreseen: Foreseen,
) -> tuple[Part, Part]:
    """Training and test part of a data set of the hub, with labels from 0 to 9, in order.

    Args:
        folder: of ``train-*.parquet`` and ``test-*.parquet``.
        image: name of the column of images.
        image_size: height and width that every image must have.
        channels: as for ``decode``.
        foreseen: is told the number of training images and their size before they are decoded.

    Raises:
        FileNotFoundError: as ``parquet_files``.
        ValueError: naming the file, and the row that has no image or is damaged.
    """
    train, test = (
        [_read(file, image) for file in parquet_files(folder, part)] for part in ("train", "test")
    )
    foreseen(sum(len(table.images) for table in train), image_size)
    return _decoded(train, image_size, channels), _decoded(test, image_size, channels)


def _read(file: pathlib.Path, image: str) -> Encoded:
    """Its rows; nothing is decoded yet."""
    with opened_table(file) as rows:
        return encoded_rows(rows, str(file), image=image, label="label")


def _decoded(tables: list[Encoded], image_size: int, channels: int) -> Part:
    parts: list[Part] = []
    for table in tables:
        pixels = decode(
            table.images,
            image_size=image_size,
            channels=channels,
            name=lambda row, where=table.where: f"{where}: row {row}",  # type: ignore[misc]
            description=f"reading {pathlib.Path(table.where).name}",
        )
        parts.append((pixels, checked_labels(table.labels, table.where)))
    return torch.cat([pixels for pixels, _ in parts]), torch.cat([labels for _, labels in parts])


@contextlib.contextmanager
def opened_table(file: pathlib.Path) -> Iterator[Any]:
    """The ``datasets.Dataset`` in a parquet or arrow file.

    The copies that ``datasets`` makes of parquet lie in a temporary folder and go with it.

    Raises:
        ValueError: if it cannot be read.
    """
    datasets = package("datasets", purpose=f"reading {file.suffix} files", extra=VISION)
    with tempfile.TemporaryDirectory(prefix="parquet-") as cache:
        try:
            if file.suffix == ".arrow":
                rows = datasets.Dataset.from_file(str(file))
            else:
                rows = datasets.Dataset.from_parquet(str(file), cache_dir=cache)
        except Exception as error:  # pyarrow's and datasets' own kinds
            reason = (str(error.__cause__ or error).splitlines() or [""])[0]
            kind = file.suffix.removeprefix(".")
            raise ValueError(f"{file} cannot be read as {kind}: {reason}") from error
        yield rows
        del rows  # before the folder that it is mapped from


def encoded_rows(
    rows: Any, where: str, *, image: str | None = None, label: str | None = None
) -> Encoded:
    """The images and labels of a ``datasets.Dataset``, in order.

    Args:
        rows: the table.
        where: what to call it in an error.
        image: name of the column of images; ``None``: the only one of that type.
        label: name of the column of labels; ``None``: the only one whose type names classes, or
            else the only one of integers.

    Raises:
        ValueError: if there is no such column, or it could be one of several; naming the row that
            has no image.
    """
    datasets = package("datasets", purpose="reading images", extra=VISION)
    wanted = [name for name in (image, label) if name is not None]
    if missing := [name for name in wanted if name not in rows.column_names]:
        raise ValueError(
            f"{where} has the columns {', '.join(rows.column_names)} and lacks {', '.join(missing)}"
        )

    def is_image(kind: Any) -> bool:
        return isinstance(kind, datasets.Image) or (isinstance(kind, dict) and "bytes" in kind)

    def is_integer(kind: Any) -> bool:
        return isinstance(kind, datasets.Value) and "int" in kind.dtype

    kinds = rows.features
    image = image or _only(kinds, where, "image", [is_image])
    label = label or _only(
        kinds, where, "label", [lambda kind: isinstance(kind, datasets.ClassLabel), is_integer]
    )
    images: list[bytes] = []
    labels: list[Any] = []
    # As arrow: otherwise datasets would decode the images itself, one after the other.
    for table in rows.select_columns([image, label]).with_format("arrow").iter(batch_size=ROWS):
        for cell in table[image].to_pylist():
            encoded = cell.get("bytes") if isinstance(cell, dict) else None
            if not isinstance(encoded, bytes):
                raise ValueError(
                    f"{where}: row {len(images)} has no image bytes in {image!r}; every image has "
                    "to be embedded in the file"
                )
            images.append(encoded)
        labels.extend(table[label].to_pylist())
    named = isinstance(kinds[label], datasets.ClassLabel)
    return Encoded(where, images, labels, tuple(kinds[label].names) if named else None)


def _only(kinds: dict[str, Any], where: str, what: str, tests: list[Callable[[Any], bool]]) -> str:
    """The column that passes the first of the tests that any passes."""
    for test in tests:
        found = [name for name, kind in kinds.items() if test(kind)]
        if len(found) > 1:
            raise ValueError(
                f"{where} has several columns that may be the {what}, {', '.join(found)}; name "
                f"one by data.{what}_column"
            )
        if found:
            return found[0]
    kind = "the type of an image" if what == "image" else "classes or integers"
    raise ValueError(
        f"{where} has the columns {', '.join(kinds)}, of which none has {kind}; name one by "
        f"data.{what}_column"
    )
