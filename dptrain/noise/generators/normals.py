"""Where the rows of Z come from: named generators with random access."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from dptrain.noise.generators.gaussian import checked_seed, fill_normal
from dptrain.noise.generators.secure import SecureNormals


class Normals(Protocol):
    """Rows of i.i.d. standard normals, each a pure function of (seed, group, step, size).

    Attributes:
        name: the generator, on whatever device, as states name it.
        seed: whoever knows it can subtract the noise.
    """

    name: str
    seed: int

    def fill(
        self, out: torch.Tensor, *, group: int, step: int, start: int = 0, size: int | None = None
    ) -> None:
        """Overwrite ``out`` with entries ``start``, ``start`` + 1, … of row ``step`` of a group.

        Args:
            out: float32, one-dimensional and contiguous, on the CPU or a CUDA device.
            group: index of the buffer that the row belongs to; groups are independent.
            step: t ≥ 0.
            start: first entry; a slice equals the same entries of the whole row.
            size: length of the whole row; ``start + len(out)`` if ``None``.
        """

    def on(self, devices: Collection[str]) -> str:
        """The generator as the guarantee names it, of rows on these kinds of device."""


AES = "AES-256-CTR"
"""Name of the generator of the CPU, in statements."""

PHILOX = "Philox"
"""Name of the generator of CUDA devices, in statements."""


class FastNormals:
    """One float32 Box-Muller draw each, as ``fill_normal`` makes them."""

    name = f"{AES} by chunk ({PHILOX} on CUDA), one draw"

    def __init__(self, seed: int) -> None:
        self.seed = checked_seed(seed)

    def fill(
        self, out: torch.Tensor, *, group: int, step: int, start: int = 0, size: int | None = None
    ) -> None:
        """Standard normals of one row, as ``fill_normal`` draws them."""
        fill_normal(out, seed=self.seed, group=group, step=step, start=start, size=size)

    def on(self, devices: Collection[str]) -> str:
        """The generator on these kinds of device, for the guarantee."""
        if "cuda" not in devices:
            return f"{AES} by chunk, one draw"
        return self.name if "cpu" in devices else f"{PHILOX} by chunk on CUDA, one draw"


def open_normals(seed: int, *, secure: bool = False) -> Normals:
    """The generator for a seed.

    Args:
        seed: integer in [0, 2^128).
        secure: four float64 draws each (``dptrain.noise.generators.secure``), which defends the
            sampling against floating-point attacks, and a cipher on every device.

    Raises:
        ValueError: if the seed is not an integer in [0, 2^128).
    """
    if secure:
        return SecureNormals(seed)
    return FastNormals(seed)
