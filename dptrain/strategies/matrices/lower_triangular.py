"""Square strategies that are not Toeplitz: any lower-triangular C, banded or not."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
from scipy.linalg import solve_triangular
from scipy.linalg.lapack import dtbtrs

from dptrain.core import Array, checks
from dptrain.strategies.binding import checked_columns, participations
from dptrain.strategies.matrices.banded_error import BandedError, inverse_workload
from dptrain.strategies.matrices.gram_sensitivity import best_sum, gram_bound
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz.toeplitz import checked_vector
from dptrain.strategies.workloads import PREFIX_SUMS, Workload

_LARGEST_GROWTH = 1e6  # of the noise over that of uncorrelated noise; as for Toeplitz strategies
_DENSE_UP_TO = 2048  # steps up to which C is worth forming as a matrix
_FEW_BANDS = 32  # up to here a loop over the diagonals beats a dense product


class LowerTriangular(Strategy, ABC):
    """C_{t,j} for t - bands < j ≤ t, different for every t; noise by back-substitution.

    A family says what its ``diagonals`` are. C may have negative entries: then
    ``magnitude`` is another strategy, and sensitivities are those of vector contributions.

    Attributes:
        steps: the n that the value is bound to, or ``None``.
    """

    steps: int | None

    @abstractmethod
    def diagonals(self, steps: int) -> Array:
        """The entries of C by diagonals, shape (bands, n), not to be written to.

        Returns:
            ``[k, j]`` is C_{j+k,j}, and 0 for j + k ≥ n.

        Raises:
            ValueError: if the strategy is not bound, or is bound to another n.
        """

    def row(self, steps: int, t: int) -> Array:
        """The entries C_{t, max(0, t-bands+1)}, …, C_{t,t}: shape (min(bands, t + 1),)."""
        diagonals = self.diagonals(steps)
        j = np.arange(max(0, t - len(diagonals) + 1), t + 1)
        return np.asarray(diagonals[t - j, j])

    @functools.cached_property
    def _matrix(self) -> Array | None:
        """C, for products with it where that is cheaper than by diagonals."""
        assert self.steps is not None
        diagonals = self.diagonals(self.steps)
        bands, n = diagonals.shape
        if bands <= _FEW_BANDS or n > _DENSE_UP_TO:
            return None
        return dense_from_diagonals(diagonals)

    def columns(self, steps: int, indices: npt.ArrayLike) -> Array:
        """Columns ``indices`` of C for n = ``steps``: shape (steps, len(indices))."""
        diagonals = self.diagonals(steps)
        j = checked_columns(steps, indices)
        columns = np.zeros((steps + len(diagonals), j.size))  # entries past row n are zero
        lag = np.arange(len(diagonals))[:, None]
        columns[lag + j, np.arange(j.size)] = diagonals[:, j]
        return columns[:steps]

    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x`` for x of shape (n,) or (n, k)."""
        x = checked_vector(x)
        n = x.shape[0]
        diagonals = self.diagonals(n)
        if self._matrix is not None:
            return np.asarray(self._matrix @ x)
        product = np.zeros_like(x)
        for k, diagonal in enumerate(diagonals):
            weights = diagonal[: n - k] if x.ndim == 1 else diagonal[: n - k, None]
            product[k:] += weights * x[: n - k]
        return product

    def solve(self, z: npt.ArrayLike) -> Array:
        """``C^-1 @ z`` for z of shape (n,) or (n, k), by (banded) back-substitution."""
        z = checked_vector(z)
        diagonals = self.diagonals(z.shape[0])
        if self._matrix is not None:
            return np.asarray(solve_triangular(self._matrix, z, lower=True, check_finite=False))
        solution, info = dtbtrs(diagonals, z.reshape(len(z), -1), uplo="L")
        # The diagonal of a strategy is positive.
        checks.invariant(info == 0, "the strategy's matrix is singular")
        return np.ascontiguousarray(solution).reshape(z.shape)

    def column_norms(self, steps: int) -> Array:
        """Euclidean norm of every column of C, shape (steps,)."""
        return np.asarray(np.linalg.norm(self.diagonals(steps), axis=0))

    def errors(self, steps: int, workload: Workload = PREFIX_SUMS) -> Array:
        """Standard deviation of the error of every query, per unit of σ: row norms of A C^-1.

        O(n·bands²) where A^-1 is known to be banded (``BandedError``); otherwise O(n²·bands),
        plus n times the cost of a product with A.
        """
        diagonals = self.diagonals(steps)
        inverse = inverse_workload(workload, steps)
        if inverse is None or self._matrix is not None:
            return super().errors(steps, workload)
        return np.sqrt(BandedError(len(diagonals), inverse).squared_rows(diagonals))

    def noise_growth(self, steps: int) -> Array:
        """Standard deviation of the noise of every step over the largest 1/C_{s,s} so far.

        The latter is what C without correlation would add. Shape (steps,); not finite where C^-1
        overflows.
        """
        diagonals = self.diagonals(steps)
        scale = np.maximum.accumulate(1 / diagonals[0])
        return (
            np.sqrt(BandedError(len(diagonals), np.ones((1, steps))).squared_rows(diagonals))
            / scale
        )

    def check_stable(self, owner: str) -> None:
        """Refuse a C whose C^-1 blows up within the run, for ``bind``.

        Args:
            owner: what the message calls the strategy.

        Raises:
            ValueError: naming the first step t (from 0) whose noise is not finite, or has grown to
                more than 10^6 times that of uncorrelated noise (``noise_growth``).
        """
        assert self.steps is not None
        growth = self.noise_growth(self.steps)
        # The negation also catches NaN, which compares false with everything.
        blown = np.flatnonzero(~(growth <= _LARGEST_GROWTH))
        if blown.size:
            t = int(blown[0])
            raise ValueError(
                f"C^-1 of {owner} diverges: at step {t} the noise has {growth[t]:.3g} times the "
                f"standard deviation of uncorrelated noise, more than {_LARGEST_GROWTH:.0e}; use a "
                "matrix whose columns decrease from the diagonal on, or a shorter run"
            )

    def sensitivity_is_exact(self, *, steps: int, max_participations: int, min_sep: int) -> bool:
        """True if ``sensitivity`` is the maximum itself rather than an upper bound on it."""
        m, b = participations(steps, max_participations, min_sep)
        return m == 1 or len(self.diagonals(steps)) <= b

    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """max ‖Σ_i C_{:,i} x_iᵀ‖_F over patterns and vectors x_i of norm at most 1.

        A pattern is at most m indices, any two at least b apart. With entries of both signs in C
        this is more than the maximum of ‖C x‖ over x in {0, 1}^n: contributions can point against
        each other. Exact in two cases:

        * m = 1: the largest column norm.
        * bands ≤ b: the columns of a pattern are orthogonal, and the maximum of the sum of their
          squared norms is found by a dynamic program
          (docs/theory/strategies.md#thm-orthogonal-columns).

        Otherwise the upper bound of ``gram_bound``; it takes O(bands·n·m).

        Args:
            steps: n.
            max_participations: m ≥ 1.
            min_sep: b ≥ 1.

        Raises:
            ValueError: if one of them is not a positive integer.
        """
        m, b = participations(steps, max_participations, min_sep)
        diagonals = self.diagonals(steps)
        if m == 1:
            return float(self.column_norms(steps).max())
        if len(diagonals) <= b:
            return math.sqrt(best_sum(np.sum(diagonals**2, axis=0), m, b))
        return gram_bound(gram_diagonals(diagonals), max_participations=m, min_sep=b)


