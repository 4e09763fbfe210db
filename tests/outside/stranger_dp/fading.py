"""A strategy: noise of which every step takes back a share of what the step before added."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

import numpy as np
from scipy.signal import lfilter

from dptrain import register_strategy
from dptrain.core import checks
from dptrain.strategies import RunShape, Strategy


@register_strategy(planned=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fading(Strategy):
    """C_{t,s} = r^(t-s) for s ≤ t, so that the noise is y_t = z_t - r z_{t-1}.

    C is Toeplitz with coefficients that fall and are positive, for which participations as early
    and as close as they may be are the worst (Kalinin & Lampert 2024, arXiv 2405.13763, Theorem 2):
    the sensitivity is ‖C x‖ for ones in steps 0, b, 2b, …

    Args:
        ratio: r in (0, 1).
        steps: n, once it is bound.
    """

    ratio: float
    steps: int | None = None

    def __post_init__(self) -> None:
        ratio = checks.number("ratio", self.ratio, above=0, below=1, owner="Fading")
        object.__setattr__(self, "ratio", ratio)
        if self.steps is not None:
            object.__setattr__(self, "steps", checks.steps(self.steps, owner="Fading"))

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One that takes back half."""
        return (cls(ratio=0.5),)

    @property
    def bands(self) -> int:  # type: ignore[override]
        """n: no two columns are orthogonal."""
        if self.steps is None:
            raise ValueError("this Fading is not bound to a number of steps: use bind(steps) first")
        return self.steps

    def bind(self, steps: int) -> Self:
        """The same r for n steps."""
        steps = checks.steps(steps)
        if self.steps not in (None, steps):
            raise ValueError(f"this Fading is bound to {self.steps} steps, not {steps}")
        return self if self.steps == steps else dataclasses.replace(self, steps=steps)

    def columns(self, steps: int, indices: object) -> np.ndarray:
        """Columns of C, shape (steps, len(indices))."""
        chosen = np.asarray(indices)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < steps):
            raise ValueError(f"columns {indices!r}: C has {steps}")
        lag = np.arange(steps)[:, None] - chosen
        return np.where(lag >= 0, self.ratio ** np.maximum(lag, 0), 0.0)

    def apply(self, x: object) -> np.ndarray:
        """u_t = r u_{t-1} + x_t."""
        return lfilter([1.0], [1.0, -self.ratio], np.asarray(x, dtype=np.float64), axis=0)

    def solve(self, z: object) -> np.ndarray:
        """z_t - r z_{t-1}."""
        return lfilter([1.0, -self.ratio], [1.0], np.asarray(z, dtype=np.float64), axis=0)

    def column_norms(self, steps: int) -> np.ndarray:
        """The geometric series, cut at row n: shape (steps,)."""
        left = steps - np.arange(steps)
        return np.sqrt((1 - self.ratio ** (2 * left)) / (1 - self.ratio**2))

    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """Of the earliest and closest participations."""
        m = checks.integer("max_participations", max_participations)
        b = checks.integer("min_sep", min_sep)
        x = np.zeros(steps)
        x[: m * b : b] = 1.0
        return float(np.linalg.norm(self.apply(x)))

    def sensitivity_is_exact(self, *, steps: int, max_participations: int, min_sep: int) -> bool:
        """Always."""
        return True
