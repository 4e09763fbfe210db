"""``report_to`` with real Weights & Biases, MLflow and TensorBoard: nothing private goes there."""

from __future__ import annotations

import os
import socket

import pytest
import transformers

from tests.helpers.logged import everything, scalars, wandb_host, wandb_kinds, wandb_rows
from tests.integrations.tiny import Texts, privacy, trainer

RELEASED = {"learning_rate", "epoch", "epsilon_so_far", "epsilon_planned"}
VARIABLES = (
    *("WANDB_LOG_MODEL", "WANDB_WATCH", "WANDB_CONSOLE", "WANDB_X_DISABLE_STATS"),
    *("HF_MLFLOW_LOG_ARTIFACTS", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"),
)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class _Everything(transformers.TrainerCallback):
    """What a callback is told by any event."""

    def __init__(self):
        self.figures = {}

    def on_log(self, args, state, control, logs=None, **_):
        self.figures |= logs

    def on_predict(self, args, state, control, metrics=None, **_):
        self.figures |= metrics

    def on_evaluate(self, args, state, control, metrics=None, **_):
        self.figures |= metrics


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A run that reports to all three, with what the trainer knew: folder, trainer, console."""
    folder = tmp_path_factory.mktemp("reported")
    data = Texts()
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        import wandb

        wandb.teardown()  # it reads the environment once a process, perhaps before this test
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # at once, where a database takes seconds
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{folder / 'mlflow'}")
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        patch.chdir(folder)
        private = trainer(
            folder / "out",
            data=data,
            private=privacy(noise_seed=918273645),
            more={"eval_dataset": Texts(9, 5)},
            report_to=["wandb", "mlflow", "tensorboard"],
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            save_steps=3,
            disable_tqdm=False,
        )
        environment = dict(os.environ)
        private.train()
        private.evaluate(data)  # of the trained examples: for its caller alone
        private.predict(data)
        import mlflow

        wandb.run.finish()
        mlflow.end_run()
        assert {n: v for n, v in os.environ.items() if "WANDB" in n and n in environment} == {
            n: v for n, v in environment.items() if "WANDB" in n
        }
    return folder, private


def secrets(private):
    """Figures of training batches, as texts to look for."""
    found = {
        repr(value)[:10]
        for entry in private.training_log
        for name, value in entry.items()
        if name in ("loss", "train_loss", "train_runtime", "train_steps_per_second")
    }
    assert len(found) > 4
    return found


@pytest.mark.slow
def test_weights_and_biases_gets_what_may_be_released(reported):
    folder, _ = reported
    rows = wandb_rows(folder)
    train = [row for row in rows if "train/learning_rate" in row]
    assert [row["train/global_step"] for row in train] == [2, 4, 6]
    for row in train:
        own = {name.removeprefix("train/") for name in row if not name.startswith("_")}
        assert own == {*RELEASED, "global_step"}
    assert [row["train/epsilon_so_far"] for row in train] == sorted(
        row["train/epsilon_so_far"] for row in train
    )
    assert train[-1]["train/epsilon_so_far"] == train[-1]["train/epsilon_planned"]
    names = {name for row in rows for name in row if not name.startswith(("_", "train/"))}
    assert {"eval/loss"} <= names
    assert all(name.startswith("eval/") for name in names)
    # One evaluation on other data at steps 3 and 6; that of the trained examples is not there.
    assert sum("eval/loss" in row for row in rows) == 2


@pytest.mark.slow
def test_weights_and_biases_records_nothing_beside(reported):
    folder, private = reported
    assert not wandb_kinds(folder) & {"output", "output_raw", "stats", "artifact"}
    files = {path.name for path in (folder / "wandb").rglob("*")}
    assert not files & {"output.log", "wandb-metadata.json", "diff.patch"}
    kept = everything(folder / "wandb")
    for secret in (*secrets(private), "918273645", "not for release"):
        assert secret.encode() not in kept
    assert not wandb_host(folder) & {socket.gethostname()}


@pytest.mark.slow
def test_mlflow_gets_what_may_be_released(reported):
    folder, private = reported
    kept = sorted((folder / "mlflow").glob("[0-9]*/*/metrics/*"))
    lines = {path.name: path.read_text().splitlines() for path in kept}
    assert {name for name in lines if not name.startswith("eval_")} == RELEASED
    assert len(lines["eval_loss"]) == 2
    for secret in (*secrets(private), "918273645"):
        assert secret.encode() not in everything(folder / "mlflow")


def test_tensorboard_gets_what_may_be_released(reported):
    folder, _ = reported
    found = scalars(next((folder / "tensorboard").rglob("*tfevents*")).parent)
    train = {tag.removeprefix("train/") for tag in found if tag.startswith("train/")}
    assert train == RELEASED
    assert len(found["eval/loss"]) == 2


def test_the_state_of_the_trainer_tells_the_same(reported):
    _, private = reported
    entries = [entry for entry in private.state.log_history if "learning_rate" in entry]
    assert [set(entry) for entry in entries] == [{*RELEASED, "step"}] * 3
    assert entries[-1]["epsilon_so_far"] == private.guarantee().epsilon
    times = {"train_runtime", "train_steps_per_second", "train_samples_per_second"}
    assert any(times <= set(entry) for entry in private.training_log)


@pytest.mark.slow
def test_predictions_on_trained_examples_are_told_to_nobody(tmp_path):
    told = _Everything()
    data = Texts()
    private = trainer(tmp_path, data=data, more={"callbacks": [told]})
    private.train()
    found = private.predict(data)
    assert "test_loss" in found.metrics
    private.evaluate(data)
    assert not any(name.startswith(("test_", "eval_")) for name in told.figures)
    private.predict(Texts(9, 5))
    assert "test_loss" in told.figures


@pytest.mark.slow
def test_a_run_of_the_scripts_own_that_records_the_console_is_told_nothing_private(
    tmp_path, capsys, monkeypatch
):
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    own = wandb.init(settings=wandb.Settings(console="wrap", silent=True))
    try:
        private = trainer(tmp_path / "out", report_to=["wandb"], logging_steps=2)
        private.train()
    finally:
        own.finish()
    assert "not for release" not in capsys.readouterr().out
    assert [entry["step"] for entry in private.training_log if "loss" in entry] == [2, 4, 6]


@pytest.mark.parametrize(
    ("service", "variable", "value"),
    [
        ("wandb", "WANDB_LOG_MODEL", "checkpoint"),
        ("wandb", "WANDB_WATCH", "gradients"),
        ("wandb", "WANDB_WATCH", "all"),
        ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "TRUE"),
        ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "1"),
    ],
)
def test_services_that_would_upload_what_is_private_are_refused(
    tmp_path, monkeypatch, service, variable, value
):
    callback = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK[service]
    late = trainer(tmp_path)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable):
        trainer(tmp_path, report_to=[service])
    with pytest.raises(ValueError, match=variable):
        late.add_callback(callback)
    monkeypatch.delenv(variable)
    private = trainer(tmp_path, report_to=[service])
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable):
        private.train()
