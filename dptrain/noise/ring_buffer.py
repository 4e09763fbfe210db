"""Noise for banded Toeplitz strategies: back-substitution over the last bands - 1 rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dptrain.noise.gaussian import checked_seed, fill_normal
from dptrain.noise.layout import Layout
from dptrain.noise.stream import NoiseStream
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz import BandedToeplitz, positive_int

_STATE_FIELDS = {"step", "seed", "strategy", "steps", "layout", "buffers"}


class RingBufferStream(NoiseStream):
    """y_t = (z_t - Σ_{j=1}^{bands-1} c_j y_{t-j}) / c_0, so that C y = z.

    Per device one float32 buffer of shape (bands - 1, D) over the D flattened parameters, which a
    step reads once (a matrix-vector product) and of which it overwrites the oldest row. With
    bands = 1 there is no buffer and a step costs what drawing z costs. The float32 tensors of
    ``next()`` are views of one row that the next call overwrites; the caller may scale them in
    place.

    Args:
        strategy: a banded Toeplitz strategy; bound to ``steps`` here if it is not yet.
        steps: n.
        like: tensors whose shapes, dtypes and devices the noise has.
        seed: integer in [0, 2^128).

    Raises:
        ValueError: if the strategy does not fit ``steps``, the seed is out of range, ``like`` is
            empty or holds a tensor that is not floating-point, or a device is neither CPU nor CUDA.
    """

    def __init__(
        self, strategy: Strategy, *, steps: int, like: Sequence[torch.Tensor], seed: int
    ) -> None:
        self.steps = positive_int("steps", steps)
        self.step = 0
        bound = strategy.bind(self.steps)
        assert isinstance(bound, BandedToeplitz)
        self._strategy_hash = bound.coefficient_hash
        self._seed = checked_seed(seed)
        self._layout = Layout.of(like)
        for device in self._layout.devices:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"like is on device {device}: noise is drawn on 'cpu' or 'cuda'")
        c = bound.first_column(self.steps)
        self._inverse_head = float(1.0 / c[0])
        # Lags depth, …, 1, depth, …, 1: every rotation that the ring needs is a slice of it.
        lags = torch.tensor(np.tile(-c[:0:-1] / c[0], 2), dtype=torch.float32)
        self._lags = [lags.to(device) for device in self._layout.devices]
        self._rows = [
            torch.empty(size, device=device, dtype=torch.float32)
            for size, device in zip(self._layout.sizes, self._layout.devices, strict=True)
        ]
        self._views = self._layout.views(self._rows)
        # Rows before the first step are zero, which is what back-substitution asks for.
        self._buffers = [row.new_zeros(len(c) - 1, len(row)) for row in self._rows]

    def __next__(self) -> list[torch.Tensor]:
        if self.step >= self.steps:
            raise RuntimeError(
                f"all {self.steps} rows of noise are spent: a longer run needs a mechanism "
                "(and a guarantee) for more steps"
            )
        for group, (row, buffer) in enumerate(zip(self._rows, self._buffers, strict=True)):
            fill_normal(row, seed=self._seed, group=group, step=self.step)
            if len(buffer):
                self._correlate(row, buffer, self._lags[group])
            elif self._inverse_head != 1.0:
                row.mul_(self._inverse_head)
        self.step += 1
        return [
            view if dtype is torch.float32 else view.to(dtype)
            for view, dtype in zip(self._views, self._layout.dtypes, strict=True)
        ]

    def _correlate(self, row: torch.Tensor, buffer: torch.Tensor, lags: torch.Tensor) -> None:
        depth = len(buffer)
        # Slot s holds the latest step with step % depth == s, a lag of 1 to depth.
        start = -self.step % depth
        row.addmv_(buffer.t(), lags[start : start + depth], beta=self._inverse_head)
        buffer[self.step % depth].copy_(row)

    def state_dict(self) -> dict[str, Any]:
        """Private: whoever reads it can subtract the noise.

        Holds only tensors, integers, strings and lists, so ``torch.load(weights_only=True)`` reads
        it (the seed is hexadecimal text: it does not fit 64 bits).
        """
        return {
            "step": self.step,
            "seed": f"{self._seed:032x}",
            "strategy": self._strategy_hash,
            "steps": self.steps,
            "layout": self._layout.describe(),
            "buffers": [buffer.clone() for buffer in self._buffers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit from ``state``, with its seed.

        Raises:
            ValueError: if it was saved for another strategy, another run length, or other shapes,
                dtypes or kinds of device; the stream is then left as it was.
        """
        if set(state) != _STATE_FIELDS:
            raise ValueError(
                f"not a noise state: it has {sorted(state)}, expected {sorted(_STATE_FIELDS)}"
            )
        here = {
            "steps": self.steps,
            "strategy": self._strategy_hash,
            **self._layout.describe(),
        }
        saved = {"steps": state["steps"], "strategy": state["strategy"], **state["layout"]}
        for name, value in here.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the noise state was saved for {name}={saved.get(name)}, this stream has "
                    f"{name}={value}: resume with the model and mechanism of the saved run"
                )
        buffers = list(state["buffers"])
        if [b.shape for b in buffers] != [b.shape for b in self._buffers]:
            raise ValueError("the buffers of the noise state do not have the shapes that it states")
        step = state["step"]
        if not 0 <= step <= self.steps:
            raise ValueError(f"the noise state is at step={step}, outside 0..{self.steps}")
        self._seed = checked_seed(int(state["seed"], 16))
        self.step = step
        for mine, theirs in zip(self._buffers, buffers, strict=True):
            mine.copy_(theirs)
