"""Backward recursion for P/Q of b-min-sep sampling, over many outputs at once.

(docs/theory/min-sep.md#thm-min-sep-recursion; ``test_log_ratio_is_the_sum_over_patterns``.)
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array


def log_mixture(
    exponents: Array, half_norms: Array, *, probability: float, min_sep: int, warm_start: bool
) -> Array:
    """log P/Q by f_i = (1-p) f_{i+1} + p exp(u_i - h_i) f_{i+b}, with f_i = 1 for i ≥ n.

    Dong & Ganesh 2026, Theorem 5.1 (arXiv 2602.09338); rows are counted from 0. It runs on log f,
    so that exponents may have any size.

    Args:
        exponents: u_i = <c_i, y>/σ², shape (steps, …).
        half_norms: h_i = ‖c_i‖²/(2σ²), shape (steps,).
        probability: p.
        min_sep: b.
        warm_start: whether the bar before the first step is stationary rather than absent.

    Returns:
        An array of the shape of one row of exponents.
    """
    log_p = math.log(probability)
    log_not_p = math.log1p(-probability) if probability < 1 else -math.inf
    window = np.zeros((min_sep, *exponents.shape[1:]))  # row i at position i mod b
    for row in range(len(exponents) - 1, -1, -1):
        current, after = window[row % min_sep], window[(row + 1) % min_sep]
        taken = exponents[row] + (log_p - half_norms[row]) + current
        np.logaddexp(after + log_not_p, taken, out=current)
    if not warm_start:
        return window[0]
    # Available with weight 1, barred for each of 1..b-1 steps with weight p.
    window[1:] += log_p
    total: Array = np.logaddexp.reduce(window, axis=0)
    return total - math.log1p((min_sep - 1) * probability)


def log_ratio(law: MinSepLaw, sigma: float, outputs: npt.ArrayLike) -> Array:
    """log P(y)/Q(y) of given outputs y, shape (steps, k): shape (k,).

    Raises:
        ValueError: if the outputs have another number of rows.
    """
    y = np.asarray(outputs, dtype=np.float64)
    if y.ndim != 2 or y.shape[0] != law.steps:
        raise ValueError(f"outputs of shape {y.shape}: expected ({law.steps}, k)")
    return log_mixture(
        column_products(law, y) / sigma**2,
        law.squared_norms / (2.0 * sigma**2),
        probability=law.probability,
        min_sep=law.min_sep,
        warm_start=law.warm_start,
    )


def column_products(law: MinSepLaw, y: Array) -> Array:
    """C^T y: the inner products with the columns, for y of shape (steps, k)."""
    size = law.block_rows
    block = np.zeros((size, size + law.bands - 1))
    for k, value in enumerate(law.coefficients):
        block[np.arange(size), np.arange(size) + k] = value
    product = np.empty(y.shape)
    for first in range(0, law.steps, size):
        rows = y[first : first + size + law.bands - 1]
        last = min(first + size, law.steps)
        np.matmul(block[: last - first, : len(rows)], rows, out=product[first:last])
    return product
