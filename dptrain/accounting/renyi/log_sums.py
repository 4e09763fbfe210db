"""The sum inside the balls-in-bins Rényi divergence, for all orders at once.

Everything here works on a = G/σ² and returns log T_m, m = 0..A, with

    T_m = Σ_{r_1+…+r_b=m} Π_j 1/r_j! · exp( Σ_j r_j(r_j-1) a_jj/2 + Σ_{i<j} r_i r_j a_ij ) / b^m,

so that E_Q[(P/Q)^α] = α! T_α (docs/theory/balls-in-bins.md#thm-bins-renyi;
``test_enumeration_equals_the_sum_over_tuples``; Schuchardt & Kalinin 2026, Lemma 3.2, arXiv
2601.21636).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

from dptrain.core import Array


def renyi_from_log_sums(log_sums: Array) -> Array:
    """R_α for α = 0..A (+∞ for α = 0 and 1, which are not used) from log T_m."""
    orders = np.arange(log_sums.size, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = (log_sums + gammaln(orders + 1.0)) / (orders - 1.0)
    value[: min(2, value.size)] = np.inf
    return np.maximum(value, 0.0)


def _log_convolve(x: Array, y: Array) -> Array:
    """Logarithms of the coefficients of the product of two power series, same length."""
    size = x.size
    return np.array([logsumexp(x[: m + 1] + y[m::-1]) for m in range(size)])


def independent_log_sums(diagonal: Array, largest: int) -> Array:
    """log T_m for a diagonal ``a``: coefficients of a product of b power series.

    Bins whose diagonal entries agree to 1e-9 share the largest of them (rounding up) and their
    series is raised to a power by squaring: O(A² log b) per distinct value.
    """
    bins, counts = diagonal.size, np.arange(largest + 1, dtype=np.float64)
    common = counts * math.log(bins) + gammaln(counts + 1.0)
    total = np.full(largest + 1, -np.inf)
    total[0] = 0.0
    values = np.sort(diagonal)
    scale = max(float(values[-1]), 1e-300)
    breaks = np.flatnonzero(np.diff(values) > 1e-9 * scale) + 1
    for group in np.split(values, breaks):
        power = counts * (counts - 1.0) * float(group[-1]) / 2.0 - common
        remaining = group.size
        while remaining:
            if remaining % 2:
                total = _log_convolve(total, power)
            remaining //= 2
            if remaining:
                power = _log_convolve(power, power)
    return total


def enumeration_size(bins: int, largest: int) -> int:
    """Number of count vectors that ``enumerated_log_sums`` visits."""
    return math.comb(largest + bins, bins)


def enumerated_log_sums(a: Array, largest: int) -> Array:
    """log T_m for any ``a`` by visiting every count vector: for few bins, exact."""
    bins = a.shape[0]
    vectors = np.zeros((1, 0), dtype=np.int64)
    totals = np.zeros(1, dtype=np.int64)
    for _ in range(bins):
        room = largest - totals + 1
        parent = np.repeat(np.arange(room.size), room)
        count = np.arange(parent.size) - np.repeat(np.cumsum(room) - room, room)
        vectors = np.column_stack((vectors[parent], count))
        totals = totals[parent] + count
    r = vectors.astype(np.float64)
    log_weight = 0.5 * np.einsum("ki,ki->k", r @ a, r) - 0.5 * r @ np.diag(a)
    log_weight -= gammaln(r + 1.0).sum(axis=1) + totals * math.log(bins)
    order = np.argsort(totals, kind="stable")
    log_weight, totals = log_weight[order], totals[order]
    starts = np.searchsorted(totals, np.arange(largest + 1))
    peak = np.maximum.reduceat(log_weight, starts)
    return peak + np.log(np.add.reduceat(np.exp(log_weight - peak[totals]), starts))
