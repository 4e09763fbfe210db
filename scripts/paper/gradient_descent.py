"""Full-batch gradient descent with noise σ: ε, δ and steps by Rényi divergences and by GDP.

k steps are one Gaussian mechanism of sensitivity √k/σ: μ-GDP with μ = √k/σ, and of Rényi divergence
λk/(2σ²) at every order λ > 1. The Rényi numbers use Lemma 4 of Koskela, Tobaben & Honkela (Canonne,
Kamath & Steinke 2020), δ = e^{(λ-1)(R-ε)} (1-1/λ)^{λ-1}/λ, at the best of the given orders.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dptrain.accounting.losses import gaussian

Array = npt.NDArray[np.float64]

# Dense enough for four digits of ε and whole steps between λ = 1.01 and 10^4.
REAL_ORDERS: Array = 1.0 + np.geomspace(1e-2, 1e4, 60_001)
INTEGER_ORDERS: Array = np.arange(2.0, 33.0)


def gdp_epsilon(steps: int, sigma: float, delta: float) -> float:
    """ε(δ) of k steps: exact."""
    return gaussian.epsilon(delta, math.sqrt(steps) / sigma)


def gdp_steps(epsilon: float, sigma: float, delta: float) -> int:
    """The most steps that are (ε, δ)-DP."""
    return math.floor((sigma * gaussian.largest_mu(epsilon, delta)) ** 2)


def rdp_epsilon(steps: int, sigma: float, delta: float, orders: Array = REAL_ORDERS) -> float:
    """The ε that Rényi divergences show for k steps."""
    return float(np.min(orders * steps / (2.0 * sigma**2) + _conversion(delta, orders)))


def rdp_delta(steps: int, sigma: float, epsilon: float, orders: Array = REAL_ORDERS) -> float:
    """The δ that Rényi divergences show for k steps."""
    exponent = (orders - 1.0) * (orders * steps / (2.0 * sigma**2) - epsilon) + _log_factor(orders)
    return float(math.exp(min(0.0, float(exponent.min()))))


def rdp_steps(epsilon: float, sigma: float, delta: float, orders: Array = REAL_ORDERS) -> int:
    """The most steps for which Rényi divergences show (ε, δ)-DP."""
    room = (epsilon - _conversion(delta, orders)) * 2.0 * sigma**2 / orders
    return max(0, math.floor(float(room.max())))


def _log_factor(orders: Array) -> Array:
    return np.asarray((orders - 1.0) * np.log1p(-1.0 / orders) - np.log(orders))


def _conversion(delta: float, orders: Array) -> Array:
    return np.asarray((_log_factor(orders) - math.log(delta)) / (orders - 1.0))
