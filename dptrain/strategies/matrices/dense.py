"""Dense strategies: any lower-triangular C, given or optimized."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import Array, checks
from dptrain.strategies.binding import Bindable, check_bands_fit, unoptimized
from dptrain.strategies.matrices.column_normalized_optimization import optimal_columns
from dptrain.strategies.matrices.dense_optimization import optimal_for_epochs, workload_factor
from dptrain.strategies.matrices.lower_triangular import (
    LowerTriangular,
    dense_from_diagonals,
    diagonals_from_dense,
)
from dptrain.strategies.packed import pack, unpack
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.band_mf import BandMF
from dptrain.strategies.workloads import PREFIX_SUMS, Workload, checked_workload

_LARGEST = 2000  # steps; the text of the value then has 21 MB


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Dense(Bindable, LowerTriangular):
    """Any lower-triangular C with a positive diagonal, for at most 2000 steps.

    Either given, ``Dense(matrix=C)``, or declared by one of ``epochs`` and ``bands`` and optimized
    by ``bind(steps)``: least ‖A C^-1‖_F² among the C with columns of norm 1 where

    * ``Dense(epochs=e)``: columns n/e, 2n/e, … apart are orthogonal. For participations *exactly*
      n/e apart the sensitivity is sqrt(e) (``fixed_epoch_sensitivity``); participations at
      least n/e apart cost more. ``epochs=1`` is the optimum for one participation (Denisov et al.
      2022, Choquette-Choo et al. 2022). With e > 1, C has negative entries. With
      ``equal_norms=False`` only the squared norms of columns n/e, 2n/e, … apart add up to e: the
      same sensitivity where participations are exactly so far apart, and 2 to 3 % less error
      (Choquette-Choo et al. 2022); for schemes that keep the distance, ``BallsInBins`` and
      ``Shuffled(reshuffle=False)``.
    * ``Dense(bands=b)``: C has b bands and no negative entries. The sensitivity is sqrt(m) for m
      participations at least b apart. The same matrices as ``ColumnNormalizedBandMF``.

    Negative entries are allowed: sensitivities are then those of vector contributions, and
    ``magnitude`` is the strategy |C|, which amplified accountants use.

    Args:
        matrix: C, shape (n, n), or its text from ``packed.pack``. The value holds the text,
            which makes it hashable and JSON-able.
        epochs: e, a divisor of n.
        equal_norms: whether all columns have norm 1; only with ``epochs``.
        bands: at most the scheme's min-sep. With a matrix it is found from the entries (exact
            zeros) and need not be given.
        workload: A, for the optimization.
        steps: the n that the value is bound to; with a matrix its number of rows.

    Raises:
        ValueError: if the matrix is not square, not finite or too large, has entries above the
            diagonal or a diagonal that is not positive; if none or both of ``epochs`` and ``bands``
            declare an optimum, or one of them is out of range.

    Example:
        >>> Dense(matrix=[[1.0, 0.0], [0.5, 1.0]]).solve([1.0, 1.0])
        array([1. , 0.5])
    """

    matrix: str | npt.ArrayLike | None = None
    epochs: int | None = None
    equal_norms: bool = True
    bands: int | None = None  # type: ignore[assignment]  # known once there is a matrix
    workload: Workload = PREFIX_SUMS
    steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "bands", "steps"):
            value = getattr(self, name)
            if value is not None:
                self._settle(**{name: checks.integer(name, value)})
        if not isinstance(self.equal_norms, bool):
            raise TypeError(f"equal_norms={self.equal_norms!r}: must be True or False")
        if not self.equal_norms and self.epochs is None:
            raise ValueError(
                "equal_norms=False needs epochs=, whose columns otherwise have equal norms"
            )
        checked_workload(self.workload)
        if self.matrix is not None:
            text = self.matrix if isinstance(self.matrix, str) else pack(self.matrix)
            self._settle(matrix=text)
            self._check_matrix()
            return
        if (self.epochs is None) == (self.bands is None):
            raise ValueError(
                f"epochs={self.epochs}, bands={self.bands}: give matrix=C, or one of epochs and "
                "bands for an optimal C (epochs=1 for a single participation)"
            )
        if self.steps is not None:
            raise unoptimized(self.steps, "a matrix")

    def _check_matrix(self) -> None:
        bands, n = self._diagonals.shape
        _check_size(n)
        wrong = np.flatnonzero(self._diagonals[0] <= 0)
        if wrong.size:
            t = int(wrong[0])
            raise ValueError(
                f"matrix[{t}, {t}]={self._diagonals[0, t]:.6g}: the diagonal must be positive, "
                f"since otherwise C^-1 does not exist at step {t}"
            )
        for name, value in (("steps", n), ("bands", bands)):
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name}={getattr(self, name)}, but the matrix has {name}={value}: leave "
                    f"{name} out"
                )
            self._settle(**{name: value})

    def __repr__(self) -> str:
        if self.matrix is None:
            declared = f"epochs={self.epochs}" if self.epochs else f"bands={self.bands}"
            declared += "" if self.equal_norms else ", equal_norms=False"
            return f"Dense({declared}, workload={self.workload!r})"
        return f"Dense(steps={self.steps}, bands={self.bands})"  # the text has megabytes

    @functools.cached_property
    def _diagonals(self) -> Array:
        assert isinstance(self.matrix, str)
        diagonals = diagonals_from_dense(unpack(self.matrix))
        diagonals.setflags(write=False)
        return diagonals

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One without restriction; banded where examples come back, which are then orthogonal."""
        if not run.dense:
            return ()
        if run.max_participations == 1:
            return (cls(workload=run.workload, epochs=1),)
        return (cls(workload=run.workload, bands=run.min_sep),)

    def bind(self, steps: int) -> Self:
        """The value for n = ``steps``, with an explicit matrix.

        Raises:
            ValueError: if the value is bound to another n, n > 2000, n is not a multiple of
                ``epochs``, ``bands > n``, the workload is for another n, or C^-1 blows up.
            RuntimeError: if the optimization does not converge.
        """
        bound = super().bind(steps)
        _ = bound._stable
        return bound

    def _optimized(self, steps: int) -> dict[str, Any]:
        """The matrix, whose bands are found from its entries."""
        _check_size(steps)
        self.workload.check(steps)
        if self.bands is not None:
            check_bands_fit(self.bands, steps)
        if self.epochs is not None and steps % self.epochs:
            raise ValueError(
                f"epochs={self.epochs} does not divide the {steps} steps of the run: use a number "
                "of epochs that does, or bands=steps // epochs, which needs no exact distance"
            )
        return {"matrix": pack(self._optimum(steps)), "bands": None}

    def _optimum(self, steps: int) -> Array:
        if self.bands is not None and self.bands < steps:
            start = BandMF(bands=self.bands).bind(steps).first_column(steps)
            return dense_from_diagonals(optimal_columns(self.workload, steps, start))
        # With n bands nothing but the norms is fixed, as for a single epoch.
        factor = workload_factor(self.workload, steps)
        return optimal_for_epochs(factor, self.epochs or 1, equal_norms=self.equal_norms).matrix

    @functools.cached_property
    def _stable(self) -> bool:
        self.check_stable("Dense(matrix=...)")
        return True

    def diagonals(self, steps: int) -> Array:
        """The entries of C by diagonals, shape (bands, n); ``[k, j]`` is C_{j+k,j}.

        Raises:
            ValueError: if the value is not bound, or is bound to another n.
        """
        self.check_bound(steps)
        return self._diagonals

    def magnitude(self) -> Dense:
        """|C|; itself if no entry is negative. Its C^-1 may blow up: it is not for noise."""
        if self.matrix is None:
            raise ValueError("this Dense has no matrix yet: use bind(steps) first")
        return self if self._magnitude is None else self._magnitude

    @functools.cached_property
    def _magnitude(self) -> Dense | None:
        if np.all(self._diagonals >= 0):
            return None
        return Dense(matrix=pack(dense_from_diagonals(np.abs(self._diagonals))))


def _check_size(steps: int) -> None:
    if steps > _LARGEST:
        raise ValueError(
            f"a Dense strategy of {steps} steps: at most {_LARGEST} can be stored as a matrix; use "
            "ColumnNormalizedBandMF, BandMF or BLT"
        )
