"""CIFAR-10 from the hub's parquet files."""

from __future__ import annotations

import pathlib
import socket
import tempfile

import numpy as np
import pytest

from recipes.data.cifar import cifar10
from tests.helpers.image_files import (
    png,
    random_images,
    write_batches,
    write_hub_files,
    write_parquet,
)

TRAIN = "plain_text/train-00000-of-00001.parquet"


@pytest.fixture
def root(tmp_path):
    write_hub_files(tmp_path)
    return tmp_path


def _row(index: int = 0) -> bytes:
    return png(random_images(index + 1)[0][index])


def test_the_images_are_those_written_in_order_without_a_network(root, monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    pixels, labels = random_images(40)
    split = cifar10(root)
    assert (split.channels, split.classes, split.image_size) == (3, 10, 32)
    assert np.array_equal(split.train.pixels, pixels[:20])
    assert np.array_equal(split.test.pixels, pixels[20:])
    assert split.train.labels.tolist() == labels[:20].tolist()
    assert cifar10(root / "plain_text").test.fingerprint == split.test.fingerprint


def test_both_formats_give_the_same_data_set(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("batches")
    pixels, labels = write_batches(other, size=4)  # 24 images, of which 20 are for training
    write_parquet(root / TRAIN, [png(image) for image in pixels[:20]], labels[:20].tolist())
    assert cifar10(root).train.fingerprint == cifar10(other).train.fingerprint


def test_shards_are_put_together_and_none_may_be_missing(tmp_path):
    pixels, _ = write_hub_files(tmp_path, shards=3, size=7)
    assert np.array_equal(cifar10(tmp_path).train.pixels, pixels[:21])
    gone = tmp_path / "plain_text" / "train-00001-of-00003.parquet"
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00001-of-00003\.parquet is missing"):
        cifar10(tmp_path)


def test_no_copies_are_left_behind(root, tmp_path_factory, monkeypatch):
    place = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    before = sorted(root.rglob("*"))
    cifar10(root)
    assert not list(place.iterdir())
    assert sorted(root.rglob("*")) == before


def test_a_part_that_is_missing_is_named(root):
    (root / "plain_text" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no test\*\.parquet"):
        cifar10(root)


def test_two_formats_in_one_folder_are_a_question(root):
    write_batches(root)
    with pytest.raises(ValueError, match=r"more than once .*cifar-10-batches-py.*plain_text"):
        cifar10(root)


@pytest.mark.parametrize("where", [60, -100], ids=["in the pixels", "at the end"])
def test_a_damaged_image_is_named_by_file_and_row(root, where):
    damaged = bytearray(_row())
    if where > 0:
        damaged[where : where + 40] = bytes(40)
    else:
        damaged = damaged[:where]
    write_parquet(root / TRAIN, [_row(), _row(), bytes(damaged)], [0, 1, 2])
    with pytest.raises(ValueError, match=r"train-00000-of-00001\.parquet: row 2: "):
        cifar10(root)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ([b"no image", None], [0, 1], "row 1 has no image bytes"),
        ([b"no image", b""], [0, 1], "row 0: "),
        ([_row(), png(np.zeros((3, 32, 28), np.uint8))], [0, 1], "row 1: is 28×32 pixels"),
        ([_row(), png(np.zeros((3, 32, 32), np.uint8), mode="RGBA")], [0, 1], "mode RGBA"),
        ([_row(), png(np.zeros((3, 32, 32), np.uint8), mode="P")], [0, 1], "mode P"),
        ([_row(), _row()], [0, 10], "label 10 of image 1"),
        ([_row(), _row()], [None, 1], "label None of image 0"),
    ],
)
def test_rows_that_cannot_be_used_are_named(root, images, labels, message):
    write_parquet(root / TRAIN, images, labels)
    with pytest.raises(ValueError, match=rf"train-00000-of-00001\.parquet.*{message}"):
        cifar10(root)


def test_grey_images_become_rgb(root):
    grey = np.repeat(random_images(1)[0][0][:1], 3, axis=0)
    write_parquet(root / TRAIN, [png(grey, mode="L")], [3])
    assert np.array_equal(cifar10(root).train.pixels[0], grey)


def test_columns_of_another_data_set_are_named(root):
    write_parquet(root / TRAIN, [_row()], [0], image="picture")
    with pytest.raises(ValueError, match="columns picture, label and lacks img"):
        cifar10(root)


def test_a_file_that_is_no_parquet_is_named(root):
    whole = (root / TRAIN).read_bytes()
    for content in (b"PAR1 and nothing else", whole[: len(whole) // 2]):
        pathlib.Path(root / TRAIN).write_bytes(content)
        with pytest.raises(ValueError, match=r"train-.*cannot be read as parquet: \S"):
            cifar10(root)
