"""The vision recipe on every layout of images, end to end."""

from __future__ import annotations

import json
import shutil

import datasets
import pytest
import yaml

from recipes.runfolder import load_checkpoint
from recipes.sweep import main as sweep
from recipes.vision import main
from tests.helpers.image_files import (
    png,
    random_digits,
    write_class_folders,
    write_mnist,
)

SMALL = [
    "model.channels=[4,4]",
    "model.groups=2",
    "model.hidden=4",
    "scheme.type=Poisson",
    "scheme.batch_size=20",
    "strategy.type=Identity",
    "privacy.epsilon=null",
    "privacy.noise_multiplier=1",
    "steps=2",
    "plots=false",
    "seed=7",
]


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """The same grey images in three layouts, in the same order."""
    pixels, labels = random_digits(130)
    pixels, labels = pixels[labels.argsort(kind="stable")], sorted(labels)
    test = [row for row in range(130) if row % 13 < 3]
    parts = {"train": [row for row in range(130) if row not in test], "test": test}
    found = {name: tmp_path_factory.mktemp(name) for name in ("folder", "datasets", "mnist")}
    types = datasets.Features(
        {"drawn": datasets.Image(), "as": datasets.Value("int64"), "row": datasets.Value("int64")}
    )
    saved = {}
    for part, rows in parts.items():
        # The last image of a class has the largest number in its name.
        backwards = rows[::-1]
        write_class_folders(
            found["folder"] / part,
            pixels[backwards],
            [labels[row] for row in backwards],
            [f"class {number}" for number in range(10)],
        )
        columns = {
            "drawn": [{"bytes": png(pixels[row], mode="L"), "path": None} for row in rows],
            "as": [labels[row] for row in rows],
            "row": rows,
        }
        saved[part] = datasets.Dataset.from_dict(columns, features=types)
    datasets.DatasetDict(saved).save_to_disk(str(found["datasets"]))
    write_mnist(found["mnist"], train=100, test=30)
    return found


OPTIONS = {"datasets": ["data.label_column=as"], "folder": [], "mnist": []}


def _run(config, output, *options):
    return main(["--config", str(config), "--output", str(output), *SMALL, *options])


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_layout_runs_and_resumes(config, tmp_path, capsys, roots, name):
    options = [f"data.name={name}", f"data.root={roots[name]}", *OPTIONS[name]]
    assert _run(config, tmp_path / "run", *options) == 0
    assert "on 30 held-out images" in capsys.readouterr().out
    # Where the images lie may change, and what they are may not.
    moved = tmp_path / "moved"
    shutil.copytree(roots[name], moved)
    options[1] = f"data.root={moved}"
    assert _run(config, tmp_path / "run", *options, "--resume") == 0
    assert "root" not in yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]


@pytest.mark.slow
def test_two_layouts_of_the_same_images_train_the_same_model(config, tmp_path, roots):
    ledgers = []
    for name in ("folder", "datasets"):
        options = [f"data.name={name}", f"data.root={roots[name]}", *OPTIONS[name]]
        assert _run(config, tmp_path / name, *options) == 0
        ledgers.append(load_checkpoint(tmp_path / name)["run"]["ledger"])
    assert ledgers[0] == ledgers[1]


def test_two_columns_of_integers_are_a_question(config, tmp_path, capsys, roots):
    options = ["data.name=datasets", f"data.root={roots['datasets']}"]
    assert _run(config, tmp_path / "run", *options) == 2
    assert "name one by data.label_column" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["data.name=folder"],
            "data.root=null: name the folder of the images of data.name=folder",
        ),
        (
            ["data.name=mnist", "data.augment=true"],
            "a flipped digit is another sign; set data.flips=false, which leaves the crops",
        ),
        (["data.name=mnist", "data.views=2"], "data.views=2 with data.augment=false"),
    ],
)
def test_what_cannot_work_is_said(config, tmp_path, capsys, roots, options, message):
    if len(options) > 1:
        options = [*options, f"data.root={roots['mnist']}"]
    assert _run(config, tmp_path / "run", *options) == 2
    assert message in capsys.readouterr().err


def test_mnist_is_cropped_when_asked_to(config, tmp_path, roots):
    options = ["data.name=mnist", f"data.root={roots['mnist']}"]
    options += ["data.augment=true", "data.flips=false", "data.views=2"]
    assert _run(config, tmp_path / "run", *options) == 0


@pytest.mark.slow
def test_a_sweep_compares_by_what_is_held_out(tmp_path, monkeypatch, roots):
    """Hyperparameters chosen without the test set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("")
    fields = dict(option.split("=", 1) for option in SMALL)
    common = {name: [yaml.safe_load(value)] for name, value in fields.items()}
    common |= {"data.name": ["mnist"], "data.root": [str(roots["mnist"])], "data.holdout": [0.2]}
    grid = {
        "recipe": "vision",
        "output": "runs",
        "common": {"optimizer.lr": [0.1, 0.2]},
        "runs": [{"config": "base.yaml"}],
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    extra = [f"{name}={json.dumps(value[0])}" for name, value in common.items()]
    assert sweep(["--grid", "grid.yaml", *extra]) == 0
    rows = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert [row["split"] for row in rows] == ["held-out", "held-out"]
    assert all(row["not_for_release"] for row in rows)
