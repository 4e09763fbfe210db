"""Privacy loss of one full batch under zero-out: two Gaussian mixtures shifted apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import expit, ndtr

from dptrain.accounting.pld import LossDistribution, connect_the_dots
from dptrain.accounting.subsampled_gaussian import TAIL, Array, Spread, interval_masses

_TABLE = 4096
_MOST_ITERATIONS = 200


@dataclasses.dataclass(frozen=True)
class ShiftedMixtures:
    """P = (1-q) N(0, σ²) + q N(2, σ²) against Q = (1-q) N(0, σ²) + q N(-1, σ²), 0 < q < 1.

    With A = 1 - q + q exp((2x - 2)/σ²), which grows with x, and B = 1 - q + q exp((-x - 1/2)/σ²),
    which falls, the loss is log dP/dQ = log A - log B: it grows strictly with x, from -∞ to ∞.
    """

    probability: float
    sigma: float

    def __post_init__(self) -> None:
        if not 0.0 < self.probability < 1.0:
            raise ValueError(f"probability={self.probability}: must lie strictly between 0 and 1")

    @property
    def ends(self) -> tuple[float, float]:
        """Beyond these x both laws have mass under 1e-40."""
        return -1.0 - TAIL * self.sigma, 2.0 + TAIL * self.sigma

    def loss(self, x: Array) -> Array:
        """log dP/dQ at x."""
        right, left = self._exponents(x)
        return self._log_mean(right) - self._log_mean(left)

    def _exponents(self, x: Array) -> tuple[Array, Array]:
        variance = self.sigma**2
        return (2.0 * x - 2.0) / variance, (-x - 0.5) / variance

    def _log_mean(self, exponent: Array) -> Array:
        """log(1 - q + q e^exponent), with relative precision where it is near 0."""
        q = self.probability
        small = np.log1p(q * np.expm1(np.minimum(exponent, 1.0)))
        large = np.logaddexp(math.log1p(-q), math.log(q) + exponent)
        return np.where(exponent > 1.0, large, small)

    def _slope(self, x: Array) -> Array:
        """Derivative of the loss; the posteriors of the shifted components appear in it."""
        right, left = self._exponents(x)
        odds = math.log(self.probability) - math.log1p(-self.probability)
        return np.asarray((2.0 * expit(odds + right) + expit(odds + left)) / self.sigma**2)

    def where_loss_is(self, losses: Array) -> Array:
        """The x of the given losses, cut to the ends: Newton's steps within shrinking brackets."""
        table = np.linspace(*self.ends, _TABLE + 1)
        values = self.loss(table)
        wanted = np.clip(losses, values[0], values[-1])
        cell = np.clip(np.searchsorted(values, wanted) - 1, 0, _TABLE - 1)
        low, high = table[cell], table[cell + 1]
        x = 0.5 * (low + high)
        precise = 4.0 * np.finfo(float).eps * (1.0 + TAIL * self.sigma)
        for _ in range(_MOST_ITERATIONS):
            gap = self.loss(x) - wanted
            low, high = np.where(gap <= 0, x, low), np.where(gap >= 0, x, high)
            with np.errstate(divide="ignore", invalid="ignore"):
                newton = x - gap / self._slope(x)
            # Comparisons with nan are false: the bracket's middle is taken.
            following = np.where((newton >= low) & (newton <= high), newton, 0.5 * (low + high))
            moved = float(np.abs(following - x).max())
            x = following
            if moved <= precise:
                return x
        raise RuntimeError(f"losses of {self} were not inverted in {_MOST_ITERATIONS} steps")

    def spread(self, *, remove: bool) -> Spread:
        """Of log dP/dQ under P (remove) or under Q (add)."""
        x = np.linspace(*self.ends, 8001)
        shift = 2.0 if remove else -1.0
        plain, moved = (
            np.exp(-0.5 * (x / self.sigma) ** 2),
            np.exp(-0.5 * ((x - shift) / self.sigma) ** 2),
        )
        density = (1.0 - self.probability) * plain + self.probability * moved
        return Spread.of(self.loss(x), density)

    def discretised(self, *, spacing: float, remove: bool) -> LossDistribution:
        """Discretised loss of (P, Q) (remove) or (Q, P) (add), rounded up.

        The mass beyond either end counts as an infinite loss.
        """
        left, right = self.ends
        bottom, top = self.loss(np.array([left, right]))
        lowest, highest = math.floor(bottom / spacing), math.ceil(top / spacing)
        x = self.where_loss_is(spacing * np.arange(lowest, highest + 1))
        # The outermost cells may be cut short by the ends; their losses stay within the cells.
        x[0], x[-1] = left, right
        p, q = self._masses(x, 2.0), self._masses(x, -1.0)
        outside = self._outside(2.0 if remove else -1.0)
        return connect_the_dots(
            spacing=spacing,
            lowest=lowest if remove else -highest,
            upper=p if remove else q[::-1],
            lower=q if remove else p[::-1],
            below=0.0,
            above=outside,
        )

    def _masses(self, x: Array, shift: float) -> Array:
        plain = interval_masses(x / self.sigma)
        moved = interval_masses((x - shift) / self.sigma)
        return (1.0 - self.probability) * plain + self.probability * moved

    def _outside(self, shift: float) -> float:
        left, right = self.ends
        plain = ndtr(left / self.sigma) + ndtr(-right / self.sigma)
        moved = ndtr((left - shift) / self.sigma) + ndtr((shift - right) / self.sigma)
        return float((1.0 - self.probability) * plain + self.probability * moved)


def public_mixture(parts: Sequence[tuple[float, LossDistribution]]) -> LossDistribution:
    """The loss when a public coin, the same in both worlds, picks one of the pairs.

    Args:
        parts: weights and losses of the same spacing. Weights that are rounded up may add up to
            more than 1: all masses are then at least the true ones, and so is every δ.
    """
    spacing = parts[0][1].spacing
    if any(part.spacing != spacing for _, part in parts):
        raise ValueError("parts: the losses need the same spacing; discretise them on one grid")
    lowest = min(part.lowest for _, part in parts)
    size = max(part.lowest + part.log_mass.size for _, part in parts) - lowest
    mass = np.zeros(size)
    for weight, part in parts:
        first = part.lowest - lowest
        mass[first : first + part.log_mass.size] += weight * np.exp(part.log_mass)
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    infinity = sum(weight * part.infinity for weight, part in parts)
    return LossDistribution(spacing, lowest, log_mass, infinity)


def public_spread(parts: Sequence[tuple[float, Spread]]) -> Spread:
    """The spread of such a mixture."""
    mean = sum(weight * part.mean for weight, part in parts)
    variance = sum(weight * (part.variance + (part.mean - mean) ** 2) for weight, part in parts)
    return Spread(
        mean, variance, min(part.low for _, part in parts), max(part.high for _, part in parts)
    )
