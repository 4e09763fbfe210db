"""MNIST from the original IDX files and the hub's parquet files."""

from __future__ import annotations

import gzip
import logging

import numpy as np
import pytest
import torch

from recipes.data import mnist
from tests.helpers.image_files import (
    idx,
    png,
    random_digits,
    write_class_folders,
    write_mnist,
    write_parquet,
)

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_the_images_are_those_written_in_order(tmp_path, caplog, place, zipped):
    pixels, labels = write_mnist(tmp_path / place, zipped=zipped)
    with caplog.at_level(logging.WARNING):
        split = mnist(tmp_path)
    assert (split.channels, split.classes, split.image_size) == (1, 10, 28)
    assert np.array_equal(split.train.pixels, pixels[:20])
    assert np.array_equal(split.test.pixels, pixels[20:])
    assert split.train.labels.tolist() == labels[:20].tolist()
    assert split.test.labels.tolist() == labels[20:].tolist()
    assert "20 images here, not 60000" in caplog.text
    image, label = split.train[3]
    assert image.shape == (1, 28, 28)
    assert torch.allclose(image, torch.from_numpy(pixels[3]) / 127.5 - 1)
    assert int(label) == 3


def test_beside_its_archive_the_unpacked_file_is_read(tmp_path):
    pixels, _ = write_mnist(tmp_path)
    write_mnist(tmp_path, zipped=True)
    (tmp_path / f"{IMAGES}.gz").write_bytes(b"not even gzip")
    assert np.array_equal(mnist(tmp_path).train.pixels, pixels[:20])


@pytest.mark.parametrize("place", [".", "mnist"])
def test_the_hub_s_parquet_files_are_read(tmp_path, place):
    pixels, labels = random_digits(30)
    for part, rows in (("train", slice(0, 20)), ("test", slice(20, None))):
        write_parquet(
            tmp_path / place / f"{part}-00000-of-00001.parquet",
            [png(image, mode="L") for image in pixels[rows]],
            labels[rows].tolist(),
            image="image",
        )
    split = mnist(tmp_path)
    assert (split.channels, split.image_size) == (1, 28)
    assert np.array_equal(split.train.pixels, pixels[:20])
    assert np.array_equal(split.test.pixels, pixels[20:])
    assert split.test.labels.tolist() == labels[20:].tolist()


def test_two_layouts_are_a_question(tmp_path):
    write_mnist(tmp_path)
    write_class_folders(tmp_path / "train", *random_digits(20), tuple("0123456789"))
    with pytest.raises(ValueError, match="holds MNIST more than once"):
        mnist(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no MNIST; put train-images-idx3-ubyte"):
        mnist(tmp_path)
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks t10k-labels-idx1-ubyte or .*\.gz"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, b"", "does not begin as an IDX file of bytes in 3 dimensions"),
        (IMAGES, idx(np.zeros((20, 28, 28)))[:-1], r"holds 15679 bytes, not the 15680"),
        (IMAGES, idx(np.zeros((20, 28, 28))) + b"x", r"holds 15681 bytes"),
        (IMAGES, idx(np.zeros((20, 20, 28))), r"images are 28×20 pixels, not 28×28"),
        (IMAGES, idx(np.zeros((19, 28, 28))), r"holds 19 images and .* 20 labels"),
        (IMAGES, idx(np.zeros(20)), "3 dimensions"),
        (IMAGES, b"\x00\x00\x0d\x03" + bytes(12), "IDX file of bytes"),  # of floats
        (LABELS, idx(np.arange(20)), "label 10 of image 10 is no class from 0 to 9"),
        (LABELS, idx(np.zeros((20, 1))), "1 dimensions"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    write_mnist(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        mnist(tmp_path)


@pytest.mark.parametrize("change", ["cut off", "flipped bit", "no gzip"])
def test_a_damaged_archive_is_named(tmp_path, change):
    write_mnist(tmp_path, zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes(
        {"cut off": whole[:-30], "flipped bit": flipped, "no gzip": gzip.decompress(whole)}[change]
    )
    with pytest.raises(ValueError, match=rf"{path} is damaged"):
        mnist(tmp_path)
