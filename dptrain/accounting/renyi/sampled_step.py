"""Rényi divergence of one Poisson-sampled Gaussian step, for gradients of any norm."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from dptrain.core import Array, checks

# Relative rounding of ρ: far above the error of the quadrature (checked against 50 digits to be
# under 1e-12) and above what adding up a million charges in double precision can lose.
RELATIVE_PAD = 1e-9

LARGEST_ORDER = 1e4
"""The largest Rényi order that divergences are computed for."""

_EXPONENT = 60.0  # the trapezoidal rule is off by a factor of at most 1 ± 2e^-60
_REACH = 12.0  # standard deviations of the integrand beyond its outermost bump; e^-72
# Where the integral is replaced by its bound: less noise than anybody uses, and it is tight there.
_LARGEST_SHIFT, _LARGEST_PEAK = 10.0, 2000.0
_SERIES_BELOW, _SERIES_TERMS = 0.02, 8


def step_divergence(
    ratios: npt.ArrayLike, *, order: float, probability: float, sigma: float
) -> Array:
    """ρ_α(q, r): the larger of R_α(P‖Q) and R_α(Q‖P), rounded up, in the shape of ``ratios``.

    Q = N(0, σ²) and P = (1-q) Q + q N(r, σ²): one step in which a gradient of norm rR takes part
    with probability q. R_α(P‖Q) is never below R_α(Q‖P) (Mironov et al. 2019, Theorem 5, arXiv
    1908.10530), so it is the maximum. For q = 1 it is α r²/(2σ²). Never decreases in r.

    Args:
        ratios: r in [0, 1].
        order: real α in (1, 1e4].
        probability: q in (0, 1].
        sigma: σ > 0, in units of the clipping norm.

    Raises:
        ValueError: if a value is out of range.
    """
    checks.number("order", order, above=1, maximum=LARGEST_ORDER, remedy="e.g. 16")
    checks.probability("probability", probability)
    checks.number("sigma", sigma, above=0)
    wanted = np.asarray(ratios, dtype=np.float64)
    if not ((wanted >= 0) & (wanted <= 1)).all():
        raise ValueError("ratios: norms divided by the clipping norm must lie in [0, 1]")
    shifts, inverse = np.unique(wanted / sigma, return_inverse=True)  # ascending
    if probability == 1.0:
        value = 0.5 * order * shifts**2
    else:
        moments = [_log_moment(float(m), order, probability) for m in shifts]
        value = np.array(moments, dtype=np.float64) / (order - 1.0)
    # More noise is post-processing: what rounding alone would make smaller is raised again.
    value = np.maximum.accumulate(value * (1.0 + RELATIVE_PAD))
    return np.asarray(value[inverse].reshape(wanted.shape))


def _log_moment(shift: float, order: float, probability: float) -> float:
    """log E[(1+u)^α], u = q(e^{mx - m²/2} - 1), x standard normal, m = ``shift`` = r/σ.

    E u = 0, so the moment is 1 + E g with g = (1+u)^α - 1 - αu ≥ 0, which keeps its digits when m
    is tiny. Trapezoidal rule of spacing h: on the lines Im x = ±d with d ≤ π/m the integrand is
    analytic up to there and at most e^{d²/2} times what it is on the real line, because
    |1-q + q e^z| ≤ 1-q + q e^{Re z}; so its error is at most 2 e^{d²/2 - 2πd/h} of the moment. The
    logarithm of the integrand has a slope between -x and αm - x, so beyond [-12, αm + 12] lies
    less than a share (αm + 2) e^{-72}.
    """
    if shift == 0.0:
        return 0.0
    if shift > _LARGEST_SHIFT or order * shift > _LARGEST_PEAK:
        # (1-q + q e^z)^α ≤ 1-q + q e^{αz}
        peak = math.log(probability) + 0.5 * order * (order - 1.0) * shift**2
        return float(np.logaddexp(math.log1p(-probability), peak))
    d = min(math.pi / shift, math.sqrt(2.0 * _EXPONENT))
    h = 2.0 * math.pi * d / (_EXPONENT + 0.5 * d * d)
    last = math.ceil((order * shift + _REACH) / h)
    x = h * np.arange(-math.ceil(_REACH / h), last + 1, dtype=np.float64)
    log_weights = math.log(h / math.sqrt(2.0 * math.pi)) - 0.5 * x * x
    log_g = _log_excess(shift * x - 0.5 * shift * shift, order, probability)
    return float(np.logaddexp(0.0, logsumexp(log_weights + log_g)))


def _log_excess(z: Array, order: float, probability: float) -> Array:
    """log[(1+u)^α - 1 - αu] for u = q(e^z - 1), rounded up where (1+u)^α is beyond e^600."""
    small_z = np.minimum(z, 500.0)
    u = probability * np.expm1(small_z)
    log_1pu = np.where(z > 500.0, math.log(probability) + z, np.log1p(u))
    power = order * log_1pu
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # = (1+u)((1+u)^(α-1) - 1) - (α-1)u, which is also precise for α near 1
        exact = np.log((1.0 + u) * np.expm1((order - 1.0) * log_1pu) - (order - 1.0) * u)
        tail = np.ones_like(u)
        for k in range(_SERIES_TERMS, 0, -1):  # Σ_k of the binomial series, from u² on
            tail = 1.0 + (order - 1.0 - k) / (k + 2.0) * u * tail
        series = np.log(0.5 * order * (order - 1.0) * u * u * tail)
    value = np.where(np.abs(order * u) < _SERIES_BELOW, series, exact)
    return np.where(power > 600.0, power, value)
