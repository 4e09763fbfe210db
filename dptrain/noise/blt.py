"""Noise for buffered linear Toeplitz strategies: a few decaying sums of the noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dptrain.noise.blocks import Block
from dptrain.noise.flat import FlatStream
from dptrain.noise.weighted_sum import add_weighted_rows
from dptrain.strategies.blt import BLT
from dptrain.strategies.strategy import Strategy

_IN_CACHE = 1 << 15  # entries of a row at a time: with a few buffers they fit a core's cache


class BLTStream(FlatStream):
    """y_t = z_t - Σ_j ω_j s_j, then s_j ← θ_j s_j + y_t, for c_0 = 1, c_t = Σ_j ω_j θ_j^{t-1}.

    Hence s_j = Σ_{k<t} θ_j^{t-1-k} y_k before step t, and Σ_j ω_j s_j = Σ_{k<t} c_{t-k} y_k: this
    is back-substitution (Dvijotham et al. 2024, Algorithm 1) with d rows of state. In float32 a θ
    close to 1 would be off by up to 3·10^-8, the same at every step, which adds up; so the update
    is s_j ← s_j + (y_t - (1 - θ_j) s_j), where 1 - θ_j is small and precise. With bfloat16 buffers
    every s_j is rounded as it is stored, and the error of row t of C·noise is
    Σ_j ω_j Σ_{k<t} θ_j^{t-1-k} e_{j,k}, with |e_{j,k}| ≤ 2^-7 |s_j| after step k.
    """

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        bound = strategy.bind(options["steps"])
        assert isinstance(bound, BLT)
        assert bound.theta is not None
        assert bound.omega is not None
        self._leak = [1.0 - theta for theta in bound.theta]
        omega = np.array(bound.omega)
        super().__init__(bound, **options)
        self._weights = {
            device: torch.tensor(-omega, dtype=torch.float32, device=device)
            for device in set(self._layout.devices)
        }

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row.new_zeros(len(self._leak), len(row), dtype=self._dtype)]

    def _correlate(self, block: Block, row: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        (buffer,) = buffers
        self._draw(block, row, self.step)
        weights = self._weights[row.device]
        if self._dtype is not torch.float32:
            add_weighted_rows(row, buffer, weights, scale=1.0)
            for index, leak in enumerate(self._leak):
                new = buffer[index].float()
                new.add_(torch.add(row, new, alpha=-leak))
                self._store(block, new, buffer[index], index)
            return
        width = _IN_CACHE if row.device.type == "cpu" else max(1, len(row))
        gain = torch.empty(min(width, len(row)), device=row.device)
        for start in range(0, len(row), width):
            y, sums = row[start : start + width], buffer[:, start : start + width]
            add_weighted_rows(y, sums, weights, scale=1.0)
            for s, leak in zip(sums, self._leak, strict=True):
                s.add_(torch.add(y, s, alpha=-leak, out=gain[: len(y)]))
