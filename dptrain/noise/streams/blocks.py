"""How the flat rows of noise are cut into blocks, and which of them a shard owns."""

from __future__ import annotations

import dataclasses

from dptrain.core import checks
from dptrain.noise.generators.gaussian import chunk_length
from dptrain.noise.streams.layout import Layout

_ALIGNMENT = 64  # entries; a shard of a long row starts where a vector register would
_ALIGN_FROM = 1 << 12  # entries a rank


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
    """Which of ``world`` equal slices of all flat rows, one after the other, a stream owns.

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

    def blocks(self, layout: Layout) -> tuple[Block, ...]:
        """The blocks of this shard's slice, in order; they end where chunks of normals end."""
        low, high = self.bounds(sum(layout.sizes))
        blocks = []
        offset = 0
        for group, (size, device) in enumerate(zip(layout.sizes, layout.devices, strict=True)):
            first, last = max(low - offset, 0), min(high - offset, size)
            length = chunk_length(device)
            while first < last:
                stop = min((first // length + 1) * length, last)
                blocks.append(Block(group=group, start=first, stop=stop, size=size))
                first = stop
            offset += size
        return tuple(blocks)
