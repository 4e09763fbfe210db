"""Noise that takes back a part of the last step's noise, and of no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

import numpy as np

from dptrain.core import Array, checks
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.inverse_banded import InverseBandedToeplitz


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True)
class LambdaCGD(InverseBandedToeplitz):
    """Noise z_t - λ z_{t-1}: C^-1 has the coefficients 1, -λ (DP-λCGD, Kalinin et al. 2026).

    Hence C_{t,j} = λ^{t-j} (arXiv 2601.22334), non-negative and non-increasing, so that the
    sensitivity is exact for any schedule. λ = 0 is independent noise. Where noise is drawn again
    from its seed, a step keeps nothing.

    This is the Toeplitz C. Variants that scale its columns to norm one differ from it, up to a
    factor, in the last few columns only.

    Args:
        cancellation: λ in [0, 1), the part of the last step's noise that is taken back.
        steps: the n that the value is bound to; set by ``bind``.

    Raises:
        ValueError: if λ is out of range, ``steps`` is not a positive integer, or one step is to
            have two coefficients (λ > 0 with ``steps = 1``).

    Example:
        >>> LambdaCGD(cancellation=0.5).bind(4).first_column(4).tolist()
        [1.0, 0.5, 0.25, 0.125]
    """

    cancellation: float
    steps: int | None = None

    def __post_init__(self) -> None:
        part = checks.number("cancellation", self.cancellation, minimum=0, below=1)
        self._settle(cancellation=part)
        if self.steps is not None:
            self._settle(steps=self.check_fits(self.steps))

    @property
    def inverse_bands(self) -> int:  # type: ignore[override]
        """2, or 1 where nothing is taken back."""
        return 2 if self.cancellation else 1

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """A weak, a middling and a strong cancellation, for runs of more than one step."""
        parts = (0.5, 0.8, 0.95) if run.steps > 1 else ()
        return [cls(cancellation=part) for part in parts]

    def prefix(self, steps: int) -> LambdaCGD:
        """The same λ; of one step, nothing is there to take back."""
        steps = checks.integer("steps", steps, maximum=self.steps)
        part = self.cancellation if steps > 1 else 0.0
        return dataclasses.replace(self, cancellation=part, steps=steps)

    def filter(self) -> Array:
        """1, -λ; without the second where λ = 0."""
        return np.array([1.0, -self.cancellation][: self.inverse_bands])
