"""Where the rows of Z come from: named generators with random access."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from dptrain.noise.generators.gaussian import checked_seed, chunk_length, fill_normal


class Normals(Protocol):
    """Rows of i.i.d. rounded standard normals, each a pure function of (seed, group, step, size).

    Attributes:
        name: the generator, on whatever device, as states name it.
        seed: whoever knows it can subtract the noise.
    """

    name: str
    seed: int

    def fill(
        self,
        out: torch.Tensor,
        *,
        group: int,
        step: int,
        start: int = 0,
        size: int | None = None,
        bits: int,
        scale: float = 1.0,
    ) -> None:
        """Overwrite ``out`` with entries ``start``, ``start`` + 1, … of row ``step`` of a group.

        Args:
            out: float64, one-dimensional and contiguous, on the CPU or a CUDA device; what it gets
                are integers.
            group: index of the buffer that the row belongs to; groups are independent.
            step: t ≥ 0.
            start: first entry; a slice equals the same entries of the whole row.
            size: length of the whole row; ``start + len(out)`` if ``None``.
            bits: of the grid: an entry is a normal times ``scale``·2^``bits``, rounded.
            scale: factor of the standard deviation.
        """

    def on(self, devices: Collection[str]) -> str:
        """The generator as the guarantee names it, of rows on these kinds of device."""


AES = "AES-256-CTR"
"""Name of the generator of the CPU, in statements."""

PHILOX = "Philox"
"""Name of the generator of CUDA devices, in statements."""

_LAW = "rounded normals with dither"


class FastNormals:
    """Rounded normals as ``fill_normal`` makes them."""

    name = f"{AES} by chunk ({PHILOX} on CUDA), {_LAW}"

    def __init__(self, seed: int) -> None:
        self.seed = checked_seed(seed)

    def fill(
        self,
        out: torch.Tensor,
        *,
        group: int,
        step: int,
        start: int = 0,
        size: int | None = None,
        bits: int,
        scale: float = 1.0,
    ) -> None:
        """Rounded normals of one row, as ``fill_normal`` draws them."""
        fill_normal(
            out,
            seed=self.seed,
            group=group,
            step=step,
            start=start,
            size=size,
            bits=bits,
            scale=scale,
        )

    def on(self, devices: Collection[str]) -> str:
        """The generator on these kinds of device, for the guarantee."""
        if "cuda" not in devices:
            return f"{AES} by chunk, {_LAW}"
        return self.name if "cpu" in devices else f"{PHILOX} by chunk on CUDA, {_LAW}"


class SecureNormals(FastNormals):
    """Rounded normals from cryptographic bits, whatever the device.

    The CPU's generator is cryptographic anyway; the one of CUDA, Philox, promises nothing to those
    who see some of its numbers. For a CUDA device the numbers are drawn on the CPU and copied:
    slower, and equal on every device.

    It is not constant-time: timing and other side channels stay. Checkpoints hold the seed. Which
    examples are in a batch is drawn elsewhere, by a generator that is not cryptographic.
    """

    name = f"{AES} by chunk on every device, {_LAW}"

    def fill(
        self,
        out: torch.Tensor,
        *,
        group: int,
        step: int,
        start: int = 0,
        size: int | None = None,
        bits: int,
        scale: float = 1.0,
    ) -> None:
        """The CPU's rounded normals of one row."""
        chunk_length(out.device)  # refuses other kinds of device
        host = out if out.device.type == "cpu" else torch.empty(len(out), dtype=torch.float64)
        super().fill(host, group=group, step=step, start=start, size=size, bits=bits, scale=scale)
        if host is not out:
            out.copy_(host)

    def on(self, devices: Collection[str]) -> str:
        """The generator, which is the same on every kind of device."""
        return self.name


def open_normals(seed: int, *, secure: bool = False) -> Normals:
    """The generator for a seed.

    Args:
        seed: integer in [0, 2^128).
        secure: cryptographic bits on every device.

    Raises:
        ValueError: if the seed is not an integer in [0, 2^128).
    """
    if secure:
        return SecureNormals(seed)
    return FastNormals(seed)
