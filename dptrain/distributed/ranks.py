"""The processes (ranks) that make one private run together."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dptrain.clipping.base import summing_dtype
from dptrain.core import checks, digest, named_error
from dptrain.distributed.pieces import Pieces, collect_pieces, reduce_pieces
from dptrain.distributed.transport import buckets, device_for, everywhere, reported, travel

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FAILED = "an error"
_PLACES = (
    _FAILED,
    "make_private",
    "a value of rank 0",
    "a backward pass or step",
    "the end of a step",
    "a sum",
    "the release of a step",
    "the exchange of pieces",
    "a checkpoint",
    "a look at the module",
)
_SLOTS = 8  # integers of the message that begins every exchange

REMEDY = (
    "every rank must build the same run, load the same checkpoint, and take the same batches and "
    "calls of optimizer.step(); resume from the last checkpoint on all ranks"
)


class Grid(NamedTuple):
    """Ranks in rows, each of which has all of a model, so that those of a column have the same.

    Attributes:
        shards: how many ranks a row has; rank r is in row r // shards and column r % shards.
        row: torch's process group of this rank's row.
        column: that of its column.
    """

    shards: int
    row: Any
    column: Any


class Ranks:
    """This process's place among those of one private run; ``Ranks()`` is alone and only computes.

    Every exchange begins with a message of fixed size that says where the rank is in its program.
    So ranks that are out of step find out, all of them and before any data are mixed up: a share
    of step t that was added to step t + 1 would break the sampling that is accounted for.

    **A rank that fails.** Nothing is released unless all ranks arrive at the release of the same
    step: their clipped sums are added up first, then each adds the noise, all of it or that of its
    own entries, and no model is updated before the step is in the ledger. An error while the run
    is made, or while a step is recorded, ends all ranks with that error. A rank that dies
    or leaves the loop elsewhere leaves the others waiting at the next exchange, until the launcher
    ends them (torchrun does) or the time limit of ``init_process_group(timeout=...)`` is over; that
    step is then not released by anyone, and the run goes on from its last checkpoint.

    Args:
        rank: of this process, from 0.
        world_size: how many there are; above 1 they talk through torch's default process group.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    @classmethod
    def of(cls, distributed: bool | None) -> Ranks:
        """Ranks of torch's process group, if there is one with several ranks and it is wanted.

        Raises:
            TypeError: if ``distributed`` is neither a truth value nor ``None``.
            ValueError: if it is ``True`` and there is no such group.
        """
        if distributed is not None:
            checks.flag("distributed", distributed)
        there = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if distributed and not there:
            raise ValueError(
                "distributed=True needs a process group of several ranks: call "
                "torch.distributed.init_process_group() before make_private, for instance under "
                "torchrun, or leave distributed out"
            )
        if there and distributed is not False:
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def log(self, distributed: bool | None) -> None:
        """Say what was chosen where the user left it open, and what a restart will meet."""
        lives = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        if lives and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and self.rank == 0:
            logger.warning(
                "torchrun --max-restarts keeps the addresses of processes that have ended "
                "(pytorch/pytorch#135712), so restarted ranks may not find each other. Start it "
                "with --standalone or --rdzv-backend=c10d, and "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
            )
        if distributed is not None:
            return
        if self.world_size > 1 and self.rank == 0:
            logger.warning(
                "one private run over %d ranks: each logical batch is divided among them "
                "(distributed=False gives each rank a run of its own)",
                self.world_size,
            )
        started = os.environ.get("WORLD_SIZE", "1")
        if self.world_size == 1 and started not in ("", "1"):
            logger.warning(
                "WORLD_SIZE=%s, but torch.distributed has no process group of several ranks, so "
                "this process makes a run of its own. Call torch.distributed.init_process_group() "
                "before make_private to make one run over all",
                started,
            )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context in which an error on one rank ends all of them, at the exchange that follows."""
        try:
            yield
        except Exception as error:
            if self.world_size > 1 and not getattr(error, "everywhere", False):
                logger.error("rank %d: %s; telling the others", self.rank, named_error(error))
                with contextlib.suppress(Exception):  # the error that counts is this rank's
                    self._meet(_FAILED)
                    self._all(named_error(error))
            raise

    def agree(
        self,
        place: str,
        facts: Callable[[], Mapping[str, Any]],
        *numbers: int,
        secret: Iterable[str] = (),
        error: type[Exception] = RuntimeError,
    ) -> list[tuple[int, ...]]:
        """Refuse ranks that differ in any of the facts; a single rank does not look at them.

        Args:
            place: where in its program the rank is; one of those known to this file.
            facts: returns values by name, compared by their ``repr``.
            numbers: up to five integers that may differ.
            secret: names of facts that no message shows.
            error: what is raised.

        Returns:
            Everybody's ``numbers``.

        Raises:
            RuntimeError: or ``error``, on every rank, naming what differs.
        """
        if self.world_size == 1:
            return [numbers]
        mine = {name: repr(value) for name, value in facts().items()}
        rows = self._meet(place, int(digest(mine)[:15], 16), *numbers)
        if len({row[0] for row in rows}) > 1:
            hidden = set(secret)
            shown = {
                name: digest(value)[:12] if name in hidden else value
                for name, value in mine.items()
            }
            found: list[dict[str, str]] = self._all(shown)
            names = sorted({name for one in found for name in one})
            differ = [name for name in names if len({one.get(name) for one in found}) > 1]
            told = "; ".join(
                name
                if name in hidden
                else f"{name}: "
                + ", ".join(f"{one.get(name)} on {r}" for r, one in enumerate(found))
                for name in differ
            )
            raise everywhere(error(f"the ranks of this run differ ({told}): {REMEDY}"))
        return [row[1 : 1 + len(numbers)] for row in rows]

    def from_first(self, work: Callable[[], T]) -> T:
        """The value that ``work`` returns on rank 0, which alone calls it; it must be picklable."""
        if self.world_size == 1:
            return work()
        box: list[Any] = [work() if self.rank == 0 else None]
        self._meet("a value of rank 0")
        with reported():
            dist.broadcast_object_list(box, src=0)
        value: T = box[0]
        return value

    def any(self, place: str, own: bool) -> bool:
        """True if ``own`` is true on at least one rank.

        Args:
            place: where in its program the rank is; one of those known to this file.
            own: whether it is so here.
        """
        if self.world_size == 1:
            return own
        return any(row[0] for row in self._meet(place, int(own)))

    def gather(
        self, columns: npt.NDArray[np.float64], *facts: int
    ) -> tuple[npt.NDArray[np.float64], slice]:
        """The columns of all ranks side by side, in the order of ranks, and where one's own are.

        Args:
            columns: shape (k, m); m may differ between ranks.
            facts: integers that have to be equal on all ranks, for instance a step.

        Raises:
            RuntimeError: on every rank, if they are not.
        """
        kinds, own = columns.shape
        if self.world_size == 1:
            return columns, slice(0, own)
        rows = self._meet("a backward pass or step", own, *facts)
        if len({row[1:] for row in rows}) > 1:
            told = ", ".join(f"rank {r} at {row[1 : 1 + len(facts)]}" for r, row in enumerate(rows))
            raise everywhere(RuntimeError(f"ranks are out of step ({told}): {REMEDY}"))
        lengths = [row[0] for row in rows]
        padded = torch.zeros((kinds, max(lengths)), dtype=torch.float64)
        padded[:, :own] = torch.from_numpy(columns)
        parts = [
            part.view(kinds, -1)[:, :length].numpy()
            for part, length in zip(self._gathered(padded.flatten()), lengths, strict=True)
        ]
        start = sum(lengths[: self.rank])
        return np.concatenate(parts, axis=1), slice(start, start + own)

    def sum(
        self, tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The sums over the ranks, in place where this rank has a tensor; ``None`` counts 0.

        Args:
            tensors: one for each of ``like``, or ``None`` where this rank has nothing to add.
            like: the parameters that they are sums for.
        """
        if self.world_size == 1:
            return list(tensors)
        self._meet("a sum", len(tensors))
        whole = [
            torch.zeros_like(model, dtype=summing_dtype(model)) if tensor is None else tensor
            for tensor, model in zip(tensors, like, strict=True)
        ]
        for bucket in buckets(whole):
            travel(bucket, dist.all_reduce)
        return list(whole)

    def scatter_sums(
        self,
        tensors: Sequence[torch.Tensor | None],
        like: Sequence[torch.Tensor],
        pieces: Pieces,
        grid: Grid | None = None,
    ) -> list[torch.Tensor]:
        """The sums over the ranks of this rank's pieces; ``None`` counts 0.

        Half of the traffic of ``sum``: the other half is that of ``gather_pieces``. In a grid the
        sums of each row are scattered in it, and those of a column are added up, to the same bits
        on all of its ranks.

        Args:
            tensors: one for each of ``like``, or ``None`` where this rank has nothing to add.
            like: the parameters that they are sums for.
            pieces: of all ranks, the first and one past the last entry of each flattened tensor.
            grid: of the ranks, where those of a column have the same pieces.

        Returns:
            New tensors of the dtype of sums: of the shape of ``like`` where the piece is all of it,
            one-dimensional otherwise.
        """
        self._meet("a sum", len(tensors))
        if grid is None:
            return reduce_pieces(tensors, like, pieces, rank=self.rank)
        row, place = pieces[: grid.shards], self.rank % grid.shards
        own = reduce_pieces(tensors, like, row, rank=place, group=grid.row)
        for bucket in buckets(own):
            travel(bucket, functools.partial(dist.all_reduce, group=grid.column))
        return own

    def gather_pieces(
        self, own: Sequence[torch.Tensor], into: Sequence[torch.Tensor], pieces: Pieces
    ) -> None:
        """Overwrite tensors with the pieces that each rank has of them.

        Args:
            own: this rank's pieces, of the dtypes of ``into``.
            into: the whole tensors.
            pieces: of all ranks, the first and one past the last entry of each flattened tensor.
        """
        self._meet("the exchange of pieces", len(own))
        collect_pieces(own, into, pieces, rank=self.rank)

    def shares(self, mine: T) -> list[T]:
        """Everybody's value, which can be pickled; one after the other, as they may be large."""
        if self.world_size == 1:
            return [mine]
        self._meet("a checkpoint")
        found: list[T] = []
        for source in range(self.world_size):
            box: list[Any] = [mine if source == self.rank else None]
            with reported():
                dist.broadcast_object_list(box, src=source)
            found.append(mine if source == self.rank else box[0])
        return found

    def copy_from_first(self, tensors: Iterable[torch.Tensor], grid: Grid | None = None) -> None:
        """Overwrite tensors with those of rank 0, or, in a grid, of the first rank of the column.

        Their shapes are the same on all of these ranks.
        """
        if self.world_size == 1:
            return
        self._meet("a value of rank 0")
        column = {} if grid is None else {"group": grid.column}
        source = 0 if grid is None else self.rank % grid.shards
        for bucket in buckets([tensor.detach() for tensor in tensors]):
            # Bytes: not every backend knows every dtype.
            travel(
                bucket, lambda flat: dist.broadcast(flat.view(torch.uint8), src=source, **column)
            )

    def _meet(self, place: str, *numbers: int) -> list[tuple[int, ...]]:
        """Everybody's numbers, all slots; refuses ranks that are at other places."""
        row = torch.zeros(_SLOTS, dtype=torch.int64)
        row[: 1 + len(numbers)] = torch.tensor([_PLACES.index(place), *numbers])
        rows = [tuple(found.tolist()) for found in self._gathered(row)]
        places = [_PLACES[found[0]] for found in rows]
        if _FAILED in places and place != _FAILED:
            failed = "; ".join(f"rank {r}: {text}" for r, text in enumerate(self._all("")) if text)
            raise everywhere(RuntimeError(f"this rank stops because other ranks failed ({failed})"))
        if place != _FAILED and len(set(places)) > 1:
            told = ", ".join(f"rank {r} is at {name}" for r, name in enumerate(places))
            raise everywhere(RuntimeError(f"the ranks are out of step ({told}): {REMEDY}"))
        return [found[1:] for found in rows]

    def _gathered(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's vector, of one length and dtype, on the CPU."""
        mine = flat.to(device_for(flat.device))
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        with reported():
            dist.all_gather(found, mine)
        return [tensor.cpu() for tensor in found]

    def _all(self, value: T) -> list[T]:
        """Everybody's value."""
        values: list[Any] = [None] * self.world_size
        with reported():
            dist.all_gather_object(values, value)
        return values
