"""Banded inverse square root: the closed-form strategy whose noise has a short memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

from dptrain.core import Array, checks
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.inverse_banded import InverseBandedToeplitz
from dptrain.strategies.toeplitz.square_root_series import (
    checked_decay,
    inverse_square_root_coefficients,
)


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True)
class BISR(InverseBandedToeplitz):
    """C^-1 with the first coefficients of A_{α,β}^{-1/2} (Kalinin et al. 2025, arXiv 2505.12128).

    A_{α,β} has the generating function 1/((1 - αx)(1 - βx)): SGD with momentum β and weight decay
    factor α; the defaults are prefix sums, with g = 1, -1/2, -1/8, -1/16, -5/128, …

    The sensitivity is exact for any schedule, because c ≥ 0 is non-increasing for every α, β and
    number of bands (docs/theory/strategies.md#thm-bisr; ``test_coefficients_do_not_increase``).

    Args:
        inverse_bands: number of coefficients of C^-1; ``inverse_bands = steps`` is the full square
            root.
        alpha: weight decay factor α in (0, 1].
        beta: momentum β in [0, α).
        steps: the n that the value is bound to; set by ``bind``.

    Raises:
        ValueError: if ``inverse_bands`` or ``steps`` is not a positive integer,
            ``inverse_bands > steps``, or α or β is out of range.

    Example:
        >>> BISR(inverse_bands=3).bind(4).first_column(4).tolist()
        [1.0, 0.5, 0.375, 0.25]
    """

    inverse_bands: int
    alpha: float = 1.0
    beta: float = 0.0
    steps: int | None = None

    def __post_init__(self) -> None:
        bands = checks.integer("inverse_bands", self.inverse_bands)
        alpha, beta = checked_decay(self.alpha, self.beta)
        self._settle(inverse_bands=bands, alpha=alpha, beta=beta)
        if self.steps is not None:
            self._settle(steps=self.check_fits(self.steps))

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One for every number of bands, of the inverse."""
        return [cls(inverse_bands=bands) for bands in run.bands]

    def prefix(self, steps: int) -> BISR:
        """The same coefficients of C^-1, as many as fit."""
        steps = checks.integer("steps", steps, maximum=self.steps)
        bands = min(self.inverse_bands, steps)
        return dataclasses.replace(self, inverse_bands=bands, steps=steps)

    def filter(self) -> Array:
        """The first ``inverse_bands`` coefficients of A_{α,β}^{-1/2}."""
        return inverse_square_root_coefficients(self.inverse_bands, self.alpha, self.beta)
