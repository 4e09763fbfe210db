"""The processes that make one certificate together, and how errors on one end all of them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = datetime.timedelta(days=30)  # the others wait while one estimates or is slow


class Group:
    """All processes that torchrun started, or this one alone.

    Attributes:
        rank: of this process.
        size: number of processes.
        size_here: of them on this machine.
    """

    def __init__(self, rank: int, size: int, size_here: int) -> None:
        self.rank, self.size, self.size_here = rank, size, size_here

    @classmethod
    def of_environment(cls) -> Self:
        """As torchrun's variables say (RANK, WORLD_SIZE, LOCAL_WORLD_SIZE)."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
        return cls(int(os.environ.get("RANK", "0")), size, here)

    def __enter__(self) -> Self:
        if self.size > 1:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def from_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on the first process, on all of them.

        Raises:
            ValueError: on all of them, if it fails there.
        """
        if self.size == 1:
            return work()
        box: list[Any] = [None]
        if self.rank == 0:
            box[0] = _attempt(work)
        dist.broadcast_object_list(box, src=0)
        result: T = _opened(box)[0]
        return result

    def to_first(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returns on every process, on the first; the others get an empty list.

        Raises:
            ValueError: on all of them, if it fails anywhere.
        """
        if self.size == 1:
            return [work()]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, _attempt(work))
        results: list[T] = _opened(boxes)
        return results if self.rank == 0 else []

    def all(self, value: T) -> list[T]:
        """Everybody's value, on all of them."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return work(), None
    except (ValueError, OSError, ArithmeticError, ModuleNotFoundError) as error:
        return None, str(error)


def _opened(boxes: list[Any]) -> list[Any]:
    failed = [(rank, error) for rank, (_, error) in enumerate(boxes) if error is not None]
    if failed:
        raise ValueError("; ".join(f"process {rank}: {error}" for rank, error in failed))
    return [value for value, _ in boxes]
