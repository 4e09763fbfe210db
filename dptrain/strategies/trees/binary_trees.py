"""The base of tree strategies: sums over dyadic intervals, and the online estimator."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from dptrain.core import Array, checks
from dptrain.strategies.binding import checked_columns
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz.toeplitz import checked_vector
from dptrain.strategies.trees.estimator import (
    greatest_variance,
    mean_variance,
    online_noise,
    prefix_variances,
)
from dptrain.strategies.trees.nodes import level_sums, node_count, node_rows
from dptrain.strategies.trees.sensitivity import worst_square
from dptrain.strategies.workloads import PREFIX_SUMS, Workload


class BinaryTrees(Strategy, ABC):
    """C has a row per complete node of trees that follow one another, 1 at the steps it covers.

    The rows come in the order in which nodes complete (``node_rows``): a row is there once its last
    step is over, so the release is online. W is the online estimator of ``online_noise``: its error
    is the least that an unbiased linear estimator can have for any prefix sum, given the nodes that
    are complete by then.
    """

    @abstractmethod
    def levels(self, steps: int) -> int:
        """Levels of a tree for n = ``steps``; a tree has 2^(levels - 1) leaves.

        Raises:
            ValueError: if the strategy is not bound, or not for that n.
        """

    def rows(self, steps: int) -> int:
        """Number of complete nodes; 2n - popcount(n) where one tree covers all steps."""
        return node_count(steps, self.levels(steps))

    def columns(self, steps: int, indices: npt.ArrayLike) -> Array:
        """Columns ``indices`` of C for n = ``steps``: shape (rows, len(indices)), zeros and ones.

        Raises:
            ValueError: if there is no such column.
        """
        height = self.levels(steps)
        j = checked_columns(steps, indices)
        dense = np.zeros((node_count(steps, height), j.size))
        for level in range(height):
            rows = node_rows(steps, level, height)
            (inside,) = np.nonzero(j >> level < rows.size)
            dense[rows[j[inside] >> level], inside] = 1.0
        return dense

    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x``, the sums over all nodes: x of shape (n,) or (n, k) to (rows,) or (rows, k)."""
        x = checked_vector(x)
        steps = x.shape[0]
        height = self.levels(steps)
        nodes = np.empty((node_count(steps, height), *x.shape[1:]))
        for level, sums in enumerate(level_sums(x, height)):
            nodes[node_rows(steps, level, height)] = sums
        return nodes

    @abstractmethod
    def _steps_of(self, rows: int) -> int:
        """The n that has ``rows`` rows."""

    def solve(self, z: npt.ArrayLike) -> Array:
        """``W @ z`` for z of shape (rows,) or (rows, k), in the order of the rows: (n,) or (n, k).

        Row t is the estimate of the noise in prefix sum t less that in prefix sum t - 1.
        """
        z = checked_vector(z)
        steps = self._steps_of(z.shape[0])
        return online_noise(z, steps, self.levels(steps))

    def column_norms(self, steps: int) -> Array:
        """Square root of the number of complete nodes over every step, shape (steps,)."""
        squared = np.zeros(steps)
        for level in range(self.levels(steps)):
            squared[: steps >> level << level] += 1.0
        return np.sqrt(squared)

    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """max ‖C x‖₂ over x in {0, 1}^n with at most m ones, any two at least b apart.

        Exact where the pattern 0, b, 2b, … attains the sum of every level's own worst (m = 1, b a
        power of two or at least the leaves of a tree, and others), and else by a search over trees
        that covers all patterns. Where that search would take more than about a second (hundreds
        of participations and an odd b), the sum of every level's own worst: a proven upper bound.

        Raises:
            ValueError: if one of the arguments is not a positive integer.
        """
        squared, _ = self._worst_square(steps, max_participations, min_sep)
        return math.sqrt(squared)

    def sensitivity_is_exact(self, *, steps: int, max_participations: int, min_sep: int) -> bool:
        """True if ``sensitivity`` is the maximum itself rather than an upper bound on it."""
        return self._worst_square(steps, max_participations, min_sep)[1]

    def _worst_square(self, steps: int, m: int, b: int) -> tuple[int, bool]:
        return worst_square(
            checks.steps(steps),
            self.levels(steps),
            checks.integer("max_participations", m),
            checks.integer("min_sep", b),
        )

    def errors(self, steps: int, workload: Workload = PREFIX_SUMS) -> Array:
        """Standard deviation of the error of every query, per unit of σ, shape (steps,).

        Prefix sums: the sum of the variances of the prefix's maximal nodes, O(n log n). Other
        workloads cost O(n²).
        """
        if workload != PREFIX_SUMS:
            return super().errors(steps, workload)
        return np.sqrt(prefix_variances(steps, self.levels(steps)))

    def rmse(self, steps: int, workload: Workload = PREFIX_SUMS) -> float:
        """Root mean square of ``errors``; O(log n) for prefix sums."""
        if workload != PREFIX_SUMS:
            return super().rmse(steps, workload)
        return math.sqrt(mean_variance(steps, self.levels(steps)))

    def max_error(self, steps: int, workload: Workload = PREFIX_SUMS) -> float:
        """The largest of ``errors``; O(log² n) for prefix sums."""
        if workload != PREFIX_SUMS:
            return super().max_error(steps, workload)
        return math.sqrt(greatest_variance(steps, self.levels(steps)))

    def noise_growth(self, steps: int) -> Array:
        """A bound on the standard deviation of every step's noise, shape (steps,).

        What a step adds is the difference of the errors of two prefix sums of its own tree: at most
        twice the largest of these, by the triangle inequality, which is about sqrt(log n).
        """
        height = self.levels(steps)
        leaves = min(steps, 1 << (height - 1))
        return np.full(steps, 2.0 * math.sqrt(greatest_variance(leaves, height)))
