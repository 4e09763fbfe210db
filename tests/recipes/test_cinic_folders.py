"""CINIC-10's folders are checked before torchvision is asked to list them."""

from __future__ import annotations

import shutil

import pytest

from recipes.data.cinic import cinic10
from tests.helpers.image_files import write_cinic


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
