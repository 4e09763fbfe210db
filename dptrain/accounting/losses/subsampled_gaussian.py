"""Privacy loss of one Poisson-subsampled Gaussian step, in both directions."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from dptrain.accounting.losses.composition import LossDistribution, connect_the_dots
from dptrain.core import Array

# Normal tails cut at this many standard deviations: mass under 1e-40, charged to δ.
TAIL = 13.5
MOST_POINTS = 1 << 18


def loss(x: Array, *, probability: float, sigma: float) -> Array:
    """log dP/dQ at x for P = (1-p) N(0, σ²) + p N(1, σ²) and Q = N(0, σ²)."""
    exponent = (2.0 * x - 1.0) / (2.0 * sigma**2)
    if probability == 1.0:
        return exponent
    return np.logaddexp(math.log1p(-probability), math.log(probability) + exponent)


def _where_loss_is(losses: Array, *, probability: float, sigma: float) -> Array:
    """The x at which the loss has these values (-∞ where it cannot get that low)."""
    if probability == 1.0:
        return sigma**2 * losses + 0.5
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # log((e^L - (1-p))/p), written so that neither a large nor a small L loses digits.
        small = np.log(np.maximum(np.expm1(losses) + probability, 0.0))
        large = losses + np.log1p(-np.exp(math.log1p(-probability) - losses))
        log_ratio = np.where(losses > 1.0, large, small) - math.log(probability)
    return sigma**2 * log_ratio + 0.5


def interval_masses(edges: Array) -> Array:
    """Standard normal mass between neighboring edges, with relative precision in both tails."""
    middle = 0.5 * (edges[1:] + edges[:-1])
    left, right = ndtr(edges), ndtr(-edges)
    masses: Array = np.where(middle > 0, right[:-1] - right[1:], left[1:] - left[:-1])
    return np.maximum(masses, 0.0)


class Spread(NamedTuple):
    """Mean, variance, least and greatest value of a step's loss, roughly: for choosing a grid."""

    mean: float
    variance: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Array, density: Array) -> Spread:
        """The spread of losses on an even, ascending grid of x, given a multiple of its density."""
        density = density / density.sum()
        mean = float(density @ values)
        variance = float(density @ (values - mean) ** 2)
        return cls(mean, variance, float(values[0]), float(values[-1]))

    def spacing(self, count: int) -> float:
        """A 500th of the standard deviation and at most 1, coarser where memory demands it.

        The discretization adds at most a quarter of the squared spacing to the variance of a
        step's loss, 1e-6 of it at the default.
        """
        deviation = math.sqrt(self.variance)
        window = 20.0 * math.sqrt(count) * deviation
        span = self.high - self.low
        return max(min(deviation / 500.0, 1.0), span / MOST_POINTS, window / MOST_POINTS)


def spread(*, probability: float, sigma: float, remove: bool) -> Spread:
    """The spread of log dP/dQ under P (remove) or under Q (add)."""
    x = np.linspace(-TAIL * sigma, 1.0 + TAIL * sigma, 8001)
    density = np.exp(-0.5 * (x / sigma) ** 2)
    if remove:
        moved = np.exp(-0.5 * ((x - 1.0) / sigma) ** 2)
        density = (1.0 - probability) * density + probability * moved
    return Spread.of(loss(x, probability=probability, sigma=sigma), density)


def subsampled_gaussian(
    *, probability: float, sigma: float, count: int, remove: bool
) -> LossDistribution:
    """Discretized loss of (P, Q) (remove) or (Q, P) (add) for one step.

    P = (1-p) N(0, σ²) + p N(1, σ²), Q = N(0, σ²): the dominating pair of the Poisson-subsampled
    Gaussian (Zhu, Dong & Wang 2022, arXiv 2106.08567). ``count`` is how often it will be composed;
    it only sets the spacing.
    """
    h = spread(probability=probability, sigma=sigma, remove=remove).spacing(count)
    return subsampled_gaussian_on_grid(
        probability=probability, sigma=sigma, spacing=h, remove=remove
    )


def subsampled_gaussian_on_grid(
    *, probability: float, sigma: float, spacing: float, remove: bool
) -> LossDistribution:
    """``subsampled_gaussian`` with a given spacing."""
    h = spacing
    ends = np.array([-TAIL * sigma, 1.0 + TAIL * sigma])
    bottom, top = loss(ends, probability=probability, sigma=sigma)
    lowest, highest = math.floor(bottom / h), math.ceil(top / h)
    grid = h * np.arange(lowest, highest + 1)
    x = _where_loss_is(grid, probability=probability, sigma=sigma)
    q = interval_masses(x / sigma)
    p = (1.0 - probability) * q + probability * interval_masses((x - 1.0) / sigma)
    if remove:
        left, right = float(x[0]), float(x[-1])
        return connect_the_dots(
            spacing=h,
            lowest=lowest,
            upper=p,
            lower=q,
            below=_mixture_mass(-left, -1.0, probability, sigma),
            above=_mixture_mass(right, 1.0, probability, sigma),
        )
    return connect_the_dots(
        spacing=h,
        lowest=-highest,
        upper=q[::-1],
        lower=p[::-1],
        below=float(ndtr(-x[-1] / sigma)),
        above=float(ndtr(x[0] / sigma)),
    )


def _mixture_mass(at: float, sign: float, probability: float, sigma: float) -> float:
    """P-mass of sign·x > ``at`` (sign +1: right of ``at``; -1: left of -``at``)."""
    plain = float(ndtr(-at / sigma))
    moved = float(ndtr((sign - at) / sigma))
    return (1.0 - probability) * plain + probability * moved
