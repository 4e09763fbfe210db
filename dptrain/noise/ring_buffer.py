"""Noise for banded Toeplitz strategies: back-substitution over the last bands - 1 rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dptrain.noise.flat import FlatStream
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz import BandedToeplitz


class RingBufferStream(FlatStream):
    """y_t = (z_t - Σ_{j=1}^{bands-1} c_j y_{t-j}) / c_0, so that C y = z.

    Per group one float32 buffer of shape (bands - 1, D) over the D flattened parameters, which a
    step reads once (a matrix-vector product) and of which it overwrites the oldest row. With
    bands = 1 there is no buffer and a step costs what drawing z costs.
    """

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        bound = strategy.bind(options["steps"])
        assert isinstance(bound, BandedToeplitz)
        c = bound.first_column(options["steps"])
        self._depth = len(c) - 1
        self._inverse_head = float(1.0 / c[0])
        # Lags depth, …, 1, depth, …, 1: every rotation that the ring needs is a slice of it.
        lags = torch.tensor(np.tile(-c[:0:-1] / c[0], 2), dtype=torch.float32)
        super().__init__(bound, **options)
        self._lags = [lags.to(device) for device in self._layout.devices]

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        # Rows before the first step are zero, which is what back-substitution asks for.
        return [row.new_zeros(self._depth, len(row))]

    def _correlate(self, group: int, row: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        self.normals.fill(row, group=group, step=self.step)
        if self._depth:
            (buffer,) = buffers
            # Slot s holds the latest step with step % depth == s, a lag of 1 to depth.
            start = -self.step % self._depth
            lags = self._lags[group][start : start + self._depth]
            row.addmv_(buffer.t(), lags, beta=self._inverse_head)
            buffer[self.step % self._depth].copy_(row)
        elif self._inverse_head != 1.0:
            row.mul_(self._inverse_head)
