"""Strategies with coefficients given by hand, so that a stream is tested apart from a family."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from dptrain.strategies.lower_triangular import LowerTriangular
from dptrain.strategies.toeplitz import Toeplitz, convolve


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Buffers(Toeplitz):
    """c_0 = 1, c_t = Σ_j ω_j θ_j^{t-1}; served by ``BLTStream``."""

    theta: tuple[float, ...]
    omega: tuple[float, ...]
    steps: int | None = None

    @property
    def bands(self):
        return self.steps

    def bind(self, steps):
        return dataclasses.replace(self, steps=steps)

    def first_column(self, steps):
        powers = np.array(self.theta)[:, None] ** np.arange(steps - 1)
        return np.concatenate([[1.0], np.array(self.omega) @ powers])

    def inverse_column(self, steps):
        c = self.first_column(steps)
        g = np.zeros(steps)
        g[0] = 1.0
        for t in range(1, steps):
            g[t] = -np.dot(c[1 : t + 1], g[:t][::-1])
        return g

    def solve(self, z):
        return convolve(self.inverse_column(len(z)), np.asarray(z))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Triangle(LowerTriangular):
    """A lower-triangular C whose entries all differ, some of them negative."""

    bands: int
    scale: float = 1.0
    steps: int | None = None

    def bind(self, steps):
        return dataclasses.replace(self, steps=steps)

    def diagonals(self, steps):
        return _diagonals(self.bands, self.scale, steps)


@functools.cache
def _diagonals(bands, scale, steps):
    k, j = np.mgrid[:bands, :steps]
    entries = 0.3 * np.cos(1.0 + k * 1.7 + j * 2.3) / (1 + k)
    entries[0] = scale * (1.0 + 0.5 * np.sin(np.arange(steps)))
    return np.where(k + j < steps, entries, 0.0)


# Names that do not begin with an underscore are registered, for JSON, among the families.
Buffers = _Buffers
Triangle = _Triangle
