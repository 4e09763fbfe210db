"""CINIC-10 from folders of PNG files for every split and class."""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest

from recipes.data import cinic10
from recipes.data.photographs import CLASSES
from tests.helpers.image_files import png, random_images, write_cinic


@pytest.fixture
def root(tmp_path):
    write_cinic(tmp_path, per_class=1)
    return tmp_path


def test_a_missing_split_is_named(root):
    shutil.rmtree(root / "valid")
    with pytest.raises(FileNotFoundError, match=r"lacks the folder 'valid'.*train, valid, test"):
        cinic10(root)


def test_missing_class_folders_are_named(root):
    shutil.rmtree(root / "test" / "ship")
    with pytest.raises(FileNotFoundError, match=r"test lacks the class folder ship;"):
        cinic10(root)
    shutil.rmtree(root / "test" / "bird")
    with pytest.raises(FileNotFoundError, match=r"test lacks the class folders bird, ship;"):
        cinic10(root)


def test_a_folder_that_would_shift_the_labels_is_named(root):
    (root / "train" / "bicycle").mkdir()
    with pytest.raises(ValueError, match=r"train holds bicycle, which is no class"):
        cinic10(root)


def test_no_folder(root):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        cinic10(root / "nowhere")


def test_the_images_are_those_written_with_the_classes_in_order(tmp_path, caplog):
    written = write_cinic(tmp_path, per_class=3)
    with caplog.at_level(logging.WARNING):
        split = cinic10(tmp_path)
    assert (split.channels, split.classes, split.image_size) == (3, 10, 32)
    assert np.array_equal(split.train.pixels, written["train"])
    assert np.array_equal(split.test.pixels, written["test"])
    expected = [number for number in range(10) for _ in range(3)]
    assert split.train.labels.tolist() == split.test.labels.tolist() == expected
    assert tuple(sorted(CLASSES)) == CLASSES
    assert "'train' has 30 images here, not 90000" in caplog.text


def test_the_validation_split_is_added_when_asked_for(tmp_path):
    written = write_cinic(tmp_path, per_class=1)
    split = cinic10(tmp_path, train_on_valid=True)
    assert np.array_equal(split.train.pixels[:10], written["train"])
    assert np.array_equal(split.train.pixels[10:], written["valid"])
    assert split.train.labels.tolist() == 2 * list(range(10))
    assert np.array_equal(split.test.pixels, written["test"])


def test_grey_images_become_rgb(tmp_path):
    write_cinic(tmp_path, per_class=1)
    grey = np.repeat(random_images(1)[0][0][:1], 3, axis=0)
    (tmp_path / "train" / "cat" / "n0003.png").write_bytes(png(grey, mode="L"))
    assert np.array_equal(cinic10(tmp_path).train.pixels[3], grey)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot identify"),
        (b"\x89PNG\r\n\x1a\n", ""),
        (png(random_images(1)[0][0])[:1500], "truncated"),
        (png(np.zeros((3, 33, 32), np.uint8)), "is 32×33 pixels, not 32×32"),
        (png(np.zeros((3, 32, 32), np.uint8), mode="RGBA"), "has mode RGBA"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_an_image_that_cannot_be_used_is_named_by_its_path(tmp_path, split, content, message):
    write_cinic(tmp_path, per_class=1)
    path = tmp_path / split / "frog" / "n0006.png"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}: .*{message}"):
        cinic10(tmp_path)


def test_a_class_without_images_is_named(tmp_path):
    write_cinic(tmp_path, per_class=1)
    (tmp_path / "test" / "dog" / "n0005.png").unlink()
    with pytest.raises(FileNotFoundError, match="dog"):
        cinic10(tmp_path)