def dense_from_diagonals(diagonals: Array) -> Array:
    """C, shape (n, n), from the array of ``LowerTriangular.diagonals``."""
    bands, n = diagonals.shape
    dense = np.zeros((n, n))
    j = np.arange(n)
    for k in range(bands):
        dense[j[: n - k] + k, j[: n - k]] = diagonals[k, : n - k]
    return dense


def diagonals_from_dense(dense: Array) -> Array:
    """The diagonals of a lower-triangular matrix, shape (bands, n), bands as its entries are."""
    n = len(dense)
    t, j = np.nonzero(dense)
    bands = int((t - j).max(initial=0)) + 1
    diagonals = np.zeros((bands, n))
    for k in range(bands):
        diagonals[k, : n - k] = np.diagonal(dense, -k)
    return diagonals


def gram_diagonals(diagonals: Array) -> Array:
    """|G| for G = CᵀC by diagonals, shape (bands, n): ``[d, i]`` is |G_{i,i-d}|, 0 for i < d."""
    bands, n = diagonals.shape
    gram = np.zeros((bands, n))
    if n <= _DENSE_UP_TO:
        dense = dense_from_diagonals(diagonals)
        product = np.abs(dense.T @ dense)
        for d in range(bands):
            gram[d, d:] = np.diagonal(product, -d)
        return gram
    for d in range(bands):
        # Rows i, i + 1, … of columns i and i - d: diagonals 0, 1, … of one and d, d + 1, … of it.
        pairs = diagonals[: bands - d, d:] * diagonals[d:, : n - d]
        gram[d, d:] = np.abs(pairs.sum(axis=0))
    return gram
