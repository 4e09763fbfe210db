"""Banded square root: the closed-form strategy."""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np

from dptrain.strategies.patterns import positive_int
from dptrain.strategies.toeplitz import Array, BandedToeplitz


def square_root_coefficients(count: int) -> Array:
    """First ``count`` coefficients of A^{1/2} for prefix sums A: 1, 1/2, 3/8, 5/16, …

    They are those of (1 - x)^{-1/2}: f_0 = 1, f_k = f_{k-1} (1 - 1/(2k)).
    """
    return np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, count)]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BSR(BandedToeplitz):
    """Toeplitz C with the first ``bands`` coefficients of A^{1/2} (Kalinin & Lampert 2024).

    Args:
        bands: number of coefficients; ``bands = steps`` is the full square root.

    Raises:
        ValueError: if ``bands`` is not a positive integer.
    """

    bands: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", positive_int("bands", self.bands))

    def bind(self, steps: int) -> Self:
        """Itself: the coefficients do not depend on n.

        Raises:
            ValueError: if ``bands > steps``.
        """
        if self.bands > positive_int("steps", steps):
            raise ValueError(
                f"bands={self.bands} exceeds the {steps} steps of the run: "
                f"use at most bands={steps}"
            )
        return self

    def first_column(self, steps: int) -> Array:
        """The first min(bands, n) coefficients of A^{1/2}."""
        return square_root_coefficients(min(self.bands, positive_int("steps", steps)))
