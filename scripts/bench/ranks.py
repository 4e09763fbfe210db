"""Processes of this machine as ranks over gloo, and what they hold."""

from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

_FOUND = "found.json"


def found_by(measure: Callable[..., None], world: int, *args: Any) -> Any:
    """The result that rank 0 of so many processes handed over.

    Args:
        measure: called with the rank, ``world``, a folder of the processes' own and ``args``.
        world: number of processes.
        args: of ``measure``; pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, args=(world, folder, *args), nprocs=world)
        return json.loads(pathlib.Path(folder, _FOUND).read_text(encoding="utf-8"))


def hand_over(found: Any, folder: str) -> None:
    """Leave what JSON can hold to the process that started the ranks."""
    pathlib.Path(folder, _FOUND).write_text(json.dumps(found), encoding="utf-8")


@contextlib.contextmanager
def meeting(rank: int, world: int, folder: str) -> Iterator[None]:
    """One thread a rank, and a process group for as long as the context lasts."""
    torch.set_num_threads(1)
    where = pathlib.Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    warnings.simplefilter("ignore")
    yield
    dist.barrier()
    dist.destroy_process_group()


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, without its counts of steps."""
    held = [v for each in optimizer.state.values() for v in each.values()]
    return bytes_of(v for v in held if v.ndim)


def noise_and_state(noise: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of past noise and of the optimizer's state."""
    return {"noise": noise.buffer_bytes, "optimizer": state_of(optimizer)}
