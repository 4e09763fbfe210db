"""From μ to (ε, δ) and back through the Rényi divergences αμ²/2 of all orders α > 1."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from dptrain.accounting.renyi import conversion_term
from dptrain.core import Array

# Any order gives a bound; between neighbors of this grid the best one loses under 1e-5 of ε.
_ORDERS = 1.0 + np.geomspace(1e-4, 1e8, 4000)
_PAD = 1e-12  # relative rounding, always to the safe side
_ROWS = 512


@functools.cache
def _offsets(delta: float) -> Array:
    """The conversion's summand at each order, rounded up (Canonne et al. 2020, Prop. 12)."""
    value = (conversion_term(_ORDERS) - math.log(delta)) / (_ORDERS - 1.0)
    return value + _PAD * np.abs(value)


def epsilons(delta: float, mu: npt.ArrayLike) -> Array:
    """Least ε over all orders at which R_α ≤ αμ²/2 is (ε, δ)-DP, rounded up, in the shape of μ.

    Never below ε of μ-GDP itself; 0 for μ = 0.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta}: must lie strictly between 0 and 1")
    offsets = _offsets(float(delta))
    wanted, inverse = np.unique(np.asarray(mu, float), return_inverse=True)
    found = np.empty_like(wanted)
    for at in range(0, wanted.size, _ROWS):
        rows = slice(at, at + _ROWS)
        half = 0.5 * (1.0 + _PAD) * wanted[rows, None] ** 2
        found[rows] = np.min(half * _ORDERS + offsets, axis=1)
    found = np.where(wanted > 0, np.maximum(found, 0.0), 0.0)
    return found[inverse].reshape(np.shape(mu))


def largest_mu(epsilon: float, delta: float) -> float:
    """Largest μ, rounded down, such that R_α ≤ αμ²/2 at all orders is (ε, δ)-DP; 0 if none is."""
    squares = 2.0 * (epsilon - _offsets(float(delta))) / _ORDERS
    best = float(squares.max())
    # Less by what ``epsilons`` rounds up by.
    return math.sqrt(best) * (1.0 - 1e-11) if best > 0 else 0.0
