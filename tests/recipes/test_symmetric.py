"""A net with the same scores for an image and its mirror image."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, group_norm, linear, max_pool2d
from torch.utils.data import TensorDataset

from dptrain import Gradients
from recipes.command import INTERRUPTED
from recipes.data.scattered_layout import FeatureLayout
from recipes.data.scattering import scattering
from recipes.models import vgg
from recipes.runfolder import load_checkpoint
from recipes.vision import DataSettings, ModelSettings, VisionSettings, main
from tests.helpers.engine import everything_every_step, reference_sum, wire
from tests.helpers.image_files import write_batches
from tests.helpers.stopping import ctrl_c, stop_at

ORDER = (1, 0, 3, 2, 4)  # of channels in the mirror image


def _net(**changes: object) -> nn.Sequential:
    options: dict = {"in_channels": 5, "classes": 4, "image_size": 8, "channels": [8]}
    options |= {"groups": 2, "hidden": 0, "symmetric": True, "mirrored": ORDER, **changes}
    torch.manual_seed(0)
    return vgg(**options)


def _images(count: int = 3, size: int = 8) -> torch.Tensor:
    return torch.randn(count, 5, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reduced": 4},
        {"channels": [4, 8], "hidden": 6},
        {"groups": 0},
        {"channels": []},
        {"channels": [], "reduced": 4, "hidden": 3},
    ],
    ids=str,
)
def test_an_image_and_its_mirror_image_have_the_same_scores(changes):
    model, images = _net(**changes).double(), _images().double()
    mirror = images[:, ORDER].flip(-1)
    assert torch.allclose(model(images), model(mirror), atol=1e-12)
    # Not of what is no mirror image: channels that stay, or upside down.
    scores = model(images)
    assert (scores - model(images.flip(-1))).abs().max() > 1e-3
    assert (scores - model(images[:, ORDER].flip(-2))).abs().max() > 1e-3


def test_it_is_a_net_of_twice_the_channels_whose_weights_are_shared():
    """Written out with two-dimensional convolutions of whole weights, sides after each other."""
    model, images = _net(reduced=4).double(), _images().double()
    weights = [module for module in model if any(True for _ in module.parameters())]
    reduce, norm0, first, norm1, second, norm2, classify = weights

    def mirrored(weight: torch.Tensor) -> torch.Tensor:
        """Of an image's and its mirror image's channels, for the other side."""
        half = weight.shape[1] // 2
        return torch.cat([weight[:, half:], weight[:, :half]], 1).flip(-1)

    def normalized(maps: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        sides = torch.stack(maps.chunk(2, 1), 2)
        sides = group_norm(sides, 2, norm.weight, norm.bias)
        return torch.cat(sides.unbind(2), 1).relu()

    weight, bias = reduce.weight[:, :, 0], reduce.bias
    weight = torch.cat([weight, weight[:, ORDER].flip(-1)])
    # In place of an image's mirror image, what is made of it is mirrored.
    maps = normalized(conv2d(images, weight, bias.repeat(2)), norm0)
    for layer, norm in ((first, norm1), (second, norm2)):
        whole = layer.weight[:, :, 0]
        whole = torch.cat([whole, mirrored(whole)])
        maps = normalized(conv2d(maps, whole, layer.bias.repeat(2), padding=1), norm)
    maps = max_pool2d(maps, 2)
    ours, theirs = maps.chunk(2, 1)
    sides = maps, torch.cat([theirs, ours], 1).flip(-1)
    scores = [linear(side.flatten(1), classify.weight, classify.bias) for side in sides]
    assert torch.allclose(model(images), (scores[0] + scores[1]) / 2, atol=1e-12)


def test_colors_stay_where_they_are_by_default():
    model, images = _net(mirrored=None).double(), _images().double()
    assert torch.allclose(model(images), model(images.flip(-1)), atol=1e-12)


def test_of_features_it_has_the_same_scores_for_the_mirror_image():
    layout = FeatureLayout(3)
    torch.manual_seed(0)
    model = vgg(
        in_channels=layout.channels,
        classes=3,
        image_size=4,
        channels=[8],
        hidden=0,
        reduced=8,
        symmetric=True,
        mirrored=layout.mirrored(),
    )
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    ours, theirs = (model(layout.normalized(scattering(x))) for x in (images, images.flip(-1)))
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert (ours[0] - ours[1]).abs().max() > 1e-2


def test_half_as_many_weights_as_without():
    def count(model: nn.Module) -> int:
        return sum(p.numel() for p in model.parameters() if p.dim() > 2)

    assert count(_net(channels=[8])) == 8 * 5 * 9 + 8 * 16 * 9
    assert count(_net(channels=[16], symmetric=False)) == 16 * 5 * 9 + 16 * 16 * 9


def test_an_examples_gradient_does_not_depend_on_the_others():
    model, images = _net(reduced=4).double(), _images(5).double()
    changed = images.clone()
    changed[1:] += 1
    first = []
    for batch in (images, changed):
        model.zero_grad()
        model(batch)[0].square().sum().backward()
        first.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*first, strict=True))


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_both_sides_of_an_example_are_clipped_as_one(mode):
    """What a step without noise releases, against one example at a time."""
    model, bound = _net(reduced=4).double(), 0.5
    data = TensorDataset(_images(6).double(), torch.arange(6) % 4)
    expected = reference_sum(model, data, range(len(data)), bound)
    private = wire(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=data,
        scheme=everything_every_step(len(data), 1),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        seed=1,
        gradients=Gradients(mode=mode, loss="sum"),
    )
    model, optimizer, loader = private
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    released = torch.cat([p.grad.flatten() for p in optimizer.params])
    # Opacus adds 1e-6 to a norm that it divides by.
    assert torch.allclose(released, expected, rtol=1e-5, atol=1e-7)
    assert expected.norm() > bound / 10


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_a_mirrored_digit_is_no_digit(name, tmp_path):
    data = DataSettings(name=name, root=str(tmp_path), flips=False)
    settings = VisionSettings(data=data, model=ModelSettings(symmetric=True), steps=3)
    with pytest.raises(ValueError, match=f"model.symmetric=true with data.name={name}"):
        settings.validate()


@pytest.mark.parametrize(
    ("changes", "named"), [({"mirrored": True}, "mirrored"), ({"augment": True}, "flips")]
)
def test_mirror_images_are_not_shown_to_it(changes, named, tmp_path):
    data = DataSettings(name="cifar10", root=str(tmp_path), **changes)
    settings = VisionSettings(data=data, model=ModelSettings(symmetric=True), steps=3)
    message = f"symmetric=true with data.{named}=true.*set data.{named}=false"
    with pytest.raises(ValueError, match=message):
        settings.validate()


def test_a_layer_that_groups_do_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match="groups=2 must divide reduced=3"):
        _net(reduced=3)
    with pytest.raises(ValueError, match=r"reduced=-1.*0 for none"):
        _net(reduced=-1)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["null", "scattering"])
def test_a_private_run_goes_on_in_the_same_model(features, tmp_path, monkeypatch):
    write_batches(tmp_path / "data", size=20)
    (tmp_path / "empty.yaml").write_text("")
    options = ["--config", str(tmp_path / "empty.yaml"), "data.name=cifar10", "steps=3"]
    options += [f"data.root={tmp_path / 'data'}", f"data.features={features}", "plots=false"]
    options += ["model.channels=[4]", "model.groups=2", "model.hidden=0", "model.reduced=4"]
    options += ["model.symmetric=true", "scheme.type=Poisson", "scheme.batch_size=20", "seed=5"]
    options += ["strategy.type=Identity", "privacy.epsilon=null", "privacy.noise_multiplier=1"]
    options += ["checkpoint_every=1"]

    def run(name: str, *more: str) -> int:
        return main([*options, *more, "--output", str(tmp_path / name)])

    assert run("whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 2, ctrl_c)
        assert run("again") == INTERRUPTED
    assert run("again", "--resume") == 0
    whole, again = (load_checkpoint(tmp_path / name)["run"] for name in ("whole", "again"))
    assert whole["ledger"] == again["ledger"]
    assert all(torch.equal(again["module"][name], w) for name, w in whole["module"].items())
    assert not any("order" in name for name in whole["module"])  # what is no weight
    rows = [
        (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "again")
    ]
    assert json.loads(rows[0][-1]) == json.loads(rows[1][-1])
