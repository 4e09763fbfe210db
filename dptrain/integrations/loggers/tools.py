"""Tools that take the figures of a run: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

_ID = "dptrain_run_id"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The folder and the run of which a tool keeps its record.

    Attributes:
        folder: of the run; the tool has a folder of its own in it.
        facts: settings to show beside the curves; public.
        steps: that had run when it was opened: what was logged of later ones will come again.
        began: seconds since 1970, the one time that all figures are stamped with where the tool
            lets itself be told: from the time between two records follows how much work the steps
            between them were, and so how many examples they drew.
    """

    folder: pathlib.Path
    facts: Mapping[str, Any]
    steps: int = 0
    began: float = dataclasses.field(default_factory=time.time)

    def own(self, name: str) -> pathlib.Path:
        """The folder of the tool of this name, made now."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path


class Tool(ABC):
    """Takes the figures of a run. A plain function of ``values`` and ``step`` will do as well."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take figures, ``name/part`` each, after so many steps."""

    def close(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """Write what is left."""


def missing(name: str, package: str) -> ImportError:
    """The error that names the package to install for a logger."""
    return ImportError(
        f"the logger {name!r} needs the package {package}, which is not installed: pip install "
        f'"dptrain[loggers]", or leave {name!r} out'
    )


class TensorBoard(Tool):
    """Event files in ``tensorboard/``."""

    def __init__(self, place: Place) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("tensorboard", "tensorboard") from error
        self._began = place.began
        self._writer = SummaryWriter(str(place.own("tensorboard")), purge_step=place.steps + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one scalar each, all stamped with the time at which the run began."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=self._began)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


# What it would record beside the figures: all that is printed (losses of training batches among
# it), the command line, the source, its state in git, the host, and its load, which follows from
# the sizes of the batches.
_NOTHING_ELSE: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "host": "",
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WeightsAndBiases(Tool):
    """A run in ``wandb/``, to be sent by ``wandb sync``; ``WANDB_MODE=online`` sends it at once.

    Project and entity are those of ``WANDB_PROJECT`` and ``WANDB_ENTITY``. Each record has the time
    at which it came, which this tool does not let others set.
    """

    def __init__(self, place: Place) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", "wandb") from error
        path = place.own("wandb") / _ID
        if not path.exists():
            path.write_text(secrets.token_hex(4), encoding="utf-8")
        settings: dict[str, Any] = {"mode": os.environ.get("WANDB_MODE", "offline")}
        self._run = wandb.init(
            dir=str(place.folder),
            id=path.read_text(encoding="utf-8").strip(),
            resume="allow",
            reinit="create_new",  # never the script's own, with settings of its own
            project=os.environ.get("WANDB_PROJECT", "dptrain"),
            config=dict(place.facts),
            settings=wandb.Settings(**settings, **_NOTHING_ELSE),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


_EXPERIMENT = "dptrain"
_LONGEST = 500  # letters of a value that every store takes
_REFUSED = re.compile(r"[^0-9A-Za-z_\-. :/]")  # in names


class MLflow(Tool):
    """A run in ``mlflow/mlflow.db``; experiment ``dptrain``, or ``MLFLOW_EXPERIMENT_NAME``.

    Through the client and not ``mlflow.start_run``, which records who started what script of which
    commit.
    """

    def __init__(self, place: Place) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing("mlflow", "mlflow-skinny") from error
        folder = place.own("mlflow").resolve()
        for name in ("mlflow.store.db.utils", "alembic"):  # which tell how a database is made
            logging.getLogger(name).setLevel(logging.WARNING)
        local = f"sqlite:///{folder / 'mlflow.db'}"
        address = os.environ.get("MLFLOW_TRACKING_URI", local)
        try:
            self._client = MlflowClient(tracking_uri=address)
        except ImportError as error:  # of what a database takes
            raise missing("mlflow", "sqlalchemy") from error
        self._began = round(1000 * place.began)
        self._run = self._begun(place, folder / _ID, artifacts=folder / "artifacts")

    def _begun(self, place: Place, known: os.PathLike[str], *, artifacts: os.PathLike[str]) -> str:
        """The run of this folder: the one that it had before, or a new one."""
        from mlflow.exceptions import MlflowException

        client = self._client
        try:
            with open(known, encoding="utf-8") as file:
                found: str = file.read().strip()
            client.get_run(found)
        except (FileNotFoundError, MlflowException):
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                where = None if "MLFLOW_TRACKING_URI" in os.environ else f"file:{artifacts}"
                number = client.create_experiment(name, artifact_location=where)
            else:
                number = experiment.experiment_id
            found = client.create_run(number, start_time=self._began).info.run_id
            with open(known, "w", encoding="utf-8") as file:
                file.write(found)
            for fact, value in place.facts.items():
                client.log_param(found, _REFUSED.sub("_", fact), str(value)[:_LONGEST])
        else:
            client.update_run(found, status="RUNNING")
        return found

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one metric each, all stamped with the time at which the run began."""
        for name, value in values.items():
            key = _REFUSED.sub("_", name)
            self._client.log_metric(self._run, key, value, timestamp=self._began, step=step)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)
