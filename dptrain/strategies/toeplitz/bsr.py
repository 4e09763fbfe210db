"""Banded square root: the closed-form strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

from dptrain.core import Array, checks
from dptrain.strategies.binding import check_bands_fit
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.square_root_series import checked_decay, square_root_coefficients
from dptrain.strategies.toeplitz.toeplitz import BandedToeplitz

__all__ = ["BSR", "square_root_coefficients"]


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True)
class BSR(BandedToeplitz):
    """Toeplitz C with the first ``bands`` coefficients of A_{α,β}^{1/2} (Kalinin & Lampert 2024).

    A_{α,β} is the workload of SGD with momentum β and weight decay factor α: Toeplitz, with
    generating function 1/((1 - αx)(1 - βx)). The defaults are prefix sums.

    The coefficients are positive and non-increasing, being α^k times the moments of a law on
    [0, 1], so that the sensitivity is exact for any schedule. They fall strictly, so by the
    Eneström-Kakeya theorem C^-1 does not grow with n either.

    Args:
        bands: number of coefficients; ``bands = steps`` is the full square root.
        alpha: weight decay factor α in (0, 1].
        beta: momentum β in [0, α).

    Raises:
        ValueError: if ``bands`` is not a positive integer, or α or β is out of range.

    Example:
        >>> BSR(bands=3).first_column(10).tolist()
        [1.0, 0.5, 0.375]
    """

    bands: int
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        bands = checks.integer("bands", self.bands)
        alpha, beta = checked_decay(self.alpha, self.beta)
        self._settle(bands=bands, alpha=alpha, beta=beta)

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One for every number of bands."""
        return [cls(bands=bands) for bands in run.bands]

    def bind(self, steps: int) -> Self:
        """Itself: the coefficients do not depend on n.

        Raises:
            ValueError: if ``bands > steps``.
        """
        check_bands_fit(self.bands, checks.steps(steps))
        return self

    def prefix(self, steps: int) -> BSR:
        """The same coefficients, as many as fit."""
        return dataclasses.replace(self, bands=min(self.bands, checks.steps(steps)))

    def first_column(self, steps: int) -> Array:
        """The first min(bands, n) coefficients of A_{α,β}^{1/2}."""
        count = min(self.bands, checks.steps(steps))
        return square_root_coefficients(count, self.alpha, self.beta)
