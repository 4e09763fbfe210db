"""Noise for square strategies: back-substitution over the last bands - 1 rows of noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dptrain.core import Array
from dptrain.noise.streams.flat import FlatStream
from dptrain.noise.streams.grid import error_of_sums, largest_row_sum
from dptrain.noise.streams.layout import Block
from dptrain.noise.streams.registry import register_noise_stream
from dptrain.noise.streams.rows import weights_by_slot
from dptrain.strategies import Strategy
from dptrain.strategies.matrices import LowerTriangular
from dptrain.strategies.toeplitz import BandedToeplitz


@register_noise_stream(BandedToeplitz, LowerTriangular)
class RingBufferStream(FlatStream):
    """y_t = (z_t - Σ_{j=1}^{bands-1} C_{t,t-j} y_{t-j}) / C_{t,t}, so that C y = z.

    A block of the D flattened parameters has one buffer of shape (min(bands, n) - 1, entries),
    which a step reads once (a matrix-vector product), while the new row is in cache, and of which
    it overwrites the oldest row: (bands - 1)·D numbers in all. With bands = 1 there is no buffer
    and a step costs what drawing z costs. The coefficients may differ from row to row of C.
    """

    _exact = torch.int32

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        steps = options["steps"]
        bound = strategy.bind(steps)
        assert isinstance(bound, (BandedToeplitz, LowerTriangular))
        self._steps_back = min(bound.bands, steps) - 1
        self._toeplitz = None
        if isinstance(bound, BandedToeplitz):
            self._toeplitz = np.ascontiguousarray(bound.first_column(steps)[::-1])
            self._steps_back = len(self._toeplitz) - 1
        super().__init__(bound, **options)

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        # Rows before the first step are zero, which is what back-substitution asks for.
        return [row.new_zeros(self._steps_back, len(row), dtype=self._kept)]

    def _row_of_strategy(self) -> Array:
        """C_{t, max(0, t-bands+1)}, …, C_{t,t} for t = ``self.step``."""
        if self._toeplitz is not None:
            return self._toeplitz[-1 - min(self.step, self._steps_back) :]
        assert isinstance(self.strategy, LowerTriangular)
        return self.strategy.row(self.steps, self.step)

    def _start_step(self) -> None:
        coefficients = self._row_of_strategy()
        self._inverse_head = float(1.0 / coefficients[-1])
        past = coefficients[:-1] / -coefficients[-1]
        self._weights = weights_by_slot(past, self.step, self._steps_back)

    def _correlate(self, block: Block, noise: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        (buffer,) = buffers
        self._draw(block, noise, self.step, scale=self._inverse_head)
        self._settle(noise, buffer, self._weights)
        if self._steps_back:
            self._store(block, noise, buffer[self.step % self._steps_back])

    @property
    def rounding_error(self) -> float:
        """Half a unit of the finer grid, and what adding up the bands in float64 is off by."""
        if not self._steps_back:
            return 0.0
        assert isinstance(self.strategy, (BandedToeplitz, LowerTriangular))
        # Over the standard deviation of what is drawn, 1/C_{t,t}.
        largest = largest_row_sum(self.strategy, self.steps)
        return largest * 0.5 * 2.0**-self._bits + error_of_sums(
            self._steps_back, largest, self._largest_deviation()
        )
