"""A noise stream for ``Fading``: one row of memory."""

from __future__ import annotations

from typing import Any

import torch
from stranger_dp.fading import Fading

from dptrain import register_noise_stream
from dptrain.noise import Block, FlatStream


@register_noise_stream(Fading)
class FadingStream(FlatStream):
    """y_t = z_t - r z_{t-1}, with z_{t-1} kept from the step before."""

    def __init__(self, strategy: Fading, **options: Any) -> None:
        self._ratio = strategy.ratio
        super().__init__(strategy, **options)

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row.new_zeros(1, len(row), dtype=self._kept)]

    def _correlate(self, block: Block, noise: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        (kept,) = buffers
        self._draw(block, noise, self.step)
        z = noise.clone()
        self._settle(noise, kept, [-self._ratio])
        self._store(block, z, kept[0])
