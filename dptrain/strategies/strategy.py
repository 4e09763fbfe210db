"""A strategy matrix C: its coefficients, its sensitivity and the error it leads to."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import Array, JsonValue, checks, digest
from dptrain.strategies.workloads import PREFIX_SUMS, Workload, checked_workload

_BLOCK_ENTRIES = 1 << 22  # of dense blocks: 32 MB of float64


_DENSE_UP_TO = 2000  # steps, for families that are optimized entry by entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunShape:
    """The run for which families of strategies offer values to be compared (``proposals``).

    Args:
        steps: n.
        bands: numbers of bands to try; 1, independent noise, is always tried and dropped here.
        max_participations: most steps in which one example takes part.
        min_sep: least distance between two of them; ``steps`` if ``None``.
        workload: which queries count.
        buffers: of families that approximate with a few buffers; 0 leaves them out.
        dense: include families that are optimized entry by entry (tens of seconds at n = 1,000).

    Raises:
        TypeError: if a value is of another type.
        ValueError: for bands that do not fit the steps, or ``dense`` with too many steps.
    """

    steps: int
    bands: Sequence[int] = ()
    max_participations: int = 1
    min_sep: int | None = None
    workload: Workload = PREFIX_SUMS
    buffers: int = 3
    dense: bool = False

    def __post_init__(self) -> None:
        steps = checks.steps(self.steps)
        bands: Any = self.bands
        if isinstance(bands, str) or not isinstance(bands, Iterable):
            start = checks.named("bands", bands)
            raise TypeError(f"{start} must be numbers of bands, such as (4, 16)")
        bands = tuple(sorted({checks.integer("bands", value) for value in bands} - {1}))
        if bands and bands[-1] > steps:
            raise ValueError(f"bands={bands[-1]} exceeds steps={steps}: leave it out")
        separation = steps if self.min_sep is None else checks.integer("min_sep", self.min_sep)
        if checks.flag("dense", self.dense) and steps > _DENSE_UP_TO:
            raise ValueError(f"dense=True with steps={steps}: at most {_DENSE_UP_TO}")
        settled = {
            "steps": steps,
            "bands": bands,
            "max_participations": checks.integer("max_participations", self.max_participations),
            "min_sep": separation,
            "workload": checked_workload(self.workload),
            "buffers": checks.integer("buffers", self.buffers, minimum=0),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)


class Strategy(JsonValue, ABC, family="strategy"):
    """Strategy matrix C, as an immutable value: what is released is equivalent to C x + σ z.

    C is n×n, lower triangular and entrywise non-negative, except that the tree families have
    ``rows(n)`` > n rows (a row is a node, in the order in which nodes complete). A left inverse W
    (W C = I; C^-1 where C is square) turns Z into noise: step t adds row t of W Z.

    A strategy may be declared before the number of steps is known (``BandMF(bands=16)``);
    ``bind`` returns the value for n steps, with explicit coefficients, and everything below
    works on a bound strategy. Binding a bound strategy to its own n returns it unchanged.

    Families are frozen, keyword-only dataclasses whose fields are JSON values, made known by
    ``register_strategy``. They are final: only classes that name ABC as a base can be derived from.

    Attributes:
        bands: participations at least ``bands`` steps apart have orthogonal columns; for a square
            C the number of its leading non-zero diagonals (1 for the identity, n for a dense C).
            An annotation, not an abstract property, so that a dataclass can hold it as a field.
            Only defined on a bound strategy where it depends on n.
    """

    bands: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        for base in cls.__mro__[1:]:
            if issubclass(base, Strategy) and ABC not in base.__bases__:
                raise TypeError(
                    f"{cls.__name__}: {base.__name__} cannot be subclassed, since its noise stream "
                    "would draw noise for the matrix of the base class; derive from one of its "
                    f"bases, such as {base.__bases__[0].__name__}"
                )
        super().__init_subclass__(**kwargs)

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Strategy]:
        """Values of this class to be compared for a run, not bound; none unless it says so.

        ``dptrain strategies`` lists them once the class is registered.
        """
        return ()

    @abstractmethod
    def bind(self, steps: int) -> Self:
        """This strategy for runs of ``steps`` steps.

        Raises:
            ValueError: if it cannot serve that many steps (``bands > steps``, another n).
        """

    def prefix(self, steps: int) -> Strategy | None:
        """A strategy bound to ``steps`` whose C is the leading block C[:steps, :steps] of this one.

        What the first steps release is what that one releases, as C is lower triangular. ``None``
        if none is known. Not what ``bind(steps)`` finds, which may be optimized for that length.

        Args:
            steps: in 1..n, of a value bound to n.
        """
        return None

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
        """|C|, which amplified accountants use in place of C; itself for C ≥ 0.

        The proof is docs/theory/mechanism.md#thm-signs.
        """
        return self

    @abstractmethod
    def column_norms(self, steps: int) -> Array:
        """Euclidean norm of every column of C, shape (steps,); the last ones are cut at row n."""

    @abstractmethod
    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """max ‖C x‖₂ over patterns with that many participations, at least ``min_sep`` apart."""

    @abstractmethod
    def sensitivity_is_exact(self, *, steps: int, max_participations: int, min_sep: int) -> bool:
        """True if ``sensitivity`` is the maximum itself rather than an upper bound on it."""

    def errors(self, steps: int, workload: Workload = PREFIX_SUMS) -> Array:
        """Standard deviation of the error of every query, per unit of σ: row norms of A W.

        Blocks of unit vectors go through W and A: O(n²) times the cost of a row, no n² memory.

        Returns:
            Shape (steps,).

        Raises:
            ValueError: if the workload is made for another n.
        """
        workload.check(steps)
        return self._row_norms(steps, workload.apply)

    def _row_norms(self, steps: int, apply: Callable[[Array], Array]) -> Array:
        """Euclidean norms of the rows of A W, from ``apply``, which multiplies by A."""
        rows = self.rows(steps)
        width = max(1, min(rows, _BLOCK_ENTRIES // rows))
        squared = np.zeros(steps)
        for start in range(0, rows, width):
            units = np.eye(rows, min(width, rows - start), -start)
            squared += np.sum(apply(self.solve(units)) ** 2, axis=1)
        return np.sqrt(squared)

    def noise_growth(self, steps: int) -> Array:
        """Standard deviation of every step's noise over that of independent noise, or a bound.

        Independent noise has 1/max_j ‖C e_j‖, which protects one participation as well. By default
        from the row norms of W, at the cost of ``errors``.

        Returns:
            Shape (steps,).
        """
        return self._row_norms(steps, lambda noise: noise) * float(self.column_norms(steps).max())

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
