"""C = I: independent noise, as in DP-SGD."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

import numpy as np

from dptrain.core import Array, checks
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.toeplitz import BandedToeplitz


@register_strategy(planned=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity(BandedToeplitz):
    """C = I: every step gets its own independent noise (DP-SGD, Abadi et al. 2016)."""

    @property
    def bands(self) -> int:  # type: ignore[override]
        """One: the diagonal."""
        return 1

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """Itself."""
        return (cls(),)

    def bind(self, steps: int) -> Self:
        """Itself, for any number of steps.

        Raises:
            ValueError: if ``steps`` is not a positive integer.
        """
        checks.steps(steps)
        return self

    def prefix(self, steps: int) -> Self:
        """Itself."""
        return self.bind(steps)

    def first_column(self, steps: int) -> Array:
        """c = (1,)."""
        checks.steps(steps)
        return np.ones(1)
