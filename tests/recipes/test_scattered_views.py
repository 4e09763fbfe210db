"""Views of scattering features against the features of mirrored and moved images, and in a run."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import group_norm

from recipes.command import INTERRUPTED
from recipes.data.augment import CropAndFlip
from recipes.data.images import Images
from recipes.data.scattered import ScatteredViews, mirrored_paths, scattered
from recipes.data.scattering import PATHS, scattering
from recipes.data.split import Split
from recipes.runfolder import load_checkpoint
from recipes.vision import main
from tests.helpers.image_files import write_batches
from tests.helpers.stopping import ctrl_c, stop_at


def _blob(size: int = 32) -> torch.Tensor:
    """Nothing but its middle, so that its border is the same after a small move."""
    image = torch.zeros(1, 3, size, size)
    draw = torch.Generator().manual_seed(0)
    image[..., 10:-10, 10:-10] = torch.randn(3, size - 20, size - 20, generator=draw)
    return image


def test_mirrored_features_are_those_of_the_mirror_image() -> None:
    """Feature j of the image stands at pixel 4 j: of the mirror image, moved right by one pixel,
    that is pixel 32 - 4 j, where feature 8 - j stands."""
    image = _blob()
    features = scattering(image)[0]
    mirror = scattering(image.flip(-1).roll(1, -1))[0]
    expected = features[list(mirrored_paths(3))].flip(-1)
    assert torch.allclose(mirror[..., 1:], expected[..., :-1], atol=2e-6)
    plain = features.flip(-1)  # what directions that stay would give
    assert (mirror[..., 1:] - plain[..., :-1]).abs().max() > 0.01


def test_a_place_is_four_pixels() -> None:
    image = _blob()
    moved = scattering(image.roll(4, -1))[0]
    assert torch.allclose(moved[..., 1:], scattering(image)[0][..., :-1], atol=2e-6)


def test_mirrored_twice_is_as_before() -> None:
    order = mirrored_paths(3)
    assert [order[path] for path in order] == list(range(3 * PATHS))


def _views(maps: torch.Tensor, **options: object) -> ScatteredViews:
    labels = torch.arange(len(maps)) % 2
    return ScatteredViews(maps, labels, fingerprint="some", **options)  # type: ignore[arg-type]


def test_every_move_and_mirror_is_as_likely_as_any_other() -> None:
    maps = torch.randn(1, PATHS, 6, 6, generator=torch.Generator().manual_seed(1))
    padded = np.pad(maps[0].numpy(), ((0, 0), (1, 1), (1, 1)), mode="reflect")
    padded = torch.from_numpy(padded)
    outcomes = []
    for down in range(3):
        for right in range(3):
            moved = padded[:, down : down + 6, right : right + 6]
            for turned in (moved, moved.flip(-1)[list(mirrored_paths(1))]):
                outcomes.append(group_norm(turned[None], 27)[0])
    draws, counts = 3600, collections.Counter[int]()
    torch.manual_seed(0)
    for x, label in _views(maps, flips=True, views=1).__getitems__([0] * draws):
        distances = [float((x - view).abs().max()) for view in outcomes]
        place = int(np.argmin(distances))
        assert distances[place] < 1e-5
        assert label == 0
        counts[place] += 1
    assert len(counts) == 18
    mean = draws / 18
    assert max(abs(count - mean) for count in counts.values()) < 6 * math.sqrt(mean)


def test_views_of_an_example_come_together() -> None:
    maps = torch.randn(5, PATHS, 4, 4)
    torch.manual_seed(3)
    together = _views(maps, flips=False, views=2).__getitems__([4, 1])
    torch.manual_seed(3)
    apart = _views(maps, flips=False, views=1).__getitems__([4, 4, 1, 1])
    assert [int(label) for _, label in together] == [0, 1]
    assert together[0][0].shape == (2, PATHS, 4, 4)
    joined = torch.cat([x for x, _ in together])
    assert torch.equal(joined, torch.stack([x for x, _ in apart]))


def test_only_the_training_part_of_a_split_has_views() -> None:
    draw = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (6, 3, 16, 16), generator=draw).to(torch.uint8)
    labels = torch.arange(6) % 2
    train = Images(pixels, labels, transform=CropAndFlip(16), views=3)
    plain = Images(pixels, labels)
    split = scattered(Split(train, plain, channels=3, classes=2, image_size=16))
    assert split.train[0][0].shape == (3, 3 * PATHS, 4, 4)
    assert split.test[0][0].shape == (3 * PATHS, 4, 4)
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
