"""Several ranks on this machine: what they do, and what each found, once a test asks for it."""

from __future__ import annotations

import contextlib
import datetime
import pathlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

WORLDS = (2, 4)
EACH = [2, pytest.param(4, marks=pytest.mark.slow)]  # for parametrize: four cost more than two
# A rank that waits for nobody is to fail, not to hang.
TIMEOUT = datetime.timedelta(seconds=120)


def each_of(cases: Callable[[int], Iterable[Any]]) -> list[Any]:
    """(number of ranks, case) of all cases, for ``parametrize``."""
    return [
        pytest.param(world, case, marks=pytest.mark.slow if world > 2 else (), id=f"{world}-{case}")
        for world in WORLDS
        for case in cases(world)
    ]


@contextlib.contextmanager
def meeting(rank: int, folder: pathlib.Path, world: int) -> Iterator[None]:
    """One thread a rank, and their process group."""
    torch.set_num_threads(1)
    where = f"file://{folder}/meeting_{world}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


def leave(
    work: Mapping[Any, Callable[[], Any]], rank: int, folder: pathlib.Path, world: int
) -> None:
    """Do everything, one after the other, for ``found_by``; an error is kept as text."""
    found = {}
    for name, do in work.items():
        try:
            found[name] = do()
        except Exception:
            found[name] = traceback.format_exc()
    torch.save(found, folder / f"found_{world}_{rank}.pt")


def found_by(
    worker: Callable[..., None], folder: pathlib.Path, worlds: Sequence[int] = WORLDS
) -> Callable[[int, Any], list[Any]]:
    """What each of so many ranks found under a name; a traceback fails the test.

    Args:
        worker: called with the rank, the folder and the number of ranks; its work it does by
            ``leave``.
        folder: of all ranks.
        worlds: numbers of ranks; more of them go on where fewer stopped, and so begin later.
    """
    ranks: dict[int, list[dict[Any, Any]]] = {}

    def of(world: int, name: Any) -> list[Any]:
        for each in worlds[: worlds.index(world) + 1]:
            if each not in ranks:
                torch.multiprocessing.spawn(worker, args=(folder, each), nprocs=each)
                paths = [folder / f"found_{each}_{rank}.pt" for rank in range(each)]
                ranks[each] = [torch.load(path, weights_only=False) for path in paths]
        found = [rank[name] for rank in ranks[world]]
        for one in found:
            assert not isinstance(one, str), one
        return found

    return of
