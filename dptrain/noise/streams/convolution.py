"""Noise as a weighted sum of normals, kept in a ring: for a banded C^-1, or any Toeplitz one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dptrain.noise.streams.flat import FlatStream
from dptrain.noise.streams.grid import error_of_convolution
from dptrain.noise.streams.layout import Block
from dptrain.noise.streams.registry import register_noise_stream
from dptrain.noise.streams.rows import scratch, weights_by_slot
from dptrain.strategies import Strategy
from dptrain.strategies.toeplitz import Toeplitz


@register_noise_stream(Toeplitz)
class ConvolutionStream(FlatStream):
    """y_t = Σ_{j=0}^{k-1} g_j z_{t-j} with g the first column of C^-1 and k its last non-zero.

    A block keeps the last k - 1 rows of Z, on their grid in float64, since C^-1 carries what would
    be rounded off to all later rows: ``inverse_bands`` - 1 rows where C^-1 is banded, up to
    n - 1 for another Toeplitz strategy. With bfloat16 buffers the error of C·noise is
    C·Σ_{j≥1} g_j e_{t-j}, with e_t = z̃_t - z_t the error of what is stored.
    """

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        steps = options["steps"]
        bound = strategy.bind(steps)
        assert isinstance(bound, Toeplitz)
        self._inverse = np.trim_zeros(bound.inverse_column(steps)[:steps], "b")
        self._steps_back = len(self._inverse) - 1
        super().__init__(bound, **options)

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row.new_zeros(self._steps_back, len(row), dtype=self._kept)]

    def _start_step(self) -> None:
        filled = min(self.step, self._steps_back)
        past = self._inverse[filled:0:-1] / self._inverse[0]
        self._weights = weights_by_slot(past, self.step, self._steps_back)

    def _correlate(self, block: Block, noise: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        (buffer,) = buffers
        self._draw(block, noise, self.step, scale=float(self._inverse[0]))
        z = scratch("z", len(noise), noise.device).copy_(noise)  # stored when the oldest was used
        self._settle(noise, buffer, self._weights)
        if self._steps_back:
            self._store(block, z, buffer[self.step % self._steps_back])

    @property
    def rounding_error(self) -> float:
        """A bound on C e, for the rounding e of each step's sum."""
        if not self._steps_back:
            return 0.0
        assert isinstance(self.strategy, Toeplitz)
        return error_of_convolution(self.strategy, self.steps, self._bits)
