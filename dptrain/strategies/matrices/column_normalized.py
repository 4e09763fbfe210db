"""Banded strategies whose columns have norm 1, down to the last."""

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
from dptrain.strategies.matrices.lower_triangular import LowerTriangular
from dptrain.strategies.packed import decode, encode
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.band_mf import BandMF
from dptrain.strategies.workloads import PREFIX_SUMS, Workload, checked_workload

_LARGEST = 10_000  # steps
_NORM_TOLERANCE = 1e-9


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ColumnNormalizedBandMF(Bindable, LowerTriangular):
    """Banded C ≥ 0 with columns of norm 1 and least ‖A C^-1‖_F².

    The banded matrix factorization of Choquette-Choo et al. 2023 (X = CᵀC banded, ones on its
    diagonal), with C itself as the variable.

    n·bands free entries, where ``BandMF`` has ``bands``: no worse, and a few per cent better
    for many bands. In a Toeplitz C the last columns are cut and cost less privacy than they might;
    here all participations cost the same, and at most m of them, ``bands`` or more apart, have a
    sensitivity of sqrt(m).

    ``ColumnNormalizedBandMF(bands=16)`` is a declaration; ``bind(steps)`` optimizes the entries and
    returns them in the value.

    Args:
        bands: choose at most the scheme's min-sep.
        workload: A. Prefix sums and ``MomentumSGD`` with positive learning rates are optimized in
            O(n·bands²) an iteration, others in O(n³) and for at most 2000 steps.
        coefficients: the entries of C by diagonals, shape (bands, n), ``[k, j]`` being C_{j+k,j}
            (0 for j + k ≥ n), with columns of norm 1; or the text that the value makes of it.
        steps: the n that the value is bound to; with coefficients the number of their columns.

    Raises:
        ValueError: if ``bands`` or ``steps`` is not a positive integer, ``bands > steps``, n > 10^4
            or the coefficients are not finite, not negative and as above.
    """

    bands: int
    workload: Workload = PREFIX_SUMS
    coefficients: str | npt.ArrayLike | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        steps = None if self.steps is None else checks.steps(self.steps)
        self._settle(bands=checks.integer("bands", self.bands), steps=steps)
        checked_workload(self.workload)
        if self.coefficients is None:
            if self.steps is not None:
                raise unoptimized(self.steps, "coefficients")
            return
        given = self.coefficients
        diagonals = (
            _unpacked(given, self.bands)
            if isinstance(given, str)
            else np.array(given, dtype=np.float64)
        )
        if diagonals.ndim != 2 or len(diagonals) != self.bands:
            raise ValueError(
                f"coefficients has the shape {diagonals.shape}: must be (bands, steps) with "
                f"bands={self.bands}"
            )
        if self.steps not in (None, diagonals.shape[1]):
            raise ValueError(
                f"steps={self.steps}, but the coefficients are for {diagonals.shape[1]}: leave "
                "steps out"
            )
        self._check_fits(diagonals.shape[1])
        _check_entries(diagonals)
        self._settle(steps=diagonals.shape[1], coefficients=_packed(diagonals))

    def _check_fits(self, steps: int) -> None:
        check_bands_fit(self.bands, steps)
        if steps > _LARGEST:
            raise ValueError(
                f"steps={steps}: ColumnNormalizedBandMF stores every entry and supports at most "
                f"{_LARGEST} steps; use BandMF, which is hardly worse there"
            )

    def __repr__(self) -> str:
        return (  # the text of the coefficients has megabytes
            f"ColumnNormalizedBandMF(bands={self.bands}, workload={self.workload!r}, "
            f"steps={self.steps})"
        )

    @functools.cached_property
    def _diagonals(self) -> Array:
        assert isinstance(self.coefficients, str)
        diagonals = _unpacked(self.coefficients, self.bands)
        diagonals.setflags(write=False)
        return diagonals

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One for every number of bands, if asked for."""
        if not run.dense:
            return ()
        return [cls(bands=bands, workload=run.workload) for bands in run.bands]

    def bind(self, steps: int) -> Self:
        """The value for n = ``steps``, with explicit coefficients.

        Raises:
            ValueError: if ``bands > steps``, n > 10^4 (2000 for some workloads), the value is bound
                to another n, the workload is for another n, or C^-1 blows up.
            RuntimeError: if the optimization fails.
        """
        bound = super().bind(steps)
        _ = bound._stable
        return bound

    def _optimized(self, steps: int) -> dict[str, Any]:
        """The coefficients."""
        self._check_fits(steps)
        self.workload.check(steps)
        start = BandMF(bands=self.bands).bind(steps).first_column(steps)
        return {"coefficients": optimal_columns(self.workload, steps, start)}

    @functools.cached_property
    def _stable(self) -> bool:
        self.check_stable(f"ColumnNormalizedBandMF(bands={self.bands})")
        return True

    def diagonals(self, steps: int) -> Array:
        """The entries of C by diagonals, shape (bands, n); ``[k, j]`` is C_{j+k,j}.

        Raises:
            ValueError: if the value is not bound, or is bound to another n.
        """
        self.check_bound(steps)
        return self._diagonals


def _inside(bands: int, steps: int) -> npt.NDArray[np.bool_]:
    """A mask of the entries of the array of diagonals that are entries of C."""
    return np.asarray(np.arange(bands)[:, None] + np.arange(steps) < steps)


def _check_entries(diagonals: Array) -> None:
    bands, steps = diagonals.shape
    wrong = np.argwhere(~(np.isfinite(diagonals) & (diagonals >= 0)))
    if wrong.size:
        k, j = wrong[0]
        raise ValueError(
            f"coefficients[{k}, {j}]={diagonals[k, j]}: must be finite and not negative (Dense "
            "takes negative entries)"
        )
    if np.any(diagonals[~_inside(bands, steps)]):
        raise ValueError("coefficients[k, j] must be 0 for j + k >= steps: C has no such row")
    zero = np.flatnonzero(diagonals[0] == 0)
    if zero.size:
        raise ValueError(
            f"coefficients[0, {zero[0]}]=0: the diagonal must be positive, since otherwise C^-1 "
            f"does not exist at step {zero[0]}"
        )
    norms = np.linalg.norm(diagonals, axis=0)
    off = np.flatnonzero(np.abs(norms - 1) > _NORM_TOLERANCE)
    if off.size:
        raise ValueError(
            f"coefficients: column {off[0]} has the norm {norms[off[0]]:.9g}, not 1: divide every "
            "column by its norm, or use Dense, which allows any norm"
        )


def _packed(diagonals: Array) -> str:
    """Base64 of the entries of C, diagonal after diagonal, as little-endian float64."""
    return encode(diagonals[_inside(*diagonals.shape)])


def _unpacked(text: str, bands: int) -> Array:
    """The array that ``_packed`` made the text of."""
    remedy = "coefficients: not the text of a packed band ({}); give an array (bands, steps)"
    try:
        entries = decode(text)
    except ValueError as error:
        raise ValueError(remedy.format(error)) from error
    missing = bands * (bands - 1) // 2  # entries past row n
    steps, rest = divmod(entries.size + missing, bands)
    if rest or steps < bands:
        raise ValueError(remedy.format(f"{8 * entries.size} bytes for bands={bands}"))
    diagonals = np.zeros((bands, steps))
    diagonals[_inside(bands, steps)] = entries
    return diagonals
