"""Noise for buffered linear Toeplitz strategies: a few decaying sums of the noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.signal
import torch

from dptrain.noise.streams.flat import FlatStream
from dptrain.noise.streams.grid import error_of_sums
from dptrain.noise.streams.kernels import decay
from dptrain.noise.streams.layout import Block
from dptrain.noise.streams.registry import register_noise_stream
from dptrain.strategies import BLT, Strategy


@register_noise_stream(BLT)
class BLTStream(FlatStream):
    """y_t = z_t - Σ_j ω_j s_j, then s_j ← θ_j s_j + y_t, for c_0 = 1, c_t = Σ_j ω_j θ_j^{t-1}.

    This is back-substitution with d rows of state (Dvijotham et al. 2024, Algorithm 1,
    arXiv 2404.16706; docs/theory/noise.md#thm-streams), in float64: what is rounded off lasts.
    """

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        bound = strategy.bind(options["steps"])
        assert isinstance(bound, BLT)
        assert bound.theta is not None
        assert bound.omega is not None
        self._theta = bound.theta
        self._weights = [-omega for omega in bound.omega]
        super().__init__(bound, **options)

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row.new_zeros(len(self._theta), len(row), dtype=self._kept)]

    def _correlate(self, block: Block, noise: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        (buffer,) = buffers
        self._draw(block, noise, self.step)
        self._settle(noise, buffer, self._weights)
        in_place = self._kept is torch.float64 and self._history is None
        unit = 1.0 if self._kept is torch.float64 else 2.0**self.grid_bits
        for index, (kept, theta) in enumerate(zip(buffer, self._theta, strict=True)):
            if in_place:
                decay(kept, theta, noise)
            else:
                self._store(block, kept.double().mul_(unit * theta).add_(noise), kept, index)

    @property
    def rounding_error(self) -> float:
        """Half a unit, and what the sums are off by after a run of rounding them in float64."""
        assert isinstance(self.strategy, BLT)
        inverse = self.strategy.inverse_column(self.steps)
        total = 0.5 * 2.0**-self._bits
        for theta, weight in zip(self._theta, self._weights, strict=True):
            # s_t = Σ_k θ^k y_{t-1-k}: its standard deviation by its coefficients over z.
            decayed = scipy.signal.lfilter([1.0], [1.0, -theta], inverse)
            deviation = float(np.linalg.norm(decayed))
            remembered = min(float(self.steps), 1.0 / (1.0 - theta))
            lasting = remembered * error_of_sums(1, 1.0, deviation)
            total += abs(weight) * lasting + error_of_sums(len(self._theta), abs(weight), deviation)
        return total
