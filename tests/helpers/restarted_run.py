"""What each rank of a run does that torchrun starts, and starts again when a rank was killed.

``kills.json`` in the folder says for every life of the run which rank is to kill itself, and before
which of its Python calls, counted from the moment at which it begins to train or to go on. With the
word ``divided`` the model is one that ``fully_shard`` divided, and each checkpoint a folder.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import shutil
import signal
import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from dptrain import BandMF, MinSep, PrivacyEngine
from dptrain.engine import PrivateTraining

STEPS, EVERY = 48, 3
KILLS, CHECKPOINT, LEDGER = "kills.json", "run.pt", "ledger.jsonl"
OUTCOME = "outcome{rank}.pt"


def built(folder: pathlib.Path, *, divided: bool) -> PrivateTraining:
    """The run at its start; dropout draws from torch's global generator."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    if divided:
        fully_shard(module[0])
        fully_shard(module)
    data = TensorDataset(torch.randn(120, 6), torch.randint(0, 3, (120,)))
    return PrivacyEngine(ledger=folder / LEDGER).make_private(
        module=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-2),
        data=data,
        scheme=MinSep.for_batch_size(batch_size=12, dataset_size=120, min_sep=4, steps=STEPS),
        strategy=BandMF(bands=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=0,
    )


def kill_before(call: int) -> None:
    """SIGKILL for this process before so many Python calls more."""
    seen = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")
        if seen == call:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def main(folder: pathlib.Path, *, divided: bool) -> None:
    """Train to the end, from the checkpoint if there is one."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kills = json.loads((folder / KILLS).read_text())
    private = built(folder, divided=divided)
    if life < len(kills) and kills[life][0] == rank:
        kill_before(kills[life][1])
    write = save_in_folder if divided else save
    if divided and (saved := folders(folder)):
        private.load(saved[-1])
    elif not divided and (folder / CHECKPOINT).exists():
        private.load_state_dict(torch.load(folder / CHECKPOINT, weights_only=True))
    else:
        write(private, folder)
    for x, y in private.loader:
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(private.module(x), y).backward()
        private.optimizer.step()
        if private.steps_executed % EVERY == 0:
            write(private, folder)
    sys.setprofile(None)
    outcome = {"life": life, "state": private.state_dict()}
    torch.save(outcome, folder / OUTCOME.format(rank=rank))
    dist.destroy_process_group()


def save(private: PrivateTraining, folder: pathlib.Path) -> None:
    """The checkpoint of all ranks, by the first; the earlier one stays until it is whole."""
    state = private.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, folder / "run.tmp")
        os.replace(folder / "run.tmp", folder / CHECKPOINT)


def folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints of a divided model that are whole, the latest last."""
    return sorted(folder.glob("run-*"), key=lambda path: int(path.name.split("-")[1]))


def save_in_folder(private: PrivateTraining, folder: pathlib.Path) -> None:
    """The checkpoint of all ranks, each its part; earlier ones stay until it is whole."""
    private.save(folder / f"run-{private.steps_executed}")
    if dist.get_rank() == 0:
        for old in folders(folder)[:-1]:
            shutil.rmtree(old)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), divided=sys.argv[2:] == ["divided"])
