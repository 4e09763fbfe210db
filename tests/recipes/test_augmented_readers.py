"""Augmented views of every reader's training images, and of those only."""

from __future__ import annotations

import pytest
import torch

from recipes.data import Views, cinic10, image_folder, mnist
from tests.helpers.image_files import (
    random_digits,
    random_images,
    write_cinic,
    write_class_folders,
    write_mnist,
)


def test_cinic10(tmp_path):
    write_cinic(tmp_path, per_class=1)
    split = cinic10(tmp_path, views=Views(augment=True, count=4))
    assert split.train[0][0].shape == (4, 3, 32, 32)
    assert split.test[0][0].shape == (3, 32, 32)


def test_mnist_without_flips(tmp_path):
    write_mnist(tmp_path)
    split = mnist(tmp_path, views=Views(augment=True, count=200))
    torch.manual_seed(0)
    views, _ = split.train[0]
    assert views.shape == (200, 1, 28, 28)
    # 200 of 81 crops: the uncut image is among them with this seed, and no mirror image of it.
    plain = mnist(tmp_path).train[0][0]
    assert any(bool((view == plain).all()) for view in views)
    assert not any(bool((view == plain.flip(-1)).all()) for view in views)
    assert split.test[0][0].shape == (1, 28, 28)


@pytest.mark.parametrize("flips", [False, True])
def test_a_folder_flips_when_asked_to(tmp_path, flips):
    for part in ("train", "test"):
        write_class_folders(tmp_path / part, *random_images(10))
    split = image_folder(tmp_path, views=Views(augment=True, flips=flips))
    assert (split.train.transform is not None) == (split.test.transform is None)
    # Grey levels that rise to the right fall where the image was flipped.
    rising = torch.arange(32, dtype=torch.uint8).expand(3, 32, 32)
    torch.manual_seed(0)
    views = [split.train.transform(rising, 1)[0] for _ in range(60)]
    assert any(bool(view[0, 16, 10] > view[0, 16, 20]) for view in views) == flips


def test_images_too_small_to_be_cropped_are_refused(tmp_path):
    pixels, labels = random_digits(4)
    for part in ("train", "test"):
        write_class_folders(tmp_path / part, pixels[:, :, :4, :4], labels % 2, ("a", "b"))
    with pytest.raises(ValueError, match=r"images of 4×4 pixels have no 4 to reflect"):
        image_folder(tmp_path, views=Views(augment=True))
