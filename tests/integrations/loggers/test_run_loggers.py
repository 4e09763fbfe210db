"""Loggers of a private run: what each of the tools has afterwards, and what none of them has."""

from __future__ import annotations

import builtins
import os
import pathlib
import sys

import pytest

from dptrain import BandMF, CyclicPoisson, Identity, Poisson
from dptrain.engine import PrivateTraining
from dptrain.individual import GDPFilter
from dptrain.integrations.loggers import TOOLS, RunLoggers, Tool, check_installed
from tests.helpers.engine import images, make, small_net, train
from tests.helpers.logged import (
    everything,
    mlflow_run,
    scalars,
    wandb_host,
    wandb_kinds,
    wandb_rows,
)

N, STEPS = 24, 40
ACCURACY, SECRET, PRINTED = 0.8125, 0.7390625, "private loss 3.141592"
SCHEME = Poisson(probability=0.25, dataset_size=N, steps=STEPS)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def private_run(**options):
    if "target_epsilon" in options:
        options["noise_multiplier"] = None
    options = {"scheme": SCHEME, "strategy": Identity(), "target_delta": 0.01, **options}
    return make(small_net(), images(N), "bookkeeping", **options)


def logged(run, tools, folder, *, steps=(10, 30), **options):
    """A run that logs an accuracy, a private loss and its batch sizes at some steps."""
    with RunLoggers(run, tools, folder=folder, **options) as loggers:
        for step in steps:
            train(run, steps=step)
            print(PRINTED)
            size = float(len(run.loader.current.indices)) if run.loader.current else 0.0
            loggers.private({"loss": SECRET, "batch_size": size})
            loggers.released({"accuracy": ACCURACY}, part="test")
    return run


class Kept(Tool):
    def __init__(self):
        self.told, self.closed = [], 0

    def log(self, values, step):
        self.told.append((step, dict(values)))

    def close(self):
        self.closed += 1


def test_a_tool_gets_what_may_be_released_and_nothing_else(tmp_path):
    kept, called = Kept(), []
    run = private_run(noise_multiplier=1.0)
    logged(run, [kept, lambda values, step: called.append((step, dict(values)))], tmp_path)
    assert kept.told == called
    assert kept.closed == 1
    assert [step for step, _ in kept.told] == [10, 30]
    for _, values in kept.told:
        assert set(values) == {
            "accuracy/test",
            "run/learning_rate",
            "run/epsilon_so_far",
            "run/epsilon_planned",
        }
        assert values["accuracy/test"] == ACCURACY
        assert values["run/learning_rate"] == 0.1
        assert values["run/epsilon_planned"] == run.get_epsilon()
    first, second = (values["run/epsilon_so_far"] for _, values in kept.told)
    assert 0 < first < second < run.get_epsilon()
    assert list(tmp_path.iterdir()) == []


def test_private_metrics_are_sent_to_who_asks_and_say_what_they_are(tmp_path):
    kept = Kept()
    logged(private_run(noise_multiplier=1.0), [kept], tmp_path, private_metrics=True)
    sent = {name for _, values in kept.told for name in values}
    assert {"loss/train (not for release)", "batch_size/train (not for release)"} <= sent
    assert "loss/train" not in sent


def test_of_a_run_that_is_not_private_nothing_may_be_released(tmp_path):
    kept, asked = Kept(), Kept()
    logged(private_run(noise_multiplier=1.0), [kept], tmp_path, not_covered=True)
    assert kept.told == []
    logged(
        private_run(noise_multiplier=1.0), [asked], tmp_path, not_covered=True, private_metrics=True
    )
    names = {name for _, values in asked.told for name in values}
    assert "accuracy/test (not for release)" in names
    assert not any("epsilon" in name for name in names)


def test_under_a_filter_only_the_budget_is_told(tmp_path):
    kept = Kept()
    everyone = Poisson(probability=1.0, dataset_size=N, steps=STEPS)
    budget = GDPFilter(target_epsilon=5.0, target_delta=0.01, max_steps=STEPS)
    run = private_run(scheme=everyone, noise_multiplier=6.0, individual=budget)
    logged(run, [kept], tmp_path)
    for _, values in kept.told:
        assert "run/epsilon_so_far" not in values
        assert values["run/epsilon_planned"] <= 5.0


