"""Classes as one-hot labels in the recipe of several labels, and MNIST by name."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

from recipes.data.mnist_table import mnist_table
from recipes.data.multilabel import ConditionGroups, LabelledRows, grouped
from recipes.individual import multilabel_task
from recipes.models.mlp import mlp
from recipes.runfolder import INDIVIDUAL, read_metrics
from recipes.task import evaluate
from tests.helpers.image_files import write_mnist
from tests.helpers.individual_recipe import run_individual

NAMES = [f"class {number}" for number in range(10)]
TINY = ["model.widths=[8]", "plots=false", "seed=1", "evaluate_every=1"]
FILTER = [
    "privacy.epsilon=null",
    "privacy.delta=1e-5",
    "individual.type=GDPFilter",
    "individual.epsilon=3",
    "individual.start=2",
    "individual.report=true",
    "steps=4",
]
PLAIN = ["privacy.epsilon=null", "privacy.noise_multiplier=2", "steps=3"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of ten classes, each row in one of them."""
    root, rng = tmp_path_factory.mktemp("classes"), np.random.default_rng(0)
    for part, rows in (("train", 200), ("test", 100)):
        with (root / f"{part}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*NAMES, "x", "y"])
            for row in range(rows):
                one_hot = [int(row % 10 == number) for number in range(10)]
                writer.writerow([*one_hot, *rng.normal(size=2).round(3)])
    names = "[" + ", ".join(NAMES) + "]"
    return ["data.name=phenotyping", f"data.root={root}", f"data.labels={names}"]


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("privacy", [FILTER, PLAIN], ids=["filter", "no filter"])
@pytest.mark.parametrize(
    "groups",
    [
        ["groups.conditions=[class 3, class 7]", "groups.size=15", "groups.test_size=5"],
        ["groups.conditions=[class 3]", "groups.size=1", "groups.test_size=1"],
        ["groups.conditions=[]"],
    ],
)
def test_one_hot_labels_run(config, tmp_path, table, privacy, groups):
    options = [*TINY, *privacy, *table, "data.id_column=null", *groups]
    assert run_individual(config, tmp_path / "run", *options) == 0
    tests = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["split"] == "test"]
    assert all(set(record) >= {"accuracy", "top1_accuracy", "macro_auc"} for record in tests)
    over_steps = tmp_path / "run" / INDIVIDUAL / "groups_over_steps_NOT_FOR_RELEASE.csv"
    assert over_steps.exists() == (privacy is FILTER and "[]" not in groups[0])
    if over_steps.exists():
        assert "no condition" not in over_steps.read_text()


def test_conditions_of_another_table_are_named(config, tmp_path, capsys, table):
    options = [*TINY, *PLAIN, *table, "data.id_column=null"]
    assert run_individual(config, tmp_path / "run", *options) == 2
    message = capsys.readouterr().err
    assert "is no label; the labels are class 0, class 1" in message
    assert "or none ([]) for no groups" in message


def test_rows_without_a_label_in_one_part_only_are_refused():
    one_hot = torch.eye(3)
    features = torch.zeros(3, 1)
    without = LabelledRows(torch.zeros(4, 1), torch.cat([one_hot, torch.zeros(1, 3)]))
    groups = ConditionGroups(conditions=("a",), size=1, test_size=1)
    with pytest.raises(ValueError, match="no training row is left for the group 'no condition'"):
        grouped(
            LabelledRows(features, one_hot),
            without,
            features=["x"],
            labels=["a", "b", "c"],
            groups=groups,
        )


def test_top1_accuracy_is_of_rows_and_of_classes_only():
    torch.manual_seed(0)
    labels = torch.eye(4)[torch.randint(0, 4, (50,))]
    features = torch.randn(50, 6)
    model = mlp(inputs=6, outputs=4)
    none = ConditionGroups(conditions=())
    names = ["a", "b", "c", "d"]

    def task(labels):
        rows = LabelledRows(features, labels)
        data = grouped(rows, rows, features=["x"] * 6, labels=names, groups=none)
        return multilabel_task(data, model)

    with torch.no_grad():
        guessed = model(features).argmax(1)
    expected = float((guessed == labels.argmax(1)).double().mean())
    assert evaluate(task(labels))["top1_accuracy"] == pytest.approx(expected)
    several = labels.clone()
    several[0] = 1
    assert "top1_accuracy" not in evaluate(task(several))


@pytest.fixture(scope="module")
def mnist_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("mnist")
    write_mnist(root, train=200, test=100)
    return root


def test_mnist_is_scaled_by_the_range_of_a_byte(mnist_root, tmp_path):
    pixels, labels = write_mnist(tmp_path, train=200, test=100)
    data = mnist_table(mnist_root, groups=ConditionGroups(conditions=("8",), size=5, test_size=5))
    assert (len(data.features), data.labels) == (784, tuple("0123456789"))
    for rows, part in ((data.train, slice(0, 200)), (data.test, slice(200, None))):
        x, y = rows.tensors
        assert torch.allclose(x, torch.from_numpy(pixels[part]).flatten(1) / 255)
        assert 0 <= float(x.min()) < 0.01
        assert 0.99 < float(x.max()) <= 1
        assert y.argmax(1).tolist() == labels[part].tolist()
        assert y.sum(1).tolist() == [1] * len(y)
    assert list(data.train_groups) == ["with 8", "without 8"]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("privacy", [FILTER, PLAIN], ids=["filter", "no filter"])
def test_mnist_runs(config, tmp_path, capsys, mnist_root, privacy):
    options = [*TINY, *privacy, "data.name=mnist", f"data.root={mnist_root}"]
    options += ["groups.size=20", "groups.test_size=10"]
    assert run_individual(config, tmp_path / "run", *options) == 0
    assert "top1_accuracy 0." in capsys.readouterr().out


def test_mnist_needs_a_folder(config, tmp_path, capsys):
    assert run_individual(config, tmp_path / "run", *TINY, *PLAIN, "data.name=mnist") == 2
    assert "data.root=null: name the folder that holds the mnist files" in capsys.readouterr().err
