"""A strategy matrix C: its coefficients, its sensitivity and the error it leads to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np
import numpy.typing as npt

from dptrain.core import Array, JsonValue, digest
from dptrain.strategies.workloads import PREFIX_SUMS, Workload

_BLOCK_ENTRIES = 1 << 22  # of dense blocks: 32 MB of float64


class Strategy(JsonValue, ABC, family="strategy"):
    """Strategy matrix C, as an immutable value: what is released is equivalent to C x + σ z.

    C is n×n, lower triangular and entrywise non-negative, except that the tree families have
    ``rows(n)`` > n rows (a row is a node, in the order in which nodes complete). A left inverse W
    (W C = I; C^-1 where C is square) turns Z into noise: step t adds row t of W Z.

    A strategy may be declared before the number of steps is known (``BandMF(bands=16)``);
    ``bind`` returns the value for n steps, with explicit coefficients, and everything below
    works on a bound strategy. Binding a bound strategy to its own n returns it unchanged.

    Attributes:
        bands: participations at least ``bands`` steps apart have orthogonal columns; for a square
            C the number of its leading non-zero diagonals (1 for the identity, n for a dense C).
            An annotation, not an abstract property, so that a dataclass can hold it as a field.
            Only defined on a bound strategy where it depends on n.
    """

    bands: int

    @abstractmethod
    def bind(self, steps: int) -> Self:
        """This strategy for runs of ``steps`` steps.

        Raises:
            ValueError: if it cannot serve that many steps (``bands > steps``, another n).
        """

    def rows(self, steps: int) -> int:
        """Number of rows of C, which is the length of z: n unless C is a tree."""
        return steps

    @abstractmethod
    def columns(self, steps: int, indices: npt.ArrayLike) -> Array:
        """Columns ``indices`` of C for n = ``steps``: shape (rows, len(indices))."""

    @abstractmethod
    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x``, without forming C, for x of shape (n,) or (n, k): (rows,) or (rows, k)."""

    @abstractmethod
    def solve(self, z: npt.ArrayLike) -> Array:
        """``W @ z``, the noise of z of shape (rows,) or (rows, k); shape (n,) or (n, k)."""

    def magnitude(self) -> Strategy:
        """|C|, which amplified accountants use in place of C (``notation``); itself for C ≥ 0."""
        return self

    @abstractmethod
    def column_norms(self, steps: int) -> Array:
        """Euclidean norm of every column of C, shape (steps,); the last ones are cut at row n."""

    @abstractmethod
    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """max ‖C x‖₂ over patterns with that many participations, at least ``min_sep`` apart."""

    @abstractmethod
    def sensitivity_is_exact(self, *, steps: int, max_participations: int, min_sep: int) -> bool:
        """Whether ``sensitivity`` is the maximum itself rather than an upper bound on it."""

    def errors(self, steps: int, workload: Workload = PREFIX_SUMS) -> Array:
        """Standard deviation of the error of every query, per unit of σ: row norms of A W.

        Blocks of unit vectors go through W and A: O(n²) times the cost of a row, no n² memory.

        Returns:
            Shape (steps,).

        Raises:
            ValueError: if the workload is made for another n.
        """
        workload.check(steps)
        rows = self.rows(steps)
        width = max(1, min(rows, _BLOCK_ENTRIES // rows))
        squared = np.zeros(steps)
        for start in range(0, rows, width):
            units = np.eye(rows, min(width, rows - start), -start)
            squared += np.sum(workload.apply(self.solve(units)) ** 2, axis=1)
        return np.sqrt(squared)

    def rmse(self, steps: int, workload: Workload = PREFIX_SUMS) -> float:
        """sqrt(‖A W‖_F² / n): root mean square of ``errors``."""
        return float(np.sqrt(np.mean(self.errors(steps, workload) ** 2)))

    def max_error(self, steps: int, workload: Workload = PREFIX_SUMS) -> float:
        """The largest of ``errors``."""
        return float(self.errors(steps, workload).max())

    @property
    def coefficient_hash(self) -> str:
        """SHA-256 (hex) of the value, coefficients included."""
        return digest(self.to_dict())
