"""Figures for MLflow: a database in the run's folder, unless MLFLOW_TRACKING_URI says else."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from dptrain.integrations.loggers.tool import Place, Tool, missing

NAME = "mlflow"
_EXPERIMENT = "dptrain"
_ID = "dptrain_run_id"
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
            raise missing(NAME, "mlflow-skinny") from error
        folder = place.own(NAME).resolve()
        for name in ("mlflow.store.db.utils", "alembic"):  # which tell how a database is made
            logging.getLogger(name).setLevel(logging.WARNING)
        local = f"sqlite:///{folder / 'mlflow.db'}"
        address = os.environ.get("MLFLOW_TRACKING_URI", local)
        try:
            self._client = MlflowClient(tracking_uri=address)
        except ImportError as error:  # of what a database takes
            raise missing(NAME, "sqlalchemy") from error
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
        """One metric each, all stamped with the time at which the run began."""
        for name, value in values.items():
            key = _REFUSED.sub("_", name)
            self._client.log_metric(self._run, key, value, timestamp=self._began, step=step)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)
