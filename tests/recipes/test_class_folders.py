"""Folders of images by class: the right images in the right order, and nothing passed over."""

from __future__ import annotations

import io
import pathlib
import shutil

import numpy as np
import pytest

from recipes.data import cifar10, image_folder, mnist
from recipes.data.photographs import CLASSES
from tests.helpers.image_files import (
    png,
    random_digits,
    random_images,
    write_batches,
    write_class_folders,
)

DIGITS = tuple("0123456789")
# A reader, its classes, and images of its kind.
READERS = {
    "cifar10": (cifar10, CLASSES, random_images),
    "mnist": (mnist, DIGITS, random_digits),
    "folder of photographs": (image_folder, CLASSES, random_images),
    "folder of digits": (image_folder, DIGITS, random_digits),
}


def _write(root, kind, *, test="test"):
    _, classes, draw = READERS[kind]
    train = write_class_folders(root / "train", *draw(30), classes)
    return train, write_class_folders(root / test, *draw(20, seed=1), classes)


@pytest.fixture(params=READERS)
def kind(request):
    return request.param


@pytest.fixture
def root(tmp_path, kind):
    _write(tmp_path, kind)
    return tmp_path


def _first(root, part="train"):
    return sorted((root / part).rglob("*.png"))[0]


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
def test_the_images_are_those_written_by_class_and_name(tmp_path, kind, test):
    train, held = _write(tmp_path, kind, test=test)
    split = READERS[kind][0](tmp_path)
    assert (split.channels, split.classes, split.image_size) == (train.shape[1], 10, train.shape[2])
    assert np.array_equal(split.train.pixels, train)
    assert np.array_equal(split.test.pixels, held)
    assert split.train.labels.tolist() == sorted(list(range(10)) * 3)
    assert split.test.labels.tolist() == sorted(list(range(10)) * 2)


def test_the_order_is_not_the_file_system_s(root, kind, monkeypatch):
    read = READERS[kind][0]
    before, listing = read(root).train.fingerprint, pathlib.Path.iterdir
    for order in (sorted, lambda found: sorted(found, reverse=True)):
        monkeypatch.setattr(pathlib.Path, "iterdir", lambda path, o=order: iter(o(listing(path))))
        assert read(root).train.fingerprint == before


def test_a_wrong_size_is_named(root, kind):
    path = _first(root)
    image = np.zeros((READERS[kind][2](1)[0].shape[1], 31, 20), np.uint8)
    path.write_bytes(png(image, mode="L" if len(image) == 1 else "RGB"))
    wrong = rf"{path}: is 20×31 pixels"
    with pytest.raises(ValueError, match=wrong):
        READERS[kind][0](root)


@pytest.mark.parametrize("mode", ["P", "RGBA", "1", "I;16"])
def test_another_mode_is_named(root, kind, mode):
    from PIL import Image

    path = _first(root, "test")
    size = READERS[kind][2](1)[0].shape[2:]
    if mode == "I;16":
        Image.fromarray(np.zeros(size, np.uint16)).save(path)
    else:
        path.write_bytes(png(np.zeros((3, *size), np.uint8), mode=mode))
    with pytest.raises(ValueError, match=rf"{path}: has mode {mode}"):
        READERS[kind][0](root)


def test_a_class_that_is_missing_in_the_test_folder_is_named(root, kind):
    name = READERS[kind][1][3]
    shutil.rmtree(root / "test" / name)
    with pytest.raises(FileNotFoundError, match=rf"test lacks the class folder {name};"):
        READERS[kind][0](root)


def test_a_class_that_is_missing_in_the_training_folder_is_named(root, kind):
    name = READERS[kind][1][3]
    shutil.rmtree(root / "train" / name)
    # Of any data set the training folder says which classes there are.
    part, message = ("test", "is no class") if "folder" in kind else ("train", "lacks the class")
    with pytest.raises((FileNotFoundError, ValueError), match=rf"{part}.*{message}") as raised:
        READERS[kind][0](root)
    assert name in str(raised.value)


@pytest.mark.parametrize("part", ["train", "test"])
def test_an_empty_class_folder_is_named(root, kind, part):
    folder = root / part / READERS[kind][1][7]
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / ".hidden").touch()
    with pytest.raises(FileNotFoundError, match=rf"{folder} holds no image"):
        READERS[kind][0](root)


@pytest.mark.parametrize("part", ["train", "test"])
def test_stray_files_and_folders_are_named(root, kind, part):
    name = READERS[kind][1][0]
    (root / part / name / "labels.csv").touch()
    with pytest.raises(ValueError, match=rf"{part}/{name}/labels\.csv is no image by its name"):
        READERS[kind][0](root)
    (root / part / name / "labels.csv").unlink()
    (root / part / name / "more").mkdir()
    with pytest.raises(ValueError, match=rf"{part}/{name}/more is a folder"):
        READERS[kind][0](root)
    (root / part / name / "more").rmdir()
    (root / part / "labels.csv").touch()
    with pytest.raises(ValueError, match=rf"{part} holds labels\.csv beside the folders"):
        READERS[kind][0](root)


