"""Noise as it was until releases were put on a grid: float32 normals, added in floating point.

Written from the definition, for attacks to succeed on. Nothing here imports the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

EDGE = math.sqrt(2 * 33 * math.log(2))
"""No normal of ``box_muller`` is larger: its radius word is 0 then, and u is 2^-33."""


def box_muller(radii: npt.NDArray[np.uint32], angles: npt.NDArray[np.uint32]) -> torch.Tensor:
    """Float32 normals from 32-bit words, two a pair: cosines, then sines."""
    u = torch.from_numpy(radii).float().mul_(2.0**-32).add_(2.0**-33)
    radius = u.log_().mul_(-2.0).sqrt_()
    turn = torch.from_numpy(angles.view(np.int32)).float().mul_(math.pi * 2.0**-31)
    return torch.cat([radius * turn.cos(), radius * turn.sin()])


def fast_normals(size: int, rng: np.random.Generator) -> torch.Tensor:
    """Float32, shape (size,): one draw a number."""
    words = rng.integers(0, 1 << 32, (2, -(-size // 2)), dtype=np.uint32)
    return box_muller(*words)[:size]


def secure_normals(size: int, rng: np.random.Generator) -> torch.Tensor:
    """Float32, shape (size,): half the sum of four float64 draws of 53 bits, rounded once."""
    bits = rng.integers(0, 1 << 53, (2, 4, size)).astype(np.float64) * 2.0**-53
    draws = np.sqrt(-2.0 * np.log(bits[0] + 2.0**-53)) * np.cos(2 * np.pi * bits[1])
    return torch.from_numpy((draws.sum(axis=0) / 2).astype(np.float32))


class FloatNoise:
    """y_t = (z_t - Σ_{l≥1} c_l y_{t-l}) / c_0 in float32, and S + σR·y_t in the dtype of S.

    Args:
        column: c, the first column of a banded Toeplitz strategy; (1,) for independent noise.
        seed: of the normals.
        secure: four draws a normal.
    """

    def __init__(self, column: Sequence[float], *, seed: int, secure: bool = False) -> None:
        self._column = [float(value) for value in column]
        self._rng = np.random.default_rng(seed)
        self._draw = secure_normals if secure else fast_normals
        self._past: list[list[torch.Tensor]] = []

    def release(self, sums: Sequence[torch.Tensor], deviation: float) -> list[torch.Tensor]:
        """Noisy sums, in place."""
        rows = []
        for index, total in enumerate(sums):
            row = self._draw(total.numel(), self._rng).view(total.shape)
            for factor, past in zip(self._column[1:], self._past, strict=False):
                row = row.add(past[index], alpha=-factor)
            rows.append(row.div(self._column[0]))
        self._past = [rows, *self._past][: len(self._column) - 1]
        return [
            total.add_(row.to(total.dtype), alpha=deviation)
            for total, row in zip(sums, rows, strict=True)
        ]
