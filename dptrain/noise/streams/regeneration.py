"""Noise without buffers: the normals of earlier steps are drawn again from the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dptrain.core import Array
from dptrain.noise.streams.flat import FlatStream
from dptrain.noise.streams.grid import error_of_convolution
from dptrain.noise.streams.layout import Block
from dptrain.noise.streams.rows import scratch
from dptrain.strategies import Strategy
from dptrain.strategies.matrices import LowerTriangular
from dptrain.strategies.toeplitz import Toeplitz


class RegenerationStream(FlatStream):
    """y_t = Σ_s (C^-1)_{t,s} z_s, every z_s with a non-zero coefficient drawn again: no state.

    Memory is a few blocks for each thread. A step draws as many rows as row t of
    C^-1 has non-zeros: ``inverse_bands`` where C^-1 is banded, t + 1 otherwise.
    """

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        steps = options["steps"]
        bound = strategy.bind(steps)
        self._heads: list[float] = []  # 1/C_{t,t}
        self._inverse = None
        if isinstance(bound, Toeplitz):
            self._inverse = np.trim_zeros(bound.inverse_column(steps)[:steps], "b")
        elif not isinstance(bound, LowerTriangular):
            raise ValueError(
                f"regenerate=True with strategy={type(bound).__name__}: noise can be generated "
                "again only for Toeplitz and lower-triangular strategies; leave regenerate out"
            )
        if options.get("dtype", torch.float32) is not torch.float32:
            raise ValueError(
                f"dtype={options['dtype']} with regenerate=True: noise that is generated again has "
                "no buffers, so leave one of the two out"
            )
        if options.get("folder") is not None:
            raise ValueError(
                f"folder={options['folder']!r} with regenerate=True: noise that is generated again "
                "has no buffers, so leave one of the two out"
            )
        super().__init__(bound, **options)

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        return []

    def _start_step(self) -> None:
        if self._inverse is not None:
            coefficients = self._inverse[: self.step + 1]
            heads = np.full(len(coefficients), self._inverse[0])
        else:
            assert isinstance(self.strategy, LowerTriangular)
            coefficients = _row_of_inverse(self.strategy, self.steps, self.step)[::-1]
            for t in range(len(self._heads), self.step + 1):
                self._heads.append(1.0 / float(self.strategy.row(self.steps, t)[-1]))
            heads = np.array(self._heads[self.step :: -1])
        # How many steps back, the scale of what was drawn then, and the factor of that; the latest
        # first, without those that are zero.
        self._terms = [
            (back, float(heads[back]), float(coefficients[back] / heads[back]))
            for back in np.flatnonzero(coefficients).tolist()
        ]

    def _correlate(self, block: Block, noise: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        z = scratch("drawn again", len(noise), noise.device)
        past = scratch("past", len(noise), noise.device).zero_()
        for back, scale, factor in self._terms[1:]:
            self._draw(block, z, self.step - back, scale=scale)
            past.add_(z.mul_(factor))
        self._draw(block, noise, self.step, scale=self._terms[0][1])
        noise.add_(past.round_())

    @property
    def rounding_error(self) -> float:
        """The bound of a stored convolution."""
        assert isinstance(self.strategy, (Toeplitz, LowerTriangular))
        return error_of_convolution(self.strategy, self.steps, self._bits)


def _row_of_inverse(strategy: LowerTriangular, steps: int, t: int) -> Array:
    """(C^-1)_{t,0}, …, (C^-1)_{t,t}: the w with w C = e_t, from the last column to the first."""
    rest = np.zeros(t + 1)
    rest[t] = 1.0
    w = np.zeros(t + 1)
    for k in range(t, -1, -1):
        if rest[k] == 0.0:
            continue
        row = strategy.row(steps, k)
        w[k] = rest[k] / row[-1]
        rest[k + 1 - len(row) : k + 1] -= w[k] * row
    return w
