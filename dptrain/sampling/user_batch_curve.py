"""The expected batch size of sampling-based user-level b-min-sep as a function of p, exactly."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, minimize_scalar

from dptrain.sampling.neighbours import expected_batch_size

# Relative distance of the points that are looked at. Each term varies over a factor of about e in
# p, so between two points the curve exceeds the higher one by 1e-5 of itself at most; peaks are
# sought out besides.
_SPACING = 0.01


class BatchSizeCurve:
    """f(p) = p·Σ_e (1-p)^((b-1)|N(e)|), the mean of |B_t| from step b-1 on.

    An example e is used if it is sampled and none of the |N(e)| examples that share a user with it
    (itself included) was, in b-1 steps of independent coins. The curve rises from 0, falls to 0 at
    p = 1, and may have several peaks where the neighbourhoods differ much.

    Args:
        neighbours: |N(e)| ≥ 1 of every example, integers of shape (N,).
        min_sep: b ≥ 2 (for b = 1 it is N·p).
    """

    def __init__(self, neighbours: npt.NDArray[np.integer], min_sep: int) -> None:
        self._sizes, self._counts = np.unique(neighbours, return_counts=True)
        self._min_sep = min_sep

    def __call__(self, probability: float) -> float:
        """f(p) for p in (0, 1]."""
        return expected_batch_size(
            self._sizes, probability=probability, min_sep=self._min_sep, counts=self._counts
        )

    def _points(self) -> list[float]:
        """Ascending p's with every peak among them: f rises before the first, falls after the last.

        A term p(1-p)^m peaks at 1/(m+1).
        """
        first, last = 1.0 / ((self._min_sep - 1) * self._sizes[[-1, 0]] + 1.0)
        count = 2 + math.ceil(math.log(last / first) / _SPACING)
        grid = np.geomspace(first, last, count)
        values = np.array([self(p) for p in grid])
        peaks = []
        for i in range(1, count - 1):
            if values[i] >= max(values[i - 1], values[i + 1]):
                bounds = (grid[i - 1], grid[i + 1])
                best = minimize_scalar(
                    lambda p: -self(p), bounds=bounds, method="bounded", options={"xatol": 1e-15}
                )
                peaks.append(float(best.x))
        return sorted({*grid.tolist(), *peaks})

    def largest(self) -> tuple[float, float]:
        """(p, f(p)) where f is largest."""
        best = max(self._points(), key=self)
        return best, self(best)

    def smallest_probability(self, batch_size: float) -> float | None:
        """The smallest p with f(p) = ``batch_size``, or ``None`` if f stays below."""
        below = 0.0
        for point in self._points():
            if self(point) >= batch_size:
                root = brentq(
                    lambda p: self(p) - batch_size if p > 0 else -batch_size,
                    below,
                    point,
                    xtol=1e-18,
                    rtol=1e-14,
                )
                return float(root)
            below = point
        return None