def test_what_lies_beside_the_parts_and_hidden_files_are_passed_over(root, kind):
    before = READERS[kind][0](root).train.fingerprint
    for path in ("train.csv", "README.md", "train/.DS_Store", "test/.cache", "more/x.png"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).touch()
    assert READERS[kind][0](root).train.fingerprint == before


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("length", [0, 8, 40, -100])
def test_a_truncated_file_is_named(root, kind, part, length):
    path = _first(root, part)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"{path}: "):
        READERS[kind][0](root)


def test_two_test_folders_are_a_question(root, kind):
    shutil.copytree(root / "test", root / "val")
    with pytest.raises(ValueError, match=r"holds test and val: which of them is the test set"):
        READERS[kind][0](root)


def test_a_named_test_folder_is_taken(tmp_path):
    _write(tmp_path, "folder of digits")
    other = write_class_folders(tmp_path / "later", *random_digits(10, seed=5), DIGITS)
    assert np.array_equal(image_folder(tmp_path, test="later").test.pixels, other)
    with pytest.raises(FileNotFoundError, match="lacks the folder 'val'"):
        image_folder(tmp_path, test="val")


def test_missing_folders_are_named(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        READERS[kind][0](tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"train.*CLASS|train/0"):
        READERS[kind][0](tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(FileNotFoundError, match=r"lacks a test part, .* test, val, valid"):
        READERS[kind][0](tmp_path)


def test_photographs_of_other_classes_are_no_cifar10(tmp_path):
    write_class_folders(tmp_path / "train", *random_images(20), tuple("abcdefghij"))
    (tmp_path / "test").mkdir()
    with pytest.raises(FileNotFoundError, match="lacks the class folders airplane"):
        cifar10(tmp_path)


def test_cifar10_in_two_layouts_is_a_question(tmp_path):
    _write(tmp_path, "cifar10")
    write_batches(tmp_path)
    with pytest.raises(ValueError, match=r"more than once .*batches-py, .*train\)"):
        cifar10(tmp_path)


def test_digits_are_grey_and_nothing_else(tmp_path):
    _write(tmp_path, "mnist")
    path = _first(tmp_path)
    path.write_bytes(png(np.zeros((3, 28, 28), np.uint8)))
    with pytest.raises(ValueError, match=rf"{path}: has mode RGB; only grey"):
        mnist(tmp_path)


class TestAnyImages:
    """What only ``data.name=folder`` allows."""

    def test_grey_ones_become_rgb_beside_colored_ones(self, tmp_path):
        train, _ = _write(tmp_path, "folder of photographs")
        grey = random_digits(1)[0][0].repeat(3, axis=0)
        grey = np.pad(grey, ((0, 0), (2, 2), (2, 2)))
        _first(tmp_path).write_bytes(png(grey, mode="L"))
        split = image_folder(tmp_path)
        assert split.channels == 3
        assert np.array_equal(split.train.pixels[0], grey)
        assert np.array_equal(split.train.pixels[1:], train[1:])

    @pytest.mark.parametrize("side", [1, 8, 50])
    def test_any_size_and_number_of_classes(self, tmp_path, side):
        pixels = np.random.default_rng(0).integers(0, 256, (6, 3, side, side), dtype=np.uint8)
        labels = np.arange(6) % 3
        classes = ("a b", "Ä", "B")  # by code point: B, a b, Ä
        write_class_folders(tmp_path / "train", pixels, labels, classes)
        write_class_folders(tmp_path / "val", pixels, labels, classes)
        split = image_folder(tmp_path)
        assert (split.image_size, split.classes) == (side, 3)
        order = [5, 2, 3, 0, 4, 1]
        assert np.array_equal(split.train.pixels, pixels[order])
        assert split.train.labels.tolist() == [0, 0, 1, 1, 2, 2]

    def test_other_formats_are_read(self, tmp_path):
        from PIL import Image

        for part in ("train", "test"):
            write_class_folders(tmp_path / part, *random_digits(2), ("a", "b"))
        path = _first(tmp_path).with_suffix(".JPG")
        stream = io.BytesIO()
        Image.fromarray(np.full((28, 28), 7, np.uint8)).save(stream, format="jpeg")
        path.write_bytes(stream.getvalue())
        assert len(image_folder(tmp_path).train) == 3

    def test_images_that_are_not_square_are_refused(self, tmp_path):
        image = np.zeros((4, 3, 20, 30), np.uint8)
        for part in ("train", "test"):
            write_class_folders(tmp_path / part, image, np.arange(4) % 2, ("a", "b"))
        with pytest.raises(ValueError, match=r"is 30×20 pixels; images have to be as wide as high"):
            image_folder(tmp_path)

    def test_one_class_is_nothing_to_learn(self, tmp_path):
        for part in ("train", "test"):
            write_class_folders(tmp_path / part, *random_digits(1), ("a",))
        with pytest.raises(FileNotFoundError, match="holds 1 class folders; put the images of"):
            image_folder(tmp_path)
