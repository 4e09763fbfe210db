"""A strategy matrix C: its coefficients, its sensitivity and the error it leads to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np
import numpy.typing as npt

from dptrain.registry import JsonValue, digest

Array = npt.NDArray[np.float64]


class Strategy(JsonValue, ABC, family="strategy"):
    """Lower-triangular, entrywise non-negative n×n matrix C, as an immutable value.

    A strategy may be declared before the number of steps is known (``BandMF(bands=16)``);
    :meth:`bind` returns the value for n steps, with explicit coefficients, and everything below
    works on a bound strategy. Binding a bound strategy to its own n returns it unchanged.

    Attributes:
        bands: number of leading non-zero diagonals of C (1 for the identity). An annotation, not
            an abstract property, so that a dataclass can hold it as a field.
    """

    bands: int

    @abstractmethod
    def bind(self, steps: int) -> Self:
        """This strategy for runs of ``steps`` steps.

        Raises:
            ValueError: if it cannot serve that many steps (``bands > steps``, another n).
        """

    @abstractmethod
    def columns(self, steps: int, indices: npt.ArrayLike) -> Array:
        """Columns ``indices`` of C for n = ``steps``: shape (steps, len(indices))."""

    @abstractmethod
    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x`` for x of shape (n,) or (n, k), without forming C."""

    @abstractmethod
    def column_norms(self, steps: int) -> Array:
        """Euclidean norm of every column of C, shape (steps,); the last ones are cut at row n."""

    @abstractmethod
    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """max ‖C x‖₂ over patterns with that many participations, at least ``min_sep`` apart."""

    @abstractmethod
    def rmse(self, steps: int) -> float:
        """sqrt(‖A C^-1‖_F² / n) for prefix sums A: error per unit of σ."""

    @property
    def coefficient_hash(self) -> str:
        """SHA-256 (hex) of the value, coefficients included."""
        return digest(self.to_dict())
