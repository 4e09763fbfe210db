"""Images in the hub's parquet files, read through Hugging Face's ``datasets``, offline."""

from __future__ import annotations

import pathlib
import re
import tempfile
from typing import Any

import torch

from recipes.data.decode import decode
from recipes.data.packages import VISION, package
from recipes.data.photographs import Part, checked_labels

IMAGE, LABEL = "img", "label"
ROWS = 4096  # read at once


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


def read_parquet(files: list[pathlib.Path], image_size: int) -> Part:
    """Pixels and labels of all rows, in order.

    The copies that ``datasets`` makes lie in a temporary folder and go with it.

    Raises:
        ValueError: naming the file, and the row that is damaged.
    """
    datasets = package("datasets", purpose="reading parquet files", extra=VISION)
    parts = []
    for file in files:
        with tempfile.TemporaryDirectory(prefix="parquet-") as cache:
            try:
                rows = datasets.Dataset.from_parquet(str(file), cache_dir=cache)
            except Exception as error:  # pyarrow's and datasets' own kinds
                reason = (str(error.__cause__ or error).splitlines() or [""])[0]
                raise ValueError(f"{file} cannot be read as parquet: {reason}") from error
            parts.append(_read_rows(rows, file, image_size))
            del rows  # before the folder that it is mapped from
    pixels, labels = zip(*parts, strict=True)
    return torch.cat(pixels), torch.cat(labels)


def _read_rows(rows: Any, file: pathlib.Path, image_size: int) -> Part:
    if missing := [name for name in (IMAGE, LABEL) if name not in rows.column_names]:
        raise ValueError(
            f"{file} has the columns {', '.join(rows.column_names)} and lacks {', '.join(missing)}"
        )
    images: list[bytes] = []
    labels: list[object] = []
    # As arrow: otherwise datasets would decode the images itself, one after the other.
    for table in rows.with_format("arrow").iter(batch_size=ROWS):
        for image in table[IMAGE].to_pylist():
            encoded = image.get("bytes") if isinstance(image, dict) else None
            if not isinstance(encoded, bytes):
                raise ValueError(
                    f"{file}: row {len(images)} has no image bytes in {IMAGE!r}; every image has "
                    "to be embedded in the file"
                )
            images.append(encoded)
        labels.extend(table[LABEL].to_pylist())
    pixels = decode(
        images,
        image_size=image_size,
        name=lambda row: f"{file}: row {row}",
        description=file.name,
    )
    return pixels, checked_labels(labels, str(file))
