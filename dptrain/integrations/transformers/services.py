"""The services of ``report_to``: what they would take along beside the figures that they are given.

Several record whatever the process prints, where the trainer's progress shows losses of training
batches; several can be told to upload checkpoints, which hold the seeds of the noise.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import transformers
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

# What uploads checkpoints: service, variable of the environment, its value where it is not set, and
# which values are harmless.
_UPLOADS = (
    ("wandb", "WANDB_LOG_MODEL", "false", ("false", "end", "")),
    ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "false", ("false", "0", "")),
    ("dagshub", "HF_DAGSHUB_LOG_ARTIFACTS", "false", ("false", "0", "")),
    ("comet_ml", "COMET_LOG_ASSETS", "false", ("false", "0", "")),
    ("clearml", "CLEARML_LOG_MODEL", "true", ("false", "0")),
    ("dvclive", "HF_DVCLIVE_LOG_MODEL", "false", ("false", "0", "")),
    ("swanlab", "SWANLAB_LOG_MODEL", "false", ("false", "0", "")),
)
_RECORD_CONSOLE = ("comet_ml", "neptune", "clearml", "swanlab")

# Weights & Biases alone is told here what not to take: the console, the command line (which may
# hold a seed), the source and its state in git, the host, and its load, which follows from the
# sizes of the batches.
_WANDB = {
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_JOB_CREATION": "true",
    "WANDB_HOST": "unnamed",
    "WANDB_X_DISABLE_MACHINE_INFO": "true",
    "WANDB_X_DISABLE_META": "true",
    "WANDB_X_DISABLE_STATS": "true",
}


def reports(callback: Any) -> bool:
    """True if a callback is one of those of ``report_to``."""
    return isinstance(callback, tuple(INTEGRATION_TO_CALLBACK.values()))


def check_service(callback: Any) -> None:
    """Refuse what a service is told to upload beside figures that may be released."""
    for name, variable, unset, harmless in _UPLOADS:
        value = os.environ.get(variable, unset)
        if _is(callback, name) and value.lower() not in harmless:
            stated = f"{variable}={value!r}" if variable in os.environ else f"{variable} is not set"
            raise ValueError(
                f"report_to={name!r} with {stated}: it uploads checkpoints, with which anyone can "
                f"subtract the noise. Set {variable}=false, and upload the folder that "
                "trainer.save_model(folder) writes"
            )
    if _is(callback, "neptune") and getattr(callback, "_log_checkpoints", None) is not None:
        raise ValueError(
            f"NeptuneCallback(log_checkpoints={callback._log_checkpoints!r}): it uploads "
            "checkpoints, with which anyone can subtract the noise: leave log_checkpoints out"
        )
    watched = os.environ.get("WANDB_WATCH", "false")
    if _is(callback, "wandb") and watched in ("all", "gradients"):
        raise ValueError(
            f"report_to='wandb' with WANDB_WATCH={watched!r}: it sends gradients of training "
            "batches before clipping and noise: set WANDB_WATCH=false"
        )


def guard(callback: Any, *, console: bool) -> None:
    """Make Weights & Biases begin its run without what it would record beside the figures.

    A run that the script began by itself keeps its settings.

    Args:
        callback: any; others are left alone.
        console: leave it the console, where private figures were asked for.
    """
    if not _is(callback, "wandb") or isinstance(callback.setup, functools.partial):
        return
    callback.setup = functools.partial(_quietly, callback.setup, console)


def _quietly(setup: Callable[..., Any], console: bool, *args: Any, **more: Any) -> Any:
    left = ("WANDB_CONSOLE",) if console else ()
    with _environment({k: v for k, v in _WANDB.items() if k not in left}):
        return setup(*args, **more)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """These variables as stated, for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def records_console(callback: Any) -> bool:
    """True if a callback's service takes along what is printed, as far as can be told."""
    if any(_is(callback, name) for name in _RECORD_CONSOLE):
        return True
    if not _is(callback, "wandb"):
        return False
    run = getattr(callback._wandb, "run", None)
    return run is not None and run.settings.console != "off"


def _is(callback: transformers.TrainerCallback, name: str) -> bool:
    kind = INTEGRATION_TO_CALLBACK.get(name)
    return kind is not None and isinstance(callback, kind)
