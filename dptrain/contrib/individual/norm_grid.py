"""A grid of gradient norms, as shares of the clipping norm, to which norms are rounded up."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

from dptrain.core import Array, checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormGrid:
    """Norm ratios ‖g‖/R: 0, then ``smallest`` to 1, each about ``ratio`` times the one before.

    Koskela, Tobaben & Honkela 2023 (arXiv 2209.15596), Appendix D.2, round σ̃ = σR/‖g‖ *down*,
    which is rounding the norm up; equal steps of the logarithm make the relative error of ε about
    the same for small and large norms.

    Args:
        smallest: the least positive ratio, in (0, 1]; smaller norms are rounded up to it.
        ratio: of neighboring values, above 1.

    Raises:
        TypeError: if a value is no number.
        ValueError: if a value is out of range.
    """

    smallest: float = 1e-3
    ratio: float = 1.01

    def __post_init__(self) -> None:
        checks.number("smallest", self.smallest, above=0, maximum=1, remedy="e.g. 1e-3")
        checks.number("ratio", self.ratio, above=1, remedy="e.g. 1.01")

    @functools.cached_property
    def values(self) -> Array:
        """The grid, ascending: first 0, last exactly 1."""
        intervals = max(1, math.ceil(-math.log(self.smallest) / math.log(self.ratio)))
        positive = self.smallest ** (np.arange(intervals, -1, -1) / intervals)
        return np.unique(np.concatenate([[0.0], positive]))

    def bucket(self, ratios: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Index of the least grid value that is not below each ratio.

        Raises:
            ValueError: if a ratio is not in [0, 1].
        """
        wanted = np.asarray(ratios, float)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() <= 1):  # NaN fails both
            raise ValueError("ratios: norms divided by the clipping norm must lie in [0, 1]")
        return np.searchsorted(self.values, wanted, side="left")

    def counts(self, ratios: npt.ArrayLike) -> npt.NDArray[np.uint32]:
        """Number of times that each grid value occurs, norms rounded up: (examples, len(values)).

        Args:
            ratios: norm ratios in [0, 1] of every example at every step, shape (examples, steps).

        Raises:
            ValueError: if a ratio is not in [0, 1] or the shape is another.
        """
        buckets = self.bucket(ratios)
        if buckets.ndim != 2:
            raise ValueError(f"ratios: shape {buckets.shape}, expected (examples, steps)")
        examples, size = len(buckets), len(self.values)
        flat = buckets + size * np.arange(examples)[:, None]
        found = np.bincount(flat.ravel(), minlength=examples * size)
        return found.reshape(examples, size).astype(np.uint32)
