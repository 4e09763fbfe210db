"""A stream of correlated noise: row t of C^-1 Z for a list of parameter shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from dptrain.noise.generators.normals import Normals


class NoiseStream(ABC):
    """Draws the rows of C^-1 Z, one a step, with Z i.i.d. standard normal.

    All streams give C·noise = Z (docs/theory/noise.md#thm-streams;
    ``test_strategy_times_noise_is_z``), and what is released with their noise is as private as
    C x + σ z (docs/theory/mechanism.md#thm-factorization).

    The noise has unit variance per entry of Z: the caller scales it by σ·R, so a schedule of R
    stays right. Row t is a pure function of (seed, t, shapes). ``step`` is the index (from 0) of
    the row that the next call draws, and ``normals`` is what draws Z. Where C has more rows than
    columns (a tree), C^-1 stands for its left inverse.
    """

    steps: int
    step: int
    normals: Normals

    @abstractmethod
    def __next__(self) -> list[torch.Tensor]:
        """The next row, a tensor per parameter with its shape, dtype and device.

        The tensors are only valid until the next call; the caller may scale them in place.

        Raises:
            RuntimeError: after ``steps`` rows; more noise than was accounted for is refused.
        """

    @property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """Bytes of state that the stream keeps from step to step, once its buffers are full."""

    @property
    @abstractmethod
    def generator(self) -> str:
        """What draws Z on the devices of this stream, for the guarantee."""

    @property
    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """Why C·noise is not Z up to float32 rounding, for the guarantee; empty where it is."""

    @abstractmethod
    def shard(self, rank: int, world: int) -> NoiseStream:
        """A new stream for one of ``world`` equal slices of the flattened parameters.

        Its tensors are those entries of each flattened parameter that the slice holds
        (``shard_pieces``): one-dimensional and maybe empty, or of the parameter's shape where these
        are all of its entries. Put together, the tensors of all ranks are this stream's (up to the
        last bits: some processors round products by position). Memory and work are those of the
        slice. Every rank must use the same seed.

        Raises:
            ValueError: unless 0 ≤ rank < world.
            RuntimeError: if this stream has been used, or is a shard already.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Seed, position and buffers; whoever reads it can subtract the noise, so it is private."""

    @abstractmethod
    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue bit for bit from the state of a stream, or from those of all its shards.

        Raises:
            ValueError: if they were saved for other shapes, another strategy or another run length,
                or lack entries of this stream or shard.
        """
