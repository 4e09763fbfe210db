"""From one Rényi order to (ε, δ) and back.

(docs/theory/composition.md#thm-renyi-conversion;
``test_conversion_is_proposition_12_and_its_inverse_is_on_the_safe_side``; Canonne, Kamath & Steinke
2020, Proposition 12, arXiv 2004.00010.)
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dptrain.core import Array, checks

_PAD = 1e-12  # relative rounding of the results, always to the safe side


def conversion_term(orders: npt.ArrayLike) -> Array:
    """log[(1 - 1/α)^α / (α - 1)], in the shape of ``orders``; any real α > 1."""
    orders = np.asarray(orders, dtype=np.float64)
    return np.asarray(orders * np.log1p(-1.0 / orders) - np.log(orders - 1.0))


def epsilon_at_order(divergence: npt.ArrayLike, *, order: float, delta: float) -> Array:
    """Least ε ≥ 0 at δ of an (α, divergence)-RDP mechanism, rounded up; the divergences' shape.

    Divergence 0 is ε = 0: both distributions are the same.

    Raises:
        ValueError: if α is not above 1 or δ is not in (0, 1).
    """
    divergence = np.asarray(divergence, dtype=np.float64)
    value = divergence + _offset(order, delta)
    value = value + _PAD * np.abs(value)
    return np.where(divergence > 0, np.maximum(value, 0.0), 0.0)


def largest_divergence(epsilon: float, *, order: float, delta: float) -> float:
    """Largest B, rounded down, such that (α, B)-RDP is (ε, δ)-DP; not positive if there is none.

    Raises:
        ValueError: if α is not above 1 or δ is not in (0, 1).
    """
    value = epsilon - _offset(order, delta)
    return value - _PAD * max(abs(value), epsilon) * 4.0


def _offset(order: float, delta: float) -> float:
    """The term that the conversion adds to the divergence."""
    checks.number("order", order, above=1, remedy="a Rényi order, e.g. 16")
    checks.number("delta", delta, above=0, below=1)
    return (float(conversion_term(order)) - math.log(delta)) / (order - 1.0)
