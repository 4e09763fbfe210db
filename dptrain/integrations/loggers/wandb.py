"""Figures for Weights & Biases: an offline run in the run's folder, unless WANDB_MODE says else."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from dptrain.integrations.loggers.tool import Place, Tool, missing

NAME = "wandb"
_ID = "dptrain_run_id"

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
            raise missing(NAME, NAME) from error
        path = place.own(NAME) / _ID
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
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
