"""Privacy loss distributions on a grid, composed with themselves or with others, however deep.

Steps dominated given any past are dominated together by the product of their pairs
(docs/theory/composition.md#thm-composition; ``test_equals_direct_convolution``; Zhu, Dong & Wang
2022, Theorem 10, arXiv 2106.08567).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dptrain.accounting.losses.loss_distribution import LossDistribution, connect_the_dots
from dptrain.accounting.losses.tilted_curve import Masses, TiltedCurve
from dptrain.core import Array

# Masses of the rarest losses that the curves of the levels count as infinite. Kept, they would hide
# what is below them: tilts would look at them instead, and their FFT is rounding elsewhere.
_CHARGES = (1e-17, 1e-30, 0.0)
# The next level joins where δ is below so many times the charge.
_ABOVE = 1e4


class HeterogeneousComposition:
    """δ(ε) and ε(δ) of independent losses, each so many times, rounded up, on one curve.

    ``parts`` may be an iterator; of each only the masses that are not 0 are kept.

    Args:
        parts: loss distributions of equal spacing, and how often each occurs (≥ 1).

    Raises:
        ValueError: if there are no parts, or they differ in spacing, or a count is not positive.
    """

    def __init__(self, parts: Iterable[tuple[LossDistribution, int]]) -> None:
        self._parts: list[Masses] = []
        for single, count in parts:
            spacing = self._parts[0].spacing if self._parts else single.spacing
            if single.spacing != spacing:
                raise ValueError(
                    f"parts: their grids have the spacings {spacing} and {single.spacing}; "
                    "discretize all losses on one grid"
                )
            if count < 1:
                raise ValueError(
                    f"parts: a count is {count}: must be positive, so leave out losses that do not "
                    "occur"
                )
            self._parts.append(Masses(single, count))
        if not self._parts:
            raise ValueError("parts: must contain at least one loss distribution")
        self._levels: list[TiltedCurve | None] = [None] * len(_CHARGES)

    @property
    def spacing(self) -> float:
        """Distance of the grid points of the losses."""
        return self._parts[0].spacing

    def _level(self, number: int) -> TiltedCurve:
        """The curve that counts the rarest losses as infinite; computed once."""
        found = self._levels[number]
        if found is None:
            total = sum(part.count for part in self._parts)
            found = TiltedCurve([part.cut(_CHARGES[number] / total) for part in self._parts])
            self._levels[number] = found
        return found

    def _suffices(self, number: int, delta: Array) -> npt.NDArray[np.bool_]:
        """True at a δ of a level if what the level counts as infinite does not matter there."""
        return np.asarray((delta >= _ABOVE * _CHARGES[number]) | (number == len(_CHARGES) - 1))

    def delta(self, epsilon: npt.ArrayLike) -> Array:
        """δ at every ε ≥ 0, rounded up."""
        wanted = np.atleast_1d(np.asarray(epsilon, float))
        result, left = np.ones(wanted.shape), np.ones(wanted.shape, bool)
        for number in range(len(_CHARGES)):
            found = self._level(number).delta(wanted[left])
            result[left] = np.minimum(result[left], found)
            left[left] = ~self._suffices(number, found)
            if not left.any():
                break
        return result.reshape(np.shape(epsilon))

    def epsilon(self, delta: float) -> float:
        """Least ε ≥ 0 at δ, rounded up, on the curve of ``delta``."""
        found, start = math.inf, 0.0
        for number in range(len(_CHARGES)):
            level = self._level(number)
            found = min(found, level.epsilon(delta))
            # Before ``start`` this level is not read.
            answer = max(found, start)
            if answer < math.inf and self._suffices(number, level.delta(answer)):
                break
            start = level.epsilon(_ABOVE * _CHARGES[number])
        return answer


__all__ = ["Composition", "LossDistribution", "connect_the_dots"]


class Composition(HeterogeneousComposition):
    """δ(ε) and ε(δ) of ``count`` independent copies of a loss distribution, rounded up."""

    def __init__(self, single: LossDistribution, count: int) -> None:
        super().__init__([(single, count)])
        self._single = single
