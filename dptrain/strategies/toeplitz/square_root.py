"""The full square root of the workload as a strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

from dptrain.core import Array, checks
from dptrain.strategies.binding import Bindable
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.square_root_series import (
    checked_decay,
    inverse_square_root_coefficients,
    square_root_coefficients,
)
from dptrain.strategies.toeplitz.toeplitz import Toeplitz


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareRoot(Bindable, Toeplitz):
    """Toeplitz C = A_{α,β}^{1/2} (Henzinger, Upadhyay & Upadhyay 2023; Kalinin & Lampert 2024).

    ``BSR(bands=n)`` with both directions in closed form: C has the coefficients of
    ((1 - αx)(1 - βx))^{-1/2}, C^-1 those of the reciprocal, and products go through the FFT.
    Coefficients are positive and non-increasing, so the sensitivity is exact for any schedule.

    Args:
        alpha: weight decay factor α in (0, 1].
        beta: momentum β in [0, α).
        steps: the n that the value is bound to; set by ``bind``.

    Raises:
        ValueError: if α or β is out of range, or ``steps`` is not a positive integer.

    Example:
        >>> SquareRoot().bind(4).inverse_column(4).tolist()
        [1.0, -0.5, -0.125, -0.0625]
    """

    alpha: float = 1.0
    beta: float = 0.0
    steps: int | None = None

    def __post_init__(self) -> None:
        alpha, beta = checked_decay(self.alpha, self.beta)
        steps = None if self.steps is None else checks.steps(self.steps)
        self._settle(alpha=alpha, beta=beta, steps=steps)

    @property
    def bands(self) -> int:  # type: ignore[override]
        """n: every coefficient is positive.

        Raises:
            ValueError: if the value is not bound.
        """
        return self.bound_steps

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """The one of prefix sums."""
        return (cls(),)

    def prefix(self, steps: int) -> SquareRoot:
        """The value for so many steps: the coefficients do not depend on n."""
        return dataclasses.replace(self, steps=checks.integer("steps", steps, maximum=self.bands))

    def first_column(self, steps: int) -> Array:
        """The first n coefficients of A_{α,β}^{1/2}.

        Raises:
            ValueError: if the value is not bound, or is bound to another n.
        """
        steps = self.check_bound(steps)
        return square_root_coefficients(steps, self.alpha, self.beta)

    def inverse_column(self, steps: int) -> Array:
        """The first n coefficients of A_{α,β}^{-1/2}.

        Raises:
            ValueError: if the value is not bound, or is bound to another n.
        """
        steps = self.check_bound(steps)
        return inverse_square_root_coefficients(steps, self.alpha, self.beta)
