"""The private part of a trainer's checkpoint folder, readable by its owner only."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from dptrain.distributed import FullySharded
from dptrain.engine import PrivateTraining, check_seal
from dptrain.integrations.transformers.arguments import PrivacyArguments
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import in_place

PRIVATE_FILE = "private_state.pt"
PRIVATE_FOLDER = "private_state"
"""Of a model that is divided, where each process writes its part."""
_FORMAT = 1


def write(folder: str, private: PrivateTraining, privacy: PrivacyArguments, *, here: bool) -> None:
    """Save the run's state, optimizer and schedules included, in a checkpoint's folder.

    Args:
        privacy: what it was asked for.
        here: True if this process writes; all of them have to call, as each has a part of it.
    """
    state: dict[str, Any] = {"format": _FORMAT, "asked": privacy.asked}
    divided = pathlib.Path(folder) / PRIVATE_FOLDER
    if FullySharded.there(private.module):
        if here and divided.exists():  # of a run that wrote into the same folder before
            shutil.rmtree(divided)
        torch.distributed.barrier()
        private.save(divided)
        mechanism = private.mechanism
        state["divided"] = True
        state["run"] = {"mechanism": mechanism.to_dict(), "mechanism_hash": mechanism.hash}
    else:
        state["run"] = private.state_dict()
    if not here:
        return
    os.makedirs(folder, exist_ok=True)
    with in_place(pathlib.Path(folder) / PRIVATE_FILE) as path:
        torch.save(state, path)


def read(folder: str) -> dict[str, Any]:
    """The saved values that ``write`` left in a checkpoint's folder."""
    path = pathlib.Path(folder) / PRIVATE_FILE
    if not path.is_file():
        raise ValueError(
            f"resume_from_checkpoint={folder!r}: there is no {PRIVATE_FILE}, so the noise and the "
            "sampling could not be resumed. The checkpoint was written by a plain Trainer, or "
            "with save_only_model=True. Resume from one that has this file, or start a new run, "
            "whose guarantee adds to that of the steps already released"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT or "run" not in state:
        raise ValueError(f"{path} has another format: use the dptrain version that wrote it")
    if not state.get("divided"):
        check_seal(state["run"], str(path))
    return dict(state)


def load(folder: str, saved: Mapping[str, Any], private: PrivateTraining) -> None:
    """Bring a run to where it was saved, by what ``read`` gave."""
    several = private.optimizer.shared.ranks.world_size > 1
    if saved.get("divided") and several and not FullySharded.there(private.module):
        raise ValueError(
            f"resume_from_checkpoint={folder!r}: its model was divided among processes, and here "
            "each process holds the whole model: pass TrainingArguments(fsdp=True), on any number "
            "of processes, or resume in a single process"
        )
    if saved.get("divided"):
        private.load(pathlib.Path(folder) / PRIVATE_FOLDER)
    else:
        private.load_state_dict(saved["run"])


def mechanism_of(
    folder: str, saved: Mapping[str, Any], privacy: PrivacyArguments, planned: MatrixMechanism
) -> MatrixMechanism:
    """The mechanism that a resumed run goes on with: what is asked for now, with the saved noise.

    Args:
        folder: of the checkpoint.
        saved: what ``read`` gave.
        privacy: what is asked for now.
        planned: scheme and strategy that is asked for now, with the noise of the checkpoint.

    Raises:
        ValueError: if the checkpoint's run was asked for something else.
    """
    start = f"resume_from_checkpoint={folder!r}: "
    if saved["asked"] != privacy.asked:
        names = [name for name in privacy.asked if saved["asked"].get(name) != privacy.asked[name]]
        then = ", ".join(f"{name}={saved['asked'].get(name)}" for name in names)
        now = ", ".join(f"{name}={privacy.asked[name]}" for name in names)
        raise ValueError(
            f"{start}its run was started with {then}, and PrivacyArguments has {now}, but the "
            "noise was chosen for the whole plan: resume with the arguments of the start"
        )
    if saved["run"]["mechanism_hash"] != planned.hash:
        then = _plan(MatrixMechanism.from_dict(saved["run"]["mechanism"]))
        raise ValueError(
            f"{start}its run is {then}, and the arguments now make {_plan(planned)}, but the noise "
            "was chosen for that plan: resume with the same data, epochs, batch size, scheme and "
            "strategy (per_device_train_batch_size may change if gradient_accumulation_steps "
            "compensates for it)"
        )
    return planned


def _plan(mechanism: MatrixMechanism) -> str:
    return f"{mechanism.steps} steps of {mechanism.scheme} with {mechanism.strategy}"