def test_tensorboard_has_one_time_for_all_records(tmp_path):
    logged(private_run(noise_multiplier=1.0), ["tensorboard"], tmp_path)
    found = scalars(tmp_path / "tensorboard")
    assert [event.value for event in found["accuracy/test"]] == [ACCURACY, ACCURACY]
    assert [event.step for event in found["accuracy/test"]] == [10, 30]
    assert {event.wall_time for events in found.values() for event in events} == {
        found["accuracy/test"][0].wall_time
    }
    assert not any("loss" in tag or "batch" in tag for tag in found)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A run that Weights & Biases kept, with real wandb."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        logged(private_run(noise_multiplier=1.0, seed=918273645), ["wandb"], folder)
    return folder


@pytest.mark.slow
def test_wandb_keeps_the_released_figures_offline(offline):
    rows = wandb_rows(offline)
    assert [row["_step"] for row in rows] == [10, 30]
    for row in rows:
        assert row["accuracy/test"] == ACCURACY
        assert {name for name in row if not name.startswith("_")} == {
            "accuracy/test",
            "run/learning_rate",
            "run/epsilon_so_far",
            "run/epsilon_planned",
        }


def test_wandb_records_neither_console_nor_host_nor_code_nor_load(offline):
    kinds = wandb_kinds(offline)
    assert "history" in kinds  # so that the records were read
    assert not kinds & {"output", "output_raw", "stats", "artifact", "use_artifact"}
    names = {path.name for path in offline.rglob("*")}
    assert not names & {"output.log", "wandb-metadata.json", "requirements.txt", "diff.patch"}
    kept = everything(offline)
    for secret in (PRINTED, "3.141592", str(SECRET), "918273645", "batch_size/train"):
        assert secret.encode() not in kept
    run = b"".join(path.read_bytes() for path in offline.rglob("*.wandb"))
    for local in (str(pathlib.Path(sys.argv[0]).name), os.getcwd()):
        assert local.encode() not in run
    assert wandb_host(offline) == {""}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """A run that MLflow kept in its folder; to make its database takes long."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        logged(private_run(noise_multiplier=1.0), ["mlflow"], folder)
    return folder


@pytest.mark.slow
def test_mlflow_keeps_the_released_figures_in_a_local_database(database):
    client, run = mlflow_run(database / "mlflow")
    assert run.info.status == "FINISHED"
    assert set(run.data.metrics) == {
        "accuracy/test",
        "run/learning_rate",
        "run/epsilon_so_far",
        "run/epsilon_planned",
    }
    history = client.get_metric_history(run.info.run_id, "accuracy/test")
    assert [(metric.step, metric.value) for metric in history] == [(10, ACCURACY), (30, ACCURACY)]
    assert {metric.timestamp for metric in history} == {run.info.start_time}
    assert run.data.params["scheme"] == "Poisson"
    assert not {"mlflow.source.name", "mlflow.source.git.commit", "mlflow.user"} & set(
        run.data.tags
    )
    assert PRINTED.encode() not in everything(database)


@pytest.mark.slow
def test_the_environment_names_another_store_and_experiment(database, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database / 'mlflow' / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    run = private_run(noise_multiplier=1.0)
    # A name that the store refuses is changed, as "(not for release)" is.
    logged(run, ["mlflow", "wandb"], tmp_path, steps=(10,), private_metrics=True)
    logged(run, ["mlflow", "wandb"], tmp_path, steps=(30,), private_metrics=True)
    assert not (tmp_path / "mlflow" / "mlflow.db").exists()
    client, kept = mlflow_run(database / "mlflow", experiment="another")
    # A run that goes on is one run of the tools.
    assert kept.data.metrics["loss/train _not for release_"] == SECRET
    assert kept.info.status == "FINISHED"
    steps = [m.step for m in client.get_metric_history(kept.info.run_id, "accuracy/test")]
    assert steps == [10, 30]
    assert len({path.name for path in tmp_path.rglob("*.wandb")}) == 1
    rows = [row for row in wandb_rows(tmp_path) if "accuracy/test" in row]
    assert [row["_step"] for row in rows] == [10, 30]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_missing_package_is_named_with_the_remedy(tool, tmp_path, monkeypatch):
    own = builtins.__import__
    parts = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}

    def without(name, *rest, **more):
        if name.startswith(parts[tool]):
            raise ImportError(f"No module named {name!r}")
        return own(name, *rest, **more)

    run = private_run(noise_multiplier=1.0)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"dptrain\[loggers\]"):
        RunLoggers(run, [tool], folder=tmp_path)


def test_missing_packages_are_found_beforehand(monkeypatch):
    check_installed(TOOLS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="'wandb' needs the package wandb"):
        check_installed(["wandb"])
    check_installed([])


def test_mistakes_are_named(tmp_path):
    run = private_run(noise_multiplier=1.0)
    with pytest.raises(ValueError, match="'wandb'"):
        RunLoggers(run, ["wandbb"], folder=tmp_path)
    with pytest.raises(TypeError, match="must be a list"):
        RunLoggers(run, "wandb", folder=tmp_path)
    with pytest.raises(TypeError, match="holds a int"):
        RunLoggers(run, [3], folder=tmp_path)
    with pytest.raises(TypeError, match="run"):
        RunLoggers(small_net(), [], folder=tmp_path)
    with pytest.raises(TypeError, match="private_metrics"):
        RunLoggers(run, [], folder=tmp_path, private_metrics="yes")


# Where a run stands


def test_so_far_is_priced_once_for_every_twentieth_and_only_if_asked(monkeypatch):
    asked = []
    from dptrain.engine import private_training

    own = private_training.epsilon_so_far

    def counted(mechanism, steps, **more):
        asked.append(steps)
        return own(mechanism, steps, **more)

    monkeypatch.setattr(private_training, "epsilon_so_far", counted)
    run = private_run(noise_multiplier=1.0)
    train(run)
    assert asked == []
    run = private_run(noise_multiplier=1.0)
    train(run, after_step=run.so_far)
    assert asked == list(range(1, STEPS + 1, 2))  # at 40 steps a twentieth is two


def test_so_far_begins_at_nothing_and_ends_at_the_plan():
    run = private_run(target_epsilon=3.0, target_delta=0.01)
    start = run.so_far()
    assert (start.steps, start.epsilon) == (0, 0.0)
    assert start.planned == run.get_epsilon()
    train(run)
    end = run.so_far()
    assert end.steps == end.steps_planned == STEPS
    assert end.epsilon == end.planned == run.get_epsilon()


def test_without_a_delta_or_where_it_takes_a_simulation_no_epsilon_is_told(monkeypatch):
    def never(*_, **__):
        raise AssertionError("nothing may be accounted for a display")

    from dptrain import MinSep
    from dptrain.engine import private_training

    monkeypatch.setattr(private_training, "account", never)
    scheme = MinSep(probability=0.2, min_sep=4, dataset_size=N, steps=STEPS)
    run = private_run(scheme=scheme, strategy=BandMF(bands=4), noise_multiplier=1.0)
    assert run.so_far().figures == {}
    assert private_run(noise_multiplier=1.0, target_delta=None).so_far().figures == {}


def test_steps_of_a_ledger_beyond_the_checkpoint_count(tmp_path):
    """They were released: who goes back to an earlier checkpoint has not taken them back."""
    scheme = CyclicPoisson(probability=0.5, cycle=2, dataset_size=N, steps=STEPS)
    options = {"scheme": scheme, "strategy": BandMF(bands=2), "noise_multiplier": 1.0}
    run = private_run(**options, ledger=tmp_path / "ledger.jsonl")
    train(run, steps=4)
    state = run.state_dict()
    train(run, steps=20)
    seen = run.so_far()
    again: PrivateTraining = private_run(**options, ledger=tmp_path / "ledger.jsonl")
    again.load_state_dict(state)
    assert again.steps_executed == 4
    assert again.so_far() == seen
