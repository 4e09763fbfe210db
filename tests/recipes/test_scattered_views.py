"""Views of scattering features against the features of mirrored and moved images, and in a run."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
import torch

from recipes.command import INTERRUPTED
from recipes.data.augment import CropAndFlip
from recipes.data.images import Images
from recipes.data.scattered import ScatteredViews, scattered
from recipes.data.scattered_layout import FeatureLayout
from recipes.data.scattering import scattering
from recipes.data.split import Split
from recipes.runfolder import load_checkpoint
from recipes.vision import main
from tests.helpers.image_files import write_batches
from tests.helpers.stopping import ctrl_c, stop_at

CHANNELS = FeatureLayout(1).channels


@pytest.mark.parametrize("size", [8, 32])
def test_mirrored_features_are_those_of_the_mirror_image(size: int) -> None:
    """All the way to the border: places lie as far from the one side as from the other."""
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    features = scattering(images)
    mirror = scattering(images.flip(-1))
    assert torch.allclose(mirror, features.flip(-1)[:, FeatureLayout(3).mirrored()], atol=2e-6)
    # What directions that stay would give.
    assert (mirror - features.flip(-1)).abs().max() > 0.01


def _blob(size: int = 32) -> torch.Tensor:
    """Nothing but its middle, so that its border is the same after a small move."""
    image = torch.zeros(1, 3, size, size)
    draw = torch.Generator().manual_seed(0)
    image[..., 10:-10, 10:-10] = torch.randn(3, size - 20, size - 20, generator=draw)
    return image


def test_a_place_is_four_pixels() -> None:
    image = _blob()
    moved = scattering(image.roll(4, -1))[0]
    assert torch.allclose(moved[..., 1:], scattering(image)[0][..., :-1], atol=2e-6)


def test_mirrored_twice_is_as_before() -> None:
    layout = FeatureLayout(3)
    order = layout.mirrored()
    assert [order[path] for path in order] == list(range(layout.channels))


def _views(
    maps: torch.Tensor, layout: FeatureLayout | None = None, **options: object
) -> ScatteredViews:
    labels = torch.arange(len(maps)) % 2
    return ScatteredViews(maps, labels, layout or FeatureLayout(1), fingerprint="some", **options)  # type: ignore[arg-type]


def _moved(maps: torch.Tensor) -> list[torch.Tensor]:
    """The features of an image, (117, 6, 6), at every place and mirrored or not, normalized."""
    padded = np.pad(maps.numpy(), ((0, 0), (1, 1), (1, 1)), mode="reflect")
    layout, outcomes = FeatureLayout(1), []
    for down in range(3):
        for right in range(3):
            moved = torch.from_numpy(padded[:, down : down + 6, right : right + 6])
            for turned in (moved, moved.flip(-1)[layout.mirrored()]):
                outcomes.append(layout.normalized(turned[None])[0])
    return outcomes


def _which(view: torch.Tensor, outcomes: list[torch.Tensor]) -> int:
    distances = [float((view - outcome).abs().max()) for outcome in outcomes]
    place = int(np.argmin(distances))
    assert distances[place] < 1e-5
    return place


def test_every_move_and_mirror_is_as_likely_as_any_other() -> None:
    maps = torch.randn(1, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(1))
    outcomes = _moved(maps[0])
    draws, counts = 3600, collections.Counter[int]()
    torch.manual_seed(0)
    for x, label in _views(maps, crops=True, flips=True, views=1).__getitems__([0] * draws):
        counts[_which(x, outcomes)] += 1
        assert label == 0
    assert len(counts) == 18
    mean = draws / 18
    assert max(abs(count - mean) for count in counts.values()) < 6 * math.sqrt(mean)


def test_views_of_an_example_come_together() -> None:
    maps = torch.randn(5, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(6))
    torch.manual_seed(3)
    drawn = _views(maps, crops=True, flips=False, views=4).__getitems__([4, 1])
    for row, (views, label) in zip([4, 1], drawn, strict=True):
        assert (views.shape, int(label)) == ((4, CHANNELS, 6, 6), row % 2)
        outcomes = _moved(maps[row])
        places = [_which(view, outcomes) for view in views]
        assert len(set(places)) > 1
        assert all(place % 2 == 0 for place in places)  # none is mirrored


def test_two_views_without_crops_are_of_the_image_and_its_mirror_image() -> None:
    layout = FeatureLayout(3)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    plain, mirror = (layout.normalized(scattering(x)) for x in (images, images.flip(-1)))
    drawn = _views(scattering(images), layout, crops=False, flips=True, views=2)
    torch.manual_seed(5)
    turned = set()
    for _ in range(20):
        for row, (views, _label) in enumerate(drawn.__getitems__([0, 1])):
            pairs = (plain[row], mirror[row]), (mirror[row], plain[row])
            found = [torch.allclose(views, torch.stack(pair), atol=1e-4) for pair in pairs]
            assert sum(found) == 1
            turned.add(found[0])
    assert turned == {True, False}


def test_only_the_training_part_of_a_split_has_views() -> None:
    draw = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (6, 3, 16, 16), generator=draw).to(torch.uint8)
    labels = torch.arange(6) % 2
    train = Images(pixels, labels, transform=CropAndFlip(16), views=3)
    plain = Images(pixels, labels)
    split = scattered(Split(train, plain, channels=3, classes=2, image_size=16))
    assert split.train[0][0].shape == (3, 3 * CHANNELS, 4, 4)
    assert split.test[0][0].shape == (3 * CHANNELS, 4, 4)
    other = Images(pixels.flip(-1), labels, transform=CropAndFlip(16), views=3)
    changed = scattered(Split(other, plain, channels=3, classes=2, image_size=16))
    marks = {split.train.fingerprint, changed.train.fingerprint, train.fingerprint}  # type: ignore[attr-defined]
    assert len(marks) == 3


@pytest.mark.slow
def test_a_run_on_views_of_features_resumes_in_the_same_model(tmp_path, monkeypatch):
    write_batches(tmp_path / "data", size=20)
    config = tmp_path / "empty.yaml"
    config.write_text("")
    options = ["data.name=cifar10", f"data.root={tmp_path / 'data'}", "data.features=scattering"]
    options += ["data.augment=true", "data.views=2", "model.channels=[4]", "model.groups=2"]
    options += ["model.hidden=0", "scheme.type=Poisson", "scheme.batch_size=20", "seed=5"]
    options += ["strategy.type=Identity", "privacy.epsilon=null", "privacy.noise_multiplier=1"]
    options += ["steps=3", "checkpoint_every=1", "plots=false"]

    def run(name: str, *more: str) -> int:
        return main(["--config", str(config), "--output", str(tmp_path / name), *options, *more])

    assert run("whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 2, ctrl_c)
        assert run("again") == INTERRUPTED
    assert run("again", "--resume") == 0
    assert run("plain", "data.views=1") == 0
    whole, again, plain = (
        load_checkpoint(tmp_path / name)["run"] for name in ("whole", "again", "plain")
    )
    assert whole["ledger"] == again["ledger"] != plain["ledger"]
    assert all(torch.equal(again["module"][name], w) for name, w in whole["module"].items())
    assert "2 views of an example" in (tmp_path / "whole" / "privacy_report.md").read_text()
