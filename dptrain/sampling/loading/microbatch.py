"""A physical piece of a logical batch, with everything that has to stay together."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling.scheme import Indices


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatch:
    """Part ``part`` of ``parts`` of the batch of logical step ``step``.

    The batch travels with this record, also through worker processes, so rows, weights and "last
    of its step" cannot fall out of step with the data. Its text does not show what was drawn.

    Attributes:
        step: logical step, from 0.
        part: from 0.
        parts: at least 1, also for an empty batch.
        indices: int64 rows of the dataset, ascending, or unit by unit; empty if nothing was drawn.
        weights: float32, one for each record, which is what is clipped as one: 1 for those of
            ``indices``, then 0 for the padding.
        sizes: int64, the rows of each record, which follow one another; a record of padding has
            one row. ``None``: every record is one row.
    """

    step: int
    part: int
    parts: int
    indices: Indices = dataclasses.field(repr=False)
    weights: npt.NDArray[np.float32] = dataclasses.field(repr=False)
    sizes: Indices | None = dataclasses.field(default=None, repr=False)

    @property
    def last(self) -> bool:
        """True if the logical step ends with this microbatch."""
        return self.part == self.parts - 1

    @functools.cached_property
    def rows(self) -> int:
        """Rows that the model sees, padding included; at least one, also for an empty batch."""
        return len(self.weights) if self.sizes is None else int(self.sizes.sum())


def parts_for(
    units: int, max_physical_batch_size: int | None, world_size: int = 1, *, group_size: int = 1
) -> int:
    """The fewest parts, on each rank, of ``units`` units with room for ``group_size`` rows each."""
    if max_physical_batch_size is None:
        return 1
    most = -(-units // world_size)  # units of the largest share
    return max(1, -(-most // (max_physical_batch_size // group_size)))


def split(
    step: int,
    rows: Indices,
    max_physical_batch_size: int | None,
    *,
    sizes: Indices | None = None,
    group_size: int = 1,
    microbatches: int | None = None,
    physical_units: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> list[MicroBatch]:
    """This rank's share of a logical batch in microbatches, of which none cuts a unit.

    The gradients of a unit of several rows are averaged before they are clipped, so its rows have
    to be in one part. Every rank gets the same number of parts, whatever its share, so that ranks
    stay in step. With ``physical_units`` all parts of all steps have the same number of rows, of
    which padding has its own records.

    Args:
        rows: the logical batch, unit by unit.
        max_physical_batch_size: most rows of a part, at least ``group_size``; parts are as few as
            that allows.
        sizes: rows of each unit, at least 1 and at most ``group_size``; ``None``: one row each,
            and parts of about equal sizes.
        group_size: most rows of a unit.
        microbatches: how many parts there are instead.
        physical_units: units that there is room for, at least as many as there are.
        rank, world_size: this process's share of the batch.
    """
    units = len(rows) if sizes is None else len(sizes)
    room = units if physical_units is None else physical_units
    checks.invariant(units <= room, "the batch has more rows than it is padded to")
    shares = np.array_split(np.arange(units), world_size)
    limit = None if microbatches else max_physical_batch_size
    if limit is not None and sizes is not None and physical_units is None:
        fitted = [_fitted(share, sizes, limit) for share in shares]
        pieces = fitted[rank] + [shares[rank][:0]] * (max(map(len, fitted)) - len(fitted[rank]))
    else:
        parts = microbatches or parts_for(room, limit, world_size, group_size=group_size)
        pieces = np.array_split(shares[rank], parts)
    constant = None
    if physical_units is not None:
        most = -(-room // world_size)  # units of the largest share
        constant = -(-most // len(pieces)) * group_size
    ends = np.arange(units + 1) if sizes is None else np.append(0, np.cumsum(sizes))
    found = []
    for part, piece in enumerate(pieces):
        first, stop = (int(piece[0]), int(piece[-1]) + 1) if len(piece) else (0, 0)
        own = rows[ends[first] : ends[stop]]
        padding = (constant or max(1, len(own))) - len(own)
        padded = None
        if sizes is not None:
            padded = np.append(sizes[first:stop], np.ones(padding, dtype=np.int64))
        found.append(
            MicroBatch(
                step=step,
                part=part,
                parts=len(pieces),
                indices=own,
                weights=_weights(len(piece), len(piece) + padding),
                sizes=padded,
            )
        )
    return found


def _fitted(share: Indices, sizes: Indices, most: int) -> list[Indices]:
    """Consecutive units of at most ``most`` rows, as many as fit each time; at least one piece."""
    cuts, held = [], 0
    for place, size in enumerate(sizes[share].tolist()):
        if held + size > most:
            cuts.append(place)
            held = 0
        held += size
    return np.split(share, cuts)


def _weights(used: int, rows: int) -> npt.NDArray[np.float32]:
    weights = np.zeros(rows, dtype=np.float32)
    weights[:used] = 1.0
    return weights
