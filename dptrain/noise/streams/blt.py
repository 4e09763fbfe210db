"""Noise for buffered linear Toeplitz strategies: a few decaying sums of the noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dptrain.noise.streams.flat import FlatStream
from dptrain.noise.streams.layout import Block
from dptrain.noise.streams.registry import register_noise_stream
from dptrain.noise.streams.rows import add_weighted_rows
from dptrain.strategies import BLT, Strategy


@register_noise_stream(BLT)
class BLTStream(FlatStream):
    """y_t = z_t - Σ_j ω_j s_j, then s_j ← θ_j s_j + y_t, for c_0 = 1, c_t = Σ_j ω_j θ_j^{t-1}.

    This is back-substitution with d rows of state (Dvijotham et al. 2024, Algorithm 1,
    arXiv 2404.16706; docs/theory/noise.md#thm-streams). In float32 a θ close to 1 would be off by
    up to 3·10^-8, the same at every step, which adds up; so the update is
    s_j ← s_j - (1 - θ_j) s_j + y_t, where 1 - θ_j is small and precise.
    """

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        bound = strategy.bind(options["steps"])
        assert isinstance(bound, BLT)
        assert bound.theta is not None
        assert bound.omega is not None
        leak, omega = 1.0 - np.array(bound.theta), np.array(bound.omega)
        self._buffers_per_row = len(leak)
        super().__init__(bound, **options)
        self._weights = {
            device: torch.tensor(-omega, dtype=torch.float32, device=device)
            for device in set(self._layout.devices)
        }
        self._leak = {
            device: torch.tensor(-leak[:, None], dtype=torch.float32, device=device)
            for device in set(self._layout.devices)
        }

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row.new_zeros(self._buffers_per_row, len(row), dtype=self._dtype)]

    def _correlate(self, block: Block, row: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        (buffer,) = buffers
        self._draw(block, row, self.step)
        add_weighted_rows(row, buffer, self._weights[row.device], scale=1.0)
        in_place = self._dtype is torch.float32 and self._history is None
        new = buffer if in_place else buffer.to(torch.float32, copy=True)
        # All buffers in two passes; one operation a buffer would take twice as long.
        torch.addcmul(new, new, self._leak[row.device], out=new).add_(row)
        if not in_place:
            for index, values in enumerate(new):
                self._store(block, values, buffer[index], index)
