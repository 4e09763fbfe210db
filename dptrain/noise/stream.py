"""A stream of correlated noise: row t of C^-1 Z for a list of parameter shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class NoiseStream(ABC):
    """Draws the rows of C^-1 Z, one a step, with Z i.i.d. standard normal (``mechanisms``).

    The noise has unit variance per entry of Z: the caller scales it by σ·R, so a schedule of R
    stays right. Row t is a pure function of (seed, t, shapes). ``step`` is the index (from 0) of
    the row that the next call draws.
    """

    steps: int
    step: int

    @abstractmethod
    def __next__(self) -> list[torch.Tensor]:
        """The next row, a tensor per parameter with its shape, dtype and device.

        The tensors are only valid until the next call.

        Raises:
            RuntimeError: after ``steps`` rows; more noise than was accounted for is refused.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Seed, position and buffers; whoever reads it can subtract the noise, so it is private."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit from ``state``.

        Raises:
            ValueError: if it was saved for other shapes, another strategy or another run length.
        """
