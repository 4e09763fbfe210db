"""The Gaussian trade-off: δ(ε), ε(δ) and μ of N(μ, 1) against N(0, 1), in log space."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, log_ndtr

from dptrain.accounting.losses.search import least_true
from dptrain.core import Array, checks

# Relative rounding of δ: far above the error of the formulas below (checked against 60 digits to
# be under 1e-10 for μ from 1e-6 to 1e3) and far below anything a user can notice.
DELTA_PAD = 1e-9
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def _mills(x: Array) -> Array:
    """Mills ratio (1 - Φ(x))/φ(x)."""
    ratio: Array = math.sqrt(math.pi / 2.0) * erfcx(x / math.sqrt(2.0))
    return ratio


def log_excess(start: npt.ArrayLike, width: npt.ArrayLike) -> Array:
    """log[Φ(-a) - e^{aξ + ξ²/2} Φ(-a - ξ)] for a = ``start``, ξ = ``width`` ≥ 0, rounded up.

    This is log E[(1 - e^{-ξ(Z - a)})_+] for a standard normal Z. φ(a + ξ) e^{aξ + ξ²/2} = φ(a), so
    it is log φ(a)·[M(a) - M(a + ξ)] with the Mills ratio M: no exponentials cancel however small
    the value is.
    """
    a, m = np.broadcast_arrays(np.asarray(start, float), np.asarray(width, float))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        gap = _mills(a) - _mills(a + m)
        # For a tiny ξ the difference is -ξ M'(a + ξ/2) + O(ξ³), and M' = xM - 1.
        middle = a + m / 2
        gap = np.where(m < 1e-5, m * (1.0 - middle * _mills(middle)), gap)
        far = -0.5 * a * a - _LOG_SQRT_2PI + np.log(gap)
        # For a << 0 the Mills ratio overflows; the value is near 1 and needs no care.
        ratio = log_ndtr(-a - m) - log_ndtr(-a) + m * a + 0.5 * m * m
        near = log_ndtr(-a) + np.log1p(-np.exp(np.minimum(ratio, 0.0)))
        value = np.where(a < -5.0, near, far)
    # Past a = 1e5 the Mills ratios share all their digits; Φ(-a) alone is an upper bound.
    value = np.where(np.isfinite(value) & (a < 1e5), value, log_ndtr(-a))
    return np.asarray(np.where(m > 0, np.minimum(value + DELTA_PAD, 0.0), -np.inf))


def log_delta(epsilon: npt.ArrayLike, mu: npt.ArrayLike) -> Array:
    """log δ(ε) = log[Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2)], rounded up (Dong, Roth & Su, GDP).

    Broadcasts ε ≥ 0 against μ ≥ 0, either possibly infinite; the shape is that of the broadcast.
    """
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(mu, float))
    result = np.full(epsilon.shape, -np.inf)
    result[np.isinf(mu)] = 0.0
    ordinary = (mu > 0) & np.isfinite(mu) & np.isfinite(epsilon)
    e, m = epsilon[ordinary], mu[ordinary]
    result[ordinary] = log_excess(e / m - m / 2, m)
    return result


def delta(epsilon: npt.ArrayLike, mu: npt.ArrayLike) -> Array:
    """δ(ε) of μ-GDP, rounded up; see ``log_delta``."""
    return np.exp(log_delta(epsilon, mu))


def epsilon(delta: float, mu: float) -> float:
    """Least ε ≥ 0 (rounded up, relative 1e-12) with δ(ε) ≤ ``delta`` under μ-GDP."""
    if mu == 0.0:
        return 0.0
    if not math.isfinite(mu):
        return math.inf
    log_target = math.log(delta)
    # Φ(μ/2 - ε/μ) bounds δ, and Φ(-x) ≤ e^{-x²/2}: this ε surely suffices.
    high = mu * (mu / 2 + math.sqrt(2.0 * max(-log_target, 0.0)) + 1e-6) * (1.0 + 1e-9)
    return least_true(
        lambda e: bool(log_delta(e, mu) <= log_target), low=0.0, high=high, tolerance=1e-12 * high
    )


def epsilons(delta: float, mu: npt.ArrayLike) -> Array:
    """``epsilon`` for many μ ≥ 0 at once, in their shape."""
    checks.number("delta", delta, above=0, below=1)
    wanted, inverse = np.unique(np.asarray(mu, float), return_inverse=True)
    log_target = math.log(delta)
    # As in ``epsilon``; infinite for an infinite μ, where no bisection is needed.
    high = wanted * (wanted / 2 + math.sqrt(-2.0 * log_target) + 1e-6) * (1.0 + 1e-9)
    low = np.zeros_like(high)
    high[log_delta(low, wanted) <= log_target] = 0.0
    for _ in range(42):  # a relative precision of 2^-42 = 2e-13
        with np.errstate(invalid="ignore"):
            middle = 0.5 * (low + high)
            enough = log_delta(middle, wanted) <= log_target
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high[inverse].reshape(np.shape(mu))


def largest_mu(epsilon: float, delta: float) -> float:
    """Largest μ (rounded down, relative 1e-12) that is (ε, δ)-DP; ε ≥ 0, δ in (0, 1)."""
    log_target = math.log(delta)

    def too_large(mu: float) -> bool:
        return bool(log_delta(epsilon, mu) > log_target)

    low, high = 0.0, 1.0
    while not too_large(high):
        low, high = high, 2.0 * high
    while low == 0.0:
        if too_large(high / 2):
            high /= 2
        else:
            low = high / 2
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if too_large(middle) else (middle, high)
    return low
