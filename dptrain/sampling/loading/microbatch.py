"""A physical piece of a logical batch, with everything that has to stay together."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from dptrain.sampling.scheme import Indices


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatch:
    """Part ``part`` of ``parts`` of the batch of logical step ``step``.

    The batch travels with this record, also through worker processes, so rows, weights and "last
    of its step" cannot fall out of step with the data.

    Attributes:
        step: logical step, from 0.
        part: from 0.
        parts: at least 1, also for an empty batch.
        indices: int64 rows of the dataset, ascending; empty if nothing was drawn.
        weights: float32, one a row that the model sees: 1 for each of ``indices``, then 0 for the
            padding rows.
    """

    step: int
    part: int
    parts: int
    indices: Indices
    weights: npt.NDArray[np.float32]

    @property
    def last(self) -> bool:
        """Whether the logical step ends with this microbatch."""
        return self.part == self.parts - 1

    @property
    def rows(self) -> int:
        """Rows that the model sees, padding included; at least one, also for an empty batch."""
        return len(self.weights)


def parts_for(size: int, max_physical_batch_size: int | None, world_size: int = 1) -> int:
    """The fewest parts, on each of so many ranks, that a batch of ``size`` rows fits into."""
    if max_physical_batch_size is None:
        return 1
    most = -(-size // world_size)  # rows of the largest share
    return max(1, -(-most // max_physical_batch_size))


def split(
    step: int,
    indices: Indices,
    max_physical_batch_size: int | None,
    *,
    microbatches: int | None = None,
    physical_batch_size: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> list[MicroBatch]:
    """This rank's share of a logical batch, in microbatches of about equal sizes.

    Every rank gets the same number of parts, whatever its share, so that ranks stay in step. With
    ``physical_batch_size`` all parts of all steps have the same number of rows.

    Args:
        step: logical step.
        indices: the logical batch.
        max_physical_batch_size: most rows of a part; they are as few as that allows.
        microbatches: how many there are instead.
        physical_batch_size: rows that the logical batch is padded to, at least ``len(indices)``.
        rank, world_size: this process's share of the batch.
    """
    total = len(indices) if physical_batch_size is None else physical_batch_size
    assert len(indices) <= total
    most = -(-total // world_size)  # rows of the largest share
    share = np.array_split(indices, world_size)[rank]
    parts = microbatches or parts_for(total, max_physical_batch_size, world_size)
    constant = None if physical_batch_size is None else -(-most // parts)
    return [
        MicroBatch(
            step=step,
            part=part,
            parts=parts,
            indices=piece,
            weights=_weights(len(piece), constant or max(1, len(piece))),
        )
        for part, piece in enumerate(np.array_split(share, parts))
    ]


def _weights(used: int, rows: int) -> npt.NDArray[np.float32]:
    weights = np.zeros(rows, dtype=np.float32)
    weights[:used] = 1.0
    return weights
