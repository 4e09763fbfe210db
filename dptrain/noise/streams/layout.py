"""The layout of a model's parameters in flat rows of noise, and how rows are cut and shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch

from dptrain.core import checks, exact_device
from dptrain.noise.generators import chunk_length

_ALIGNMENT = 64  # entries; a shard of a long row starts where a vector register would
_ALIGN_FROM = 1 << 12  # entries a rank


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes, dtypes and devices of the parameters, and their place in flat rows.

    A row holds all parameters whose noise is drawn on a device, or one parameter.

    Attributes:
        shapes: shape of each parameter.
        dtypes: dtype of each parameter; rows are float32 and cast on the way out.
        homes: the device of each parameter.
        devices: where each flat row is drawn and kept: the ``exact_device`` of its parameters.
        places: for each parameter, (index of its flat row, offset in that row).
        sizes: number of entries of each flat row.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    homes: tuple[torch.device, ...]
    devices: tuple[torch.device, ...]
    places: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, like: Sequence[torch.Tensor], *, per_parameter: bool = False) -> Layout:
        """The layout of noise for tensors like these."""
        like = list(like)
        if not like:
            raise ValueError("like is empty: there is no parameter to add noise to")
        devices: list[torch.device] = []
        sizes: list[int] = []
        places: list[tuple[int, int]] = []
        for index, tensor in enumerate(like):
            if not tensor.dtype.is_floating_point:
                raise ValueError(
                    f"like: tensor {index} has dtype {tensor.dtype}, but noise can be added to "
                    "floating-point tensors only"
                )
            device = exact_device(tensor.device)
            if per_parameter or device not in devices:
                devices.append(device)
                sizes.append(0)
            group = index if per_parameter else devices.index(device)
            places.append((group, sizes[group]))
            sizes[group] += tensor.numel()
        return cls(
            shapes=tuple(tensor.shape for tensor in like),
            dtypes=tuple(tensor.dtype for tensor in like),
            homes=tuple(tensor.device for tensor in like),
            devices=tuple(devices),
            places=tuple(places),
            sizes=tuple(sizes),
        )

    def describe(self) -> dict[str, list[object]]:
        """Everything that decides the values of a row, as plain JSON values.

        The index of a device does not: a run may go on on another one of the same kind, or of
        one for which noise is drawn there too.
        """
        return {
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": [str(dtype) for dtype in self.dtypes],
            "devices": [f"{self.devices[g].type} {g}" for g, _ in self.places],
        }


@dataclasses.dataclass(frozen=True)
class Block:
    """Entries ``start`` to ``stop`` of the flat row of a group, within one chunk of normals.

    What a step does to a block (draw, read the buffers, write back) stays in a core's cache.

    Attributes:
        group: index of the flat row.
        start: first entry.
        stop: one past the last entry.
        size: length of the whole row.
    """

    group: int
    start: int
    stop: int
    size: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of ``world`` equal slices of all flat rows, one after the other: the one a stream owns.

    Raises:
        TypeError: if one is no integer.
        ValueError: unless 0 ≤ rank < world.
    """

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", checks.integer("rank", self.rank, minimum=None))
        object.__setattr__(self, "world", checks.integer("world", self.world))
        if not 0 <= self.rank < self.world:
            raise ValueError(
                f"rank={self.rank}: must be between 0 and {self.world - 1} for world={self.world}"
            )

    def bounds(self, total: int) -> tuple[int, int]:
        """First entry and one past the last of ``total``: consecutive ranks leave no gap."""
        grain = _ALIGNMENT if total >= _ALIGN_FROM * self.world else 1

        def edge(rank: int) -> int:
            return total if rank == self.world else rank * total // self.world // grain * grain

        return edge(self.rank), edge(self.rank + 1)

    def ranges(self, layout: Layout) -> list[tuple[int, int]]:
        """First entry and one past the last of this shard's slice of each flat row."""
        low, high = self.bounds(sum(layout.sizes))
        ranges, offset = [], 0
        for size in layout.sizes:
            ranges.append(_overlap(low - offset, high - offset, size))
            offset += size
        return ranges

    def spans(self, layout: Layout) -> list[list[tuple[int, int]]]:
        """The runs of entries of each flat row that this shard owns, ascending: one, or none."""
        return [[span] if span[0] < span[1] else [] for span in self.ranges(layout)]

    def pieces(self, layout: Layout) -> list[tuple[int, int]]:
        """First entry and one past the last of this shard's piece of each flattened parameter."""
        ranges = self.ranges(layout)
        return [
            _overlap(ranges[group][0] - offset, ranges[group][1] - offset, shape.numel())
            for shape, (group, offset) in zip(layout.shapes, layout.places, strict=True)
        ]

    def blocks(self, layout: Layout) -> tuple[Block, ...]:
        """The blocks of this shard's slice, in order."""
        return blocks_of(self.spans(layout), layout)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The entries of each flattened parameter that a stream owns, where others have divided them.

    Attributes:
        each: for each parameter its first entry and one past the last.
    """

    each: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, pieces: Sequence[Sequence[int]], layout: Layout) -> Self:
        """The pieces, if they are some of such parameters."""
        each = tuple((int(low), int(high)) for low, high in pieces)
        sizes = [shape.numel() for shape in layout.shapes]
        if len(each) != len(sizes):
            raise ValueError(
                f"pieces: has {len(each)} entries for {len(sizes)} tensors, must have one per "
                "tensor"
            )
        for index, ((low, high), size) in enumerate(zip(each, sizes, strict=True)):
            if not 0 <= low <= high <= size:
                raise ValueError(
                    f"pieces[{index}]=({low}, {high}): must be within the {size} entries of the "
                    "flattened tensor"
                )
        return cls(each)

    def spans(self, layout: Layout) -> list[list[tuple[int, int]]]:
        """The runs of entries of each flat row that these pieces are, ascending."""
        found: list[list[tuple[int, int]]] = [[] for _ in layout.sizes]
        for (low, high), (group, offset) in zip(self.each, layout.places, strict=True):
            if low < high:
                found[group].append((offset + low, offset + high))
        return found

    def pieces(self, layout: Layout) -> list[tuple[int, int]]:
        """First entry and one past the last of the piece of each flattened parameter."""
        return list(self.each)


def blocks_of(spans: Sequence[Sequence[tuple[int, int]]], layout: Layout) -> tuple[Block, ...]:
    """The blocks of runs of entries, in order; they end where chunks of normals end."""
    blocks = []
    for group, runs in enumerate(spans):
        length = chunk_length(layout.devices[group])
        for first, last in runs:
            while first < last:
                stop = min((first // length + 1) * length, last)
                blocks.append(Block(group=group, start=first, stop=stop, size=layout.sizes[group]))
                first = stop
    return tuple(blocks)


def _overlap(low: int, high: int, size: int) -> tuple[int, int]:
    """The part of [low, high) within [0, size); (0, 0) where there is none."""
    first, last = max(low, 0), min(high, size)
    return (first, last) if first < last else (0, 0)


def shard_pieces(like: Sequence[torch.Tensor], *, rank: int, world: int) -> list[tuple[int, int]]:
    """The entries of each flattened tensor for which the shard of a stream draws noise.

    Args:
        like: the parameters, as ``noise_stream`` is given them (without ``per_parameter``).
        rank: of the shard, from 0.
        world: number of shards.

    Returns:
        For each tensor its first entry and one past the last; (0, 0) where there is none.
    """
    return Shard(rank=rank, world=world).pieces(Layout.of(like))
