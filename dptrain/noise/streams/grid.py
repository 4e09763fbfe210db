"""The grids of the noise: how fine they may be, given the number formats and the noise."""

from __future__ import annotations

import math

import numpy as np

from dptrain.noise.generators.rounded import FINEST
from dptrain.strategies import Strategy
from dptrain.strategies.matrices import LowerTriangular
from dptrain.strategies.toeplitz import Toeplitz

DEVIATIONS = 13.0
"""A normal exceeds as many standard deviations with a probability of 1e-38."""

UNIT = 2.0**-53
"""Relative error of an operation in float64."""

LARGEST_GROWTH = 100.0
"""Standard deviation of a step's noise over that of uncorrelated noise. The optimized families and
the closed forms stay below 3; the bound on trees is 2 sqrt(log2(n) + 1) at most."""


def check_growth(strategy: Strategy, steps: int) -> None:
    """Refuse a strategy whose noise would leave the sum of the gradients a coarse grid.

    Number formats hold noise of s times the usual size in units that are s times as large
    (docs/theory/noise.md#thm-release); rounding the sum to them, which clipping pays for, then
    takes s times as large a share of R.

    Args:
        strategy: bound to ``steps``.
        steps: n.

    Raises:
        ValueError: naming the first step (from 0) at which the noise is too large.
    """
    growth = strategy.noise_growth(steps)
    # The negation also catches NaN, which compares false with everything.
    large = np.flatnonzero(~(growth <= LARGEST_GROWTH))
    if large.size:
        t = int(large[0])
        raise ValueError(
            f"strategy={type(strategy).__name__}: at step {t} its noise has {growth[t]:.3g} times "
            f"the standard deviation of uncorrelated noise, more than {LARGEST_GROWTH:g}, so "
            "rounding the sums would use up most of max_grad_norm. Use coefficients that decrease "
            "from c_0 on, or a shorter run"
        )


def finest_bits(deviation: float) -> int:
    """The largest b for which normals can be drawn and noise be held in units of 2^-b.

    ``deviation`` is that of the noise, in standard deviations of Z.
    """
    return FINEST - math.ceil(math.log2(deviation))


def stored_bits(deviation: float) -> int:
    """The largest b for which 32-bit integers hold noise in units of 2^-b.

    ``deviation`` is that of what is stored, in standard deviations of Z.
    """
    return math.floor(31 - math.log2(DEVIATIONS * deviation))


def grid_of(deviation: float, grid_bits: int) -> float:
    """h = ``deviation``·2^-``grid_bits``; 0 for a run without noise and without privacy."""
    if deviation == 0.0:
        return 0.0
    grid = math.ldexp(deviation, -grid_bits)
    if not 0 < grid < math.inf or math.isinf(1.0 / grid):  # NaN is neither
        raise ValueError(f"deviation={deviation}: must be positive, and neither tiny nor infinite")
    return grid


def largest_deviation(strategy: Strategy, steps: int) -> float:
    """The largest standard deviation of a step's noise, or a bound, in those of Z."""
    growth = float(strategy.noise_growth(steps).max())  # over that of uncorrelated noise
    if isinstance(strategy, Toeplitz):
        return growth * float(strategy.inverse_column(steps)[0])
    if isinstance(strategy, LowerTriangular):
        return growth / float(strategy.diagonals(steps)[0].min())
    return growth / float(strategy.column_norms(steps).max())


def largest_row_sum(strategy: Toeplitz | LowerTriangular, steps: int) -> float:
    """max_t Σ_s |C_{t,s}|."""
    if isinstance(strategy, Toeplitz):
        return float(np.abs(strategy.first_column(steps)).sum())
    sums = np.zeros(steps)
    for k, diagonal in enumerate(np.abs(strategy.diagonals(steps))):
        sums[k:] += diagonal[: steps - k]
    return float(sums.max())


def error_of_sums(terms: int, factors: float, deviation: float) -> float:
    """An upper bound on the error of a sum of ``terms`` products in float64.

    Args:
        factors: sum of the factors' absolute values.
        deviation: of what they are multiplied by, none of which is beyond ``DEVIATIONS`` of it.
    """
    return (terms + 1) * UNIT * factors * DEVIATIONS * deviation


def error_of_convolution(strategy: Toeplitz | LowerTriangular, steps: int, bits: int) -> float:
    """An upper bound on the rounding error of a number of Z where past normals are added up.

    A step's noise is off by e, half a unit and the error of adding up, and Z by C e. The computed
    C^-1 is another matrix, and Z is off by the difference of C times it from the identity.
    """
    # A row of C^-1 has n entries at most, and their sum is at most √n times its length.
    total = math.sqrt(steps) * largest_deviation(strategy, steps)
    off = 0.5 * 2.0**-bits + error_of_sums(steps, total, 1.0)
    return largest_row_sum(strategy, steps) * off + _residual(strategy, steps)


def _residual(strategy: Toeplitz | LowerTriangular, steps: int) -> float:
    """A bound on (C·(computed C^-1) - I) z, for z of 13 standard deviations in every step."""
    largest = largest_row_sum(strategy, steps)
    if isinstance(strategy, LowerTriangular):  # rows that back-substitution solves to rounding
        return error_of_sums(steps, largest * math.sqrt(steps), largest_deviation(strategy, steps))
    inverse = strategy.inverse_column(steps)
    product = strategy.apply(np.pad(inverse, (0, steps - len(inverse))))
    product[0] -= 1.0
    return 2.0 * DEVIATIONS * float(np.abs(product).sum())
