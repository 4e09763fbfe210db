"""Images as a data set: scaling, views, fingerprint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dptrain.sampling import Poisson, PrivateLoader
from recipes.data.augment import Views
from recipes.data.images import Images
from tests.helpers.image_files import random_images


def _images(count: int = 12, **options) -> Images:
    pixels, labels = random_images(count)
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels), **options)


def _shift(image: torch.Tensor, views: int) -> torch.Tensor:
    shifts = torch.randint(0, 32, (views,)).tolist()
    return torch.stack([torch.roll(image, shift, dims=2) for shift in shifts])


def test_scaling_is_a_public_constant():
    pixels = torch.tensor([0, 51, 102, 153, 204, 255], dtype=torch.uint8).view(1, 1, 2, 3)
    x, y = Images(pixels, torch.tensor([7]))[0]
    assert x.dtype == torch.float32
    assert torch.allclose(x.flatten(), torch.tensor([-1, -0.6, -0.2, 0.2, 0.6, 1.0]), atol=1e-6)
    assert (y.dtype, y.shape, int(y)) == (torch.int64, (), 7)


def test_many_rows_at_once_are_the_rows_one_by_one():
    data = _images()
    before = data.pixels.clone()
    rows = [3, 0, 3, 11]
    for (x, y), row in zip(data.__getitems__(rows), rows, strict=True):
        assert x.shape == (3, 32, 32)
        assert torch.equal(x, data[row][0])
        assert y == data[row][1]
    assert torch.equal(data.pixels, before)
    with pytest.raises(IndexError):
        data[12]


def test_views_are_drawn_for_every_view_of_every_example():
    data = _images(views=4, transform=_shift)
    torch.manual_seed(0)
    x, _ = data[5]
    assert x.shape == (4, 3, 32, 32)
    plain = _images()[5][0]
    shifts = [torch.roll(plain, shift, dims=2) for shift in range(32)]
    found = [next(s for s in range(32) if torch.equal(view, shifts[s])) for view in x]
    assert len(set(found)) > 1
    torch.manual_seed(0)
    assert torch.equal(data[5][0], x)
    assert not torch.equal(data[5][0], x)
    assert _images(transform=_shift)[0][0].shape == (3, 32, 32)  # one view: no axis for it


def test_views_without_a_transform_are_equal():
    x, _ = _images(views=3)[2]
    assert torch.equal(x, _images()[2][0].expand(3, -1, -1, -1))


def test_a_loader_that_starts_again_sees_the_same_views():
    """Also with workers: the loader seeds torch's generator for every batch."""

    def loader(**options):
        data = _images(40, views=2, transform=_shift)
        scheme = Poisson(probability=0.3, dataset_size=40, steps=4)
        return PrivateLoader(dataset=data, scheme=scheme, seed=5, **options)

    whole = list(loader())
    first = loader(num_workers=1)
    running = iter(first)
    seen = [next(running), next(running)]
    state = first.state_dict()  # of the first step only: the second is still in hand
    second = loader()
    second.load_state_dict(state)
    for ours, theirs in zip([seen[0], *second], whole, strict=True):
        assert ours[0].shape[1:] == (2, 3, 32, 32)
        assert torch.equal(ours[0], theirs[0])


def test_the_fingerprint_knows_every_pixel_and_label():
    data = _images()
    assert data.fingerprint == _images().fingerprint
    seen = {data.fingerprint}
    for change in ("pixel", "label", "order", "shape"):
        pixels, labels = data.pixels.clone(), data.labels.clone()
        if change == "pixel":
            pixels[7, 2, 31, 31] ^= 1
        elif change == "label":
            labels[7] += 1
        elif change == "order":
            pixels, labels = pixels.flip(0), labels.flip(0)
        else:
            pixels = pixels.view(12, 3, 16, 64)
        seen.add(Images(pixels, labels).fingerprint)
    assert len(seen) == 5


@pytest.mark.parametrize("change", ["pixel", "label"])
def test_a_run_does_not_go_on_with_other_images(change):
    """A single bit of an example that the next batches may never hold."""

    def loader(data):
        return PrivateLoader(
            dataset=data, scheme=Poisson(probability=0.1, dataset_size=12, steps=3), seed=1
        )

    data = _images()
    state = loader(data).state_dict()
    loader(_images()).load_state_dict(state)
    if change == "pixel":
        data.pixels[7, 0, 0, 0] ^= 1
    else:
        data.labels[7] += 1
    with pytest.raises(ValueError, match="dataset has changed"):
        loader(Images(data.pixels, data.labels)).load_state_dict(state)


@pytest.mark.parametrize(
    ("pixels", "labels", "views", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), 1, "pixels are torch.float32"),
        (torch.zeros(2, 4, 4).byte(), torch.zeros(2).long(), 1, r"shape \(2, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(3).long(), 1, r"labels .*shape \(3,\)"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(2), 1, "labels are torch.float32"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(2).long(), 0, "views=0"),
    ],
)
def test_impossible_images_are_refused(pixels, labels, views, message):
    with pytest.raises(ValueError, match=message):
        Images(pixels, labels, views=views)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 2}, "set augment to true"),
        ({"count": 0}, "views=0"),
        ({"augment": True, "crops": False, "flips": False}, "the image itself"),
    ],
)
def test_views_need_augmentation(options, message):
    with pytest.raises(ValueError, match=message):
        Views(**options)


def test_digits_stay_as_they_were():
    """The demo's data: the closed form of digits' scaling, unchanged by the readers beside it."""
    from sklearn.datasets import load_digits

    from recipes.data import digits

    split = digits(image_size=8)
    together = torch.cat([split.train.tensors[0], split.test.tensors[0]]).flatten(1).numpy()
    raw = load_digits().data / 16 * 2 - 1
    assert np.array_equal(np.unique(together, axis=0), np.unique(raw.astype(np.float32), axis=0))
    assert split.image_size == 8
