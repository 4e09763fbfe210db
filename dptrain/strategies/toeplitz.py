"""What every banded Toeplitz strategy shares: columns, norms, sensitivity and error."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

Array = npt.NDArray[np.float64]


def positive_int(name: str, value: Any) -> int:
    """``value`` as a Python int.

    Raises:
        ValueError: if it is not an integer of at least 1 (booleans and floats are not integers).
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    return number


class BandedToeplitz(ABC):
    """Mixin: C_{t,j} = c_{t-j} for 0 ≤ t - j < bands, with c ≥ 0 and c_0 > 0.

    A strategy derives from this and from :class:`~dptrain.strategies.strategy.Strategy` (in this
    order) and only says what its :meth:`first_column` is. All costs are O(n·bands).
    """

    bands: int

    @abstractmethod
    def first_column(self, steps: int) -> Array:
        """Coefficients c of C for n = ``steps``: shape (min(bands, n),), float64.

        Raises:
            ValueError: if the strategy is not bound, or is bound to another n.
        """

    def columns(self, steps: int, indices: npt.ArrayLike) -> Array:
        """Columns ``indices`` of C for n = ``steps``: shape (steps, len(indices))."""
        c = self.first_column(steps)
        j = np.atleast_1d(np.asarray(indices))
        if j.ndim != 1 or not np.issubdtype(j.dtype, np.integer):
            raise ValueError(f"indices={indices!r}: must be a list of integers")
        if j.size and (j.min() < 0 or j.max() >= steps):
            raise ValueError(f"indices reach from {j.min()} to {j.max()}: C has {steps} columns")
        padded = np.zeros(steps + 1)  # the last entry stands for everything outside the band
        padded[: c.size] = c
        lag = np.arange(steps)[:, None] - j[None, :]
        return padded[np.where(lag >= 0, lag, steps)]

    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x`` for x of shape (n,) or (n, k), without forming C."""
        x = np.asarray(x, dtype=np.float64)
        if x.ndim not in (1, 2) or x.shape[0] < 1:
            raise ValueError(f"x has the shape {x.shape}: must be (steps,) or (steps, k)")
        return np.asarray(lfilter(self.first_column(x.shape[0]), [1.0], x, axis=0))

    def column_norms(self, steps: int) -> Array:
        """Euclidean norm of every column of C, shape (steps,); the last ones are cut at row n."""
        partial = np.sqrt(np.cumsum(self.first_column(steps) ** 2))
        entries = np.minimum(partial.size, steps - np.arange(steps))
        return np.asarray(partial[entries - 1])

    def rmse(self, steps: int) -> float:
        """sqrt(‖A C^-1‖_F² / n) for prefix sums A: error per unit of σ.

        A C^-1 is Toeplitz with first column w, C w = (1, …, 1), so ‖A C^-1‖_F² = Σ_t (n - t) w_t².
        """
        w = lfilter([1.0], self.first_column(steps), np.ones(steps))
        return float(np.sqrt(np.arange(steps, 0, -1) @ (w * w) / steps))

    def sensitivity_is_exact(self, *, steps: int, max_participations: int, min_sep: int) -> bool:
        """Whether :meth:`sensitivity` is the maximum itself rather than an upper bound on it."""
        m, b = _schedule(steps, max_participations, min_sep)
        c = self.first_column(steps)
        return m == 1 or c.size <= b or bool(np.all(np.diff(c) <= 0))

    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """max ‖C x‖₂ over x in {0, 1}^n with at most m ones, any two at least b apart.

        Exact, and reached at x = 0, b, 2b, … with min(m, ceil(n/b)) ones, in three cases:

        * m = 1: columns only lose entries as they move right, so the first has the largest norm.
        * bands ≤ b: columns b apart have disjoint supports, ‖C x‖² is a sum of squared column
          norms, and the i-th one sits at index i·b or later, where norms are no larger.
        * c non-increasing: Kalinin & Lampert 2024, Theorem 2.

        Otherwise the smaller of two upper bounds:

        * Majorant: let c̄_k = max_{j≥k} c_j, the least non-increasing sequence above c. Then
          0 ≤ C ≤ C̄ entrywise and x ≥ 0 give ‖C x‖ ≤ ‖C̄ x‖, whose maximum is the third case.
        * Autocorrelation: ‖C x‖² is the sum of the inner products of all pairs of chosen columns.
          Columns d apart have an inner product of at most r(d) = Σ_k c_k c_{k+d} (cutting at row n
          drops non-negative terms); the i-th and the (i+s)-th participation are at least s·b
          apart. Hence ‖C x‖² ≤ m r(0) + 2 Σ_{s=1}^{m-1} (m - s) max_{d ≥ s·b} r(d).

        Args:
            steps: n.
            max_participations: m ≥ 1.
            min_sep: b ≥ 1.

        Raises:
            ValueError: if one of them is not a positive integer.
        """
        m, b = _schedule(steps, max_participations, min_sep)
        c = self.first_column(steps)
        exact = self.sensitivity_is_exact(
            steps=steps, max_participations=max_participations, min_sep=min_sep
        )
        if exact:
            return _regular_pattern_norm(c, steps, m, b)
        majorant = np.maximum.accumulate(c[::-1])[::-1]
        r = np.correlate(c, c, mode="full")[c.size - 1 :]
        r = np.maximum.accumulate(r[::-1])[::-1]
        s = np.arange(1, m)
        s = s[s * b < c.size]
        squared = m * r[0] + 2 * np.sum((m - s) * r[s * b])
        # One part in 10^12 for the rounding of the sums, so that the bound stays one.
        bound = np.sqrt(squared) * (1 + 1e-12)
        return float(min(bound, _regular_pattern_norm(majorant, steps, m, b)))


def _schedule(steps: int, max_participations: int, min_sep: int) -> tuple[int, int]:
    """(m, b), with m cut to the ceil(n/b) participations that fit."""
    steps = positive_int("steps", steps)
    b = positive_int("min_sep", min_sep)
    return min(positive_int("max_participations", max_participations), -(-steps // b)), b


def _regular_pattern_norm(c: Array, steps: int, m: int, b: int) -> float:
    """‖C x‖₂ for x with ones at 0, b, …, (m-1)b."""
    x = np.zeros(steps)
    x[: m * b : b] = 1.0
    return float(np.linalg.norm(lfilter(c, [1.0], x)))
