"""What the streams over flat rows share: normals, position, state and refusals."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from dptrain.noise.layout import Layout
from dptrain.noise.normals import open_normals
from dptrain.noise.stream import NoiseStream
from dptrain.strategies.patterns import positive_int
from dptrain.strategies.strategy import Strategy

_STATE_FIELDS = {"step", "seed", "strategy", "steps", "layout", "buffers"}


class FlatStream(NoiseStream):
    """A stream that works on one flat float32 row per group of parameters (``Layout``).

    A subclass allocates its buffers in :meth:`_allocate` and turns z_t into the noise of step t in
    :meth:`_correlate`. The float32 tensors of ``next()`` are views of one row that the next call
    overwrites; the caller may scale them in place.

    Args:
        strategy: the strategy matrix; bound to ``steps`` here if it is not yet.
        steps: n.
        like: tensors whose shapes, dtypes and devices the noise has.
        seed: integer in [0, 2^128).
        secure: draw from a cryptographic generator.

    Raises:
        ValueError: if the strategy does not fit ``steps``, the seed is out of range, ``like`` is
            empty or holds a tensor that is not floating-point, or a device is neither CPU nor CUDA.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        steps: int,
        like: Sequence[torch.Tensor],
        seed: int,
        secure: bool = False,
    ) -> None:
        self.steps = positive_int("steps", steps)
        self.step = 0
        self.strategy = strategy.bind(self.steps)
        self.normals = open_normals(seed, secure=secure)
        self._secure = secure
        self._layout = Layout.of(like)
        for device in self._layout.devices:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"like is on device {device}: noise is drawn on 'cpu' or 'cuda'")
        self._rows = [
            torch.empty(size, device=device, dtype=torch.float32)
            for size, device in zip(self._layout.sizes, self._layout.devices, strict=True)
        ]
        self._views = self._layout.views(self._rows)
        self._buffers = [self._allocate(row) for row in self._rows]

    @abstractmethod
    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The buffers of a group, zero before the first step; ``row`` shows size and device."""

    @abstractmethod
    def _correlate(self, group: int, row: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        """Overwrite ``row`` (its content is arbitrary) with the noise of step ``self.step``."""

    def __next__(self) -> list[torch.Tensor]:
        if self.step >= self.steps:
            raise RuntimeError(
                f"all {self.steps} rows of noise are spent: a longer run needs a mechanism "
                "(and a guarantee) for more steps"
            )
        for group, (row, buffers) in enumerate(zip(self._rows, self._buffers, strict=True)):
            self._correlate(group, row, buffers)
        self.step += 1
        return [
            view if dtype is torch.float32 else view.to(dtype)
            for view, dtype in zip(self._views, self._layout.dtypes, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Private: whoever reads it can subtract the noise.

        Holds only tensors, integers, strings and lists, so ``torch.load(weights_only=True)`` reads
        it (the seed is hexadecimal text: it does not fit 64 bits).
        """
        return {
            "step": self.step,
            "seed": f"{self.normals.seed:032x}",
            "strategy": self.strategy.coefficient_hash,
            "steps": self.steps,
            "layout": self._describe(),
            "buffers": [[b.clone() for b in buffers] for buffers in self._buffers],
        }

    def _describe(self) -> dict[str, Any]:
        """Everything besides strategy and length that decides the values of a row."""
        return {**self._layout.describe(), "generator": self.normals.name}

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
            "strategy": self.strategy.coefficient_hash,
            **self._describe(),
        }
        saved = {"steps": state["steps"], "strategy": state["strategy"], **state["layout"]}
        for name, value in here.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the noise state was saved for {name}={saved.get(name)}, this stream has "
                    f"{name}={value}: resume with the model and mechanism of the saved run"
                )
        theirs = [list(buffers) for buffers in state["buffers"]]
        if _shapes(theirs) != _shapes(self._buffers):
            raise ValueError("the buffers of the noise state do not have the shapes that it states")
        step = state["step"]
        if not 0 <= step <= self.steps:
            raise ValueError(f"the noise state is at step={step}, outside 0..{self.steps}")
        self.normals = open_normals(int(state["seed"], 16), secure=self._secure)
        self.step = step
        for mine, saved_buffers in zip(self._buffers, theirs, strict=True):
            for buffer, other in zip(mine, saved_buffers, strict=True):
                buffer.copy_(other)


def _shapes(buffers: list[list[torch.Tensor]]) -> list[list[tuple[torch.Size, torch.dtype]]]:
    return [[(b.shape, b.dtype) for b in group] for group in buffers]
