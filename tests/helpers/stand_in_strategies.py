"""A strategy with coefficients given by hand, so that a stream is tested apart from a family."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from dptrain.strategies.matrices.lower_triangular import LowerTriangular


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


# Classes that do not begin with an underscore are registered, for JSON, among the families.
Triangle = _Triangle
