"""Power series of ((1 - αx)(1 - βx))^{-1/2} and of its reciprocal, in O(n) and without loss.

SGD with momentum β and weight decay α adds gradients up with the Toeplitz workload A_{α,β} of
generating function 1/((1 - αx)(1 - βx)) (Kalinin & Lampert 2024); α = 1, β = 0 are prefix sums.

Both series are moments, of the arcsine and of the semicircle law
(docs/theory/strategies.md#thm-square-root; ``test_signs_and_order``). So the first has positive,
non-increasing, log-convex coefficients, and those of the second are negative but for the first: two
facts that the strategies build their sensitivity on.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg.blas import dtbsv

from dptrain.core import Array, checks

_BLOCK = 1 << 16  # moments a call of the banded solver: a few MB


def checked_decay(alpha: float, beta: float) -> tuple[float, float]:
    """(α, β) as floats, with 0 < α ≤ 1 and 0 ≤ β < α."""
    alpha, beta = checks.number("alpha", alpha), checks.number("beta", beta)
    if not 0 < alpha <= 1:
        raise ValueError(
            f"alpha={alpha}: must be in (0, 1]; it is 1 - learning rate · weight decay, so 1 "
            "without weight decay"
        )
    if not 0 <= beta < alpha:
        raise ValueError(
            f"beta={beta}: the momentum must be in [0, alpha) = [0, {alpha}), with 0 for none"
        )
    return alpha, beta + 0.0  # -0.0 becomes 0.0: equal values have one JSON text


def square_root_coefficients(count: int, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """First ``count`` coefficients of A_{α,β}^{1/2}: 1, 1/2, 3/8, 5/16, … for prefix sums.

    Positive and non-increasing (see the module), also as floating-point numbers.

    Args:
        count: how many, at least 1.
        alpha: weight decay factor α in (0, 1].
        beta: momentum β in [0, α).

    Returns:
        Shape (count,), float64.
    """
    count = checks.integer("count", count)
    alpha, beta = checked_decay(alpha, beta)
    return _scaled(_beta_moments(count, alpha, beta, 0.5), alpha)


def inverse_square_root_coefficients(count: int, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """First ``count`` coefficients of A_{α,β}^{-1/2}: 1, -1/2, -1/8, -1/16, … for prefix sums.

    Positive at 0 and not positive after (see the module). Arguments, shape and errors as for
    ``square_root_coefficients``.
    """
    count = checks.integer("count", count)
    alpha, beta = checked_decay(alpha, beta)
    g = np.ones(count)
    if count > 1:
        g[1] = -(alpha + beta) / 2
    if count > 2:
        moments = _scaled(_beta_moments(count - 2, alpha, beta, 1.5), alpha)
        g[2:] = -((alpha - beta) ** 2) / 8 * moments
    return g


def _scaled(moments: Array, alpha: float) -> Array:
    """α^k times moment k."""
    if alpha == 1:
        return moments
    with np.errstate(under="ignore"):  # far out α^k is 0 in floating point
        return np.asarray(moments * alpha ** np.arange(moments.size))


def _beta_moments(count: int, alpha: float, beta: float, a: float) -> Array:
    """y_k = E[T^k], k < count, for T = q + (1 - q)·Beta(a, a), q = β/α (a = 1/2: arcsine law).

    The differential equation of the series gives
    (k + 2a - 1) y_k = (1 + q)(k + a - 1) y_{k-1} - q (k - 1) y_{k-2}, which loses digits to
    cancellation as q nears 1. For the decrements D_k = y_{k-1} - y_k it becomes

        (k + 2a - 1) D_k = q (k - 1) D_{k-1} + a (1 - q) y_{k-1}      (no negative term)
        y_k = y_{k-1} - D_k.

    Rounding keeps D_k ≥ 0 and hence y non-increasing. In the order D_1, y_1, D_2, y_2, … this is
    a unit lower-triangular system with two subdiagonals, which BLAS solves in compiled code.
    """
    if beta == 0:
        k = np.arange(1, count)
        return np.cumprod(np.concatenate([[1.0], 1 - a / (k + (2 * a - 1))]))
    q, gap = beta / alpha, (alpha - beta) / alpha
    y = np.ones(count)
    decrement = 0.0
    for start in range(1, count, _BLOCK):
        k = np.arange(start, min(start + _BLOCK, count))
        weight = k + (2 * a - 1)
        # Column i holds the multipliers of unknown i, negated: [1, one row below, two rows below].
        # Unknowns 0 and 1 are D and y before the block.
        system = np.zeros((3, 2 * k.size + 2), order="F")
        system[0] = 1
        system[2, 0:-2:2] = -q * (k - 1) / weight  # D_{k-1} in D_k
        system[1, 1:-2:2] = -a * gap / weight  # y_{k-1} in D_k
        system[2, 1:-2:2] = -1  # y_{k-1} in y_k
        system[1, 2::2] = 1  # D_k in y_k
        unknowns = np.zeros(system.shape[1])
        unknowns[:2] = decrement, y[start - 1]
        unknowns = dtbsv(2, system, unknowns, lower=1, diag=1)
        y[k] = unknowns[3::2]
        decrement = unknowns[-2]
    return y
