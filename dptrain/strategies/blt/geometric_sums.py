"""Finite geometric sums and their slopes, accurate however close the ratio is to one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.core import Array

# The Taylor series is used while n·|q| is below this bound. Its k-th term is below (n·q)^k/(k+1)!
# times the sum, so 16 terms leave less than 1e-18; above, no more than two digits cancel.
_SERIES_BELOW = 0.5
_TERMS = 16
_DIRECT_UP_TO = 1000  # terms of moments


def geometric(q: npt.ArrayLike, n: npt.ArrayLike) -> tuple[Array, Array]:
    """G(q) = Σ_{t<n} (1-q)^t and dG/dq.

    The ratio is given by its distance q from one, which a float holds to full relative precision
    where 1 - q does not. For small n·q the sum is the polynomial Σ_k C(n, k+1) (-q)^k.

    Args:
        q: any, as long as (1-q)^n is in range.
        n: number of terms ≥ 0, whole numbers; broadcast with q.

    Returns:
        The sum and its slope, of the shape that q and n broadcast to.
    """
    q, n, small = _broadcast(q, n)
    value, slope = np.empty(q.shape), np.empty(q.shape)
    value[small], slope[small] = _series(q[small], n[small], n[small], first=1)
    large = ~small
    value[large], slope[large] = _quotient(q[large], n[large])
    return value, slope


def weighted_geometric(q: npt.ArrayLike, n: npt.ArrayLike) -> tuple[Array, Array]:
    """H(q) = Σ_{t<n} (n-t) (1-q)^t and dH/dq, with arguments as ``geometric``.

    H = (n - (1-q) G)/q, which loses the digits of 1/(n·q); for small n·q it is the polynomial
    Σ_k C(n+1, k+2) (-q)^k.
    """
    q, n, small = _broadcast(q, n)
    value, slope = np.empty(q.shape), np.empty(q.shape)
    leading = n[small] * (n[small] + 1) / 2
    value[small], slope[small] = _series(q[small], n[small], leading, first=2)
    large = ~small
    distance = q[large]
    inner, inner_slope = _quotient(distance, n[large])
    outer = (n[large] - (1 - distance) * inner) / distance
    value[large] = outer
    slope[large] = (inner - (1 - distance) * inner_slope - outer) / distance
    return value, slope


class Moments(NamedTuple):
    """Sums over k = 1, …, m of G_k(q_j), the geometric sums of k terms, for several q_j.

    Attributes:
        total: Σ_k G_k(q_j), shape (d,).
        total_slope: Σ_k G'_k(q_j).
        product: Σ_k G_k(q_j) G_k(q_l), shape (d, d).
        product_slope: Σ_k G'_k(q_j) G_k(q_l): derivative in the first factor's q_j only.
    """

    total: Array
    total_slope: Array
    product: Array
    product_slope: Array


def geometric_moments(q: Array, m: int) -> Moments:
    """The ``Moments`` for k up to m ≥ 0, in O(√m d²).

    Blocks of B ≈ √m: G_{s+i} = G_s + r^s G_i with r^s = 1 - q G_s, so that a block's sums follow
    from those of the first. All terms are non-negative; nothing cancels.

    Args:
        q: shape (d,), 0 < q ≤ 1.
        m: number of terms.
    """
    if m <= _DIRECT_UP_TO:
        return _moments(q, np.arange(1, m + 1))
    block = math.isqrt(m)
    first, last = _moments(q, np.arange(1, block + 1)), m // block * block
    s, ds = geometric(q, np.arange(0, last, block)[:, None])
    u, du = 1 - q * s, -s - q * ds
    rest = _moments(q, np.arange(last + 1, m + 1))
    t, dt = first.total, first.total_slope
    across = s.T @ u * t
    return Moments(
        block * s.sum(axis=0) + u.sum(axis=0) * t + rest.total,
        block * ds.sum(axis=0) + du.sum(axis=0) * t + u.sum(axis=0) * dt + rest.total_slope,
        block * s.T @ s + across + across.T + u.T @ u * first.product + rest.product,
        block * ds.T @ s
        + ds.T @ u * t
        + du.T @ s * t[:, None]
        + du.T @ u * first.product
        + u.T @ s * dt[:, None]
        + u.T @ u * first.product_slope
        + rest.product_slope,
    )


def _moments(q: Array, k: npt.NDArray[np.int64]) -> Moments:
    value, slope = geometric(q, k[:, None])
    return Moments(value.sum(axis=0), slope.sum(axis=0), value.T @ value, slope.T @ value)


def _broadcast(q: npt.ArrayLike, n: npt.ArrayLike) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    q, n = np.broadcast_arrays(np.asarray(q, dtype=np.float64), np.asarray(n, dtype=np.float64))
    return q, n, np.abs(n * q) < _SERIES_BELOW


def _series(q: Array, n: Array, leading: Array, first: int) -> tuple[Array, Array]:
    """Σ_k a_k (-q)^k and its slope, a_0 = ``leading`` and a_{k+1}/a_k = (n-k-1)/(k+first+1)."""
    # Terms 1, 2, … of the sum, each a factor q short, so that the slope can use them.
    k = np.arange(1, _TERMS).reshape(-1, 1)
    ratios = np.concatenate(
        [
            -leading * (n - 1) / (first + 1) * np.ones((1, q.size)),
            -q * (n - k - 1) / (k + first + 1),
        ]
    )
    terms = np.cumprod(ratios, axis=0)
    return leading + q * terms.sum(axis=0), np.arange(1.0, _TERMS + 1) @ terms


def _quotient(q: Array, n: Array) -> tuple[Array, Array]:
    """(1 - r^n)/q and its slope, for r = 1 - q not near one (as measured by n·q)."""
    r = 1 - q
    value, before = np.empty(q.shape), np.empty(q.shape)  # before: r^(n-1)
    positive = r > 0
    log = np.log1p(-q[positive])
    value[positive] = -np.expm1(n[positive] * log) / q[positive]
    before[positive] = np.exp((n[positive] - 1) * log)
    other = ~positive
    before[other] = np.power(r[other], n[other] - 1)
    value[other] = (1 - r[other] * before[other]) / q[other]
    return value, (n * before - value) / q
