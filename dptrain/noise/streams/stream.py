"""A stream of correlated noise: row t of C^-1 Z for a list of parameter shapes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from dptrain.noise.generators.normals import Normals


class NoiseStream(ABC):
    """Draws the rows of C^-1 Z, one a step, with Z i.i.d. standard normal, on a public grid.

    All streams give C·noise = Z up to the grid (docs/theory/noise.md#thm-streams;
    ``test_strategy_times_noise_is_z``), and what ``release`` returns is as private as
    C x + σ z up to what docs/theory/noise.md#thm-release counts.

    The noise has unit variance per entry of Z, and is a whole number of 2^-``grid_bits``:
    ``release`` scales grid and noise by σ·R, so a schedule of R stays right. Row t is a pure
    function of (seed, t, shapes). ``step`` is the index (from 0) of
    the row that the next call draws, and ``normals`` is what draws Z. Where C has more rows than
    columns (a tree), C^-1 stands for its left inverse.

    Attributes:
        steps: n.
        step: index of the next row.
        grid_bits: j, where the noise is in units of 2^-j.
        normals: what draws Z.
    """

    steps: int
    step: int
    grid_bits: int
    normals: Normals

    @abstractmethod
    def release(self, sums: Sequence[torch.Tensor | None], deviation: float) -> list[torch.Tensor]:
        """Sums on the grid, with the next row of noise: what may leave the machine.

        With h = ``deviation``·2^-``grid_bits`` it is h·(⌊sum/h⌉ + noise), a whole number times h
        that is rounded to the dtype of the sum: post-processing of the whole number
        (docs/theory/noise.md#thm-release). Noise that is added to a sum in floating point instead
        tells what the sum was (docs/guides/floating-point.md).

        Args:
            sums: clipped sums, a tensor per parameter with its shape and device, overwritten;
                ``None`` for a parameter that has none.
            deviation: σ·R; 0 for no noise.

        Returns:
            The noisy sums, in the dtypes of the sums.

        Raises:
            RuntimeError: after ``steps`` rows; more noise than was accounted for is refused.
            ValueError: if there is not a sum for each parameter.
        """

    @abstractmethod
    def __next__(self) -> list[torch.Tensor]:
        """The next row in units of 2^-``grid_bits``, an int64 tensor per parameter with its shape.

        To look at; ``release`` is what adds it to sums.

        Raises:
            RuntimeError: after ``steps`` rows; more noise than was accounted for is refused.
        """

    @property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """Bytes of state that the stream keeps from step to step, once its buffers are full."""

    @property
    def rounding_error(self) -> float | None:
        """An upper bound on the rounding error of a number of Z, in standard deviations.

        The noise is ⌊z_t + u_t⌉ for a u_t that is computed of earlier rows, and the bound is on
        what u_t is off from -Σ_{l≥1} C_{t,t-l} y_{t-l}, y the noise itself, in units of z_t's
        standard deviation (docs/theory/noise.md#thm-release). ``None``, as here, where it is not
        known, which the guarantee of a run tells.
        """
        return None

    @property
    @abstractmethod
    def generator(self) -> str:
        """The name of what draws Z on the devices of this stream, for the guarantee."""

    @property
    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """The reason why C·noise is not Z up to the grid, for the guarantee; empty where it is."""

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


def grid_of(deviation: float, grid_bits: int) -> float:
    """h = ``deviation``·2^-``grid_bits``; 0 for a run without noise and without privacy."""
    if deviation == 0.0:
        return 0.0
    grid = math.ldexp(deviation, -grid_bits)
    if not 0 < grid < math.inf or math.isinf(1.0 / grid):  # NaN is neither
        raise ValueError(f"deviation={deviation}: must be positive, and neither tiny nor infinite")
    return grid
