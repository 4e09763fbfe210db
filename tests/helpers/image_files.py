"""Small data sets of images in the formats in which the real ones are handed out."""

from __future__ import annotations

import gzip
import io
import pathlib
import struct
from collections.abc import Sequence

import numpy as np

from recipes.data.photographs import CLASSES


def random_images(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """uint8 pixels (count, 3, 32, 32) and labels, every class in turn."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return pixels, np.arange(count) % 10


def python2_batch(pixels: np.ndarray, labels: np.ndarray, *, name: str = "a batch") -> bytes:
    """A batch as Python 2 pickled it (protocol 2, byte strings): what the archive holds."""
    data = np.ascontiguousarray(pixels.reshape(len(pixels), -1))
    rows, columns = data.shape
    array = b"".join(
        [
            b"cnumpy.core.multiarray\n_reconstruct\n",
            b"(cnumpy\nndarray\nK\x00\x85" + _string(b"b") + b"tR",
            b"(K\x01" + _integer(rows) + _integer(columns) + b"\x86",
            b"cnumpy\ndtype\n(" + _string(b"u1") + b"K\x00K\x01tR",
            b"(K\x03" + _string(b"|") + b"NNN" + _integer(-1) * 2 + b"K\x00tb",
            b"\x89" + b"T" + struct.pack("<i", data.size) + data.tobytes() + b"tb",
        ]
    )
    entries = [
        (b"batch_label", _string(name.encode())),
        (b"labels", b"](" + b"".join(_integer(int(label)) for label in labels) + b"e"),
        (b"data", array),
        (b"filenames", b"](" + b"".join(_string(b"%d.png" % i) for i in range(rows)) + b"e"),
    ]
    return python2_dictionary(entries)


def python2_dictionary(entries: list[tuple[bytes, bytes]]) -> bytes:
    """A pickled dictionary of entries whose values are opcodes."""
    items = b"".join(_string(key) + value for key, value in entries)
    return b"\x80\x02}(" + items + b"u."


def python2_meta(names: tuple[str, ...] = CLASSES) -> bytes:
    """The content of ``batches.meta``."""
    listed = b"](" + b"".join(_string(name.encode()) for name in names) + b"e"
    return python2_dictionary([(b"num_cases_per_batch", _integer(10000)), (b"label_names", listed)])


def _string(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def _integer(number: int) -> bytes:
    return b"K" + bytes([number]) if 0 <= number < 256 else b"J" + struct.pack("<i", number)


def write_batches(root: pathlib.Path, *, size: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """A folder ``cifar-10-batches-py`` of six batches; returns all pixels and labels in order."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels, labels = random_images(6 * size)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        rows = slice(number * size, (number + 1) * size)
        (folder / name).write_bytes(python2_batch(pixels[rows], labels[rows], name=name))
    (folder / "batches.meta").write_bytes(python2_meta())
    return pixels, labels


def png(image: np.ndarray, *, mode: str = "RGB") -> bytes:
    """The PNG of an image (3, H, W), or of a grey one (1, H, W) with mode L."""
    from PIL import Image

    stream = io.BytesIO()
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    Image.fromarray(pixels).convert(mode).save(stream, format="png")
    return stream.getvalue()


def write_parquet(
    path: pathlib.Path, images: list[bytes | None], labels: list[int | None], *, image: str = "img"
) -> None:
    """A parquet file as on the hub: encoded images, and ``datasets``' features in the schema."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    names = [*CLASSES, "spare"]  # so that a label can be wrong
    features = datasets.Features(
        {image: datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    cells = [{"bytes": encoded, "path": "0.png"} for encoded in images]
    table = pyarrow.table({image: cells, "label": labels}, schema=features.arrow_schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path)


def write_hub_files(
    root: pathlib.Path, *, shards: int = 1, size: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Training shards and one test file in ``plain_text``; returns all pixels and labels."""
    pixels, labels = random_images((shards + 1) * size)
    names = [f"train-{shard:05}-of-{shards:05}.parquet" for shard in range(shards)]
    for number, name in enumerate([*names, "test-00000-of-00001.parquet"]):
        rows = slice(number * size, (number + 1) * size)
        encoded = [png(image) for image in pixels[rows]]
        write_parquet(root / "plain_text" / name, encoded, labels[rows].tolist())
    return pixels, labels


def random_digits(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """uint8 pixels (count, 1, 28, 28) and labels, every class in turn."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 1, 28, 28), dtype=np.uint8)
    return pixels, np.arange(count) % 10


def write_class_folders(
    folder: pathlib.Path,
    pixels: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str] = CLASSES,
    *,
    suffix: str = ".png",
) -> np.ndarray:
    """A folder of images for every class; returns the pixels in the order of the folders.

    Numbers in the names fall, so that the order of the names is not the order of writing.
    """
    mode = "L" if pixels.shape[1] == 1 else "RGB"
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = folder / classes[label] / f"n{9999 - index}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(image, mode=mode))
    return pixels[np.lexsort((-np.arange(len(labels)), labels))]


def idx(array: np.ndarray) -> bytes:
    """An IDX file of bytes, as MNIST is handed out: magic number, shape, content."""
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_mnist(
    folder: pathlib.Path, *, train: int = 20, test: int = 10, zipped: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The four IDX files; returns all pixels and labels in order."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = random_digits(train + test)
    for part, rows in (("train", slice(0, train)), ("t10k", slice(train, None))):
        for name, array in (
            (f"{part}-images-idx3-ubyte", pixels[rows, 0]),
            (f"{part}-labels-idx1-ubyte", labels[rows]),
        ):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))
    return pixels, labels


def write_cinic(root: pathlib.Path, *, per_class: int = 2) -> dict[str, np.ndarray]:
    """Folders of PNG files for every split and class; returns the pixels, ordered by class."""
    written = {}
    for number, split in enumerate(("train", "valid", "test")):
        pixels, _ = random_images(10 * per_class, seed=number)
        for index, image in enumerate(pixels):
            folder = root / split / CLASSES[index // per_class]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"n{index:04}.png").write_bytes(png(image))
        written[split] = pixels
    return written
