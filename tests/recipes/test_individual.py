"""The recipe of several labels a row: its task, its settings, and a short run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score

from dptrain.mechanism import MatrixMechanism
from recipes import individual
from recipes.data.digit_conditions import digit_conditions
from recipes.data.multilabel import LabelledRows
from recipes.group_losses import group_losses
from recipes.individual import (
    GroupSettings,
    IndividualSettings,
    build_task,
    multilabel_task,
)
from recipes.models.mlp import mlp
from recipes.runfolder import load_checkpoint, read_metrics
from recipes.task import evaluate
from tests.helpers.double import doubled
from tests.helpers.individual_recipe import run_individual
from tests.helpers.phenotyping_files import FEATURES, write_csv, write_parquet, write_parts

TINY = [
    "model.widths=[8]",
    "steps=3",
    "evaluate_every=1",
    "privacy.epsilon=null",
    "privacy.noise_multiplier=2",
    "plots=false",
    "seed=1",
]
SMALL_GROUPS = ["groups.size=8", "groups.test_size=4"]


def _main(config, output, *arguments):
    return run_individual(config, output, *TINY, *arguments)


@pytest.fixture(scope="module")
def data():
    return digit_conditions()


@pytest.fixture(scope="module")
def task(data):
    torch.manual_seed(0)
    return multilabel_task(data, mlp(inputs=64, outputs=13, widths=[16]))


def _probabilities(task, rows):
    with torch.no_grad():
        return torch.sigmoid(task.model(rows.tensors[0]).double())


def test_the_loss_is_the_mean_of_the_labels(task, data):
    p, y = _probabilities(task, data.test), data.test.tensors[1].double()
    losses = -(y * p.log() + (1 - y) * (1 - p).log())
    found = evaluate(task)
    assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(((p > 0.5) == (y == 1)).double().mean()))
    areas = [roc_auc_score(y[:, k], p[:, k]) for k in range(13)]
    assert found["macro_auc"] == pytest.approx(np.mean(areas))
    assert task.notes == ()


def test_group_losses_are_those_of_their_rows(task, data):
    found = group_losses(task)
    for rows, groups, means in (
        (data.train, data.train_groups, found.train),
        (data.test, data.test_groups, found.test),
    ):
        p, y = _probabilities(task, rows), rows.tensors[1].double()
        losses = -(y * p.log() + (1 - y) * (1 - p).log()).mean(1)
        assert list(means) == list(groups)
        expected = [float(losses[members].mean()) for members in groups.values()]
        assert list(means.values()) == pytest.approx(expected, rel=1e-5)


def test_labels_of_one_class_are_named(data):
    features, labels = data.test.tensors
    rows = labels[:, 0] == 0  # no ones
    test = LabelledRows(features[rows], labels[rows])
    changed = dataclasses.replace(data, test=test, train_groups={}, test_groups={})
    task = multilabel_task(changed, mlp(inputs=64, outputs=13))
    assert task.notes == (
        "macro_auc is the mean over 12 of 13 labels; every test row has, or no test row has: 1",
    )
    assert 0 <= evaluate(task)["macro_auc"] <= 1


def test_a_part_of_the_test_set_needs_the_same_labels(data):
    with pytest.raises(ValueError, match=r"evaluate_examples=5: .* use more, or null"):
        multilabel_task(data, mlp(inputs=64, outputs=13), evaluate_examples=5)
    multilabel_task(data, mlp(inputs=64, outputs=13), evaluate_examples=200)


def test_the_default_is_full_batches_of_independent_noise(config, tmp_path, capsys):
    assert _main(config, tmp_path / "run") == 0
    mechanism = MatrixMechanism.from_dict(load_checkpoint(tmp_path / "run")["run"]["mechanism"])
    assert mechanism.scheme.probability == 1
    assert type(mechanism.strategy).__name__ == "Identity"
    tests = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["split"] == "test"]
    assert [record["step"] for record in tests] == [0, 1, 2, 3]
    assert all(set(record) >= {"loss", "accuracy", "macro_auc"} for record in tests)
    assert "macro_auc 0." in capsys.readouterr().out


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("mode", ["bookkeeping", "functorch"])
def test_all_modes_learn_the_same(config, tmp_path, monkeypatch, mode):
    monkeypatch.setattr(individual, "mlp", doubled(individual.mlp))
    models = []
    for name, options in (("hooks", ["max_physical_batch_size=500"]), (mode, [])):
        options = [*options, f"grad_sample_mode={name}", "model.groups=2"]
        assert _main(config, tmp_path / name, *options) == 0
        models.append(load_file(tmp_path / name / "model.safetensors"))
    for ours, theirs in zip(models[0].values(), models[1].values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("parquet", [False, True], ids=["csv", "parquet"])
def test_phenotyping_runs(config, tmp_path, capsys, parquet):
    root = tmp_path / "data"
    root.mkdir()
    tables = write_parts(root, parquet=parquet)
    options = ["data.name=phenotyping", f"data.root={root}", *SMALL_GROUPS]
    assert _main(config, tmp_path / "run", *options) == 0
    assert "on 100 held-out rows" in capsys.readouterr().out
    # The run goes on only with the same table: one cell in the middle is enough to see it.
    tables["train"][FEATURES[0]][117] += 1
    if parquet:
        write_parquet(root / "train.parquet", tables["train"])
    else:
        write_csv(root / "train.csv", tables["train"])
    assert _main(config, tmp_path / "run", "--resume", *options) == 2
    assert "the dataset has changed" in capsys.readouterr().err


def test_groups_are_the_data_sets_own_unless_stated():
    own = GroupSettings().build("digits")
    assert (own.conditions, own.size, own.test_size) == (("8", "prime"), 100, 30)
    stated = GroupSettings(conditions=["odd"], test_size=5, seed=3).build("digits")
    assert (stated.conditions, stated.size, stated.test_size) == (["odd"], 100, 5)
    assert stated.seed == 3
    assert GroupSettings().build("phenotyping").size == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data.name=mimic"], "choose one of digits, mnist, phenotyping"),
        (["data.name=phenotyping"], "data.root=null: name the folder"),
        (["data.name=phenotyping", "data.root=nowhere"], "no folder nowhere"),
        (["model.activation=gelu"], 'model.activation="gelu": did you mean relu'),
        (["groups.conditions=[eight]"], "'eight' is no label"),
        (["groups.size=0"], "size=0"),
    ],
)
def test_what_cannot_work_is_said(config, tmp_path, capsys, options, message):
    assert _main(config, tmp_path / "run", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_initial_weights_are_those_of_the_seed():
    first, again = (build_task(IndividualSettings()).model.state_dict() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), again.values(), strict=True))
