"""What ranks found, which begin when a test asks for them: four cost more than two."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.multiprocessing

WORLDS = (2, 4)
EACH = [2, pytest.param(4, marks=pytest.mark.slow)]  # for parametrize


def each_of(cases: Callable[[int], Iterable[Any]]) -> list[Any]:
    """(number of ranks, case) of all cases, for ``parametrize``."""
    return [
        pytest.param(world, case, marks=pytest.mark.slow if world > 2 else (), id=f"{world}-{case}")
        for world in WORLDS
        for case in cases(world)
    ]


def found_by(worker: Callable[..., None], folder: pathlib.Path) -> Callable[[int, Any], list[Any]]:
    """What each of so many ranks found under a name; a traceback fails the test.

    Args:
        worker: called with the rank, the folder and the number of ranks; it leaves a mapping in
            ``found_{world}_{rank}.pt`` there.
        folder: of all ranks; more of them go on where fewer stopped, and so begin later.
    """
    ranks: dict[int, list[dict[Any, Any]]] = {}

    def of(world: int, name: Any) -> list[Any]:
        for fewer in WORLDS[: WORLDS.index(world) + 1]:
            if fewer not in ranks:
                torch.multiprocessing.spawn(worker, args=(folder, fewer), nprocs=fewer)
                paths = [folder / f"found_{fewer}_{rank}.pt" for rank in range(fewer)]
                ranks[fewer] = [torch.load(path, weights_only=False) for path in paths]
        each = [rank[name] for rank in ranks[world]]
        for one in each:
            assert not isinstance(one, str), one
        return each

    return of
