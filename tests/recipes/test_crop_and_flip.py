"""The augmentation against what it is by definition: one of 9 × 9 crops, flipped or not."""

from __future__ import annotations

import collections
import math
import random

import numpy as np
import pytest
import torch

from dptrain.sampling import Poisson, PrivateLoader
from recipes.data.augment import CropAndFlip
from recipes.data.images import Images
from tests.helpers.image_files import random_images

SIZE = 16  # large enough that no two crops are reflections of each other


@pytest.fixture(scope="module")
def image():
    return random_images(1)[0][0][:, :SIZE, :SIZE]


@pytest.fixture(scope="module")
def outcomes(image):
    """Every possible view by its bytes, made by numpy."""
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode="reflect")
    views = {}
    for down in range(9):
        for right in range(9):
            crop = padded[:, down : down + SIZE, right : right + SIZE]
            views[crop.tobytes()] = (down, right, False)
            views[crop[:, :, ::-1].tobytes()] = (down, right, True)
    assert len(views) == 162
    return views


@pytest.mark.slow
def test_every_crop_and_flip_is_as_likely_as_any_other(image, outcomes):
    transform, draws = CropAndFlip(SIZE), 16_200
    torch.manual_seed(0)
    counts = collections.Counter(
        outcomes[transform(torch.from_numpy(image))[0].numpy().tobytes()] for _ in range(draws)
    )
    mean = draws / 162
    assert len(counts) == 162
    assert max(abs(count - mean) for count in counts.values()) < 6 * math.sqrt(mean)


def test_of_two_views_one_is_mirrored(image, outcomes):
    """The first or the second, as often; their crops are drawn apart."""
    torch.manual_seed(1)
    draws, firsts, same = 2000, 0, 0
    for views in (CropAndFlip(SIZE)(torch.from_numpy(image), 2) for _ in range(draws)):
        (*corner, first), (*other, second) = (outcomes[view.numpy().tobytes()] for view in views)
        assert first != second
        firsts += first
        same += corner == other
    assert abs(firsts - draws / 2) < 6 * math.sqrt(draws / 4)
    assert same < draws / 81 + 6 * math.sqrt(draws / 81)


def test_views_without_crops_are_the_image_and_its_mirror_image(image):
    pixels = torch.from_numpy(image)
    torch.manual_seed(2)
    seen = set()
    for _ in range(60):
        views = CropAndFlip(SIZE, padding=0)(pixels, 3)
        plain = [bool(torch.equal(view, pixels)) for view in views]
        mirrored = [bool(torch.equal(view, pixels.flip(-1))) for view in views]
        assert [not found for found in plain] == mirrored
        seen.add(tuple(plain))
    assert seen == {(True, False, True), (False, True, False)}
    assert torch.equal(CropAndFlip(SIZE, flips=False, padding=0)(pixels)[0], pixels)


def test_only_torchs_global_generator_is_used(image):
    transform = CropAndFlip(SIZE)
    torch.manual_seed(3)
    first = [transform(torch.from_numpy(image)) for _ in range(20)]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the generator that must not matter
    torch.manual_seed(3)
    again = [transform(torch.from_numpy(image)) for _ in range(20)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_views_reach_the_model_scaled_and_the_same_after_a_restart(outcomes, image):
    def loader(**options):
        pixels = torch.from_numpy(image).repeat(30, 1, 1, 1)
        data = Images(
            pixels, torch.zeros(30, dtype=torch.int64), transform=CropAndFlip(SIZE), views=3
        )
        scheme = Poisson(probability=0.4, dataset_size=30, steps=3)
        return PrivateLoader(dataset=data, scheme=scheme, seed=2, **options)

    whole = [x for x, _ in loader()]
    for x in whole:
        assert x.shape[1:] == (3, 3, SIZE, SIZE)
        for view in x.flatten(0, 1):
            pixels = ((view + 1) * 127.5).round().to(torch.uint8)
            assert pixels.numpy().tobytes() in outcomes
    assert len({view.numpy().tobytes() for view in whole[0].flatten(0, 1)}) > 10
    for ours, theirs in zip(loader(num_workers=1), whole, strict=True):
        assert torch.equal(ours[0], theirs)
