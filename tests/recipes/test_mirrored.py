"""An image and its mirror image, evaluated together."""

from __future__ import annotations

import json

import pytest
import torch

from recipes.data.images import Images
from recipes.data.mirrored import flipped
from recipes.data.opponent import opponent
from recipes.data.scattered_layout import FeatureLayout
from recipes.data.scattering import scattering
from recipes.runfolder import load_checkpoint
from recipes.task import measure
from recipes.vision import DataSettings, VisionSettings, build_task, load_images, main
from tests.helpers.image_files import write_batches


def _settings(root, features, **changes) -> VisionSettings:
    data = DataSettings(name="cifar10", root=str(root), features=features, **changes)
    scheme, strategy = {"type": "Poisson", "batch_size": 20.0}, {"type": "Identity"}
    settings = VisionSettings(data=data, scheme=scheme, strategy=strategy, steps=3)
    settings.model.channels, settings.model.hidden = [8], 0
    return settings


def _read(images: Images) -> torch.Tensor:
    return torch.stack([image for image, _ in images])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    write_batches(root, size=20)
    return root


@pytest.mark.parametrize("features", [None, "scattering"])
def test_accuracy_and_loss_are_of_the_mean_of_two_probabilities(root, features):
    plain = load_images(_settings(root, None)).test
    images, labels = _read(plain), plain.labels
    both = images, torch.stack([image[..., range(31, -1, -1)] for image in images])
    if features is not None:
        both = tuple(FeatureLayout(3).normalized(scattering(opponent(part))) for part in both)
    task = build_task(_settings(root, features, mirrored=True))
    task.model.eval()
    with torch.no_grad():
        each = [task.model(part).double().softmax(1) for part in both]
    mean = (each[0] + each[1]) / 2
    found = measure(task, task.test).metrics
    hit = mean[range(len(labels)), labels]
    # Fourier transforms of ten or of all images at once add up in another order.
    assert torch.allclose(found["loss"], -hit.log(), atol=1e-4)
    assert torch.equal(found["accuracy"], (mean.argmax(1) == labels).double())
    assert torch.equal(found["accuracy_alone"], (each[0].argmax(1) == labels).double())
    assert not torch.allclose(found["loss"], -each[0][range(len(labels)), labels].log(), atol=1e-2)


def test_mirror_images_of_bytes_and_of_numbers():
    pixels = torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2)
    labels = torch.tensor([1, 0])
    found = flipped(Images(pixels, labels))
    assert torch.equal(found.pixels, pixels[..., [1, 0]])
    numbers = flipped(torch.utils.data.TensorDataset(pixels.float(), labels)).tensors
    assert torch.equal(numbers[0], pixels[..., [1, 0]].float())
    assert torch.equal(numbers[1], labels)


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """One evaluated as usual, and one with mirror images, of the same seed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "empty.yaml").write_text("")
    options = ["--config", str(folder / "empty.yaml"), "data.name=cifar10", f"data.root={root}"]
    options += ["model.channels=[4]", "model.groups=2", "model.hidden=0", "scheme.type=Poisson"]
    options += ["scheme.batch_size=20", "seed=5", "strategy.type=Identity", "steps=3"]
    options += ["privacy.epsilon=null", "privacy.noise_multiplier=1", "plots=false"]
    for name, more in (("plain", []), ("mirrored", ["data.mirrored=true"])):
        assert main([*options, *more, "--output", str(folder / name)]) == 0
    return folder, options


def test_training_is_the_same(runs):
    plain, mirrored = (load_checkpoint(runs[0] / name)["run"] for name in ("plain", "mirrored"))
    assert all(torch.equal(plain["module"][name], w) for name, w in mirrored["module"].items())
    assert plain["ledger"] == mirrored["ledger"]
    rows = [
        [json.loads(line) for line in (runs[0] / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "mirrored")
    ]
    ours, theirs = ([row for row in each if row["split"] == "train"] for each in rows)
    assert ours == theirs
    last = [each[-1]["loss"] for each in rows]
    assert last[0] != last[1]


def test_a_run_does_not_turn_from_it_when_it_goes_on(runs, capsys):
    """Its configuration would say one thing, and its accuracies mean another."""
    folder, options = runs
    assert main([*options, "--resume", "--output", str(folder / "mirrored")]) == 2
    assert "data.mirrored: the run has True, now False" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_a_mirrored_digit_is_no_digit(name, tmp_path):
    data = DataSettings(name=name, root=str(tmp_path), mirrored=True, flips=False)
    with pytest.raises(ValueError, match=f"data.mirrored=true with data.name={name}"):
        VisionSettings(data=data, steps=3).validate()
