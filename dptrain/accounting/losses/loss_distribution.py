"""Privacy losses on an even grid, rounded up.

The mass of every interval of losses is split between two grid points around it so that both
distributions keep their mass, which can only raise δ(ε), also after composition
(docs/theory/composition.md#thm-discretization; ``test_two_steps_match_quadrature``; "Connect the
Dots", Doroshenko et al. 2022, arXiv 2207.04380).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from dptrain.core import Array

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class LossDistribution:
    """Masses ``exp(log_mass)`` at the losses ``spacing * (lowest + i)`` and ``infinity`` at ∞."""

    spacing: float
    lowest: int
    log_mass: Array
    infinity: float

    @property
    def losses(self) -> Array:
        """The finite losses, ascending."""
        return np.asarray(self.spacing * (self.lowest + np.arange(self.log_mass.size)), float)


def split_cells(
    *, spacing: float, low: Indices, high: Indices, upper: Array, lower: Array, above: float
) -> LossDistribution:
    """Discretize log(dP/dQ), known up to cells of losses, pessimistically.

    Among all pairs of measures of given total masses p and q whose losses lie in [l, u], the one
    that sits on l and u only has the greatest δ(ε) for every ε: (1 - e^{ε-L})_+ is, as a function
    of e^{-L}, convex, and both Σ 1·dP = p and Σ e^{-L} dP = q are fixed. Composition averages such
    functions, so cells may be replaced one at a time. Cells may overlap and be of any width.

    Args:
        spacing: distance h of the grid of losses.
        low: grid index at or below all losses of the cell, shape (m,).
        high: grid index at or above them, greater than ``low``, shape (m,).
        upper: P-mass of the cells, shape (m,).
        lower: Q-mass of the cells, shape (m,).
        above: P-mass of no cell; it is moved to infinity.
    """
    top, width = spacing * high, spacing * (high - low)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # E_P[e^{top - L}] of the cell lies in [1, e^width]; the share that goes to its lower end.
        log_ratio = np.log(lower) - np.log(upper) + top
        wide = np.exp(log_ratio - width) - np.exp(-width)
        share = np.where(width > 30.0, wide, np.expm1(log_ratio) / np.expm1(width))
    share = np.clip(np.nan_to_num(share, nan=0.0), 0.0, 1.0)
    lowest = int(low.min())
    size = int(high.max()) - lowest + 1
    mass = np.bincount(low - lowest, weights=upper * share, minlength=size)
    mass += np.bincount(high - lowest, weights=upper * (1.0 - share), minlength=size)
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    return LossDistribution(spacing, lowest, log_mass, above)


def connect_the_dots(
    *, spacing: float, lowest: int, upper: Array, lower: Array, below: float, above: float
) -> LossDistribution:
    """Discretize the loss log(dP/dQ) pessimistically, cell by cell of the grid itself.

    Args:
        spacing: distance h of the grid of losses.
        lowest: index of the first grid point.
        upper: P-mass of the losses between grid points i and i+1, shape (m,).
        lower: Q-mass of the same intervals, shape (m,).
        below: P-mass of losses under the grid; it is moved up to the first point.
        above: P-mass of losses over the grid; it is moved to infinity.
    """
    low = lowest + np.arange(upper.size)
    split = split_cells(
        spacing=spacing, low=low, high=low + 1, upper=upper, lower=lower, above=above
    )
    if below > 0.0:
        split.log_mass[0] = np.logaddexp(split.log_mass[0], np.log(below))
    return split
