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
        weights: float32, one a row that the model sees: 1, or 0 for the padding row.
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
        """Rows that the model sees: an empty batch is shown as one padding row of weight 0."""
        return max(1, len(self.indices))


def split(step: int, indices: Indices, max_physical_batch_size: int | None) -> list[MicroBatch]:
    """Cut a logical batch into the fewest microbatches, of sizes that differ by at most one."""
    parts = 1
    if max_physical_batch_size is not None:
        parts = max(1, -(-len(indices) // max_physical_batch_size))
    pieces = np.array_split(indices, parts)
    return [
        MicroBatch(
            step=step,
            part=part,
            parts=parts,
            indices=piece,
            weights=np.full(max(1, len(piece)), float(len(piece) > 0), dtype=np.float32),
        )
        for part, piece in enumerate(pieces)
    ]
